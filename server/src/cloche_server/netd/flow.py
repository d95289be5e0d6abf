"""What the parts of netd hand each other: one connection of a guest, and what its sandbox allows."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cloche_server.core.network import SecretGrant


@dataclass(frozen=True, slots=True)
class Target:
    """Where a guest's connection was meant to go. `address` and `port`: what it connected to; `name`: what its first
    bytes claim (SNI, or the Host of its first request; lower case, None: nothing). `connection`: its number in the
    log."""

    address: str
    port: int
    name: str | None
    tls: bool
    connection: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rule`: id of the rule, or a word of `LogEntry.rule`. `reason`: a sentence for people."""

    allowed: bool
    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dialed:
    """A connected non-blocking socket. `address`: whose, also where it leads through a proxy."""

    sock: socket.socket
    address: str


class Carrier(Protocol):
    """A sandbox as its HTTP sees it. Made by the session, read by the HTTP engine."""

    @property
    def sandbox(self) -> str: ...
    @property
    def workspace(self) -> str: ...
    @property
    def grants(self) -> Sequence[SecretGrant]: ...
    def secret(self, name: str) -> str | None:
        """The value of a secret of the workspace now."""

    def reads_http(self, name: str, port: int) -> bool:
        """Whether requests to this name have to be read one by one: a rule or a grant speaks of them."""

    def decide_request(self, target: Target, host: str, method: str, path: str) -> Verdict:
        """The policy on one HTTP request; `host` is its own Host or `:authority`."""

    def note(self, target: Target, kind: str, verdict: Verdict, *, host: str, method: str = "", path: str = "") -> None:
        """Into the decision log. Never pass anything that may hold the value of a secret."""

    def violated(self, secret: str, host: str, method: str) -> None:
        """The placeholder of a secret was sent where it must not go: becomes an event."""

    async def addresses(self, target: Target, host: str) -> Sequence[str]:
        """Where `host` may be reached now on the target's port: addresses that the platform's resolver gives for it
        and the policy allows, the best first. Raises `Refused` with the verdict when there is none."""

    async def dial(self, target: Target, addresses: Sequence[str]) -> Dialed:
        """A connection to one of `addresses` on the target's port, through the operator's proxy if there is one.
        Raises OSError."""

    async def pace(self, sent: int, received: int) -> None:
        """Returns when so many bytes may pass, in each direction: the bandwidth of the sandbox."""

    def count(self, target: Target, sent: int, received: int) -> None:
        """Bytes that were carried, for log and limits."""


class Refused(Exception):
    """A connection that policy does not allow."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class HttpEngine(Protocol):
    """Reads HTTP of guests, plain or inside TLS that it terminates."""

    async def serve(self, guest: socket.socket, target: Target, carrier: Carrier) -> None:
        """Carries one connection to its end and closes it. Nothing has been read from `guest` (first bytes were only
        peeked at). Cancelled when the connection is cut."""

    def prepare(self, workspace: str, names: Iterable[str]) -> None:
        """Names that guests of the workspace will probably ask for: what takes time is done ahead."""

    def forget(self, carrier: Carrier) -> None:
        """Its policy or its secrets have changed, or it is gone: connections that wait for its next request end."""
