"""The initramfs of a guest: the agent as `/init`, the modules it has to load, nothing else.

Not compressed: QEMU hands it over by memory copy, while unpacking would run on the guest's CPU, which under
software emulation costs more than reading the whole archive.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.host import files
from cloche_server.storage.cpio import CpioWriter
from cloche_server.storage.kernel import GuestKernel

_DIRECTORIES: Final = ("dev", "proc", "sys", "run", "tmp", "modules", "newroot")


async def build_initramfs(kernel: GuestKernel, agent: Path, out_dir: Path) -> Path:
    """Pack agent and modules into `out_dir/initramfs-<digest>.cpio` and return its path.

    The name is the digest of the content, so a file that is there is taken as it is.
    """
    return await asyncio.to_thread(_build, kernel, agent, out_dir)


def _build(kernel: GuestKernel, agent: Path, out_dir: Path) -> Path:
    if not agent.is_file():
        raise ClocheError("template.bake_failed", f"the agent binary {agent} is missing; build it first")
    content = pack(agent.read_bytes(), [kernel.modules_dir / name for name in kernel.module_names])
    digest = hashlib.sha256(content).hexdigest()
    path = out_dir / f"initramfs-{digest[:20]}.cpio"
    if not path.is_file():
        out_dir.mkdir(parents=True, exist_ok=True)
        files.write_atomic(path, content)
    return path


def pack(agent: bytes, modules: list[Path]) -> bytes:
    """The archive as bytes. `/modules/list` names the modules in the order in which they are loaded."""
    out = io.BytesIO()
    archive = CpioWriter(out)
    for name in _DIRECTORIES:
        archive.directory(name)
    # The kernel opens the console for init before init can mount anything on /dev.
    archive.char_device("dev/console", 5, 1)
    archive.char_device("dev/null", 1, 3, 0o666)
    archive.char_device("dev/kmsg", 1, 11, 0o644)
    archive.file("modules/list", "".join(f"{path.name}\n" for path in modules).encode())
    for path in modules:
        archive.file(f"modules/{path.name}", path.read_bytes())
    archive.file("init", agent, 0o755)
    archive.close()
    return out.getvalue()
