"""One QEMU process: its QMP session, its end, its console log. Owns nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import Captured, MachineCondition, MachineExit, Pages, Reading
from cloche_server.core.probes import Probe
from cloche_server.core.records import ProcessRef
from cloche_server.engine.qemu.argv import fd_name
from cloche_server.engine.qemu.capture import capture
from cloche_server.engine.qemu.launch import QemuConfig, file_limit_mb
from cloche_server.engine.qemu.nodes import active_node, marked_for_writing
from cloche_server.engine.qemu.probes import Suspect, probe_vmm
from cloche_server.engine.qemu.qmp import QmpClient, QmpError, QmpLost
from cloche_server.engine.qemu.qmp_codec import QmpEvent
from cloche_server.host.jail import limit_file_size
from cloche_server.host.pages import find_region, write_in
from cloche_server.host.watch import ProcessWatch
from cloche_server.telemetry import log

_log = log.get("engine")

QMP_TIMEOUT: Final = 10.0
RESTORE_TIMEOUT: Final = 60.0
KILL_TIMEOUT: Final = 10.0
LAST_EVENTS_TIMEOUT: Final = 0.5
#: A guest can write to its console without end, and a QEMU that was taken over to its log; above this size a file is
#: cut.
CONSOLE_LIMIT: Final = 1024 * 1024
CONSOLE_KEEP: Final = 64 * 1024


class QemuMachine:
    """A running QEMU. Made by the driver, which also finds it again after a restart."""

    def __init__(
        self,
        machine_id: str,
        directory: Path,
        watch: ProcessWatch,
        memory: Path,
        device_state: Path | None,
        pages: Pages | None = None,
        config: QemuConfig | None = None,
    ) -> None:
        """`memory`: the file it has mapped. `device_state` and `pages`: what `restore` loads. `config`: how
        it was started; without it nothing is cleared up after it."""
        self._id = machine_id
        self._directory = directory
        self._watch = watch
        self._memory = memory
        self._device_state = device_state
        self._pages = pages
        self._config = config
        self._qmp: QmpClient | None = None
        self._condition = MachineCondition.OK
        self._guest_shutdown = False
        self._migrated = asyncio.Event()

    @property
    def id(self) -> str:
        return self._id

    @property
    def ref(self) -> ProcessRef:
        return self._watch.ref

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def agent_socket(self) -> Path:
        return self._directory / "agent.sock"

    @property
    def condition(self) -> MachineCondition:
        return self._condition

    @property
    def ended(self) -> bool:
        return self._watch.ended

    def measure(self) -> Reading | None:
        return self._watch.measure()

    async def connect(self, timeout: float = QMP_TIMEOUT) -> None:
        """Opens the QMP session. Raises `QmpLost`."""
        self._qmp = await QmpClient.connect(self._directory / "qmp.sock", self._on_event, timeout=timeout)

    async def look(self) -> None:
        """Learns what an adopted machine has told nobody: that it stopped because the disk was full."""
        try:
            status = await self.command("query-status")
        except QmpError as error:
            raise QmpLost(str(error)) from error
        if status.get("status") == "io-error":
            self._condition = MachineCondition.DISK_FULL
        with contextlib.suppress(QmpError, QmpLost, LookupError, TypeError, ValueError):
            await self._drop_unused()

    async def _drop_unused(self) -> None:
        """A server that ended in a capture may have left a layer that the machine has never switched to."""
        active, _ = await self.active_node()
        names = {one["node-name"] for one in await self.command("query-named-block-nodes", {"flat": True})}
        for fdset, fd, node in marked_for_writing(await self.command("query-fdsets")):
            if node == active:
                continue
            try:
                if node in names:
                    await self.command("blockdev-del", {"node-name": node})
                await self.take_back(fdset)
            except QmpError:  # it lies below the active one, which only reads it
                await self.take_back(fdset, fd)

    def _on_event(self, event: QmpEvent) -> None:
        if event.name == "BLOCK_IO_ERROR" and event.data.get("nospace"):
            self._condition = MachineCondition.DISK_FULL
            _log.error("machine.disk_full", sandbox=self._id)
        elif event.name == "RESUME":
            self._condition = MachineCondition.OK
        elif event.name == "SHUTDOWN":
            self._guest_shutdown = bool(event.data.get("guest"))
        elif event.name == "MIGRATION" and event.data.get("status") in {"completed", "failed"}:
            self._migrated.set()

    async def command(
        self, name: str, arguments: dict[str, Any] | None = None, timeout: float = QMP_TIMEOUT, *, fd: int | None = None
    ) -> Any:
        """A QMP command with a deadline; `fd` goes with it. Raises `QmpError`, `QmpLost` (a deadline that passes
        too)."""
        if self._qmp is None or not self._qmp.connected:
            raise QmpLost("no QMP session")
        try:
            async with asyncio.timeout(timeout):
                return await self._qmp.execute(name, arguments, fd=fd)
        except TimeoutError:
            raise QmpLost(f"QEMU did not answer {name} within {timeout:g} s") from None

    async def hand_over(self, *fds: tuple[int, str]) -> int:
        """Gives QEMU descriptors, each with a mark, as one set. Its number. Raises `QmpError`, `QmpLost`."""
        into: dict[str, Any] = {}
        for fd, mark in fds:
            answer = await self.command("add-fd", {**into, "opaque": mark}, fd=fd)
            into = {"fdset-id": int(answer["fdset-id"])}
        return int(into["fdset-id"])

    async def take_back(self, fdset: int, fd: int | None = None) -> None:
        """QEMU closes a set of descriptors, or one of it. Raises `QmpError`, `QmpLost`."""
        await self.command("remove-fd", {"fdset-id": fdset, **({} if fd is None else {"fd": fd})})

    @contextlib.asynccontextmanager
    async def lent(self, fd: int) -> AsyncIterator[str]:
        """The name by which QEMU opens this descriptor, for as long as the block lasts."""
        fdset = await self.hand_over((fd, "lent"))
        try:
            yield fd_name(fdset)
        finally:
            with contextlib.suppress(QmpError, QmpLost):
                await self.take_back(fdset)

    async def restore(self, before_run: Callable[[], None] | None = None) -> None:
        assert self._device_state is not None, "only a launched machine is restored"
        try:
            if self._pages is not None:
                await asyncio.to_thread(self._put_pages, self._pages)
                self._pages = None
            await self.command("migrate-set-capabilities", _capabilities("x-ignore-shared", "events"))
            await self._load(self._device_state)
            status = await self.command("query-migrate")
            if status.get("status") != "completed":
                raise ClocheError(
                    "template.corrupt",
                    "the machine could not be restored from its template; bake the template again",
                    details={"qemu": str(status.get("error-desc", status.get("status")))},
                )
            if before_run is not None:
                await asyncio.to_thread(before_run)
            await self.command("cont")
        except (QmpError, QmpLost, TimeoutError, OSError) as error:
            raise ClocheError(
                "sandbox.boot_failed",
                "the machine ended while it was restored from its template",
                details={"qemu": self.last_words() or str(error)},
            ) from error

    async def _load(self, device_state: Path) -> None:
        fd = os.open(device_state, os.O_RDONLY | os.O_CLOEXEC)
        try:
            async with self.lent(fd) as name:
                await self.command("migrate-incoming", {"uri": f"file:{name}"})
                await self._wait_migrated()
        finally:
            os.close(fd)

    async def _wait_migrated(self) -> None:
        """Until the device state is loaded or refused, or the process has ended. Raises TimeoutError."""
        migrated = asyncio.ensure_future(self._migrated.wait())
        ended = asyncio.ensure_future(self._watch.wait())
        try:
            async with asyncio.timeout(RESTORE_TIMEOUT):
                await asyncio.wait({migrated, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            migrated.cancel()
            ended.cancel()

    def _put_pages(self, pages: Pages) -> None:
        write_in(find_region(self.ref.pid, self._memory), pages)

    @property
    def memory(self) -> Path:
        """The file that is mapped as its memory."""
        return self._memory

    async def save_device_state(self, name: str, *, last: bool) -> None:
        """Writes the device state of a stopped machine, memory not included, to what is `lent` under this name.
        `last`: it will not go on, and lets go of its disk."""
        await self.command("xen-save-devices-state", {"filename": name, "live": last})

    async def pause(self) -> None:
        await self._steer("stop")

    async def resume(self) -> None:
        await self._steer("cont")

    async def _steer(self, command: str) -> None:
        try:
            await self.command(command)
        except (QmpError, QmpLost) as error:
            raise ClocheError("sandbox.unreachable", f"the machine did not {command}") from error

    async def capture(
        self, *, memory: bool, new_layer: Path | None, recorded: Callable[[], Awaitable[None]] | None, goes_on: bool
    ) -> Captured:
        return await capture(self, memory=memory, new_layer=new_layer, recorded=recorded, goes_on=goes_on)

    async def active_node(self) -> tuple[str, str]:
        """What QEMU calls the layer that its disk writes to, and the id of that layer. Raises `QmpLost`."""
        try:
            return active_node(await self.command("query-block"))
        except QmpError as error:
            raise QmpLost(str(error)) from error
        except (ValueError, LookupError, TypeError) as error:
            raise QmpLost("the machine does not tell its disk") from error

    async def active_layer(self) -> str:
        return (await self.active_node())[1]

    async def grow_disk(self, disk_mb: int) -> None:
        try:
            node, _ = await self.active_node()
            # First, or it could not write what it then has; it cannot lift this limit by itself.
            limit_file_size(self.ref.pid, file_limit_mb(disk_mb) * 1024 * 1024)
            await self.command("block_resize", {"node-name": node, "size": disk_mb * 1024 * 1024})
        except (QmpError, QmpLost, ProcessLookupError) as error:
            raise ClocheError("sandbox.boot_failed", "the disk of the sandbox could not be grown") from error

    async def wait_exit(self) -> MachineExit:
        status = await self._watch.wait()
        if self._qmp is not None:
            # What it said last may still be in the socket, and tells why it has ended.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_EVENTS_TIMEOUT):
                    await self._qmp.closed.wait()
        await asyncio.to_thread(self._forget)
        clean = status.code == 0 or (status.code is None and status.signal is None)
        return MachineExit(status.code, status.signal, guest_shutdown=self._guest_shutdown and clean)

    async def kill(self) -> None:
        self._watch.kill()
        try:
            async with asyncio.timeout(KILL_TIMEOUT):
                await self._watch.wait()
        except TimeoutError:
            raise ClocheError(
                "internal", f"the VMM process {self.ref.pid} did not end within {KILL_TIMEOUT:g} s of SIGKILL"
            ) from None
        await asyncio.to_thread(self._forget)
        self.release()

    def stand_back(self, cpus: int, *, back: bool) -> None:
        if self._config is not None and self._config.wall is not None:
            self._config.wall.groups.stand_back(self._id, cpus, back=back)

    def release(self) -> None:
        if self._qmp is not None:
            self._qmp.close()
        self._watch.close()

    def probe(self, disk: Path, memory: Path) -> Sequence[Probe]:
        wall = self._config.wall if self._config is not None else None
        return probe_vmm(wall, Suspect(self._id, self.ref.pid, self._directory, disk, memory))

    def _forget(self) -> None:
        if self._config is not None:
            self._config.forget(self._id)

    async def tend(self) -> None:
        for name in ("console.log", "qemu.log"):
            await asyncio.to_thread(_bound_log, self._directory / name)
        if self._condition is MachineCondition.DISK_FULL:
            try:
                await self.command("cont")
            except (QmpError, QmpLost) as error:
                _log.warning("machine.cont_failed", sandbox=self._id, error=str(error))

    def last_words(self) -> str:
        """The end of QEMU's own log, for error details."""
        try:
            return (self._directory / "qemu.log").read_bytes()[-2000:].decode("utf-8", "replace").strip()
        except OSError:
            return ""


def _capabilities(*names: str) -> dict[str, Any]:
    return {"capabilities": [{"capability": name, "state": True} for name in names]}


def _bound_log(path: Path) -> None:
    """Keeps the tail of a log that has grown too large. QEMU appends, so it goes on at the end."""
    try:
        if path.stat().st_size <= CONSOLE_LIMIT:
            return
        with path.open("r+b") as file:
            file.seek(-CONSOLE_KEEP, os.SEEK_END)
            tail = file.read()
            file.truncate(0)
            os.pwrite(file.fileno(), tail, 0)
    except FileNotFoundError:
        pass
