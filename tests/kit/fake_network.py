"""The network of a host in memory: who has a slot, and what of it is carried. What a real host refuses is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cloche_server.core.errors import ClocheError
from cloche_server.core.groups import Group
from cloche_server.core.network import NetworkPolicy, SecretGrant
from cloche_server.core.probes import Probe, Skipped
from kit.fake_engine import World


@dataclass(slots=True)
class FakeCard:
    network: FakeNetwork
    fd: int = 99

    def close(self) -> None:
        self.network.cards -= 1


@dataclass
class FakeNetwork:
    """`admitted`: the policy of each machine that may use its slot."""

    world: World
    enabled: bool = True
    admitted: dict[str, NetworkPolicy] = field(default_factory=dict)
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    cards: int = 0
    violated: list[dict[str, Any]] = field(default_factory=list)

    async def open(self, machine_id: str) -> FakeCard:
        await self.world.pass_by("Network.open")
        self.admitted.pop(machine_id, None)
        self.world.slots.add(machine_id)
        self.cards += 1
        return FakeCard(self)

    async def admit(
        self, machine_id: str, workspace: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]
    ) -> None:
        await self.world.pass_by("Network.admit")
        if machine_id not in self.world.slots:
            raise ClocheError("network.unavailable", "there is no slot")
        self.admitted[machine_id] = policy

    async def change(self, machine_id: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]) -> int:
        await self.world.pass_by("Network.change")
        self.admitted[machine_id] = policy
        return 0

    async def close(self, machine_id: str) -> None:
        await self.world.pass_by("Network.close")
        self.admitted.pop(machine_id, None)
        self.world.slots.discard(machine_id)

    async def group(self, groups: Sequence[Group], *, whole: bool = False) -> None:
        if whole:
            self.groups.clear()
        for group in groups:
            self.groups[group.workspace, group.name] = group
        await self.world.pass_by("Network.group")

    async def provide(self, workspace: str, values: Mapping[str, str], authority: Mapping[str, str]) -> None:
        await self.world.pass_by("Network.provide")

    async def inquire(self, op: str, machine_id: str, **fields: Any) -> dict[str, Any]:
        await self.world.pass_by("Network.inquire")
        return {"entries": [], "next": fields.get("after", 0), "lost": 0, "rules": [], "verdict": {}}

    async def examine(self, machine_id: str) -> list[Probe | Skipped]:
        return [Probe("network.slot", machine_id in self.world.slots, "of a fake")]

    async def violations(self, told: str, wait: float) -> dict[str, Any]:
        """Those that were put here, until they are told; then it waits for ever."""
        if told == "1":
            await asyncio.Event().wait()
        return {"entries": self.violated, "next": "1"}

    async def adopt(
        self, machine_id: str, workspace: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]
    ) -> None:
        await self.world.pass_by("Network.adopt")
        if machine_id in self.world.slots:
            self.admitted[machine_id] = policy

    async def take_stock(self, living: Collection[str]) -> int:
        gone = self.world.slots - set(living)
        self.world.slots -= gone
        return len(gone)
