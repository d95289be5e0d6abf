"""From accept to carry, hand over or refuse, on loopback: destinations are told instead of redirected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest
import pytest_asyncio

from cloche_server.core.addresses import Address
from cloche_server.core.network import SecretGrant
from cloche_server.core.policy_input import parse_policy
from cloche_server.host.clock import SystemClock
from cloche_server.netd import intake as intake_module
from cloche_server.netd.dial import Dialer
from cloche_server.netd.flow import Carrier, Refused, Target, Verdict
from cloche_server.netd.intake import Intake
from cloche_server.netd.relay import Pipes
from cloche_server.netd.session import Session
from cloche_server.netd.shared import Shared

A = "45.90.1.10"


class LoopDialer(Dialer):
    """Everything that is dialled ends at one server on loopback."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port
        self.dialled: list[tuple[str, int]] = []

    async def connect(self, address: Address, port: int) -> socket.socket:
        self.dialled.append((str(address), port))
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return sock


class Engine:
    """Says for whom it was called, and then what the policy says of a request."""

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self.cancelled = 0

    def prepare(self, workspace: str, names: Iterable[str]) -> None:
        return None

    def forget(self, carrier: Carrier) -> None:
        return None

    async def serve(self, guest: socket.socket, target: Target, carrier: Carrier) -> None:
        self.targets.append(target)
        loop = asyncio.get_running_loop()
        try:
            data = await loop.sock_recv(guest, 1000)
            carrier.count(target, len(data), 5)
            await loop.sock_sendall(guest, b"engine")
            await loop.sock_recv(guest, 10)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            guest.close()


class Box:
    def __init__(self, session: Session, listener: socket.socket, dialer: LoopDialer, engine: Engine) -> None:
        self.session, self.dialer, self.engine = session, dialer, engine
        self._where = listener.getsockname()

    def policy(self, body: dict[str, Any], grants: Sequence[SecretGrant] = ()) -> int:
        return self.session.replace(parse_policy(body), grants)

    async def talk(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._where)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def say(self, data: bytes) -> bytes:
        """The first answer; b"" for an end or a reset."""
        reader, writer = await self.talk(data)
        try:
            async with asyncio.timeout(10):
                return await reader.read(1000)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def entries(self) -> list[dict[str, Any]]:
        return list((await self.session.log.read(0, 1000, 0))["entries"])


@pytest_asyncio.fixture
async def box(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    port = getattr(request, "param", 8080)
    monkeypatch.setattr(intake_module, "original_destination", lambda _sock: (A, port))

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    dialer = LoopDialer(server.sockets[0].getsockname()[1])
    engine = Engine()
    shared = Shared(dialer=dialer, engine=engine)
    listener = socket.create_server(("127.0.0.1", 0))
    spare = socket.create_server(("127.0.0.1", 0))
    async with server, asyncio.TaskGroup() as tasks:
        session = Session("s", "w", parse_policy({}), (), shared)
        intake = Intake(session, (listener, spare), tasks, Pipes())
        yield Box(session, listener, dialer, engine)
        intake.close()


HEAD = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
GRANT = SecretGrant("TOKEN", "placeholder-x", ("a.test",))


async def test_an_open_sandbox_is_relayed(box: Box) -> None:
    assert await box.say(HEAD) == HEAD
    assert box.dialer.dialled == [(A, 8080)]
    assert not box.engine.targets
    assert (await box.entries())[0]["verdict"] == "allow"


async def test_hosts_of_secrets_are_read(box: Box) -> None:
    box.policy({}, [GRANT])
    assert await box.say(HEAD) == b"engine"
    assert box.engine.targets[0].name == "a.test"
    assert not box.engine.targets[0].tls
    other = HEAD.replace(b"a.test", b"b.test")
    assert await box.say(other) == other
    assert len(box.engine.targets) == 1
    ends = [entry for entry in await box.entries() if entry["end"]]
    assert (ends[0]["bytes_sent"], ends[0]["bytes_received"]) == (len(HEAD), 5)


@pytest.mark.parametrize("box", [5000], indirect=True)
async def test_hosts_of_secrets_are_read_on_any_port_and_servers_may_speak_first(box: Box) -> None:
    box.policy({}, [GRANT])
    assert await box.say(HEAD) == b"engine"
    assert await box.say(b"\x00raw") == b"\x00raw"


async def test_a_connection_that_was_not_read_is_cut_when_a_secret_comes(box: Box) -> None:
    reader, writer = await box.talk(HEAD)
    assert await reader.read(1000) == HEAD
    assert box.policy({}, [GRANT]) == 1
    with pytest.raises(ConnectionResetError):
        await reader.read(1000)
    writer.close()


async def test_the_engine_is_cancelled_when_the_policy_changes(box: Box) -> None:
    box.policy({}, [GRANT])
    reader, writer = await box.talk(HEAD)
    assert await reader.read(1000) == b"engine"
    assert box.policy({"mode": "none"}) == 1
    assert await reader.read(1000) == b""
    assert box.engine.cancelled == 1
    writer.close()


class StillClock(SystemClock):
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.at = super().monotonic()

    def monotonic(self) -> float:
        return self.at


async def test_what_is_read_keeps_to_the_bandwidth(box: Box) -> None:
    clock = box.session.shared.clock = StillClock()
    box.policy({"limits": {"bandwidth_kbps": 800}})
    await box.session.pace(16384, 0)  # what may pass after a rest
    assert box.session.up.take(1, clock.at) == 0
    assert box.session.down.take(1, clock.at) == 1
    held = asyncio.create_task(box.session.pace(1000, 0))
    await asyncio.sleep(0)
    assert not held.done()
    clock.at += 1
    async with asyncio.timeout(10):
        await held


async def test_without_an_engine_nothing_is_carried_unread(box: Box) -> None:
    box.session.shared.engine = None
    box.policy({"rules": [{"action": "deny", "methods": ["POST"]}]})
    assert b'"rule": "unreadable"' in await box.say(HEAD)
    assert box.dialer.dialled == []


async def test_a_server_that_does_not_answer_is_told_in_the_log(box: Box) -> None:
    box.dialer.port = 1
    assert await box.say(HEAD) == b""
    entries = await box.entries()
    assert entries[-1]["end"]
    assert entries[-1]["reason"] == "upstream: ECONNREFUSED"


async def test_what_the_engine_asks_of_the_session(box: Box) -> None:
    box.policy({"mode": "allow-list", "rules": [{"id": "a", "action": "allow", "cidr": A, "methods": ["GET"]}]})
    target = Target(A, 8080, None, tls=False, connection=1)
    assert box.session.decide_request(target, A, "GET", "/") == Verdict(True, "a", "allowed by rule a")
    assert not box.session.decide_request(target, A, "POST", "/").allowed
    assert await box.session.addresses(target, A) == [A]
    dialed = await box.session.dial(target, [A])
    dialed.sock.close()
    assert dialed.address == A
    with pytest.raises(Refused):
        await box.session.addresses(target, "b.test")
    box.session.note(target, "http", Verdict(False, "r", "why"), host="b.test", method="GET", path="/x")
    assert (await box.entries())[-1]["path"] == "/x"
    box.session.shared.vault.replace("w", {"TOKEN": "hunter2"}, None)
    assert box.session.secret("TOKEN") == "hunter2"
    assert "hunter2" not in repr(box.session)
