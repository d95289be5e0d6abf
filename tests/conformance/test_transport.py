"""HTTP itself: methods, paths, headers, framing, connections that misbehave."""

from __future__ import annotations

import json

import pytest
from conformance_raw import Wire

from kit.client import Box

ECHO = b'{"cmd":"echo hi"}'


@pytest.mark.parametrize("method", ["HEAD", "TRACE", "PUT", "POST", "LOCK", "M-SEARCH", "PROPFIND"])
def test_unknown_methods(wire: Wire, shared: Box, method: str) -> None:
    found = wire.send(method, shared.path)
    assert found.status == 405
    assert found.header("allow") == "DELETE, GET, PATCH"
    if method != "HEAD":
        found.error(405, "request.method_not_allowed")


@pytest.mark.parametrize("target", ["/v1/sandboxes", "/v1/sandboxes/x/exec", "/v1", "/openapi.json"])
def test_no_page_of_another_origin_may_call(wire: Wire, target: str) -> None:
    found = wire.send("OPTIONS", target, headers="Origin: http://page\r\nAccess-Control-Request-Method: GET\r\n")
    assert found.status in {404, 405}
    assert found.header("access-control-allow-origin") is None
    assert wire.send("GET", target, headers="Origin: http://page\r\n").header("access-control-allow-origin") is None


def test_every_answer_has_its_headers(wire: Wire, shared: Box) -> None:
    for target in (shared.path, "/v1/nope", "/metrics", "/healthz", "/nope"):
        found = wire.send("GET", target)
        assert found.header("x-content-type-options") == "nosniff"
        assert found.header("referrer-policy") == "no-referrer"
        assert found.header("x-frame-options") == "DENY"
        assert found.header("cache-control") == "no-store"
        assert found.header("strict-transport-security") is None
        assert (found.header("x-ratelimit-limit") is not None) == target.startswith("/v1")


@pytest.mark.parametrize(
    "target",
    [
        "/v1",
        "/v1/",
        "/v1/nope",
        "/v1/sandboxes/",
        "/v1//sandboxes",
        "/v1/../healthz",
        "/v1/templates/",
        "/v1/sandboxes/%2e%2e%2fx",
        "/%76%31/nope",
    ],
)
def test_wrong_routes_below_v1(wire: Wire, target: str) -> None:
    wire.send("GET", target).error(404, "request.not_found")
    wire.send("POST", target, "{}").error(404, "request.not_found")
    wire.send("GET", target, auth="").error(401, "auth.missing_token")


@pytest.mark.parametrize("target", ["/", "/nope", "/healthz/", "/V1/sandboxes", "/v1x", "//v1/sandboxes", "*", "/docs"])
def test_wrong_routes_elsewhere(wire: Wire, target: str) -> None:
    wire.send("GET", target, auth="").error(404, "request.not_found")


def test_a_trailing_slash_is_another_route(wire: Wire, shared: Box) -> None:
    for target in ("/v1/sandboxes/", shared.path + "/", "/healthz/"):
        found = wire.send("GET", target)
        assert found.status == 404
        assert found.header("location") is None


@pytest.mark.parametrize(
    "name", ["%00", "%ff", "%0a", "UPPER", "a" * 60, "a" * 9000, "..", "%C3%BC", "x y".replace(" ", "%20")]
)
def test_strange_ids(wire: Wire, shared: Box, name: str) -> None:
    found = wire.send("GET", f"/v1/sandboxes/{name}").error(404, "sandbox.not_found")
    assert found["error"] == "sandbox with this id not found"
    wire.send("DELETE", f"/v1/sandboxes/{name}").error(404, "sandbox.not_found")
    wire.send("POST", f"/v1/sandboxes/{name}/exec", ECHO).error(404, "sandbox.not_found")
    wire.send("GET", f"{shared.path}/exec/{name}").error(404, "exec.not_found")
    wire.send("GET", f"/v1/templates/{name}").error(404, "template.not_found")


def test_query_strings(wire: Wire, shared: Box) -> None:
    listed = "/v1/sandboxes"
    for query in ("limit=0", "limit=x", "limit=", "limit=1e3", "limit=" + "9" * 400, "status=nope", "after=x"):
        wire.send("GET", f"{listed}?{query}").error(400, "request.invalid")
    for query in ("metadata.%00=x", "metadata.=x", "metadata.a=b&metadata.a=c", "metadata.secret.k=v"):
        assert wire.send("GET", f"{listed}?{query}").json() == []
    assert len(wire.send("GET", f"{listed}?limit=100&limit=1").json()) == 1, "the last of equal parameters counts"
    assert wire.send("GET", f"{shared.path}?x=%ff&y=%00&%ff&&=&a=b=c").status == 200
    assert wire.send("GET", f"{shared.path}?{'x=1&' * 8000}").status == 200


