"""Parts that the server and the operator commands both build: data directory, database, engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

from cloche_server.core.errors import ClocheError
from cloche_server.engine.qemu.driver import QemuConfig, QemuEngine
from cloche_server.engine.qemu.probe import choose_accel, probe_qemu
from cloche_server.host import machine as host_machine
from cloche_server.settings import Settings
from cloche_server.storage.kernel import find_kernel
from cloche_server.store.db import Database


async def build_engine(settings: Settings) -> tuple[QemuEngine, str]:
    """The engine, and the sentence that says why it has this acceleration. Raises `host.unsupported`."""
    if host_machine.architecture() != "x86_64":
        raise ClocheError("host.unsupported", f"{host_machine.architecture()} hosts are not supported yet, only x86_64")
    facts = await probe_qemu(settings.qemu)
    kernel = await asyncio.to_thread(find_kernel, settings.data)
    accel, reason = await choose_accel(settings.accel, facts, kernel.vmlinuz if kernel else None)
    return QemuEngine(QemuConfig(facts, accel, settings.tcg_buffer_mb)), reason


def prepare_data(data: Path) -> None:
    """The data directory and its parts. Only root may look in: it holds everybody's files.

    Raises `host.unsupported`.
    """
    try:
        for part in ("", "templates", "images", "kernels", "sandboxes", "layers", "snapshots", "boot", "zeros", "run"):
            (data / part).mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(data / "run", os.W_OK):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    except OSError as error:
        raise ClocheError(
            "host.unsupported", f"the data directory {data} cannot be used ({error.strerror}); choose another --data"
        ) from error


@contextlib.asynccontextmanager
async def open_database(data: Path) -> AsyncIterator[Database]:
    database = Database(data / "cloche.db")
    await database.open()
    try:
        yield database
    finally:
        await database.close()
