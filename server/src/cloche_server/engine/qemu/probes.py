"""The wall around a running QEMU, tried from the host's side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.probes import Probe
from cloche_server.engine.qemu.launch import UID_FILE
from cloche_server.engine.qemu.wall import INITRD, KERNEL, MEMORY, Wall
from cloche_server.host import inspect, overlay, uids
from cloche_server.host.jail import NAMESPACES

_CAPABILITIES: Final = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
#: A filter of the jail and one of QEMU itself.
OF_BOTH: Final = 2
_DEVICES: Final = frozenset({"/dev/null", "/dev/net/tun", "/dev/kvm", "/dev/urandom"})


@dataclass(frozen=True, slots=True)
class Suspect:
    """A running machine. `disk`: the layer it writes to; `memory`: the file on the host that it has mapped."""

    machine_id: str
    pid: int
    directory: Path
    disk: Path
    memory: Path


class NotHeld(Exception):
    """A probe got through, or could not be made; the text says what was seen."""


def probe_vmm(wall: Wall | None, suspect: Suspect) -> list[Probe]:
    """All of them, each really tried. Blocking."""
    return [_tried(name, check, wall, suspect) for name, check in CHECKS]


def _tried(name: str, check: Callable[[Wall, Suspect], str], wall: Wall | None, suspect: Suspect) -> Probe:
    if wall is None:
        return Probe(name, False, "this server runs QEMU without a jail (CLOCHE_JAIL=off)")
    try:
        return Probe(name, True, check(wall, suspect))
    except NotHeld as found:
        return Probe(name, False, str(found))
    except (OSError, LookupError, ValueError) as error:
        return Probe(name, False, f"it could not be tried: {error}")


def _own_user(wall: Wall, suspect: Suspect) -> str:
    fields = inspect.status(suspect.pid)
    numbers = {int(word) for name in ("Uid", "Gid") for word in fields[name].split()}
    if len(numbers) != 1 or 0 in numbers:
        raise NotHeld(f"it runs as the users and groups {sorted(numbers)}")
    uid = numbers.pop()
    if str(uid) != (suspect.directory / UID_FILE).read_text():
        raise NotHeld(f"it runs as {uid}, which is not what it was given")
    others = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) != suspect.pid and uids.uid_of(int(entry.name)) == uid
    ]
    if others:
        raise NotHeld(f"the processes {others} have the same user id")
    if uid not in wall.uids:
        raise NotHeld(f"the user id {uid} is outside of what this server gives out")
    return f"user and group {uid}, of no other process"


def _no_capabilities(_: Wall, suspect: Suspect) -> str:
    fields = inspect.status(suspect.pid)
    left = [name for name in _CAPABILITIES if int(fields[name], 16)]
    if left:
        raise NotHeld(f"{', '.join(f'{name}={fields[name]}' for name in left)}")
    return "every set is empty, the bounding set too"


def _no_new_privileges(_: Wall, suspect: Suspect) -> str:
    if inspect.status(suspect.pid)["NoNewPrivs"] != "1":
        raise NotHeld("a set-uid program would change its user")
    return "no program can give it privileges"


def _seccomp(_: Wall, suspect: Suspect) -> str:
    fields = inspect.status(suspect.pid)
    if fields["Seccomp"] != "2":
        raise NotHeld("system calls are not filtered")
    filters = int(fields.get("Seccomp_filters", "2"))  # older kernels do not tell
    if filters < OF_BOTH:
        raise NotHeld("only one of the two filters is there, of the jail and of QEMU")
    return f"system calls are filtered, by {filters} filters"


def _namespaces(_: Wall, suspect: Suspect) -> str:
    shared = [kind for kind in NAMESPACES if inspect.namespace(suspect.pid, kind) == inspect.namespace("self", kind)]
    if shared:
        raise NotHeld(f"shared with the host: {', '.join(shared)}")
    mine = {kind: inspect.namespace(suspect.pid, kind) for kind in NAMESPACES}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != suspect.pid:
            try:
                same = [kind for kind in NAMESPACES if inspect.namespace(int(entry.name), kind) == mine[kind]]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if same:
                raise NotHeld(f"shared with the process {entry.name}: {', '.join(same)}")
    return f"{', '.join(NAMESPACES)} of its own"


def _root(wall: Wall, suspect: Suspect) -> str:
    allowed = {"/", *(str(bind.path) for bind in wall.root.binds), *(str(one) for one in (MEMORY, KERNEL, INITRD))}
    found = inspect.mounts(suspect.pid)
    for one in found:
        if one.path not in allowed:
            raise NotHeld(f"there is a mount at {one.path}")
        if not {"ro", "nosuid"} <= one.options:
            raise NotHeld(f"{one.path} is mounted {','.join(sorted(one.options))}")
    links = {link for link, _ in wall.root.links}
    own = str(suspect.directory.resolve())
    for path in inspect.walk_root(suspect.pid, beyond=frozenset(allowed - {"/"})):
        if path not in {*allowed, *links, own} and not any(one.startswith(path + "/") for one in {*allowed, own}):
            raise NotHeld(f"it sees {path}")
    return f"{len(found)} read-only mounts, and nothing of the host but QEMU and its libraries"


def _descriptors(_: Wall, suspect: Suspect) -> str:
    chain = [str(one.resolve()) for one in overlay.chain(suspect.disk)]
    logs = {str(suspect.directory.resolve() / name) for name in ("console.log", "qemu.log")}
    found = inspect.descriptors(suspect.pid)
    for one in found:
        if not one.target.startswith("/") or one.target in _DEVICES:
            continue
        if one.target == str(MEMORY) or one.target in chain[1:]:
            if one.writes:
                raise NotHeld(f"it may write {one.target}, which others read")
        elif one.target not in {*logs, chain[0]}:
            raise NotHeld(f"it has {one.target} open")
    return f"{len(found)} descriptors, all its own; only its top layer and its logs can be written"


def _limits(wall: Wall, suspect: Suspect) -> str:
    held = wall.groups.held(suspect.machine_id, suspect.pid)
    missing = [name for name in ("cpu", "memory", "pids") if held.get(name, "max").split()[0] in {"max", "-1"}]
    if missing:
        raise NotHeld(f"nothing limits {', '.join(missing)}; `cloche-server doctor` says which controllers are missing")
    return ", ".join(f"{name} {value}" for name, value in held.items())


def _own_limits(_: Wall, suspect: Suspect) -> str:
    limits = inspect.hard_limits(suspect.pid)
    for name in ("Max core file size", "Max file size", "Max processes"):
        if limits[name] == "unlimited":
            raise NotHeld(f"{name} is not limited")
    if limits["Max core file size"] != "0":
        raise NotHeld("it may leave a core file")
    return f"no core file, no file above {int(limits['Max file size']) >> 20} MiB"


def _memory(_: Wall, suspect: Suspect) -> str:
    parts = inspect.mapped(suspect.pid, str(MEMORY))
    if not parts:
        raise NotHeld("its memory file is not mapped")
    if any(not part.endswith("p") for part in parts):
        raise NotHeld(f"it is mapped {', '.join(parts)}, so that it writes the file")
    return "mapped privately, from a file that is open for reading only"


def _strangers(wall: Wall, suspect: Suspect) -> str:
    """Another sandbox's user tries the files themselves, as if it had come past every directory above them."""
    stranger = wall.uids.first + uids.BLOCK - 1  # never given out
    tried = 0
    for path in (suspect.directory, suspect.disk, suspect.memory, suspect.directory / "agent.sock"):
        refused = inspect.as_user(stranger, lambda path=path: inspect.reach(path))  # type: ignore[misc]
        if refused is None:
            raise NotHeld(f"another user reaches {path}")
        tried += 1
    for path in (suspect.disk, suspect.memory, suspect.directory / "console.log", suspect.directory / "qemu.log"):
        if inspect.as_user(stranger, inspect.reach_inode(path)) is None:
            raise NotHeld(f"another user may read {path}, and only the directories above it are in the way")
        tried += 1
    return f"{tried} attempts of another user were refused"


def _not_from_inside(_: Wall, suspect: Suspect) -> str:
    """Its own user tries what is its own on the host: even that is only reached through what was handed over."""
    own = int((suspect.directory / UID_FILE).read_text())
    for path in (suspect.directory, suspect.disk, suspect.directory / "qmp.sock"):
        if inspect.as_user(own, lambda path=path: inspect.reach(path)) is None:  # type: ignore[misc]
            raise NotHeld(f"its user reaches {path} by name")
    if suspect.disk.stat().st_uid == own:
        raise NotHeld("it owns its disk")
    return "its user reaches no file by name"


CHECKS: Final[tuple[tuple[str, Callable[[Wall, Suspect], str]], ...]] = (
    ("vmm.user", _own_user),
    ("vmm.capabilities", _no_capabilities),
    ("vmm.no_new_privileges", _no_new_privileges),
    ("vmm.seccomp", _seccomp),
    ("vmm.namespaces", _namespaces),
    ("vmm.root", _root),
    ("vmm.descriptors", _descriptors),
    ("vmm.limits", _limits),
    ("vmm.own_limits", _own_limits),
    ("vmm.memory", _memory),
    ("vmm.strangers", _strangers),
    ("vmm.own_files", _not_from_inside),
)
