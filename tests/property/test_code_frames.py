"""What the code interpreter of a guest sends is taken apart strictly, however it is cut and whatever it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core import code
from cloche_server.core.errors import ClocheError

pytestmark = pytest.mark.thorough

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
KINDS = ["started", "stdout", "stderr", "gap", "result", "error", "input", "alive", "end", "refused"]
NAMES = """
text data main dropped stream count name message traceback status context language execution_count duration_ms
state_lost exit_code signal cause reason limit prompt password
"""
FIELDS = st.dictionaries(st.sampled_from(NAMES.split()), JSON)


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=5), st.lists(st.integers(1, 9), max_size=40))
def test_frames_are_the_same_however_they_are_cut(sent: list[dict[str, Any]], cuts: list[int]) -> None:
    raw = b"".join(code.frame(one) for one in sent)
    reader, found, at = code.FrameReader(), [], 0
    for size in cuts:
        found += reader.feed(raw[at : at + size])
        at += size
    found += reader.feed(raw[at:])
    assert json.dumps(found) == json.dumps(sent)


def _is_nonsense(error: ClocheError) -> None:
    assert error.code == "guest.protocol"


@given(st.binary(max_size=200))
def test_bytes_are_frames_or_nonsense(raw: bytes) -> None:
    try:
        found = code.FrameReader().feed(raw)
    except ClocheError as error:
        _is_nonsense(error)
    else:
        assert all(isinstance(one, dict) for one in found)


@given(st.sampled_from(KINDS), FIELDS)
def test_events_are_events_or_nonsense(kind: str, fields: dict[str, Any]) -> None:
    try:
        event = code.event({**fields, "type": kind})
    except ClocheError as error:
        _is_nonsense(error)
        return
    if isinstance(event, code.CodeResult):
        # Every client can read it: no NaN, no half characters.
        json.dumps(event.data, allow_nan=False).encode()
    if isinstance(event, code.CodeText | code.CodeError):
        repr(event).encode()


@given(st.dictionaries(st.text(), JSON))
def test_contexts_are_contexts_or_nonsense(data: dict[str, Any]) -> None:
    with pytest.raises(ClocheError) as refused:
        code.context(data)
    assert refused.value.code == "guest.protocol"


def test_limits() -> None:
    with pytest.raises(ClocheError):
        code.FrameReader().feed((code.MAX_FRAME + 1).to_bytes(4, "big"))
    deep = "[" * 100_000
    with pytest.raises(ClocheError):
        code.FrameReader().feed(len(deep).to_bytes(4, "big") + deep.encode())
    with pytest.raises(ClocheError):
        code.event({"type": "stdout", "text": "x" * 300_000})


def test_forms_that_are_none_are_told() -> None:
    shown = code.event(
        {
            "type": "result",
            "main": True,
            "data": {
                "image/png": "not base64!",
                "application/json": "{",
                "text/plain": "\ud800",
                "bad type": "x",
                "application/vnd.cloche.chart+json": '{"a": NaN}',
            },
            "dropped": {"image/svg+xml": 9000000},
        }
    )
    assert isinstance(shown, code.CodeResult)
    assert shown.data == {"text/plain": "?", "application/vnd.cloche.chart+json": {"a": None}}
    assert shown.dropped == {"image/svg+xml": 9000000, "image/png": 11, "application/json": 1}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"status": "ok"}, None),
        ({"status": "oom", "state_lost": True}, "no memory left"),
        ({"status": "timeout", "state_lost": True}, "had to be killed"),
        ({"status": "timeout"}, "is kept"),
        ({"status": "killed", "state_lost": True, "exit_code": 3}, "exit code 3"),
        ({"status": "killed", "state_lost": True, "signal": "SIGSEGV"}, "SIGSEGV"),
        ({"status": "killed", "state_lost": True, "cause": "restarted"}, "was restarted"),
    ],
)
def test_ends_are_told_in_a_sentence(fields: dict[str, Any], words: str | None) -> None:
    end = code.event({"type": "end", "execution_count": 1, "duration_ms": 1.5, **fields})
    assert isinstance(end, code.CodeEnd)
    if words is None:
        assert end.detail is None
    else:
        assert words in str(end.detail)
