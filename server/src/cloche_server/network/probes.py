"""The slot of a machine, looked at from the host's side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from cloche_server.core.network import TAP
from cloche_server.core.probes import Probe
from cloche_server.host import netns

_INTERFACES: Final = frozenset({"lo", TAP})
#: Made by the kernel in every namespace, by modules that the host has loaded; they are down and lead nowhere.
_FALLBACK: Final = frozenset(
    {"sit0", "tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
)
_NET: Final = Path("/proc/thread-self/net")
_SWITCHES: Final = ("ipv4/ip_forward", "ipv6/conf/all/forwarding")


def probe_slot(path: Path) -> Probe:
    """Blocking."""
    try:
        wrong = netns.inside(path, _wrong)
        if (path.stat().st_dev, path.stat().st_ino) == _own():
            wrong = "it is the network of the host"
    except OSError as error:
        return Probe("network.slot", False, f"it could not be tried: {error.strerror or error}")
    seen = "a namespace of its own with one card, no way out of it and no forwarding"
    return Probe("network.slot", wrong is None, wrong or seen)


def _own() -> tuple[int, int]:
    status = Path("/proc/self/ns/net").stat()
    return status.st_dev, status.st_ino


def _wrong() -> str | None:
    """What there should not be in the namespace of this thread."""
    checks: tuple[Callable[[], str | None], ...] = (_interfaces, _forwarding, _routes4, _routes6)
    return next((found for check in checks if (found := check()) is not None), None)


def _interfaces() -> str | None:
    lines = (_NET / "dev").read_text().splitlines()[2:]
    others = {line.partition(":")[0].strip() for line in lines} - _INTERFACES - _FALLBACK
    return f"it has the interfaces {', '.join(sorted(others))}" if others else None


def _forwarding() -> str | None:
    on = [
        name for name in _SWITCHES if (path := Path("/proc/sys/net", name)).exists() and path.read_text().strip() != "0"
    ]
    return f"it forwards packets ({', '.join(on)})" if on else None


def _routes4() -> str | None:
    for line in (_NET / "route").read_text().splitlines()[1:]:
        interface, _, gateway = line.split()[:3]
        if interface != TAP or int(gateway, 16):
            return f"it has a route by {interface}"
    return None


def _routes6() -> str | None:
    path = _NET / "ipv6_route"
    for line in path.read_text().splitlines() if path.exists() else []:
        fields = line.split()
        rejects = int(fields[8], 16) & 0x0200
        if not rejects and (fields[9] not in _INTERFACES or int(fields[4], 16)):
            return f"it has a route by {fields[9]}"
    return None
