"""Plain HTTP through the gateway: what reaches the server in the guest, and what comes back."""

from __future__ import annotations

import asyncio

import pytest
from gateway_site import BOX, OTHER, OWNER, Site, answering, head_of, mirror, ok

from cloche_server.core.errors import ClocheError
from cloche_server.gateway.routes import is_ours


async def test_one_rule_for_the_host_and_the_path_byte_for_byte(front: Site) -> None:
    async with await front.serve(mirror):
        reply = await front.ask("GET //a%2Fb/../c?x=%20&y=1+2 HTTP/1.1\nX-Forwarded-For: 6.6.6.6\nAccept: */*")
    seen = reply.body.decode()
    assert seen.startswith("GET //a%2Fb/../c?x=%20&y=1+2 HTTP/1.1\r\n")
    assert f"\r\nHost: {front.host}\r\n" in seen
    assert f"\r\nX-Forwarded-Host: {front.host}\r\n" in seen
    assert "\r\nX-Forwarded-Proto: http\r\n" in seen
    assert "\r\nX-Forwarded-For: 127.0.0.1\r\n" in seen
    assert "6.6.6.6" not in seen
    assert front.world.dialed == [("w", BOX, 3000)]


async def test_hop_by_hop_headers_stay_on_their_hop(front: Site) -> None:
    answer = ok(b"x", b"Connection: X-Secret, close", b"X-Secret: 1", b"Keep-Alive: timeout=5", b"Server: s")
    heads = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await head_of(reader))
        writer.write(answer)

    async with await front.serve(handler):
        wire = await front.connect()
        await wire.send(
            b"GET / HTTP/1.1\r\nHost: %b\r\nConnection: keep-alive, X-Mine\r\nX-Mine: 1\r\nTE: trailers\r\n"
            b"Proxy-Authorization: Basic eDp5\r\nX-Kept: 1\r\n\r\n" % front.host.encode()
        )
        reply = await wire.reply()
        wire.close()
    assert reply.get("X-Secret") is reply.get("Keep-Alive") is reply.get("Connection") is None
    assert reply.get("Server") == "s"
    seen = heads[0].lower()
    assert all(name not in seen for name in (b"x-mine", b"te:", b"proxy-authorization"))
    assert b"x-kept: 1" in seen
    assert b"connection: close" in seen


async def test_requests_follow_one_another_on_a_connection(front: Site) -> None:
    async with await front.serve(mirror):
        wire = await front.connect()
        for number in range(3):
            await wire.send(
                b"POST /%d HTTP/1.1\r\nHost: %b\r\nContent-Length: 3\r\n\r\nabc" % (number, front.host.encode())
            )
            reply = await wire.reply()
            assert reply.body.startswith(b"POST /%d " % number)
            assert reply.body.endswith(b"abc")
        # Two at once are answered in their order.
        both = b"".join(b"GET /p%d HTTP/1.1\r\nHost: %b\r\n\r\n" % (n, front.host.encode()) for n in range(2))
        await wire.send(both)
        assert [(await wire.reply()).body[:7] for _ in range(2)] == [b"GET /p0", b"GET /p1"]
        wire.close()


