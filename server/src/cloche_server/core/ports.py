"""What the use cases need of their adapters, as Protocols over plain data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from cloche_server.core.groups import Group
from cloche_server.core.network import NetworkPolicy, SecretGrant
from cloche_server.core.probes import Probe, Skipped
from cloche_server.core.records import Isolation, ProcessRef, Sandbox, Shape


@dataclass(frozen=True, slots=True)
class BakedTemplate:
    """A baked template on disk: what a machine is restored from. Immutable once published.

    `directory` holds `mem`, `dev`, `disk.qcow2`, `overlay.qcow2` (an empty overlay to copy) and `meta.json`.
    """

    id: str
    name: str
    directory: Path
    shape: Shape
    disk_mb: int
    accel: str
    size_bytes: int
    created_at: float
    #: Its commands were frozen when its memory was taken, and go on after the first renewal.
    thaw: bool = False


@dataclass(frozen=True, slots=True)
class BootFiles:
    """What a cold boot needs: `disk` is the root file system the template's disk is laid over."""

    kernel: Path
    initrd: Path
    root_image: Path


class Pages(Protocol):
    """Pages of a guest's memory that differ from the file its template has mapped."""

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """First page and number of pages, ascending."""

    @property
    def data(self) -> memoryview:
        """Their bytes, one after the other."""

    @property
    def count(self) -> int: ...
    def save(self, path: Path) -> str: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a machine continues from instead of its template: its device state, and the pages that had changed."""

    device_state: Path
    pages: Pages
    #: The file the pages differ from; None: the memory of the template.
    memory: Path | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """A machine at one moment. `pause_ms`: how long its vCPUs stood still; `pages` None: memory was not wanted."""

    device_state: bytes
    pages: Pages | None
    pause_ms: float


@dataclass(frozen=True, slots=True)
class Reading:
    """Of a VMM process: CPU seconds of all its threads since its start, and memory that is its own now (bytes)."""

    cpu_seconds: float
    memory_bytes: int


class MachineCondition(StrEnum):
    OK = "ok"
    DISK_FULL = "disk_full"  # stopped: the disk of the host is full; goes on when there is room


@dataclass(frozen=True, slots=True)
class MachineExit:
    """How a VMM process ended; `guest_shutdown`: the guest powered itself off."""

    code: int | None = None
    signal: str | None = None
    guest_shutdown: bool = False


class Machine(Protocol):
    """One running VMM process. Losing the object loses nothing: `Engine.adopt` finds the process again."""

    @property
    def id(self) -> str: ...
    @property
    def ref(self) -> ProcessRef: ...
    @property
    def agent_socket(self) -> Path: ...
    @property
    def condition(self) -> MachineCondition: ...
    @property
    def ended(self) -> bool: ...
    def measure(self) -> Reading | None:
        """Cheap. Of a process that has ended: the last reading there was; None when there was none."""

    async def restore(self, before_run: Callable[[], None] | None = None) -> None:
        """Loads what it was launched for, calls `before_run` on a thread, and starts the vCPUs."""

    async def grow_disk(self, disk_mb: int) -> None: ...
    async def pause(self) -> None:
        """Stops the vCPUs; memory stays where it is. Idempotent."""

    async def resume(self) -> None:
        """Starts the vCPUs again. Idempotent."""

    async def capture(
        self, *, memory: bool, new_layer: Path | None, recorded: Callable[[], Awaitable[None]] | None, goes_on: bool
    ) -> Captured:
        """Stands the machine still, takes its state, and with `new_layer` (an overlay that exists, over the active
        layer) seals the disk layer it has written to so far; then awaits `recorded`. With `goes_on` it goes on if it
        ran before. Raises `sandbox.capture_failed`; the machine is then as it was before."""

    async def active_layer(self) -> str:
        """The id of the layer its disk writes to now."""

    async def wait_exit(self) -> MachineExit: ...
    async def kill(self) -> None:
        """Ends the process at once and waits until it is gone."""

    def probe(self, disk: Path, memory: Path) -> Sequence[Probe]:
        """Tries the wall around its process from the host's side. `disk`: the layer it writes to, `memory`: the file on
        the host that it has mapped. Blocking."""

    async def tend(self) -> None:
        """House-keeping every few seconds: bounds the console log, goes on after a full disk."""

    def stand_back(self, cpus: int, *, back: bool) -> None:
        """Lets others have the processors first, or no more: a machine of so many vCPUs that nobody has yet must not
        slow down those that somebody has. Takes microseconds."""

    def release(self) -> None:
        """Lets go of the process, which runs on."""


class Card(Protocol):
    """An open tap device. `fd`: what a VMM inherits."""

    @property
    def fd(self) -> int: ...
    def close(self) -> None: ...


class Network(Protocol):
    """The slots of machines, and what carries their traffic. Without a network of its own a host has cards that lead
    nowhere, and every policy is kept by itself."""

    @property
    def enabled(self) -> bool: ...
    async def open(self, machine_id: str) -> Card | None:
        """A slot for a machine, in place of one it may have, and its card. Nothing that it sends is carried yet. Raises
        `network.unavailable`."""

    async def admit(
        self, machine_id: str, workspace: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]
    ) -> None:
        """From now on what its policy allows is carried. Raises `network.unavailable`."""

    async def change(self, machine_id: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]) -> int:
        """Another policy for a machine; returns how many connections it has cut. Raises `network.unavailable`."""

    async def close(self, machine_id: str) -> None:
        """Ends its connections and removes its slot. Idempotent."""

    async def group(self, groups: Sequence[Group], *, whole: bool = False) -> None:
        """Who is in these groups from now on; with `whole`: there are no others. Raises `network.unavailable`: then it
        is known as soon as anything is carried again."""

    async def provide(self, workspace: str, values: Mapping[str, str], authority: Mapping[str, str]) -> None:
        """Secrets of a workspace by name, and its authority (`certificate`, `key`), in place of those before. Raises
        `network.unavailable`."""

    async def inquire(self, op: str, machine_id: str, **fields: Any) -> Mapping[str, Any]:
        """`log`, `explain`, `learned` or `stats` of `docs/network.md`. Raises `network.unavailable`."""

    async def examine(self, machine_id: str) -> Sequence[Probe | Skipped]:
        """Looks at the slot of a machine from the host's side."""

    async def violations(self, told: str, wait: float) -> Mapping[str, Any]:
        """`violations` of `docs/network.md`. Raises `network.unavailable`, `network.off`."""

    async def adopt(
        self, machine_id: str, workspace: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]
    ) -> None:
        """As `admit`, for a machine of an earlier server; one without a slot stays without. Raises
        `network.unavailable`."""

    async def take_stock(self, living: Collection[str]) -> int:
        """At a start: removes every slot that is of none of these machines; returns how many."""


