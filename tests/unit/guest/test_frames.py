"""Decoding of a command's output."""

from __future__ import annotations

import json

import pytest

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

END = Exit(0, "exited", None, None, 1.5, 1.0, 0.5, 900, None, 5, 3, 0, 0)


def raw(kind: int, payload: bytes = b"", offset: int = 0) -> bytes:
    return HEADER.pack(kind, offset, len(payload)) + payload


START = raw(0, b'{"pid": 7, "started_ns": 5}')


def exit_frame(**changes: object) -> bytes:
    event = {"exit_code": 0, "reason": "exited", **changes}
    return raw(4, json.dumps({k: v for k, v in event.items() if v != "drop"}).encode())


def test_a_whole_conversation() -> None:
    frames: list[Frame] = [
        Started(7, 5),
        Output(1, 0, b"hello"),
        Heartbeat(5),
        Gap(1, 5, 100),
        Output(2, 105, b"err"),
        END,
    ]
    decoder = FrameDecoder()
    assert decoder.feed(b"".join(encode_frame(f, 108 if f is END else 0) for f in frames)) == frames
    decoder.end()


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("output first", raw(1, b"x")),
        ("exit first", exit_frame()),
        ("second start", START + START),
        ("unknown type", START + raw(6)),
        ("long frame", START + HEADER.pack(1, 0, 65537)),
        ("wild length", START + HEADER.pack(1, 0, 2**32 - 1)),
        ("offset back", START + raw(1, b"abc", 0) + raw(1, b"d", 2)),
        ("offset ahead", START + raw(1, b"abc", 0) + raw(1, b"d", 4)),
        ("offset wild", START + raw(1, b"abc", 2**63)),
        ("frame after exit", START + exit_frame() + raw(5)),
        ("bytes after exit", START + exit_frame() + b"x"),
        ("heartbeat payload", START + raw(5, b"x")),
        ("no json", START + raw(4, b"{")),
        ("json list", START + raw(4, b"[]")),
        ("deep json", START + raw(4, b"[" * 60000)),
        ("long number", raw(0, b'{"pid": ' + b"9" * 6000 + b"}")),
        ("bool pid", raw(0, b'{"pid": true}')),
        ("negative pid", raw(0, b'{"pid": -1}')),
        ("gap stream", START + raw(3, b'{"stream": 3, "bytes": 1}')),
        ("gap bytes", START + raw(3, b'{"stream": 1, "bytes": -1}')),
        ("gap missing", START + raw(3, b'{"stream": 1}')),
        ("exit code high", START + exit_frame(exit_code=256)),
        ("exit code low", START + exit_frame(exit_code=-1)),
        ("exit code text", START + exit_frame(exit_code="0")),
        ("exit code float", START + exit_frame(exit_code=1.0)),
        ("exit code missing", START + exit_frame(exit_code="drop")),
        ("reason unknown", START + exit_frame(reason="because")),
        ("reason number", START + exit_frame(reason=3)),
        ("duration nan", START + raw(4, b'{"exit_code":0,"reason":"exited","duration_ms":NaN}')),
        ("duration inf", START + raw(4, b'{"exit_code":0,"reason":"exited","duration_ms":1e999}')),
        ("negative kills", START + exit_frame(oom_kills=-1)),
        ("detail number", START + exit_frame(detail=3)),
    ],
)
def test_nonsense_is_refused(what: str, data: bytes) -> None:
    with pytest.raises(ClocheError) as caught:
        FrameDecoder().feed(data)
    assert caught.value.code == "guest.protocol", what


def test_strings_are_cut_and_made_encodable() -> None:
    decoder = FrameDecoder()
    frames = decoder.feed(START + exit_frame(detail="\ud800" + "x" * 9000, signal="S" * 500))
    end = frames[-1]
    assert isinstance(end, Exit)
    assert end.detail is not None
    assert len(end.detail) == 2000
    end.detail.encode()
    assert end.signal is not None
    assert len(end.signal) == 32
    assert end.oom_kills == 0, "of an agent that does not tell"


def test_unknown_fields_are_ignored() -> None:
    decoder = FrameDecoder()
    assert len(decoder.feed(START + exit_frame(novelty=[1, 2]))) == 2


def test_end_without_exit_is_an_error() -> None:
    decoder = FrameDecoder()
    decoder.feed(START + raw(1, b"abc"))
    with pytest.raises(ClocheError, match="exit frame"):
        decoder.end()


def test_output_from_an_offset_may_begin_with_a_gap() -> None:
    decoder = FrameDecoder(attached=False)
    frames = decoder.feed(raw(3, b'{"stream": 0, "bytes": 50}', 0) + raw(2, b"x", 50) + raw(5, b"", 51))
    assert frames[:2] == [Gap(0, 0, 50), Output(2, 50, b"x")]


def test_an_unfinished_frame_is_all_that_is_kept() -> None:
    decoder = FrameDecoder()
    decoder.feed(START)
    decoder.feed(HEADER.pack(1, 0, 65536) + b"x" * 65000)
    assert len(decoder._buf) == 65013
    assert decoder.feed(b"x" * 536)[0] == Output(1, 0, b"x" * 65536)
    assert len(decoder._buf) == 0


def test_encoder_refuses_what_a_frame_cannot_hold() -> None:
    with pytest.raises(ValueError):
        encode_frame(Output(1, 0, b"x" * 65537))
