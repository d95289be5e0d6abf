"""Webhooks: make, change, try out and remove receivers of events.

Each has a task of its own, so that none delays another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cloche_server.app.delivery import Delivery, Poster, message, refusal
from cloche_server.app.journal import Journal
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import Happening, Told, shown
from cloche_server.core.ids import id_from_random
from cloche_server.core.webhooks import MAX_PER_WORKSPACE, SECRET_BYTES, Webhook, check_url, secret_from_random
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.host.outbound import SendFailed
from cloche_server.store.webhooks import WebhookStore
from cloche_server.telemetry import log

_log = log.get("webhooks")

#: After a failure that nobody has foreseen, or of the database (seconds).
AGAIN_AFTER: Final = 30.0
#: Of what a receiver answers to a test (bytes).
SHOWN_BODY: Final = 4096


@dataclass(slots=True)
class _Live:
    delivery: Delivery
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a test. `status` 0 and `error`: there was no answer."""

    delivered: bool
    status: int
    body: str
    error: str | None
    seconds: float


class Webhooks:
    """`private`: receivers may be anywhere, also on this host."""

    def __init__(
        self,
        store: WebhookStore,
        journal: Journal,
        clock: Clock,
        group: asyncio.TaskGroup,
        make_sender: Callable[[], Poster],
        *,
        private: bool,
    ) -> None:
        self._store = store
        self._journal = journal
        self._clock = clock
        self._group = group
        self._make_sender = make_sender
        self._private = private
        self._live: dict[str, _Live] = {}
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        """Goes on with those that are stored, each where it was."""
        for hook in await self._store.all():
            self._begin(hook)

    async def close(self) -> None:
        """Stops sending; what was not sent is sent by the next server."""
        for live in self._live.values():
            await self._halt(live)

    def _begin(self, hook: Webhook) -> None:
        live = _Live(Delivery(hook, self._store, self._journal, self._make_sender(), self._clock))
        self._live[hook.id] = live
        if hook.enabled:
            live.task = self._group.create_task(self._guard(live.delivery), name=f"webhook {hook.id}")

    async def _guard(self, delivery: Delivery) -> None:
        while True:
            try:
                return await delivery.run()
            except Exception as error:  # noqa: BLE001 - one webhook must never take the server with it
                _log.error("webhook.crashed", webhook=delivery.hook.id, error=repr(error))
                await asyncio.sleep(AGAIN_AFTER)

    async def _halt(self, live: _Live) -> None:
        task, live.task = live.task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    # ---------------------------------------------------------------- what callers ask for

    async def create(
        self, workspace: str, url: str, types: Sequence[str], sandbox_id: str | None, description: str | None
    ) -> Webhook:
        """Sends what happens from now on. Raises `request.invalid`, `webhook.too_many`."""
        self._check(url)
        async with self._changing:
            if len(self.list(workspace)) >= MAX_PER_WORKSPACE:
                raise ClocheError(
                    "webhook.too_many",
                    f"the workspace has {MAX_PER_WORKSPACE} webhooks already, which is the limit",
                    details={"limit": MAX_PER_WORKSPACE},
                )
            _, newest = await self._journal.store.bounds()
            hook = Webhook(
                id=id_from_random(random_bytes(16)),
                workspace=workspace,
                url=url,
                secret=secret_from_random(random_bytes(SECRET_BYTES)),
                created_at=self._clock.now(),
                position=newest,
                types=tuple(dict.fromkeys(types)),
                sandbox_id=sandbox_id,
                description=description,
            )
            await self._store.insert(hook)
            self._begin(hook)
        _log.info("webhook.created", webhook=hook.id, workspace=workspace)
        return hook

    def list(self, workspace: str) -> list[Webhook]:
        """Oldest first."""
        found = [live.delivery.hook for live in self._live.values() if live.delivery.hook.workspace == workspace]
        return sorted(found, key=lambda hook: (hook.created_at, hook.id))

    def get(self, workspace: str, webhook_id: str) -> Webhook:
        """Raises `webhook.not_found`."""
        return self._find(workspace, webhook_id).delivery.hook

    async def lag(self, hook: Webhook) -> int:
        """How many events of its workspace come after what it is done with."""
        return await self._journal.store.count_after(hook.workspace, hook.position)

    async def change(self, workspace: str, webhook_id: str, changes: dict[str, Any]) -> Webhook:
        """`url`, `types`, `description`, `enabled`. An attempt that is under way is broken off, and made again as it is
        then. Raises `webhook.not_found`, `request.invalid`."""
        if "url" in changes:
            self._check(changes["url"])
        async with self._changing:
            live = self._find(workspace, webhook_id)
            await self._halt(live)
            try:
                changed = replace(live.delivery.hook, **changes)
                if changes.get("enabled"):
                    # The time in which nothing was tried is none in which it failed.
                    changed = replace(changed, disabled_reason=None, failures=0, failing_since=None)
                await self._store.update(changed)
            except BaseException:
                self._begin(live.delivery.hook)
                raise
            self._begin(changed)
        return changed

    async def delete(self, workspace: str, webhook_id: str) -> None:
        """Nothing is sent when this returns. Raises `webhook.not_found`."""
        async with self._changing:
            live = self._find(workspace, webhook_id)
            await self._halt(live)
            try:
                await self._store.delete(webhook_id)
            except BaseException:
                self._begin(live.delivery.hook)
                raise
            del self._live[webhook_id]

    async def test(self, workspace: str, webhook_id: str) -> Tried:
        """Sends a `webhook.test` now, beside whatever is being sent. Raises `webhook.not_found`."""
        hook = self.get(workspace, webhook_id)
        now = self._clock.now()
        event = shown(Told(0, Happening("webhook.test", workspace, "", now, {"webhook_id": hook.id})))
        headers, body = message(hook, f"{hook.id}-test-{id_from_random(random_bytes(16))}", event, now)
        sender = self._make_sender()
        began = time.monotonic()
        try:
            answer = await sender.post(hook.url, headers, body)
        except SendFailed as failed:
            return Tried(False, 0, "", str(failed), time.monotonic() - began)
        finally:
            with contextlib.suppress(Exception):
                await sender.aclose()
        error = refusal(answer)
        text = answer.body[:SHOWN_BODY].decode("utf-8", "replace")
        return Tried(error is None, answer.status, text, error, time.monotonic() - began)

    def _find(self, workspace: str, webhook_id: str) -> _Live:
        live = self._live.get(webhook_id)
        if live is None or live.delivery.hook.workspace != workspace:
            raise ClocheError("webhook.not_found", "there is no webhook with this id")
        return live

    def _check(self, url: str) -> None:
        try:
            check_url(url, private=self._private)
        except ValueError as error:
            raise ClocheError("request.invalid", str(error), details={"field": "url"}) from None
