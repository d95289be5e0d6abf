"""What all sandboxes of one netd have in common: how it reaches the world, secrets, time."""

from __future__ import annotations

import ipaddress
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloche_server.core.addresses import Address, Network
from cloche_server.host.addresses import HostAddresses
from cloche_server.host.clock import Clock, SystemClock
from cloche_server.netd.dial import Dialer, OutboundProxy
from cloche_server.netd.flow import HttpEngine
from cloche_server.netd.groups import Doors, Groups
from cloche_server.netd.upstream import Upstream
from cloche_server.netd.violations import Violations

if TYPE_CHECKING:
    from cloche_server.netd.datagrams import Datagrams


@dataclass(frozen=True, slots=True)
class Authority:
    """The certificate authority of a workspace, PEM."""

    certificate: str
    key: str = field(repr=False)


class Vault:
    """Secrets of the workspaces, in memory only."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, str]] = {}
        self._authorities: dict[str, Authority] = {}

    def replace(self, workspace: str, values: Mapping[str, str], ca: Mapping[str, str] | None) -> None:
        self._values[workspace] = {str(name): str(value) for name, value in values.items()}
        if ca is None:
            self._authorities.pop(workspace, None)
        else:
            self._authorities[workspace] = Authority(str(ca["certificate"]), str(ca["key"]))

    def value(self, workspace: str, name: str) -> str | None:
        return self._values.get(workspace, {}).get(name)

    def authority(self, workspace: str) -> Authority | None:
        return self._authorities.get(workspace)

    def __repr__(self) -> str:
        return f"Vault({len(self._values)} workspaces)"


@dataclass
class Shared:
    """One for the process. `never`: networks that no rule of a policy opens. `datagrams`: those of the slots that are
    attached, by sandbox."""

    clock: Clock = field(default_factory=SystemClock)
    host: HostAddresses = field(default_factory=HostAddresses)
    upstream: Upstream = field(default_factory=Upstream)
    dialer: Dialer = field(default_factory=Dialer)
    vault: Vault = field(default_factory=Vault)
    groups: Groups = field(default_factory=Groups)
    doors: Doors = field(default_factory=Doors)
    datagrams: dict[str, Datagrams] = field(default_factory=dict)
    never: Collection[Network] = ()
    engine: HttpEngine | None = None
    violations: Violations = field(init=False)
    report: Callable[[str], None] = lambda _line: None

    def __post_init__(self) -> None:
        self.violations = Violations(self.clock.now, self.clock.monotonic)

    def report_failure(self, what: str, error: BaseException) -> None:
        """Where something failed that should not; never the text of the exception, which may quote a guest or a
        secret."""
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
        self.report(f"{what} failed: {type(error).__name__} at {where}")

    def configure(self, message: Mapping[str, Any]) -> None:
        """The operator's part of the `configure` op; fields that are missing stay as they are. Raises KeyError,
        ValueError, TypeError."""
        if "resolvers" in message:
            self.upstream.servers = _servers(message["resolvers"])
        if "never" in message:
            self.never = tuple(ipaddress.ip_network(one) for one in message["never"])
        if "host_addresses" in message:
            self.host.also = frozenset(_addresses(message["host_addresses"]))
        if "proxy" in message:
            proxy = message["proxy"]
            self.dialer.proxy = None if proxy is None else OutboundProxy.parse(str(proxy))


def _addresses(values: Sequence[str]) -> list[Address]:
    return [ipaddress.ip_address(one) for one in values]


def _servers(values: Sequence[str] | None) -> tuple[tuple[str, int], ...] | None:
    """`address` or `address:port` or `[address]:port`; None: those of the host."""
    if values is None:
        return None
    found = []
    for one in values:
        host, port = one, "53"
        if one.startswith("["):
            host, _, rest = one[1:].partition("]")
            port = rest.removeprefix(":") or "53"
        elif one.count(":") == 1:
            host, _, port = one.partition(":")
        found.append((str(ipaddress.ip_address(host)), int(port)))
    return tuple(found)
