"""Bytes between two sockets: all of them, in order, with half-close, limits and cuts."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from cloche_server.netd.bucket import Bucket
from cloche_server.netd.relay import Pipe, Pipes, Relay


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two, _ = listener.accept()
    for sock in (one, two):
        sock.setblocking(False)
    return one, two


class Line:
    """guest <-> relay <-> server."""

    def __init__(self, rate: float = 0) -> None:
        self.guest, inner = pair()
        outer, self.server = pair()
        self.sent = self.received = self.firsts = 0
        self.pipes = Pipes()
        now = asyncio.get_running_loop().time()
        self.relay = Relay(
            inner,
            outer,
            pipes=self.pipes,
            up=Bucket(rate, now),
            down=Bucket(rate, now),
            moved=self._moved,
            first=self._first,
        )

    def _moved(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received

    def _first(self) -> None:
        self.firsts += 1

    def close(self) -> None:
        self.relay.cut()
        self.guest.close()
        self.server.close()


async def send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)
    sock.shutdown(socket.SHUT_WR)


async def receive(sock: socket.socket) -> bytes:
    data = bytearray()
    while part := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
        data += part
    return bytes(data)


async def test_both_ways_at_once_with_half_close() -> None:
    line = Line()
    up, down = os.urandom(9_000_000), os.urandom(7_000_000)
    async with asyncio.timeout(30):
        results: list[Any] = await asyncio.gather(
            send(line.guest, up), receive(line.server), send(line.server, down), receive(line.guest), line.relay.wait()
        )
    assert hashlib.sha256(results[1]).digest() == hashlib.sha256(up).digest()
    assert hashlib.sha256(results[3]).digest() == hashlib.sha256(down).digest()
    assert (line.sent, line.received, line.firsts) == (len(up), len(down), 1)
    line.close()


async def test_one_way_may_end_long_before_the_other() -> None:
    line = Line()
    await send(line.guest, b"question")
    assert await receive(line.server) == b"question"
    await send(line.server, b"answer")
    assert await receive(line.guest) == b"answer"
    await line.relay.wait()
    line.close()


async def test_a_reader_that_stops_holds_up_its_sender_only() -> None:
    line = Line()
    flood = asyncio.create_task(send(line.server, bytes(64 * 1024 * 1024)))
    await asyncio.get_running_loop().sock_sendall(line.guest, b"ping")
    assert await asyncio.get_running_loop().sock_recv(line.server, 4) == b"ping"
    before = -1
    while line.received != before:
        before = line.received
        for _ in range(200):
            await asyncio.sleep(0)
    assert not flood.done()
    assert line.received < 32 * 1024 * 1024
    line.relay.cut()
    with pytest.raises(OSError):
        await flood
    line.close()


async def test_a_cut_is_a_reset_for_both() -> None:
    line = Line()
    line.relay.cut()
    await line.relay.wait()
    for sock in (line.guest, line.server):
        with pytest.raises(ConnectionResetError):
            await asyncio.get_running_loop().sock_recv(sock, 1)
    line.close()


async def test_a_reset_of_one_side_reaches_the_other() -> None:
    line = Line()
    line.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    line.server.close()
    with pytest.raises(ConnectionResetError):
        await asyncio.get_running_loop().sock_recv(line.guest, 1)
    await line.relay.wait()
    line.close()


async def test_cancelling_the_wait_ends_it() -> None:
    line = Line()
    task = asyncio.create_task(line.relay.wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert line.relay.over
    line.close()


async def test_a_rate_lets_everything_through_in_the_end() -> None:
    line = Line(rate=2_000_000)
    data = os.urandom(600_000)
    results: list[Any] = await asyncio.gather(send(line.guest, data), receive(line.server))
    assert results[1] == data
    line.close()


async def test_pipes_are_not_kept_by_idle_connections() -> None:
    lines = [Line() for _ in range(3)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    for line in lines:
        line.pipes = lines[0].pipes
        line.relay.pipes = lines[0].pipes
        await asyncio.get_running_loop().sock_sendall(line.guest, b"x")
        assert await asyncio.get_running_loop().sock_recv(line.server, 1) == b"x"
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2
    for line in lines:
        line.close()


def test_few_pipes_are_large_and_they_are_taken_first() -> None:
    """The kernel gives one user a bounded number of pages for pipes; what comes after them would be tiny."""

    def size(pipe: Pipe) -> int:
        return fcntl.fcntl(pipe[1], 1032)  # F_GETPIPE_SZ

    pipes = Pipes()
    held = [pipes.borrow() for _ in range(40)]
    assert sum(size(pipe) for pipe in held) <= 48 * 1024 * 1024
    large = size(held[0])
    assert large > size(held[-1]) >= 64 * 1024
    for pipe in reversed(held):
        pipes.give_back(pipe, empty=True)
    again = [pipes.borrow() for _ in range(24)]
    assert {size(pipe) for pipe in again} == {large}
    for pipe in again:
        pipes.give_back(pipe, empty=False)
    assert size(pipes.borrow()) < large  # those that were left
