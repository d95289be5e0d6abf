"""A root file system begun with that of another template, so that common packages are unpacked and set up once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cloche_server.host import files
from cloche_server.host.process import run

_BAKE_FAILED: Final = "template.bake_failed"


async def copy_image(image: Path, tree: Path, work: Path, progress: Callable[[str], None]) -> bool:
    """Copies what is in the file system `image` to the empty directory `tree`. False, and nothing was copied, where
    it cannot be mounted, as in some containers. No guest has ever written to it: they have overlays.

    Raises `host.disk_full`, `template.bake_failed`.
    """
    point = work / "below"
    point.mkdir(exist_ok=True)
    # Read-only in earnest: not even its journal is looked at.
    await run(["mount", "-t", "ext4", "-o", "loop,ro,noload,nodev,nosuid,noexec", image, point], check=False)
    if not point.is_mount():
        return False
    try:
        progress("taking over the packages of the template below")
        await run(["cp", "-a", f"{point}/.", tree], timeout=600, error_code=_BAKE_FAILED)
    finally:
        await asyncio.to_thread(files.unmount_below, point)
    await asyncio.to_thread(files.remove_tree, tree / "lost+found")
    return True


def clear_devices(tree: Path) -> None:
    """Whoever installs more packages makes these himself, and fails where they are."""
    for device in (tree / "dev").iterdir():
        files.remove_tree(device)
