"""Frames of the control link, and answers of resolvers: any bytes give messages or a refusal."""

from __future__ import annotations

import contextlib
from typing import Any

import dns.message
import dns.name
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.core.netctl import FrameError, FrameReader, LogEntry, encode_frame, entry_from_json, entry_to_json
from cloche_server.netd.upstream import _query, answers_query, parse_resolv_conf

messages = st.dictionaries(st.text(max_size=10), st.text(max_size=50) | st.integers() | st.none(), max_size=4)


@pytest.mark.thorough
@given(st.lists(st.tuples(messages, st.integers(0, 8)), max_size=5), st.integers(1, 40))
def test_messages_come_through_any_chunks(sent: list[tuple[dict[str, Any], int]], size: int) -> None:
    data = b"".join(encode_frame(message, count) for message, count in sent)
    reader = FrameReader()
    got = [found for at in range(0, len(data), size) for found in reader.feed(data[at : at + size])]
    assert got == sent


@settings(max_examples=100)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_waited_for(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        for message, count in FrameReader(limit=200).feed(data):
            assert isinstance(message, dict)
            assert 0 <= count <= 8


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff\x00", b"\x00\x00\x00\x02\x11{}", b"\x00\x00\x00\x02\x00[]"])
def test_frames_that_are_none(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameReader().feed(data))


def test_deep_json_is_refused() -> None:
    body = b"[" * 100_000
    with pytest.raises(FrameError):
        list(FrameReader().feed(len(body).to_bytes(4, "big") + b"\x00" + body))


def test_entries_of_the_log_come_through() -> None:
    entry = LogEntry(1, 2.0, "tcp", "deny", "default", "no rule", name="a.test", end=True)
    assert entry_from_json(entry_to_json(entry)) == entry


# ------------------------------------------------------------------ resolvers

NAME = dns.name.from_text("www.example.test")


def _answered(query: dns.message.Message) -> dns.message.Message:
    response = dns.message.make_response(query)
    response.answer.append(dns.rrset.from_text(query.question[0].name, 60, "IN", "A", "45.90.1.10"))
    return response


def test_only_an_answer_to_the_same_question_counts() -> None:
    query = _query(NAME, dns.rdatatype.A)
    good = _answered(query)
    assert answers_query(query, good.to_wire()) is not None
    assert answers_query(query, query.to_wire()) is None
    other = _answered(_query(NAME, dns.rdatatype.A))
    other.id = query.id
    if other.question[0].name.labels != query.question[0].name.labels:
        assert answers_query(query, other.to_wire()) is None
    good.id ^= 1
    assert answers_query(query, good.to_wire()) is None


def test_questions_differ_in_id_and_case() -> None:
    seen = {(query.id, query.question[0].name.labels) for query in (_query(NAME, dns.rdatatype.A) for _ in range(50))}
    assert len(seen) == 50
    assert len({labels for _, labels in seen}) > 10


@settings(max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 60))
def test_damaged_answers(noise: bytes, at: int) -> None:
    query = _query(NAME, dns.rdatatype.A)
    wire = _answered(query).to_wire()
    answers_query(query, wire[:at] + noise + wire[at + len(noise) :])
    assert answers_query(query, noise) is None


@given(st.text(max_size=200))
def test_any_resolv_conf(text: str) -> None:
    assert all(port == 53 for _, port in parse_resolv_conf(text))


def test_resolv_conf() -> None:
    text = "# x\nnameserver 10.0.0.1\nnameserver fd00::1\nnameserver\nnameserver x\nsearch a\n"
    assert parse_resolv_conf(text) == [("10.0.0.1", 53), ("fd00::1", 53)]
