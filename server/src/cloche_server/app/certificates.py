"""Certificates of previews by ACME: asked for, kept, renewed, and told of when that fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from cloche_server.app.challenges import Challenges
from cloche_server.app.ports import Ports
from cloche_server.core.acme import Ledger, Life, Wanted, choose
from cloche_server.core.errors import ClocheError
from cloche_server.core.previews import PreviewBase, is_domain
from cloche_server.host.acme import Authority, Refused, life_of, make_account_key
from cloche_server.host.certificates import KeyPair
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.storage.certificates import CertificateFiles, Kept
from cloche_server.telemetry import log, metrics

_log = log.get("certificates")

#: How often it is looked what is due, if nothing happens meanwhile.
LOOK_SECONDS: Final = 60.0
STATES: Final = ("good", "overdue", "expired", "missing")


def names_of(base: PreviewBase, ports: Ports, *, own: bool, hook: bool) -> list[Wanted]:
    """Names that are to have a certificate. `own`: that of the base is in files of the operator.

    Never one of a sandbox: all certificates are published, and the id in such a name is a secret.
    """
    wanted = []
    if not own and is_domain(base.domain):
        wanted.append(Wanted(base.domain, dns=hook))
        if hook:
            wanted.append(Wanted(f"*.{base.domain}", dns=True))
    return [*wanted, *(Wanted(domain, workspace) for domain, workspace in ports.domains().items())]


async def _nobody(_name: str, _pair: KeyPair | None) -> None:
    """Until somebody is told of certificates."""


class Certificates:
    """`load`, then `run`. `wanted` says for which names there are to be certificates now."""

    def __init__(
        self,
        files: CertificateFiles,
        authority: Authority,
        challenges: Challenges,
        clock: Clock,
        wanted: Callable[[], list[Wanted]],
    ) -> None:
        self._files = files
        self._authority = authority
        self._challenges = challenges
        self._clock = clock
        self._wanted = wanted
        #: Told what is to be shown for a name, or that nothing is. Raises OSError or ValueError for what cannot be.
        self.on_change: Callable[[str, KeyPair | None], Awaitable[None]] = _nobody
        self._account = b""
        self._ledger = Ledger()
        self._held: dict[str, KeyPair] = {}
        self._lives: dict[str, Life] = {}
        self._shown: set[str] = set()
        self._expired: set[str] = set()
        self._running: dict[str, Wanted] = {}
        self._writing = asyncio.Lock()
        self._showing = asyncio.Lock()
        self._poke = asyncio.Event()

    def poke(self) -> None:
        """Something may be due."""
        self._poke.set()

    async def load(self) -> None:
        """What an earlier server has kept is shown at once. Raises `host.unsupported`."""
        await asyncio.to_thread(self._files.prepare)
        self._ledger = await asyncio.to_thread(self._files.ledger)
        account = await asyncio.to_thread(self._files.account)
        if account is None:
            account = await asyncio.to_thread(make_account_key)
            await asyncio.to_thread(self._files.keep_account, account)
            self._ledger.pause = None  # it was about the account before
        self._account = account
        for kept in await asyncio.to_thread(lambda: list(self._files.certificates())):
            try:
                self._hold(kept.name, kept.pair)
            except ValueError as error:
                _log.error("certificate.unusable", name=kept.name, error=str(error))
        await self._show({one.name for one in self._wanted()})

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._poke.clear()
                try:
                    await self._look(group)
                except Exception as error:  # noqa: BLE001 - the next look may well be better
                    _log.error("certificates.crashed", error=repr(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._poke.wait()

    # ---------------------------------------------------------------- looking

    async def _look(self, group: asyncio.TaskGroup) -> None:
        now, wanted = self._clock.now(), self._wanted()
        names = {one.name for one in wanted}
        await self._show(names)
        await self._remove_old(names, now)
        self._tell(names, now)
        for one in choose(wanted, self._lives, self._ledger, list(self._running.values()), now):
            self._ledger.begin(one, now)
            self._running[one.name] = one
            group.create_task(self._order(one), name="certificate")
        self._ledger.forget(names, now)

    async def _show(self, names: set[str]) -> None:
        """Exactly what is wanted and there."""
        async with self._showing:
            for name in self._shown - names:
                self._shown.discard(name)
                await self.on_change(name, None)
            for name in (names & self._held.keys()) - self._shown:
                try:
                    await self.on_change(name, self._held[name])
                except (OSError, ValueError) as error:
                    _log.error("certificate.unusable", name=name, error=str(error))
                    self._release(name)
                else:
                    self._shown.add(name)

    async def _remove_old(self, names: set[str], now: float) -> None:
        """Certificates that have ended, of names that nobody wants any more."""
        for name, life in list(self._lives.items()):
            if name not in names and life.ends < now:
                self._release(name)
                await asyncio.to_thread(self._files.remove, name)

    def _tell(self, names: set[str], now: float) -> None:
        states = Counter(self._state(name, now) for name in names)
        for state in STATES:
            metrics.certificates.labels(state).set(states[state])
        expired = {name for name in names if self._state(name, now) == "expired"}
        for name in expired - self._expired:
            _log.error("certificate.expired", name=name, last_error=self._why(name))
        self._expired = expired

    def _state(self, name: str, now: float) -> str:
        life = self._lives.get(name)
        if life is None:
            return "missing"
        if life.ends <= now:
            return "expired"
        return "overdue" if life.renew_at <= now and self._why(name) is not None else "good"

    def _why(self, name: str) -> str | None:
        trouble = self._ledger.troubles.get(name) or self._ledger.pause
        return None if trouble is None or not trouble.failures else trouble.sentence

    # ---------------------------------------------------------------- ordering

    async def _order(self, one: Wanted) -> None:
        """One certificate, or one failure that is told."""
        renewal = one.name in self._lives
        try:
            # Before the authority hears of it: a server that dies and comes back must not ask each time.
            await self._keep_ledger()
            pair = await self._authority.issue(self._account, one.name, dns=one.dns, present=self._challenges.present)
            await self._take(one.name, pair)
        except Refused as error:
            self._failed(one, error.sentence, of_name=error.of_name)
        except (ClocheError, OSError, ValueError) as error:
            self._failed(one, str(error), of_name=False)
        except Exception as error:  # noqa: BLE001 - one order must not take the others with it
            self._failed(one, f"the order crashed: {error!r}", of_name=False)
        else:
            self._ledger.succeeded(one.name)
            metrics.certificate_orders.labels("renewed" if renewal else "issued").inc()
            _log.info("certificate.issued", name=one.name, renewal=renewal, renew_at=self._lives[one.name].renew_at)
        finally:
            self._running.pop(one.name, None)
            self._poke.set()
        with contextlib.suppress(ClocheError):  # it is written again with the next order
            await self._keep_ledger()

    async def _take(self, name: str, pair: KeyPair) -> None:
        """From now on new connections get it. Raises OSError, ValueError when it is none; the old one then stays."""
        life_of(pair)
        async with self._showing:
            if name in {one.name for one in self._wanted()}:
                await self.on_change(name, pair)
                self._shown.add(name)
            self._hold(name, pair)
        try:
            await asyncio.to_thread(self._files.keep, Kept(name, pair))
        except ClocheError as error:
            # It is good until the server ends, and the next server orders another one if that is needed.
            _log.error("certificate.not_kept", name=name, error=error.message)

    def _failed(self, one: Wanted, sentence: str, *, of_name: bool) -> None:
        now, roll = self._clock.now(), random_bytes(1)[0] / 255
        if of_name:
            self._ledger.failed(one.name, sentence, now, roll)
        else:
            self._ledger.stopped(one.name, sentence, now, roll)
        metrics.certificate_orders.labels("failed" if of_name else "stopped").inc()
        life = self._lives.get(one.name)
        _log.error(
            "certificate.failed",
            name=one.name,
            why=sentence,
            again_at=self._ledger.free_at(one, now),
            old_ends_at=None if life is None else life.ends,
        )

    # ---------------------------------------------------------------- inside

    def _hold(self, name: str, pair: KeyPair) -> None:
        self._lives[name] = life_of(pair)
        self._held[name] = pair

    def _release(self, name: str) -> None:
        self._lives.pop(name, None)
        self._held.pop(name, None)

    async def _keep_ledger(self) -> None:
        async with self._writing:
            now = Ledger(list(self._ledger.orders), dict(self._ledger.troubles), self._ledger.pause)
            await asyncio.to_thread(self._files.keep_ledger, now)
