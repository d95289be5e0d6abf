"""Signed links to one file of a sandbox: what they are good for, and the token that says it. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

#: Seconds; the longest, and when the caller names none.
MAX_SECONDS: Final = 7 * 86400
SECONDS: Final = 3600
#: Where links lead: the token follows.
PREFIX: Final = "/v1/f/"
_PART: Final = re.compile(r"[A-Za-z0-9_-]+")
_MAX_TOKEN: Final = 16384


@dataclass(frozen=True, slots=True)
class FileLink:
    """Opens `path` of one sandbox for one `method` (GET or PUT) until `expires_at` (Unix seconds). `user`: whose rights
    apply; `max_bytes` of an upload, 0 for no limit."""

    sandbox_id: str
    workspace: str
    method: str
    path: bytes
    expires_at: int
    user: str = ""
    max_bytes: int = 0


def mint(key: bytes, link: FileLink) -> str:
    """base64url(payload).base64url(HMAC-SHA256)"""
    fields = [link.sandbox_id, quote(link.workspace, safe=""), link.method, str(link.expires_at)]
    fields += [str(link.max_bytes), quote(link.user, safe=""), quote(link.path, safe="/")]
    payload = "|".join(fields).encode("ascii")
    return f"{_encode(payload)}.{_encode(_sign(key, payload))}"


def read(key: bytes, text: str, now: float) -> FileLink | None:
    """None when it is not one of ours, or has expired."""
    parts = text.split(".")
    if len(text) > _MAX_TOKEN or len(parts) != 2 or not all(_PART.fullmatch(part) for part in parts):
        return None
    try:
        payload, signature = (base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in parts)
    except (binascii.Error, ValueError):
        return None
    # The text itself is compared as well: base64 has more than one form of the same bytes.
    if not hmac.compare_digest(_sign(key, payload), signature) or [_encode(payload), _encode(signature)] != parts:
        return None
    sandbox_id, workspace, method, expires, most, user, path = payload.decode("ascii").split("|")
    found = FileLink(
        sandbox_id, unquote(workspace), method, _raw(path), int(expires), unquote(user), int(most)
    )  # fmt: skip
    return found if found.expires_at > now else None


def _raw(path: str) -> bytes:
    return unquote(path, encoding="latin-1").encode("latin-1")


def _sign(key: bytes, payload: bytes) -> bytes:
    # Another beginning than that of preview tokens, which the same key signs.
    return hmac.new(key, b"file\0" + payload, hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")
