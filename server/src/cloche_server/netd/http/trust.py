"""Both ends of TLS that is read on the way: certificates that guests accept, and servers that we accept."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cloche_server.host.certificates import KeyPair, issue, make_authority, server_context

MAX_LEAVES: Final = 1024
#: A certificate is made anew after a day (seconds); it is valid for a month.
LEAF_SECONDS: Final = 86400.0
_ALPN: Final = ["http/1.1"]
#: Programs that speak nothing but HTTP/2 get it, to be told in their own words that it is not spoken here.
_ALPN_TO_GUESTS: Final = ["http/1.1", "h2"]


@dataclass(slots=True)
class _Leaf:
    made: float
    context: asyncio.Future[ssl.SSLContext]


class Leaves:
    """TLS contexts towards guests, by authority and name. `now`: Unix seconds. One is made at once and thrown away:
    libraries load parts of themselves when they are needed first, which may be too late for a user without rights."""

    def __init__(self, now: Callable[[], float]) -> None:
        _make(make_authority("practice", now()), "practice.invalid", now())
        self._now = now
        self._leaves: OrderedDict[tuple[bytes, str], _Leaf] = OrderedDict()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="leaves")

    async def context(self, authority: KeyPair, name: str) -> ssl.SSLContext:
        """Made once, on a thread, however many ask. Raises ValueError when the name cannot be in a certificate."""
        # Whoever is cancelled meanwhile must not take it from the others.
        return await asyncio.shield(self._leaf(authority, name).context)

    def _leaf(self, authority: KeyPair, name: str) -> _Leaf:
        key = (hashlib.sha256(authority.certificate_pem + authority.key_pem).digest(), name)
        leaf = self._leaves.get(key)
        now = self._now()
        if leaf is None or not 0 <= now - leaf.made < LEAF_SECONDS or _failed(leaf.context):
            loop = asyncio.get_running_loop()
            leaf = _Leaf(now, loop.run_in_executor(self._thread, _make, authority, name, now))
            self._leaves[key] = leaf
            while len(self._leaves) > MAX_LEAVES:
                self._leaves.popitem(last=False)
        self._leaves.move_to_end(key)
        return leaf

    def prepare(self, authority: KeyPair, name: str) -> None:
        """Makes the context of a name ahead. A name that cannot be in a certificate is told when it is asked for."""
        self._leaf(authority, name).context.add_done_callback(_failed)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _make(authority: KeyPair, name: str, now: float) -> ssl.SSLContext:
    context = server_context(issue(authority, name, now))
    context.set_alpn_protocols(_ALPN_TO_GUESTS)

    def same_name(_tls: Any, given: str | None, _context: ssl.SSLContext) -> int | None:
        # It was peeked at before; a second hello of the same handshake could say something else.
        if given is None or given.lower().removesuffix(".") != name:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        return None

    context.sni_callback = same_name
    return context


def client_context(extra_ca: Path | None) -> ssl.SSLContext:
    """To verify servers: what this host trusts, and what the operator has added. Raises OSError."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    if extra_ca is not None:
        context.load_verify_locations(extra_ca)
    return context
