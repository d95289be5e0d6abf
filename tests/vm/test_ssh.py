"""SSH to a real machine: who comes in, a command, a terminal, files, a port, and sleep."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.client import Api
from kit.server import Server
from kit.until import until


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def port() -> int:
    return _free_port()


@pytest.fixture(scope="module")
def own(port: int) -> Iterator[Server]:
    server = Server.make(ssh_port=port)
    try:
        server.start()
        yield server
    finally:
        server.close()


def test_ssh_from_end_to_end(own: Server, port: int, tmp_path: Path) -> None:
    with Api(own.url, own.token) as api:
        box = api.create(name="box", ttl_seconds=600)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
        told = api.call("GET", "/v1/ssh")
        assert (told["enabled"], told["port"]) == (True, port)
        (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {told['host_key']}\n")
        key = api.call("POST", "/v1/ssh-keys", json={"public_key": (tmp_path / "key.pub").read_text()})
        options = ["-F", "none", "-i", str(tmp_path / "key"), "-o", f"UserKnownHostsFile={tmp_path / 'known'}"]
        options += ["-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"]

        def ssh(*words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
            command = ["ssh", *options, "-p", str(port), *words]
            return subprocess.run(command, input=given, capture_output=True, timeout=120, check=False)

        done = ssh("box@127.0.0.1", "id -un; cat; exit 7", given=b"given")
        assert (done.returncode, done.stdout) == (7, b"root\ngiven"), done.stderr
        assert b"/dev/pts/" in ssh("-tt", f"{box.id}@127.0.0.1", "tty").stdout
        data = os.urandom(3_000_000)
        (tmp_path / "up").write_bytes(data)
        for number, mode in enumerate(("-O", "-s")):
            scp = ["scp", mode, "-q", *options, "-P", str(port)]
            subprocess.run([*scp, tmp_path / "up", f"box@127.0.0.1:/tmp/up{number}"], check=True, timeout=120)
            subprocess.run([*scp, f"box@127.0.0.1:/tmp/up{number}", tmp_path / "down"], check=True, timeout=120)
            assert (tmp_path / "down").read_bytes() == data
        api.call("POST", f"/v1/sandboxes/{box.id}/hibernate")
        assert ssh("box@127.0.0.1", "echo woken").stdout == b"woken\n"
        waiting = subprocess.Popen(
            ["ssh", *options, "-p", str(port), "box@127.0.0.1", "echo up; sleep 1000"], stdout=subprocess.PIPE
        )
        try:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == b"up\n"
            api.call("DELETE", f"/v1/ssh-keys/{key['id']}")
            until(lambda: waiting.poll() is not None)
        finally:
            waiting.kill()
            waiting.wait()
        assert ssh("box@127.0.0.1", "true").returncode == 255
