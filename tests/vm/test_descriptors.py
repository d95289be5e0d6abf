"""What a leak shows first: descriptors of the server, of QEMU, of the network's process and of the agent stay as many.

After each kind of call, and with a tolerance that is far below one descriptor for each of them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from kit import procs
from kit.client import Api, AsyncApi, Box
from kit.server import Server
from kit.sockets import Socket
from kit.until import Watch, until

#: What may come and go: a connection that is still being closed, a warm machine that is being made.
SLACK = 5
#: As many calls of a kind as certainly show a leak: quick ones, and those that wait for something.
MANY, FEW = 100, 40
#: The agent keeps up to 16 empty groups for later commands, with three descriptors each; how many just now, varies.
KEPT_GROUPS = 3 * 16
#: As many at once.
AT_ONCE = 4


def descriptors(server: Server) -> dict[str, int]:
    netd = [p for p in procs.below(server.data) if "cloche_server.netd" in p.cmdline.split("\0")]
    assert len(netd) == 1
    return {"server": procs.fd_count(server.pid), "netd": procs.fd_count(netd[0].pid)}


def stay(counts: Callable[[], dict[str, int]], before: dict[str, int], what: str) -> None:
    """What is still being closed is waited for."""
    more: dict[str, int] = {}

    def flat() -> bool:
        more.clear()
        more.update((who, count - before[who]) for who, count in counts().items() if count > before[who] + SLACK)
        return not more

    try:
        until(flat, 20, every=0.5)
    except AssertionError as error:
        raise AssertionError(f"descriptors beyond {before} after {what}: {more}") from error


class Calls:
    """One call of each kind, in one sandbox."""

    def __init__(self, client: AsyncApi, box: Box) -> None:
        self.client, self.box = client, box
        self.path = f"{box.path}/exec"

    async def streamed(self, _: int) -> None:
        async with self.client.stream(self.box.id, "echo x; exit 2") as events:
            assert [event.name async for event in events] == ["stdout", "exit"]

    async def background(self, _: int) -> None:
        await self.client.call("POST", self.path, json={"cmd": "true", "background": True})

    async def refused(self, number: int) -> None:
        if number % 2:
            assert (await self.client.exec(self.box.id, ["/no/such/program"])).code == 127
        else:
            response = await self.client.request("POST", self.path, json={"cmd": "true", "cwd": "/missing"})
            assert response.status_code == 400

    async def pty(self, _: int) -> None:
        body = {"argv": ["/bin/echo", "x"], "pty": {"cols": 80, "rows": 24}}
        one = f"{self.box.path}/processes"
        one = f"{one}/{(await self.client.call('POST', one, json=body))['process_id']}"
        assert (await self.client.call("GET", f"{one}/wait"))["exit_code"] == 0
        await self.client.call("DELETE", one)

    async def timeout(self, _: int) -> None:
        response = await self.client.request("POST", self.path, json={"cmd": "sleep 9", "timeout_seconds": 0.2})
        assert response.status_code == 504

    async def gone(self, number: int) -> None:
        """The client hangs up: while it waits for the answer, or in the midst of the events."""
        if number % 2:
            with pytest.raises(httpx.ReadTimeout):
                limit = httpx.Timeout(20, read=0.3)
                await self.client.request("POST", self.path, json={"cmd": "exec sleep 73"}, timeout=limit)
        else:
            async with self.client.stream(self.box.id, "echo up; exec sleep 73") as events:
                assert (await anext(events)).raw == b"up\n"

    async def terminal(self, number: int) -> None:
        """A shell that ends, and one whose client is gone."""

        def use() -> None:
            path = f"{self.box.path}/terminal?linger_seconds=1"
            with Socket(self.box.api.url, path, self.box.api.token) as shell:
                shell.type(b"echo on-$((40+2))\n")
                shell.until(b"on-42")
                if number % 2:
                    shell.type(b"exit 3\n")
                    shell.end()
                    assert shell.texts[-1] == {"exit": 3}

        await asyncio.to_thread(use)


async def many(one: Callable[[int], Awaitable[Any]], count: int) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def soon(number: int) -> None:
        async with gate:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(soon(number))


async def fifty(client: AsyncApi, box: Box) -> float:
    """The median time of a plain command, one after the other."""
    took = []
    for _ in range(50):
        watch = Watch()
        assert (await client.exec(box.id, ["/bin/true"])).code == 0
        took.append(watch.seconds)
    return statistics.median(took)


@pytest.mark.slow
async def test_commands_and_terminals_of_every_kind(sandbox: Box, api: Api, server: Server) -> None:
    box, qemu = sandbox, server.qemu(sandbox.id).pid

    def counts() -> dict[str, int]:
        opened = box.sh("ls -l /proc/1/fd").splitlines()
        groups = sum("/sys/fs/cgroup/exec/" in line for line in opened)
        inside = {"agent": len(opened) - groups, "groups": max(groups, KEPT_GROUPS)}
        return {**descriptors(server), "qemu": procs.fd_count(qemu), **inside}

    kinds = {"streamed": MANY, "background": MANY, "refused": FEW, "pty": MANY, "timeout": FEW, "gone": FEW}
    kinds["terminal"] = FEW
    async with api.aio() as client:
        for kind in kinds:
            await many(getattr(Calls(client, box), kind), 2)
    until(lambda: box.exec(["pgrep", "-x", "sleep|bash"]).code == 1, 30)
    before = counts()
    async with api.aio() as client:
        first = await fifty(client, box)
    stay(counts, before, "50 plain commands")
    for kind, count in kinds.items():
        async with api.aio() as client:
            await many(getattr(Calls(client, box), kind), count)
        stay(counts, before, f"{count} calls of the kind {kind}")
    async with api.aio() as client:
        last = await fifty(client, box)
    stay(counts, before, "50 more plain commands")
    assert last < first * 3, "what was done before makes a command slow"
    until(lambda: box.exec(["pgrep", "-x", "sleep"]).code == 1)
    assert int(box.sh("find /sys/fs/cgroup/exec -mindepth 1 -maxdepth 1 -type d | wc -l")) < 100


@pytest.mark.slow
async def test_sandboxes_that_come_and_go(api: Api, server: Server) -> None:
    """Used or only made: nothing of one that is deleted stays open, with the pools as full as before."""

    def full() -> bool:
        metrics = api.metrics()
        return all(metrics.get(f'cloche_pool_machines{{kind="{kind}"}}') == 1 for kind in ("warm", "launched"))

    def counts() -> dict[str, int]:
        until(full, 90)
        return descriptors(server)

    async def one(number: int) -> None:
        made = (await client.create())["id"]
        if number % 3 == 0:
            assert (await client.exec(made, "echo x")).stdout == "x\n"
        await client.delete(made)

    async with api.aio() as client:
        await many(one, 2)
    before = counts()
    async with api.aio() as client:
        await many(one, 50)
    stay(counts, before, "50 sandboxes")
