"""What an idle sandbox costs: private memory and CPU of each VMM process, and of the server."""

from __future__ import annotations

import os
import time
from pathlib import Path

from common import Report, client, create, delete, facts, parser
from exec import rss_mib, server_pid

TICKS = os.sysconf("SC_CLK_TCK")


def vmm_pids(ids: list[str]) -> list[int]:
    """The VMM processes of these sandboxes."""
    wanted = {f"guest=cloche-{i}".encode() for i in ids}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted & set((entry / "cmdline").read_bytes().split(b"\0")):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def private_mib(pid: int) -> float:
    """Memory that only this process has, in MiB."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1])
    return total / 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def main() -> None:
    options = parser(__doc__, 60)
    options.add_argument("--seconds", type=int, default=30, help="how long the CPU is watched")
    args = options.parse_args()
    with client() as api:
        report = Report("density", facts(api))
        ids: list[str] = []
        try:
            for _ in range(args.runs):
                ids.append(create(api)["id"])
            time.sleep(10)
            pids = vmm_pids(ids)
            assert len(pids) == len(ids), f"{len(pids)} processes for {len(ids)} sandboxes"
            report.add("private memory of one", [private_mib(pid) for pid in pids], "MiB", 60)
            before, server = {pid: cpu_seconds(pid) for pid in pids}, server_pid()
            own = cpu_seconds(server) if server else 0.0
            time.sleep(args.seconds)
            report.add(
                "CPU of one", [(cpu_seconds(p) - before[p]) / args.seconds * 100 for p in pids], "% of a core", 1.5
            )
            if server:
                report.add("CPU of the server", [(cpu_seconds(server) - own) / args.seconds * 100], "% of a core")
                report.add("memory of the server", [rss_mib(server)], "MiB", 150)
        finally:
            for sandbox_id in ids:
                delete(api, sandbox_id)
        report.finish()


if __name__ == "__main__":
    main()
