"""Two pools that hide the cost of a start: launched processes, and restored and warmed machines.

One task refills them in the background, one machine at a time; every pooled machine is promised in the ledger like a
sandbox, and gives way to sandboxes where processors are wanted. A pooled machine that dies is noticed, cleared away and
replaced. While the pools are full and nobody comes, the warm machines practise one after another what takes longer (see
`practice.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cloche_server.app.capacity import Capacity
from cloche_server.app.machines import Machines, Slot, run_quietly
from cloche_server.app.practice import practise
from cloche_server.app.steps import to_the_end
from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import BakedTemplate
from cloche_server.core.records import BootMode, Resources
from cloche_server.telemetry import log, metrics

_log = log.get("pools")

#: After a failed refill: wait this long, doubled each time up to the maximum (seconds).
BACKOFF = (1.0, 60.0)

#: After a machine was taken, or something has begun or ended in a sandbox, the refill waits this long for quiet, and at
#: most so long for each machine (seconds).
SETTLE = 0.3
SETTLE_MOST = 2.0

#: So often a machine of the warm pool does what users do first; more did not make it quicker.
WARM_ROUNDS = 3


class Pools:
    """`templates` are what the pools hold, so many of each; without any they are emptied. `practise_after`: the pools
    have been full, and nobody has come, for so many seconds before a warm machine practises; 0 is never."""

    def __init__(
        self, machines: Machines, capacity: Capacity, *, launched: int, warm: int, practise_after: float = 0
    ) -> None:
        self._practise_after = practise_after
        self._machines = machines
        self._capacity = capacity
        self._sizes = {BootMode.LAUNCHED: launched, BootMode.WARM: warm}
        self._slots: dict[BootMode, deque[Slot]] = {BootMode.LAUNCHED: deque(), BootMode.WARM: deque()}
        self._templates: tuple[BakedTemplate, ...] = ()
        self._changed = asyncio.Event()
        self._taken_at = self._filled_at = float("-inf")
        #: When somebody used a sandbox last (monotonic).
        self.last_use: Callable[[], float] = lambda: float("-inf")
        #: The machine that is being made now, promised but in no pool yet.
        self._filling: asyncio.Task[bool] | None = None
        self._filling_id = ""
        #: The warm machine that practises now; it may be taken all the same.
        self._practising: tuple[Slot, asyncio.Task[None]] | None = None

    def aim(self, *templates: BakedTemplate) -> None:
        """Sets what the pools hold from now on; the first is filled first."""
        self._templates = templates
        self._changed.set()

    @property
    def templates(self) -> tuple[BakedTemplate, ...]:
        return self._templates

    def counts(self) -> dict[str, int]:
        return {kind.value: len(slots) for kind, slots in self._slots.items()}

    def take(self, template: BakedTemplate) -> Slot | None:
        """The best slot for `template`, with its promise; the caller owns both from now on."""
        for kind in (BootMode.WARM, BootMode.LAUNCHED):
            # The refill task clears away those that have ended.
            fit = [s for s in self._slots[kind] if not s.machine.ended and s.template.id == template.id]
            if fit:
                slot = min(fit, key=self._readiness)
                self._slots[kind].remove(slot)
                self._leave_alone(slot)
                slot.machine.stand_back(template.shape.cpus, back=False)
                self._taken_at = time.monotonic()
                self._changed.set()
                return slot
        return None

    def _readiness(self, slot: Slot) -> int:
        """The lower, the better: one that has practised comes first, and last the one that does."""
        if slot.practised:
            return 0
        return 2 if self._practising is not None and self._practising[0] is slot else 1

    def _leave_alone(self, slot: Slot) -> None:
        """Ends the practice of a machine that leaves the pool: its command is killed."""
        if self._practising is not None and self._practising[0] is slot:
            self._practising[1].cancel()

    def put_back(self, slot: Slot) -> None:
        """Undoes `take` for a slot that was not touched."""
        slot.machine.stand_back(slot.template.shape.cpus, back=True)
        self._slots[slot.mode].appendleft(slot)

    def promised(self) -> set[str]:
        """Keys in the ledger that give way when room is short."""
        keys = {slot.id for slots in self._slots.values() for slot in slots}
        return keys | ({self._filling_id} if self._filling_id else set())

    async def give_up_one(self) -> bool:
        """Ends one pooled machine, or the making of one, to make room for a sandbox. False when there is none."""
        for kind in (BootMode.LAUNCHED, BootMode.WARM):
            if self._slots[kind]:
                slot = self._slots[kind].popleft()
                self._leave_alone(slot)
                await self._discard(slot)
                return True
        filling = self._filling
        if filling is None or filling.done():
            return False
        filling.cancel()
        await asyncio.wait({filling})
        return True

    def quick_to_fill(self) -> bool:
        """Whether both pools are full (or none is wanted)."""
        return self._missing() is None

    async def run(self) -> None:
        """Refills for ever; cancel it to stop, then call `drain`."""
        pause = BACKOFF[0]
        while True:
            self._changed.clear()
            missing = None
            try:
                await self._clear_stale()
                await self._settle()
                missing = self._missing()
                filled = missing is None or await self._fill_one(*missing)
            except ClocheError as error:
                _log.warning("pool.refill_failed", code=error.code, error=error.message)
                filled = False
            except Exception as error:  # noqa: BLE001 - without pools creates are slower, and all goes on
                _log.error("pool.refill_failed", error=repr(error))
                filled = False
            if missing is None and filled:
                if not await self._practise_one():
                    await self._wait(5.0)  # a pooled machine may have died without a word
            elif filled:
                pause = BACKOFF[0]
            else:
                await self._wait(pause)
                pause = min(pause * 2, BACKOFF[1])

    async def _settle(self) -> None:
        """Lets a create and its first commands have the processors before a refill takes them; under a steady stream
        of them the refill goes on after `SETTLE_MOST` all the same."""
        until = time.monotonic() + SETTLE_MOST
        while (now := time.monotonic()) < until:
            quiet = max(self._taken_at, self.last_use()) + SETTLE - now
            if quiet <= 0:
                return
            await asyncio.sleep(min(quiet, until - now))

    async def _practise_one(self) -> bool:
        """Lets a warm machine practise when it is quiet. Ends as soon as the pools have changed. False when there was
        nothing to be done."""
        slot = next((s for s in self._slots[BootMode.WARM] if not s.practised and not s.machine.ended), None)
        if slot is None or not self._practise_after:
            return False
        quiet_at = max(self._taken_at, self._filled_at) + self._practise_after
        await self._wait(max(0.0, quiet_at - time.monotonic()))
        if self._changed.is_set():
            return True
        task = asyncio.ensure_future(practise(slot))
        changed = asyncio.ensure_future(self._changed.wait())
        self._practising = slot, task
        both: set[asyncio.Future[Any]] = {task, changed}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            if not task.cancelling():  # a second one would keep it from clearing up
                task.cancel()
            await asyncio.wait(both)
            self._practising = None
        # What has failed would fail again.
        slot.practised = slot.practised or (not task.cancelled())
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("pool.practice_failed", machine=slot.id, error=repr(error))
        return True

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _missing(self) -> tuple[BootMode, BakedTemplate] | None:
        for template in self._templates:
            for kind in (BootMode.WARM, BootMode.LAUNCHED):
                if sum(slot.template.id == template.id for slot in self._slots[kind]) < self._sizes[kind]:
                    return kind, template
        return None

    async def _clear_stale(self) -> None:
        wanted = {template.id for template in self._templates}
        for slots in self._slots.values():
            for slot in [s for s in slots if s.machine.ended or s.template.id not in wanted]:
                slots.remove(slot)
                if slot.machine.ended:
                    _log.warning("pool.machine_died", machine=slot.id)
                await self._discard(slot)
        self._gauge()

    async def _fill_one(self, kind: BootMode, template: BakedTemplate) -> bool:
        """`_fill` as a task that `give_up_one` may end; that counts as no room."""
        self._filling = asyncio.ensure_future(self._fill(kind, template))
        try:
            await asyncio.wait({self._filling})
        except asyncio.CancelledError:
            self._filling.cancel()
            await asyncio.wait({self._filling})
            raise
        finally:
            filling, self._filling, self._filling_id = self._filling, None, ""
        return not filling.cancelled() and filling.result()

    async def _fill(self, kind: BootMode, template: BakedTemplate) -> bool:
        """One more machine; False when there is no room for it."""
        machine_id = self._machines.new_id()
        resources = Resources(template.shape.cpus, template.shape.memory_mb, template.disk_mb)
        if self._capacity.try_promise(machine_id, resources) is not None:
            return False
        self._filling_id = machine_id
        try:
            slot = await self._machines.launch(template, machine_id, kind)
        except BaseException:
            self._capacity.release(machine_id)
            raise
        slot.machine.stand_back(template.shape.cpus, back=True)
        try:
            if kind is BootMode.WARM:
                await self._machines.restore(slot)
                await self._machines.renew(slot)
                # What users do first, and what a create does: the translation cache is warm afterwards.
                for _ in range(WARM_ROUNDS):
                    await run_quietly(slot.guest, ("/bin/bash", "-c", "echo warm; /bin/true"))
                    await self._machines.greet(slot)
        except BaseException:
            await to_the_end(self._discard(slot))
            raise
        self._slots[kind].append(slot)
        self._filled_at = time.monotonic()
        self._gauge()
        return True

    async def _discard(self, slot: Slot) -> None:
        try:
            await self._machines.discard(slot)
        finally:
            self._capacity.release(slot.id)
            self._gauge()

    def _gauge(self) -> None:
        for kind, slots in self._slots.items():
            metrics.pool.labels(kind.value).set(len(slots))

    async def drain(self) -> None:
        """Ends every pooled machine: without a server they are of no use to anybody."""
        self._templates = ()
        for slots in self._slots.values():
            while slots:
                try:
                    await self._discard(slots.popleft())
                except Exception as error:  # noqa: BLE001 - the others have to go too; the next start sweeps
                    _log.error("pool.drain_failed", error=repr(error))
