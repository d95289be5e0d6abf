"""Connections out: to literal addresses that policy has judged, directly or through the operator's proxy."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from cloche_server.core.addresses import Address

CONNECT_TIMEOUT: Final = 10.0
#: After so long without an answer the next address is tried beside it (seconds).
STAGGER: Final = 0.3
_MAX_ADDRESSES: Final = 6
_MAX_ANSWER: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class OutboundProxy:
    """`kind`: `http` (CONNECT) or `socks5`. Never shown: user and password."""

    kind: str
    host: str
    port: int
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> OutboundProxy:
        """`http://user:password@host:port` or `socks5://…` (`socks5h` means the same: names are not handed on).
        Raises ValueError, without the text in it."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ValueError("the URL of the proxy cannot be understood") from None
        kind = {"http": "http", "socks5": "socks5", "socks5h": "socks5"}.get(parts.scheme)
        if kind is None or not host:
            raise ValueError("the proxy is given as http://host:port or socks5://host:port")
        user = None if parts.username is None else unquote(parts.username)
        password = None if parts.password is None else unquote(parts.password)
        for part in (user, password):
            if part is not None and (len(part.encode()) > 255 or not part.isprintable()):
                raise ValueError("user and password of the proxy are up to 255 printable characters")
        return cls(kind, host, port or (1080 if kind == "socks5" else 3128), user, password)


class Dialer:
    """`proxy`: everything goes through it; None: directly."""

    def __init__(self, proxy: OutboundProxy | None = None) -> None:
        self.proxy = proxy

    async def connect(self, address: Address, port: int) -> socket.socket:
        """A connected non-blocking socket. Raises OSError (TimeoutError is one)."""
        async with asyncio.timeout(CONNECT_TIMEOUT):
            if self.proxy is None:
                return await _connect(str(address), port)
            return await _through(self.proxy, address, port)

    async def connect_any(self, addresses: Sequence[Address], port: int) -> tuple[socket.socket, Address]:
        """To the first of several addresses that answers, and which it was: each gets a short time alone before the
        next is tried beside it. Raises OSError."""
        tried: dict[asyncio.Task[socket.socket], Address] = {}
        won: socket.socket | None = None
        winner: Address | None = None
        failed: OSError = OSError("there is no address")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                waiting = list(addresses[:_MAX_ADDRESSES])
                running: set[asyncio.Task[socket.socket]] = set()
                while won is None and (waiting or running):
                    if waiting:
                        address = waiting.pop(0)
                        task = asyncio.ensure_future(self.connect(address, port))
                        tried[task] = address
                        running.add(task)
                    done, running = await asyncio.wait(
                        running, timeout=STAGGER if waiting else None, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        error = task.exception()
                        if error is None and won is None:
                            won, winner = task.result(), tried[task]
                        elif isinstance(error, OSError):
                            failed = error
                        elif error is not None:
                            raise error
        finally:
            await _drop(list(tried), won)
        if won is None or winner is None:
            raise failed
        return won, winner


async def _drop(tasks: Sequence[asyncio.Task[socket.socket]], keep: socket.socket | None) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, socket.socket) and outcome is not keep:
            outcome.close()


async def _connect(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _through(proxy: OutboundProxy, address: Address, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        host = str(ipaddress.ip_address(proxy.host))
    except ValueError:
        found = await loop.getaddrinfo(proxy.host, proxy.port, type=socket.SOCK_STREAM)
        host = str(found[0][4][0])
    sock = await _connect(host, proxy.port)
    try:
        if proxy.kind == "http":
            await _http_connect(sock, proxy, address, port)
        else:
            await _socks5(sock, proxy, address, port)
    except BaseException:
        sock.close()
        raise
    return sock


async def _http_connect(sock: socket.socket, proxy: OutboundProxy, address: Address, port: int) -> None:
    loop = asyncio.get_running_loop()
    where = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}"]
    if proxy.user is not None:
        pair = f"{proxy.user}:{proxy.password or ''}".encode()
        lines.append("Proxy-Authorization: Basic " + base64.b64encode(pair).decode("ascii"))
    await loop.sock_sendall(sock, ("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
    head = b""
    while b"\r\n\r\n" not in head:
        # One byte at a time: what follows the head belongs to the guest.
        part = await loop.sock_recv(sock, 1)
        head += part
        if not part or len(head) > _MAX_ANSWER:
            raise ConnectionError("the outbound proxy did not answer in HTTP")
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or len(words[1]) != 3 or words[1][:1] != b"2":
        raise ConnectionError("the outbound proxy refused the connection")


async def _socks5(sock: socket.socket, proxy: OutboundProxy, address: Address, port: int) -> None:
    loop = asyncio.get_running_loop()
    method = 0 if proxy.user is None else 2
    await loop.sock_sendall(sock, bytes((5, 1, method)))
    if await _exactly(sock, 2) != bytes((5, method)):
        raise ConnectionError("the outbound proxy does not accept this way of authentication")
    if proxy.user is not None:
        user, password = proxy.user.encode(), (proxy.password or "").encode()
        await loop.sock_sendall(sock, bytes((1, len(user))) + user + bytes((len(password),)) + password)
        if (await _exactly(sock, 2))[1] != 0:
            raise ConnectionError("the outbound proxy did not accept user and password")
    kind = 1 if address.version == 4 else 4
    await loop.sock_sendall(sock, bytes((5, 1, 0, kind)) + address.packed + port.to_bytes(2, "big"))
    version, reply, _, kind = await _exactly(sock, 4)
    if version != 5 or reply != 0:
        raise ConnectionError("the outbound proxy refused the connection")
    length = {1: 4, 4: 16}.get(kind)
    if length is None:
        length = (await _exactly(sock, 1))[0]
    await _exactly(sock, length + 2)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise ConnectionError("the outbound proxy ended the connection")
        data += part
    return data
