"""The archive is what `cpio` reads, and the same each time."""

from __future__ import annotations

import io

import pytest

from cloche_server.storage.cpio import CpioWriter


def archive() -> bytes:
    out = io.BytesIO()
    writer = CpioWriter(out)
    writer.directory("dev")
    writer.char_device("dev/console", 5, 1)
    writer.file("/init", b"#!/bin/sh\n", 0o755)
    writer.file("odd", b"abc")
    writer.symlink("link", "init")
    writer.close()
    return out.getvalue()


def parse(data: bytes) -> list[tuple[str, int, bytes, tuple[int, int]]]:
    """Entries as (name, mode, content, device), read by the book."""
    entries = []
    position = 0
    while True:
        assert data[position : position + 6] == b"070701"
        fields = [int(data[position + 6 + 8 * i : position + 14 + 8 * i], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        start = position + 110
        name = data[start : start + name_size]
        assert name.endswith(b"\0")
        content_at = (start + name_size + 3) // 4 * 4
        position = (content_at + size + 3) // 4 * 4
        if name == b"TRAILER!!!\0":
            assert data[position:].strip(b"\0") == b""
            return entries
        assert fields[2:4] == [0, 0]
        assert fields[5] == 0
        content = data[content_at : content_at + size]
        entries.append((name[:-1].decode(), mode, content, (fields[9], fields[10])))


def test_entries() -> None:
    assert parse(archive()) == [
        ("dev", 0o040755, b"", (0, 0)),
        ("dev/console", 0o020600, b"", (5, 1)),
        ("init", 0o100755, b"#!/bin/sh\n", (0, 0)),
        ("odd", 0o100644, b"abc", (0, 0)),
        ("link", 0o120777, b"init", (0, 0)),
    ]


def test_deterministic_and_padded() -> None:
    assert archive() == archive()
    assert len(archive()) % 512 == 0


@pytest.mark.parametrize("length", range(5))
def test_alignment_of_every_length(length: int) -> None:
    out = io.BytesIO()
    writer = CpioWriter(out)
    writer.file("n" * (length + 1), b"x" * length)
    writer.file("next", b"y")
    writer.close()
    assert [entry[2] for entry in parse(out.getvalue())] == [b"x" * length, b"y"]
