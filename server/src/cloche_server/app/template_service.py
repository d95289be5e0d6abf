"""What a template has of its own: the service that lives in its snapshot, and the commands that warm it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Furnishing
from cloche_server.guest.client import GuestClient
from cloche_server.guest.frames import Exit
from cloche_server.guest.types import ExecRequest
from cloche_server.host.clock import random_bytes

#: A service has so many seconds until it listens: it starts in a machine that has just booted, perhaps emulated.
READY_SECONDS: Final = 300.0
WARM_SECONDS: Final = 300.0
_POLL: Final = 0.2
_DIAL_SECONDS: Final = 15.0


async def furnish(
    guest: GuestClient, furnishing: Furnishing, env: Mapping[str, str], progress: Callable[[str], None]
) -> None:
    """Before the snapshot. Raises `template.bake_failed` when the service does not come up or a command fails."""
    if furnishing.service:
        progress(f"starting the service {furnishing.service[0]}")
        await start_service(guest, furnishing.service, env)
        await wait_ready(guest, furnishing, READY_SECONDS)
    for argv in furnishing.warm:
        progress(f"running {argv[0]} before the snapshot")
        code = await _run(guest, argv, env)
        if code:
            raise ClocheError(
                "template.bake_failed",
                f"the command {argv[0]} of the recipe ended with {code}",
                details={"argv": list(argv), "exit_code": code},
            )


async def start_service(guest: GuestClient, argv: tuple[str, ...], env: Mapping[str, str]) -> None:
    """A command of its own that outlives every call. Returns when it has been started."""
    request = ExecRequest(id="service-" + random_bytes(4).hex(), argv=argv, env=dict(env), detach=True)
    async with guest.exec(request) as call:
        if call.started.pid == 0:
            raise ClocheError(
                "template.bake_failed", f"the service {argv[0]} could not be started", details={"argv": list(argv)}
            )


async def service_answers(guest: GuestClient, furnishing: Furnishing) -> None:
    """Whether the service of a restored machine is there. Raises `template.bake_failed`."""
    if furnishing.service:
        await wait_ready(guest, furnishing, _DIAL_SECONDS)


async def wait_ready(guest: GuestClient, furnishing: Furnishing, seconds: float) -> None:
    """Raises `template.bake_failed` when nothing listens on the port of the service in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                if await listens(guest, furnishing.service_port):
                    return
                await asyncio.sleep(_POLL)
    raise ClocheError(
        "template.bake_failed",
        f"the service {furnishing.service[0]} has not listened on port {furnishing.service_port} "
        f"within {seconds:g} seconds",
        details={"argv": list(furnishing.service), "port": furnishing.service_port},
    )


async def listens(guest: GuestClient, port: int) -> bool:
    """Whether something takes connections to a port of the guest."""
    try:
        stream = await guest.tunnel(port, timeout=_DIAL_SECONDS)
    except ClocheError as error:
        if error.code not in {"port.closed", "port.timeout"}:
            raise
        return False
    stream.close()
    return True


async def _run(guest: GuestClient, argv: tuple[str, ...], env: Mapping[str, str]) -> int:
    request = ExecRequest(
        id="warm-" + random_bytes(4).hex(), argv=argv, env=dict(env), timeout_ms=round(WARM_SECONDS * 1000)
    )
    async with guest.exec(request) as call:
        async for frame in call:
            if isinstance(frame, Exit):
                return frame.exit_code
    return 0
