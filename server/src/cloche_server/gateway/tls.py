"""Certificates of the gateway: files that are read again when they change, and others chosen by the client's SNI."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.host.certificates import KeyPair, server_context
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


class ByName:
    """`context` goes to the listener. `usual` is for all names without a certificate of their own, and None: then a
    client that wants such a name is told that it is unknown, and one that names none gets that of `base`."""

    def __init__(self, usual: ssl.SSLContext | None, base: str, protocols: tuple[str, ...]) -> None:
        self._usual = usual
        self._base = base
        self._protocols = list(protocols)
        self._contexts: dict[str, ssl.SSLContext] = {}
        self.context = usual if usual is not None else ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(self._protocols)
        self.context.sni_callback = self._choose

    async def put(self, name: str, pair: KeyPair | None) -> None:
        """From now on new connections get this one for the name (`*.` in front: for all one level below), or none.

        Raises OSError, ValueError when it is none; what was shown before then stays."""
        if pair is None:
            self._contexts.pop(name, None)
            return
        context = await asyncio.to_thread(server_context, pair)
        context.set_alpn_protocols(self._protocols)
        self._contexts[name] = context

    def find(self, name: str | None) -> ssl.SSLContext | None:
        """What a client that wants this name gets; None: the usual one, or nothing."""
        if name is None:
            return self._contexts.get(self._base) if self._usual is None else None
        wanted = name.lower().removesuffix(".")
        _, _, above = wanted.partition(".")
        return self._contexts.get(wanted) or self._contexts.get(f"*.{above}")

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        found = self.find(name)
        if found is not None:
            connection.context = found
        elif self._usual is None and name is not None:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        return None
