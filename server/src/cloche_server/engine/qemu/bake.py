"""Baking: a cold boot whose memory is a file, stopped and saved once the guest is warm."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import BootFiles
from cloche_server.core.records import Shape
from cloche_server.engine.qemu.machine import QemuMachine
from cloche_server.engine.qemu.qmp import QmpError, QmpLost
from cloche_server.host import process

if TYPE_CHECKING:
    from cloche_server.engine.qemu.driver import QemuEngine

PREPARE_TIMEOUT = 300.0


async def bake(
    engine: QemuEngine,
    template_id: str,
    boot: BootFiles,
    shape: Shape,
    directory: Path,
    work: Path,
    prepare: Callable[[Path], Awaitable[None]],
    progress: Callable[[str], None],
    nic: int | None,
) -> None:
    """Writes `mem`, `dev`, `disk.qcow2` and `overlay.qcow2` into `directory`, which exists, is empty, and will
    be renamed to `templates/<template_id>`. `work` is an empty directory for the running machine.

    `prepare(agent_socket)` makes the guest ready (waits for the agent, warms it, syncs) and must have
    closed its connection when it returns. Raises `template.bake_failed`.
    """
    size = boot.root_image.stat().st_size
    image = f"../../images/{boot.root_image.parent.name}/{boot.root_image.name}"
    await _make_overlay(directory / "disk.qcow2", backing=image, backing_format="raw", size=size)
    memory = directory / "mem"
    await asyncio.to_thread(_make_sparse, memory, shape.memory_mb)
    try:
        machine = await engine.start_cold(
            "bake-" + template_id, work, boot, shape, memory, directory / "disk.qcow2", nic=nic
        )
    except ClocheError as error:
        if error.code != "sandbox.boot_failed":
            raise
        raise ClocheError(
            "template.bake_failed", f"the template could not be baked: {error.message}", details=error.details
        ) from error
    try:
        progress("booting the guest")
        await _prepare(machine, prepare)
        progress("saving the machine")
        await machine.command("stop")
        await _save_device_state(machine, directory / "dev")
        await machine.command("quit")
        await machine.wait_exit()
    except (QmpError, QmpLost) as error:
        raise ClocheError(
            "template.bake_failed", f"QEMU ended or refused while the template was baked: {error}"
        ) from error
    finally:
        if not machine.ended:
            await asyncio.shield(machine.kill())
        machine.release()
        await asyncio.to_thread(os.chown, memory, 0, 0)  # it was the machine's while that wrote to it
    base = f"../../templates/{template_id}/disk.qcow2"
    await _make_overlay(directory / "overlay.qcow2", backing=base, backing_format="qcow2", size=size)


async def _save_device_state(machine: QemuMachine, path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        async with machine.lent(fd) as name:
            await machine.save_device_state(name, last=True)
    finally:
        os.close(fd)


async def _prepare(machine: QemuMachine, prepare: Callable[[Path], Awaitable[None]]) -> None:
    async def run() -> None:
        await prepare(machine.agent_socket)

    preparing = asyncio.ensure_future(run())
    ending = asyncio.ensure_future(machine.wait_exit())
    try:
        async with asyncio.timeout(PREPARE_TIMEOUT):
            await asyncio.wait({preparing, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            raise ClocheError(
                "template.bake_failed",
                "the machine ended before its agent was ready",
                details={"console": _console(machine), "qemu": machine.last_words()},
            )
        try:
            preparing.result()
        except ClocheError as error:
            raise ClocheError(
                "template.bake_failed",
                f"the guest could not be made ready: {error.message}",
                details={"console": _console(machine), "qemu": machine.last_words()},
            ) from error
    except TimeoutError:
        raise ClocheError(
            "template.bake_failed",
            f"the agent was not ready within {PREPARE_TIMEOUT:g} s of a cold boot",
            details={"console": _console(machine)},
        ) from None
    finally:
        for task in (preparing, ending):
            task.cancel()
        await asyncio.gather(preparing, ending, return_exceptions=True)


def _console(machine: QemuMachine) -> str:
    try:
        return (machine.directory / "console.log").read_bytes()[-3000:].decode("utf-8", "replace")
    except OSError:
        return ""


async def _make_overlay(path: Path, *, backing: str, backing_format: str, size: int) -> None:
    """An empty qcow2 of `size` bytes over `backing`, a path relative to where the overlay will lie: a data
    directory can be moved as a whole."""
    await process.run(
        [
            "qemu-img",
            "create",
            "-q",
            "-f",
            "qcow2",
            "-u",
            "-b",
            backing,
            "-F",
            backing_format,
            path,
            str(size),
        ],
        timeout=60,
        error_code="template.bake_failed",
    )


def _make_sparse(path: Path, size_mb: int) -> None:
    with path.open("xb") as file:
        file.truncate(size_mb * 1024 * 1024)
