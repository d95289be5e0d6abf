"""Ports of sandboxes that are reached from outside: what is said about them, their names, and signed tokens."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import quote, unquote, unquote_to_bytes

from cloche_server.core.code import CODE_PORT
from cloche_server.core.ids import is_sandbox_id

MAX_PORT: Final = 65535
#: Nobody serves HTTP there, and existing clients take it for the platform's own.
RESERVED_PORTS: Final = frozenset({22, CODE_PORT})
TOKEN_SECONDS: Final = 3600  # when the caller names none
MAX_TOKEN_SECONDS: Final = 7 * 86400
MAX_PATHS: Final = 32
MAX_PATH: Final = 512
#: Cookie, header and query parameter that carry a token; none is ever passed on to a guest.
COOKIE: Final = "cloche_preview"
TOKEN_HEADER: Final = "X-Preview-Token"  # noqa: S105 - a name
TOKEN_QUERY: Final = "preview_token"  # noqa: S105 - a name
_LABEL: Final = re.compile(r"([1-9][0-9]{0,4})-([a-z0-9]{8,56})")
_PART: Final = re.compile(r"[A-Za-z0-9_-]+")
_DOMAIN: Final = re.compile(
    r"(?=.{1,253}$)(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
)


class PortAccess(StrEnum):
    PUBLIC = "public"  # whoever knows the id
    TOKEN = "token"  # noqa: S105 - a preview token, or a token of the API
    BASIC = "basic"  # name and password


class HostRule(StrEnum):
    """Which Host a server in the guest sees."""

    PUBLIC = "public"  # that of the client
    LOCALHOST = "localhost"  # `localhost:<port>`, for servers that check it


@dataclass(frozen=True, slots=True)
class PortRule:
    """What was said about a port of a sandbox. `password` is a hash, see `hash_password`."""

    sandbox_id: str
    workspace: str
    port: int
    access: PortAccess
    label: str | None = None
    domain: str | None = None
    username: str | None = None
    password: str | None = None
    host: HostRule = HostRule.PUBLIC
    created_at: float = 0.0

    def admits_like(self, other: PortRule) -> bool:
        """Whether whoever may come in by the one may by the other."""
        mine = (self.access, self.domain, self.username, self.password)
        return mine == (other.access, other.domain, other.username, other.password)


@dataclass(frozen=True, slots=True)
class PreviewToken:
    """Opens one port of one sandbox until `expires_at` (Unix seconds); with `paths` only what begins with one."""

    sandbox_id: str
    port: int
    expires_at: int
    workspace: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreviewBase:
    """Under which names previews are reached. `port` None: that of the scheme."""

    scheme: str
    domain: str
    port: int | None = None

    @property
    def authority(self) -> str:
        return self.domain if self.port is None else f"{self.domain}:{self.port}"

    def host_url(self, sandbox_id: str, port: int) -> str:
        return f"{self.scheme}://{port}-{sandbox_id}.{self.authority}"

    def domain_url(self, domain: str) -> str:
        return f"{self.scheme}://{domain}" + ("" if self.port is None else f":{self.port}")

    def token_url(self, token: str) -> str:
        return f"{self.scheme}://{self.authority}/v1/p/{token}/"


def is_port(port: int) -> bool:
    return 1 <= port <= MAX_PORT


def parse_label(label: str) -> tuple[str, int] | None:
    """`3000-abc…` as sandbox id and port."""
    found = _LABEL.fullmatch(label)
    if found is None or not is_port(int(found[1])) or not is_sandbox_id(found[2]):
        return None
    return found[2], int(found[1])


def split_host(host: str, domain: str) -> tuple[str, int] | None:
    """Sandbox and port of a Host header (its port is ignored), when it is a name below `domain`."""
    name = bare_host(host)
    label, _, rest = name.partition(".")
    return parse_label(label) if rest == domain else None


def bare_host(host: str) -> str:
    """A Host header in lower case, without its port and a final dot."""
    name, colon, port = host.rpartition(":")
    if not colon or (port and not port.isdigit()):
        name = host
    return name.lower().removesuffix(".")


def is_domain(text: str) -> bool:
    return _DOMAIN.fullmatch(text) is not None and not text.rsplit(".", 1)[-1].isdigit()


# ------------------------------------------------------------------ tokens


def mint(key: bytes, token: PreviewToken) -> str:
    """base64url(payload).base64url(HMAC-SHA256)"""
    fields = [token.sandbox_id, str(token.port), str(token.expires_at), quote(token.workspace, safe="")]
    payload = "|".join([*fields, *(quote(path, safe="/") for path in token.paths)]).encode("ascii")
    return f"{_encode(payload)}.{_encode(_sign(key, payload))}"


def read_token(key: bytes, text: str, now: float) -> PreviewToken | None:
    """None when it is not one of ours, or has expired."""
    parts = text.split(".")
    if len(text) > 16384 or len(parts) != 2 or not all(_PART.fullmatch(part) for part in parts):
        return None
    try:
        payload, signature = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in parts)
    except (binascii.Error, ValueError):
        return None
    if not hmac.compare_digest(_sign(key, payload), signature):
        return None
    sandbox_id, port, expires, workspace, *paths = payload.decode("ascii").split("|")
    found = PreviewToken(sandbox_id, int(port), int(expires), unquote(workspace), tuple(unquote(p) for p in paths))
    return found if found.expires_at > now else None


def looks_like_token(text: str) -> bool:
    """Whether it has the form of a preview token of this server or another one."""
    payload, dot, signature = text.partition(".")
    return bool(dot) and len(signature) == 43 and bool(_PART.fullmatch(payload)) and bool(_PART.fullmatch(signature))


def path_allowed(paths: tuple[str, ...], target: bytes) -> bool:
    """Whether `target`, as it was sent, lies below one of the prefixes, however the guest may read it."""
    if not paths:
        return True
    path = unquote_to_bytes(target.partition(b"?")[0])
    if any(part in {b".", b".."} for part in re.split(rb"[/\\]", path)) or b"%" in path or b"//" in path:
        return False
    for prefix in paths:
        raw = prefix.encode()
        if path == raw or path.startswith(raw if raw.endswith(b"/") else raw + b"/"):
            return True
    return False


def _sign(key: bytes, payload: bytes) -> bytes:
    return hmac.new(key, b"preview\0" + payload, hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


# ------------------------------------------------------------------ passwords


def hash_password(password: str, salt: bytes) -> str:
    """Slow on purpose (tens of milliseconds)."""
    return f"{salt.hex()}${_scrypt(password, salt).hex()}"


def check_password(stored: str, password: str) -> bool:
    salt, _, hashed = stored.partition("$")
    return hmac.compare_digest(_scrypt(password, bytes.fromhex(salt)), bytes.fromhex(hashed))


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode("utf-8", "surrogatepass"), salt=salt, n=2**13, r=8, p=1, dklen=32)