def test_paths_in_queries(wire: Wire, shared: Box) -> None:
    fs = f"{shared.path}/fs"
    for query in ("", "?path=", "?path=etc", "?path=%00", "?path=/a%00b", "?path_b64=!!", "?path_b64=L2V0Yw=a"):
        wire.send("GET", fs + query).error(400, "request.invalid")
    wire.send("GET", f"{fs}?path=/{'a/' * 3000}").error(400, "file.name_too_long")
    assert wire.send("PUT", f"{fs}?path=/tmp/a%2Bb+c%20d", b"plus").status == 200
    assert wire.send("GET", f"{fs}?path=%2Ftmp%2Fa%2Bb%20c+d").body == b"plus"
    assert wire.send("GET", f"{fs}?path=/nope&path=/tmp/a%2Bb%20c%20d").body == b"plus"


def test_a_path_that_is_not_utf8_is_that_path(wire: Wire, shared: Box) -> None:
    fs = f"{shared.path}/fs"
    assert wire.send("PUT", f"{fs}?path=/tmp/raw/x%ff+y", b"raw").status == 200
    names = wire.send("GET", f"{fs}/dir?path=/tmp/raw").json()["entries"]
    assert [entry["name_b64"] for entry in names] == ["eP8geQ"]
    assert wire.send("GET", f"{fs}?path_b64=L3RtcC9yYXcveP8geQ").body == b"raw"
    assert wire.send("PUT", f"{fs}?path=/tmp/raw/%EF%BF%BD", b"sign").status == 200
    assert (
        wire.send(
            "GET", f"{fs}?path=/tmp/raw/\ufffd".encode().decode("latin-1").replace("\xef\xbf\xbd", "%EF%BF%BD")
        ).body
        == b"sign"
    )


# ------------------------------------------------------------------ headers


@pytest.mark.parametrize("sent", ["abc", "a" * 64, "a b", '"x"', "~!@#$%^&*()"])
def test_request_ids_are_echoed(wire: Wire, sent: str) -> None:
    assert wire.send("GET", "/v1/me", headers=f"X-Request-Id: {sent}\r\n").header("x-request-id") == sent
    told = wire.send("GET", "/v1/nope", headers=f"X-Request-Id: {sent}\r\n").error(404, "request.not_found")
    assert told["request_id"] == sent


@pytest.mark.parametrize("sent", ["", "a" * 65, "\xe9", "a\tb", "a\x7fb"])
def test_other_request_ids_are_replaced(wire: Wire, sent: str) -> None:
    made = wire.send("GET", "/v1/me", headers=f"X-Request-Id: {sent}\r\n").header("x-request-id")
    assert made is not None
    assert made != sent
    assert len(made) == 16
    int(made, 16)


def test_every_text_has_a_charset(wire: Wire, shared: Box) -> None:
    for target in ("/metrics", f"{shared.path}/logs", f"{shared.path}/logs?follow=0"):
        assert "charset=utf-8" in str(wire.send("GET", target).header("content-type"))
    with wire.connect() as connection:
        connection.send(wire.head("GET", f"{shared.path}/logs?follow=true") + b"\r\n")
        assert dict(connection.answer_head()[1])["content-type"] == "text/event-stream; charset=utf-8"


def test_reads_are_not_negotiated(wire: Wire, shared: Box) -> None:
    wire.send("PUT", f"{shared.path}/fs?path=/tmp/j", b"\x00\xff", kind=None)
    for accept in ("application/json", "*/*", "text/html", ""):
        found = wire.send("GET", f"{shared.path}/fs?path=/tmp/j", headers=f"Accept: {accept}\r\n")
        assert (found.header("content-type"), found.body) == ("application/octet-stream", b"\x00\xff")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"GET /v1/\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -3\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_http_is_told_in_json(wire: Wire, data: bytes) -> None:
    with wire.connect() as connection:
        connection.send(data)
        connection.answer().error(400, "request.invalid")
        assert connection.ended()


def test_headers_are_bounded(wire: Wire) -> None:
    one = b"GET /v1/me HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"
    many = b"GET /v1/me HTTP/1.1\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(9000)) + b"\r\n"
    endless = b"GET /v1/me HTTP/1.1\r\nX: " + b"a" * 300_000
    for data in (one, many, endless):
        told = wire.raw(data).error(431, "request.headers_too_large")
        assert told["details"] == {"limit_bytes": 65536}
    assert wire.send("GET", "/v1/me", headers=f"X: {'a' * 50_000}\r\n").status == 200


def test_http_1_0_and_no_host(wire: Wire, shared: Box) -> None:
    with wire.connect() as connection:
        connection.send(f"GET {shared.path} HTTP/1.0\r\nAuthorization: Bearer {wire.token}\r\n\r\n".encode())
        assert connection.answer().json()["id"] == shared.id
        assert connection.ended()
    assert wire.raw(f"GET /v1/me HTTP/1.1\r\nAuthorization: Bearer {wire.token}\r\n\r\n".encode()).status == 200


