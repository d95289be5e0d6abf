"""The certificate of the gateway: files that are read again when they change, without a restart."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.telemetry import log

_log = log.get("tls")
LOOK_SECONDS: Final = 5.0


class Certificate:
    """`context` goes to the listener; connections that exist keep the certificate they have begun with."""

    def __init__(self, cert: Path, key: Path, protocols: tuple[str, ...]) -> None:
        """Raises `host.unsupported` when the files are no certificate and its key."""
        self._cert = cert
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(list(protocols))
        self._seen = self._state()
        try:
            self.context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise ClocheError(
                "host.unsupported", f"the certificate {cert} with the key {key} cannot be used: {error}"
            ) from error

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self._cert, self._key):
            try:
                status = path.stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)

    def look(self) -> bool:
        """Reads the files again when they have changed; True then. What cannot be used leaves all as it was."""
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        try:
            # Into a context of its own first: a key that does not fit would leave the real one in between.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key)
            self.context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            _log.error("certificate.unusable", path=str(self._cert), error=str(error))
            return False
        _log.info("certificate.read", path=str(self._cert))
        return True

    async def watch(self) -> None:
        """Looks every few seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.look)
