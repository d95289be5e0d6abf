"""Where a text stream may be resumed: never in the middle of a character."""

from __future__ import annotations

from cloche_server.core.output import ChunkDecoder


def test_pending_bytes_are_counted() -> None:
    decoder = ChunkDecoder("utf-8")
    data = "a😀".encode()
    assert decoder.feed(data[:3]) == "a"
    assert decoder.pending == 2
    assert decoder.feed(data[3:]) == "😀"
    assert decoder.pending == 0
    assert ChunkDecoder("base64").pending == 0
