"""A machine at one moment: device state, the pages that differ from its template, and a sealed disk layer.

The vCPUs stand still from `stop` to `cont`. What can be made ready before is made ready before; what can wait is
done after.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import Captured
from cloche_server.engine.qemu.argv import layer_options
from cloche_server.engine.qemu.nodes import node_of, rw_tag, write_fds
from cloche_server.engine.qemu.qmp import QmpError, QmpLost
from cloche_server.host.pages import PAGE, Pages, Room, copy_out, find_region, written
from cloche_server.telemetry import log

if TYPE_CHECKING:
    from cloche_server.engine.qemu.machine import QemuMachine

_log = log.get("capture")

#: More room than what is written now: the guest runs on until it is stopped.
MORE_PAGES: Final = 2048
#: Device state is some 20 KB; what is far above that was not written by the QEMU that was started.
MOST_STATE: Final = 16 * 1024 * 1024


async def capture(
    machine: QemuMachine,
    *,
    memory: bool,
    new_layer: Path | None,
    recorded: Callable[[], Awaitable[None]] | None,
    goes_on: bool,
) -> Captured:
    """See `Machine.capture`."""
    pid, room, running = machine.ref.pid, None, False
    pages: Pages | None = None
    try:
        async with contextlib.AsyncExitStack() as stack:
            region = state = None
            if memory:
                region = await asyncio.to_thread(find_region, pid, machine.memory)
                room = await asyncio.to_thread(lambda: Room((sum(c for _, c in written(region)) + MORE_PAGES) * PAGE))
                state = await stack.enter_async_context(_state(machine))
            layer = None if new_layer is None else await stack.enter_async_context(_laid_over(machine, new_layer))
            running = (await machine.command("query-status")).get("status") == "running"
            began = time.perf_counter()
            await machine.command("stop")
            if state is not None and region is not None:
                await machine.save_device_state(state.name, last=not goes_on and new_layer is None)
                pages = await asyncio.to_thread(lambda: copy_out(region, written(region), room))
            if layer is not None:
                await layer.switch()
            if recorded is not None:
                await recorded()
            if goes_on and running:
                await machine.command("cont")
            pause = (time.perf_counter() - began) * 1000
            return Captured(state.read() if state is not None else b"", pages, pause)
    except BaseException as error:
        if pages is not None:
            pages.close()
        if running:
            await asyncio.shield(_go_on(machine))
        if isinstance(error, QmpError | QmpLost | OSError):
            raise ClocheError("sandbox.capture_failed", f"the machine could not be captured: {error}") from error
        raise
    finally:
        if room is not None:
            room.close()


class _State:
    """Where QEMU writes its device state: memory of ours, which QEMU opens by `name`."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name

    def read(self) -> bytes:
        """Raises OSError for more than any machine has."""
        size = os.fstat(self._fd).st_size
        if size > MOST_STATE:
            raise OSError(errno.EFBIG, "the machine wrote too much device state")
        return os.pread(self._fd, size, 0)


@contextlib.asynccontextmanager
async def _state(machine: QemuMachine) -> AsyncIterator[_State]:
    with contextlib.ExitStack() as stack:
        memory = os.memfd_create("state")
        stack.callback(os.close, memory)
        # QEMU opens it only to write, and takes only a descriptor that is open just so.
        write = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_CLOEXEC)
        stack.callback(os.close, write)
        async with machine.lent(write) as name:
            yield _State(memory, name)


class _NewLayer:
    """An empty layer that QEMU has open, over nothing yet."""

    def __init__(self, machine: QemuMachine, below: str, node: str) -> None:
        self._machine = machine
        self._below = below
        self._node = node
        self.used = False

    async def switch(self) -> None:
        """The machine writes to it from now on."""
        await self._machine.command("blockdev-snapshot", {"node": self._below, "overlay": self._node})
        self.used = True


@contextlib.asynccontextmanager
async def _laid_over(machine: QemuMachine, path: Path) -> AsyncIterator[_NewLayer]:
    """At the end it is taken back, unless the machine has switched to it."""
    below, _ = await machine.active_node()
    node = node_of(path)
    with contextlib.ExitStack() as stack:
        fds = []
        for flags in (os.O_RDWR, os.O_RDONLY):
            fds.append(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW))
            stack.callback(os.close, fds[-1])
        fdset = await machine.hand_over((fds[0], rw_tag(node)), (fds[1], "reads"))
    layer = _NewLayer(machine, below, node)
    try:
        await machine.command("blockdev-add", {**layer_options("qcow2", fdset, node=node), "backing": None})
        # The layer below is only read from now on, and reopened so. Through a writable descriptor that is left it would
        # stay locked for everybody else.
        for where, fd in write_fds(await machine.command("query-fdsets"), below):
            await machine.take_back(where, fd)
        yield layer
    finally:
        if not layer.used:
            await asyncio.shield(_forget(machine, node, fdset))


async def _forget(machine: QemuMachine, node: str, fdset: int) -> None:
    for command, arguments in (("blockdev-del", {"node-name": node}), ("remove-fd", {"fdset-id": fdset})):
        with contextlib.suppress(QmpError, QmpLost):
            await machine.command(command, arguments)


async def _go_on(machine: QemuMachine) -> None:
    try:
        await machine.command("cont")
    except (QmpError, QmpLost) as error:
        _log.error("capture.cont_failed", sandbox=machine.id, error=str(error))
