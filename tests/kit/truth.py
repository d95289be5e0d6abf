"""Whether all that is told about sandboxes is true: API, database, process table and disk agree."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from kit import leaks, procs
from kit.client import Box
from kit.server import Server


def check(server: Server, seconds: float = 30.0) -> None:
    """Fails unless everything agrees within `seconds`."""
    assert server.running, f"the server has ended:\n{server.log_tail()}"
    problems = leaks.settled(lambda: _problems(server), seconds)
    assert not problems, f"{problems}\n{server.log_tail()}"


def usable(*boxes: Box) -> None:
    """Each of them runs, and runs commands."""
    for box in boxes:
        assert box.refresh()["status"] == "running"
        assert box.sh("echo alive; hostname").split()[0] == "alive"


def whole(server: Server, **body: object) -> None:
    """A new sandbox can be made and used and deleted, and all is well afterwards."""
    box = server.api.create(**body)
    assert box.sh("echo new") == "new\n"
    box.delete()
    check(server)


def _problems(server: Server) -> list[str]:
    problems = [f"zombie {pid} of the server" for pid in zombies(server.pid)]
    problems += leaks.unknown_to_api(server, seconds=0)
    problems += [f"left of a bake: {path}" for path in staged(server.data)]
    problems += slots(server)
    problems += [f"working there: {p.cmdline[:100]!r}" for p in helpers(server)]
    listed = {(item["id"], item["status"]) for item in server.api.list()}
    recorded = set(living_rows(server.data))
    if listed != recorded:
        problems.append(f"the API says {sorted(listed - recorded)}, the database {sorted(recorded - listed)}")
    return problems


def slots(server: Server) -> list[str]:
    """A machine without a slot, slots without a machine, and whatever else is mounted below the data directory."""
    net = server.data / "net"
    found = {Path(path) for path in procs.mounts(server.data)}
    named = {path.name for path in found if path.parent == net and not path.name.startswith("ready-")}
    machines = set(server.machines())
    problems = [f"mounted: {path}" for path in found if path.parent != net]
    problems += [f"machine {name} has no slot" for name in machines - named]
    problems += [f"slot {name} has no machine" for name in named - machines]
    problems += [f"nothing is mounted on {path}" for path in net.iterdir() if path not in found]
    return problems


def zombies(parent: int) -> list[int]:
    """Children of a process that have ended and were not reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] == "Z" and int(fields[1]) == parent:
                    found.append(int(entry.name))
    return found


def staged(data: Path) -> list[Path]:
    """Directories of bakes and of interrupted removals, and what a fork continues from."""
    return [path for path in data.glob("*/.*") if path.name.startswith((".staging-", ".removed-", ".fork-"))]


def helpers(server: Server) -> list[procs.Proc]:
    """Processes of the data directory that are neither the server, nor a machine below `sandboxes/`, nor its netd."""
    machines = {proc.pid for proc in server.machines().values()}
    others = [p for p in procs.below(server.data) if p.pid != server.pid and p.pid not in machines]
    netds = [p for p in others if "cloche_server.netd" in p.cmdline.split("\0")]
    return [p for p in others if p not in netds[:1]]


def living_rows(data: Path) -> list[tuple[str, str]]:
    """Id and state of every record that is not deleted."""
    with contextlib.closing(sqlite3.connect(f"file:{data}/cloche.db?mode=ro", uri=True)) as db:
        return [(str(i), str(s)) for i, s in db.execute("SELECT id, status FROM sandboxes WHERE status <> 'deleted'")]
