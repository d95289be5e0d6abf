"""TLS towards clients: HTTP/2 and HTTP/1.1 by choice, and a certificate that is renewed while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from gateway_site import BOX, Site, answering, head_of, mirror, ok, site

from cloche_server.app.ports import PortWish
from cloche_server.core.errors import ClocheError
from cloche_server.core.http1 import Framing
from cloche_server.core.previews import PortAccess
from cloche_server.gateway import http2
from cloche_server.gateway.exchange import Exchange
from cloche_server.gateway.tls import Certificate
from cloche_server.host.sockets import SocketStream

pytestmark = pytest.mark.thorough


def write_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("*.localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert, private = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    )
    return cert, private


@dataclass
class Secure:
    front: Site
    http: httpx.AsyncClient

    async def ask(self, method: str, path: str, **options: object) -> httpx.Response:
        return await self.http.request(method, path, **options)  # type: ignore[arg-type]


@pytest.fixture(params=[True, False], ids=["h2", "http/1.1"])
async def secure(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Secure]:
    certificate = Certificate(*write_certificate(tmp_path, "one"), ("h2", "http/1.1"))
    async with site(tmp_path, tls=certificate.context) as front:
        front.gateway.http2 = http2.serve
        url = f"https://127.0.0.1:{front.port}"
        headers = {"Host": front.host}
        async with httpx.AsyncClient(
            http2=request.param, verify=False, base_url=url, headers=headers, timeout=20, trust_env=False
        ) as http:
            yield Secure(front, http)


async def test_requests_and_bodies(secure: Secure) -> None:
    async with await secure.front.serve(mirror):
        reply = await secure.ask("POST", "/a%2F//b?c", content=b"x" * 1000, headers={"Cookie": "a=b"})
        assert reply.status_code == 200
        assert reply.content.startswith(b"POST /a%2F//b?c HTTP/1.1\r\n")
        assert reply.content.endswith(b"x" * 1000)
        assert f"\r\nHost: {secure.front.host}\r\n".encode() in reply.content
        assert b"\r\nX-Forwarded-Proto: https\r\n" in reply.content
        assert b"\r\nCookie: a=b\r\n" in reply.content.replace(b"cookie", b"Cookie")
        many = await asyncio.gather(*(secure.ask("GET", f"/{n}") for n in range(50)))
        assert [one.content.split(b" ")[1] for one in many] == [b"/%d" % n for n in range(50)]
        assert reply.http_version in {"HTTP/2", "HTTP/1.1"}


async def test_much_both_ways(secure: Secure) -> None:
    big = bytes(range(256)) * 20_000

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        got = await reader.readexactly(len(big))
        writer.write(ok(got))
        await writer.drain()

    async def pieces() -> AsyncIterator[bytes]:
        yield big[:1000]
        yield big[1000:]

    async with await secure.front.serve(handler):
        reply = await secure.ask("PUT", "/", content=pieces(), headers={"Content-Length": str(len(big))})
    assert reply.content == big


async def test_an_answer_that_breaks_off_is_an_error(secure: Secure) -> None:
    async with await secure.front.serve(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort")):
        with pytest.raises(httpx.TransportError):
            await secure.ask("GET", "/")


async def test_pages_cookies_and_heads(secure: Secure) -> None:
    front = secure.front
    assert (await secure.ask("GET", "/")).json()["code"] == "port.closed"
    async with await front.serve(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n")):
        assert (await secure.ask("HEAD", "/")).headers["content-length"] == "77"
    await front.ports.declare("w", BOX, PortWish(3000, access=PortAccess.TOKEN))
    token, _ = await front.ports.token("w", BOX, 3000, None, [])
    reply = await secure.ask("GET", f"/x?preview_token={token}", headers={"Accept": "text/html"})
    assert (reply.status_code, reply.headers["location"]) == (302, f"https://{front.host}/x")
    assert reply.headers["set-cookie"].endswith("; Secure")
    async with await front.serve(mirror):
        seen = await secure.ask("GET", "/", headers={"Cookie": f"cloche_preview={token}"})
    assert (seen.status_code, token.encode() in seen.content) == (200, False)


async def test_a_client_that_gives_up_frees_the_server(secure: Secure) -> None:
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        await reader.read(-1)
        ended.set()

    async with await secure.front.serve(handler):
        asking = asyncio.ensure_future(secure.ask("GET", "/"))
        while not secure.front.world.open:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
        await secure.http.aclose()
        async with asyncio.timeout(20):
            await ended.wait()


@pytest.mark.parametrize("number", range(12))
async def test_nonsense_ends_its_connection_and_nothing_else(number: int) -> None:
    """Frames of random kinds, lengths and contents behind a good beginning."""
    random = Random(number)
    asked: list[Exchange] = []

    async def handle(exchange: Exchange) -> None:
        asked.append(exchange)
        await exchange.read_body()
        await exchange.begin(200, b"OK", [], Framing(length=0))
        await exchange.finish()

    serving: list[asyncio.Future[None]] = []
    loop = asyncio.get_running_loop()

    def made(stream: SocketStream) -> None:
        serving.append(asyncio.ensure_future(http2.serve(stream, handle)))

    server = await loop.create_server(lambda: SocketStream(made), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    for _ in range(random.randrange(1, 60)):
        body = random.randbytes(random.choice((0, 4, 5, 8, 30)))
        head = len(body).to_bytes(3, "big") + bytes((random.randrange(11), random.choice((0, 1, 4, 5, 255))))
        writer.write(head + random.choice((0, 1, 3, 2**31 - 1)).to_bytes(4, "big") + body)
    writer.write_eof()
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            await reader.read(-1)
        await asyncio.gather(*serving)  # it has ended, and raised nothing
    writer.close()
    server.close()


def test_a_certificate_is_read_again_when_it_changes(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, "one")
    certificate = Certificate(cert, key, ("http/1.1",))
    assert not certificate.look()
    write_certificate(tmp_path, "two")
    assert certificate.look()
    assert not certificate.look()
    key.write_text("nonsense")
    assert not certificate.look(), "what cannot be used changes nothing"
    with pytest.raises(ClocheError, match="cannot be used"):
        Certificate(cert, key, ("http/1.1",))
    assert isinstance(certificate.context, ssl.SSLContext)
