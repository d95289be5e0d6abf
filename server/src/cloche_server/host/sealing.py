"""Encryption of what is kept in the database, with a key that is kept beside it in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloche_server.host.clock import random_bytes
from cloche_server.host.files import write_atomic

KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
#: Of the form of what is sealed, so that another one may follow.
_FORM: Final = b"\x01"
_KEY_TEXT: Final = re.compile(rb"[0-9a-f]{64}\s*")


class SealBroken(Exception):
    """Sealed with another key, for another purpose, or damaged."""


class Sealer:
    """AES-256-GCM. `purpose` is bound to what is sealed: it cannot be passed off for anything else."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, plain: bytes, purpose: bytes) -> bytes:
        nonce = random_bytes(_NONCE_BYTES)
        return _FORM + nonce + self._cipher.encrypt(nonce, plain, _FORM + purpose)

    def open(self, sealed: bytes, purpose: bytes) -> bytes:
        """Raises `SealBroken`."""
        if sealed[:1] != _FORM:
            raise SealBroken
        nonce, rest = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, rest, _FORM + purpose)
        except (InvalidTag, ValueError):
            raise SealBroken from None


def read_key(path: Path) -> bytes | None:
    """The key in a file: 64 hexadecimal digits, or 32 bytes as they are. None: there is no such file. Raises OSError;
    ValueError for anything else."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if _KEY_TEXT.fullmatch(raw):
        return bytes.fromhex(raw.decode("ascii"))
    if len(raw) == KEY_BYTES:
        return raw
    raise ValueError("the file is not a key: 64 hexadecimal digits, or 32 bytes")


def make_key(path: Path) -> bytes:
    """A new key, safely on the disk when this returns, for nobody else to read. Raises `ClocheError`."""
    key = random_bytes(KEY_BYTES)
    write_atomic(path, key.hex() + "\n", mode=0o600)
    return key
