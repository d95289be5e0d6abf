"""How long a small command takes, what of it is ours, and how fast files move.

"ours" is the time of the HTTP call less the time that the guest itself measured for the command: server, link,
and the agent's own work before the start and after the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from common import Report, client, create, delete, facts, milliseconds, must, parser

CHUNK = 256 * 1024


def server_pid() -> int | None:
    """The server's process, if it is on this machine: the one that listens where the benchmark asks."""
    port = urlsplit(os.environ.get("CLOCHE_API_URL", "")).port or 8600
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                listening.add(f"socket:[{fields[9]}]")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            if not any(part.endswith(b"cloche-server") for part in argv):
                continue
            if any(str(fd.readlink()) in listening for fd in (entry / "fd").iterdir()):
                return int(entry.name)
        except OSError:
            continue
    return None


def rss_mib(pid: int | None) -> float:
    if pid is None:
        return float("nan")
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1048576


def commands(api: httpx.Client, sandbox_id: str, runs: int, report: Report) -> None:
    for name, body, target in (
        ("exec true (argv)", {"argv": ["/bin/true"]}, 30.0),
        ("exec true (shell)", {"cmd": "true"}, 30.0),
    ):
        for _ in range(5):
            must(api.post(f"/sandboxes/{sandbox_id}/exec", json=body))
        total, ours = [], []
        for _ in range(runs):
            began = time.perf_counter()
            result = must(api.post(f"/sandboxes/{sandbox_id}/exec", json=body))
            took = milliseconds(began)
            total.append(took)
            ours.append(took - result["duration_us"] / 1000)
        report.add(name, total, target=target)
        report.add(f"{name}: ours", ours, target=6.0)


def body(size: int) -> Iterator[bytes]:
    block = os.urandom(CHUNK)
    for _ in range(size // CHUNK):
        yield block


def files(api: httpx.Client, sandbox_id: str, megabytes: int, runs: int, report: Report) -> None:
    pid = server_pid()
    up, down, growth = [], [], []
    for _ in range(runs):
        before = peak = rss_mib(pid)
        began = time.perf_counter()
        must(
            api.put(
                f"/sandboxes/{sandbox_id}/fs",
                params={"path": "/root/big"},
                content=body(megabytes * 1000 * 1000),
                headers={"Content-Type": "application/octet-stream"},
            )
        )
        up.append(megabytes / (time.perf_counter() - began))
        peak = max(peak, rss_mib(pid))
        began = time.perf_counter()
        count = 0
        with api.stream("GET", f"/sandboxes/{sandbox_id}/fs", params={"path": "/root/big"}) as response:
            for chunk in response.iter_bytes(CHUNK):
                count += len(chunk)
                if count % (CHUNK * 64) == 0:
                    peak = max(peak, rss_mib(pid))
        down.append(count / 1e6 / (time.perf_counter() - began))
        growth.append(max(0.0, peak - before))
    report.add(f"upload {megabytes} MB", up, "MB/s", 25)
    report.add(f"download {megabytes} MB", down, "MB/s", 25)
    report.add("server memory growth meanwhile", growth, "MiB", 32)
    report.add("server memory", [rss_mib(pid)], "MiB", 150)


def main() -> None:
    options = parser(__doc__, 100)
    options.add_argument("--megabytes", type=int, default=200, help="size of the file")
    options.add_argument("--transfers", type=int, default=3, help="how often the file is moved")
    args = options.parse_args()
    with client() as api:
        report = Report("exec", facts(api))
        sandbox = create(api)
        try:
            commands(api, sandbox["id"], args.runs, report)
            if args.transfers:
                files(api, sandbox["id"], args.megabytes, args.transfers, report)
        finally:
            delete(api, sandbox["id"])
        report.finish()


if __name__ == "__main__":
    main()
