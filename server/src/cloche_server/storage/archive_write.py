"""Writing an archive, piece by piece, as its reader takes it. Everything here blocks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import zstandard

from cloche_server.core.errors import ClocheError
from cloche_server.host import files
from cloche_server.storage.archive import END, MANIFEST, Member, end_of, padding, tar_header

_CHUNK: Final = 1 << 20
_ZEROS: Final = bytes(_CHUNK)
#: So much of the archive is given out at once.
_PIECE: Final = 256 << 10
#: After so much content something is given out, even if it is nothing, so that the work can be ended.
_TURN: Final = 64 << 20
#: The next levels take more than twice as long, for a tenth less.
_LEVEL: Final = 1

Key = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A member that is to be: its file, and its digest where that is known."""

    name: str
    path: Path
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class OpenPart:
    """It stays readable when its file is removed."""

    member: Member
    file: BinaryIO


class Digests:
    """SHA-256 of files that do not change once they are there, each computed once."""

    def __init__(self) -> None:
        self._known: dict[Key, str] = {}

    def of(self, file: BinaryIO, stop: threading.Event) -> str:
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in self._known:
            digest = hashlib.sha256()
            for piece in _content(file.fileno()):
                if stop.is_set():
                    raise InterruptedError
                digest.update(piece)
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[key] = digest.hexdigest()
        return self._known[key]


def open_parts(parts: Sequence[Part], digests: Digests, stop: threading.Event) -> list[OpenPart]:
    """Opens all files at once: what is removed later is still exported whole. Raises OSError, InterruptedError."""
    with contextlib.ExitStack() as undo:
        opened = []
        for part in parts:
            file = undo.enter_context(part.path.open("rb", buffering=0))
            size = os.fstat(file.fileno()).st_size
            sha256 = part.sha256 or digests.of(file, stop)
            opened.append(OpenPart(Member(part.name, size, sha256), file))
        undo.pop_all()
        return opened


def close_parts(parts: Sequence[OpenPart]) -> None:
    for part in parts:
        part.file.close()


def write_archive(described: dict[str, Any], parts: Sequence[OpenPart], stop: threading.Event) -> Iterator[bytes]:
    """The archive; a piece may be empty. Raises `snapshot.corrupt` when a file is not what its digest says: the end is
    then missing. OSError, InterruptedError."""
    members = [{"name": p.member.name, "size": p.member.size, "sha256": p.member.sha256} for p in parts]
    manifest = json.dumps({**described, "members": members}).encode()
    out = _Out()
    yield from out.add(tar_header(MANIFEST, len(manifest)), manifest, padding(len(manifest)))
    yield out.flush()  # whoever reads it can refuse before anything else has come
    for part in parts:
        size, digest, done = part.member.size, hashlib.sha256(), 0
        yield from out.add(tar_header(part.member.name, size))
        for piece in _content(part.file.fileno()):
            if stop.is_set():
                raise InterruptedError
            digest.update(piece)
            done += len(piece)
            yield from out.add(piece)
        if done != size or digest.hexdigest() != part.member.sha256:
            raise ClocheError("snapshot.corrupt", "a file of the snapshot, or below it, has changed")
        yield from out.add(padding(size))
    end = end_of(manifest)
    yield from out.add(tar_header(END, len(end)), end, padding(len(end)), bytes(1024))
    yield out.finish()


class _Out:
    """Compresses, and gathers what has come of it."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
        self._gathered = bytearray()
        self._taken = 0

    def add(self, *pieces: bytes) -> Iterator[bytes]:
        for piece in pieces:
            self._gathered += self._zstd.compress(piece)
            self._taken += len(piece)
        if len(self._gathered) >= _PIECE or self._taken >= _TURN:
            self._taken = 0
            gathered, self._gathered = bytes(self._gathered), bytearray()
            yield gathered

    def flush(self) -> bytes:
        gathered, self._gathered = bytes(self._gathered), bytearray()
        return gathered + self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    def finish(self) -> bytes:
        return bytes(self._gathered) + self._zstd.flush()


def _content(fd: int) -> Iterator[bytes]:
    """All bytes of a file. Its holes are not read."""
    size, at = os.fstat(fd).st_size, 0
    for start, end in [*files.data_ranges(fd), (size, size)]:
        while at < start:
            yield _ZEROS[: min(_CHUNK, start - at)]
            at += min(_CHUNK, start - at)
        while at < end:
            piece = os.pread(fd, min(_CHUNK, end - at), at)
            if not piece:
                return
            yield piece
            at += len(piece)
