"""Public keys that open sandboxes over SSH: what is taken, and how one is named. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Final

from cloche_server.core.errors import ClocheError

#: Keys of one workspace.
MAX_KEYS: Final = 500
#: Characters of a key in text, and of its comment.
MAX_TEXT: Final = 16 * 1024
MAX_COMMENT: Final = 256
#: RSA keys that are shorter can be broken.
MIN_RSA_BITS: Final = 2048
KINDS: Final = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
    "ssh-rsa",
)


@dataclass(frozen=True, slots=True)
class SshKey:
    """A key that is accepted. `sandbox_id`: the only sandbox it opens. `fingerprint` as `ssh-keygen -l` shows it."""

    id: str
    workspace: str
    sandbox_id: str | None
    kind: str
    public_key: str
    fingerprint: str
    comment: str
    created_at: float
    expires_at: float | None = None

    def ended(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A line of an `authorized_keys` file or a `.pub` file; `text` is kind and key without the comment."""

    kind: str
    text: str
    fingerprint: str
    comment: str


def fingerprint_of(blob: bytes) -> str:
    """Names a key by its binary form."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def parse_key(text: str) -> ParsedKey:
    """Reads one public key. Raises `request.invalid` with a sentence that says what is wrong with it."""
    if "PRIVATE KEY" in text:
        raise _invalid("this is a private key, which must not leave its machine; send the file that ends in .pub")
    if len(text) > MAX_TEXT or any(c in text.strip() for c in "\r\n\0"):
        raise _invalid("want one public key in one line, as in a file that ends in .pub")
    kind, _, rest = text.strip().partition(" ")
    encoded, _, comment = rest.strip().partition(" ")
    if kind not in KINDS:
        raise _invalid(f"want a key of one of these kinds, as in a file that ends in .pub: {', '.join(KINDS)}")
    try:
        blob = base64.b64decode(encoded, validate=True)
        parts = _strings(blob)
    except (binascii.Error, ValueError):
        raise _invalid("the key is damaged: its second word is no base64 of a key") from None
    if not parts or parts[0] != kind.encode() or len(parts) < 2:
        raise _invalid("the key is damaged: its two words are not of the same kind")
    if kind == "ssh-rsa" and (len(parts) != 3 or int.from_bytes(parts[2], "big").bit_length() < MIN_RSA_BITS):
        raise _invalid(f"RSA keys have to have at least {MIN_RSA_BITS} bits; an ed25519 key is the better choice")
    return ParsedKey(kind, f"{kind} {encoded}", fingerprint_of(blob), _shown(comment))


def _strings(blob: bytes) -> list[bytes]:
    """The parts of a key. Raises ValueError. What an authenticator adds counts as parts too."""
    parts = []
    at = 0
    while at < len(blob):
        size = int.from_bytes(blob[at : at + 4], "big")
        at += 4 + size
        if at > len(blob):
            raise ValueError("cut short")
        parts.append(blob[at - size : at])
    return parts


def _shown(comment: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in comment.strip())[:MAX_COMMENT]


def _invalid(sentence: str) -> ClocheError:
    return ClocheError("request.invalid", sentence, details={"field": "public_key"})
