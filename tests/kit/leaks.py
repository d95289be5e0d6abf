"""Whether a data directory holds exactly what the API of its server knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kit import layers, procs, walls
from kit.server import Server


def settled(check: Callable[[], list[str]], seconds: float) -> list[str]:
    """What `check` still complains about after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (problems := check()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return problems


def unknown_to_api(server: Server, seconds: float = 30.0) -> list[str]:
    """Directories, processes, sockets, disk layers and snapshots that belong to no listed sandbox and to no pool."""
    return settled(lambda: _compare(server), seconds)


def _compare(server: Server) -> list[str]:
    before = server.api.metrics()
    listed = {item["id"]: item["status"] for item in server.api.list()}
    directories, machines = server.directories(), set(server.machines())
    groups = walls.groups(server.data)
    limited = walls.limited() and server.settings.get("jail") != "off"
    sockets = {Path(path).parent.name for path in procs.unix_sockets(server.data / "sandboxes")}
    pooled = sum(v for k, v in before.items() if k.startswith("cloche_pool_machines{"))
    running = {sandbox_id for sandbox_id, status in listed.items() if status in {"running", "paused"}}
    asleep = {sandbox_id for sandbox_id, status in listed.items() if status == "hibernated"}
    problems = [f"sandbox {i} is listed, and has no directory" for i in (running | asleep) - directories]
    problems += [f"sandbox {i} is listed, and has no process" for i in running - machines]
    problems += [f"sandbox {i} is listed, and nothing limits it" for i in (running - groups if limited else ())]
    problems += [f"sandbox {i} is hibernated, and has a process" for i in asleep & machines]
    for what, found in (
        ("directories", directories),
        ("processes", machines),
        ("socket owners", sockets),
        ("groups", groups),
    ):
        extra = found - set(listed)
        if len(extra) != pooled:
            problems.append(f"{what} of no sandbox: {sorted(extra)}, while the pools hold {pooled:g}")
    problems += layers.problems(server, directories - set(listed))
    problems += layers.litter(server, listed)
    for state in ("creating", "deleting", "hibernating", "waking"):
        if before.get(f'cloche_sandboxes{{status="{state}"}}'):
            problems.append(f"a sandbox is still {state}")
    return problems


def left_after_end(data: Path, seconds: float = 10.0) -> list[str]:
    """What is left of a server that was stopped together with its sandboxes."""

    def check() -> list[str]:
        problems = [f"process {p.pid} {p.cmdline[:120]!r}" for p in procs.below(data)]
        problems += [f"socket {path}" for path in procs.unix_sockets(data)]
        problems += [f"mount {path}" for path in procs.mounts(data)]
        problems += [f"process {pid} with the user id {uid}" for pid, uid in walls.jailed(data).items()]
        problems += [f"control group {name}" for name in walls.groups(data)]
        problems += [f"staging directory {path}" for path in data.glob("*/.staging-*")]
        return problems

    return settled(check, seconds)
