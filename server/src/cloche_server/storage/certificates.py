"""Certificates of previews on disk, with the key of the account and the ledger of orders.

`<data>/acme/<place>/` belongs to one authority: `account.key`, `ledger.json`, and below `certificates/` one file for
each name, the private key first and the chain after it, so that both always fit. All are 0600. All functions block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from cloche_server.core.acme import Ledger, Order, Trouble, place, stem
from cloche_server.core.errors import ClocheError
from cloche_server.host import files
from cloche_server.host.certificates import KeyPair
from cloche_server.telemetry import log

_log = log.get("certificates")

FOLDER: Final = "acme"
_END_OF_KEY: Final = b"-----END PRIVATE KEY-----\n"
_NAME: Final = b"# "


@dataclass(frozen=True, slots=True)
class Kept:
    """A certificate with its key, and the name it is kept for."""

    name: str
    pair: KeyPair


class CertificateFiles:
    """Those of the authority with this directory."""

    def __init__(self, data: Path, directory: str) -> None:
        self.folder = data / FOLDER / place(directory)
        self._directory = directory
        self._certificates = self.folder / "certificates"

    def prepare(self) -> None:
        """Raises `host.unsupported`."""
        try:
            self._certificates.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ClocheError(
                "host.unsupported", f"certificates cannot be kept in {self.folder} ({error.strerror})"
            ) from error

    # ---------------------------------------------------------------- account

    def account(self) -> bytes | None:
        try:
            return (self.folder / "account.key").read_bytes()
        except FileNotFoundError:
            return None

    def keep_account(self, pem: bytes) -> None:
        files.write_atomic(self.folder / "account.key", pem, 0o600)

    # ---------------------------------------------------------------- ledger

    def ledger(self) -> Ledger:
        """What cannot be read is as if there were none: then it is logged, and the limits of the authority hold."""
        path = self.folder / "ledger.json"
        try:
            return _ledger(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return Ledger()
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error("certificates.ledger_unreadable", path=str(path), error=repr(error))
            return Ledger()

    def keep_ledger(self, ledger: Ledger) -> None:
        told = {
            "directory": self._directory,
            "orders": [asdict(order) for order in ledger.orders],
            "troubles": {name: asdict(trouble) for name, trouble in ledger.troubles.items()},
            "pause": None if ledger.pause is None else asdict(ledger.pause),
        }
        files.write_atomic(self.folder / "ledger.json", json.dumps(told, indent=1), 0o600)

    # ---------------------------------------------------------------- certificates

    def certificates(self) -> Iterator[Kept]:
        """All that are whole."""
        if not self._certificates.is_dir():
            return
        for path in sorted(self._certificates.glob("*.pem")):
            try:
                found = _parsed(path.read_bytes())
            except OSError as error:
                _log.error("certificates.unreadable", path=str(path), error=str(error))
                continue
            if found is None or path.name != f"{stem(found.name)}.pem":
                _log.error("certificates.unusable", path=str(path))
                continue
            yield found

    def keep(self, kept: Kept) -> None:
        """In place of the one before, if there is one."""
        content = _NAME + kept.name.encode() + b"\n" + kept.pair.key_pem + kept.pair.certificate_pem
        files.write_atomic(self._path(kept.name), content, 0o600)

    def remove(self, name: str) -> None:
        files.remove_tree(self._path(name))

    def _path(self, name: str) -> Path:
        return self._certificates / f"{stem(name)}.pem"


def _parsed(content: bytes) -> Kept | None:
    first, _, rest = content.partition(b"\n")
    key, end, chain = rest.partition(_END_OF_KEY)
    if not first.startswith(_NAME) or not end or not chain.strip():
        return None
    return Kept(first.removeprefix(_NAME).decode("utf-8", "replace"), KeyPair(chain, key + end))


def _ledger(told: dict[str, Any]) -> Ledger:
    return Ledger(
        [Order(str(one["name"]), str(one["workspace"]), float(one["at"])) for one in told["orders"]],
        {str(name): _trouble(one) for name, one in told["troubles"].items()},
        None if told["pause"] is None else _trouble(told["pause"]),
    )


def _trouble(one: dict[str, Any]) -> Trouble:
    return Trouble(int(one["failures"]), float(one["next_at"]), float(one["at"]), str(one["sentence"]))
