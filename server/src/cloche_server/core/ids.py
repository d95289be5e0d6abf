"""Identifiers and tokens: how they look and how they are checked. Randomness is passed in."""

from __future__ import annotations

import hashlib
import re
from typing import Final

_ALPHABET: Final = "0123456789abcdefghijkmnpqrstuvwxyz"  # no l and o: ids are read aloud
SANDBOX_ID_LENGTH: Final = 20
_SANDBOX_ID: Final = re.compile(r"[a-z0-9]{8,56}")
_EXEC_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_TEMPLATE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_TOKEN: Final = re.compile(r"pds_[0-9a-f]{32}")
TOKEN_RANDOM_BYTES: Final = 16


def id_from_random(random: bytes) -> str:
    """A sandbox id from 16 random bytes (about 100 bits are used; ids are unguessable)."""
    number = int.from_bytes(random, "big")
    digits = []
    for _ in range(SANDBOX_ID_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def is_sandbox_id(text: str) -> bool:
    return _SANDBOX_ID.fullmatch(text) is not None


def is_exec_id(text: str) -> bool:
    return _EXEC_ID.fullmatch(text) is not None


def is_template_name(text: str) -> bool:
    return _TEMPLATE_NAME.fullmatch(text) is not None


def token_from_random(random: bytes) -> str:
    """The plain text of an API token: `pds_` and 32 hex digits from 16 random bytes."""
    return "pds_" + random[:TOKEN_RANDOM_BYTES].hex()


def is_token(text: str) -> bool:
    return _TOKEN.fullmatch(text) is not None


def token_hash(token: str) -> str:
    """What is stored of a token. 128 random bits need no salt and no slow hash."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def token_prefix(token: str) -> str:
    """The part of a token that may be shown: names it, does not open anything."""
    return token[:12]
