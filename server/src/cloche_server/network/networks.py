"""The network of machines as the use cases see it: slots, and netd which carries what arrives in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cloche_server.core.errors import ClocheError
from cloche_server.core.groups import Group, group_to_json
from cloche_server.core.netctl import grant_to_json, policy_to_json
from cloche_server.core.network import NetworkPolicy, SecretGrant
from cloche_server.core.probes import Probe, Skipped
from cloche_server.network.probes import probe_slot
from cloche_server.network.slots import Doors, Handed, Slots
from cloche_server.telemetry import log

_log = log.get("network")

#: netd answers at once when it wants something, and after so long when it does not (seconds).
WANTED_WAIT = 30.0
#: After netd could not be asked (seconds).
AGAIN_AFTER = 0.2


class Carrier(Protocol):
    """Asks netd for something. Raises `network.unavailable`, or what netd answers. `attached`: the machines that a netd
    of an earlier server has still."""

    @property
    def attached(self) -> Collection[str]: ...
    async def ask(self, op: str, fields: Mapping[str, Any], sockets: Handed | None = None) -> dict[str, Any]: ...


@dataclass(slots=True)
class TapCard:
    """An open tap device."""

    fd: int

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a machine is allowed, for as long as it has a slot."""

    workspace: str
    policy: NetworkPolicy
    grants: tuple[SecretGrant, ...]

    def fields(self, machine_id: str) -> dict[str, Any]:
        return {
            "sandbox": machine_id,
            "workspace": self.workspace,
            "policy": policy_to_json(self.policy),
            "grants": [grant_to_json(grant) for grant in self.grants],
        }


class NoNetwork:
    """Of a host that gives its sandboxes none; some may have one still, of an earlier server."""

    enabled = False

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    async def open(self, machine_id: str) -> None:
        return None

    async def admit(
        self, machine_id: str, workspace: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]
    ) -> None:
        return None

    async def change(self, machine_id: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]) -> int:
        return 0

    async def close(self, machine_id: str) -> None:
        await self._slots.close(machine_id)

    async def adopt(
        self, machine_id: str, workspace: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]
    ) -> None:
        return None

    async def group(self, groups: Sequence[Group], *, whole: bool = False) -> None:
        return None

    async def provide(self, workspace: str, values: Mapping[str, str], authority: Mapping[str, str]) -> None:
        return None

    async def inquire(self, op: str, machine_id: str, **fields: Any) -> dict[str, Any]:
        raise ClocheError("network.off", "this server gives its sandboxes no network")

    async def examine(self, machine_id: str) -> list[Probe | Skipped]:
        if await asyncio.to_thread(self._slots.has, machine_id):  # of a server that gave it one
            return [await asyncio.to_thread(probe_slot, self._slots.path(machine_id))]
        return [Skipped("network.slot", "this server gives its sandboxes no network; the card leads nowhere")]

    async def violations(self, told: str, wait: float) -> dict[str, Any]:
        raise ClocheError("network.off", "this server gives its sandboxes no network")

    async def take_stock(self, living: Collection[str]) -> int:
        return await self._slots.take_stock(living)


