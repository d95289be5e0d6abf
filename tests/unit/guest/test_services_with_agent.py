"""Services and logs over the real agent in its developer mode: calls of the client, and the use cases above them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloche_server.app.logs import Logs
from cloche_server.app.process_table import ProcessTable
from cloche_server.app.processes import Processes
from cloche_server.app.sandbox_services import SandboxServices
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.logs import Cursor, LogEnd, LogGap, LogItem, LogLine
from cloche_server.core.process import ProcessWish
from cloche_server.core.records import ExecDefaults
from cloche_server.core.services import HealthCheck, HttpCheck, ServiceSpec
from cloche_server.guest.client import GuestClient
from cloche_server.guest.services import GuestService

W, SB = "w", "s" * 20
SLEEP = ServiceSpec(argv=["sleep", "600"])


class Place:
    """What stands for `Access`: one sandbox, whose guest is the agent."""

    def __init__(self, guest: GuestClient) -> None:
        self.guest = guest
        self.counted = 0
        defaults = ExecDefaults(env={"OF": "sandbox"})
        record = SimpleNamespace(id=SB, defaults=defaults, is_read=False, status=Status.RUNNING, termination=None)
        self.entry: Any = SimpleNamespace(
            record=record,
            processes=ProcessTable(),
            traffic=SimpleNamespace(out=lambda _: None, bytes_in=0),
            ended=asyncio.Event(),
            machine=None,
        )

    async def serving(self, *_: str) -> tuple[Any, GuestClient]:
        return self.entry, self.guest

    async def find(self, *_: str) -> Any:
        return self.entry

    @contextlib.contextmanager
    def busy(self, _: Any) -> Iterator[None]:
        yield

    def count_exec(self, _: Any) -> None:
        self.counted += 1


@pytest.fixture
def place(agent_client: GuestClient) -> Place:
    return Place(agent_client)


@pytest.fixture
def units(place: Place) -> SandboxServices:
    return SandboxServices(place)  # type: ignore[arg-type]


@pytest.fixture
def logs(place: Place, units: SandboxServices, tmp_path: Path) -> Logs:
    access: Any = place
    return Logs(access, tmp_path, Processes(access), units)


async def settled(units: SandboxServices, name: str, *states: str) -> GuestService:
    found = await units.wait(W, SB, name, states, 20)
    assert found.state in states, found
    return found


async def refused(work: Any) -> ClocheError:
    with pytest.raises(ClocheError) as caught:
        await work
    return caught.value


# ------------------------------------------------------------------ services


async def test_a_service_is_defined_once(units: SandboxServices, place: Place) -> None:
    spec = replace(SLEEP, env={"MINE": "1"}, health=HealthCheck(argv=["true"], interval=0.1), max_restarts=0)
    first, created = await units.put(W, SB, "web", spec)
    assert created
    first = await settled(units, "web", "healthy")
    again, created = await units.put(W, SB, "web", spec)
    assert not created
    assert again.pid == first.pid
    assert again.spec == replace(spec, env={"OF": "sandbox", "MINE": "1"}, user=first.spec.user)
    changed, created = await units.put(W, SB, "web", replace(spec, argv=["sleep", "601"]))
    assert not created
    assert (await settled(units, "web", "healthy")).pid not in {0, first.pid}
    assert place.counted == 3
    assert [one.name for one in await units.list_all(W, SB)] == ["web"]
    # Its run is a process as any other, and known by the name of the service.
    info = await place.guest.exec_info(str(changed.process_id or first.process_id))
    assert '"n":"web"' in info.tag
    await units.remove(W, SB, "web")
    assert (await refused(units.get(W, SB, "web"))).code == "service.not_found"


async def test_verbs(units: SandboxServices) -> None:
    await units.put(W, SB, "off", replace(SLEEP, autostart=False))
    assert (await units.get(W, SB, "off")).state == "stopped"
    await units.act(W, SB, "off", "start")
    first = await settled(units, "off", "healthy")
    await units.act(W, SB, "off", "restart")
    second = await settled(units, "off", "healthy")
    assert second.pid != first.pid
    assert second.last_exit is not None
    assert second.last_exit.signal == "SIGTERM"
    stopped = await units.act(W, SB, "off", "stop")
    assert (stopped.state, stopped.pid) == ("stopped", 0)


async def test_a_failure_says_why(units: SandboxServices) -> None:
    await units.put(W, SB, "bad", ServiceSpec(shell="exit 7", backoff=0.1, max_restarts=1))
    found = await settled(units, "bad", "failed")
    assert found.restarts == 1
    assert found.last_exit is not None
    assert found.last_exit.exit_code == 7
    assert "exit code 7" in found.detail


async def test_an_http_check(units: SandboxServices) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for status, wanted in ((None, "healthy"), (503, "unhealthy")):
            check = HealthCheck(http=HttpCheck(port, "/up", status), interval=0.1, retries=1, start_period=0.0)
            await units.put(W, SB, "page", replace(SLEEP, restart="no", health=check))
            found = await settled(units, "page", "healthy", "unhealthy")
            assert found.state == wanted, found
    assert "204" in found.detail


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    asked = await reader.readuntil(b"\r\n\r\n")
    writer.write(
        b"HTTP/1.1 204 Fine\r\n\r\n" if asked.startswith(b"GET /up HTTP/1.1\r\n") else b"HTTP/1.1 404 No\r\n\r\n"
    )
    writer.close()


async def test_what_is_refused_is_told(units: SandboxServices) -> None:
    await units.put(W, SB, "a", replace(SLEEP, autostart=False))
    unknown = await refused(units.put(W, SB, "b", replace(SLEEP, depends_on=["nope"])))
    assert (unknown.code, unknown.details["field"]) == ("request.invalid", "depends_on")
    await units.put(W, SB, "b", replace(SLEEP, depends_on=["a"], autostart=False))
    assert (await refused(units.put(W, SB, "a", replace(SLEEP, depends_on=["b"])))).code == "service.conflict"
    assert (await refused(units.remove(W, SB, "a"))).code == "service.conflict"
    assert (await refused(units.get(W, SB, "../exec"))).code == "service.not_found"
    assert (await refused(units.act(W, SB, "none", "start"))).code == "service.not_found"
    large = replace(SLEEP, env={"X": "x" * 120_000, "Y": "y" * 20_000})
    assert (await refused(units.put(W, SB, "c", large))).code == "exec.too_large"
    odd = await refused(units.put(W, SB, "c", replace(SLEEP, stop_signal="NONE")))
    assert odd.code == "request.invalid"
    assert "stop_signal" in odd.message


# ------------------------------------------------------------------ logs


async def texts(items: Any, count: int) -> list[LogItem]:
    found: list[LogItem] = []
    async with asyncio.timeout(20), contextlib.aclosing(items):
        async for item in items:
            found.append(item)
            if len(found) == count:
                break
    return found


async def test_a_log_goes_on_across_runs(units: SandboxServices, logs: Logs) -> None:
    await units.put(W, SB, "loud", ServiceSpec(shell="echo out; echo err >&2; exit 1", backoff=0.1, max_restarts=1))
    await settled(units, "loud", "failed")
    log = await logs.open(W, SB, "service:loud")
    page = await log.page(None, None)
    assert sorted((line.stream, line.text) for line in page.lines) == [("stderr", "err")] * 2 + [("stdout", "out")] * 2
    assert (page.gap_bytes, page.restarted, page.more, page.final) == (0, False, False, False)
    assert [line.text for line in (await log.page(None, 1)).lines] == [page.lines[-1].text]
    assert (await log.page(page.next, None)).lines == ()
    # One who follows from there sees what comes, and the end when the service is forgotten.
    following = log.follow(page.next, None)
    await units.act(W, SB, "loud", "start")
    seen = await texts(following, 2)
    assert {item.text for item in seen if isinstance(item, LogLine)} == {"out", "err"}
    following = log.follow(seen[-1].next, None)
    rest = asyncio.ensure_future(texts(following, 100))
    await settled(units, "loud", "failed")
    await units.remove(W, SB, "loud")
    last = (await rest)[-1]
    assert isinstance(last, LogEnd)
    assert last.final


async def test_what_is_lost_is_told(units: SandboxServices, logs: Logs) -> None:
    spec = ServiceSpec(shell="seq 20000; exec sleep 600", buffer_kb=4)
    await units.put(W, SB, "much", spec)
    log = await logs.open(W, SB, "service:much")
    async with asyncio.timeout(20):
        while (page := await log.page(None, None)).lines[-1:] == () or page.lines[-1].text != "20000":
            await asyncio.sleep(0.01)
    told = sum(len(line.text) + 1 for line in page.lines)
    assert page.gap_bytes > 0
    assert page.gap_bytes + told == sum(len(str(n)) + 1 for n in range(1, 20001))
    # A place of another log is no place of this one.
    for cursor in (Cursor(3, "0" * 16), Cursor(10**9, page.next.mark)):
        again = await log.page(cursor, None)
        assert again.restarted
        assert again.lines[-1].text == "20000"
    assert isinstance((await texts(log.follow(Cursor(3, "0" * 16), None), 1))[0], LogGap)


async def test_lines_of_a_process(logs: Logs, place: Place) -> None:
    access: Any = place
    processes = Processes(access)
    info = await processes.start(W, SB, ProcessWish(shell="printf 'caf\\303\\251\\r\\nhalf'; printf '\\n'; printf end"))
    await processes.wait(W, SB, info.id, 20)
    log = await logs.open(W, SB, f"process:{info.id}")
    found = await texts(log.follow(None, None), 100)
    lines = [item for item in found if isinstance(item, LogLine)]
    assert [(line.text, line.whole) for line in lines] == [("café", True), ("half", True), ("end", False)]
    assert isinstance(found[-1], LogEnd)
    assert found[-1].final
    assert [line.text for line in (await log.page(lines[0].next, None)).lines] == ["half", "end"]
    assert (await refused(logs.open(W, SB, "process:none"))).code == "process.not_found"
    assert (await refused(logs.open(W, SB, "service:none"))).code == "service.not_found"
    assert (await refused(logs.open(W, SB, "file:/etc/passwd"))).code == "request.invalid"


async def test_a_console_is_read_on(logs: Logs, place: Place, tmp_path: Path) -> None:
    console = tmp_path / SB / "console.log"
    console.parent.mkdir()
    log = await logs.open(W, SB, "console")
    assert (await log.page(None, None)).lines == ()
    console.write_bytes(b"[    0.100000] Linux\r\n[    0.200000] cloche-agent: version 1\nhalf")
    page = await log.page(None, None)
    assert [(line.text, line.whole) for line in page.lines][-2:] == [
        ("[    0.200000] cloche-agent: version 1", True),
        ("half", False),
    ]
    agent = await (await logs.open(W, SB, "agent")).page(None, None)
    assert [line.text for line in agent.lines] == ["[    0.200000] cloche-agent: version 1"]
    with console.open("ab") as file:
        file.write(b" more\nlast\n")
    assert [line.text for line in (await log.page(page.next, None)).lines] == [" more", "last"]
    following = log.follow(None, 1)
    assert [item.text for item in await texts(following, 1) if isinstance(item, LogLine)] == ["last"]
    # The engine keeps the tail of what has grown too large: a place in the old file is none in the new one.
    end = (await log.page(None, None)).next
    console.write_bytes(b"x" * (end.offset - 1) + b"\nnew\n")
    page = await log.page(end, None)
    assert page.restarted
    assert page.lines[-1].text == "new"
    place.entry.ended.set()
    found = await texts(log.follow(page.next, None), 1)
    assert isinstance(found[0], LogEnd)
    assert found[0].final
    console.unlink()
    assert (await log.page(end, None)).restarted
