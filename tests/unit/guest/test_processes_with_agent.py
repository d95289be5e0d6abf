"""Processes over the real agent in its developer mode: the calls of the client, and the use cases above them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cloche_server.app.process_output import Chunk, Loss, SoFar, TextChunk
from cloche_server.app.process_table import ProcessTable
from cloche_server.app.processes import Processes
from cloche_server.core.command import CommandEnd
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status
from cloche_server.core.process import ProcessWish, Size, parse_tag
from cloche_server.core.records import ExecDefaults
from cloche_server.guest.client import GuestClient
from cloche_server.guest.types import ExecRequest

pytestmark = pytest.mark.thorough

W, SB = "w", "s" * 20


class Site:
    """What stands for `Access`: one sandbox, whose guest is the agent."""

    def __init__(self, guest: GuestClient) -> None:
        self.guest = guest
        self.counted = 0
        record = SimpleNamespace(id=SB, defaults=ExecDefaults(), is_read=False, status=Status.RUNNING, termination=None)
        self.entry: Any = SimpleNamespace(
            record=record,
            processes=ProcessTable(),
            traffic=SimpleNamespace(out=lambda _: None, bytes_in=0),
            ended=asyncio.Event(),
            machine=None,
        )

    async def serving(self, *_: str) -> tuple[Any, GuestClient]:
        return self.entry, self.guest

    @contextlib.contextmanager
    def busy(self, _: Any) -> Iterator[None]:
        yield

    def count_exec(self, _: Any) -> None:
        self.counted += 1


@pytest.fixture
def site(agent_client: GuestClient) -> Site:
    return Site(agent_client)


@pytest.fixture
def processes(site: Site) -> Processes:
    return Processes(site)  # type: ignore[arg-type]


async def said(processes: Processes, id_: str, *, offset: int = 0, stream: str | None = None) -> bytes:
    found = await processes.output(W, SB, id_, offset, stream, "utf-8", follow=True)
    try:
        return b"".join([item.data async for item in found.items() if isinstance(item, Chunk)])
    finally:
        await found.aclose()


async def until_shown(processes: Processes, id_: str, text: bytes) -> None:
    found = await processes.output(W, SB, id_, 0, None, "utf-8", follow=True)
    seen = b""
    try:
        async with asyncio.timeout(20):
            async for item in found.items():
                if isinstance(item, Chunk):
                    seen += item.data
                if text in seen:
                    return
    finally:
        await found.aclose()
    raise AssertionError(f"{text!r} is not in {seen!r}")


async def test_started_listed_and_waited_for(processes: Processes, site: Site) -> None:
    info = await processes.start(W, SB, ProcessWish(shell="echo hello; sleep 0.2; exit 3", name="greeter"))
    assert info.running
    assert info.pid
    assert site.counted == 1
    assert parse_tag(info.tag).name == "greeter"
    assert parse_tag(info.tag).command.startswith("echo hello")
    assert [(one.id, is_lost) for one, is_lost in await processes.list_all(W, SB)] == [(info.id, False)]
    assert (await processes.get(W, SB, str(info.pid)))[0].id == info.id
    ended, _ = await processes.wait(W, SB, info.id, 20)
    assert ended.exit is not None
    assert ended.exit.exit_code == 3
    assert await said(processes, info.id) == b"hello\n"
    await processes.forget(W, SB, info.id)
    assert await processes.list_all(W, SB) == []
    with pytest.raises(ClocheError) as caught:
        await processes.get(W, SB, info.id)
    assert caught.value.code == "process.not_found"


async def test_the_same_key_is_the_same_process(processes: Processes, site: Site) -> None:
    wish = ProcessWish(argv=["sleep", "60"])
    first = await processes.start(W, SB, wish, "key", b"{}")
    again = await processes.start(W, SB, wish, "key", b"{}")
    assert (first.id, first.pid) == (again.id, again.pid)
    later = Processes(Site(site.guest))  # type: ignore[arg-type]  # the next server, which knows nothing
    assert (await later.start(W, SB, wish, "key", b"{}")).pid == first.pid
    with pytest.raises(ClocheError) as caught:
        await processes.start(W, SB, wish, "key", b"{ }")
    assert caught.value.code == "request.idempotency_conflict"
    await processes.forget(W, SB, first.id)
    with pytest.raises(ClocheError) as caught:
        await processes.start(W, SB, wish, "key", b"{}")
    assert caught.value.code == "process.not_found"


async def test_input_of_five_megabytes(processes: Processes) -> None:
    info = await processes.start(W, SB, ProcessWish(shell="sleep 0.2; sha256sum", pipe=True))
    data = bytes(range(256)) * 20_000
    written = await processes.write(W, SB, info.id, data, 30, close=True)
    assert (written.bytes, written.closed) == (len(data), True)
    assert (await said(processes, info.id)).split()[0].decode() == hashlib.sha256(data).hexdigest()
    with pytest.raises(ClocheError) as caught:
        await processes.write(W, SB, info.id, b"x", 1)
    assert caught.value.code == "process.ended"


async def test_writers_do_not_mix_and_do_not_wait_for_ever(processes: Processes) -> None:
    info = await processes.start(W, SB, ProcessWish(argv=["sleep", "60"], pipe=True))
    stuck = asyncio.create_task(processes.write(W, SB, info.id, b"x" * 1_000_000, 2))
    await asyncio.sleep(0.2)
    assert (await processes.write(W, SB, info.id, b"y", 0.1)).bytes == 0
    assert (await stuck).bytes == 65536
    await processes.forget(W, SB, info.id)


async def test_what_has_no_input_or_terminal_says_so(processes: Processes) -> None:
    info = await processes.start(W, SB, ProcessWish(argv=["sleep", "60"]))
    for call, code in (
        (processes.write(W, SB, info.id, b"x", 1), "process.no_input"),
        (processes.resize(W, SB, info.id, 80, 24), "process.no_input"),
        (processes.signal(W, SB, info.id, "NONSENSE", "process"), "request.invalid"),
    ):
        with pytest.raises(ClocheError) as caught:
            await call
        assert caught.value.code == code
    await processes.signal(W, SB, info.id, "TERM", "tree")
    ended, _ = await processes.wait(W, SB, info.id, 20)
    assert ended.exit is not None
    assert ended.exit.signal == "SIGTERM"


async def test_a_terminal(processes: Processes) -> None:
    shell = "trap 'stty size' WINCH; stty size; while :; do sleep 0.02; done"
    info = await processes.start(W, SB, ProcessWish(shell=shell, pty=Size(120, 40)))
    await until_shown(processes, info.id, b"40 120\r\n")
    await processes.resize(W, SB, info.id, 132, 50)
    await until_shown(processes, info.id, b"50 132\r\n")
    assert (await processes.get(W, SB, info.id))[0].pty == (132, 50)
    await processes.forget(W, SB, info.id)


async def test_readers_and_offsets(processes: Processes) -> None:
    info = await processes.start(W, SB, ProcessWish(shell="printf 'é1'; sleep 0.05; printf e >&2; sleep 0.1; printf 2"))
    await processes.wait(W, SB, info.id, 20)
    assert await said(processes, info.id, offset=3, stream="stdout") == b"2"
    assert await said(processes, info.id, stream="stderr") == b"e"
    assert set(await asyncio.gather(*(said(processes, info.id) for _ in range(50)))) == {"é1e2".encode()}
    found = await processes.output(W, SB, info.id, 1, None, "utf-8", follow=True)
    items = [item async for item in found.texts()]
    await found.aclose()
    assert items[:3] == [
        TextChunk("stdout", "\ufffd1", 1, 3),
        TextChunk("stderr", "e", 0, 4),
        TextChunk("stdout", "2", 3, 5),
    ]
    assert isinstance(items[-1], CommandEnd)


async def test_only_what_there_is(processes: Processes) -> None:
    info = await processes.start(W, SB, ProcessWish(shell="head -c 20000 /dev/zero; sleep 60", record_kb=4))
    async with asyncio.timeout(20):
        while (await processes.get(W, SB, info.id))[0].offset < 20000:
            await asyncio.sleep(0.01)
    found = await processes.output(W, SB, info.id, 0, None, "utf-8", follow=False)
    items = [item async for item in found.items()]
    await found.aclose()
    assert isinstance(items[0], Loss)
    assert items[-1] == SoFar(20000)
    assert items[0].count + sum(len(item.data) for item in items if isinstance(item, Chunk)) == 20000
    await processes.forget(W, SB, info.id)


async def test_what_another_start_of_the_machine_does_not_know_is_lost(processes: Processes, site: Site) -> None:
    kept = await processes.start(W, SB, ProcessWish(argv=["sleep", "60"]))
    gone = await processes.start(W, SB, ProcessWish(argv=["sleep", "60"], name="gone"))
    table = site.entry.processes
    table.known[gone.id] = type(table.known[gone.id])(gone, "another start")
    await site.guest.process_forget(gone.id)
    found = {info.id: is_lost for info, is_lost in await processes.list_all(W, SB)}
    assert found == {kept.id: False, gone.id: True}
    assert (await processes.get(W, SB, gone.id))[1]
    with pytest.raises(ClocheError) as caught:
        await processes.signal(W, SB, gone.id, "TERM", "tree")
    assert caught.value.code == "process.lost"
    for one in (gone, kept):
        await processes.forget(W, SB, one.id)
    assert await processes.list_all(W, SB) == []


async def test_commands_in_the_background_are_processes(processes: Processes, site: Site) -> None:
    async with site.guest.exec(ExecRequest(id="bg", argv=["sleep", "60"], detach=True)):
        pass
    assert [info.id for info, _ in await processes.list_all(W, SB)] == ["bg"]
    guest, more = await processes.guest_processes(W, SB)
    assert any(one.command == "sleep 60" and one.name == "sleep" for one in guest)
    assert not more
    await processes.forget(W, SB, "bg")


async def test_arguments_that_are_too_long(processes: Processes) -> None:
    with pytest.raises(ClocheError) as caught:
        await processes.start(W, SB, ProcessWish(argv=["echo", "x" * 1_000_000]))
    assert caught.value.code == "exec.too_large"
    with pytest.raises(ClocheError) as caught:
        await processes.start(W, SB, ProcessWish(argv=["sleep", "1"], rlimits={"nofile": 1}))
    assert caught.value.code == "request.invalid"
