"""Which requests are carried: policy on each, names that agree, limits, and servers that are who they should be."""

from __future__ import annotations

import asyncio
import json
import ssl
import time

import pytest
from http_kit import HOST, Answer, Recorder, Stage, answered, get, grant, own_authority, read_answer

from cloche_server.host.certificates import make_authority
from cloche_server.netd.http import engine as engine_module

OTHER = "other.example.test"


async def answer(scene: Stage, request: bytes, *, tls: bool = False) -> tuple[Answer, Recorder]:
    site = Recorder()
    await scene.server(site, HOST, OTHER, tls=tls)
    return await scene.ask(await scene.door(tls=tls), request, tls=tls), site


def code(answer: Answer) -> str:
    return str(json.loads(answer.body)["code"])


# ------------------------------------------------------------------ policy


async def test_a_denied_request_is_answered_and_logged(scene: Stage) -> None:
    scene.carrier.denied = lambda host, method, path: path == "/no"
    site = Recorder()
    await scene.server(site)
    reader, writer = await scene.connect(await scene.door())
    writer.write(get("/yes") + get("/no?x=1"))
    assert (await read_answer(reader)).status == 200
    denied = await read_answer(reader)
    writer.close()
    assert json.loads(denied.body) == {
        "error": "the policy does not allow this request", "code": "network.denied", "rule": "r1", "host": HOST,
    }  # fmt: skip
    assert denied.status == 403
    assert [seen.target for seen in site.seen] == [b"/yes"]
    assert [(kind, v.allowed, v.rule, host, method, path) for kind, v, host, method, path in scene.carrier.notes] == [
        ("http", True, "r0", HOST, "GET", "/yes"),
        ("http", False, "r1", HOST, "GET", "/no"),
    ]


async def test_a_large_denied_upload_gets_its_answer(scene: Stage) -> None:
    scene.carrier.denied = lambda host, method, path: True
    found, site = await answer(scene, get("/", method="POST", body=b"x" * 3_000_000))
    assert (found.status, site.heads) == (403, 0)


async def test_a_denied_head_request_has_no_body(scene: Stage) -> None:
    scene.carrier.denied = lambda host, method, path: True
    found, _ = await answer(scene, get("/", method="HEAD"))
    assert (found.status, found.body) == (403, b"")


async def test_a_name_that_may_not_be_dialed(scene: Stage) -> None:
    found = await scene.ask(await scene.door(tls=False), get("/", host="unknown.test"), tls=False)
    assert (found.status, json.loads(found.body)["rule"]) == (403, "not-resolved")


# ------------------------------------------------------------------ names


async def test_another_host_in_a_tls_connection_is_refused(scene: Stage) -> None:
    found, site = await answer(scene, get("/", host=OTHER), tls=True)
    assert (found.status, code(found)) == (421, "network.host_mismatch")
    assert (site.connections, scene.carrier.dials) == (0, [])
    assert scene.carrier.denials() == [("http", "host-mismatch")]


async def test_also_in_a_later_request_an_absolute_target_and_an_upgrade(scene: Stage) -> None:
    site = Recorder()
    await scene.server(site, HOST, OTHER)
    door = await scene.door()
    reader, writer = await scene.connect(door)
    writer.write(get("/"))
    assert (await read_answer(reader)).status == 200
    writer.write(get("/", host=OTHER))
    assert (await read_answer(reader)).status == 421
    writer.close()
    upgrade = get("/", "Connection: Upgrade", "Upgrade: websocket", host=OTHER)
    assert (await scene.ask(door, upgrade)).status == 421
    assert (await scene.ask(door, get(f"https://{OTHER}/"))).status == 400
    assert (await scene.ask(door, get("/", host=f"{HOST}:8443"))).status == 421
    assert len(site.seen) == 1


@pytest.mark.parametrize("host", [HOST, HOST.upper(), HOST + ".", HOST + ":443", HOST.title() + ".:443"])
async def test_spellings_of_the_same_host(scene: Stage, host: str) -> None:
    found, site = await answer(scene, get("/", host=host), tls=True)
    assert (found.status, site.seen[0]["host"]) == (200, host)


