"""Heads, chunks, tokens and frames of connections, fed with whatever comes."""

from __future__ import annotations

import contextlib
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.core.errors import ClocheError
from cloche_server.core.http1 import (
    BadAnswer,
    ChunkedReader,
    HttpError,
    chunk,
    format_request,
    format_response,
    last_chunk,
    parse_request,
    parse_response,
    request_framing,
    response_framing,
)
from cloche_server.core.previews import (
    PreviewToken,
    bare_host,
    looks_like_token,
    mint,
    parse_label,
    path_allowed,
    read_token,
    split_host,
)
from cloche_server.gateway.headers import query_tokens, without_cookie, without_query
from cloche_server.gateway.routes import PEEK, is_ours
from cloche_server.guest.tunnel import TunnelFrames

pytestmark = pytest.mark.thorough

LEAN = settings(deadline=None, max_examples=60)
NAMES = st.from_regex(rb"[A-Za-z-]{1,12}", fullmatch=True)
VALUES = st.from_regex(rb"([!-~\xa0-\xff]([ -~]{0,10}[!-~])?)?", fullmatch=True)
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=6)
#: Pieces that heads are made of, so that nonsense comes near to sense.
PIECES = st.lists(
    st.sampled_from(
        b"GET|POST| |/|HTTP/1.1|HTTP/1.0|\r\n|\n|\r|:|Host|a.b|\t|Content-Length|Transfer-Encoding|chunked|3|-1|0x3|,|"
        b"200|OK|\0|\xff".split(b"|")
    ),
    max_size=24,
).map(b"".join)


@LEAN
@given(st.binary(max_size=200) | PIECES)
def test_a_head_is_refused_or_says_the_same_when_it_is_written_again(data: bytes) -> None:
    try:
        head = parse_request(data + b"\r\n\r\n")
        framing = request_framing(head)
    except HttpError:
        return
    again = parse_request(format_request(head.method, head.target, head.headers))
    assert (again.method, again.target, again.headers) == (head.method, head.target, head.headers)
    assert not (framing.chunked and framing.length is not None)
    for text in (head.method, head.target, *(part for pair in head.headers for part in pair)):
        assert not set(text) & set(b"\r\n\0")


@LEAN
@given(st.binary(max_size=200) | PIECES.map(lambda rest: b"HTTP/1.1 200" + rest))
def test_an_answer_is_refused_or_can_be_written_again(data: bytes) -> None:
    try:
        head = parse_response(data + b"\r\n\r\n")
        response_framing(head, b"GET")
    except BadAnswer:
        return
    again = parse_response(format_response(head.status, head.reason, head.headers))
    assert (again.status, again.headers) == (head.status, head.headers)
    assert b"\r" not in head.reason


