"""Which port of which sandbox a request is for: by its host name, by a path, or by headers. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cloche_server.core.http1 import RequestHead
from cloche_server.core.previews import PortRule, bare_host, parse_label, split_host

_API: Final = re.compile(rb"/v1/sandboxes/([a-z0-9]{1,64})/(proxy|tunnel)/([0-9]{1,6})((?:[/?].*)?)", re.DOTALL)
_TOKEN: Final = re.compile(rb"/v1/p/([A-Za-z0-9_.\-]{1,16384})((?:[/?].*)?)", re.DOTALL)
#: What a connection of the API has to begin with to be handed over. Decided by the first bytes of a request.
_OURS: Final = re.compile(rb"[A-Z]{1,20} /v1/(?:p/|sandboxes/[a-z0-9]{1,64}/(?:proxy|tunnel)/)")
_METHOD: Final = re.compile(rb"[A-Z]{1,20}")
PEEK: Final = 120
#: Names below it lead to this machine without any set-up.
LOCAL: Final = "localhost"


class Way(Enum):
    HOST = "host"  # 3000-<id>.<domain>, or a domain of the caller's
    HEADER = "header"  # X-Cloche-Sandbox and X-Cloche-Port
    TOKEN = "token"  # noqa: S105 - /v1/p/<token>/
    API = "api"  # /v1/sandboxes/<id>/proxy/<port>/
    TUNNEL = "tunnel"  # /v1/sandboxes/<id>/tunnel/<port>


@dataclass(frozen=True, slots=True)
class Route:
    """`target` is what the server in the guest sees, `prefix` what stood before it. `token` only by its own way."""

    way: Way
    sandbox_id: str
    port: int
    target: bytes
    prefix: bytes = b""
    token: str = ""


def is_ours(data: bytes) -> bool | None:
    """Whether a request that begins like this is for a port; None when more has to be seen."""
    if _OURS.match(data):
        return True
    if len(data) >= PEEK or b"\n" in data:
        return False
    method, space, path = data.partition(b" ")
    if not _METHOD.fullmatch(method):
        return False
    if not space:
        return None
    beginnings = (b"/v1/p/", b"/v1/sandboxes/")
    if any(begin.startswith(path) for begin in beginnings):
        return None
    if not path.startswith(b"/v1/sandboxes/"):
        return False
    _, slash, verb = path.removeprefix(b"/v1/sandboxes/").partition(b"/")
    if not slash:
        return None
    return None if b"proxy/".startswith(verb) or b"tunnel/".startswith(verb) else False


def by_path(head: RequestHead) -> Route | None:
    """The forms that the API's own port knows as well."""
    if (found := _API.fullmatch(head.target)) is not None:
        way = Way.TUNNEL if found[2] == b"tunnel" else Way.API
        prefix = head.target[: len(head.target) - len(found[4])]
        return Route(way, found[1].decode(), int(found[3]), _rest(found[4]), prefix)
    if (found := _TOKEN.fullmatch(head.target)) is not None:
        token = found[1].decode()
        return Route(Way.TOKEN, "", 0, _rest(found[2]), b"/v1/p/" + found[1], token)
    return None


def by_name(head: RequestHead, domain: str, at_domain: Callable[[str], PortRule | None]) -> Route | None:
    """The forms of the gateway: a host name, else headers, else a path."""
    host = head.host.decode("latin-1")
    if (found := split_host(host, domain) or split_host(host, LOCAL)) is not None:
        return Route(Way.HOST, *found, head.target)
    if (rule := at_domain(bare_host(host))) is not None:
        return Route(Way.HOST, rule.sandbox_id, rule.port, head.target)
    sandbox, port = head.first(b"x-cloche-sandbox"), head.first(b"x-cloche-port")
    if sandbox is not None and port is not None:
        named = parse_label(f"{port.decode('latin-1')}-{sandbox.decode('latin-1')}")
        return None if named is None else Route(Way.HEADER, *named, head.target)
    return by_path(head)


def _rest(rest: bytes) -> bytes:
    return rest if rest.startswith(b"/") else b"/" + rest