# ------------------------------------------------------------------ framing


def test_chunked_bodies(wire: Wire, shared: Box) -> None:
    with wire.connect() as connection:
        connection.send(wire.head("POST", f"{shared.path}/exec", "Transfer-Encoding: chunked\r\n") + b"\r\n")
        for at in range(0, len(ECHO), 5):
            part = ECHO[at : at + 5]
            connection.send(b"%x\r\n%s\r\n" % (len(part), part))
        connection.send(b"0\r\n\r\n")
        assert connection.answer().json()["stdout"] == "hi\n"
    with wire.connect() as connection:
        connection.send(wire.head("PUT", f"{shared.path}/fs?path=/tmp/c", "Transfer-Encoding: chunked\r\n") + b"\r\n")
        connection.send(b"3\r\nabc\r\n1;ext=1\r\nd\r\n0\r\nTrailer: x\r\n\r\n")
        assert connection.answer().json()["bytes"] == 4


def test_a_broken_chunk_changes_nothing(wire: Wire, shared: Box) -> None:
    wire.send("PUT", f"{shared.path}/fs?path=/tmp/keep", b"old")
    with wire.connect() as connection:
        connection.send(
            wire.head("PUT", f"{shared.path}/fs?path=/tmp/keep", "Transfer-Encoding: chunked\r\n") + b"\r\n"
        )
        connection.send(b"3\r\nnew\r\nzz\r\n")
        assert connection.ended()
    assert wire.send("GET", f"{shared.path}/fs?path=/tmp/keep").body == b"old"


def test_expect_100_continue(wire: Wire, shared: Box) -> None:
    more = f"Content-Length: {len(ECHO)}\r\nExpect: 100-continue\r\n"
    with wire.connect() as connection:
        connection.send(wire.head("POST", f"{shared.path}/exec", more) + b"\r\n")
        assert connection.answer().status == 100
        connection.send(ECHO)
        assert connection.answer().json()["stdout"] == "hi\n"
    with wire.connect() as connection:
        connection.send(wire.head("POST", f"{shared.path}/exec", more, auth="") + b"\r\n")
        connection.answer().error(401, "auth.missing_token")


def test_pipelined_requests_are_answered_in_order(wire: Wire, shared: Box) -> None:
    exec_head = wire.head("POST", f"{shared.path}/exec", f"Content-Length: {len(ECHO)}\r\n") + b"\r\n"
    with wire.connect() as connection:
        connection.send(
            wire.head("GET", shared.path)
            + b"\r\n"
            + exec_head
            + ECHO
            + exec_head
            + ECHO
            + wire.head("GET", "/nope")
            + b"\r\n"
        )
        assert connection.answer().json()["id"] == shared.id
        assert [connection.answer().json()["stdout"] for _ in range(2)] == ["hi\n", "hi\n"]
        connection.answer().error(404, "request.not_found")


def test_garbage_after_a_request_never_gets_into_its_answer(wire: Wire, shared: Box) -> None:
    body = json.dumps({"cmd": "echo one; sleep 30"}).encode()
    head = wire.head("POST", f"{shared.path}/exec/stream", f"Content-Length: {len(body)}\r\n")
    with wire.connect() as connection:
        connection.send(head + b"\r\n" + body)
        assert connection.answer_head()[0] == 200
        assert b"one" in connection.chunk()
        connection.send(b"\x00\x01 this is not HTTP\r\n\r\n")
        assert connection.ended()


def test_an_early_answer_ends_a_long_body(wire: Wire, shared: Box) -> None:
    """401 comes before the body has been sent, and the body does not disturb the next request."""
    with wire.connect() as connection:
        connection.send(wire.head("POST", f"{shared.path}/exec", "Content-Length: 100\r\n", auth="") + b"\r\n")
        connection.answer().error(401, "auth.missing_token")
        connection.send(b"x" * 100 + wire.head("GET", "/v1/me") + b"\r\n")
        assert connection.answer().status == 200


def test_a_hang_up_in_mid_body(wire: Wire, shared: Box) -> None:
    for _ in range(5):
        with wire.connect() as connection:
            connection.send(wire.head("POST", f"{shared.path}/exec", "Content-Length: 100\r\n") + b'\r\n{"cmd":')
    assert wire.send("GET", "/v1/me").status == 200


def test_logs_and_answers_that_are_documented_as_missing(wire: Wire) -> None:
    for verb in ("fork", "fork-tree", "promote", "snapshots", "pause", "resume", "hibernate", "wake", "stop", "start"):
        wire.send("POST", f"/v1/sandboxes/{'z' * 20}/{verb}", "").error(404, "sandbox.not_found")
    wire.send("POST", "/v1/templates/build", "name=x", kind="application/x-www-form-urlencoded").error(
        501, "not_implemented"
    )
    wire.send("GET", "/v1/templates/builds").error(501, "not_implemented")
