"""Connections out: fallback between addresses, and through proxies of both kinds."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Awaitable, Callable
from ipaddress import ip_address

import pytest

from cloche_server.netd.dial import Dialer, OutboundProxy

LOCAL = ip_address("127.0.0.1")
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


async def served(talk: Callable[[Reader, Writer], Awaitable[None]]) -> tuple[asyncio.Server, int]:
    async def one(reader: Reader, writer: Writer) -> None:
        try:
            await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def greet(_reader: Reader, writer: Writer) -> None:
    writer.write(b"hello")
    await writer.drain()


async def greeting(sock: socket.socket) -> bytes:
    with sock:
        return await asyncio.get_running_loop().sock_recv(sock, 100)


async def test_the_next_address_is_tried_when_one_refuses() -> None:
    server, port = await served(greet)
    async with server:
        sock, address = await Dialer().connect_any([ip_address("127.0.0.99"), LOCAL], port)
        assert address == LOCAL
        assert await greeting(sock) == b"hello"


async def test_when_none_answers_it_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError):
        await Dialer().connect_any([LOCAL, ip_address("127.0.0.2")], port)
    with pytest.raises(OSError):
        await Dialer().connect_any([], port)


async def test_http_connect_with_user_and_password() -> None:
    heads: list[bytes] = []

    async def proxy(reader: Reader, writer: Writer) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 Connection established\r\nX: y\r\n\r\nhello")
        await writer.drain()

    server, port = await served(proxy)
    async with server:
        dialer = Dialer(OutboundProxy.parse(f"http://me:p%40ss@127.0.0.1:{port}"))
        assert await greeting(await dialer.connect(ip_address("45.90.1.1"), 443)) == b"hello"
        assert await greeting(await dialer.connect(ip_address("2a0f::1"), 80)) == b"hello"
    assert heads[0].startswith(b"CONNECT 45.90.1.1:443 HTTP/1.1\r\n")
    assert b"Basic " + base64.b64encode(b"me:p@ss") in heads[0]
    assert heads[1].startswith(b"CONNECT [2a0f::1]:80 HTTP/1.1\r\n")


async def test_socks5_with_user_and_password() -> None:
    seen: list[bytes] = []

    async def proxy(reader: Reader, writer: Writer) -> None:
        seen.append(await reader.readexactly(3))
        writer.write(b"\x05\x02")
        seen.append(await reader.readexactly(2 + 2 + 1 + 4))
        writer.write(b"\x01\x00")
        seen.append(await reader.readexactly(10))
        writer.write(b"\x05\x00\x00\x03\x03abc\x00\x50hello")
        await writer.drain()

    server, port = await served(proxy)
    async with server:
        dialer = Dialer(OutboundProxy.parse(f"socks5h://me:pass@127.0.0.1:{port}"))
        assert await greeting(await dialer.connect(ip_address("45.90.1.1"), 443)) == b"hello"
    assert seen == [b"\x05\x01\x02", b"\x01\x02me\x04pass", b"\x05\x01\x00\x01\x2d\x5a\x01\x01\x01\xbb"]


@pytest.mark.parametrize(
    ("scheme", "answer"),
    [
        ("http", b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"),
        ("http", b"SSH-2.0-x\r\n\r\n"),
        ("http", b"x" * 20_000),
        ("http", b""),
        ("http", b"HTTP/1.1 2000 OK\r\n\r\n"),
        ("socks5", b"\x05\xff"),
        ("socks5", b"\x05\x00\x05\x05\x00\x01" + bytes(6)),
        ("socks5", b"\x04"),
    ],
)
async def test_proxies_that_refuse_or_talk_nonsense(scheme: str, answer: bytes) -> None:
    async def proxy(reader: Reader, writer: Writer) -> None:
        writer.write(answer)
        await writer.drain()
        writer.write_eof()
        await reader.read()

    server, port = await served(proxy)
    async with server:
        dialer = Dialer(OutboundProxy.parse(f"{scheme}://127.0.0.1:{port}"))
        with pytest.raises(OSError):
            await dialer.connect(ip_address("45.90.1.1"), 443)


@pytest.mark.parametrize("url", ["", "x", "ftp://h:1", "http://", "http://h:99999", "http://u:%0a@h", "http://[x"])
def test_urls_that_name_no_proxy(url: str) -> None:
    with pytest.raises(ValueError):
        OutboundProxy.parse(url)


def test_credentials_are_not_shown() -> None:
    proxy = OutboundProxy.parse("http://user-x:hunter2@h")
    assert "hunter2" not in repr(proxy)
    assert "user-x" not in repr(proxy)
    assert (proxy.kind, proxy.host, proxy.port) == ("http", "h", 3128)