async def test_an_absolute_target_that_agrees(scene: Stage) -> None:
    found, site = await answer(scene, get(f"http://{HOST}/a?b=c"))
    assert (found.status, site.seen[0].target) == (200, b"/a?b=c")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a.test\r\nhost: a.test\r\n\r\n",
        get("/", host=""),
        get("/", host="a.test@b.test"),
        get("/", host="a.test,b.test"),
        get("/", host="a.test/x"),
        get("/", host="a.test:0"),
        get("/", host="a.test:x"),
        get("/", host="a.test:99999"),
        get("/", host="a..test"),
        get("/", host="127.1"),
        get("/", host="0x7f000001"),
        get("/", host="2130706433"),
        get("/", host="[::1"),
        get("/", host="[fe80::1%eth0]"),
        get("/", host="a\x80.test"),
        get("/", host="a.test:8080"),
        get("http://b.test/", host="a.test"),
        get("http://a.test@b.test/", host="a.test"),
        get("https://a.test/", host="a.test"),
        get("ftp://a.test/", host="a.test"),
        get("a.test", host="a.test"),
        get("/#x", host="a.test"),
        get("/", "Content-Length: 5", "Transfer-Encoding: chunked", host=HOST, method="POST"),
        get("/", "Content-Length: 5", "Content-Length: 6", host=HOST, method="POST"),
        get("/", "Content-Length: +5", host=HOST, method="POST"),
        get("/", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", host=HOST, method="POST"),
        get("/", "Transfer-Encoding: gzip, chunked", host=HOST, method="POST"),
        get("/", "Transfer-Encoding : chunked", host=HOST, method="POST"),
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/1.1\nHost: a.test\nX: a\0b\n\n",
    ],
)  # fmt: skip
async def test_what_is_ambiguous_is_not_carried(scene: Stage, request_: bytes) -> None:
    found, site = await answer(scene, request_)
    assert (found.status, code(found)) == (400, "network.bad_request")
    assert (site.connections, scene.carrier.dials) == (0, [])


async def test_http_2_is_refused_in_its_own_words(scene: Stage) -> None:
    site = Recorder()
    await scene.server(site, tls=False)
    reader, writer = await scene.connect(await scene.door(tls=False), tls=False)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    said = await reader.read()
    writer.close()
    settings, goaway, told = said[:9], said[9:26], json.loads(said[26:])
    assert settings == b"\0\0\0\x04\0\0\0\0\0"
    assert goaway == (len(said) - 18).to_bytes(3, "big") + b"\x07" + bytes(9) + b"\0\0\0\x0d"
    assert told["rule"] == "http2"
    assert "HTTP/1.1" in told["error"]
    assert (scene.carrier.denials(), site.connections) == ([("http", "http2")], 0)


async def test_tunnels_are_not_opened(scene: Stage) -> None:
    found, site = await answer(
        scene, b"CONNECT %s:443 HTTP/1.1\r\nHost: %s:443\r\n\r\n" % (HOST.encode(), HOST.encode())
    )
    assert (found.status, json.loads(found.body)["rule"]) == (403, "connect")
    assert site.connections == 0


async def test_no_upgrade_to_another_http(scene: Stage) -> None:
    upgrade = get("/", "Connection: Upgrade, HTTP2-Settings, keep-alive", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ")
    found, site = await answer(scene, upgrade)
    assert found.status == 200
    assert [name.lower() for name, _ in site.seen[0].headers] == [b"host", b"connection"]
    assert site.seen[0]["connection"] == "keep-alive"


# ------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    "headers", [["X: " + "a" * 70_000], [f"X-{number}: a" for number in range(201)], ["X" + "a" * 200_000]]
)
async def test_heads_have_an_end(scene: Stage, headers: list[str]) -> None:
    found, site = await answer(scene, get("/", *headers))
    assert (found.status, site.connections) == (431, 0)


