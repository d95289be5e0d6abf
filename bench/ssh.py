"""How fast files move by sftp, beside the file API in the same run, and how long a command takes by `ssh`.

    python bench/ssh.py [--runs N] [--megabytes N]

The server needs `ssh_port`. The clients are OpenSSH's own, on this machine: their work is in the figures. "Server's
processor" is the time that the server needs on one processor for a megabyte; it bounds what one server can move, and
does not depend on what else the machine does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from common import Report, client, create, delete, facts, milliseconds, must, parser
from exec import CHUNK, rss_mib, server_pid

OCTETS = {"Content-Type": "application/octet-stream"}


class Shell:
    """OpenSSH's clients, for one sandbox."""

    def __init__(self, api: httpx.Client, sandbox_id: str, folder: Path) -> None:
        told = must(api.get("/ssh"))
        if not told["enabled"]:
            sys.exit("the server offers no SSH: start it with --ssh-port")
        host, port = urlsplit(str(api.base_url)).hostname, told["port"]
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
        (folder / "known").write_text(f"[{host}]:{port} {told['host_key']}\n")
        public = (folder / "key.pub").read_text()
        made = must(api.post("/ssh-keys", json={"public_key": public, "comment": "bench"}), 201)
        self.key_id = made["id"]
        self.to = f"{sandbox_id}@{host}"
        options = {"UserKnownHostsFile": folder / "known", "IdentityFile": folder / "key", "BatchMode": "yes"}
        self.options = ["-F", "none", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        self.port = str(port)
        self.master = ["-o", f"ControlPath={folder}/m"]

    def ssh(self, *words: str) -> None:
        command = ["ssh", *self.options, "-p", self.port, *words[:-1], self.to, words[-1]]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def sftp(self, batch: str) -> None:
        command = ["sftp", "-q", *self.options, "-P", self.port, "-b", "-", self.to]
        subprocess.run(command, input=batch.encode(), check=True, stdout=subprocess.DEVNULL)


def processor_seconds(pid: int | None) -> float:
    """Of the server, so far."""
    if pid is None:
        return float("nan")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def put(api: httpx.Client, sandbox_id: str, source: Path) -> None:
    with source.open("rb") as file:
        must(api.put(f"/sandboxes/{sandbox_id}/fs", params={"path": "/root/api"}, content=file, headers=OCTETS))


def get(api: httpx.Client, sandbox_id: str) -> None:
    with api.stream("GET", f"/sandboxes/{sandbox_id}/fs", params={"path": "/root/api"}) as answer:
        for _ in answer.iter_raw(CHUNK):
            pass


def files(api: httpx.Client, sandbox_id: str, shell: Shell, source: Path, runs: int, report: Report) -> None:
    megabytes, pid = source.stat().st_size / 1e6, server_pid()
    ways: dict[str, Callable[[], None]] = {
        "sftp up": lambda: shell.sftp(f"put {source} /root/sftp\n"),
        "file API up": lambda: put(api, sandbox_id, source),
        "sftp down": lambda: shell.sftp(f"get /root/sftp {source}.back\n"),
        "file API down": lambda: get(api, sandbox_id),
    }
    speed: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    growth = []
    for _ in range(runs):
        before = rss_mib(pid)
        for name, way in ways.items():
            began, worked = time.perf_counter(), processor_seconds(pid)
            way()
            speed[name].append(megabytes / (time.perf_counter() - began))
            used[name].append((processor_seconds(pid) - worked) / megabytes * 1000)
        growth.append(rss_mib(pid) - before)
        if Path(f"{source}.back").read_bytes() != source.read_bytes():
            sys.exit("sftp has brought back something else")
    for name in ways:
        report.add(name, speed[name], "MB/s", target=25.0 if name.startswith("sftp") else None)
        report.add(f"{name}: server's processor", used[name], "ms/MB")
    report.add("growth of the server in one run", growth, "MiB")


def commands(shell: Shell, runs: int, report: Report) -> None:
    shell.ssh("-M", *shell.master, "-o", "ControlPersist=60", "true")
    try:
        for name, flags, target in (
            ("ssh true, a connection each", (), None),
            ("ssh true, one connection", shell.master, None),
        ):
            took = []
            for _ in range(runs):
                began = time.perf_counter()
                shell.ssh(*flags, "true")
                took.append(milliseconds(began))
            report.add(name, took, target=target)
    finally:
        subprocess.run(["ssh", *shell.master, "-O", "exit", shell.to], check=False, capture_output=True)


def main() -> None:
    options = parser(__doc__, 5)
    options.add_argument("--megabytes", type=int, default=50)
    chosen = options.parse_args()
    with client() as api, tempfile.TemporaryDirectory(prefix="bs-") as made:
        folder = Path(made)
        report = Report("ssh", facts(api))
        sandbox_id = create(api)["id"]
        shell = Shell(api, sandbox_id, folder)
        try:
            (folder / "source").write_bytes(os.urandom(chosen.megabytes * 1_000_000))
            files(api, sandbox_id, shell, folder / "source", chosen.runs, report)
            commands(shell, chosen.runs * 4, report)
        finally:
            must(api.delete(f"/ssh-keys/{shell.key_id}"), 204)
            delete(api, sandbox_id)
        report.finish()


if __name__ == "__main__":
    main()
