"""Secrets: put in where a grant says so, refused elsewhere, and taken out of answers."""

from __future__ import annotations

import asyncio
import base64
import json
from urllib.parse import quote

import pytest
from http_kit import (
    ALL_PLACES,
    HOST,
    PLACEHOLDER,
    VALUE,
    Recorder,
    Seen,
    Stage,
    answered,
    chunk,
    get,
    grant,
    read_answer,
)

from cloche_server.core.network import SecretGrant, SecretPlace

BEARER = f"Authorization: Bearer {PLACEHOLDER}"


async def sent(scene: Stage, request: bytes, *, grants: list[SecretGrant] | None = None, tls: bool = True) -> Seen:
    """What the server gets of a request that has to reach it."""
    scene.carrier.grants = [grant()] if grants is None else grants
    site = Recorder()
    await scene.server(site, tls=tls)
    answer = await scene.ask(await scene.door(tls=tls), request, tls=tls)
    assert (answer.status, answer.body) == (200, b"ok"), answer
    assert len(site.seen) == 1
    return site.seen[0]


async def refused(
    scene: Stage, request: bytes, *, grants: list[SecretGrant] | None = None, tls: bool = True
) -> dict[str, str]:
    """What the guest is told of a request that does not reach the server."""
    scene.carrier.grants = [grant()] if grants is None else grants
    site = Recorder()
    await scene.server(site, tls=tls)
    answer = await scene.ask(await scene.door(tls=tls), request, tls=tls)
    assert answer.status == 403
    assert site.seen == []
    told = json.loads(answer.body)
    assert VALUE not in answer.body.decode()
    assert scene.carrier.denials() == [("secret", "violation")]
    return told


async def test_the_value_goes_into_a_header(scene: Stage) -> None:
    seen = await sent(scene, get("/v1/models?x=1", BEARER, "X-Other: kept"))
    assert seen["authorization"] == f"Bearer {VALUE}"
    assert seen["x-other"] == "kept"
    assert seen["accept-encoding"] == "identity"
    assert [(kind, verdict.allowed) for kind, verdict, *_ in scene.carrier.notes] == [("http", True), ("secret", True)]


async def test_the_value_goes_into_basic_credentials(scene: Stage) -> None:
    token = base64.b64encode(f"user:{PLACEHOLDER}".encode()).decode()
    seen = await sent(scene, get("/", f"Authorization: Basic {token}"))
    assert base64.b64decode(seen["authorization"].removeprefix("Basic ")).decode() == f"user:{VALUE}"


async def test_the_value_goes_into_a_query(scene: Stage) -> None:
    seen = await sent(scene, get(f"/find?key={PLACEHOLDER}&q=1"), grants=[grant(places=(SecretPlace.QUERY,))])
    assert seen.target.decode() == f"/find?key={quote(VALUE, safe='')}&q=1"


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("application/json", {"key": PLACEHOLDER}, {"key": VALUE}),
        ("application/x-www-form-urlencoded", f"a=1&key={PLACEHOLDER}", f"a=1&key={quote(VALUE, safe='')}"),
        ("text/plain", f"<{PLACEHOLDER}><{PLACEHOLDER}>", f"<{VALUE}><{VALUE}>"),
    ],
)
async def test_the_value_goes_into_a_body(scene: Stage, kind: str, body: object, expected: object) -> None:
    raw = body if isinstance(body, str) else json.dumps(body)
    request = get("/", f"Content-Type: {kind}", method="POST", body=raw.encode())
    seen = await sent(scene, request, grants=[grant(places=(SecretPlace.BODY,))])
    assert (seen.body.decode() if isinstance(expected, str) else json.loads(seen.body)) == expected
    assert seen["content-length"] == str(len(seen.body))


async def test_the_value_goes_into_a_chunked_body_over_the_borders(scene: Stage) -> None:
    text = f"before {PLACEHOLDER} after".encode()
    body = b"".join(chunk(text[at : at + 3]) for at in range(0, len(text), 3)) + chunk(b"")
    request = get("/", "Transfer-Encoding: chunked", method="POST") + body
    seen = await sent(scene, request, grants=[grant(places=ALL_PLACES)])
    assert seen.body.decode() == f"before {VALUE} after"


@pytest.mark.parametrize(
    ("path", "headers", "body", "changes"),
    [
        ("/", (BEARER,), b"", {"hosts": ("other.example.test",)}),
        ("/", (BEARER,), b"", {"methods": ("POST",)}),
        ("/v2/x", (BEARER,), b"", {"paths": ("/v1/*",)}),
        ("/v1/../v2/x", (BEARER,), b"", {"paths": ("/v1/*",)}),
        ("/v1/%2e%2e/v2/x", (BEARER,), b"", {"paths": ("/v1/*",)}),
        ("/", (f"X-Key: {PLACEHOLDER}",), b"", {"headers": ("authorization",)}),
        ("/", (f"{PLACEHOLDER}: x",), b"", {}),
        (
            "/",
            (f"Authorization: Basic {base64.b64encode(PLACEHOLDER.encode()).decode()}",),
            b"",
            {"hosts": ("x.test",)},
        ),
        (f"/?k={PLACEHOLDER}", (), b"", {}),
        (f"/?k=%63{PLACEHOLDER[1:]}", (), b"", {}),
        (f"/{PLACEHOLDER}", (), b"", {"places": ALL_PLACES}),
        ("/", (), PLACEHOLDER.encode(), {}),
        ("/", (), b"x" * 300000 + PLACEHOLDER.encode(), {}),
        ("/", (), b'{"k":"' + PLACEHOLDER.replace("s", "\\u0073").encode() + b'"}', {}),
    ],
)
async def test_a_placeholder_elsewhere_is_a_violation(
    scene: Stage, path: str, headers: tuple[str, ...], body: bytes, changes: dict[str, object]
) -> None:
    request = get(path, *headers, method="POST" if body else "GET", body=body)
    told = await refused(scene, request, grants=[grant(**changes)])
    assert (told["code"], told["secret"], told["host"]) == ("network.secret_violation", "KEY", HOST)
    assert scene.carrier.violations == [("KEY", HOST, "POST" if body else "GET")]


