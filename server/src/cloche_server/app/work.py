"""Long work on threads and in staging directories, which a caller may leave at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from cloche_server.app.steps import to_the_end
from cloche_server.host import files

_T = TypeVar("_T")


@contextlib.asynccontextmanager
async def staging(parent: Path) -> AsyncIterator[Path]:
    """`files.staging` off the event loop; its removal runs to the end whatever happens."""
    manager = files.staging(parent)
    entered: list[Path] = []
    try:
        await to_the_end(asyncio.to_thread(lambda: entered.append(manager.__enter__())))
        yield entered[0]
    finally:
        if entered:
            await to_the_end(asyncio.to_thread(manager.__exit__, None, None, None))


async def on_thread(function: Callable[[threading.Event], _T]) -> _T:
    """The result of `function` on a thread. When the caller is cancelled, the event it is given is set, and it has
    ended when this returns."""
    stop = threading.Event()
    task = asyncio.ensure_future(asyncio.to_thread(function, stop))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await to_the_end(asyncio.wait({task}))
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller gets
        raise
