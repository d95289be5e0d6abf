"""What a webhook is: its record, its signature, its retries, and where it may point. No I/O.

Signatures follow Standard Webhooks 1.0.0 (https://www.standardwebhooks.com, "Signature scheme", symmetric): the
HMAC-SHA256 of `<webhook-id>.<webhook-timestamp>.<body>` under the base64-decoded part of the secret after `whsec_`,
sent in base64 as `webhook-signature: v1,<signature>`. The id of a message stays the same over its retries.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, urlsplit

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - the name of a prefix
SECRET_BYTES: Final = 32
MAX_PER_WORKSPACE: Final = 50
MAX_URL: Final = 2048
#: Between the first failure and the next attempt, and between later ones (seconds).
FIRST_DELAY: Final = 5.0
LONGEST_DELAY: Final = 3600.0
#: An event that could not be delivered for so long is given up (seconds).
GIVE_UP_AFTER: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Webhook:
    """Times are Unix seconds. `position`: the id of the last event that is done with; `failing_since`: the first failed
    attempt to deliver the present one; `failures`: in a row."""

    id: str
    workspace: str
    url: str
    secret: str = field(repr=False)
    created_at: float
    position: int
    types: tuple[str, ...] = ()
    sandbox_id: str | None = None
    description: str | None = None
    enabled: bool = True
    disabled_reason: str | None = None
    failures: int = 0
    failing_since: float | None = None
    last_success_at: float | None = None
    last_attempt_at: float | None = None
    last_error: str | None = None
    delivered: int = 0
    given_up: int = 0
    missed: int = 0


def secret_from_random(random: bytes) -> str:
    """`whsec_` and 32 random bytes in base64."""
    return SECRET_PREFIX + base64.b64encode(random[:SECRET_BYTES]).decode("ascii")


def signed_headers(secret: str, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers that prove where a message comes from."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    digest = hmac.digest(key, f"{message_id}.{timestamp}.".encode("ascii") + body, hashlib.sha256)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": "v1," + base64.b64encode(digest).decode("ascii"),
    }


def delay(failures: int, random: float) -> float:
    """Seconds until the next attempt after so many failures in a row; `random` is between 0 and 1, so that those who
    fail together do not come back together."""
    most = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(failures - 1, 32))
    return most * (1.0 - 0.25 * random)


def check_url(url: str, *, private: bool) -> SplitResult:
    """Raises ValueError with a sentence. Names are checked again when they are resolved, each time."""
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("the URL may hold printable ASCII only; encode the rest")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("the URL cannot be understood") from None
    if parts.scheme not in {"http", "https"} or not host:
        raise ValueError("the URL must begin with http:// or https:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the URL must not hold a user or a password; what arrives is signed")
    if parts.fragment or url.endswith("#"):
        raise ValueError("the URL must not have a fragment")
    if not private and not _may_be_public(host):
        raise ValueError(NOT_PUBLIC)
    return parts


NOT_PUBLIC: Final = (
    "the address of the receiver is not a public one; the setting webhook_private of the server would allow it"
)


def _may_be_public(host: str) -> bool:
    try:
        return is_public(host)
    except ValueError:  # a name
        name = host.rstrip(".").lower()
        return name != "localhost" and not name.endswith(".localhost")


_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, also in what it embeds: not loopback, private, link-local,
    multicast, reserved. Raises ValueError for what is no address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is None and (found.teredo is not None or found.is_site_local):
            return False
        if inner is not None:
            found = inner
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)
