"""Bounded output: nothing below the limit is lost, head and tail survive above it, no character is damaged."""

from __future__ import annotations

import base64
import re

from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.output import ChunkDecoder, OutputCollector

CHUNKS = st.lists(st.binary(max_size=40), max_size=20)
TEXT = st.text(alphabet="aé日😀\u2028\n", max_size=60)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in pieces of these sizes."""
    pieces, position = [], 0
    for size in sizes:
        pieces.append(data[position : position + size])
        position += size
    return [*pieces, data[position:]]


@given(CHUNKS, st.integers(2, 200))
def test_below_the_limit_all_is_kept(chunks: list[bytes], limit: int) -> None:
    collector = OutputCollector(limit)
    whole = b"".join(chunks)
    for chunk in chunks:
        collector.add(chunk)
    result = collector.collect("base64")
    kept = base64.b64decode(result.text)
    assert len(kept) + result.dropped == len(whole)
    if len(whole) <= limit:
        assert kept == whole
        assert result.dropped == 0
        assert result.head_bytes is None
    else:
        assert len(kept) <= limit
        assert result.head_bytes is not None
        assert whole.startswith(kept[: result.head_bytes])
        assert whole.endswith(kept[result.head_bytes :])
        assert len(kept) >= limit - 1


@given(st.binary(min_size=1, max_size=50), st.binary(max_size=50), st.integers(1, 10**9))
def test_a_gap_of_the_sender_is_counted(before: bytes, after: bytes, lost: int) -> None:
    collector = OutputCollector(200)
    collector.add(before)
    collector.gap(lost)
    collector.add(after)
    result = collector.collect("base64")
    assert result.dropped == lost
    assert base64.b64decode(result.text) == before + after
    assert result.head_bytes == len(before)


@given(st.integers(1, 1000), st.lists(st.integers(1, 10**6), min_size=1, max_size=5), CHUNKS)
def test_a_lying_sender_cannot_exceed_the_limit(limit: int, gaps: list[int], chunks: list[bytes]) -> None:
    collector = OutputCollector(limit)
    for gap in gaps:
        for chunk in chunks:
            collector.add(chunk * 50)
        collector.gap(gap)
    assert collector.kept <= limit + 1


@given(TEXT, st.integers(8, 40))
def test_the_seam_never_shows_half_a_character(text: str, limit: int) -> None:
    collector = OutputCollector(limit)
    data = text.encode()
    collector.add(data)
    result = collector.collect("utf-8")
    assert "\ufffd" not in result.text
    if result.dropped:
        match = re.search(r"\n\[cloche: truncated, (\d+) bytes dropped\]\n", result.text)
        assert match is not None
        assert int(match[1]) == result.dropped
        head, tail = result.text[: match.start()], result.text[match.end() :]
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(head.encode()) + len(tail.encode()) + result.dropped == len(data)
    else:
        assert result.text == text


@given(TEXT, st.lists(st.integers(0, 5), max_size=80))
def test_chunks_never_cut_a_character(text: str, sizes: list[int]) -> None:
    decoder = ChunkDecoder("utf-8")
    parts = [decoder.feed(piece) for piece in cut(text.encode(), sizes)]
    assert "".join(parts) + decoder.finish() == text
    assert all("\ufffd" not in part for part in parts)


@given(st.binary(max_size=100), st.lists(st.integers(0, 9), max_size=30))
def test_base64_chunks_are_exact(data: bytes, sizes: list[int]) -> None:
    decoder = ChunkDecoder("base64")
    parts = [base64.b64decode(decoder.feed(piece)) for piece in cut(data, sizes)]
    assert b"".join(parts) == data
    assert decoder.finish() == ""


@given(st.binary(max_size=100))
def test_any_bytes_become_text(data: bytes) -> None:
    collector = OutputCollector(1000)
    collector.add(data)
    assert collector.collect("utf-8").text == data.decode("utf-8", "replace")
