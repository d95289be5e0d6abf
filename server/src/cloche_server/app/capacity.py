"""What is promised on this host, and whether more may be. Nothing exists before it is promised here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from cloche_server.core.admission import Limits, Refusal, Usage, admit
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Resources
from cloche_server.host import machine as host_machine
from cloche_server.settings import Settings

#: What one machine costs beside its guest memory under TCG: translation cache, QEMU itself (measured).
OVERHEAD_MB = 64
RETRY_AFTER = 5


@dataclass(frozen=True, slots=True)
class Promise:
    """Held for each sandbox and each pooled machine. `memory`: a failed sandbox holds disk only."""

    resources: Resources
    memory: bool = True


class Capacity:
    """The ledger. All methods are synchronous, so a decision and its booking cannot be torn apart."""

    def __init__(self, settings: Settings) -> None:
        self._data: Path = settings.data
        total = host_machine.memory().total_mb
        self.limits = Limits(
            max_sandboxes=settings.max_sandboxes,
            memory_mb=int(total * settings.memory_overcommit),
            memory_reserve_mb=settings.memory_reserve_mb,
            disk_mb=int(host_machine.disk(settings.data).total_mb * settings.disk_overcommit),
            disk_reserve_mb=settings.disk_reserve_mb,
            overhead_mb=OVERHEAD_MB,
        )
        self._promises: dict[str, Promise] = {}

    def usage(self, without: Collection[str] = ()) -> Usage:
        """What is promised, but for the keys in `without`, and what the host has left."""
        promises = [p for key, p in self._promises.items() if key not in without]
        return Usage(
            sandboxes=len(promises),
            memory_mb=sum(p.resources.memory_mb + OVERHEAD_MB for p in promises if p.memory),
            disk_mb=sum(p.resources.disk_mb for p in promises),
            available_memory_mb=host_machine.memory().available_mb,
            free_disk_mb=host_machine.disk(self._data).free_mb,
        )

    def refusal(self, resources: Resources, yielding: Collection[str]) -> Refusal | None:
        """Why `resources` would not fit even if all of `yielding` gave way; None when they might."""
        return admit(self.limits, self.usage(without=yielding), resources)

    def try_promise(self, key: str, resources: Resources) -> Refusal | None:
        """Books `resources` under `key`, or says why not."""
        refusal = admit(self.limits, self.usage(), resources)
        if refusal is None:
            self._promises[key] = Promise(resources)
        return refusal

    def take_over(self, key: str, resources: Resources) -> None:
        """Books without asking: the machine exists already (adopted, or from a pool)."""
        self._promises[key] = Promise(resources)

    def without_memory(self, key: str) -> None:
        """The machine of `key` has ended; its disk is still there."""
        promise = self._promises.get(key)
        if promise is not None:
            self._promises[key] = Promise(promise.resources, memory=False)

    def try_memory(self, key: str) -> Refusal | None:
        """The memory for a machine whose disk is promised already, or says why not."""
        promise = self._promises[key]
        if promise.memory:
            return None
        refusal = admit(self.limits, self.usage(without=(key,)), promise.resources)
        self._promises[key] = replace(promise, memory=refusal is None)
        return refusal

    def release(self, key: str) -> None:
        self._promises.pop(key, None)


def refused(refusal: Refusal) -> ClocheError:
    """The answer to a create that does not fit. Nothing exists when it is raised."""
    return ClocheError(
        "capacity.unavailable",
        f"no capacity: {refusal.message}; try again later",
        details={"resource": refusal.resource, "limit": refusal.limit, "used": refusal.used},
        retry_after=RETRY_AFTER,
    )
