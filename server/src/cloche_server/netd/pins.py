"""Which addresses the resolver has given a sandbox for which names. Pure: the time is handed in (seconds)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from cloche_server.core.addresses import Address

#: Programs keep addresses for longer than they may; a pin lives at least so long.
SHORTEST: Final = 1800.0
LONGEST: Final = 24 * 3600.0
MAX_NAMES: Final = 4096
MAX_ADDRESSES: Final = 64


class Pins:
    """Bounded: the names that were used longest ago go first."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, dict[Address, float]] = OrderedDict()
        self._addresses: dict[Address, set[str]] = {}

    def add(self, name: str, addresses: Iterable[Address], ttl: float, now: float) -> None:
        until = now + min(max(ttl, SHORTEST), LONGEST)
        held = self._names.setdefault(name, {})
        self._names.move_to_end(name)
        for address in addresses:
            held.pop(address, None)
            while len(held) >= MAX_ADDRESSES:
                self._unlink(name, next(iter(held)))
            held[address] = max(until, held.get(address, 0.0))
            self._addresses.setdefault(address, set()).add(name)
        if not held:
            del self._names[name]
        while len(self._names) > MAX_NAMES:
            oldest = next(iter(self._names))
            for address in list(self._names[oldest]):
                self._unlink(oldest, address)
            self._names.pop(oldest, None)

    def _unlink(self, name: str, address: Address) -> None:
        self._names[name].pop(address, None)
        names = self._addresses.get(address)
        if names is not None:
            names.discard(name)
            if not names:
                del self._addresses[address]

    def has(self, name: str, address: Address, now: float) -> bool:
        return self._names.get(name, {}).get(address, 0.0) > now

    def names_of(self, address: Address, now: float) -> list[str]:
        """Names that the address was given for, in order of the alphabet."""
        return sorted(name for name in self._addresses.get(address, ()) if self.has(name, address, now))

    def addresses_of(self, name: str, now: float) -> list[Address]:
        return [address for address, until in self._names.get(name, {}).items() if until > now]
