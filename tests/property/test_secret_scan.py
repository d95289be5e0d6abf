"""Placeholders and values are found however they are spelled and wherever the borders of chunks fall."""

from __future__ import annotations

import contextlib
import json
import re
from urllib.parse import quote

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.core.network import SecretGrant, SecretPlace
from cloche_server.netd.flow import Target
from cloche_server.netd.http.judge import BodyRewriter, Judge, Put, Value
from cloche_server.netd.http.refusal import Refusal
from cloche_server.netd.http.request import Asked, read_request, sent_headers
from cloche_server.netd.http.scan import Literals, Placeholders
from cloche_server.netd.http.strip import Stripper

ASKED = Asked("POST", "a.test", "/", b"/")
#: They begin alike, repeat themselves, and begin with what is a digit of an escape.
TEXTS = [
    "cloche-secret-a-0123456789ab",
    "cloche-secret-b-0123456789ab",
    "63636363636363636363",
    "ccccccccccccccccccloche-sx",
]
VALUE = 'v-"a/lue&+<ä>'


def spelled(text: str, how: list[int]) -> bytes:
    """Each character plain, percent-encoded in either case, or as JSON may write it."""
    forms = []
    for character, kind in zip(text, how * len(text), strict=False):
        code = ord(character)
        forms.append([character, f"%{code:02x}", f"%{code:02X}", f"\\u00{code:02x}", f"\\u00{code:02X}"][kind])
    return "".join(forms).encode()


noise = st.one_of(
    st.binary(max_size=40),
    st.text("c%6\\u03loche-sret", max_size=30).map(str.encode),
    st.tuples(st.sampled_from(TEXTS), st.integers(0, 27)).map(lambda cut: cut[0][: cut[1]].encode()),
)
hits = st.tuples(st.sampled_from(TEXTS), st.lists(st.integers(0, 4), min_size=1, max_size=5)).map(lambda a: spelled(*a))
bodies = st.lists(st.one_of(noise, hits), max_size=6).map(b"".join)


@st.composite
def cut(draw: st.DrawFn, parts: st.SearchStrategy[bytes]) -> list[bytes]:
    data = draw(parts)
    borders = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]


def judge(*, allowed: bool) -> Judge:
    host = "a.test" if allowed else "b.test"
    grants = [SecretGrant(f"S{n}", text, (host,), places=(SecretPlace.BODY,)) for n, text in enumerate(TEXTS)]
    return Judge(grants, ASKED, secure=True, secret=lambda name: f"<{name}>")


PATTERNS = [
    re.compile("".join(f"(?:{re.escape(c)}|(?:%|\\\\u00)(?i:{ord(c):02x}))" for c in text).encode()) for text in TEXTS
]


def slow_find(data: bytes, start: int) -> tuple[int, int, int] | None:
    """Each by itself, everywhere."""
    found = [(hit.start(), hit.end(), n) for n, one in enumerate(PATTERNS) if (hit := one.search(data, start))]
    return min(found, default=None)


@given(bodies)
@settings(deadline=None)
def test_it_finds_what_is_there_and_nothing_else(data: bytes) -> None:
    scanner, at = Placeholders(TEXTS), 0
    while True:
        found, expected = scanner.find(data, at), slow_find(data, at)
        assert (None if found is None else (found.start, found.end, found.index)) == expected
        if found is None:
            break
        at = found.end


@given(cut(bodies))
@settings(deadline=None)
def test_chunks_are_rewritten_as_the_whole_is(parts: list[bytes]) -> None:
    rewriter = BodyRewriter(judge(allowed=True), b"text/plain", fixed=False)
    made = b"".join([*map(rewriter.feed, parts), rewriter.finish()])
    whole = BodyRewriter(judge(allowed=True), b"text/plain", fixed=False)
    assert made == whole.feed(b"".join(parts)) + whole.finish()
    assert slow_find(b"".join(parts), 0) is not None or made == b"".join(parts)


