"""The jail of a QEMU process: what its root holds, and whether this host can build it."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Shape
from cloche_server.host import process
from cloche_server.host.cgroups import Groups, Limits
from cloche_server.host.jail import Bind, Jail, Launcher, Program, Root
from cloche_server.host.uids import RUN, UidBlock

#: Where the root of a jail is built; on the host this stays an empty directory.
BASE: Final = RUN / "root"
MEMORY: Final = Path("/mem")
KERNEL: Final = Path("/kernel")
INITRD: Final = Path("/initrd")
#: Memory of a QEMU beside its guest's and its translations: code, tables of disks, buffers, page tables, and what it
#: keeps of its disk in the page cache. Measured with a busy disk and many programs: 120 MiB beside the guest's own,
#: most of it translations; the rest of this is page cache, which gives way.
OVERHEAD_MB: Final = 256
#: Beside the vCPUs: the main loop and the threads that do I/O.
SPARE_CPU: Final = 0.25
MOST_THREADS: Final = 200
_LIBRARY: Final = re.compile(r"(/\S+)(?= \(0x)")
#: More likely to be ended than the server when the host runs out of memory.
OOM_SCORE: Final = 300


@dataclass(frozen=True, slots=True)
class Wall:
    """What all jails of a server have in common."""

    root: Root
    uids: UidBlock
    groups: Groups
    #: Bytes per second that a machine reads, and writes, and the disk that this is about; 0: no limit.
    disk_bps: int = 0
    device: str = ""
    #: Of `qemu-img`, for what reads disks that others have written; None: it is not installed.
    tool_root: Root | None = None

    def limits(self, shape: Shape, tcg_buffer_mb: int) -> Limits:
        """What a machine of this shape may use. `tcg_buffer_mb`: 0 where the processor itself runs the guest."""
        memory_mb = shape.memory_mb + shape.memory_mb // 64 + tcg_buffer_mb + OVERHEAD_MB
        cpus = shape.cpus + SPARE_CPU
        pids = shape.cpus + MOST_THREADS
        return Limits(cpus, shape.cpus, memory_mb * 1024 * 1024, pids, self.disk_bps, self.device)

    def jail(self, uid: int, cwd: Path, *, trees: tuple[tuple[str, int], ...], groups: tuple[int, ...]) -> Jail:
        # The name of what the kernel calls it: processes are told by it, and behind a link there is none.
        return Jail(self.root, uid, BASE, cwd.resolve(), groups, trees, oom_score=OOM_SCORE)


async def find_root(binary: str, *, kvm: bool) -> Root:
    """The directories of QEMU's libraries and firmware, the program itself, and hardly a device. Raises
    `host.unsupported`, `internal`."""
    libraries = await _libraries(binary)
    firmware = await process.run([binary, "-L", "help"], timeout=30)
    folders = [Path(line.strip()) for line in firmware.text.splitlines() if line.startswith("/")]
    return await asyncio.to_thread(_root, Path(binary), libraries, [one for one in folders if one.is_dir()], kvm)


async def find_tool_root(binary: str) -> Root:
    """The directories of a program's libraries, and the program itself. Raises `host.unsupported`, `internal`."""
    return await asyncio.to_thread(_root, Path(binary), await _libraries(binary), (), False)


async def _libraries(binary: str) -> list[Path]:
    linked = await process.run(["ldd", binary], timeout=30)
    return [Path(name) for name in _LIBRARY.findall(linked.text)]


def _root(binary: Path, libraries: Iterable[Path], folders: Iterable[Path], kvm: bool) -> Root:
    wanted: set[Path] = set()
    links: set[tuple[str, str]] = set()
    for path in libraries:
        links |= _top_links(path)
        wanted |= {Path(os.path.realpath(path.parent)), Path(os.path.realpath(path)).parent}
    for folder in folders:
        links |= _top_links(folder)
        wanted.add(Path(os.path.realpath(folder)))
    apart = [one for one in sorted(wanted) if not any(other in one.parents for other in wanted)]
    binds = [Bind(one, execute=True) for one in apart]
    program = Path(os.path.realpath(binary))
    if not any(one in program.parents for one in apart):
        binds.append(Bind(program, execute=True))
    binds.append(Bind(Path("/dev/null"), device=True))
    binds.append(Bind(Path("/dev/urandom"), device=True))
    if kvm:
        binds.append(Bind(Path("/dev/kvm"), device=True))
    return Root(tuple(binds), tuple(sorted(links)))


def _top_links(path: Path) -> set[tuple[str, str]]:
    """`/lib` and its like, where they are links into `/usr`."""
    top = Path("/", path.parts[1])
    return {(str(top), str(top.readlink()))} if top.is_symlink() else set()


def kvm_groups(kvm: bool) -> tuple[int, ...]:
    """The group that opens `/dev/kvm`, where not everybody may."""
    if not kvm:
        return ()
    status = Path("/dev/kvm").stat()
    return () if status.st_mode & stat.S_IWOTH else (status.st_gid,)


async def prove(launcher: Launcher, wall: Wall, binary: str) -> None:
    """Starts QEMU in a jail once, to tell its version. Raises `host.unsupported` with what cannot be built."""
    try:
        said = await asyncio.to_thread(_version_inside, launcher, wall, binary)
    except OSError as error:
        raise ClocheError(
            "host.unsupported",
            f"QEMU cannot be locked in on this host ({error.strerror or error}); "
            "with CLOCHE_JAIL=off it runs as root, and whoever breaks out of it has the host",
        ) from error
    if b"version" not in said:
        raise ClocheError(
            "host.unsupported",
            "QEMU does not start in its jail; with CLOCHE_JAIL=off it runs as root",
            details={"qemu": said[-2000:].decode("utf-8", "replace")},
        )


def _version_inside(launcher: Launcher, wall: Wall, binary: str) -> bytes:
    BASE.mkdir(mode=0o755, parents=True, exist_ok=True)
    output = os.memfd_create("version")
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        jail = wall.jail(wall.uids.take(), Path("/work"), trees=(), groups=())
        pid = launcher.start(Program((os.path.realpath(binary), "--version"), {0: null, 1: output, 2: output}, jail))
        os.waitpid(pid, 0)
        return os.pread(output, 65536, 0)
    finally:
        os.close(output)
        os.close(null)