@pytest.mark.parametrize(
    ("answer", "framing", "body"),
    [
        (ok(b"hello"), "Content-Length", b"hello"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n1\r\n!\r\n0\r\n\r\n",
            "chunked",
            b"hello!",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", "chunked", b"until the end"),
        (
            b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
            "chunked",
            b"a",
        ),
        (b"HTTP/1.1 200 OK\nX: y\n\nbare", "chunked", b"bare"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", None, b""),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + ok(b"late"),
            "Content-Length",
            b"late",
        ),
    ],
)
async def test_answers_keep_their_length(front: Site, answer: bytes, framing: str | None, body: bytes) -> None:
    async with await front.serve(answering(answer)):
        reply = await front.ask("GET / HTTP/1.1", close=False)
    assert (reply.body, reply.whole) == (body, True)
    assert (reply.get("transfer-encoding") == "chunked") == (framing == "chunked")
    assert (reply.get("content-length") is not None) == (framing == "Content-Length")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_off_is_seen_to_break_off(front: Site, answer: bytes) -> None:
    async with await front.serve(answering(answer)):
        assert not (await front.ask("GET / HTTP/1.1")).whole


async def test_head_has_a_length_and_no_body(front: Site) -> None:
    async with await front.serve(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")):
        wire = await front.connect()
        for _ in range(2):
            await wire.send(b"HEAD / HTTP/1.1\r\nHost: %b\r\n\r\n" % front.host.encode())
            assert (await wire.reply("HEAD")).get("content-length") == "1234"
        wire.close()


async def test_expect_continue_is_answered_by_the_server(front: Site) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"\r\nExpect: 100-continue\r\n" in await head_of(reader)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(4) == b"body"
        writer.write(ok(b"done"))

    async with await front.serve(handler):
        wire = await front.connect()
        head = f"PUT / HTTP/1.1\r\nHost: {front.host}\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
        await wire.send(head.encode())
        assert (await wire.head()).status == 100
        await wire.send(b"body")
        assert (await wire.reply()).body == b"done"
        wire.close()


async def test_events_come_one_by_one(front: Site) -> None:
    go = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await go.wait()
        writer.write(b"data: 2\n\n")

    async with await front.serve(handler):
        wire = await front.connect()
        await wire.send(f"GET / HTTP/1.1\r\nHost: {front.host}\r\n\r\n".encode())
        await wire.head()
        async with asyncio.timeout(20):
            await wire.reader.readuntil(b"data: 1\n\n")
            go.set()  # only now: the first event was not held back
            await wire.reader.readuntil(b"data: 2\n\n")
        wire.close()


async def test_an_upload_is_passed_on_as_it_comes_in_chunks(front: Site) -> None:
    got = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"\r\nTransfer-Encoding: chunked\r\n" in await head_of(reader)
        await reader.readuntil(b"one")
        got.set()
        await reader.readuntil(b"0\r\nX-Trailer: t\r\n\r\n")
        writer.write(ok(b"all"))

    async with await front.serve(handler):
        wire = await front.connect()
        head = f"POST / HTTP/1.1\r\nHost: {front.host}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await wire.send(head.encode() + b"3\r\none\r\n")
        async with asyncio.timeout(20):
            await got.wait()
        await wire.send(b"3\r\ntwo\r\n0\r\nX-Trailer: t\r\n\r\n")
        assert (await wire.reply()).body == b"all"
        wire.close()


async def test_a_server_may_answer_before_it_has_read_everything(front: Site) -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(refusal)
        await writer.drain()
        await reader.read(-1)

    async with await front.serve(handler):
        wire = await front.connect()
        await wire.send(f"POST / HTTP/1.1\r\nHost: {front.host}\r\nContent-Length: 100000000\r\n\r\nxxx".encode())
        reply = await wire.reply()
        assert (reply.status, reply.body) == (413, b"no")
        wire.close()


async def test_a_slow_reader_holds_its_server_back(front: Site) -> None:
    """So that what is under way takes no memory: the server writes as fast as the client reads."""
    written = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 400000000\r\n\r\n")
        while written < 400_000_000:
            writer.write(bytes(1_000_000))
            await writer.drain()
            written += 1_000_000

    async with await front.serve(handler):
        wire = await front.connect()
        await wire.send(f"GET / HTTP/1.1\r\nHost: {front.host}\r\n\r\n".encode())
        await wire.head()
        before = -1
        while written != before:  # until all buffers on the way are full
            before = written
            await asyncio.sleep(0.5)
        assert written < 100_000_000
        wire.close()


async def test_a_client_that_hangs_up_frees_everything(front: Site) -> None:
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        await reader.read(-1)
        ended.set()

    async with await front.serve(handler):
        wire = await front.connect()
        await wire.send(f"GET / HTTP/1.1\r\nHost: {front.host}\r\n\r\n".encode())
        while not front.world.open:
            await asyncio.sleep(0.01)
        wire.close()
        async with asyncio.timeout(20):
            await ended.wait()
            while front.world.open:
                await asyncio.sleep(0.01)


async def test_a_client_that_hangs_up_ends_its_wait_for_a_wake(front: Site) -> None:
    front.world.awake.clear()
    wire = await front.connect()
    await wire.send(f"GET / HTTP/1.1\r\nHost: {front.host}\r\n\r\n".encode())
    while not front.world.dialed:
        await asyncio.sleep(0.01)
    wire.close()
    # `site` would not end if the dial were still waited for.


async def test_path_forms(front: Site) -> None:
    async with await front.serve(mirror):
        path = f"/v1/sandboxes/{BOX}/proxy/3000"
        for asked, seen in (
            (f"{path}/a%2F//b?c=d", b"GET /a%2F//b?c=d "),
            (path, b"GET / "),
            (f"{path}?q", b"GET /?q "),
        ):
            reply = await front.ask(f"GET {asked} HTTP/1.1\nAuthorization: Bearer {OWNER}", host="localhost")
            assert reply.body.startswith(seen)
            assert OWNER.encode() not in reply.body
            assert f"X-Forwarded-Prefix: {path}\r\n".encode() in reply.body
        token, _ = await front.ports.token("w", BOX, 3000, None, [])
        reply = await front.ask(f"GET /v1/p/{token}/x?y HTTP/1.1", host="localhost")
        assert reply.body.startswith(b"GET /x?y ")
        assert token.encode() not in reply.body
        named = f"GET /h HTTP/1.1\nX-Cloche-Sandbox: {BOX}\nX-Cloche-Port: 3000"
        reply = await front.ask(named, host="127.0.0.1")
        assert reply.body.startswith(b"GET /h ")
        assert b"x-cloche" not in reply.body.lower()


async def test_what_is_not_there_looks_the_same_however_it_is_missing(front: Site) -> None:
    seen = set()
    for host in (f"3000-{'q' * 20}.localhost", f"0-{BOX}.localhost", f"70000-{BOX}.localhost", "localhost", "x.y.z"):
        reply = await front.ask("GET / HTTP/1.1", host=host)
        assert reply.status == 404
        assert b"sandbox.not_found" in reply.body
    for sandbox in (OTHER, "q" * 20):
        reply = await front.ask(f"GET /v1/sandboxes/{sandbox}/proxy/3000/ HTTP/1.1\nAuthorization: Bearer {OWNER}")
        seen.add((reply.status, reply.body.split(b"request_id")[0]))
    reply = await front.ask(
        f"GET /v1/sandboxes/{BOX}/proxy/3000/ HTTP/1.1\nAuthorization: Bearer {OWNER}", host="localhost"
    )
    assert reply.status == 502
    for port, status in ((0, 400), (70000, 400)):
        head = f"GET /v1/sandboxes/{BOX}/proxy/{port}/ HTTP/1.1\nAuthorization: Bearer {OWNER}"
        assert (await front.ask(head, host="localhost")).status == status


@pytest.mark.parametrize(
    ("said", "status", "word"),
    [
        (b"", 502, b"without an answer"),
        (b"HTTP/1.1 200 OK\r\nX: y", 502, b"in the middle"),
        (b"SSH-2.0-OpenSSH\r\n", 502, b"does not speak HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", 502, b"speaks TLS"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 502, b"Content-Length"),
        (b"HTTP/1.1 200 OK\r\nA\0: b\r\n\r\n", 502, b"malformed"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", 502, b"nobody had asked"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20000, 502, b"too large"),
    ],
)
async def test_a_page_says_what_is_wrong_with_the_server(front: Site, said: bytes, status: int, word: bytes) -> None:
    async with await front.serve(answering(said)):
        reply = await front.ask("GET / HTTP/1.1")
        page = await front.ask("GET / HTTP/1.1\nAccept: text/html,*/*")
    assert (reply.status, reply.get("content-type")) == (status, "application/json")
    assert word in reply.body
    assert b'"port.bad_answer"' in reply.body
    assert page.get("content-type") == "text/html; charset=utf-8"
    assert word in page.body


async def test_nothing_listens_and_then_something_does(front: Site) -> None:
    reply = await front.ask("GET / HTTP/1.1\nAccept: text/html")
    assert reply.status == 502
    assert b"0.0.0.0 or 127.0.0.1" in reply.body
    async with await front.serve(mirror):
        assert (await front.ask("GET / HTTP/1.1")).status == 200


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sandbox.invalid_state", 503),
        ("sandbox.failed", 503),
        ("sandbox.unreachable", 502),
        ("port.timeout", 504),
        ("sandbox.busy", 503),
    ],
)
async def test_the_state_of_the_sandbox_is_told(front: Site, code: str, status: int) -> None:
    front.world.ports[3000] = ClocheError(code, "so it is", retry_after=1 if code == "sandbox.busy" else None)
    reply = await front.ask("GET / HTTP/1.1")
    assert reply.status == status
    assert code.encode() in reply.body
    assert (reply.get("retry-after") is not None) == (code == "sandbox.busy")


@pytest.mark.parametrize(
    ("request_line", "claimed"),
    [
        (b"GET /v1/sandboxes/abcdefgh12/proxy/3000/ HTTP/1.1\r\n", True),
        (b"GET /v1/p/x", True),
        (b"GET /v1/sandboxes/abcdefgh12/exec HTTP/1.1\r\n", False),
        (b"GET /v1/sandboxes/abcdefgh12/pro", None),
        (b"GET /v1/sandboxes/abcdefgh12/ports HTTP/1.1", False),
        (b"GET /v1/san", None),
        (b"POS", None),
        (b"\x16\x03\x01", False),
        (b"GET /v1/me HTTP/1.1\r\n", False),
    ],
)
def test_what_of_the_api_is_for_a_port(request_line: bytes, claimed: bool | None) -> None:
    assert is_ours(request_line) is claimed