async def test_no_value_goes_over_plain_http(scene: Stage) -> None:
    told = await refused(scene, get("/", BEARER), tls=False)
    assert told["code"] == "network.secret_violation"


async def test_a_placeholder_passes_where_it_may(scene: Stage) -> None:
    grants = [grant(hosts=("other.test",), pass_hosts=(HOST,))]
    seen = await sent(scene, get(f"/x?{PLACEHOLDER}", BEARER, method="POST", body=PLACEHOLDER.encode()), grants=grants)
    assert (seen["authorization"], seen.body.decode()) == (f"Bearer {PLACEHOLDER}", PLACEHOLDER)
    assert scene.carrier.denials() == []


async def test_nothing_of_a_placeholder_in_a_body_goes_out(scene: Stage) -> None:
    got = bytearray()
    ended = asyncio.Event()

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                got.extend(data)
        finally:
            ended.set()

    await scene.server(site)
    scene.carrier.grants = [grant()]
    reader, writer = await scene.connect(await scene.door())
    writer.write(get("/", "Transfer-Encoding: chunked", method="POST") + chunk(b"harmless"))
    for byte in PLACEHOLDER.encode():
        writer.write(chunk(bytes([byte])))
        await writer.drain()
    answer = await read_answer(reader)
    writer.close()
    await ended.wait()
    assert answer.status == 403
    assert b"harmless" in got
    assert b"c\r\n" not in got.partition(b"harmless")[2], "not even its first letter"


async def test_a_secret_that_is_gone_is_said_so(scene: Stage) -> None:
    scene.carrier.values.clear()
    scene.carrier.grants = [grant()]
    site = Recorder()
    await scene.server(site)
    answer = await scene.ask(await scene.door(), get("/", BEARER))
    assert (answer.status, json.loads(answer.body)["code"]) == (403, "network.secret_unusable")
    assert site.seen == []


async def test_a_value_that_no_header_can_have_is_not_told(scene: Stage) -> None:
    scene.carrier.values["KEY"] = "hidden\x07value"
    scene.carrier.grants = [grant()]
    await scene.server(Recorder())
    answer = await scene.ask(await scene.door(), get("/", BEARER))
    assert (answer.status, json.loads(answer.body)["code"]) == (403, "network.secret_unusable")
    assert b"hidden" not in answer.body
    assert "hidden" not in repr(scene.carrier.notes)


# ------------------------------------------------------------------ answers


def echo(seen: Seen) -> bytes:
    """All that came, in the spellings that echoes have."""
    return answered(
        json.dumps(
            {"headers": {k.decode(): v.decode() for k, v in seen.headers}, "url": seen.target.decode()}
        ).encode(),
        f"X-Echo: {seen['authorization']}",
        "Content-Type: application/json",
    )


async def test_an_echo_is_stripped_and_keeps_its_length(scene: Stage) -> None:
    scene.carrier.grants = [grant(places=ALL_PLACES)]
    await scene.server(Recorder(echo))
    answer = await scene.ask(await scene.door(), get(f"/?k={PLACEHOLDER}", BEARER))
    assert answer.status == 200
    assert answer["x-echo"] == f"Bearer {PLACEHOLDER}"
    assert len(answer.body) == int(answer["content-length"])
    for spelling in (VALUE, quote(VALUE, safe=""), json.dumps(VALUE)[1:-1]):
        assert spelling.encode() not in answer.body
    assert json.loads(answer.body)["headers"]["Authorization"].startswith("Bearer " + PLACEHOLDER[:20])


async def test_an_echo_of_basic_credentials_is_what_the_guest_had_sent(scene: Stage) -> None:
    scene.carrier.grants = [grant()]
    await scene.server(Recorder(echo))
    token = base64.b64encode(f"user:{PLACEHOLDER}".encode()).decode()
    answer = await scene.ask(await scene.door(), get("/", f"Authorization: Basic {token}"))
    assert answer["x-echo"] == f"Basic {token}"
    assert base64.b64encode(f"user:{VALUE}".encode()) not in answer.body


async def test_an_echo_in_chunks_gets_the_placeholder_back_whole(scene: Stage) -> None:
    scene.carrier.grants = [grant()]
    text = f"data: {VALUE}\n\nanother: {VALUE[:10]}".encode()
    parts = (
        b"".join(chunk(text[at : at + 2]) for at in range(0, len(text), 2))
        + b"0\r\nX-End: "
        + VALUE.encode()
        + b"\r\n\r\n"
    )
    await scene.server(Recorder(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + parts))
    answer = await scene.ask(await scene.door(), get("/", BEARER))
    assert answer.body.decode() == f"data: {PLACEHOLDER}\n\nanother: {VALUE[:10]}"
    assert answer.trailers == [(b"X-End", PLACEHOLDER.encode())]


async def test_a_rotation_counts_from_the_next_request(scene: Stage) -> None:
    scene.carrier.grants = [grant()]
    site = Recorder()
    await scene.server(site)
    reader, writer = await scene.connect(await scene.door())
    for value in ("first-value-of-it", "second-value-of-it"):
        scene.carrier.values["KEY"] = value
        writer.write(get("/", BEARER))
        assert (await read_answer(reader)).status == 200
    writer.close()
    assert [seen["authorization"] for seen in site.seen] == ["Bearer first-value-of-it", "Bearer second-value-of-it"]
    assert site.connections == 1