class Networks:
    """Slots, and the carrier of their traffic; without a carrier nothing is carried (for bakes)."""

    enabled = True

    def __init__(self, slots: Slots, carrier: Carrier | None = None) -> None:
        self.slots = slots
        self._carrier = carrier
        self._admitted: dict[str, Admitted] = {}
        #: Of each workspace whose HTTPS is read.
        self._material: dict[str, dict[str, Any]] = {}
        self._groups: dict[tuple[str, str], Group] = {}

    async def open(self, machine_id: str) -> TapCard:
        await self._detach(machine_id)
        try:
            return TapCard(await self.slots.open(machine_id))
        except OSError as error:
            raise ClocheError(
                "network.unavailable", f"the network of the sandbox could not be made ({error.strerror})", retry_after=2
            ) from error

    async def admit(
        self, machine_id: str, workspace: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]
    ) -> None:
        admitted = Admitted(workspace, policy, tuple(grants))
        self._admitted[machine_id] = admitted
        try:
            await self._attach(machine_id, admitted)
        except BaseException:
            self._admitted.pop(machine_id, None)
            raise

    async def _attach(self, machine_id: str, admitted: Admitted) -> None:
        if self._carrier is None:
            return
        try:
            sockets = await self.slots.sockets(machine_id)
        except OSError as error:
            raise ClocheError(
                "network.unavailable", f"the network of the sandbox is not there ({error.strerror})", retry_after=2
            ) from error
        try:
            await self._carrier.ask("attach", admitted.fields(machine_id), sockets)
        finally:
            sockets.close()

    async def change(self, machine_id: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]) -> int:
        before = self._admitted.get(machine_id)
        if before is None or self._carrier is None:
            return 0
        # Before netd is told: one that is started in the meantime must begin with the new policy.
        self._admitted[machine_id] = changed = Admitted(before.workspace, policy, tuple(grants))
        answer = await self._carrier.ask("policy", changed.fields(machine_id))
        return int(answer.get("cut", 0))

    async def group(self, groups: Sequence[Group], *, whole: bool = False) -> None:
        if whole:
            self._groups.clear()
        for group in groups:
            self._groups.pop((group.workspace, group.name), None)
            if group.members:
                self._groups[group.workspace, group.name] = group
        if self._carrier is not None:
            await self._carrier.ask("groups", {"groups": [group_to_json(one) for one in groups], "whole": whole})

    async def provide(self, workspace: str, values: Mapping[str, str], authority: Mapping[str, str]) -> None:
        # Kept for a netd that is started anew: it has to know them before it reads anything.
        self._material[workspace] = {"workspace": workspace, "values": dict(values), "ca": dict(authority)}
        if self._carrier is not None:
            await self._carrier.ask("secrets", self._material[workspace])

    async def inquire(self, op: str, machine_id: str, **fields: Any) -> dict[str, Any]:
        if self._carrier is None:
            raise ClocheError("network.off", "nothing is carried here")
        return await self._carrier.ask(op, {"sandbox": machine_id, **fields})

    async def examine(self, machine_id: str) -> list[Probe | Skipped]:
        return [await asyncio.to_thread(probe_slot, self.slots.path(machine_id))]

    async def violations(self, told: str, wait: float) -> dict[str, Any]:
        if self._carrier is None:
            raise ClocheError("network.off", "nothing is carried here")
        return await self._carrier.ask("violations", {"told": told, "wait": wait})

    async def close(self, machine_id: str) -> None:
        await self._detach(machine_id)
        await self.slots.close(machine_id)

    async def _detach(self, machine_id: str) -> None:
        if self._admitted.pop(machine_id, None) is not None and self._carrier is not None:
            # A carrier that is gone carries nothing, and one that comes is told only of those that are here.
            with contextlib.suppress(ClocheError):
                await self._carrier.ask("detach", {"sandbox": machine_id})

    async def adopt(
        self, machine_id: str, workspace: str, policy: NetworkPolicy, grants: Sequence[SecretGrant]
    ) -> None:
        if not self.slots.has(machine_id):
            return
        admitted = Admitted(workspace, policy, tuple(grants))
        self._admitted[machine_id] = admitted
        if self._carrier is not None and machine_id in self._carrier.attached:
            await self._carrier.ask("policy", admitted.fields(machine_id))
        else:
            await self._attach(machine_id, admitted)

    async def take_stock(self, living: Collection[str]) -> int:
        if self._carrier is not None:
            # Of machines that ended while no server ran: their sockets would hold their slots.
            for machine_id in set(self._carrier.attached) - set(living):
                with contextlib.suppress(ClocheError):
                    await self._carrier.ask("detach", {"sandbox": machine_id})
        return await self.slots.take_stock(living)

    async def run_doors(self) -> None:
        """Makes the sockets by which members of groups reach each other, whenever netd wants some; cancel to stop."""
        while self._carrier is not None:
            try:
                answer = await self._carrier.ask("wanted", {"wait": WANTED_WAIT})
                for machine_id, count in dict(answer.get("wanted", {})).items():
                    await self._supply(self._carrier, str(machine_id), int(count))
            except (ClocheError, ValueError, TypeError):  # netd is being started
                await asyncio.sleep(AGAIN_AFTER)

    async def _supply(self, carrier: Carrier, machine_id: str, count: int) -> None:
        doors: Doors | None = None
        try:
            if machine_id in self._admitted:
                doors = await self.slots.doors(machine_id, count)
        except OSError as error:  # the slot has gone meanwhile, which netd is told by sending none
            _log.info("group.no_way_in", sandbox=machine_id, error=str(error))
        try:
            await carrier.ask("supply", {"sandbox": machine_id}, doors)
        finally:
            if doors is not None:
                doors.close()

    async def again(self) -> None:
        """Gives a new netd everything that the old one had."""
        if self._carrier is not None:
            if self._groups:
                with contextlib.suppress(ClocheError):  # it has gone again, and the next one is told
                    await self.group(list(self._groups.values()), whole=True)
            for workspace, material in list(self._material.items()):
                try:
                    await self._carrier.ask("secrets", material)
                except ClocheError as error:  # its requests are refused until it is told again; the others go on
                    _log.error("secrets.not_handed_over", workspace=workspace, code=error.code)
        for machine_id, admitted in list(self._admitted.items()):
            try:
                await self._attach(machine_id, admitted)
            except ClocheError as error:
                _log.error("network.not_attached", sandbox=machine_id, error=error.message)
