"""The sandboxes of one netd, and what the server asks for them (`docs/network.md`, control link)."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cloche_server.core.groups import group_from_json
from cloche_server.core.netctl import PROTOCOL, grant_from_json, policy_from_json
from cloche_server.core.network import TAP
from cloche_server.host.carrier import has_carrier
from cloche_server.netd.datagrams import Datagrams, Voice
from cloche_server.netd.explain import explain
from cloche_server.netd.intake import Intake
from cloche_server.netd.journal import MAX_PAGE
from cloche_server.netd.relay import Pipes
from cloche_server.netd.resolver import UdpResolver
from cloche_server.netd.session import Session
from cloche_server.netd.shared import Shared

_MAX_ID: Final = 128
_KINDS: Final = (
    (socket.AF_INET, socket.SOCK_STREAM),
    (socket.AF_INET6, socket.SOCK_STREAM),
    (socket.AF_INET, socket.SOCK_DGRAM),
    (socket.AF_INET6, socket.SOCK_DGRAM),
    (socket.AF_INET, socket.SOCK_DGRAM),
    (socket.AF_INET6, socket.SOCK_DGRAM),
    (socket.AF_INET, socket.SOCK_RAW),
    (socket.AF_INET6, socket.SOCK_RAW),
    (socket.AF_INET, socket.SOCK_RAW),
    (socket.AF_INET6, socket.SOCK_RAW),
)


class Refusal(Exception):
    """A request that cannot be done; code and sentence go back to the server."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Attached:
    """A sandbox with the sockets of its slot."""

    def __init__(
        self, session: Session, socks: Sequence[socket.socket], tasks: asyncio.TaskGroup, pipes: Pipes
    ) -> None:
        self.session = session
        self._doors = session.shared.doors
        self._doors.open(session.sandbox)
        self._intake = Intake(session, (socks[0], socks[1]), tasks, pipes)
        self._resolver = UdpResolver(session, (socks[2], socks[3]), tasks)
        self._datagrams = Datagrams(session, socks[4:6], Voice(socks[6:10]), tasks)
        self._any = socks[2]

    @property
    def has_machine(self) -> bool:
        """Somebody is at the other end of the slot's tap."""
        return has_carrier(self._any, TAP)

    def close(self) -> None:
        self._intake.close()
        self._resolver.close()
        self._datagrams.close()
        self._doors.close(self.session.sandbox)
        self.session.forget_waiting()