@given(cut(bodies))
@settings(deadline=None)
def test_nothing_of_a_violation_goes_out(parts: list[bytes]) -> None:
    rewriter, out = BodyRewriter(judge(allowed=False), b"", fixed=True), bytearray()
    data = b"".join(parts)
    found = slow_find(data, 0)
    with pytest.raises(Refusal) if found else contextlib.nullcontext():
        for part in parts:
            out += rewriter.feed(part)
        out += rewriter.finish()
    # What comes before it in its own chunk need not go out either.
    assert data[: found[0]].startswith(out) if found else out == data


@given(
    st.lists(
        st.one_of(noise, st.sampled_from([VALUE.encode(), quote(VALUE, safe="").encode(), VALUE[:7].encode()])),
        max_size=6,
    )
    .map(b"".join)
    .flatmap(lambda data: cut(st.just(data))),
    st.booleans(),
)
@settings(deadline=None)
def test_a_value_is_stripped_over_any_border(parts: list[bytes], fixed: bool) -> None:
    stripper = Stripper([Value("S", TEXTS[0].encode(), VALUE.encode())], Put())
    data = b"".join(parts)
    body, whole = stripper.body(fixed=fixed), stripper.body(fixed=fixed)
    made = b"".join([*map(body.feed, parts), body.finish()])
    assert made == whole.feed(data) + whole.finish()
    for spelling in (VALUE, quote(VALUE, safe="")):
        assert spelling.encode() not in made
    assert len(made) == len(data) if fixed else made.count(TEXTS[0].encode()) >= data.count(VALUE.encode())


@pytest.mark.parametrize(
    "echo", [VALUE, json.dumps(VALUE), json.dumps(VALUE, ensure_ascii=False), quote(VALUE, safe="")]
)
def test_the_usual_echoes(echo: str) -> None:
    stripper = Stripper([Value("S", TEXTS[0].encode(), VALUE.encode())], Put())
    body = stripper.body(fixed=False)
    assert body.feed(b"<" + echo.encode() + b">") + body.finish() in (
        f"<{TEXTS[0]}>".encode(), f'<"{TEXTS[0]}">'.encode(),
    )  # fmt: skip


@given(st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=5), st.binary(max_size=60), st.integers(0, 60))
def test_what_may_be_a_beginning_is_held(texts: list[bytes], data: bytes, start: int) -> None:
    start = min(start, len(data))
    expected = min(
        (
            at
            for at in range(start, len(data))
            if any(len(t) > len(data) - at and t.startswith(data[at:]) for t in texts)
        ),
        default=len(data),
    )
    assert Literals(texts).held(data, start) == expected


TEXTUAL = st.text(st.characters(codec="latin-1", exclude_characters="\0\r\n"), max_size=30).map(str.strip)
NAMES = st.sampled_from(["Host", "host", "X-A", "Authorization", "Connection", "Upgrade", "Cookie", "Content-Length"])
HEADS = st.lists(
    st.tuples(NAMES, st.one_of(TEXTUAL, st.sampled_from(["a.test", "h2c", f"Basic {TEXTS[0]}"]))), max_size=6
)


@given(
    st.sampled_from(["GET", "POST", "CONNECT"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40),
    HEADS,
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_any_head_is_judged_or_refused(method: str, path: str, headers: list[tuple[str, str]], tls: bool) -> None:
    http = h11.Connection(h11.SERVER)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", ""]
    http.receive_data("\r\n".join(lines).encode("latin-1"))
    try:
        request = http.next_event()
    except h11.RemoteProtocolError:
        return
    if not isinstance(request, h11.Request):
        return
    with contextlib.suppress(Refusal):
        asked = read_request(request, Target("192.0.2.1", 443, "a.test", tls, 1))
        assert not tls or asked.host == "a.test"
        grants = [SecretGrant("S", TEXTS[0], ("a.test",), places=tuple(SecretPlace))]
        one = Judge(grants, asked, secure=tls, secret=lambda _: "the-value")
        made = one.target(), one.headers(sent_headers(request))
        assert tls or b"the-value" not in repr(made).encode()
        h11.Request(method=method, target=made[0], headers=made[1])
