"""The guest kernel: the distribution's own cloud kernel, downloaded and unpacked, never installed.

What is kept under `kernels/<version>/`:

    vmlinuz          the kernel
    modules/*.ko     the modules a guest needs, uncompressed
    modules/list     their file names in the order in which they have to be loaded
    meta.json        written last: a directory without it does not count
"""

from __future__ import annotations

import asyncio
import json
import lzma
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.host import files
from cloche_server.host.process import run

LAYOUT: Final = 2
"""Raised when what is kept of a kernel changes, so that older directories are fetched anew."""

MODULES: Final = (
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_console",
    "virtio_rng",
    "virtio_balloon",
    "overlay",
    "ext4",
    # Lets the agent end the connections of a machine that goes on elsewhere.
    "tcp_diag",
)
"""What a guest cannot do without, each a module or built in. Dependencies are added by themselves."""

META_PACKAGES: Final = ("linux-image-cloud-amd64", "linux-image-virtual")
"""Of Debian and of Ubuntu; the first one that apt knows is taken."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """A kernel that is complete on disk. `modules_dir` holds the plain modules and their `list`."""

    version: str
    vmlinuz: Path
    modules_dir: Path

    @property
    def module_names(self) -> list[str]:
        return (self.modules_dir / "list").read_text().split()


async def fetch_kernel(data_dir: Path, progress: Progress, *, refresh: bool = False) -> GuestKernel:
    """The newest guest kernel that is on disk; without one, or with `refresh`, the one that apt offers."""
    kernels = data_dir / "kernels"
    await asyncio.to_thread(files.sweep_staging, kernels)
    present = find_kernel(data_dir)
    if present is not None and not refresh:
        return present
    packages = await _resolve(progress)
    with files.staging(kernels) as work:
        progress(f"downloading {packages[0]}")
        await _download(packages, work)
        progress("unpacking the kernel")
        kernel = await asyncio.to_thread(_collect, work / "unpacked", work / "kernel", packages)
        target = kernels / kernel.version
        if _load(target) is None:
            await asyncio.to_thread(files.remove_tree, target)
            await asyncio.to_thread(files.publish, work / "kernel", target)
    fetched = _load(target)
    if fetched is None:
        raise ClocheError("template.bake_failed", "the guest kernel that was fetched is not complete")
    return fetched


def find_kernel(data_dir: Path) -> GuestKernel | None:
    """The newest complete kernel on disk, or None."""
    found = [_load(path) for path in (data_dir / "kernels").glob("*") if not path.name.startswith(".")]
    complete = [kernel for kernel in found if kernel is not None]
    return max(complete, key=lambda kernel: _version_key(kernel.version), default=None)


def _load(path: Path) -> GuestKernel | None:
    try:
        meta = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError):
        return None
    kernel = GuestKernel(path.name, path / "vmlinuz", path / "modules")
    complete = meta.get("layout") == LAYOUT and kernel.vmlinuz.is_file()
    if not complete or not all((kernel.modules_dir / name).is_file() for name in kernel.module_names):
        return None
    return kernel


def _version_key(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.\-+~]", version)]


# ------------------------------------------------------------------ download


async def _resolve(progress: Progress) -> list[str]:
    """The packages with the image and the modules that the meta package of this distribution stands for."""
    packages = await _lookup()
    if not packages:
        progress("refreshing the package lists")
        await run(["apt-get", "update", "-q"], timeout=300, error_code="template.bake_failed")
        packages = await _lookup()
    if not packages:
        names = " nor ".join(META_PACKAGES)
        raise ClocheError("template.bake_failed", f"apt knows neither {names}; there is no guest kernel to take")
    return packages


async def _lookup() -> list[str]:
    for meta in META_PACKAGES:
        for image in await _depends(meta):
            if image.startswith(("linux-image-", "linux-image-unsigned-")):
                # Ubuntu has the modules in a package of their own, which the image depends on.
                return [image, *(name for name in await _depends(image) if name.startswith("linux-modules-"))]
    return []


async def _depends(package: str) -> list[str]:
    result = await run(["apt-cache", "depends", "--important", package], check=False, error_code="template.bake_failed")
    return re.findall(r"^ *\|?Depends: ([a-z0-9][a-z0-9+.-]*)$", result.text, re.MULTILINE)


async def _download(packages: Iterable[str], work: Path) -> None:
    # `work` is closed to apt's unprivileged user; the archive is still verified, by its signed list.
    await run(
        ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *packages],
        cwd=work,
        timeout=900,
        error_code="template.bake_failed",
    )
    unpacked = work / "unpacked"
    for archive in await asyncio.to_thread(_find, work, "*.deb"):
        await run(["dpkg-deb", "-x", archive, unpacked], timeout=300, error_code="template.bake_failed")
    # The standard library of Python 3.11 cannot read zstd, which Ubuntu packs its modules with.
    packed = await asyncio.to_thread(_find, unpacked, "*.ko.zst")
    if packed:
        await run(["zstd", "-dq", "--rm", *packed], timeout=300, error_code="template.bake_failed")


def _find(tree: Path, pattern: str) -> list[Path]:
    return sorted(tree.rglob(pattern))


# ------------------------------------------------------------------ what is kept


def _collect(unpacked: Path, target: Path, packages: list[str]) -> GuestKernel:
    """Pick the kernel and the needed modules out of unpacked packages into `target`. Blocks."""
    images = sorted((unpacked / "boot").glob("vmlinuz-*"))
    if len(images) != 1:
        raise ClocheError("template.bake_failed", "the kernel package does not hold exactly one kernel")
    version = images[0].name.removeprefix("vmlinuz-")
    # Where /lib is a link to /usr/lib the packages use the latter.
    trees = [unpacked / prefix / "modules" / version for prefix in ("lib", "usr/lib")]
    tree = next((path for path in trees if path.is_dir()), None)
    if tree is None:
        raise ClocheError("template.bake_failed", f"the kernel package has no modules for {version}")
    modules = target / "modules"
    modules.mkdir(parents=True)
    names = []
    for path, content in load_order(tree, MODULES):
        names.append(path.name.split(".ko")[0] + ".ko")
        (modules / names[-1]).write_bytes(content)
    (modules / "list").write_text("".join(f"{name}\n" for name in names))
    images[0].rename(target / "vmlinuz")
    meta = {"layout": LAYOUT, "version": version, "packages": packages, "modules": names}
    (target / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return GuestKernel(version, target / "vmlinuz", modules)


def load_order(tree: Path, wanted: Iterable[str]) -> list[tuple[Path, bytes]]:
    """The wanted modules and all that they depend on, dependencies first, with their plain content.

    A package has no `modules.dep` (depmod makes it at installation), so the dependencies are taken from
    the modules themselves. What is built into the kernel is left out; what is missing is an error.
    """
    available = {_normal(path.name.split(".ko")[0]): path for path in sorted(tree.rglob("*.ko*"))}
    builtin = {_normal(Path(line).stem) for line in _lines(tree / "modules.builtin")}
    order: dict[str, tuple[Path, bytes]] = {}

    def add(name: str, chain: tuple[str, ...]) -> None:
        if name in order or name in builtin or name in chain:
            return
        if name not in available:
            raise ClocheError("template.bake_failed", f"the guest kernel has no module {name}", details={"for": chain})
        content = _decompress(available[name])
        for dependency in module_depends(content):
            add(_normal(dependency), (*chain, name))
        order[name] = (available[name], content)

    for name in wanted:
        add(_normal(name), ())
    return list(order.values())


def _normal(name: str) -> str:
    return name.replace("-", "_")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _decompress(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".ko":
        return data
    if path.suffix == ".xz":
        return lzma.decompress(data)
    raise ClocheError("template.bake_failed", f"the module {path.name} is packed in an unknown way")


def module_depends(content: bytes) -> list[str]:
    """The `depends=` list in the `.modinfo` section of a kernel module (a 64-bit little-endian ELF file)."""
    try:
        return _parse_depends(content)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError):
        raise ClocheError("template.bake_failed", "a kernel module is not a readable ELF file") from None


def _parse_depends(content: bytes) -> list[str]:
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    table = struct.unpack_from("<Q", content, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", content, 0x3A)
    # (offset of the name, offset of the content, size) of each section
    sections = []
    for index in range(count):
        header = struct.unpack_from("<IIQQQQ", content, table + index * size)
        sections.append((header[0], header[4], header[5]))
    names_at = sections[names_index][1]
    for name, offset, length in sections:
        start = names_at + name
        if content[start : content.index(b"\0", start)] != b".modinfo":
            continue
        for entry in content[offset : offset + length].split(b"\0"):
            if entry.startswith(b"depends="):
                return [part for part in entry[8:].decode("ascii").split(",") if part]
    return []
