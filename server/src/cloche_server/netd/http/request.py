"""Whose request it is. What a guest says three times over (the address line, `Host`, the name in TLS) has to agree."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

import h11

from cloche_server.netd.flow import Target
from cloche_server.netd.http.refusal import Refusal

MAX_FIELDS: Final = 200
MAX_HEAD: Final = 64 * 1024

_AUTHORITY: Final = re.compile(r"(?P<name>[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?", re.IGNORECASE)
_ABSOLUTE: Final = re.compile(rb"(?P<scheme>https?)://(?P<authority>[^/?#]*)(?P<rest>[^#]*)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
#: Protocols that are HTTP again, whose requests nobody would read after the switch.
_NOT_UPGRADED: Final = (b"h2", b"http/", b"tls/")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that makes sense. `target` is in origin form; `path` is that without the query, as it was sent."""

    method: str
    host: str
    path: str
    target: bytes


def bad(sentence: str) -> Refusal:
    return Refusal(400, "network.bad_request", sentence)


def read_request(request: h11.Request, target: Target) -> Asked:
    """Raises `Refusal`."""
    fields = list(request.headers)
    if len(fields) > MAX_FIELDS or sum(len(name) + len(value) + 4 for name, value in fields) > MAX_HEAD:
        raise Refusal(
            431, "network.bad_request", f"a request has at most {MAX_FIELDS} headers of {MAX_HEAD} bytes in all"
        )
    hosts = [value for name, value in fields if name == b"host"]
    if len(hosts) != 1:
        raise bad("a request names exactly one Host")
    names = [name for name, _ in fields]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise bad("a request has either a Content-Length or a Transfer-Encoding")
    method = request.method.decode("ascii")
    if method == "CONNECT":
        raise Refusal(403, "network.denied", "tunnels are not opened here; connect to the host itself", rule="connect")
    host, port = _authority(hosts[0])
    origin = _origin(request.target, host, port, target)
    if port is not None and port != target.port:
        raise _misdirected(target, host)
    if target.tls and host != target.name:
        raise _misdirected(target, host)
    return Asked(method, host, origin.partition(b"?")[0].decode("ascii"), origin)


def _misdirected(target: Target, host: str) -> Refusal:
    """Another name inside of a connection than the one it was opened for: also a way past an allow-list."""
    if not target.tls:
        return bad("the port in Host is not the one that was connected to")
    return Refusal(
        421,
        "network.host_mismatch",
        "the Host of the request is not the name that its TLS connection was opened for",
        rule="host-mismatch",
        host=host,
    )


def _origin(asked: bytes, host: str, port: int | None, target: Target) -> bytes:
    """The target in origin form."""
    if asked.startswith(b"/") or asked == b"*":
        if b"#" in asked:
            raise bad("the target of a request has no fragment")
        return asked
    absolute = _ABSOLUTE.fullmatch(asked)
    if absolute is None:
        raise bad("the target of a request is a path or a whole URL")
    if (absolute["scheme"].lower() == b"https") != target.tls:
        raise bad("the scheme in the target of the request is not that of its connection")
    usual = 443 if target.tls else 80
    named, given = _authority(absolute["authority"])
    if (named, given or usual) != (host, port or usual):
        raise bad("Host and the host in the target of the request are not the same")
    rest = absolute["rest"]
    return rest if rest.startswith(b"/") else b"/" + rest


def _authority(raw: bytes) -> tuple[str, int | None]:
    """Name (lower case, no final dot; an IPv6 address without brackets) and port."""
    found = _AUTHORITY.fullmatch(raw.decode("latin-1"))
    if found is None:
        raise bad("Host is not a name with or without a port")
    port = None if found["port"] is None else int(found["port"])
    if port is not None and not 0 < port < 65536:
        raise bad("the port in Host is none")
    name = found["name"].lower()
    if name.startswith("["):
        return _address(name[1:-1]), port
    name = name.removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(0 < len(label) < 64 for label in labels):
        raise bad("Host is not a name with or without a port")
    # What ends in a number is an address for many programs, in whatever way it is written.
    return (_address(name) if _NUMBER.fullmatch(labels[-1]) else name), port


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise bad("Host is neither a name nor an address in its usual form") from None


def sent_headers(request: h11.Request) -> list[tuple[bytes, bytes]]:
    """What goes on to the server, spelled as it came. An upgrade to another HTTP is not passed on: what came after it
    could not be read. The server may answer without it."""
    raw = request.headers.raw_items()
    upgrades = [value.strip().lower() for name, value in request.headers if name == b"upgrade"]
    if not any(one.strip().startswith(_NOT_UPGRADED) for value in upgrades for one in value.split(b",")):
        return raw
    kept = []
    for name, value in raw:
        low = name.lower()
        if low in (b"upgrade", b"http2-settings"):
            continue
        if low == b"connection":
            parts = [part.strip() for part in value.split(b",")]
            value = b", ".join(part for part in parts if part.lower() not in (b"upgrade", b"http2-settings"))
            if not value:
                continue
        kept.append((name, value))
    return kept
