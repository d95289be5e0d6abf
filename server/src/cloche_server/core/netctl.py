"""What is said between the server and netd (`docs/network.md`): records and their JSON, without any I/O."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from cloche_server.core.network import (
    NetworkLimits,
    NetworkMode,
    NetworkPolicy,
    Rule,
    RuleAction,
    SecretGrant,
    SecretPlace,
    Transport,
)

#: Changes with every change of this language: a netd that speaks another one is replaced.
PROTOCOL: Final = 3
#: No frame is longer, so that neither side can be made to keep more.
MAX_FRAME: Final = 8 * 1024 * 1024
#: Descriptors that may come with one frame.
MAX_FDS: Final = 16
_HEADER: Final = struct.Struct(">IB")


class FrameError(Exception):
    """The other side does not speak this language; the message is a sentence without its bytes."""


def encode_frame(message: Mapping[str, Any], descriptors: int = 0) -> bytes:
    """One frame: length of the JSON, number of descriptors, JSON. Raises FrameError when it would be too long."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME or not 0 <= descriptors <= MAX_FDS:
        raise FrameError("the message is too long for a frame")
    return _HEADER.pack(len(body), descriptors) + body


class FrameReader:
    """Bytes of a stream in, messages out. Keeps at most one frame."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._kept = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
        """Messages that are complete now, each with the number of its descriptors. Raises FrameError, for good."""
        self._kept += data
        while len(self._kept) >= _HEADER.size:
            length, descriptors = _HEADER.unpack_from(self._kept)
            if length > self._limit or descriptors > MAX_FDS:
                raise FrameError("a frame is longer than allowed")
            end = _HEADER.size + length
            if len(self._kept) < end:
                return
            body = bytes(self._kept[_HEADER.size : end])
            del self._kept[:end]
            yield _message(body), descriptors


def _message(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise FrameError("a frame does not hold JSON") from None
    if not isinstance(message, dict):
        raise FrameError("a frame does not hold an object")
    return message


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One decision. `seq` grows by one in each sandbox; `at` is Unix seconds. `kind`: `dns`, `tcp`, `udp`, `http`,
    `secret`. `verdict`: `allow` or `deny`; `rule`: id of the rule that decided, or `default`, `mode`,
    `private-address`, `not-resolved`, `limit`, `violation`, …. `name` and `address` where they are known. Bytes are
    those of the whole connection; they are told by a second entry with `end` set."""

    seq: int
    at: float
    kind: str
    verdict: str
    rule: str
    reason: str
    name: str = ""
    address: str = ""
    port: int = 0
    protocol: str = "tcp"
    method: str = ""
    path: str = ""
    connection: int = 0
    end: bool = False
    bytes_sent: int = 0
    bytes_received: int = 0


def entry_to_json(entry: LogEntry) -> dict[str, Any]:
    """The whole entry; `entry_from_json` turns it back."""
    return asdict(entry)


def entry_from_json(data: Mapping[str, Any]) -> LogEntry:
    """Raises TypeError for what `entry_to_json` has not written."""
    return LogEntry(**data)


def policy_to_json(policy: NetworkPolicy) -> dict[str, Any]:
    """The whole policy; `policy_from_json` turns it back."""
    return {
        "mode": policy.mode.value,
        "rules": [_rule_to_json(rule) for rule in policy.rules],
        "limits": asdict(policy.limits),
        "learn": policy.learn,
    }


def policy_from_json(data: Mapping[str, Any]) -> NetworkPolicy:
    """Raises KeyError, ValueError, TypeError for what `policy_to_json` has not written."""
    return NetworkPolicy(
        mode=NetworkMode(data["mode"]),
        rules=tuple(_rule_from_json(rule) for rule in data["rules"]),
        limits=NetworkLimits(**data["limits"]),
        learn=bool(data["learn"]),
    )


def _rule_to_json(rule: Rule) -> dict[str, Any]:
    data: dict[str, Any] = {"id": rule.id, "action": rule.action.value}
    if rule.domain is not None:
        data["domain"] = rule.domain
    if rule.cidr is not None:
        data["cidr"] = rule.cidr
    if rule.ports:
        data["ports"] = [list(span) for span in rule.ports]
    if rule.protocol is not None:
        data["protocol"] = rule.protocol.value
    if rule.methods:
        data["methods"] = list(rule.methods)
    if rule.paths:
        data["paths"] = list(rule.paths)
    return data


def _rule_from_json(data: Mapping[str, Any]) -> Rule:
    protocol = data.get("protocol")
    return Rule(
        id=data["id"],
        action=RuleAction(data["action"]),
        domain=data.get("domain"),
        cidr=data.get("cidr"),
        ports=tuple((int(low), int(high)) for low, high in data.get("ports", ())),
        protocol=None if protocol is None else Transport(protocol),
        methods=tuple(data.get("methods", ())),
        paths=tuple(data.get("paths", ())),
    )


def grant_to_json(grant: SecretGrant) -> dict[str, Any]:
    """The whole grant; `grant_from_json` turns it back."""
    return {**asdict(grant), "places": [place.value for place in grant.places]}


def grant_from_json(data: Mapping[str, Any]) -> SecretGrant:
    """Raises KeyError, ValueError, TypeError for what `grant_to_json` has not written."""
    lists = {name: tuple(data[name]) for name in ("hosts", "methods", "paths", "headers", "pass_hosts")}
    places = tuple(SecretPlace(place) for place in data["places"])
    return SecretGrant(secret=data["secret"], placeholder=data["placeholder"], env=data["env"], places=places, **lists)
