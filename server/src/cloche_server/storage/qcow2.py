"""The front of a qcow2 file from elsewhere, read strictly: what QEMU opens must name no file but ours.

A qcow2 file can make QEMU read any file of the host: through the name of the file below it, an external data file, or
an option in a header extension. So only what a layer of a sandbox needs is let through, and the name of the file below
is written anew. (Format: docs/interop/qcow2.rst of QEMU.)
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAGIC: Final = b"QFI\xfb"
#: Version 2: magic, version, offset and length of the backing name, cluster bits, size, encryption, entries and offset
#: of the L1 table, offset and clusters of the refcount table, number and offset of internal snapshots.
_V2: Final = struct.Struct(">4sIQIIQIIQQIIQ")
#: Version 3 adds: incompatible, compatible and autoclear features, refcount order, length of the header.
_V3: Final = struct.Struct(">QQQII")
_EXTENSION: Final = struct.Struct(">II")
_END, _BACKING_FORMAT, _FEATURE_NAMES = 0, 0xE2792ACA, 0x6803F857
_NAME_MAX: Final = 1023
_CLUSTER_BITS: Final = range(9, 22)
_HEADER_LENGTHS: Final = range(104, 113)


@dataclass(frozen=True, slots=True)
class Front:
    """`backing` and `backing_format` as written, `size` of the disk in bytes."""

    backing: str
    backing_format: str
    size: int
    cluster_bits: int
    name_offset: int


def read_front(path: Path, file_size: int | None = None) -> Front:
    """Raises ValueError, with a reason that holds nothing of the file, unless it is a plain overlay."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size if file_size is None else file_size
        return _parse(file.read(1 << 21), size)


def _parse(raw: bytes, file_size: int) -> Front:
    if len(raw) < _V2.size + _V3.size or raw[:4] != _MAGIC:
        raise ValueError("it is no qcow2 file")
    (
        _, version, name_offset, name_length, bits, size, crypt, l1_entries, l1_offset, refcounts, refcount_clusters,
        snapshots, _,
    ) = _V2.unpack_from(raw)  # fmt: skip
    incompatible, compatible, autoclear, order, header_length = _V3.unpack_from(raw, _V2.size)
    if version != 3 or bits not in _CLUSTER_BITS or header_length not in _HEADER_LENGTHS or header_length % 8:
        raise ValueError("its version or layout is not one that Cloche writes")
    if incompatible or compatible or autoclear or order > 6 or any(raw[104:header_length]):
        raise ValueError(
            "it uses features that Cloche does not: external data, compression types, bitmaps, or it is dirty"
        )
    if crypt:
        raise ValueError("it is encrypted")
    if snapshots:
        raise ValueError("it has internal snapshots")
    cluster = 1 << bits
    for offset, length in ((l1_offset, l1_entries * 8), (refcounts, refcount_clusters * cluster)):
        if offset % cluster or offset < cluster or offset + length > file_size + cluster:
            raise ValueError("its tables lie outside it")
    if size <= 0 or l1_entries != -(-size // (cluster * (cluster // 8))):
        raise ValueError("the table of its clusters does not fit its size")
    end = min(cluster, len(raw))
    format_, at = _extensions(raw, header_length, end)
    if not 0 < name_length <= _NAME_MAX or name_offset < at or name_offset + name_length > end:
        raise ValueError("the name of the file below it is missing or misplaced")
    try:
        backing = raw[name_offset : name_offset + name_length].decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("the name of the file below it is not text") from None
    return Front(backing, format_, size, bits, name_offset)


def _extensions(raw: bytes, at: int, end: int) -> tuple[str, int]:
    """The format of the file below, and where the extensions end."""
    found: str | None = None
    while True:
        if at + _EXTENSION.size > end:
            raise ValueError("its header has no end")
        kind, length = _EXTENSION.unpack_from(raw, at)
        at += _EXTENSION.size
        if kind == _END:
            break
        if length > end - at:
            raise ValueError("its header has no end")
        if kind == _BACKING_FORMAT and found is None and raw[at : at + length] in {b"raw", b"qcow2"}:
            found = raw[at : at + length].decode()
        elif kind != _FEATURE_NAMES:
            raise ValueError("its header holds something that Cloche does not write")
        at += -(-length // 8) * 8
    if found is None:
        raise ValueError("it does not tell the format of the file below it")
    return found, at


def rename_backing(path: Path, name: str) -> None:
    """Writes another name of the file below. Its format stays. Raises ValueError when there is no room for it."""
    raw = name.encode()
    front = read_front(path)
    room = min(_NAME_MAX, (1 << front.cluster_bits) - front.name_offset)
    if len(raw) > room:
        raise ValueError("the name of the file below is too long")
    with path.open("r+b") as file:
        file.seek(front.name_offset)
        file.write(raw.ljust(room, b"\0"))
        file.seek(16)
        file.write(struct.pack(">I", len(raw)))
        file.flush()
        os.fsync(file.fileno())
