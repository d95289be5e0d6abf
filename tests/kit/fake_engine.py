"""A host in memory: machines without processes, guests without agents, and faults on demand.

`World.fault["Machine.restore"] = SomeError(…)` makes that call fail; `World.block["Machine.restore"]`
gets an event that is set when the call has begun, and the call then waits for ever; with `World.gate` it waits
until the gate is opened. Directories, layers and saved memory are real files.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import (
    BakedTemplate,
    BootFiles,
    Captured,
    MachineCondition,
    MachineExit,
    Reading,
    SavedState,
)
from cloche_server.core.probes import Probe
from cloche_server.core.records import Isolation, ProcessRef, Shape
from cloche_server.guest.types import Execs, RenewResult
from cloche_server.host.pages import PAGE, Pages
from cloche_server.storage.layers import read_header


@dataclass
class Gate:
    """`reached` is set when a call has come to it; the call goes on when `open` is set."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class World:
    """What exists on the fake host."""

    alive: dict[str, FakeMachine] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    fault: dict[str, BaseException] = field(default_factory=dict)
    block: dict[str, asyncio.Event] = field(default_factory=dict)
    gate: dict[str, Gate] = field(default_factory=dict)
    open_guests: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    #: Machines that have a slot of the network.
    slots: set[str] = field(default_factory=set)
    #: Guests that are asked to shut down do not.
    hangs: bool = False
    renewals: list[tuple[str, Any]] = field(default_factory=list)
    #: Machines whose commands are frozen.
    frozen: set[str] = field(default_factory=set)
    #: Machines whose commands have gone on before their renewal.
    thawed_early: set[str] = field(default_factory=set)
    #: Machines of which the link knows that they stand still.
    still: set[str] = field(default_factory=set)
    #: Files and directories that were made in guests and not deleted: machine, path.
    left_in_guests: set[tuple[str, str]] = field(default_factory=set)
    #: All memory that was captured.
    captured: list[Pages] = field(default_factory=list)
    pids: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    def new_ref(self) -> ProcessRef:
        """A process that nobody has had before."""
        return ProcessRef(next(self.pids), 1)

    async def pass_by(self, name: str) -> None:
        """Every call of the fakes goes through here."""
        self.calls.append(name)
        await asyncio.sleep(0)
        if name in self.fault:
            raise self.fault[name]
        if name in self.block:
            self.block[name].set()
            await asyncio.Event().wait()
        if name in self.gate:
            self.gate[name].reached.set()
            await self.gate[name].open.wait()

    def is_empty(self, root: Path) -> list[str]:
        """What is still there."""
        left = [f"process of {name}" for name in self.alive]
        left += [f"directory {path.name}" for path in root.iterdir()] if root.is_dir() else []
        layers = root.parent / "layers"
        left += [f"layer {path.name}" for path in layers.iterdir()] if layers.is_dir() else []
        snapshots = root.parent / "snapshots"
        left += [f"snapshot {path.name}" for path in snapshots.iterdir()] if snapshots.is_dir() else []
        left += [f"memory of a capture, {pages.runs}" for pages in self.captured if is_open(pages)]
        left += [f"slot of {name}" for name in sorted(self.slots)]
        left += [f"link to {name}" for name in sorted(self.open_guests)]
        left += [f"hold on {name}" for name in sorted(self.held)]
        return left


def is_open(pages: Pages) -> bool:
    try:
        return len(pages.data) >= 0
    except ValueError:
        return False


