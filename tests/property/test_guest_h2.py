"""The guard that follows HTTP/2 frame boundaries sees the same in any chunking."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cloche_server.guest.h2setup import MAX_FRAME, FrameGuard

frames = st.lists(st.integers(0, 300) | st.just(MAX_FRAME), max_size=6)


def encode(length: int) -> bytes:
    return length.to_bytes(3, "big") + b"\x00\x00\x00\x00\x00\x01" + b"\xff" * length


@given(lengths=frames, points=st.lists(st.integers(0, 400_000), max_size=30))
def test_legal_frames_pass_in_any_chunks(lengths: list[int], points: list[int]) -> None:
    data = b"".join(encode(n) for n in lengths)
    edges = [0, *sorted(p % (len(data) + 1) for p in points), len(data)]
    guard = FrameGuard()
    assert all(guard.accepts(memoryview(data)[a:b]) for a, b in pairwise(edges))


@given(lengths=frames, bad=st.integers(MAX_FRAME + 1, 2**24 - 1), size=st.integers(1, 50))
def test_a_long_frame_is_refused_at_its_header(lengths: list[int], bad: int, size: int) -> None:
    data = b"".join(encode(n) for n in lengths if n < 1000) + bad.to_bytes(3, "big") + b"\x00" * 6
    guard = FrameGuard()
    verdicts = [guard.accepts(memoryview(data)[at : at + size]) for at in range(0, len(data), size)]
    assert verdicts[-1] is False
    assert all(verdicts[:-1])
