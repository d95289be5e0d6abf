"""The network of a sandbox in answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cloche_server.api.present import rfc3339
from cloche_server.app.network import Page
from cloche_server.core.netctl import policy_to_json
from cloche_server.core.network import NetworkPolicy


def policy(one: NetworkPolicy) -> dict[str, Any]:
    """As it can be sent again."""
    shown = policy_to_json(one)
    shown["rules"] = [rule(each) for each in shown["rules"]]
    return shown


def rule(one: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(one)
    if "ports" in shown:
        shown["ports"] = [_span(*span) if isinstance(span, list) else span for span in shown["ports"]]
    return shown


def _span(low: int, high: int) -> int | str:
    return low if low == high else f"{low}-{high}"


def page(one: Page) -> dict[str, Any]:
    return {"entries": [entry(each) for each in one.entries], "next": one.next, "lost": one.lost}


def entry(one: Any) -> dict[str, Any]:
    fields = dict(one) if isinstance(one, Mapping) else asdict(one)
    return {**fields, "at": rfc3339(fields["at"])}