class FakeMachine:
    """`runs`: its vCPUs do."""

    def __init__(self, world: World, machine_id: str, directory: Path, ref: ProcessRef) -> None:
        self._world = world
        self._id = machine_id
        self.directory = directory
        self._ref = ref
        self._exit: asyncio.Future[MachineExit] = asyncio.get_running_loop().create_future()
        self.condition = MachineCondition.OK
        self.disk = Path()
        self.state: SavedState | None = None
        self.runs = False
        #: What its counters say.
        self.cpu_seconds = 0.0
        self.memory_bytes = 0
        self.stands_back = False
        world.alive[machine_id] = self
        world.held.add(machine_id)

    @property
    def id(self) -> str:
        return self._id

    @property
    def ref(self) -> ProcessRef:
        return self._ref

    @property
    def agent_socket(self) -> Path:
        return self.directory / "agent.sock"

    @property
    def ended(self) -> bool:
        return self._exit.done()

    def measure(self) -> Reading | None:
        return Reading(self.cpu_seconds, 0 if self.ended else self.memory_bytes)

    async def restore(self, before_run: Callable[[], None] | None = None) -> None:
        await self._world.pass_by("Machine.restore")
        self._check()
        if self.state is not None:
            if not self.state.device_state.is_file():
                raise ClocheError("sandbox.boot_failed", "the device state is not there any more")
            assert is_open(self.state.pages)
        if before_run is not None:
            before_run()
        await self._world.pass_by("Machine.restore.cont")
        self.runs = True

    async def pause(self) -> None:
        await self._world.pass_by("Machine.pause")
        self.runs = False

    async def resume(self) -> None:
        await self._world.pass_by("Machine.resume")
        self.runs = True

    async def active_layer(self) -> str:
        return self.disk.stem

    async def capture(
        self, *, memory: bool, new_layer: Path | None, recorded: Callable[[], Awaitable[None]] | None, goes_on: bool
    ) -> Captured:
        await self._world.pass_by("Machine.capture")
        ran, self.runs = self.runs, False
        try:
            if self.ended:
                raise ClocheError("sandbox.capture_failed", "the machine has ended")
            await self._world.pass_by("Machine.capture.stopped")
            if new_layer is not None:
                self.disk = new_layer
                await self._world.pass_by("Machine.capture.sealed")
            if recorded is not None:
                await recorded()
            await self._world.pass_by("Machine.capture.cont")
        except BaseException:
            self.runs = ran
            raise
        self.runs = ran and goes_on
        if not memory:
            return Captured(b"", None, 1.0)
        self._world.captured.append(Pages([(1, 2)], memoryview(bytearray(b"m" * 2 * PAGE))))
        return Captured(b"device state", self._world.captured[-1], 1.0)

    async def grow_disk(self, disk_mb: int) -> None:
        await self._world.pass_by("Machine.grow_disk")
        self._check()

    def _check(self) -> None:
        if self.ended:
            raise ClocheError("sandbox.boot_failed", "the machine ended while it was restored from its template")

    async def wait_exit(self) -> MachineExit:
        return await asyncio.shield(self._exit)

    def die(self, exit_: MachineExit | None = None) -> None:
        """The process ends by itself."""
        if self._world.alive.get(self._id) is self:
            del self._world.alive[self._id]
            self._world.frozen.discard(self._id)
        self.runs = False
        if not self._exit.done():
            self._exit.set_result(exit_ or MachineExit(signal="SIGKILL"))

    async def kill(self) -> None:
        await self._world.pass_by("Machine.kill")
        self.die()

    def probe(self, disk: Path, memory: Path) -> Sequence[Probe]:
        return [Probe("vmm.fake", True, f"{disk.stem} over {memory.name}")]

    async def tend(self) -> None:
        await self._world.pass_by("Machine.tend")

    def stand_back(self, cpus: int, *, back: bool) -> None:
        self.stands_back = back

    def release(self) -> None:
        self._world.held.discard(self._id)


