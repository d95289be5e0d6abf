"""Pause and resume; hibernate and wake. All of it is done by the task of the sandbox, one thing after the other."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.capturing import Capturer
from cloche_server.app.entry import Entry, illegal, not_written, rearmed
from cloche_server.app.machines import Machines, Slot
from cloche_server.app.room import Room
from cloche_server.app.steps import to_the_end
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Event, Status
from cloche_server.core.ports import Captured, Machine
from cloche_server.core.records import BootMode, Sandbox
from cloche_server.guest.client import GuestClient
from cloche_server.guest.types import RenewRequest
from cloche_server.host import files
from cloche_server.host.clock import Clock
from cloche_server.storage import saved
from cloche_server.telemetry import log

_log = log.get("sleep")

#: Name of the saved memory in the directory of a sandbox; it is there until a machine has continued from it.
STATE: Final = "state"
USED: Final = ".state-used"


class SleepVerbs:
    """Each method finds the sandbox, lets its task do the work, and returns the new record. Each may be repeated."""

    def __init__(
        self,
        access: Access,
        supervisor: Supervisor,
        machines: Machines,
        capturer: Capturer,
        room: Room,
        clock: Clock,
    ) -> None:
        self._access = access
        self._supervisor = supervisor
        self._machines = machines
        self._capturer = capturer
        self._room = room
        self._clock = clock
        access.waker = self.wake_entry

    # ---------------------------------------------------------------- pause

    async def pause(self, workspace: str, sandbox_id: str) -> Sandbox:
        entry = await self._access.find(workspace, sandbox_id)
        return await self._supervisor.perform(entry, lambda: self.pause_entry(entry))

    async def pause_entry(self, entry: Entry, reason: str = "asked") -> Sandbox:
        """Inside the task of the sandbox. `reason` is what its `status_reason` says afterwards."""
        if entry.record.status is Status.PAUSED:
            return entry.record
        if entry.record.status is not Status.RUNNING or entry.machine is None:
            raise illegal(entry.record, Event.PAUSE)
        try:
            # So that nothing of it runs in a fork of the paused sandbox before that has random numbers of its own,
            # and nothing of it after the resume before the clock is right.
            await self._capturer.freeze(entry)
        except ClocheError as error:
            _log.warning("pause.not_frozen", sandbox=entry.record.id, error=error.message)
        try:
            await entry.machine.pause()
        except BaseException:
            await asyncio.shield(self._capturer.thaw(entry))
            raise
        if entry.guest is not None:
            entry.guest.stand_still(True)
        return await self._supervisor.move(entry, Event.PAUSE, done=True, status_reason=reason)

    async def resume(self, workspace: str, sandbox_id: str) -> Sandbox:
        """The TTL is counted anew from now, as it was set. A sandbox that runs is left as it is."""
        entry = await self._access.find(workspace, sandbox_id)
        return await self._supervisor.perform(entry, lambda: self._resume(entry))

    async def _resume(self, entry: Entry) -> Sandbox:
        if entry.record.status is Status.RUNNING:
            return entry.record
        if entry.record.status is not Status.PAUSED or entry.machine is None or entry.guest is None:
            raise illegal(entry.record, Event.RESUME)
        self._access.check_budget(entry)
        await entry.machine.resume()
        entry.guest.stand_still(False)
        try:
            await entry.guest.renew(RenewRequest(time_now=True, thaw=True), timeout=10)
        except ClocheError as error:
            _log.warning("clock.not_set", sandbox=entry.record.id, error=error.message)
        entry.last_activity = self._clock.monotonic()
        return await self._supervisor.move(
            entry, Event.RESUME, done=True, status_reason=None, **self._ttl(entry.record)
        )

    def _ttl(self, record: Sandbox) -> dict[str, float | None]:
        now = self._clock.now()
        return {"expires_at": rearmed(record, now, record.ttl_seconds, record.persistent).expires_at}

    # ---------------------------------------------------------------- hibernate

    async def hibernate(self, workspace: str, sandbox_id: str) -> Sandbox:
        entry = await self._access.find(workspace, sandbox_id)
        return await self._supervisor.perform(entry, lambda: self.hibernate_entry(entry))

    async def hibernate_entry(self, entry: Entry, reason: str = "asked") -> Sandbox:
        """As `pause_entry`."""
        if entry.record.status is Status.HIBERNATED:
            return entry.record
        if entry.record.status not in {Status.RUNNING, Status.PAUSED} or entry.machine is None:
            raise illegal(entry.record, Event.HIBERNATE)
        if not entry.record.layer_id:
            raise ClocheError("sandbox.capture_failed", "the sandbox was made before disks had layers")
        template = self._capturer.template(entry)
        paused = entry.record.status is Status.PAUSED
        # Before the freeze, so that calls which come from now on wait until it has woken up again.
        await self._supervisor.move(entry, Event.HIBERNATE, status_reason=reason)
        try:
            async with contextlib.nullcontext() if paused else self._capturer.frozen(entry):
                captured = await entry.machine.capture(memory=True, new_layer=None, recorded=None, goes_on=False)
                try:
                    await to_the_end(asyncio.to_thread(self._save, entry.record, captured, template.id))
                except BaseException:
                    await asyncio.shield(self._go_on(entry, paused))
                    raise
                finally:
                    if captured.pages is not None:
                        captured.pages.close()
                # From here on it is hibernated, whatever happens.
                await to_the_end(self._end_machine(entry))
        except BaseException as error:
            if entry.machine is not None and _status(entry) is Status.HIBERNATING:
                await asyncio.shield(self._not_hibernated(entry, paused))
            if isinstance(error, OSError):
                raise not_written(error, "the memory of the sandbox") from error
            raise
        return entry.record

    async def _go_on(self, entry: Entry, paused: bool) -> None:
        """After a save that failed. No machine runs while there is memory that another would continue from."""
        await asyncio.to_thread(forget, self._machines.root / entry.record.id)
        if not paused and entry.machine is not None:
            await entry.machine.resume()

    async def _not_hibernated(self, entry: Entry, paused: bool) -> None:
        """It runs on, also if it was paused: whoever asked learns of the failure, and may pause it again."""
        runs = True
        if entry.machine is not None:
            try:
                await entry.machine.resume()
                if paused:
                    await self._capturer.thaw(entry)
            except ClocheError as error:
                runs = False
                _log.error("hibernate.not_undone", sandbox=entry.record.id, error=error.message)
        await self._supervisor.move(entry, Event.UNDONE, done=True, status_reason=None)
        if not runs:
            await self._supervisor.move(entry, Event.PAUSE, done=True)

    def _save(self, record: Sandbox, captured: Captured, template_id: str) -> None:
        directory = self._machines.root / record.id
        layers = self._machines.layers
        needs = self._needs(record, template_id)
        files.remove_tree(directory / STATE)  # of a machine that runs there is none
        files.sweep_staging(directory)
        with files.staging(directory) as staged:
            work = staged / STATE
            work.mkdir(mode=0o700)
            saved.write(work, captured, needs, [layers.path(one) for one in layers.chain(record.layer_id)], {})
            files.publish(work, directory / STATE)

    def _needs(self, record: Sandbox, template_id: str) -> saved.Needs:
        memory_mb = record.resources.memory_mb
        zeros = self._machines.layers.zero_memory(memory_mb) if record.cold else None
        return saved.Needs(template_id, self._machines.engine.fingerprint, memory_mb, zeros)

    async def _end_machine(self, entry: Entry) -> None:
        machine, guest = entry.machine, entry.guest
        entry.machine = entry.guest = None
        if machine is not None and not await self._ended(entry, machine, guest):
            entry.machine = machine
        else:
            self._room.give_back(entry.record.id)
        await self._supervisor.move(entry, Event.SAVED, done=True, process=None)

    async def _ended(self, entry: Entry, machine: Machine, guest: GuestClient | None) -> bool:
        """Ends a machine. One that resists is ended by the next wake, or with the sandbox."""
        try:
            try:
                if guest is not None:
                    await guest.aclose()
            finally:
                await machine.kill()
        except Exception as error:  # noqa: BLE001 - what was saved is true whatever becomes of the process
            _log.error("machine.resists", sandbox=entry.record.id, error=repr(error))
        if machine.ended:
            machine.release()
            await self._machines.unplug(entry.record.id)
        return machine.ended

    # ---------------------------------------------------------------- wake

    async def wake(self, workspace: str, sandbox_id: str) -> Sandbox:
        entry = await self._access.find(workspace, sandbox_id)

        async def wake() -> Sandbox:
            if entry.record.status is Status.FAILED:
                raise illegal(entry.record, Event.WAKE)
            return await self._wake(entry)

        return await self._supervisor.perform(entry, wake)

    async def wake_entry(self, entry: Entry) -> None:
        """For whoever needs the sandbox awake; any number at once wake it once."""
        await self._supervisor.perform(entry, lambda: self._wake(entry))

    async def _wake(self, entry: Entry) -> Sandbox:
        if entry.record.status in {Status.RUNNING, Status.FAILED}:
            return entry.record
        if entry.record.status is not Status.HIBERNATED:
            raise illegal(entry.record, Event.WAKE)
        self._access.check_budget(entry)
        began = self._clock.monotonic()
        template = self._capturer.template(entry)
        if entry.machine is not None:
            await entry.machine.kill()
            entry.machine.release()
            entry.machine = None
        await self._room.take(entry.record.id)
        directory = self._machines.root / entry.record.id
        slot: Slot | None = None
        try:
            state = await asyncio.to_thread(saved.load, directory / STATE, self._needs(entry.record, template.id))
            try:
                await self._supervisor.move(entry, Event.WAKE)
                slot = await self._machines.relaunch(template, entry.record.id, entry.record.layer_id, state)
                await self._machines.restore(slot, before_run=lambda: _use_up(directory))
            finally:
                state.pages.close()
            ca_pem = await self._machines.plug_in(entry.record)
            await self._machines.renew(slot, names=False, thaw=True, ca_pem=ca_pem)
        except BaseException as error:
            await asyncio.shield(self._not_woken(entry, slot, directory, error))
            raise
        self._supervisor.attach(entry, slot.machine, slot.guest)
        await self._drop_used(directory)
        entry.last_activity = self._clock.monotonic()
        took = max(1, round((self._clock.monotonic() - began) * 1000))
        return await self._supervisor.move(
            entry,
            Event.BOOTED,
            done=True,
            process=slot.machine.ref,
            isolation=self._machines.engine.isolation,
            started_at=self._clock.now(),
            boot_ms=took,
            boot_mode=BootMode.WAKE,
            status_reason=None,
            **self._ttl(entry.record),
        )

    async def _not_woken(self, entry: Entry, slot: Slot | None, directory: Path, error: BaseException) -> None:
        """Its memory is still there: hibernated as before. A machine has gone on from it: then it has failed."""
        _log.error("wake.failed", sandbox=entry.record.id, error=repr(error))
        resists = slot is not None and not await self._ended(entry, slot.machine, slot.guest)
        if not resists:
            self._room.give_back(entry.record.id)
        if entry.record.status is Status.WAKING:
            if (directory / STATE).is_dir():
                await self._supervisor.move(entry, Event.UNDONE, done=True)
            else:
                await self._supervisor.fail(entry, "it could not go on after it had been woken up")
                await self._drop_used(directory)
        if slot is not None and resists:
            entry.machine = slot.machine

    async def _drop_used(self, directory: Path) -> None:
        try:
            await asyncio.to_thread(files.remove_tree, directory / USED)
        except (OSError, ClocheError) as error:
            _log.warning("used_memory.not_removed", sandbox=directory.name, error=str(error))


def _status(entry: Entry) -> Status:
    return entry.record.status


def forget(directory: Path) -> None:
    """Takes the saved memory its name first, so that none is continued from even when it cannot be removed now."""
    if (directory / STATE).exists():
        _use_up(directory)
    files.remove_tree(directory / USED)


def _use_up(directory: Path) -> None:
    """A memory that a machine has continued from is never continued from again: the disk has gone on."""
    files.remove_tree(directory / USED)  # of a wake whose server has ended
    (directory / STATE).rename(directory / USED)
    files.fsync_dir(directory)
