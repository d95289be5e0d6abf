"""Processes beyond what is usual: very many, very much output, bombs, odd names. After each
test the same sandbox and its neighbour answer.

The counts are smaller than what was run by hand, for emulated machines are slow: 500 processes, 1 GiB of output.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kit import procs, sse
from kit.client import Api, AsyncApi, Box, checked
from kit.server import Server
from kit.until import Watch, until

#: Memory of the server and of the agent may grow by so much, whatever goes through them.
GROWTH_MIB = 32
HOG = ["python3", "-c", "x=[]\nwhile 1: x.append(bytearray(1<<20))"]


@pytest.fixture(scope="module")
def neighbour(api: Api) -> Iterator[Box]:
    box = api.create()
    yield box
    box.delete()


@pytest.fixture(autouse=True)
def both_answer(shared: Box, neighbour: Box) -> Iterator[None]:
    """Nothing that a test does hurts the agent, another sandbox or the server."""
    started = shared.sh("cut -d' ' -f22 /proc/1/stat")
    yield
    watch = Watch()
    assert shared.sh("echo on") == "on\n"
    assert neighbour.sh("echo on") == "on\n"
    assert watch.seconds < 30
    assert shared.sh("cut -d' ' -f22 /proc/1/stat") == started, "the agent is the same one"


def call(box: Box, method: str, rest: str, **options: Any) -> Any:
    return box.api.call(method, f"{box.path}/processes{rest}", **options)


def start(box: Box, **body: Any) -> str:
    return str(call(box, "POST", "", json=body)["process_id"])


def agent_mib(box: Box, field: str = "VmRSS") -> float:
    return int(box.sh(f"awk '/{field}/ {{print $2}}' /proc/1/status")) / 1024


async def test_very_many_at_once(shared: Box, api: Api, server: Server) -> None:
    """Every start is answered, and what has ended can be read although so many others have ended since."""
    count, path = 150, f"{shared.path}/processes"
    before = procs.rss_mib(server.pid)
    async with api.aio() as client:

        async def one(number: int) -> str:
            body = {"command": f"echo {number}; exec sleep 600", "name": f"n{number}"}
            return str((await client.call("POST", path, json=body))["process_id"])

        ids = await asyncio.gather(*(one(number) for number in range(count)))
        listed = {p["process_id"]: p["status"] for p in (await client.call("GET", path))["processes"]}
        assert [listed[one] for one in ids] == ["running"] * count
        assert shared.sh("echo in between") == "in between\n"

        async def end(number: int, process_id: str) -> None:
            await client.call("POST", f"{path}/{process_id}/signal", json={"signal": "KILL"})
            ended = await client.call("GET", f"{path}/{process_id}/wait")
            assert (ended["exit_code"], ended["termination"]["signal"]) == (137, "SIGKILL")

        await asyncio.gather(*(end(number, process_id) for number, process_id in enumerate(ids)))

        async def read(number: int, process_id: str) -> None:
            headers = {"Accept": "application/octet-stream"}
            response = checked(await client.request("GET", f"{path}/{process_id}/output", headers=headers))
            assert response.content == f"{number}\n".encode()

        await asyncio.gather(*(read(number, process_id) for number, process_id in enumerate(ids)))
    assert procs.rss_mib(server.pid) - before < GROWTH_MIB
    assert agent_mib(shared) < 40


class Reader:
    """One of many: by its number it is slow or not, comes back or not, by the header or by the query."""

    def __init__(self, client: AsyncApi, path: str, number: int) -> None:
        self.client, self.path, self.number = client, path, number
        self.random = random.Random(number)
        self.read = b""
        self.next = 0
        self.comings = 0
        self.exit: int | None = None

    async def run(self) -> None:
        while self.exit is None:
            self.comings += 1
            await self._once(self.random.randint(10_000, 80_000) if self.number % 3 == 0 else 1 << 40)

    async def _once(self, most: int) -> None:
        by_header = self.number % 2 and self.next
        options: Any = {"headers": {"Last-Event-ID": str(self.next)}} if by_header else {"params": {"from": self.next}}
        parser, began = sse.Parser(), len(self.read)
        async with self.client.http.stream("GET", self.path, **options) as response:
            assert response.status_code == 200
            async for chunk in response.aiter_raw():
                for event in parser.feed(chunk):
                    self._take(event)
                if self.exit is not None or len(self.read) - began > most:
                    return
                if self.number % 5 == 0:
                    await asyncio.sleep(0.02)

    def _take(self, event: sse.Event) -> None:
        if event.name == "exit":
            self.exit = int(event.data["exit_code"])
        elif event.name:
            assert (event.name, event.data["offset"]) == ("stdout", len(self.read))
            self.read += event.raw
            self.next = int(event.id or 0)


async def test_fifty_readers_each_at_its_own_pace(shared: Box, api: Api, server: Server) -> None:
    wanted = b"".join(b"%07d\n" % number for number in range(1, 30_001))
    program = "for (1..30000) { printf qq(%07d\\n), $_; select(undef, undef, undef, 0.2) unless $_ % 6000 } exit 4"
    one = start(shared, argv=["perl", "-e", program])
    procs.reset_peak(server.pid)
    before = procs.rss_mib(server.pid)
    async with api.aio() as client:
        readers = [Reader(client, f"{shared.path}/processes/{one}/output", number) for number in range(50)]
        await asyncio.gather(*(reader.run() for reader in readers))
    assert all((reader.read, reader.exit) == (wanted, 4) for reader in readers)
    assert max(reader.comings for reader in readers) > 3
    assert procs.peak_rss_mib(server.pid) - before < GROWTH_MIB


def test_output_without_end_costs_no_memory(shared: Box, server: Server) -> None:
    """One reader keeps up as well as it can, another one has stopped; the process waits for neither."""
    size = 160 << 20
    agent, before = agent_mib(shared), procs.rss_mib(server.pid)
    procs.reset_peak(server.pid)
    one = start(shared, command=f"head -c {size} /dev/zero")
    path, params = f"{shared.path}/processes/{one}/output", {"encoding": "base64"}
    with shared.api.http.stream("GET", path, params=params) as stopped:
        next(stopped.iter_raw())
        seen = lost = 0
        with shared.api.http.stream("GET", path, params=params) as response:
            for event in sse.parse(response.iter_raw()):
                seen += len(event.raw) if event.name == "stdout" else 0
                lost += event.data["bytes"] if event.name == "gap" else 0
                code = event.data.get("exit_code")
        assert (seen + lost, code) == (size, 0)
        peak, grown = procs.peak_rss_mib(server.pid), agent_mib(shared, "VmHWM")
    assert peak - before < GROWTH_MIB
    assert grown - agent < GROWTH_MIB
    print(f"{size >> 20} MiB: {seen >> 20} MiB seen; server +{peak - before:.1f} MiB, agent +{grown - agent:.1f} MiB")


def test_arguments_over_the_limit(shared: Box) -> None:
    for body in ({"argv": ["echo", "a" * 1_000_000]}, {"argv": ["echo", *["a" * 1000] * 3000]}):
        refused = shared.api.request("POST", f"{shared.path}/processes", json=body)
        assert (refused.status_code, refused.json()["code"]) == (413, "exec.too_large")
        assert "the limit of the kernel is" in refused.json()["error"]
    most = start(shared, argv=["/bin/true", *["a" * 1000] * 1000])
    assert call(shared, "GET", f"/{most}/wait")["exit_code"] == 0


def test_death_by_memory_is_told_as_such(shared: Box) -> None:
    one = start(shared, argv=HOG)
    ended: dict[str, Any] = {}
    until(
        lambda: ended.update(call(shared, "GET", f"/{one}/wait", params={"timeout": 60})) or "exit_code" in ended, 240
    )
    assert (ended["exit_code"], ended["termination"]["reason"]) == (137, "oom")
    assert "out of memory" in ended["termination"]["detail"]


def test_a_fork_bomb_is_killed_whole(shared: Box) -> None:
    one = start(shared, command="bomb() { bomb | bomb & }; bomb; sleep 600")
    assert [shared.sh("echo on") for _ in range(3)] == ["on\n"] * 3
    assert len(call(shared, "GET", "", params={"all": "true"})["guest"]) > 10
    call(shared, "DELETE", f"/{one}")
    until(lambda: int(shared.exec("ps -e --no-headers | wc -l").stdout) < 80, 60, every=0.5)


def test_a_full_disk_does_not_stop_processes(shared: Box) -> None:
    shared.sh(
        "fallocate -l $(df --output=avail -B1 / | tail -1) /fill; dd if=/dev/zero of=/fill2 bs=64k 2>/dev/null; true"
    )
    one = start(shared, command="echo x > /root/x || echo refused; exit 3")
    assert call(shared, "GET", f"/{one}/wait")["exit_code"] == 3
    assert "refused" in shared.follow_all(one).stdout.decode()
    refused = shared.fs_raw("PUT", "", "/root/new", b"n" * 100_000)
    assert (refused.status_code, refused.json()["code"]) == (507, "file.no_space")
    shared.sh("rm /fill /fill2 /root/x")
    assert shared.put("/root/new", b"n" * 100_000)["bytes"] == 100_000


def test_names_that_are_not_utf8(shared: Box) -> None:
    """In command lines, names of programs and output: the list is whole, and the bytes can be had."""
    shared.sh("mkdir -p /tmp/odd && cp /bin/sleep \"/tmp/odd/$(printf 's\\xff')\"")
    one = start(shared, command="printf '\\xff\\xfe'; exec /tmp/odd/s* 600")
    mine = until(
        lambda: [
            found
            for found in call(shared, "GET", "", params={"all": "1"})["guest"]
            if found.get("process_id") == one and found["name"] == "s\ufffd"
        ]
    )
    assert mine[0]["command"] == "/tmp/odd/s\ufffd 600"
    output = shared.api.request("GET", f"{shared.path}/processes/{one}/output?follow=false&encoding=base64")
    assert base64.b64encode(b"\xff\xfe").decode() in output.text
    call(shared, "DELETE", f"/{one}")