class FakeEngine:
    """An `Engine`."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def isolation(self) -> Isolation:
        return Isolation()

    @property
    def fingerprint(self) -> str:
        return "fake"

    async def launch(
        self,
        machine_id: str,
        directory: Path,
        template: BakedTemplate,
        disk: Path,
        state: SavedState | None = None,
        *,
        nic: int | None = None,
    ) -> FakeMachine:
        await self.world.pass_by("Engine.launch")
        missing = missing_layers(disk)
        assert missing == [], f"the disk of {machine_id} lies over {missing}"
        directory.mkdir(parents=True, exist_ok=True)
        machine = FakeMachine(self.world, machine_id, directory, self.world.new_ref())
        machine.disk, machine.state = disk, state
        if state is not None:
            self.world.frozen.add(machine_id)  # as it was captured
        try:
            await self.world.pass_by("Engine.launch.connect")
        except BaseException:
            machine.die()
            machine.release()
            raise
        return machine

    async def boot(
        self,
        machine_id: str,
        directory: Path,
        files: BootFiles,
        shape: Shape,
        memory: Path,
        disk: Path,
        *,
        nic: int | None = None,
    ) -> FakeMachine:
        await self.world.pass_by("Engine.boot")
        missing = missing_layers(disk)
        assert missing == [], f"the disk of {machine_id} lies over {missing}"
        directory.mkdir(parents=True, exist_ok=True)
        machine = FakeMachine(self.world, machine_id, directory, ProcessRef(next(self.world.pids), 1))
        machine.disk = disk
        machine.runs = True
        return machine

    async def adopt(self, machine_id: str, directory: Path, ref: ProcessRef) -> FakeMachine | None:
        await self.world.pass_by("Engine.adopt")
        machine = self.world.alive.get(machine_id)
        if machine is not None:
            self.world.held.add(machine_id)
        return machine

    def find(self, root: Path) -> dict[str, ProcessRef]:
        return {name: machine.ref for name, machine in self.world.alive.items()}

    def clear_rest(self) -> None:
        pass

    def clear_up(self, living: Collection[str]) -> None:
        self.world.calls.append(f"Engine.clear_up {sorted(living)}")

    async def bake(self, *_: object, nic: int | None = None) -> None:
        await self.world.pass_by("Engine.bake")


class FakeGuest:
    """A `GuestClient`; the socket's directory names the machine."""

    world: ClassVar[World]

    def __init__(self, path: str) -> None:
        self._name = Path(path).parent.name

    async def connect(self, *, timeout: float | None = None) -> int:
        await self.world.pass_by("Guest.connect")
        self.world.open_guests.add(self._name)
        return 1

    async def renew(self, request: Any, *, timeout: float = 30.0) -> RenewResult:
        await self.world.pass_by("Guest.renew")
        machine = self.world.alive.get(self._name)
        if machine is None:
            raise ClocheError("sandbox.unreachable", "The agent in the sandbox cannot be reached.")
        self.world.renewals.append((self._name, request))
        steps: dict[str, float] = {"entropy": 0.1}
        if getattr(request, "thaw", False):
            self.world.frozen.discard(self._name)
            if self._name in self.world.thawed_early:
                steps["thawed_early"] = 0.0
        return RenewResult(steps, None)

    def stand_still(self, still: bool) -> None:
        (self.world.still.add if still else self.world.still.discard)(self._name)

    async def quiesce(self, *, timeout: float = 120.0) -> None:
        await self.world.pass_by("Guest.quiesce")
        machine = self.world.alive.get(self._name)
        if machine is None or not machine.runs:
            raise ClocheError("sandbox.unreachable", "The agent in the sandbox cannot be reached.")

    async def all_execs(self, *, timeout: float = 30.0) -> Execs:
        return Execs("a start", ())

    async def shutdown(self, grace_ms: int = 5000, *, timeout: float = 30.0) -> None:
        """The guest ends as soon as the loop turns, unless the world says that it hangs."""
        await self.world.pass_by("Guest.shutdown")
        machine = self.world.alive.get(self._name)
        if machine is not None and not self.world.hangs:
            asyncio.get_running_loop().call_soon(machine.die, MachineExit(code=0, guest_shutdown=True))

    async def freeze(self, *, disk: bool, timeout_ms: int, timeout: float = 30.0) -> None:
        await self.world.pass_by("Guest.freeze")
        self.world.frozen.add(self._name)

    async def thaw(self, *, keep: bool, timeout: float = 30.0) -> None:
        await self.world.pass_by("Guest.thaw")
        self.world.frozen.discard(self._name)

    def exec(self, request: Any) -> _FakeCall:
        return _FakeCall(self.world)

    async def tunnel(self, *_: Any, **__: Any) -> Any:
        await self.world.pass_by("Guest.tunnel")
        raise ClocheError("port.closed", "nothing listens")

    async def mkdir(self, path: str, **_: Any) -> None:
        await self.world.pass_by("Guest.mkdir")
        self.world.left_in_guests.add((self._name, path))

    async def write_file(self, path: str, body: bytes, **_: Any) -> None:
        await self.world.pass_by("Guest.write_file")
        self.world.left_in_guests.add((self._name, path))

    async def delete(self, path: str, *, recursive: bool = False) -> None:
        await self.world.pass_by("Guest.delete")
        self.world.left_in_guests -= {one for one in self.world.left_in_guests if one[1].startswith(path)}

    async def aclose(self) -> None:
        self.world.calls.append("Guest.aclose")
        self.world.open_guests.discard(self._name)
        await self.world.pass_by("Guest.aclosed")


class _FakeCall:
    def __init__(self, world: World) -> None:
        self._world = world

    async def __aenter__(self) -> AsyncIterator[object]:
        await self._world.pass_by("Guest.exec")

        async def nothing() -> AsyncIterator[object]:
            return
            yield

        return nothing()

    async def __aexit__(self, *_: object) -> None:
        return None


class FakeClock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time

    def now_ns(self) -> int:
        return int(self.time * 1e9)

    def monotonic(self) -> float:
        return self.time


def template(root: Path, name: str = "base", shape: Shape | None = None) -> BakedTemplate:
    """A baked template with nothing in it but an empty overlay."""
    shape = shape or Shape(1, 256)
    (root / name).mkdir(exist_ok=True)
    header = struct.pack(">4sIQIIQII", b"QFI\xfb", 3, 512, 4, 16, 1 << 30, 0, 2)
    (root / name / "overlay.qcow2").write_bytes(header.ljust(512, b"\0") + b"base".ljust(1024, b"\0"))
    return BakedTemplate(f"{name}-{shape}-0", name, root / name, shape, 1024, "tcg", 0, 0.0)


def missing_layers(top: Path) -> list[str]:
    """Which files of a disk are not there, from its top down to the template's."""
    path = top
    while path.exists():
        backing = read_header(path).backing
        if "/" in backing:
            return []
        path = path.parent / backing
    return [path.name]


async def settle(check: Callable[[], bool], turns: int = 2000) -> None:
    """Lets the loop run until `check` holds; real time passes only for threads."""
    for turn in range(turns):
        if check():
            return
        await asyncio.sleep(0 if turn < 100 else 0.002)
    raise AssertionError("did not settle")
