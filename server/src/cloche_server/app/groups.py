"""Network groups: which sandboxes of a workspace see each other, told to whoever carries it as it changes.

Members are all that live, whatever state they are in: a name that was given stays known until its sandbox is deleted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

from cloche_server.app.entry import Entry
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.groups import Group, Member, choose_address
from cloche_server.core.lifecycle import LISTED, Event, Status
from cloche_server.core.ports import Network
from cloche_server.core.records import Sandbox
from cloche_server.telemetry import log

_log = log.get("groups")

#: Addresses of creates that are not recorded yet, of one group.
_KEPT: Final = 1024
_Key = tuple[str, str]


class Addresses:
    """Gives members their addresses."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._given: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    def choose(self, workspace: str, group: str | None, sandbox_id: str) -> str:
        """One that nobody in the group has, nor is being made with; empty without a group. Raises `request.invalid`
        when the group is full."""
        if group is None:
            return ""
        records = [entry.record for entry in self._supervisor.entries() if entry.record.status is not Status.DELETED]
        for record in records:
            self._given.pop((workspace, group, record.group_address), None)
        taken = {record.group_address for record in records if _key(record) == (workspace, group)}
        taken |= {address for space, name, address in self._given if (space, name) == (workspace, group)}
        address = choose_address(sandbox_id, taken)
        self._given[workspace, group, address] = sandbox_id
        while len(self._given) > _KEPT:
            self._given.popitem(last=False)
        return address


class Groups:
    def __init__(self, supervisor: Supervisor, network: Network) -> None:
        self._supervisor = supervisor
        self._network = network
        self._addresses = Addresses(supervisor)
        self._changed: set[_Key] = set()
        self._poke = asyncio.Event()
        self._telling = asyncio.Lock()
        supervisor.observers.append(self._moved)

    def place(self, workspace: str, group: str | None, sandbox_id: str) -> dict[str, Any]:
        """What the record of a sandbox says that is put into a group (None: into none). Raises `request.invalid`."""
        return {"network_group": group, "group_address": self._addresses.choose(workspace, group, sandbox_id)}

    async def change(self, entry: Entry, group: str | None) -> Sandbox:
        """Into another group, or out of every one; connections with the old one are cut when this returns."""
        before = _key(entry.record)

        async def move() -> Sandbox:
            record = entry.record
            if record.network_group != group:
                await self._supervisor.amend(entry, **self.place(record.workspace, group, record.id))
            return entry.record

        record = await self._supervisor.perform(entry, move)
        await self.tell({key for key in (before, _key(record)) if key is not None})
        return record

    def _moved(self, entry: Entry, _event: Event, _before: Status) -> None:
        self.touch(entry.record)

    def touch(self, record: Sandbox) -> None:
        """Something about a member has changed, which is told soon."""
        key = _key(record)
        if key is not None:
            self._changed.add(key)
            self._poke.set()

    async def joined(self, record: Sandbox) -> None:
        """Returns when the others know of a member that has been made."""
        key = _key(record)
        if key is not None:
            await self.tell({key})

    async def tell(self, keys: Iterable[_Key]) -> None:
        # One at a time, so that what is told last is what is so last.
        async with self._telling:
            wanted = set(keys)
            self._changed -= wanted
            if not wanted:
                return
            try:
                await self._network.group([self._group(key) for key in sorted(wanted)])
            except ClocheError as error:  # told with all others as soon as anything is carried again
                _log.warning("group.not_told", error=error.message)

    async def tell_all(self) -> None:
        """At a start: these are the groups, and there are no others."""
        keys = {key for entry in self._supervisor.entries() if (key := _key(entry.record)) is not None}
        async with self._telling:
            try:
                await self._network.group([self._group(key) for key in sorted(keys)], whole=True)
            except ClocheError as error:
                _log.warning("group.not_told", error=error.message)

    def _group(self, key: _Key) -> Group:
        members = [one.record for one in self._supervisor.entries() if _key(one.record) == key]
        members.sort(key=lambda record: (record.created_at, record.id))
        return Group(*key, tuple(_member(record) for record in members if record.status in LISTED))

    async def run(self) -> None:
        """Tells what changes; cancel to stop."""
        while True:
            await self._poke.wait()
            self._poke.clear()
            await self.tell(self._changed)


def _key(record: Sandbox) -> _Key | None:
    return None if record.network_group is None else (record.workspace, record.network_group)


def _member(record: Sandbox) -> Member:
    return Member(record.id, record.name or "", record.group_address, record.status.value)
