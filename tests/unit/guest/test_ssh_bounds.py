"""What one client may ask of the SSH server, and what it is told when its sandbox or the server's database fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import asyncssh
import pytest

from cloche_server.app.attached import Written
from cloche_server.app.sshkeys import Visit
from cloche_server.core.errors import ClocheError
from cloche_server.ssh.flow import MANY, WINDOW, WINDOW_OF_MANY, Connection
from cloche_server.ssh.server import SshServer
from cloche_server.ssh.session import FAILED, Place, Session, far_copy
from cloche_server.ssh.visitor import MAX_FORWARDS, Visitor


class Line:
    """The connection and the channel at once: it keeps what they are told."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.exited: list[int] = []
        self.ended: list[str] = []

    def set_write_buffer_limits(self, high: int) -> None:
        return

    def get_environment(self) -> dict[str, str]:
        return {}

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes, kind: int | None = None) -> None:
        self.written.append(data)

    def exit(self, code: int) -> None:
        self.exited.append(code)

    async def drained(self) -> None:
        return

    def disconnect(self, code: int, reason: str) -> None:
        self.ended.append(reason)

    def is_closed(self) -> bool:
        return False

    def port_channel(self) -> Any:
        return self


class Command:
    """Writes something, and then it goes wrong."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure
        self.closed = False

    async def output(self) -> AsyncIterator[Written]:
        yield Written(b"said", error=False)
        raise self._failure

    async def aclose(self) -> None:
        self.closed = True


async def _end_of(failure: Exception) -> tuple[Line, Command]:
    line, command = Line(), Command(failure)

    async def opened(*_: Any) -> Command:
        return command

    attachments: Any = SimpleNamespace(open=opened)
    started: list[asyncio.Task[None]] = []

    def start(work: Any) -> asyncio.Task[None]:
        started.append(asyncio.ensure_future(work))
        return started[0]

    connection: Any = line
    session = Session(connection, Place(attachments, "w", "s", start, lambda: None, lambda: None))
    session.connection_made(line)
    session.exec_requested("x")
    session.session_started()
    await asyncio.wait(started)
    if (error := started[0].exception()) is not None:
        assert not isinstance(failure, ClocheError)
        line.ended.append(repr(error))
    return line, command


async def test_a_command_whose_sandbox_ends_says_so_and_is_over() -> None:
    line, command = await _end_of(ClocheError("exec.sandbox_gone", "the sandbox was deleted"))
    assert line.written == [b"said", b"cloche: the sandbox was deleted\r\n"]
    assert line.exited == [FAILED]
    assert command.closed
    assert line.ended == []


async def test_a_command_is_over_whatever_goes_wrong() -> None:
    line, command = await _end_of(ValueError("a mistake of ours"))
    assert line.exited == [FAILED]
    assert command.closed
    assert "a mistake of ours" in line.ended[0], "and the mistake is told in the log"


def test_the_far_side_of_a_copy_is_told_from_other_commands() -> None:
    assert far_copy("scp -t /tmp/x") == " -t /tmp/x"
    assert far_copy("scp -v -rp -f -- -odd name") == " -v -rp -f -- -odd name"
    assert far_copy("scp -prt a\nb") == " -prt a\nb"
    for other in ("", "scp", "scp -t", "scp -v x", "scp x -t y", "scpt -t x", "scp -t2 x", " scp -t x"):
        assert far_copy(other) is None


def test_a_long_run_of_flags_holds_nobody_up() -> None:
    def stuck(*_: object) -> None:
        raise AssertionError("it is tried in every way that there is, which takes hours")

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(60)
    try:
        assert far_copy("scp -" + "t" * 1_000_000) is None
        assert far_copy("scp" + " -t" * 300_000) is None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


async def test_strangers_cannot_ask_for_an_exchange_of_keys_that_takes_long() -> None:
    house: Any = SimpleNamespace(limits=SimpleNamespace(login=30.0))
    options = await SshServer(house, asyncssh.generate_private_key("ssh-ed25519"))._options()
    offered = [one.decode() for one in options.kex_algs]
    assert "curve25519-sha256" in offered
    assert [one for one in offered if "diffie-hellman" in one] == []


def _visitor(line: Any) -> Visitor:
    dialed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    house: Any = SimpleNamespace(dialer=SimpleNamespace(dial=lambda *_: dialed), release=lambda _: None)
    made = Visitor(house)
    made._connection = line
    return made


def _visit(stands: Any) -> Visit:
    record = SimpleNamespace(id="s", workspace="w")
    entry: Any = SimpleNamespace(record=record, ended=asyncio.Event())
    return Visit(entry, "ssh_1", None, contextlib.nullcontext, stands)


async def test_connections_that_are_asked_for_at_once_are_counted_at_once() -> None:
    visitor = _visitor(Line())
    visitor._visit, visitor._entered = _visit(None), True
    asked = [visitor.connection_requested("localhost", 80, "", 0)[1] for _ in range(MAX_FORWARDS)]
    with pytest.raises(asyncssh.ChannelOpenError):
        visitor.connection_requested("localhost", 80, "", 0)
    tasks = [asyncio.ensure_future(one) for one in asked]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert len(await asyncio.gather(*tasks, return_exceptions=True)) == MAX_FORWARDS
    visitor.connection_requested("localhost", 80, "", 0)[1].close()  # type: ignore[attr-defined]


async def test_a_connection_that_nobody_watches_does_not_stay() -> None:
    async def stands() -> bool:
        raise ClocheError("host.disk_full", "the disk is full")

    line = Line()
    visitor = _visitor(line)
    with pytest.raises(ClocheError):
        await visitor._live(_visit(stands))
    assert line.ended == ["the server could not look whether the token or key is still good; connect again"]


def test_further_channels_of_one_connection_have_smaller_windows() -> None:
    connection = Connection.__new__(Connection)
    connection._channels = dict.fromkeys(range(MANY - 1))
    assert connection._window_of_next() == WINDOW
    connection._channels = dict.fromkeys(range(MANY))
    assert connection._window_of_next() == WINDOW_OF_MANY