async def test_a_head_that_drips_is_ended(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "HEAD_SECONDS", 0.2)
    reader, writer = await scene.connect(await scene.door(tls=False), tls=False)
    writer.write(b"GET / HTTP/1.1\r\nHost: ")
    assert (await read_answer(reader)).status == 408
    writer.close()


async def test_an_idle_connection_ends(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.1)
    reader, writer = await scene.connect(await scene.door(tls=False), tls=False)
    assert await reader.read() == b""
    writer.close()


# ------------------------------------------------------------------ servers and TLS


async def test_a_server_that_cannot_be_verified_gets_nothing(scene: Stage) -> None:
    scene.carrier.grants = [grant()]
    impostor = make_authority("somebody", time.time())
    got = []

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.read(100))

    for name, authority in ((HOST, impostor), (HOST, own_authority()), ("wrong.name.test", None)):
        scene.carrier.routes[HOST] = await scene.server(site, name, authority=authority)
        found = await scene.ask(await scene.door(), get("/"))
        assert (found.status, code(found)) == (502, "network.upstream_untrusted")
    assert got in ([], [b""] * len(got))
    assert {rule for _, rule in scene.carrier.denials()} == {"untrusted"}


async def test_a_server_that_is_not_there_or_says_nothing(scene: Stage) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp.example.test\r\n")

    door = await scene.door(tls=False)
    scene.carrier.routes[HOST] = 1
    assert code(await scene.ask(door, get("/"), tls=False)) == "network.upstream_failed"
    for handler in (silent, nonsense):
        await scene.server(handler, tls=False)
        found = await scene.ask(door, get("/"), tls=False)
        assert (found.status, code(found)) == (502, "network.upstream_failed")


async def test_the_certificate_is_for_exactly_the_name(scene: Stage) -> None:
    await scene.server(Recorder(), HOST, OTHER)
    door = await scene.door()
    _, writer = await scene.connect(door)
    found = writer.get_extra_info("peercert")
    assert found["subjectAltName"] == (("DNS", HOST),)
    assert ssl.cert_time_to_seconds(found["notBefore"]) < time.time() - 86400
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    writer.close()
    with pytest.raises(OSError):
        await scene.connect(door, name=OTHER)


async def test_a_program_that_does_not_trust_the_authority_is_noted(scene: Stage) -> None:
    await scene.server(Recorder())
    door = await scene.door()
    with pytest.raises(ssl.SSLError):
        await scene.connect(door, direct=True)
    async with asyncio.timeout(10):
        while not scene.carrier.notes:
            await asyncio.sleep(0.01)
    assert scene.carrier.denials() == [("http", "not-trusted")]


async def test_tls_without_a_name_is_not_read(scene: Stage) -> None:
    with pytest.raises(OSError):
        await scene.connect(await scene.door(None))
    assert scene.carrier.denials() == [("http", "no-name")]


async def test_connections_are_kept_and_made_anew(scene: Stage) -> None:
    site = Recorder(lambda seen: answered(b"x", *(["Connection: close"] if seen.target == b"/close" else [])))
    await scene.server(site)
    reader, writer = await scene.connect(await scene.door())
    for path in ("/1", "/2", "/3"):
        writer.write(get(path))
        assert (await read_answer(reader)).body == b"x"
    assert site.connections == 1
    writer.write(get("/close"))
    assert (await read_answer(reader)).body == b"x"
    assert await reader.read() == b"", "as the server has closed it, so do we"
    writer.close()
    assert scene.carrier.sent > 4 * 40
    assert scene.carrier.received > 4 * 20


async def test_a_guest_that_leaves_ends_the_request(scene: Stage) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        try:
            await reader.read()
        finally:
            left.set()

    await scene.server(slow)
    _, writer = await scene.connect(await scene.door())
    writer.write(get("/"))
    await asked.wait()
    writer.transport.abort()
    async with asyncio.timeout(10):
        await left.wait()
