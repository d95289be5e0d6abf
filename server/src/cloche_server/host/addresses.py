"""The addresses of this host, as the kernel has them in our network namespace."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

_TRIE: Final = Path("/proc/self/net/fib_trie")
_INET6: Final = Path("/proc/self/net/if_inet6")
_FRESH_SECONDS: Final = 3.0


class HostAddresses(Collection[IPv4Address | IPv6Address]):
    """Always what they are now, to within a few seconds; `also` are those that are the host's in another way."""

    def __init__(self, also: Collection[IPv4Address | IPv6Address] = ()) -> None:
        self.also = frozenset(also)
        self._found: frozenset[IPv4Address | IPv6Address] = frozenset()
        self._until = 0.0

    def _now(self) -> frozenset[IPv4Address | IPv6Address]:
        if time.monotonic() >= self._until:
            self._found = local_addresses() | self.also
            self._until = time.monotonic() + _FRESH_SECONDS
        return self._found

    def __contains__(self, address: object) -> bool:
        return address in self._now()

    def __iter__(self) -> Iterator[IPv4Address | IPv6Address]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def local_addresses() -> frozenset[IPv4Address | IPv6Address]:
    """Every address that packets to it end here for."""
    found: set[IPv4Address | IPv6Address] = set()
    with contextlib.suppress(OSError):
        last = ""
        for line in _TRIE.read_text("ascii").splitlines():
            words = line.split()
            if words[:1] == ["|--"]:
                last = words[1]
            elif words[:1] == ["/32"] and words[-1] == "LOCAL" and last:
                found.add(IPv4Address(last))
    with contextlib.suppress(OSError):
        for line in _INET6.read_text("ascii").splitlines():
            found.add(IPv6Address(bytes.fromhex(line.split()[0])))
    return frozenset(found)


def has_route(address: IPv4Address | IPv6Address) -> bool:
    """Whether this host has any route to an address. Nothing is sent."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect((str(address), 53))
    except OSError:
        return False
    return True
