"""Properties of the resynchronisation: any chunking, any garbage, bounded memory."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cloche_server.guest.sync import Resync

NONCE = "a0" * 16


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(p % (len(data) + 1) for p in points), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def echo(number: int) -> bytes:
    return f"\nCLOCHE-SYNC-OK {NONCE} {number} 1\n".encode()


garbage = st.one_of(
    st.binary(max_size=300),
    st.integers(0, 60).map(lambda n: echo(0)[:n]),
    st.just(f"\nCLOCHE-SYNC-OK {'b' * 32} 0 1\n".encode()),
    st.just(b"\n" * 100),
)


@given(
    junk=st.lists(garbage, max_size=5),
    lines=st.integers(1, 4),
    points=st.lists(st.integers(0, 5000), max_size=40),
)
def test_last_echo_is_found_behind_any_garbage_in_any_chunks(junk: list[bytes], lines: int, points: list[int]) -> None:
    sync = Resync(NONCE)
    sync.start()
    for _ in range(lines - 1):
        sync.tick()
    stream = b"".join(junk) + b"".join(echo(n) for n in range(lines))
    before = True
    for chunk in cut(stream, points):
        before = sync.feed(chunk) or sync.ready
        assert len(sync._tail) < 100
    assert before
    assert sync.ready


@given(junk=st.lists(st.binary(max_size=2000), max_size=20))
def test_never_ready_without_an_echo(junk: list[bytes]) -> None:
    sync = Resync(NONCE)
    sync.start()
    for chunk in junk:
        assert not sync.feed(chunk)
        assert len(sync._tail) < 100
