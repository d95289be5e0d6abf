"""Requests to the outside: one POST to an address that somebody else has chosen.

The address that a connection is really made to is checked, after its name was resolved and in the same step: a name
that resolves differently the next time gains nothing. Proxies of the environment are not used, redirects not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import httpcore

from cloche_server.core.webhooks import NOT_PUBLIC, is_public

#: For the whole of a request, the name and the answer included (seconds).
TIMEOUT: Final = 10.0
#: More of an answer is not read (bytes).
MOST_READ: Final = 64 * 1024
KEPT_SECONDS: Final = 5.0
#: Names are resolved here, so that a name server that is silent takes no thread that anything else needs.
_RESOLVER: Final = ThreadPoolExecutor(max_workers=16, thread_name_prefix="resolve")


_BROKEN: Final = (
    ssl.SSLError,
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    OSError,
    ValueError,
)


class SendFailed(Exception):
    """There was no answer; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` is what came of it in time, at most `MOST_READ` bytes."""

    status: int
    body: bytes


class _NotPublic(httpcore.ConnectError):
    pass


class _Unresolved(httpcore.ConnectError):
    pass


class _Checked(httpcore.AsyncNetworkBackend):
    """Connects to addresses that may be connected to."""

    def __init__(self, private: bool) -> None:
        self._private = private
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        allowed = [one for one in await _resolve(host, port) if self._private or is_public(one)]
        if not allowed:
            raise _NotPublic(NOT_PUBLIC)
        failed: Exception | None = None
        for address in allowed[:4]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        assert failed is not None
        raise failed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def _resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    look = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await loop.run_in_executor(_RESOLVER, look)
    except (OSError, UnicodeError) as error:
        raise _Unresolved("the name of the receiver could not be resolved") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@functools.cache
def _trust() -> ssl.SSLContext:
    """Loading the certificates takes a while: once, when the first address is one of https."""
    return httpcore.default_ssl_context()


class Sender:
    """Sends to one receiver, over a connection that is kept for a few seconds. `private`: it may be anywhere."""

    def __init__(self, *, private: bool) -> None:
        self._private = private
        self._pool: httpcore.AsyncConnectionPool | None = None

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Raises `SendFailed`."""
        answer: list[Answer] = []
        try:
            async with asyncio.timeout(TIMEOUT):
                await self._post(url, headers, body, answer)
        except TimeoutError:
            if not answer:
                raise SendFailed(f"the receiver did not answer within {TIMEOUT:g} s") from None
        except (_NotPublic, _Unresolved) as error:
            raise SendFailed(str(error)) from error
        except httpcore.ConnectError as error:
            raise SendFailed("no connection to the receiver could be made") from error
        except _BROKEN as error:
            if not answer:
                raise SendFailed("the connection ended before the receiver had answered in HTTP") from error
        return answer[-1]

    async def _post(self, url: str, headers: Mapping[str, str], body: bytes, answer: list[Answer]) -> None:
        """Adds to `answer` as soon as there is a status, and again when more of its body has come: a receiver that
        has accepted a message has done so however it goes on."""
        pool = await self._open(url)
        async with pool.stream("POST", url, headers=list(headers.items()), content=body) as response:
            answer.append(Answer(response.status, b""))
            got = b""
            async for part in response.aiter_stream():
                got = (got + part)[:MOST_READ]
                answer[0] = Answer(response.status, got)
                if len(got) >= MOST_READ:
                    return  # the connection is closed, because there is more on it

    async def _open(self, url: str) -> httpcore.AsyncConnectionPool:
        if self._pool is None:
            secure = url.startswith("https:")
            context = await asyncio.to_thread(_trust) if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=context,
                max_connections=1,
                keepalive_expiry=KEPT_SECONDS,
                network_backend=_Checked(self._private),
            )
        return self._pool

    async def aclose(self) -> None:
        """Closes the connection. A later request makes another one."""
        pool, self._pool = self._pool, None
        if pool is not None:
            with contextlib.suppress(Exception):
                await pool.aclose()
