"""One webhook: sends it what the journal holds for it, one event after the other, for as long as it takes.

Nothing is queued: the position in the journal is the queue, and it is stored. It moves on when the receiver has
accepted an event, so a server that ends between the two sends that event again, under the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol

from cloche_server.app.journal import PAGE, Journal
from cloche_server.core.errors import ClocheError
from cloche_server.core.happenings import Told, matches, shown
from cloche_server.core.webhooks import GIVE_UP_AFTER, Webhook, delay, signed_headers
from cloche_server.host.clock import Clock
from cloche_server.host.outbound import Answer, SendFailed
from cloche_server.store.webhooks import WebhookStore
from cloche_server.telemetry import log, metrics

_log = log.get("webhooks")

#: A position that only went past events of others is stored that often (seconds), and after so many events.
STORE_EVERY: Final = 60.0
STORE_AFTER: Final = 500
GONE: Final = 410


class Poster(Protocol):
    """What sends; `host.outbound.Sender`."""

    async def post(self, url: str, headers: dict[str, str], body: bytes) -> Answer: ...
    async def aclose(self) -> None: ...


def message(hook: Webhook, message_id: str, event: dict[str, Any], now: float) -> tuple[dict[str, str], bytes]:
    """Headers and body of what is sent."""
    body = json.dumps(event, separators=(",", ":")).encode("ascii")
    headers = signed_headers(hook.secret, message_id, int(now), body)
    return {"content-type": "application/json", "user-agent": "cloche-webhooks", **headers}, body


def refusal(answer: Answer) -> str | None:
    """Why an answer is no success, in one sentence."""
    if 200 <= answer.status < 300:
        return None
    if 300 <= answer.status < 400:
        return f"the receiver answered {answer.status}; redirects are not followed"
    return f"the receiver answered {answer.status}"


class Delivery:
    """`hook` is always as far as it has come. Cancel `run` to stop."""

    def __init__(self, hook: Webhook, store: WebhookStore, journal: Journal, sender: Poster, clock: Clock) -> None:
        self.hook = hook
        self._stored = hook.position
        self._store = store
        self._journal = journal
        self._sender = sender
        self._clock = clock
        self._random: Callable[[], float] = random.random

    async def run(self) -> None:
        """Until it is disabled."""
        try:
            while self.hook.enabled:
                await self._round()
        finally:
            await self._sender.aclose()

    async def _round(self) -> None:
        """A page of the journal, and the wait for more after the last one."""
        grown = self._journal.grown
        hook = self.hook
        page = await self._journal.store.after(hook.workspace, hook.sandbox_id, hook.position, PAGE)
        if page.first > hook.position + 1:
            missed = page.first - 1 - hook.position
            _log.warning("webhook.missed", webhook=hook.id, count=missed)
            await self._save(position=page.first - 1, missed=hook.missed + missed)
        for told in page.events:
            if matches(hook.types, told.what.type):
                await self._deliver(told)
                if not self.hook.enabled:
                    return
            else:
                await self._pass(told.seq)
        if page.more:
            return
        await self._pass(page.last)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STORE_EVERY):
                await grown.wait()
            return
        if self.hook.position != self._stored:
            await self._save()

    async def _pass(self, seq: int) -> None:
        """This one is not for us."""
        if seq > self.hook.position:
            self.hook = replace(self.hook, position=seq)
            if seq - self._stored >= STORE_AFTER:
                await self._save()

    async def _deliver(self, told: Told) -> None:
        """Returns when the event is done with: accepted, given up, or the receiver is gone for good."""
        while True:
            outcome = await self._attempt(told)
            metrics.webhook_deliveries.labels(outcome).inc()
            if outcome != "failed":
                return
            await asyncio.sleep(delay(self.hook.failures, self._random()))

    async def _attempt(self, told: Told) -> str:
        hook = self.hook
        headers, body = message(hook, f"{hook.id}-{told.seq}", shown(told), self._clock.now())
        status = 0
        try:
            answer = await self._sender.post(hook.url, headers, body)
            status, error = answer.status, refusal(answer)
        except SendFailed as failed:
            error = str(failed)
        now = self._clock.now()
        if error is None:
            await self._save(
                position=told.seq, delivered=hook.delivered + 1, failures=0, failing_since=None, last_error=None,
                last_attempt_at=now, last_success_at=now,
            )  # fmt: skip
            return "delivered"
        since = hook.failing_since if hook.failing_since is not None else now
        failed_now: dict[str, Any] = {"failures": hook.failures + 1, "last_error": error, "last_attempt_at": now}
        if status == GONE:
            why = "the receiver answered 410: it does not want any more"
            await self._save(**failed_now, failing_since=since, enabled=False, disabled_reason=why)
            return "disabled"
        if now - since >= GIVE_UP_AFTER:
            _log.warning("webhook.given_up", webhook=hook.id, event_id=told.seq, error=error)
            await self._save(**failed_now, failing_since=None, position=told.seq, given_up=hook.given_up + 1)
            return "given_up"
        await self._save(**failed_now, failing_since=since)
        return "failed"

    async def _save(self, **changes: Any) -> None:
        """What cannot be stored now is true all the same, and is stored with what comes next."""
        self.hook = replace(self.hook, **changes)
        try:
            await self._store.update(self.hook)
            self._stored = self.hook.position
        except ClocheError as error:
            _log.error("webhook.not_recorded", webhook=self.hook.id, error=error.message)
