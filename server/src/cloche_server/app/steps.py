"""Long operations as lists of named steps with undo.

Steps run in order, each with its own deadline. When one fails, or the operation is cancelled, the
undo of every step that had begun runs in reverse order, to its end, whatever else happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cloche_server.core.errors import ClocheError
from cloche_server.telemetry import log

_log = log.get("steps")

UNDO_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Step:
    """`undo` must be idempotent and safe after a `do` that came only half-way. Deadline in seconds."""

    name: str
    do: Callable[[], Awaitable[None]]
    undo: Callable[[], Awaitable[None]] | None = None
    deadline: float = 60.0


async def run_steps(operation: str, steps: Sequence[Step]) -> dict[str, float]:
    """Runs all steps; the milliseconds each took. A deadline that passes raises `sandbox.boot_failed`."""
    took: dict[str, float] = {}
    begun: list[Step] = []
    try:
        for step in steps:
            begun.append(step)
            start = time.perf_counter()
            try:
                async with asyncio.timeout(step.deadline):
                    await step.do()
            except TimeoutError:
                raise ClocheError(
                    "sandbox.boot_failed",
                    f"{operation} stopped: {step.name} took longer than {step.deadline:g} s",
                ) from None
            except OSError as error:
                raise _of_host(operation, error) from error
            took[step.name] = round((time.perf_counter() - start) * 1000, 2)
    except BaseException:
        await to_the_end(undo_steps(operation, begun))
        raise
    return took


def _of_host(operation: str, error: OSError) -> ClocheError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ClocheError("host.disk_full", f"{operation} stopped: the disk of the host is full")
    if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}:
        what = error.strerror or "out of resources"
        return ClocheError(
            "capacity.unavailable",
            f"{operation} stopped: the host is at a limit ({what}); try again later",
            retry_after=5,
        )
    return ClocheError("internal", f"{operation} stopped: {error.strerror or 'an operation of the host failed'}")


async def to_the_end(work: Awaitable[Any]) -> None:
    """Runs `work` to its end even when the caller is cancelled meanwhile; the cancellation follows then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller gets
        raise cancelled
    task.result()


async def undo_steps(operation: str, begun: Sequence[Step]) -> None:
    """Runs the undo of `begun`, last first. A failing undo is logged, and the others still run."""
    for step in reversed(begun):
        if step.undo is None:
            continue
        try:
            async with asyncio.timeout(UNDO_TIMEOUT):
                await step.undo()
        except Exception as error:  # noqa: BLE001 - whatever it is, what the other steps made must go
            _log.error("undo.failed", operation=operation, step=step.name, error=str(error) or type(error).__name__)


def is_cancelled() -> bool:
    """Whether it is this task that is cancelled, and not something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def told_as_boot_failure() -> Iterator[None]:
    """A caller who has no sandbox yet is not told of one that does not answer."""
    try:
        yield
    except ClocheError as error:
        if error.code not in {"sandbox.unreachable", "guest.protocol"}:
            raise
        raise ClocheError("sandbox.boot_failed", f"the sandbox could not be started: {error.message}") from error