@LEAN
@given(st.from_regex(rb"/[!-~\xa1-\xff]{0,30}", fullmatch=True), HEADERS)
def test_targets_and_headers_are_kept_byte_for_byte(target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [pair for pair in headers if pair[0].lower() != b"host"]
    lines = [b"GET " + target + b" HTTP/1.1", b"Host: a", *(b"%b: %b" % pair for pair in headers)]
    head = parse_request(b"\r\n".join(lines) + b"\r\n\r\n")
    assert head.target == target
    assert list(head.headers[1:]) == headers


@LEAN
@given(st.lists(st.binary(min_size=1, max_size=50), max_size=6), HEADERS, st.binary(max_size=20), st.data())
def test_chunks_come_out_as_they_went_in_however_they_are_cut(
    parts: list[bytes], trailers: list[tuple[bytes, bytes]], rest: bytes, data: st.DataObject
) -> None:
    raw = b"".join(chunk(part) for part in parts) + last_chunk(trailers) + rest
    reader = ChunkedReader()
    out = b""
    at = 0
    while at < len(raw) and not reader.done:
        size = data.draw(st.integers(1, 40))
        out += b"".join(reader.feed(raw[at : at + size]))
        at += size
    assert reader.done
    assert out == b"".join(parts)
    assert reader.trailers == trailers
    assert reader.rest + raw[at:] == rest


@LEAN
@given(
    st.binary(max_size=100)
    | st.lists(st.sampled_from([b"3", b"\r\n", b"\n", b"abc", b"0", b";", b"z", b"\r"])).map(b"".join)
)
def test_chunks_that_are_none_are_refused_whole_or_in_parts(raw: bytes) -> None:
    def read(pieces: list[bytes]) -> tuple[bytes, bool, bool]:
        reader, out = ChunkedReader(), b""
        try:
            for piece in pieces:
                if not reader.done:
                    out += b"".join(reader.feed(piece))
        except ValueError:
            return b"", False, True
        return out, reader.done, False

    assert read([raw]) == read([raw[i : i + 1] for i in range(len(raw))])


@LEAN
@given(st.binary(max_size=300), st.integers(1, 50))
def test_frames_of_a_connection_are_the_same_however_they_are_cut(raw: bytes, size: int) -> None:
    def read(pieces: list[bytes]) -> bytes | None:
        frames, out = TunnelFrames(), b""
        try:
            for piece in pieces:
                out += frames.feed(piece)
        except ClocheError:
            return None
        return out

    whole = read([raw])
    assert whole == read([raw[i : i + size] for i in range(0, len(raw), size)]) or whole is None


PATHS = st.lists(st.from_regex(r"/[a-zA-Z0-9 ü|,=-]{0,8}", fullmatch=True), max_size=3).map(tuple)
TOKENS = st.builds(
    PreviewToken,
    sandbox_id=st.from_regex(r"[a-z0-9]{8,20}", fullmatch=True),
    port=st.integers(1, 65535),
    expires_at=st.integers(0, 2**40),
    workspace=st.text(min_size=1, max_size=20).filter(lambda t: t.isprintable()),
    paths=PATHS,
)


@LEAN
@given(TOKENS, st.binary(min_size=16, max_size=32))
def test_a_token_says_what_was_signed_until_it_expires(token: PreviewToken, key: bytes) -> None:
    text = mint(key, token)
    assert looks_like_token(text)
    assert read_token(key, text, token.expires_at - 1) == token
    assert read_token(key, text, token.expires_at) is None
    assert read_token(key + b"x", text, 0) is None


@LEAN
@given(TOKENS, st.integers(0, 10_000), st.sampled_from("AZaz09_-."))
def test_a_token_that_was_changed_is_none(token: PreviewToken, at: int, letter: str) -> None:
    text = mint(b"k" * 32, token)
    at %= len(text)
    changed = text[:at] + letter + text[at + 1 :]
    found = read_token(b"k" * 32, changed, -1)
    # The last letter of each part has bits that are not used.
    assert found is None or found == token


@LEAN
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
def test_nonsense_is_no_token_and_no_name(text: str) -> None:
    assert read_token(b"k" * 32, text, 0) is None
    parse_label(text)
    found = split_host(text, "localhost")
    assert found is None or bare_host(text).endswith(".localhost")


@LEAN
@given(st.from_regex(rb"/[a-z%2eE./\\?&=]{0,24}", fullmatch=True))
def test_no_path_leads_out_of_its_prefix(target: bytes) -> None:

    if not path_allowed(("/a",), target):
        return
    path = target.partition(b"?")[0]
    for _ in range(3):
        path = unquote_to_bytes(path)
        assert path == b"/a" or path.startswith(b"/a/")
        assert b".." not in path.replace(b"\\", b"/").split(b"/")


@LEAN
@given(st.from_regex(rb"/[a-z]{0,3}(\?[a-z=&%5F_]{0,30}(preview_token=x)?(&[a-z]{1,3})?)?", fullmatch=True))
def test_our_parameter_and_nothing_else_is_taken_out(target: bytes) -> None:
    cleaned = without_query(target)
    assert query_tokens(cleaned) == []
    if not query_tokens(target):
        assert cleaned == target


@LEAN
@given(st.lists(st.sampled_from([b"a=b", b" cloche_preview=x", b"cloche_preview", b" c = d", b"xcloche_preview=1"])))
def test_our_cookie_and_nothing_else_is_taken_out(pairs: list[bytes]) -> None:
    cleaned = without_cookie(b";".join(pairs))
    kept = [pair.strip() for pair in pairs if not pair.strip().startswith(b"cloche_preview")]
    assert [pair.strip() for pair in cleaned.split(b";") if pair.strip()] == kept


@LEAN
@given(
    st.binary(max_size=2 * PEEK)
    | st.sampled_from([b"GET /v1/sandboxes/abcdefgh12/proxy/1/", b"GET /v1/p/x", b"GET /v1/me"])
)
def test_the_decision_about_a_connection_does_not_change_with_more_bytes(data: bytes) -> None:
    verdicts = [is_ours(data[:size]) for size in range(1, len(data) + 1)]
    decided = [verdict for verdict in verdicts if verdict is not None]
    with contextlib.suppress(IndexError):
        first = verdicts.index(decided[0])
        assert all(verdict == decided[0] for verdict in verdicts[first:])
    if len(data) >= PEEK:
        assert verdicts[-1] is not None
