"""The clients of OpenSSH, and what they need to know to reach the sandboxes of one server."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kit.client import Api

Done = subprocess.CompletedProcess[bytes]


@dataclass(frozen=True)
class OpenSsh:
    """`folder` has the client's key, and what it knows of the server. `key_id`: the key as the server knows it."""

    port: int
    folder: Path
    key_id: str

    @classmethod
    def make(cls, api: Api, port: int, folder: Path) -> OpenSsh:
        """Makes a key and has the server accept it."""
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
        told = api.call("GET", "/v1/ssh")
        assert (told["enabled"], told["port"]) == (True, port)
        (folder / "known").write_text(f"[127.0.0.1]:{port} {told['host_key']}\n")
        made = api.call("POST", "/v1/ssh-keys", json={"public_key": (folder / "key.pub").read_text()})
        return cls(port, folder, made["id"])

    def options(self) -> list[str]:
        told = {
            "UserKnownHostsFile": str(self.folder / "known"),
            "IdentityFile": str(self.folder / "key"),
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
        }
        return ["-F", "none", *(word for name, value in told.items() for word in ("-o", f"{name}={value}"))]

    def command(self, words: Sequence[str], flags: Sequence[str] = (), box: str = "box") -> list[str]:
        return ["ssh", *self.options(), "-p", str(self.port), *flags, f"{box}@127.0.0.1", *words]

    def run(self, *words: str, given: bytes = b"", flags: Sequence[str] = (), box: str = "box") -> Done:
        return run(self.command(words, flags, box), given)

    def scp(self, *words: str | Path) -> None:
        done = run(["scp", "-q", *self.options(), "-P", str(self.port), *map(str, words)])
        assert done.returncode == 0, done.stderr

    def sftp(self, batch: str, flags: Sequence[str] = ()) -> None:
        command = ["sftp", *self.options(), "-P", str(self.port), *flags, "-b", "-", "box@127.0.0.1"]
        done = run(command, batch.encode())
        assert done.returncode == 0, done.stderr


def run(command: Sequence[str], given: bytes = b"") -> Done:
    return subprocess.run(command, input=given, capture_output=True, timeout=120, check=False)
