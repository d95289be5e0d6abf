"""Between the JSON of the API and the records of `network`: pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ._wire import Json, records, required, timestamp
from .network import Decision, Explanation, NetworkPolicy, Secret


def policy_body(policy: NetworkPolicy | Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """A policy as it is sent; a string is a mode without rules."""
    if policy is None:
        return None
    if isinstance(policy, str):
        return {"mode": policy}
    if isinstance(policy, NetworkPolicy):
        body = {**asdict(policy), "rules": [dict(rule) for rule in policy.rules], "limits": dict(policy.limits)}
        body.pop("cut")
        return body
    return dict(policy)


def grants_body(grants: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Grants of secrets as they are sent."""
    return None if grants is None else [dict(grant) for grant in grants]


def policy(data: Json) -> NetworkPolicy:
    return NetworkPolicy(
        mode=str(required(data, "mode")),
        rules=tuple(records(data.get("rules") or [])),
        limits={str(name): int(value) for name, value in dict(data.get("limits") or {}).items()},
        learn=bool(data.get("learn")),
        cut=int(data.get("cut") or 0),
    )


def decision(data: Json) -> Decision:
    at = timestamp(required(data, "at"))
    assert at is not None, "a required time is there"
    return Decision(
        seq=int(required(data, "seq")),
        at=at,
        kind=str(data.get("kind") or ""),
        allowed=data.get("verdict") == "allow",
        rule=str(data.get("rule") or ""),
        reason=str(data.get("reason") or ""),
        name=str(data.get("name") or ""),
        address=str(data.get("address") or ""),
        port=int(data.get("port") or 0),
        end=bool(data.get("end")),
        bytes_sent=int(data.get("bytes_sent") or 0),
        bytes_received=int(data.get("bytes_received") or 0),
        raw=data,
    )


def explanation(data: Json) -> Explanation:
    return Explanation(bool(required(data, "allowed")), str(data.get("rule") or ""), str(data.get("reason") or ""))


def secret(data: Json) -> Secret:
    described = data.get("description")
    description = None if described is None else str(described)
    return Secret(str(required(data, "name")), int(data.get("version") or 0), description, data)
