"""Reading bodies, paths and flags; answering; work that ends with its client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, StrictInt
from starlette.requests import Request

from cloche_server.api.context import flag, guest_path, query_path
from cloche_server.api.errors import error_body, error_response
from cloche_server.api.respond import (
    ClientGone,
    big_json_response,
    dump,
    killed,
    parse_model,
    read_body,
    while_connected,
)
from cloche_server.core.errors import CATALOGUE, ClocheError
from cloche_server.settings import Settings


class Model(BaseModel):
    count: Annotated[StrictInt, Field(ge=0)] = 0
    name: str = "none"
    extra: dict[str, str | None] = {}


def _code(call: Any, *args: Any) -> str:
    with pytest.raises(ClocheError) as told:
        call(*args)
    return told.value.code


# ------------------------------------------------------------------ bodies


@pytest.mark.parametrize("raw", [b"", b" \r\n\t", b"{}", b'{"name":null,"count":null}', b'{"unknown":[1]}'])
def test_nothing_is_the_same_as_an_empty_object(raw: bytes) -> None:
    assert parse_model(raw, Model) == Model()


def test_numbers() -> None:
    assert parse_model(b'{"count":60.0}', Model).count == 60
    for raw in ("60.5", "1e400", "NaN", "true", '"60"', "-1", "-0.5", "9" * 5000):
        assert _code(parse_model, b'{"count":%s}' % raw.encode(), Model) == "request.invalid"


@pytest.mark.parametrize(
    "raw",
    [b"null", b"[]", b'"x"', b"{", b"\xff", b'{"name":"\xed\xa0\x80"}', b'{"name":"\\ud800"}', b"[" * 200_000],
)
def test_what_is_no_object(raw: bytes) -> None:
    assert _code(parse_model, raw, Model) == "request.invalid"


def test_nulls_inside_are_kept() -> None:
    assert parse_model(b'{"extra":{"a":null}}', Model).extra == {"a": None}


@given(st.binary(max_size=200))
def test_any_bytes_are_a_model_or_an_error(raw: bytes) -> None:
    with contextlib.suppress(ClocheError):
        assert parse_model(raw, Model)


@given(st.dictionaries(st.text(), st.text()))
def test_json_is_ascii_and_the_same(value: dict[str, str]) -> None:
    raw = dump(value)
    assert raw.isascii()
    assert json.loads(raw) == value


def _request(*messages: dict[str, Any], stopping: bool = False, query: bytes = b"") -> Request:
    waiting = list(messages)

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    event = asyncio.Event()
    if stopping:
        event.set()
    settings = Settings(body_timeout=0.05, max_json_kb=16)
    app = SimpleNamespace(state=SimpleNamespace(services=SimpleNamespace(stopping=event, settings=settings)))
    return Request({"type": "http", "app": app, "headers": [], "query_string": query}, receive)


GONE = {"type": "http.disconnect"}


async def test_a_body_in_parts() -> None:
    parts = ({"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.request", "body": b"c"})
    assert await read_body(_request(*parts), 3) == b"abc"
    with pytest.raises(ClocheError, match="larger than 2 bytes"):
        await read_body(_request(*parts), 2)
    with pytest.raises(ClientGone):
        await read_body(_request(parts[0], GONE), 9)


async def test_a_body_is_bounded_by_the_settings() -> None:
    whole = {"type": "http.request", "body": b"x" * 16 * 1024}
    assert len(await read_body(_request(whole))) == 16 * 1024
    with pytest.raises(ClocheError, match="larger than 16384 bytes") as told:
        await read_body(_request({**whole, "more_body": True}, {"type": "http.request", "body": b"x"}))
    assert (told.value.code, told.value.details) == ("request.too_large", {"limit_bytes": 16384})


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with pytest.raises(ClocheError) as told:
        await read_body(_request({"type": "http.request", "body": b"{", "more_body": True}))
    assert told.value.code == "request.timeout"


# ------------------------------------------------------------------ work


async def test_work_is_done_or_ends_with_its_client() -> None:
    async def quick() -> int:
        return 7

    assert await while_connected(_request(), quick()) == 7
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("undone")

    with pytest.raises(ClientGone):
        await while_connected(_request(GONE), long())
    assert ended == ["undone"]


async def test_work_that_ends_in_spite_of_its_cancelling_is_answered() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "made anyway"
        raise AssertionError

    assert await while_connected(_request(GONE), stubborn()) == "made anyway"


@pytest.mark.parametrize("stopping", [True, False])
async def test_a_server_that_ends_tells_what_it_has_ended(stopping: bool) -> None:
    async def long() -> None:
        await asyncio.Event().wait()

    request = _request(stopping=stopping)
    task = asyncio.ensure_future(while_connected(request, long(), killed))
    await asyncio.sleep(0)
    task.cancel()
    if stopping:
        with pytest.raises(ClocheError) as told:
            await task
        assert told.value.code == "exec.cancelled"
    else:
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_big_answers_are_the_same_as_small_ones() -> None:
    for value in ({"stdout": "x"}, {"stdout": "ü" * 300_000}):
        assert json.loads((await big_json_response(value)).body) == value


# ------------------------------------------------------------------ errors


@given(st.sampled_from(sorted(CATALOGUE)), st.text())
def test_every_error_is_a_flat_sentence(code: str, message: str) -> None:
    body = error_body(ClocheError(code, message), "r1")
    assert isinstance(body["error"], str)
    assert body["error"]
    assert (body["code"], body["request_id"], body["details"]) == (code, "r1", {})
    response = error_response(ClocheError(code, message, retry_after=1.5), "r1")
    assert response.headers["retry-after"] == "1.5"
    assert ("www-authenticate" in response.headers) == (response.status_code == 401)


def test_a_status_of_the_agent_is_not_shown() -> None:
    error = ClocheError("file.not_found", "no", details={"status": 404, "field": "path"})
    assert error_body(error, "r")["details"] == {"field": "path"}
    error = ClocheError("sandbox.invalid_state", "no", details={"status": "creating"})
    assert error_body(error, "r")["details"] == {"status": "creating"}


# ------------------------------------------------------------------ paths and flags


@given(st.binary(min_size=1, max_size=50).filter(lambda raw: b"\0" not in raw))
def test_every_absolute_path_can_be_named(raw: bytes) -> None:
    path = b"/" + raw
    named = base64.urlsafe_b64encode(path).decode()
    assert guest_path(None, named) == path
    assert guest_path(None, named.rstrip("=")) == path


@pytest.mark.parametrize(
    ("path", "path_b64"),
    [
        (None, None),
        ("", None),
        ("etc", None),
        ("/a\0", None),
        (None, "!"),
        (None, "L2V0Yw=a"),
        (None, "ZXRj"),
        ("/x", "AA"),
    ],
)
def test_what_is_no_path(path: str | None, path_b64: str | None) -> None:
    assert _code(guest_path, path, path_b64) == "request.invalid"


def test_path_limits_and_defaults() -> None:
    assert guest_path("/" + "a" * 4094, None) == "/" + "a" * 4094
    assert _code(guest_path, "/" + "ü" * 2048, None) == "file.name_too_long"
    assert guest_path(None, None, "/") == "/"
    assert guest_path("/a", "L2I") == b"/b", "the raw name wins"


@pytest.mark.parametrize(
    ("query", "decoded", "expected"),
    [
        (b"path=/a", "/a", "/a"),
        (b"path=/%ff+x%2B", "/\ufffd x+", b"/\xff x+"),
        (b"path=/%EF%BF%BD", "/\ufffd", b"/\xef\xbf\xbd"),
        (b"path=/a&p%61th=/%fe", "/\ufffd", b"/\xfe"),
        (b"", None, None),
    ],
)
def test_paths_that_are_not_utf8(query: bytes, decoded: str | None, expected: str | bytes | None) -> None:
    assert query_path(_request(query=query), decoded) == expected


def test_flags() -> None:
    assert [flag(value, True) for value in (None, "1", "TRUE", "0", "false", "")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert flag(None, False) is False
