"""Ports of sandboxes: what listens, what was said about them, under which addresses they are reached, and tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry
from cloche_server.core.errors import ClocheError
from cloche_server.core.lifecycle import SERVING
from cloche_server.core.previews import (
    MAX_PATH,
    MAX_PATHS,
    MAX_TOKEN_SECONDS,
    RESERVED_PORTS,
    TOKEN_SECONDS,
    HostRule,
    PortAccess,
    PortRule,
    PreviewBase,
    PreviewToken,
    hash_password,
    is_domain,
    is_port,
    mint,
    read_token,
)
from cloche_server.core.records import Sandbox
from cloche_server.host.clock import Clock, random_bytes
from cloche_server.store.db import Conflict
from cloche_server.store.ports import PortStore
from cloche_server.telemetry import log

_log = log.get("ports")

MAX_PORTS: Final = 100
#: A guest is asked what listens; one that does not answer in so many seconds is shown without.
LOOK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class PortWish:
    """What a caller says about a port. `access` None: as the server does it."""

    port: int
    label: str | None = None
    domain: str | None = None
    access: PortAccess | None = None
    username: str | None = None
    password: str | None = None
    host: HostRule = HostRule.PUBLIC


@dataclass(frozen=True, slots=True)
class PortView:
    """A port as it is listed. `url` is where it is reached from outside."""

    rule: PortRule
    declared: bool
    listening: bool
    url: str
    addresses: tuple[str, ...] = ()
    pid: int | None = None
    process: str | None = None


class Ports:
    """`key` signs tokens; `base` None: this server has no gateway, and only the API leads to ports."""

    #: Told of a port whose rule has changed: who came in by the old one has to go. Set once.
    on_change: Callable[[str, int], None] | None = None
    #: Told when a domain has come or gone. Set once.
    on_domains: Callable[[], None] | None = None

    def __init__(
        self, access: Access, store: PortStore, clock: Clock, key: bytes, usual: PortAccess, base: PreviewBase | None
    ) -> None:
        self._access = access
        self._store = store
        self._clock = clock
        self._key = key
        self._usual = usual
        self.base = base
        self._rules: dict[tuple[str, int], PortRule] = {}
        self._domains: dict[str, PortRule] = {}

    async def load(self) -> None:
        """What an earlier server has recorded."""
        await self._store.prune()
        for rule in await self._store.all():
            self._keep(rule)

    # ---------------------------------------------------------------- asked by the gateway

    def rule(self, sandbox_id: str, port: int) -> PortRule | None:
        return self._rules.get((sandbox_id, port))

    def rule_of(self, record: Sandbox, port: int) -> PortRule:
        """What was said about the port, or else what is usual."""
        return self._rules.get((record.id, port)) or PortRule(record.id, record.workspace, port, self._usual)

    def at_domain(self, domain: str) -> PortRule | None:
        return self._domains.get(domain)

    def domains(self) -> dict[str, str]:
        """All that lead to a port, with the workspace of each."""
        return {domain: rule.workspace for domain, rule in self._domains.items()}

    def read(self, token: str) -> PreviewToken | None:
        """None when it is not ours, or has expired."""
        return read_token(self._key, token, self._clock.now())

    # ---------------------------------------------------------------- verbs

    async def list(self, workspace: str, sandbox_id: str) -> list[PortView]:
        """By port. Nothing wakes; of a sandbox that sleeps only what was said is known."""
        entry = await self._access.find(workspace, sandbox_id)
        found = await self._listening(entry)
        said = {port for owner, port in self._rules if owner == sandbox_id}
        return [self._view(entry.record, port, found) for port in sorted((said | found.keys()) - RESERVED_PORTS)]

    async def get(self, workspace: str, sandbox_id: str, port: int) -> PortView:
        """Of any port, also when nothing listens there. Nothing wakes."""
        _check_port(port)
        entry = await self._access.find(workspace, sandbox_id)
        return self._view(entry.record, port, await self._listening(entry))

    async def declare(self, workspace: str, sandbox_id: str, wish: PortWish) -> PortView:
        """Says something about a port, in place of what was said before. Who may not come in any more is cut off.

        Raises `request.invalid`, `port.domain_taken`.
        """
        _check_port(wish.port)
        entry = await self._access.find(workspace, sandbox_id)
        rule = await self._wanted(entry.record, wish)
        old = self.rule_of(entry.record, wish.port)
        mine = [port for owner, port in self._rules if owner == sandbox_id]
        if wish.port not in mine and len(mine) >= MAX_PORTS:
            raise _invalid(f"{MAX_PORTS} ports of the sandbox have been named, which is the limit", "port")
        await self._free_domain(rule)
        try:
            await self._store.put(rule)
        except Conflict:
            raise _taken(rule.domain) from None
        self._drop(old)
        self._keep(rule)
        if not rule.admits_like(old):
            self._changed(rule)
        return self._view(entry.record, wish.port, await self._listening(entry))

    async def remove(self, workspace: str, sandbox_id: str, port: int) -> None:
        """The port is as usual again, and who came in meanwhile is cut off. Raises `port.not_found`."""
        await self._access.find(workspace, sandbox_id)
        rule = self._rules.get((sandbox_id, port))
        if rule is None:
            raise ClocheError("port.not_found", f"nothing was said about port {port} of the sandbox {sandbox_id}")
        await self._store.delete(sandbox_id, port)
        self._drop(rule)
        self._changed(rule)

    async def token(
        self, workspace: str, sandbox_id: str, port: int, seconds: int | None, paths: Sequence[str]
    ) -> tuple[str, PreviewToken]:
        """A token for a port, and what it is good for. Raises `request.invalid`."""
        _check_port(port)
        wanted = TOKEN_SECONDS if seconds is None else seconds
        if not 1 <= wanted <= MAX_TOKEN_SECONDS:
            raise _invalid(f"ttl_seconds must be from 1 to {MAX_TOKEN_SECONDS}", "ttl_seconds")
        if len(paths) > MAX_PATHS or any(not _is_prefix(path) for path in paths):
            raise _invalid(
                f"paths are at most {MAX_PATHS}, each begins with / and holds at most {MAX_PATH} characters", "paths"
            )
        entry = await self._access.find(workspace, sandbox_id)
        ends = int(self._clock.now()) + wanted
        made = PreviewToken(sandbox_id, port, ends, entry.record.workspace, tuple(paths))
        return mint(self._key, made), made

    async def inherit(self, parent: Sandbox, children: Sequence[Sandbox]) -> None:
        """Children of a fork are as closed as their parent: they have its rules, but not its domains."""
        rules = [rule for (owner, _), rule in self._rules.items() if owner == parent.id]
        copies = [replace(rule, sandbox_id=child.id, domain=None) for child in children for rule in rules]
        if copies:
            await self._store.put(*copies)
            for copy in copies:
                self._keep(copy)

    async def prune(self) -> None:
        """Forgets what belongs to sandboxes that have ended."""
        await self._store.prune()
        left = {(rule.sandbox_id, rule.port) for rule in await self._store.all()}
        for key, rule in list(self._rules.items()):
            if key not in left:
                self._drop(rule)

    def url(self, rule: PortRule) -> str:
        """Where a client reaches the port."""
        if self.base is None:
            return f"/v1/sandboxes/{rule.sandbox_id}/proxy/{rule.port}/"
        if rule.domain is not None:
            return self.base.domain_url(rule.domain)
        return self.base.host_url(rule.sandbox_id, rule.port)

    def token_url(self, token: str) -> str:
        return f"/v1/p/{token}/" if self.base is None else self.base.token_url(token)

    # ---------------------------------------------------------------- inside

    async def _listening(self, entry: Entry) -> dict[int, PortView]:
        if entry.record.status not in SERVING or entry.guest is None:
            return {}
        with contextlib.suppress(ClocheError):
            found = await entry.guest.ports(timeout=LOOK_SECONDS)
            views: dict[int, PortView] = {}
            for one in found:
                if one.port in RESERVED_PORTS or not is_port(one.port):
                    continue
                rule = self.rule_of(entry.record, one.port)
                before = views.get(one.port)
                addresses = (*(before.addresses if before else ()), one.address)
                views[one.port] = PortView(
                    rule, False, True, self.url(rule), addresses, one.pid or None, one.process or None
                )
            return views
        return {}

    def _view(self, record: Sandbox, port: int, listening: dict[int, PortView]) -> PortView:
        declared = (record.id, port) in self._rules
        if port in listening:
            return replace(listening[port], declared=declared)
        rule = self.rule_of(record, port)
        return PortView(rule, declared, False, self.url(rule))

    async def _wanted(self, record: Sandbox, wish: PortWish) -> PortRule:
        access = wish.access or self._usual
        if (access is PortAccess.BASIC) != (wish.username is not None and wish.password is not None):
            raise _invalid("username and password go with the access basic, both of them", "access")
        if wish.username is not None and ":" in wish.username:
            raise _invalid("a username holds no colon", "username")
        domain = wish.domain.lower().removesuffix(".") if wish.domain is not None else None
        if domain is not None and (self.base is None or not is_domain(domain) or self._is_ours(domain)):
            raise _invalid(
                "domain must be a whole name of your own, and this server must have its previews switched on", "domain"
            )
        password = None
        if wish.password is not None:
            password = await asyncio.to_thread(hash_password, wish.password, random_bytes(16))
        return PortRule(
            record.id, record.workspace, wish.port, access, wish.label, domain, wish.username, password, wish.host,
            self._clock.now(),
        )  # fmt: skip

    def _is_ours(self, domain: str) -> bool:
        assert self.base is not None
        return domain == self.base.domain or domain.endswith("." + self.base.domain)

    async def _free_domain(self, rule: PortRule) -> None:
        """A domain goes on to its next port once the sandbox that had it has ended."""
        if rule.domain is None:
            return
        await self.prune()
        holder = self._domains.get(rule.domain)
        if holder is not None and (holder.sandbox_id, holder.port) != (rule.sandbox_id, rule.port):
            raise _taken(rule.domain)

    def _keep(self, rule: PortRule) -> None:
        self._rules[rule.sandbox_id, rule.port] = rule
        if rule.domain is not None:
            self._domains[rule.domain] = rule
            self._domains_changed()

    def _drop(self, rule: PortRule) -> None:
        self._rules.pop((rule.sandbox_id, rule.port), None)
        if rule.domain is not None:
            self._domains.pop(rule.domain, None)
            self._domains_changed()

    def _domains_changed(self) -> None:
        if self.on_domains is not None:
            self.on_domains()

    def _changed(self, rule: PortRule) -> None:
        _log.info("port.changed", sandbox=rule.sandbox_id, port=rule.port)
        if self.on_change is not None:
            self.on_change(rule.sandbox_id, rule.port)


def _check_port(port: int) -> None:
    if not is_port(port) or port in RESERVED_PORTS:
        raise _invalid("port must be from 1 to 65535, and 22 and 1011 are reserved", "port")


def _is_prefix(path: str) -> bool:
    return path.startswith("/") and len(path) <= MAX_PATH and path.isprintable() and "%" not in path


def _invalid(sentence: str, field: str) -> ClocheError:
    return ClocheError("request.invalid", sentence, details={"field": field})


def _taken(domain: str | None) -> ClocheError:
    return ClocheError("port.domain_taken", f"the domain {domain} leads to a port already", details={"domain": domain})
