"""Forks: sandboxes that continue from the memory and disk of a running one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cloche_server.app.access import Access
from cloche_server.app.budget_verbs import BudgetVerbs, Inheritance, Sharing
from cloche_server.app.capturing import Capturer
from cloche_server.app.create import CreateRequest, Creator
from cloche_server.app.entry import Entry, name_taken
from cloche_server.app.lifecycle import LifecycleVerbs
from cloche_server.app.machines import Machines, Source
from cloche_server.app.steps import to_the_end
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import id_from_random
from cloche_server.core.lifecycle import Event
from cloche_server.core.ports import SavedState
from cloche_server.core.records import BootMode, ExecDefaults, Sandbox
from cloche_server.host import files
from cloche_server.host.clock import random_bytes
from cloche_server.telemetry import log

_log = log.get("fork")


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """`ttl_seconds` and `persistent` None: as the parent has them. `metadata` and `env` come on top of the parent's.
    `name` only for one child. `budget` None: shared, where there is one. `max_lifetime_seconds`: beside the parent's
    own end, which counts for the children as well."""

    count: int = 1
    ttl_seconds: int | None = None
    persistent: bool | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    budget: Sharing | None = None
    max_lifetime_seconds: int = 0


@dataclass(frozen=True, slots=True)
class Forked:
    """The children that came to life, and why the others did not, by their number. `pause_ms`: of the parent."""

    tree_id: str
    children: tuple[Sandbox, ...]
    errors: Mapping[int, ClocheError]
    pause_ms: float


@dataclass(frozen=True, slots=True)
class Promotion:
    tree_id: str
    deleted: tuple[str, ...]
    failures: Mapping[str, str]


class Forks:
    #: Told of children before anybody else is; set once.
    on_children: Callable[[Sandbox, Sequence[Sandbox]], Awaitable[None]] | None = None

    def __init__(
        self,
        access: Access,
        supervisor: Supervisor,
        capturer: Capturer,
        creator: Creator,
        machines: Machines,
        lifecycle: LifecycleVerbs,
        budgets: BudgetVerbs,
    ) -> None:
        self._access = access
        self._supervisor = supervisor
        self._capturer = capturer
        self._creator = creator
        self._machines = machines
        self._lifecycle = lifecycle
        self._budgets = budgets

    async def make(self, workspace: str, sandbox_id: str, request: ForkRequest) -> Forked:
        """Children of a running or paused sandbox, which stands still for a moment and goes on. Raises what a create
        raises when no child came to life; then nothing is left of any."""
        entry = await self._access.awake(workspace, sandbox_id)
        self._access.check_budget(entry)
        if request.name is not None and (other := self._access.named(workspace, request.name)) is not None:
            raise name_taken(request.name, other.record.id, fork=True)
        async with self._budgets.inherited(entry, request.budget, request.count) as division:
            forked = await self._make(entry, request, division.inheritance)
            division.made = len(forked.children)
        return forked

    async def _make(self, entry: Entry, request: ForkRequest, inherited: Inheritance) -> Forked:
        workspace, sandbox_id = entry.record.workspace, entry.record.id
        self._creator.check_room(entry.record.resources)
        tree = id_from_random(random_bytes(16))
        source, pause = await self._supervisor.perform(
            entry, lambda: self._source(entry, tree), undo=lambda made: self._let_go(made[0])
        )
        making: list[asyncio.Task[Sandbox]] = []
        try:
            try:
                wanted = self._child(entry.record, request, source, tree, inherited)
                making = [asyncio.ensure_future(self._creator.create(wanted)) for _ in range(request.count)]
                made = await asyncio.gather(*making, return_exceptions=True)
                for one in made:
                    if isinstance(one, BaseException) and not isinstance(one, ClocheError):
                        raise one
            finally:
                await to_the_end(self._let_go(source))
            children = [one for one in made if isinstance(one, Sandbox)]
            errors = {number: one for number, one in enumerate(made) if isinstance(one, ClocheError)}
            if children:
                if self.on_children is not None:
                    await self.on_children(entry.record, children)
                await self._tell(workspace, sandbox_id, Forked(tree, tuple(children), errors, pause))
        except BaseException:
            await to_the_end(self._unmake(workspace, making))
            raise
        if not children:
            raise next(iter(errors.values()))
        _log.info("sandbox.forked", parent=sandbox_id, children=[c.id for c in children], pause_ms=round(pause, 1))
        return Forked(tree, tuple(children), errors, pause)

    async def _tell(self, workspace: str, sandbox_id: str, made: Forked) -> None:
        told: dict[str, Any] = {"tree_id": made.tree_id, "children": [child.id for child in made.children]}
        told["pause_ms"] = round(made.pause_ms, 1)
        if made.errors:
            told["failed"] = len(made.errors)
        await self._supervisor.journal.tell("sandbox.forked", workspace, sandbox_id, told)

    async def _source(self, entry: Entry, tree: str) -> tuple[Source, float]:
        template = self._capturer.template(entry)
        captured, layer = await self._capturer.sealed(entry, event=Event.FORK)
        assert captured.pages is not None
        device_state = self._machines.root / f".fork-{tree}.dev"
        try:
            await asyncio.to_thread(device_state.write_bytes, captured.device_state)
            zeros = await self._capturer.zeros(entry.record)
        except BaseException:
            captured.pages.close()
            await asyncio.to_thread(files.remove_tree, device_state)
            await self._machines.release_layer(layer)
            raise
        record = entry.record
        state = SavedState(device_state, captured.pages, zeros)
        return Source(template, layer, record.resources.disk_mb, state, BootMode.FORK), captured.pause_ms

    async def _let_go(self, source: Source) -> None:
        assert source.state is not None
        source.state.pages.close()
        try:
            await asyncio.to_thread(files.remove_tree, source.state.device_state)
        finally:
            await self._machines.release_layer(source.layer)

    async def _unmake(self, workspace: str, making: list[asyncio.Task[Sandbox]]) -> None:
        """Nobody learns of these children, so they go."""
        await asyncio.gather(*making, return_exceptions=True)
        for task in making:
            if not task.cancelled() and task.exception() is None:
                with contextlib.suppress(ClocheError):
                    await self._lifecycle.delete(workspace, task.result().id)

    def _child(
        self, parent: Sandbox, request: ForkRequest, source: Source, tree: str, inherited: Inheritance
    ) -> CreateRequest:
        defaults = parent.defaults
        return CreateRequest(
            workspace=parent.workspace,
            template=parent.template,
            ttl_seconds=parent.ttl_seconds if request.ttl_seconds is None else request.ttl_seconds,
            persistent=parent.persistent if request.persistent is None else request.persistent,
            metadata={**parent.metadata, **request.metadata, "fork_parent_id": parent.id, "fork_tree_id": tree},
            defaults=ExecDefaults({**defaults.env, **request.env}, defaults.cwd, defaults.user),
            idle_seconds=parent.idle_seconds,
            idle_action=parent.idle_action,
            source=source,
            cold=parent.cold,
            parent_id=parent.id,
            fork_tree_id=tree,
            checkpoint_id=parent.checkpoint_id,
            name=request.name,
            max_lifetime_seconds=request.max_lifetime_seconds,
            ends_at=parent.ends_at,
            budget=inherited.budget,
            account_id=inherited.account_id,
            network=parent.network,
            grants=parent.grants,
            network_group=parent.network_group,
        )

    async def promote(self, workspace: str, sandbox_id: str, tree_id: str | None, cleanup: bool) -> Promotion:
        """Keeps one child of a fork; with `cleanup` its siblings are deleted. May be repeated."""
        entry = await self._access.find(workspace, sandbox_id)
        tree = tree_id or entry.record.fork_tree_id
        if tree is None:
            raise ClocheError(
                "request.invalid",
                f"the sandbox {sandbox_id} is no child of a fork, so there is nothing to promote it over",
                details={"field": "tree_id"},
            )
        deleted: list[str] = []
        failures: dict[str, str] = {}
        for sibling in self._access.list(workspace) if cleanup else []:
            if sibling.fork_tree_id != tree or sibling.id == sandbox_id:
                continue
            try:
                await self._lifecycle.delete(workspace, sibling.id)
                deleted.append(sibling.id)
            except ClocheError as error:
                if error.code == "sandbox.not_found":
                    continue
                failures[sibling.id] = error.message
        told = {"tree_id": tree, "deleted": deleted}
        await self._supervisor.journal.tell("sandbox.promoted", workspace, sandbox_id, told)
        return Promotion(tree, tuple(deleted), failures)