class Trust(Protocol):
    """Whom a sandbox trusts with its HTTPS, and with what."""

    async def ready(self, record: Sandbox) -> str | None:
        """See `app/broker.py`."""


class Membership(Protocol):
    """Who is in which network group: see `app/groups.py`."""

    def place(self, workspace: str, group: str | None, sandbox_id: str) -> dict[str, Any]: ...
    async def joined(self, record: Sandbox) -> None: ...
    def touch(self, record: Sandbox) -> None: ...


class Engine(Protocol):
    """Runs machines. Every method leaves nothing behind when it raises. `nic`: descriptor of a tap device that the
    machine inherits; None: its card leads nowhere."""

    @property
    def isolation(self) -> Isolation: ...
    @property
    def fingerprint(self) -> str:
        """Two templates may share machines only when this is equal: VMM version, acceleration, CPU model."""

    async def launch(
        self,
        machine_id: str,
        directory: Path,
        template: BakedTemplate,
        disk: Path,
        state: SavedState | None = None,
        *,
        nic: int | None = None,
    ) -> Machine:
        """Starts a process on the layer `disk` that waits for `Machine.restore`, of its template or of `state`.
        Raises `sandbox.boot_failed`, `template.corrupt`."""

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
    ) -> Machine:
        """Boots the layer `disk` cold; `memory` is a file of zeros that is mapped privately."""

    async def adopt(self, machine_id: str, directory: Path, ref: ProcessRef) -> Machine | None:
        """Takes a running process over again; None when it is gone."""

    def find(self, root: Path) -> dict[str, ProcessRef]:
        """Every VMM process whose directory is below `root`, by machine id: the truth about orphans."""

    def clear_up(self, living: Collection[str]) -> None:
        """At a start: removes what machines have left that are none of these. Blocking."""

    def clear_rest(self) -> None:
        """Tries again what `clear_up` could not remove. Blocks."""

    async def bake(
        self,
        template_id: str,
        files: BootFiles,
        shape: Shape,
        directory: Path,
        work: Path,
        prepare: Callable[[Path], Awaitable[None]],
        progress: Callable[[str], None],
        *,
        nic: int | None = None,
    ) -> None:
        """Boots cold in `work`, runs `prepare(agent_socket)`, and writes `mem`, `dev`, `disk.qcow2` and
        `overlay.qcow2` into `directory`, which will become `templates/<template_id>`."""
