"""Reading an archive that may be hostile, as it comes in, into a staging directory.

The bytes are pushed in, and each is looked at once: what a decompressor gives out is bounded by its window and one
block, what is kept in memory by one header, and what is written by the sizes in the manifest, which have been judged
before. Files have names of ours only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, BinaryIO, Final, cast

import zstandard

from cloche_server.core.errors import ClocheError
from cloche_server.host import files
from cloche_server.storage.archive import (
    BLOCK,
    END,
    END_MAX,
    MANIFEST,
    MANIFEST_MAX,
    WINDOW_LOG,
    Manifest,
    Member,
    bad,
    parse_json,
    parse_manifest,
    read_tar_header,
)
from cloche_server.storage.flatten import write_sparse

#: What may follow the end of a tar file: blocks of zeros.
_TRAILER_MAX: Final = 1 << 20
#: So much is gathered before it is written.
_CHUNK: Final = 1 << 20
#: So much is written between two looks at the room on the disk.
_LOOK: Final = 16 << 20

Machine = Generator[None, None, None]


class Unpacker:
    """Takes an archive in. `judge` sees the manifest before any other member, and may refuse it; it returns the names
    of members that are read and compared, and not kept. `reserve`: bytes of the disk that stay free."""

    def __init__(self, staged: Path, judge: Callable[[Manifest], set[str]], reserve: int) -> None:
        self._staged = staged
        self._judge = judge
        self._reserve = reserve
        self._buffer = bytearray()
        self._machine = self._run()
        self._ended = False
        self._since_look = _LOOK
        #: Set when it has been read and judged.
        self.manifest: Manifest | None = None
        sink = cast("IO[bytes]", _Sink(self._push))
        self._zstd = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG).stream_writer(sink)
        next(self._machine)

    def feed(self, data: bytes) -> None:
        """More of the archive. Blocking. Raises `request.invalid`, `host.disk_full`, and what `judge` raises."""
        try:
            self._zstd.write(data)
        except zstandard.ZstdError:
            raise bad("it is not compressed with zstd, or damaged") from None
        except OSError as error:
            if files.is_full(error):
                raise _full() from None
            raise

    def finish(self) -> Manifest:
        """When all has been fed. Raises `request.invalid` unless the archive was whole."""
        if not self._ended or self.manifest is None:
            raise bad("it ends in the middle")
        return self.manifest

    def close(self) -> None:
        """Lets go of the file that is being written."""
        self._machine.close()

    def path(self, name: str) -> Path:
        """Where a member of a manifest that was accepted lies."""
        return self._staged / name

    # ---------------------------------------------------------------- what comes out of the decompressor

    def _push(self, data: bytes) -> None:
        self._buffer += data
        next(self._machine)

    def _exactly(self, size: int) -> Generator[None, None, bytes]:
        while len(self._buffer) < size:
            yield
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _run(self) -> Machine:
        raw = yield from self._small(MANIFEST, MANIFEST_MAX)
        manifest = parse_manifest(raw)
        dropped = self._judge(manifest)
        self.manifest = manifest
        for member in manifest.members:
            name, size = read_tar_header((yield from self._exactly(BLOCK)))
            if (name, size) != (member.name, member.size):
                raise bad("its members are not those that it announces")
            yield from self._member(member, keep=member.name not in dropped)
        told = parse_json((yield from self._small(END, END_MAX)))
        if told != {"complete": True, "manifest_sha256": manifest.sha256}:
            raise bad("its end does not belong to it")
        self._ended = True
        trailer = 0
        while True:
            trailer += len(self._buffer)
            if any(self._buffer) or trailer > _TRAILER_MAX:
                raise bad("something follows its end")
            self._buffer.clear()
            yield

    def _small(self, expected: str, most: int) -> Generator[None, None, bytes]:
        name, size = read_tar_header((yield from self._exactly(BLOCK)))
        if name != expected or not 0 < size <= most:
            raise bad(f"{expected} is not where it has to be, or too large")
        raw = yield from self._exactly(size + -size % BLOCK)
        return raw[:size]

    def _member(self, member: Member, *, keep: bool) -> Machine:
        digest, at = hashlib.sha256(), 0
        file: BinaryIO | None = None
        if keep:
            path = self.path(member.name)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = path.open("xb", buffering=0)
        try:
            if file is not None:
                os.ftruncate(file.fileno(), member.size)
            while at < member.size:
                piece = yield from self._exactly(min(_CHUNK, member.size - at))
                digest.update(piece)
                if file is not None:
                    self._look(write_sparse(file.fileno(), piece, at))
                at += len(piece)
            if file is not None:
                os.fsync(file.fileno())
        finally:
            if file is not None:
                file.close()
        if digest.hexdigest() != member.sha256:
            raise bad(f"the digest of {member.name} does not match")
        if any((yield from self._exactly(-member.size % BLOCK))):
            raise bad("something stands between its members")

    def _look(self, written: int) -> None:
        self._since_look += written
        if self._since_look >= _LOOK:
            self._since_look = 0
            if files.free_bytes(self._staged) < self._reserve:
                raise _full()


class _Sink:
    """What the decompressor writes to."""

    def __init__(self, push: Callable[[bytes], None]) -> None:
        self._push = push

    def write(self, data: bytes) -> int:
        self._push(data)
        return len(data)


def _full() -> ClocheError:
    return ClocheError("host.disk_full", "the disk of the host has no room for the archive; nothing was imported")
