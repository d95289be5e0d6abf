"""How names are proven to an authority while an order is under way: by an answer over HTTP, or by a record of DNS."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.host import process
from cloche_server.host.acme import Proof, Refused
from cloche_server.telemetry import log

_log = log.get("challenges")

#: The hook may wait until all name servers have the record; what clears it has less time.
SET_SECONDS: Final = 300.0
CLEAR_SECONDS: Final = 30.0
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Challenges:
    """`hook`: a command that sets and clears TXT records, split as a shell would; empty: there is none."""

    def __init__(self, hook: str) -> None:
        self._hook = shlex.split(hook)
        self._open: dict[tuple[str, str], bytes] = {}

    def answer(self, host: str, token: str) -> bytes | None:
        """What an authority is to see, which is nothing unless it was told to look."""
        return self._open.get((host, token))

    @contextlib.asynccontextmanager
    async def present(self, proof: Proof) -> AsyncIterator[None]:
        """It is there within the block. Raises `Refused`."""
        if proof.record:
            async with self._record(proof):
                yield
            return
        self._open[proof.name, proof.token] = proof.value.encode("ascii")
        try:
            yield
        finally:
            self._open.pop((proof.name, proof.token), None)

    @contextlib.asynccontextmanager
    async def _record(self, proof: Proof) -> AsyncIterator[None]:
        try:
            try:
                await self._call("set", proof, SET_SECONDS)
            except ClocheError as error:
                said = error.details.get("output")
                last = f": {str(said[-1])[-200:]}" if isinstance(said, list) and said else ""
                raise Refused(f"the DNS hook has not set the record: {error.message}{last}", of_name=True) from None
            yield
        finally:
            try:
                await self._call("clear", proof, CLEAR_SECONDS)
            except ClocheError as error:
                _log.error("challenges.record_left", record=proof.record, error=error.message)

    async def _call(self, action: str, proof: Proof, seconds: float) -> None:
        environment = {
            "PATH": _PATH,
            "ACME_ACTION": action,
            "ACME_NAME": proof.record,
            "ACME_VALUE": proof.value,
        }
        await process.run(self._hook, timeout=seconds, env=environment, max_output=65536, term_grace=2.0)
