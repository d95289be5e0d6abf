"""What the blocking client needs from the outside world: the twin of `_aio`, name by name.

The connection pool may be used from any number of threads. A child process made by fork starts with a
fresh one and leaves the sockets of its parent alone.
"""

from __future__ import annotations

import atexit
import inspect
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO, TypeVar

import httpx

from ._http import address, client_options, is_secure

T = TypeVar("T")

sleep = time.sleep


def run_blocking(function: Callable[..., T], *args: Any) -> T:
    """Call it."""
    return function(*args)


def call(callback: Callable[[Any], object] | None, value: Any) -> None:
    """Call a callback. Its errors are the caller's."""
    if callback is not None:
        returned = callback(value)
        if inspect.iscoroutine(returned):
            returned.close()
            raise TypeError("a coroutine function as callback needs AsyncSandbox")


def shielded(seconds: float) -> AbstractContextManager[object]:
    """Nothing to shield here: there is no cancellation."""
    del seconds
    return nullcontext()


def read_chunk(file: Any, size: int) -> str | bytes:
    """Read from a file object."""
    return file.read(size)  # type: ignore[no-any-return]


def iterate(source: Iterable[T]) -> Iterator[T]:
    """Go through an iterable."""
    yield from source


def write_chunk(file: BinaryIO, data: bytes) -> None:
    """Write all of `data` to a local file."""
    file.write(data)


class Pool:
    """Connections, shared by everything that uses the same `Client`."""

    def __init__(self, max_connections: int | None = None) -> None:
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._clients: dict[bool, httpx.Client] = {}
        self._inherited: list[Any] = []
        _pools.add(self)

    def forget(self) -> None:
        """In a child process: start afresh, and leave the parent's sockets alone."""
        self._lock = threading.Lock()
        self._inherited.append(self._clients)
        self._clients = {}

    def client(self, url: str) -> httpx.Client:
        """The HTTP client of this process for an address."""
        secure = is_secure(url)
        with self._lock:
            if secure not in self._clients:
                self._clients[secure] = httpx.Client(**client_options(secure, self._max_connections))
            return self._clients[secure]

    def close(self) -> None:
        """Close the connections. The pool stays usable and opens new ones."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for http in clients.values():
            http.close()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
default_pool = Pool()
atexit.register(default_pool.close)


def _after_fork() -> None:
    for pool in list(_pools):
        pool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


Lock = threading.Lock


class Wire:
    """A connection, byte by byte."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def send(self, data: bytes) -> None:
        """Send all of it."""
        try:
            self._stream.sendall(data)
        except OSError as error:
            raise httpx.WriteError("the connection broke") from error

    def receive(self) -> bytes:
        """What came next; empty at the end."""
        try:
            return self._stream.recv(65536)
        except OSError as error:
            raise httpx.ReadError("the connection broke") from error

    def close(self) -> None:
        """Hang up."""
        self._stream.close()


def connect(url: str, seconds: float) -> Wire:
    """A connection to the server of a URL."""
    host, port, context = address(url)
    try:
        stream = socket.create_connection((host, port), timeout=seconds)
        if context is not None:
            stream = context.wrap_socket(stream, server_hostname=host)
        stream.settimeout(None)
    except OSError as error:
        raise httpx.ConnectError(f"no connection to {host}:{port}: {error}") from error
    return Wire(stream)
