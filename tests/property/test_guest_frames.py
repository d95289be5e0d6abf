"""Properties of the frame decoder: any chunking gives the same frames, any bytes give frames or one error."""

from __future__ import annotations

import contextlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.errors import ClocheError
from cloche_server.guest.frames import (
    HEADER,
    Exit,
    Frame,
    FrameDecoder,
    Gap,
    Heartbeat,
    Output,
    Started,
    encode_frame,
)

END = Exit(3, "signaled", "SIGKILL", 9, 1.5, 1.0, 0.5, 900, "killed", 5, 3, 0, 0)

pieces = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([1, 2]), st.binary(max_size=200)),
        st.tuples(st.just(3), st.integers(0, 2**40)),
        st.tuples(st.just(5), st.none()),
    ),
    max_size=12,
)


def conversation(parts: list[tuple[int, object]]) -> tuple[list[Frame], bytes]:
    frames: list[Frame] = [Started(1, 2)]
    offset = 0
    for kind, value in parts:
        if isinstance(value, bytes):
            frames.append(Output(kind, offset, value))
            offset += len(value)
        elif isinstance(value, int):
            frames.append(Gap(1, offset, value))
            offset += value
        else:
            frames.append(Heartbeat(offset))
    frames.append(END)
    return frames, b"".join(encode_frame(f, offset if f is END else 0) for f in frames)


@given(parts=pieces, points=st.lists(st.integers(0, 10_000), max_size=30))
def test_any_chunking_gives_the_same_frames(parts: list[tuple[int, object]], points: list[int]) -> None:
    frames, data = conversation(parts)
    edges = [0, *sorted(p % (len(data) + 1) for p in points), len(data)]
    decoder = FrameDecoder()
    got: list[Frame] = []
    for begin, end in pairwise(edges):
        got += decoder.feed(data[begin:end])
    assert got == frames
    decoder.end()


@given(parts=pieces)
def test_byte_by_byte(parts: list[tuple[int, object]]) -> None:
    frames, data = conversation(parts)
    decoder = FrameDecoder()
    got = [frame for n in range(len(data)) for frame in decoder.feed(data[n : n + 1])]
    assert got == frames


@given(
    data=st.one_of(
        st.binary(max_size=400),
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2**64 - 1), st.binary(max_size=60)), max_size=6).map(
            lambda fs: b"".join(HEADER.pack(k, o, len(p)) + p for k, o, p in fs)
        ),
    ),
    attached=st.booleans(),
)
def test_any_bytes_give_frames_or_a_protocol_error(data: bytes, attached: bool) -> None:
    decoder = FrameDecoder(attached=attached)
    with contextlib.suppress(ClocheError):  # any other exception fails the test
        decoder.feed(data)
    assert len(decoder._buf) <= max(HEADER.size + 65536, len(data))
