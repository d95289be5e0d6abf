"""The network of a sandbox: its policy, what was decided by it, and why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry
from cloche_server.app.groups import Groups
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import Status, verbs
from cloche_server.core.network import NetworkMode, NetworkPolicy, SecretGrant
from cloche_server.core.ports import Network, Trust
from cloche_server.core.records import Sandbox
from cloche_server.guest.types import RenewRequest

#: A follower asks netd anew after so long without news (seconds).
WAIT: Final = 10.0
PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class Page:
    """Entries of the decision log as netd writes them. `next`: what to ask for after them; `lost`: how many entries
    before them are not kept any more."""

    entries: tuple[Mapping[str, Any], ...]
    next: int
    lost: int


class NetworkVerbs:
    """Each method finds the sandbox of the workspace. All raise `sandbox.not_found`."""

    def __init__(self, access: Access, supervisor: Supervisor, network: Network, trust: Trust, groups: Groups) -> None:
        self._groups = groups
        self._trusts = trust
        self._access = access
        self._supervisor = supervisor
        self._network = network

    async def get(self, workspace: str, sandbox_id: str) -> Sandbox:
        return (await self._access.find(workspace, sandbox_id)).record

    async def put(self, workspace: str, sandbox_id: str, policy: NetworkPolicy) -> tuple[Sandbox, int]:
        """Another policy, in force when this returns; the connections that it does not allow are cut: so many. Raises
        `network.off`, `network.unavailable`: then it is in force as soon as anything is carried again."""
        return await self._change(workspace, sandbox_id, policy, None)

    async def grant(self, workspace: str, sandbox_id: str, grants: tuple[SecretGrant, ...]) -> tuple[Sandbox, int]:
        """As `put`, with other grants of secrets."""
        return await self._change(workspace, sandbox_id, None, grants)

    async def regroup(self, workspace: str, sandbox_id: str, group: str | None) -> Sandbox:
        """Into another network group, or out of every one (None). Raises `network.off`, `request.invalid` when the
        group is full."""
        if group is not None:
            self.check_on()
        return await self._groups.change(await self._access.find(workspace, sandbox_id), group)

    async def _change(
        self,
        workspace: str,
        sandbox_id: str,
        policy: NetworkPolicy | None,
        grants: tuple[SecretGrant, ...] | None,
    ) -> tuple[Sandbox, int]:
        if policy is not None and policy.mode is not NetworkMode.NONE:
            self.check_on()
        entry = await self._access.find(workspace, sandbox_id)
        cut: list[int] = []

        async def change() -> Sandbox:
            wanted = entry.record.network if policy is None else policy
            given = entry.record.grants if grants is None else grants
            # What is recorded comes first: a server that ends now begins again with the new policy.
            await self._supervisor.amend(entry, network=wanted, grants=given)
            await self._trust(entry)
            cut.append(await self._network.change(entry.record.id, wanted, given) if entry.machine is not None else 0)
            return entry.record

        return await self._supervisor.perform(entry, change), cut[0]

    async def _trust(self, entry: Entry) -> None:
        """What is to be read now must be trusted first."""
        if entry.machine is None or entry.guest is None or not entry.record.is_read:
            return
        ca_pem = await self._trusts.ready(entry.record)
        if ca_pem is not None and entry.record.status is Status.RUNNING:
            await entry.guest.renew(RenewRequest(ca_pem=ca_pem), timeout=30)

    def check_on(self) -> None:
        """Raises `network.off`."""
        if not self._network.enabled:
            raise ClocheError("network.off", "this server gives its sandboxes no network; only mode none is possible")

    async def log(self, workspace: str, sandbox_id: str, after: int, limit: int) -> Page:
        """What was decided since its machine was started. Raises `sandbox.invalid_state` when it has none."""
        entry = self._plugged(await self._access.find(workspace, sandbox_id))
        return await self._page(entry.record.id, after, limit, wait=0.0)

    async def follow(self, workspace: str, sandbox_id: str, after: int) -> AsyncIterator[Page]:
        """Pages as they come, until the machine ends."""
        entry = self._plugged(await self._access.find(workspace, sandbox_id))
        machine, place = entry.machine, after
        while entry.machine is machine:
            page = await self._page(entry.record.id, place, PAGE, wait=WAIT)
            place = page.next
            if page.entries or page.lost:
                yield page
            else:
                await asyncio.sleep(0)

    async def _page(self, sandbox_id: str, after: int, limit: int, wait: float) -> Page:
        answer = await self._network.inquire("log", sandbox_id, after=after, limit=limit, wait=wait)
        return Page(tuple(answer["entries"]), int(answer["next"]), int(answer["lost"]))

    async def explain(self, workspace: str, sandbox_id: str, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the policy says of a destination now. Raises `sandbox.invalid_state`, `network.unavailable`."""
        entry = self._plugged(await self._access.find(workspace, sandbox_id))
        verdict: Mapping[str, Any] = (await self._network.inquire("explain", entry.record.id, **question))["verdict"]
        return verdict

    async def proposal(self, workspace: str, sandbox_id: str) -> list[Mapping[str, Any]]:
        """The rules of the smallest policy that allows what was asked for while `learn` was on."""
        entry = self._plugged(await self._access.find(workspace, sandbox_id))
        rules: list[Mapping[str, Any]] = (await self._network.inquire("learned", entry.record.id))["rules"]
        return rules

    def _plugged(self, entry: Entry) -> Entry:
        self.check_on()
        if entry.machine is None:
            status = entry.record.status
            raise ClocheError(
                "sandbox.invalid_state",
                f"sandbox {entry.record.id} is {status.value}; its network can be asked about while it has a machine",
                details={"status": status.value, "allowed": verbs(status)},
            )
        return entry
