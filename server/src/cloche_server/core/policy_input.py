"""A policy as a client writes it (JSON) becomes a `NetworkPolicy`, or a `ClocheError` that says what is wrong. Pure.

The shape is that of `core/network.py`; ports are numbers or texts like `"8000-8010"`, `protocol` is `tcp`, `udp` or
`any` (of a rule that allows: TCP alone), and a rule without `id` is `rule-N`, counted from 1. Unknown fields are
ignored, but not in a rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Network, ip_network
from typing import Any, Final, NoReturn, TypeVar

from cloche_server.core.errors import ClocheError
from cloche_server.core.names import domain_pattern
from cloche_server.core.network import (
    MAX_RULES,
    NetworkLimits,
    NetworkMode,
    NetworkPolicy,
    Rule,
    RuleAction,
    Transport,
)

_Word = TypeVar("_Word", NetworkMode, RuleAction, Transport)
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
_METHOD: Final = re.compile(r"[A-Z][A-Z0-9_-]{0,31}")
_SPAN: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_WORDS: Final = frozenset(
    {
        "default",
        "mode",
        "private-address",
        "not-resolved",
        "no-name",
        "name-mismatch",
        "unreadable",
        "udp",
        "http",
        "limit",
        "violation",
        "upstream",
        "group",
    }
)
_FIELDS: Final = ("id", "action", "domain", "cidr", "ports", "protocol", "methods", "paths")
_MAX_PORTS: Final = 64
_MAX_LIST: Final = 64
_MAX_PATH: Final = 1024
_MAX_NUMBER: Final = 10**9


def parse_policy(body: Mapping[str, Any], field: str = "network") -> NetworkPolicy:
    """`field`: what the body is called in errors. Raises ClocheError `request.invalid` with the field in details."""
    if not isinstance(body, Mapping):
        _refuse(field, f"{field} must be an object")
    rules = _list(body.get("rules"), f"{field}.rules", MAX_RULES)
    made: list[Rule] = []
    seen: set[str] = set()
    for number, one in enumerate(rules, start=1):
        rule = _rule(one, number, f"{field}.rules[{number - 1}]")
        if rule.id in seen:
            _refuse(f"{field}.rules[{number - 1}].id", "two rules have one id; an id names one rule")
        seen.add(rule.id)
        made.append(rule)
    learn = body.get("learn", False)
    if not isinstance(learn, bool):
        _refuse(f"{field}.learn", f"{field}.learn must be true or false")
    mode = _word(body.get("mode", NetworkMode.OPEN.value), NetworkMode, f"{field}.mode")
    return NetworkPolicy(mode, tuple(made), _limits(body.get("limits"), f"{field}.limits"), learn)


def _rule(body: object, number: int, field: str) -> Rule:
    if not isinstance(body, Mapping):
        _refuse(field, "a rule must be an object")
    unknown = [key for key in body if key not in _FIELDS]
    if unknown:
        # A condition that is misspelt and ignored would make a rule match everything.
        _refuse(field, "a rule has a field that is not known; it has " + ", ".join(f"`{name}`" for name in _FIELDS))
    identifier = body.get("id")
    if identifier is None:
        identifier = f"rule-{number}"
    if not isinstance(identifier, str) or not _ID.fullmatch(identifier) or identifier in _WORDS:
        _refuse(
            f"{field}.id", "the id of a rule has up to 64 letters, digits, `_`, `.`, `:`, `-`, and is no word of ours"
        )
    if "action" not in body:
        _refuse(f"{field}.action", "a rule says `allow` or `deny` in `action`")
    domain = _domain(body.get("domain"), f"{field}.domain")
    protocol = body.get("protocol")
    transport = None if protocol in {None, "any"} else _word(protocol, Transport, f"{field}.protocol")
    rule = Rule(
        id=identifier,
        action=_word(body["action"], RuleAction, f"{field}.action"),
        domain=domain,
        cidr=_cidr(body.get("cidr"), f"{field}.cidr"),
        ports=_ports(body.get("ports"), f"{field}.ports"),
        protocol=transport,
        methods=_methods(body.get("methods"), f"{field}.methods"),
        paths=_paths(body.get("paths"), f"{field}.paths"),
    )
    if rule.reads_http and transport is Transport.UDP:
        _refuse(f"{field}.protocol", "a rule with methods or paths is about HTTP, which is not read over UDP")
    if transport is Transport.UDP and rule.action is RuleAction.ALLOW:
        _check_udp(rule, f"{field}.ports")
    return rule


def _check_udp(rule: Rule, field: str) -> None:
    """What opens UDP is meant word for word."""
    if not rule.ports:
        _refuse(field, 'a rule that allows UDP states its ports, such as `[123]`, or `["1-65535"]` for all of them')
    if all(span == (53, 53) for span in rule.ports):
        # Taken and without effect it would be a promise that nobody keeps.
        _refuse(
            field, "UDP port 53 is answered by the platform's resolver always; allow the names that may be asked for"
        )


def _domain(value: object, field: str) -> str | None:
    if value is None:
        return None
    found = domain_pattern(value) if isinstance(value, str) else None
    if found is None:
        _refuse(field, "a domain is a name like `example.com`, or `*.example.com` for the names below it")
    return found


def _cidr(value: object, field: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > 64 or "%" in value:
        _refuse(field, "a cidr is an address or a network like `10.0.0.0/8`")
    try:
        network = ip_network(value)
    except ValueError:
        _refuse(field, "a cidr is an address or a network like `10.0.0.0/8`, without bits after its prefix")
    if isinstance(network, IPv6Network) and network.subnet_of(IPv6Network("::ffff:0:0/96")):
        _refuse(field, "write the IPv4 network itself, not its form inside IPv6")
    return str(network)


def _ports(value: object, field: str) -> tuple[tuple[int, int], ...]:
    found = []
    for one in _list(value, field, _MAX_PORTS):
        span = _SPAN.fullmatch(one) if isinstance(one, str) else None
        if span is not None:
            low, high = int(span[1]), int(span[2] or span[1])
        elif isinstance(one, int) and not isinstance(one, bool):
            low = high = one
        else:
            _refuse(field, "ports are numbers, or texts like `8000-8010`")
        if not 1 <= low <= high <= 65535:
            _refuse(field, "a port is between 1 and 65535, and a range begins with its lower end")
        found.append((low, high))
    return tuple(found)


def _methods(value: object, field: str) -> tuple[str, ...]:
    found = []
    for one in _list(value, field, _MAX_LIST):
        if not isinstance(one, str) or not one.isascii() or not _METHOD.fullmatch(one.upper()):
            _refuse(field, "a method is a word like `GET`")
        found.append(one.upper())
    return tuple(dict.fromkeys(found))


def _paths(value: object, field: str) -> tuple[str, ...]:
    found = []
    for one in _list(value, field, _MAX_LIST):
        if not isinstance(one, str) or not 1 <= len(one) <= _MAX_PATH or not one.isascii() or not one.isprintable():
            _refuse(field, f"a path is printable ASCII of at most {_MAX_PATH} characters; encode the rest")
        if not one.startswith("/") or "*" in one[:-1] or "?" in one or "#" in one:
            _refuse(field, "a path begins with `/`, has no query, and may end in `*` for everything below")
        found.append(one)
    return tuple(dict.fromkeys(found))


def _limits(value: object, field: str) -> NetworkLimits:
    if value is None:
        return NetworkLimits()
    if not isinstance(value, Mapping):
        _refuse(field, f"{field} must be an object")
    numbers: dict[str, int] = {}
    for name in ("bandwidth_kbps", "connections", "total_mb"):
        one = value.get(name, 0)
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one <= _MAX_NUMBER:
            _refuse(f"{field}.{name}", f"{name} is a whole number from 0 (no limit) to {_MAX_NUMBER}")
        numbers[name] = one
    return NetworkLimits(**numbers)


def _list(value: object, field: str, most: int) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        _refuse(field, f"{field} must be a list")
    if len(value) > most:
        _refuse(field, f"{field} has more than {most} entries")
    return value


def _word(value: object, words: type[_Word], field: str) -> _Word:
    known = {word.value: word for word in words}
    found = known.get(value) if isinstance(value, str) else None
    if found is None:
        _refuse(field, f"{field} is one of " + ", ".join(f"`{word}`" for word in known))
    return found


def _refuse(field: str, sentence: str) -> NoReturn:
    raise ClocheError("request.invalid", sentence, details={"field": field})
