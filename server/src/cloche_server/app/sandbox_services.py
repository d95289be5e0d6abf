"""Services of sandboxes: define, list, start, stop, wait, read. What they are is docs/services.md.

The agent keeps them; nothing of them is kept here. What it tells is shown, and decides nothing on this side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry
from cloche_server.app.exec import laid_out, lost
from cloche_server.app.process_output import ProcessStream
from cloche_server.core.command import check_size
from cloche_server.core.errors import ClocheError
from cloche_server.core.services import DEFINITION_MAX, GRACE_MAX, SERVICES_MAX, ServiceSpec
from cloche_server.guest.caller import to_json
from cloche_server.guest.client import GuestClient
from cloche_server.guest.services import GuestService, is_service_name, to_body

#: States that last.
SETTLED: Final = ("healthy", "unhealthy", "stopped", "failed")
#: A wait is cut into pieces, so that a guest that has gone is noticed (seconds).
WAIT_PIECE: Final = 20.0
#: How long a service may take to end, and somewhat more.
STOP_SECONDS: Final = GRACE_MAX + 30.0


class SandboxServices:
    """Errors of every method: those of `Access.serving`, and `service.not_found` where it is about one."""

    #: Told of a sandbox that has got a service; set once, by what listens to them.
    on_defined: Callable[[Entry], None] | None = None

    def __init__(self, access: Access) -> None:
        self._access = access

    async def put(self, workspace: str, sandbox_id: str, name: str, spec: ServiceSpec) -> tuple[GuestService, bool]:
        """Defines a service, and starts it unless it is not to be started by itself. One that was defined otherwise is
        stopped first; the same definition changes nothing. True: it is new. Raises `service.conflict`,
        `service.too_many`, `request.invalid`, `exec.too_large`, `file.no_space`."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        spec = placed(entry, name, spec)
        self._access.count_exec(entry)
        with self._access.busy(entry):
            try:
                return await guest.service_put(name, spec, timeout=STOP_SECONDS)
            except ClocheError as error:
                raise await lost(entry, error) from error
            finally:
                if self.on_defined is not None:
                    self.on_defined(entry)

    async def list_all(self, workspace: str, sandbox_id: str) -> list[GuestService]:
        """All of them, by name."""
        _, guest = await self._access.serving(workspace, sandbox_id)
        return await guest.services()

    async def get(self, workspace: str, sandbox_id: str, name: str) -> GuestService:
        _, guest = await self._access.serving(workspace, sandbox_id)
        return await guest.service(name)

    async def act(self, workspace: str, sandbox_id: str, name: str, verb: str) -> GuestService:
        """`start`, `stop` or `restart`. A start brings up what it depends on; it does not wait until it is healthy."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        if verb != "stop":
            self._access.count_exec(entry)
        with self._access.busy(entry):
            try:
                return await guest.service_do(name, verb, timeout=STOP_SECONDS)
            except ClocheError as error:
                raise await lost(entry, error) from error

    async def wait(
        self, workspace: str, sandbox_id: str, name: str, states: Sequence[str], seconds: float
    ) -> GuestService:
        """As `get`, but once it is in one of these states, or after so long."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        found = await guest.service(name)
        left = seconds
        with self._access.busy(entry):
            while found.state not in states and left > 0:
                piece = min(left, WAIT_PIECE)
                left -= piece
                try:
                    found = await guest.service_wait(name, states, piece)
                except ClocheError as error:
                    raise await lost(entry, error) from error
        return found

    async def settle(self, workspace: str, sandbox_id: str, names: Sequence[str], seconds: float) -> list[GuestService]:
        """These, each behind what it depends on, once they are healthy or have done their work; sooner when one has
        failed, or after so long."""
        _, guest = await self._access.serving(workspace, sandbox_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        for name in names if seconds else ():
            left = max(0.0, deadline - loop.time())
            found = await self.wait(workspace, sandbox_id, name, SETTLED, left)
            if found.state not in {"healthy", "stopped"}:
                break
        return [one for one in await guest.services() if one.name in names]

    async def remove(self, workspace: str, sandbox_id: str, name: str) -> None:
        """Stops and forgets it. Raises `service.conflict`: another one depends on it."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        with self._access.busy(entry):
            try:
                await guest.service_remove(name, timeout=STOP_SECONDS)
            except ClocheError as error:
                raise await lost(entry, error) from error

    async def output(
        self, workspace: str, sandbox_id: str, name: str, offset: int, *, until: int | None
    ) -> ProcessStream:
        """Its log from an offset on, across its runs; to the offset `until`, or until it is removed. Whoever calls
        closes it."""
        entry, guest = await self._access.serving(workspace, sandbox_id)
        call = guest.service_output(name, offset)
        try:
            await call.__aenter__()
        except ClocheError as error:
            raise await lost(entry, error) from error
        return ProcessStream(entry, call, self._access, None, offset, "utf-8", until)


def placed(entry: Entry, name: str, spec: ServiceSpec) -> ServiceSpec:
    """The definition with what the sandbox says of environment, directory and user. Raises `exec.too_large`."""
    given = laid_out(entry, spec.shell, spec.argv, spec.env, spec.cwd, spec.user)
    if spec.health is not None:
        check_size(spec.health.argv, spec.health.shell, {})
    spec = replace(spec, **given)
    if len(to_json(to_body(name, spec))) > DEFINITION_MAX:
        raise ClocheError(
            "exec.too_large",
            f"the definition of a service has at most {DEFINITION_MAX} bytes, its environment included",
            details={"limit_bytes": DEFINITION_MAX},
        )
    return spec


async def define_all(entry: Entry, guest: GuestClient, services: Sequence[tuple[str, ServiceSpec]]) -> None:
    """Of a sandbox that is being created: each comes behind what it depends on. Raises as `put`."""
    entry.has_services = bool(services)
    for name, spec in services:
        entry.traffic.execs += 1
        await guest.service_put(name, placed(entry, name, spec), timeout=STOP_SECONDS)


def check_names(names: Sequence[str], name: str) -> None:
    """Of what a service depends on. Raises `request.invalid`."""
    for one in names:
        if not is_service_name(one) or one == name or len(names) >= SERVICES_MAX:
            raise ClocheError(
                "request.invalid",
                "depends_on must name other services of the sandbox",
                details={"field": "depends_on"},
            )
