"""Files of the host: written whole or not at all, copied sparsely, removed for certain.

All functions block. On the event loop call them through `asyncio.to_thread`, except for the ones that touch
one small file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.host.process import kill, start_time

_FICLONE: Final = 0x40049409
_MNT_DETACH: Final = 2
_COPY_CHUNK: Final = 64 * 1024 * 1024
_STAGING: Final = re.compile(r"\.staging-(\d+)-(\d+)-[0-9a-f]+")


# ------------------------------------------------------------------ writing


def fsync_dir(path: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Replace a file: a reader sees the old content or the new, also after a crash."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    content = data.encode() if isinstance(data, str) else data
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)  # the mode above was subject to the umask
            file.write(content)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
        fsync_dir(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _disk_error(error, path) from error


def publish(staged: Path, target: Path) -> bool:
    """Give a finished staged file or directory its name. False if somebody else was first (ours is removed).

    The content is synced first, so that a name that exists always stands for complete content.
    """
    for entry in sorted(staged.rglob("*")) if staged.is_dir() else [staged]:
        if entry.is_symlink() or not entry.is_file():
            continue
        fd = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    if staged.is_dir():
        fsync_dir(staged)
    try:
        # A directory can only be renamed onto an empty one, so this never overwrites finished content.
        staged.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            remove_tree(staged)
            return False
        raise _disk_error(error, target) from error
    fsync_dir(target.parent)
    return True


def is_full(error: OSError) -> bool:
    """Whether there was no room on the disk."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _disk_error(error: OSError, path: Path) -> ClocheError:
    if is_full(error):
        return ClocheError("host.disk_full", f"the disk that holds {path} is full")
    return ClocheError("internal", f"{path} could not be written: {error.strerror}")


# ------------------------------------------------------------------ paths


def safe_join(base: Path, *parts: str) -> Path:
    """`base` joined with parts from outside. Refuses whatever would lead out of it, links included."""
    for part in parts:
        if "\0" in part or part.startswith("/") or ".." in part.split("/"):
            raise ClocheError("request.invalid", "the path leads out of its directory")
    joined = base.joinpath(*parts)
    if not joined.resolve().is_relative_to(base.resolve()):
        raise ClocheError("request.invalid", "the path leads out of its directory")
    return joined


def free_bytes(path: Path) -> int:
    """What an unprivileged process may still write to the file system of `path`."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def allocated_bytes(path: Path) -> int:
    """What a file really occupies; far less than its size if it is sparse."""
    return path.stat().st_blocks * 512


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------ copying


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file: as a reflink where the file system can, else its data without its holes."""
    try:
        with source.open("rb") as src, target.open("xb") as dst:
            os.fchmod(dst.fileno(), os.fstat(src.fileno()).st_mode & 0o7777)
            try:
                fcntl.ioctl(dst.fileno(), _FICLONE, src.fileno())
            except OSError:
                os.ftruncate(dst.fileno(), os.fstat(src.fileno()).st_size)
                for start, end in data_ranges(src.fileno()):
                    _copy_range(src.fileno(), dst.fileno(), start, end)
    except FileExistsError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            target.unlink()
        raise _disk_error(error, target) from error


def data_ranges(fd: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that are not holes, as (start, end)."""
    size = os.fstat(fd).st_size
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        position = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, position


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        count = min(end - start, _COPY_CHUNK)
        try:
            copied = os.copy_file_range(source, target, count, start, start)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            copied = os.pwrite(target, os.pread(source, min(count, 1 << 20), start), start)
        if copied == 0:
            raise OSError(errno.EIO, "the source became shorter while it was copied")
        start += copied


# ------------------------------------------------------------------ removing


def mounts_below(path: Path) -> list[Path]:
    """Mount points at or below `path`, the innermost first."""
    root = str(path.resolve())
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split(" ")[4])
        if point == root or point.startswith(root + "/"):
            found.append(Path(point))
    return found[::-1]


def unmount_below(path: Path) -> None:
    """Detach every mount at or below `path`, for instance what a killed build has left."""
    libc = ctypes.CDLL(None, use_errno=True)
    for point in mounts_below(path):
        if libc.umount2(os.fsencode(point), _MNT_DETACH) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOENT):
                raise ClocheError("internal", f"{point} could not be unmounted: {os.strerror(code)}")


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a whole directory. It is no error if (a part of) it has gone already.

    Never descends into a mount: what is behind it is not ours to delete.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if mounts_below(path):
        raise ClocheError("internal", f"{path} was not removed: something is still mounted in it")

    def on_error(_function: object, _name: object, info: tuple[type, BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    shutil.rmtree(path, onerror=on_error)


# ------------------------------------------------------------------ staging directories


def staging_path(parent: Path) -> Path:
    """A new name in `parent` for what is not finished, or not wanted any more; `sweep_staging` knows it."""
    pid = os.getpid()
    return parent / f".staging-{pid}-{start_time(pid)}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """A directory to build something in before it gets its name; it never outlives the block.

    The name says which process owns it, so that `sweep_staging` can remove what a killed one has left.
    """
    parent.mkdir(parents=True, exist_ok=True)
    path = staging_path(parent)
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        unmount_below(path)
        remove_tree(path)


def sweep_staging(parent: Path) -> None:
    """Remove staging directories whose owner has died, with its mounts and the helpers that it left."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        match = _STAGING.fullmatch(path.name)
        if match is None or start_time(int(match[1])) == int(match[2]):
            continue
        _kill_users(path)
        unmount_below(path)
        remove_tree(path)


def _kill_users(path: Path) -> None:
    """End processes that name a path on their command line or have their root or cwd in it."""
    inside = f"{path.resolve()}/"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        started = start_time(pid)
        uses = []
        with contextlib.suppress(OSError):
            uses.append(os.fsdecode((entry / "cmdline").read_bytes()))
            uses.extend(f"{(entry / link).readlink()}/" for link in ("root", "cwd"))
        if started is not None and any(inside in use for use in uses):
            kill(pid, started, signal.SIGKILL)
