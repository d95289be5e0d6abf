"""What the asynchronous client needs from the outside world; `_sio` is its blocking twin, name by name.

The connection pool keeps one HTTP client for each event loop. A loop takes its client with it when it
ends (as asyncio and trio close asynchronous generators then), so nothing is ever tied to a dead loop.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import httpx

from ._http import address, client_options, is_secure

T = TypeVar("T")

sleep = anyio.sleep


async def run_blocking(function: Callable[..., T], *args: Any) -> T:
    """Call something that may wait for a disk, in a thread."""
    return await anyio.to_thread.run_sync(function, *args)


async def call(callback: Callable[[Any], object] | None, value: Any) -> None:
    """Call a callback; await what it returns if it can be awaited. Its errors are the caller's."""
    if callback is not None:
        returned = callback(value)
        if inspect.isawaitable(returned):
            await returned


def shielded(seconds: float) -> AbstractContextManager[object]:
    """A block that a cancellation from outside cannot interrupt, for at most so long."""
    return anyio.move_on_after(seconds, shield=True)


async def read_chunk(file: Any, size: int) -> str | bytes:
    """Read from a file object, in a thread; its `read` may also be a coroutine function."""
    chunk = await run_blocking(file.read, size)
    if inspect.isawaitable(chunk):
        chunk = await chunk
    return chunk  # type: ignore[no-any-return]


async def iterate(source: AsyncIterable[T] | Iterable[T]) -> AsyncIterator[T]:
    """Go through an iterable of either kind."""
    if isinstance(source, AsyncIterable):
        async for item in source:
            yield item
    else:
        for item in source:
            yield item


async def write_chunk(file: BinaryIO, data: bytes) -> None:
    """Write all of `data` to a local file, in a thread."""
    written = await run_blocking(file.write, data)
    if inspect.isawaitable(written):
        await written


Key = tuple[int, bool]


@dataclass(slots=True)
class _Slot:
    loop: weakref.ref[object]
    http: httpx.AsyncClient
    keeper: AsyncGenerator[None, None]


class Pool:
    """Connections, shared by everything that uses the same `AsyncClient`."""

    def __init__(self, max_connections: int | None = None) -> None:
        self._max_connections = max_connections
        self._inherited: list[Any] = []
        self._lock = threading.Lock()
        self._slots: dict[Key, _Slot] = {}
        _pools.add(self)

    def forget(self) -> None:
        """In a child process: start afresh, and leave the parent's sockets alone."""
        self._inherited.append(self._slots)
        self._lock = threading.Lock()
        self._slots = {}

    async def client(self, url: str) -> httpx.AsyncClient:
        """The HTTP client of the running event loop for an address."""
        loop, secure = _running_loop(), is_secure(url)
        key = (id(loop), secure)
        with self._lock:
            found = self._slots.get(key)
            if found is not None and found.loop() is loop:
                return found.http
        make = functools.partial(client_options, secure, self._max_connections)
        options = await run_blocking(make) if secure else make()  # https loads the certificate store
        with self._lock:
            found = self._slots.get(key)
            if found is not None and found.loop() is loop:
                return found.http
            self._slots = {k: slot for k, slot in self._slots.items() if not _is_dead(slot.loop())}
            http = httpx.AsyncClient(**options)
            slot = self._slots[key] = _Slot(weakref.ref(loop), http, self._keep(key, http))
        await anext(slot.keeper)
        return http

    async def _keep(self, key: Key, http: httpx.AsyncClient) -> AsyncGenerator[None, None]:
        """Waits, registered with the loop, until the loop ends or the pool is closed."""
        try:
            yield
        finally:
            with self._lock:
                self._slots.pop(key, None)
            await http.aclose()

    async def aclose(self) -> None:
        """Close the connections of the running loop. The pool stays usable and opens new ones."""
        loop = _running_loop()
        with self._lock:
            slots = [slot for slot in self._slots.values() if slot.loop() is loop]
        for slot in slots:
            await slot.keeper.aclose()


def _running_loop() -> object:
    token = anyio.lowlevel.current_token()
    return getattr(token, "native_token", token)


def _is_dead(loop: object | None) -> bool:
    is_closed = getattr(loop, "is_closed", None)
    return loop is None or (callable(is_closed) and bool(is_closed()))


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
default_pool = Pool()


def _after_fork() -> None:
    for pool in list(_pools):
        pool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


Lock = anyio.Lock


class Wire:
    """A connection, byte by byte."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        try:
            await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise httpx.WriteError("the connection broke") from error

    async def receive(self) -> bytes:
        """What came next; empty at the end."""
        try:
            return await self._stream.receive(65536)
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise httpx.ReadError("the connection broke") from error

    async def aclose(self) -> None:
        """Hang up."""
        await anyio.aclose_forcefully(self._stream)


async def connect(url: str, seconds: float) -> Wire:
    """A connection to the server of a URL."""
    host, port, context = address(url)
    try:
        with anyio.fail_after(seconds):
            tls = {} if context is None else {"tls": True, "ssl_context": context, "tls_standard_compatible": False}
            return Wire(await anyio.connect_tcp(host, port, **tls))  # type: ignore[call-overload]
    except (OSError, TimeoutError) as error:
        raise httpx.ConnectError(f"no connection to {host}:{port}: {error}") from error