class Registry:
    """`stopping` is set by the `stop` op."""

    def __init__(self, shared: Shared, tasks: asyncio.TaskGroup) -> None:
        self._shared = shared
        self._tasks = tasks
        self._pipes = Pipes()
        self._epoch = secrets.token_hex(8)
        self._attached: dict[str, Attached] = {}
        self.stopping = asyncio.Event()

    async def handle(self, message: Mapping[str, Any], fds: list[int]) -> Any:
        """The answer to one request. The descriptors stay the caller's to close. Raises Refusal."""
        op = message.get("op")
        try:
            if op == "attach":
                return self._attach(message, fds)
            if op == "supply":
                return self._supply(message, fds)
            if op == "log":
                return await self._log(message)
            if op == "wanted":
                return {"wanted": await self._shared.doors.wanted(min(60.0, max(0.0, float(message.get("wait", 0)))))}
            if op == "violations":
                return await self._violations(message)
            plain = {
                "hello": self._hello,
                "configure": self._configure,
                "policy": self._policy,
                "detach": self._detach,
                "secrets": self._secrets,
                "groups": self._groups,
                "explain": self._explain,
                "learned": self._learned,
                "stats": self._stats,
                "stop": self._stop,
            }.get(op if isinstance(op, str) else "")
            if plain is None:
                raise Refusal("unknown-op", "this netd does not know the operation")
            return plain(message)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            # Never the text of the exception: it may quote a secret.
            raise Refusal("invalid", f"the request {str(op)[:32]} is not understood ({type(error).__name__})") from None

    @property
    def serves(self) -> bool:
        """A machine of a sandbox that is attached lives."""
        return any(attached.has_machine for attached in self._attached.values())

    def close(self) -> None:
        for attached in self._attached.values():
            attached.close()
        self._attached.clear()

    # ------------------------------------------------------------------ operations

    def _hello(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        wired = self._shared.engine is not None
        return {"version": PROTOCOL, "epoch": self._epoch, "http": wired, "sandboxes": sorted(self._attached)}

    def _configure(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._shared.configure(message)
        for attached in self._attached.values():
            session = attached.session
            session.replace(session.policy.source, session.grants)
        return {}

    def _attach(self, message: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        sandbox = str(message["sandbox"])
        if not 0 < len(sandbox) <= _MAX_ID:
            raise ValueError
        policy = policy_from_json(message["policy"])
        grants = [grant_from_json(grant) for grant in message.get("grants", ())]
        session = Session(sandbox, str(message.get("workspace", "")), policy, grants, self._shared)
        socks = _sockets(fds)
        before = self._attached.pop(sandbox, None)
        if before is not None:
            before.close()
        self._attached[sandbox] = Attached(session, socks, self._tasks, self._pipes)
        session.prepare()
        return {}

    def _policy(self, message: Mapping[str, Any]) -> dict[str, Any]:
        session = self._of(message)
        policy = policy_from_json(message["policy"])
        grants = [grant_from_json(grant) for grant in message.get("grants", ())]
        cut = session.replace(policy, grants)
        session.prepare()
        return {"cut": cut}

    def _detach(self, message: Mapping[str, Any]) -> dict[str, Any]:
        session = self._of(message)
        self._attached.pop(session.sandbox).close()
        return {"stats": session.stats()}

    def _secrets(self, message: Mapping[str, Any]) -> dict[str, Any]:
        workspace = str(message["workspace"])
        self._shared.vault.replace(workspace, message["values"], message.get("ca"))
        for attached in self._attached.values():
            if attached.session.workspace == workspace:
                attached.session.forget_waiting()
        return {}

    def _groups(self, message: Mapping[str, Any]) -> dict[str, Any]:
        groups = [group_from_json(one) for one in message["groups"]]
        self._shared.groups.replace(groups, whole=bool(message.get("whole")))
        for attached in self._attached.values():
            attached.session.regroup()
        return {}

    def _supply(self, message: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        socks: list[socket.socket] = []
        try:
            socks.extend(_socket_of(fd) for fd in fds)
            if any((sock.family, sock.type & 0xF) != (socket.AF_INET, socket.SOCK_STREAM) for sock in socks):
                raise Refusal("invalid", "a slot is entered by TCP sockets of IPv4")
        except BaseException as error:
            for sock in socks:
                sock.close()
            if isinstance(error, OSError):
                raise Refusal("invalid", "what came is no socket") from None
            raise
        self._shared.doors.supply(str(message["sandbox"]), socks)
        return {}

    async def _log(self, message: Mapping[str, Any]) -> dict[str, Any]:
        session = self._of(message)
        after, wait = int(message.get("after", 0)), float(message.get("wait", 0))
        limit = int(message.get("limit", 100))
        return await session.log.read(max(0, after), min(max(1, limit), MAX_PAGE), max(0.0, wait))

    async def _violations(self, message: Mapping[str, Any]) -> dict[str, Any]:
        wait = float(message.get("wait", 0))
        return await self._shared.violations.read(str(message.get("told", "")), max(0.0, wait))

    def _explain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"verdict": explain(self._of(message), message)}

    def _learned(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"rules": self._of(message).learner.proposal()}

    def _stats(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return self._of(message).stats()

    def _stop(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        self.stopping.set()
        return {}

    def _of(self, message: Mapping[str, Any]) -> Session:
        attached = self._attached.get(str(message["sandbox"]))
        if attached is None:
            raise Refusal("not-attached", "this sandbox is not attached")
        return attached.session


def _socket_of(fd: int) -> socket.socket:
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _sockets(fds: list[int]) -> list[socket.socket]:
    """Copies of the sockets of a slot, in their order."""
    if len(fds) != len(_KINDS):
        raise Refusal("invalid", f"attach needs {len(_KINDS)} sockets")
    socks = []
    try:
        for fd, (family, kind) in zip(fds, _KINDS, strict=True):
            sock = _socket_of(fd)
            socks.append(sock)
            if (sock.family, sock.type & 0xF) != (family, kind):
                raise Refusal("invalid", "the sockets of attach are of another kind, or in another order")
    except BaseException as error:
        for sock in socks:
            sock.close()
        if isinstance(error, OSError):
            raise Refusal("invalid", f"attach needs {len(_KINDS)} sockets") from None
        raise
    return socks
