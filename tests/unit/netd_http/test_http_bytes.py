"""What is read on the way is the same as what is not: each case to the server itself, and through the engine."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import resource
from collections.abc import Callable

import pytest
from http_kit import (
    ALL_PLACES,
    HOST,
    PLACEHOLDER,
    VALUE,
    Answer,
    Recorder,
    Seen,
    Stage,
    answered,
    chunk,
    get,
    grant,
    read_answer,
)  # fmt: skip

pytestmark = pytest.mark.thorough

BIG = os.urandom(1 << 20) * 5
ZIPPED = gzip.compress(b"text " * 10_000)
CHUNKED = chunk(b"first") + chunk(b"second, " * 1000) + chunk(BIG[:100_000])
POST = get("/upload", "Transfer-Encoding: chunked", "Trailer: X-Sum", method="POST")


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


CASES: dict[str, tuple[bytes, bytes | Callable[[Seen], bytes]]] = {
    "get": (get("/a%2Fb/../c;p?q=%20+&q", "X-Odd-CASE: v", "x-odd-case: w"), answered(b"body", "X-Odd: 1", "x-oDD: 2")),
    "large upload": (get("/", method="POST", body=BIG), lambda seen: answered(hashlib.sha256(seen.body).digest())),
    "chunked upload": (POST + CHUNKED + chunk(b""), answered(b"ok")),
    "upload with trailers": (POST + CHUNKED + b"0\r\nX-Sum: 17\r\nX-Other: a\r\n\r\n", answered(b"ok")),
    "empty upload": (get("/", "Content-Length: 0", method="POST"), answered(b"")),
    "expect": (get("/", "Expect: 100-continue", method="PUT", body=BIG[:300_000]), answered(b"ok")),
    "head": (get("/", method="HEAD"), head("HTTP/1.1 200 OK", "Content-Length: 12345", "ETag: x")),
    "head without a length": (get("/", method="HEAD"), head("HTTP/1.1 200 OK", "ETag: x")),
    "head of chunks": (get("/", method="HEAD"), head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked")),
    "204": (get("/", method="DELETE"), head("HTTP/1.1 204 Gone it is", "X: y")),
    "304": (get("/", "If-None-Match: x"), head("HTTP/1.1 304 Not Modified", "Content-Length: 99", "ETag: x")),
    "gzip": (get("/", "Accept-Encoding: gzip, br"), answered(ZIPPED, "Content-Encoding: gzip")),
    "large answer": (get("/"), answered(BIG)),
    "chunked answer": (get("/"), head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked") + CHUNKED + chunk(b"")),
    "answer with trailers": (
        get("/", "TE: trailers"),
        head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", "Trailer: X-Sum") + CHUNKED + b"0\r\nX-Sum: 9\r\n\r\n",
    ),
    "early hints": (get("/"), head("HTTP/1.1 103 Early Hints", "Link: </x>") + answered(b"ok")),
    "cookies": (get("/", "Cookie: a=b; c=d"), answered(b"", "Set-Cookie: a=b, c", "Set-Cookie: d=e", "Vary:")),
    "not found": (get("/"), answered(b"no", status="404 Nothing To See")),
    "redirect": (get("/"), answered(b"", f"Location: https://{HOST}/elsewhere", status="302 Found")),
    "other methods": (get("/", "Depth: 1", method="PROPFIND", body=b"<a/>"), answered(b"x", status="207 Multi-Status")),
    "options": (get("*", method="OPTIONS"), answered(b"")),
    "range": (get("/", "Range: bytes=0-3"), answered(b"abcd", "Content-Range: bytes 0-3/9", status="206 Partial")),
    "latin-1": (get("/", "X-Name: M\xfcller"), answered(b"", "X-Name: M\xfcller")),
    "close": (get("/", "Connection: close"), answered(b"last", "Connection: close")),
}  # fmt: skip


async def twice(scene: Stage, request: bytes, made: bytes | Callable[[Seen], bytes]) -> list[tuple[Answer, Seen]]:
    site = Recorder(made)
    port = await scene.server(site)
    found = [await scene.ask(port, request, direct=True), await scene.ask(await scene.door(), request)]
    return list(zip(found, site.seen, strict=True))


@pytest.mark.parametrize("name", CASES)
async def test_it_is_the_same_as_directly(scene: Stage, name: str) -> None:
    scene.carrier.grants = [grant(places=ALL_PLACES[:2])]
    (direct, direct_seen), (read, read_seen) = await twice(scene, *CASES[name])
    assert direct.status
    assert read == direct
    assert read_seen == direct_seen


async def test_an_answer_without_framing_comes_in_chunks(scene: Stage) -> None:
    (direct, _), (read, _) = await twice(scene, get("/"), head("HTTP/1.0 200 OK", "X: y", "Connection: close") + BIG)
    assert (read.body, read.whole, direct.body) == (BIG, True, BIG)
    assert read["transfer-encoding"] == "chunked"


async def test_a_client_of_http_1_0(scene: Stage) -> None:
    await scene.server(Recorder(head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked") + chunk(b"abc") + chunk(b"")))
    reader, writer = await scene.connect(await scene.door())
    writer.write(f"GET / HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
    found = await reader.read()
    writer.close()
    assert found.endswith(b"\r\n\r\nabc")
    assert b"chunked" not in found


@pytest.mark.parametrize(
    "cut", [answered(b"abcdef")[:-2], head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked") + b"9\r\nabc"]
)
async def test_an_answer_that_is_cut_is_seen_to_be(scene: Stage, cut: bytes) -> None:
    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(cut)
        await writer.drain()

    await scene.server(site)
    with pytest.raises(ConnectionError):
        found = await scene.ask(await scene.door(), get("/"))
        assert not found.whole
        raise ConnectionError


async def test_an_answer_may_come_before_the_body_was_sent(scene: Stage) -> None:
    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answered(b"too large", "Connection: close", status="413 Content Too Large"))
        await writer.drain()
        await reader.read()

    await scene.server(site)
    reader, writer = await scene.connect(await scene.door())
    writer.write(get("/", f"Content-Length: {1 << 30}", method="POST") + b"x" * 100_000)
    assert (await read_answer(reader)).status == 413
    writer.close()


async def test_events_are_passed_on_one_by_one(scene: Stage) -> None:
    scene.carrier.grants = [grant()]
    turn: asyncio.Queue[None] = asyncio.Queue()

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head("HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked"))
        for number in range(5):
            writer.write(chunk(b"data: %d\n\n" % number))
            await turn.get()
        writer.write(chunk(b""))
        await writer.drain()

    await scene.server(site)
    reader, writer = await scene.connect(await scene.door())
    writer.write(get("/", f"Authorization: Bearer {PLACEHOLDER}"))
    await reader.readuntil(b"\r\n\r\n")
    for number in range(5):
        # The next one is not sent before this one has come.
        assert await reader.readexactly(14) == chunk(b"data: %d\n\n" % number)
        turn.put_nowait(None)
    assert await reader.readexactly(5) == b"0\r\n\r\n"
    writer.close()


@pytest.mark.parametrize("tls", [True, False])
async def test_a_websocket(scene: Stage, tls: bool) -> None:
    scene.carrier.grants = [grant(hosts=(HOST,), pass_hosts=(HOST,))]
    got: list[str] = []

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(
            head("HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade") + b"\x81\x02hi"
        )
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    await scene.server(site, tls=tls)
    reader, writer = await scene.connect(await scene.door(tls=tls), tls=tls)
    upgrade = get(
        "/ws",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: x",
        f"Authorization: Bearer {PLACEHOLDER}",
    )
    writer.write(upgrade + b"\x81\x01a")
    answer = await read_answer(reader)
    assert answer.status == 101
    frames = b"\x81\x01a" + PLACEHOLDER.encode() + BIG[:1_000_000]
    writer.write(frames[3:])
    found = answer.body + await reader.readexactly(len(frames) + 4 - len(answer.body))
    assert found == b"\x81\x02hi" + frames
    if not tls:
        writer.write_eof()
        assert await reader.read() == b"", "the end of one half is the end of that half"
    writer.close()
    assert f"Authorization: Bearer {VALUE if tls else PLACEHOLDER}\r\n" in got[0]
    assert [verdict.rule for _, verdict, *_ in scene.carrier.notes] == (["r0", "secret"] if tls else ["r0"])


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_slow_side_holds_up_the_other_one(scene: Stage, direction: str) -> None:
    """Whoever sends to somebody who does not read is stopped soon, however much there is."""
    scene.carrier.grants = [grant()]
    go_on = asyncio.Event()
    moved = 0

    async def pour(writer: asyncio.StreamWriter) -> None:
        nonlocal moved
        for _ in range(1000):
            writer.write(b"x" * 65536)
            await writer.drain()
            moved += 65536

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if direction == "down":
            writer.write(head("HTTP/1.1 200 OK", f"Content-Length: {65536 * 1000}"))
            await pour(writer)
        else:
            await go_on.wait()
            await reader.readexactly(65536 * 1000)
            writer.write(answered(b"ok"))

    await scene.server(site)
    reader, writer = await scene.connect(await scene.door())
    length = f"Content-Length: {65536 * 1000}"
    writer.write(get("/", length, method="POST") if direction == "up" else get("/"))
    pouring = asyncio.create_task(pour(writer)) if direction == "up" else None
    stood = -1
    async with asyncio.timeout(30):
        while moved == 0 or moved != stood:  # until nothing moves any more
            stood = moved
            await asyncio.sleep(0.3)
    assert moved < 32 * 1024 * 1024
    go_on.set()
    if pouring is not None:
        await pouring
    answer = await read_answer(reader)
    assert len(answer.body) == (65536 * 1000 if direction == "down" else 2)
    writer.close()


async def test_a_long_download_takes_no_memory(scene: Stage) -> None:
    scene.carrier.grants = [grant()]
    sums = [hashlib.sha256(), hashlib.sha256()]

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head("HTTP/1.1 200 OK", f"Content-Length: {len(BIG) * 20}"))
        for _ in range(20):
            for at in range(0, len(BIG), 1 << 18):
                writer.write(BIG[at : at + (1 << 18)])
                await writer.drain()
            sums[0].update(BIG)

    await scene.server(site)
    reader, writer = await scene.connect(await scene.door())
    writer.write(get("/", f"Authorization: Bearer {PLACEHOLDER}"))
    await reader.readuntil(b"\r\n\r\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    left = len(BIG) * 20
    while left:
        data = await reader.read(1 << 18)
        assert data
        sums[1].update(data)
        left -= len(data)
    writer.close()
    assert sums[0].digest() == sums[1].digest()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 * 1024


@pytest.mark.parametrize("case", ["large upload", "large answer", "chunked upload"])
async def test_bandwidth_is_asked_for_before_bytes_pass(scene: Stage, case: str) -> None:
    request, made = CASES[case]
    site = Recorder(made)
    await scene.server(site)
    gates = [asyncio.Event() for _ in range(2)]

    async def gate(sent: int, received: int) -> None:
        await gates[0 if sent else 1].wait()

    scene.carrier.gate = gate
    reader, writer = await scene.connect(await scene.door())
    writer.write(request)
    answer = asyncio.create_task(read_answer(reader))
    async with asyncio.timeout(20):
        while scene.carrier.paced == (0, 0):
            await asyncio.sleep(0.01)
        assert not answer.done()
        for one in gates:
            one.set()
        found = await answer
    writer.close()
    assert scene.carrier.paced == (len(site.seen[0].body), len(found.body))
