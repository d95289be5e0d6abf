"""The root file system of a template: packages of the host's own distribution in a sparse ext4 image.

What is kept under `images/<id>/`:

    rootfs.raw       the file system, `disk_mb` large, mostly a hole
    meta.json        what it was made from and what is in it

The id is the digest of everything that goes in, so an image that is there is never built again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.network import GATEWAY_IP4
from cloche_server.host import files
from cloche_server.host.process import run
from cloche_server.storage.recipe import Recipe
from cloche_server.storage.rootfs_copy import clear_devices, copy_image
from cloche_server.storage.rootfs_extras import install_python, put_files, python_packages

LAYOUT: Final = 3
"""Raised when this module makes something else of the same recipe, so that images are built anew."""

USER: Final = "user"
HOSTNAME: Final = "sandbox"
_RAM_NEEDED_MB: Final = 3072
#: The rest of the memory that is there stays for others; more than the most is used by no recipe of ours.
_RAM_LEFT_MB: Final = 1024
_RAM_MOST_MB: Final = 6144
_BAKE_FAILED: Final = "template.bake_failed"
_COMPONENTS: Final = ("main", "universe")
_KEYRINGS: Final = ("debian-archive-keyring.gpg", "ubuntu-archive-keyring.gpg")

_DPKG_OPTIONS: Final = (
    # Safe against a power cut does not matter for a tree that is thrown away when the build fails, nor in
    # a sandbox; without it dpkg is several times slower.
    "force-unsafe-io",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/bug/*",
)

_HOSTS: Final = f"""\
127.0.0.1 localhost
127.0.1.1 {HOSTNAME}
::1 localhost ip6-localhost ip6-loopback
ff02::1 ip6-allnodes
ff02::2 ip6-allrouters
"""

#: Manual pages are left out, but packages of Java and others fail where the directories of their links are missing.
_MAN: Final = '--setup-hook=mkdir -p "$1"/usr/share/man/man1 "$1"/usr/share/man/man7'

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RootfsImage:
    """An image that is complete on disk. Nobody ever writes to it: machines get an overlay."""

    id: str
    path: Path
    disk_mb: int
    suite: str
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where the packages come from: a suite and lines for `sources.list`."""

    suite: str
    lines: tuple[str, ...]


async def build_rootfs(recipe: Recipe, out_dir: Path, disk_mb: int, progress: Progress) -> RootfsImage:
    """The image for a recipe, built unless it is there already. A failed build leaves nothing."""
    await asyncio.to_thread(files.sweep_staging, out_dir)
    source = await find_source()
    key = f"{LAYOUT} {recipe.digest} {source.suite} {platform.machine()} {disk_mb}"
    image_id = hashlib.sha256(key.encode()).hexdigest()[:16]
    present = load_image(out_dir / image_id)
    if present is not None:
        return present
    base = recipe.below
    below = await build_rootfs(base, out_dir, base.disk_mb, progress) if base is not None else None
    started = time.monotonic()
    with files.staging(out_dir) as work:
        result = work / "image"
        result.mkdir()
        try:
            await _build(recipe, source, work, disk_mb, progress, below, ram_mb=_ram_mb())
        except ClocheError as error:
            # Only the RAM disk may have been too small.
            if error.code != "host.disk_full" or not (work / "tree").is_mount():
                raise
            await asyncio.to_thread(_discard, work)
            await _build(recipe, source, work, disk_mb, progress, below, ram_mb=0)
        raw = result / "rootfs.raw"
        meta = {
            "layout": LAYOUT,
            "id": image_id,
            "recipe": recipe.name,
            "suite": source.suite,
            "arch": platform.machine(),
            "disk_mb": disk_mb,
            "used_bytes": files.allocated_bytes(raw),
            "build_seconds": round(time.monotonic() - started, 1),
            "packages": await _installed(work / "tree"),
            "python": python_packages(work / "tree") if recipe.python else {},
        }
        (result / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        progress("writing the image to disk")
        # Something incomplete may have the name; `publish` would not replace it.
        await asyncio.to_thread(files.remove_tree, out_dir / image_id)
        await asyncio.to_thread(files.publish, result, out_dir / image_id)
    built = load_image(out_dir / image_id)
    if built is None:
        raise ClocheError(_BAKE_FAILED, "the root file system that was built is not complete")
    return built


def load_image(path: Path) -> RootfsImage | None:
    """The image in a directory, or None if it is not complete."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        disk_mb = int(meta["disk_mb"])
        raw = path / "rootfs.raw"
        if raw.stat().st_size != disk_mb * 1024 * 1024:
            return None
        return RootfsImage(path.name, raw, disk_mb, str(meta["suite"]), int(meta["used_bytes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _build(
    recipe: Recipe,
    source: Source,
    work: Path,
    disk_mb: int,
    progress: Progress,
    below: RootfsImage | None,
    *,
    ram_mb: int,
) -> None:
    tree = work / "tree"
    tree.mkdir()
    if ram_mb:
        options = f"size={ram_mb}m,mode=755,nr_inodes=0"
        # Where it is not allowed, as in some containers, the disk does as well.
        await run(["mount", "-t", "tmpfs", "-o", options, "cloche-build", tree], check=False)
    if below is not None and await copy_image(below.path, tree, work, progress):
        if more := set(recipe.packages) - set(recipe.below.packages if recipe.below else ()):
            await asyncio.to_thread(clear_devices, tree)
            await _bootstrap(sorted(more), source, tree, progress, onto=True)
    else:
        await _bootstrap(recipe.packages, source, tree, progress)
        await _add_user(tree)
        await _pack_locale(tree)
    progress("setting up the root file system")
    await asyncio.to_thread(_configure, tree, source)
    if recipe.python:
        await install_python(recipe.python, tree, work, progress)
    await asyncio.to_thread(put_files, tree, recipe.files)
    progress("making the disk image")
    await make_ext4(tree, work / "image" / "rootfs.raw", disk_mb)


def _ram_mb() -> int:
    """Size of the RAM disk that a build may have; 0: none."""
    match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = int(match[1]) // 1024 if match is not None else 0
    return min(available - _RAM_LEFT_MB, _RAM_MOST_MB) if available >= _RAM_NEEDED_MB else 0


def _discard(work: Path) -> None:
    files.unmount_below(work)
    files.remove_tree(work / "tree")
    files.remove_tree(work / "image" / "rootfs.raw")


# ------------------------------------------------------------------ where packages come from


async def find_source() -> Source:
    """The host's suite and mirrors, or those of `CLOCHE_GUEST_SUITE` and `CLOCHE_GUEST_MIRROR`."""
    host_suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    suite = os.environ.get("CLOCHE_GUEST_SUITE") or host_suite
    mirror = os.environ.get("CLOCHE_GUEST_MIRROR")
    if mirror:
        return Source(suite, (_line(mirror, suite, "main"),))
    result = await run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(REPO_URI) $(RELEASE) $(COMPONENT)",
            "Created-By: Packages",
        ],
        error_code=_BAKE_FAILED,
    )
    targets = [tuple(line.split(" ")) for line in result.text.splitlines() if line.count(" ") == 2]
    return choose_source(targets, host_suite, suite)


def choose_source(targets: list[tuple[str, ...]], host_suite: str, suite: str) -> Source:
    """Lines for `suite` from what apt uses for the suite of the host: (URI, suite, component) each.

    Of another suite only the main archive is known to be on the same mirror, not its updates.
    """
    same = ("", "-updates", "-security") if suite == host_suite else ("",)
    lines = []
    for uri, release, component in targets:
        part = release.removeprefix(host_suite)
        if release.startswith(host_suite) and part in same and component in _COMPONENTS:
            lines.append(_line(uri, suite + part, component))
    if not host_suite or not lines:
        raise ClocheError(
            _BAKE_FAILED,
            "no package mirror for the guest could be found in the configuration of apt; "
            "set CLOCHE_GUEST_SUITE and CLOCHE_GUEST_MIRROR",
        )
    return Source(suite, tuple(dict.fromkeys(lines)))


def _line(uri: str, suite: str, component: str) -> str:
    for name in _KEYRINGS:
        keyring = Path("/usr/share/keyrings") / name
        if keyring.is_file():
            return f"deb [signed-by={keyring}] {uri} {suite} {component}"
    return f"deb {uri} {suite} {component}"


async def _apt_options() -> list[str]:
    """The host's settings for transport, among them proxies; the build removes them at its end."""
    dump = await run(["apt-config", "dump"], error_code=_BAKE_FAILED)
    options = re.findall(r'^(Acquire::(?:https?|Check|Retries)[^ ]* ".+");$', dump.text, re.MULTILINE)
    # Passwords for mirrors stay in the host's files.
    logins = {"netrc": Path("/etc/apt/auth.conf"), "netrcparts": Path("/etc/apt/auth.conf.d")}
    options += [f'Dir::Etc::{key} "{path}"' for key, path in logins.items() if path.exists()]
    return ['Acquire::Languages "none"', *options]


# ------------------------------------------------------------------ the tree


async def _bootstrap(
    packages: Sequence[str], source: Source, tree: Path, progress: Progress, *, onto: bool = False
) -> None:
    """A tree with these packages; `onto`: they are added to those that it has."""
    kind = ("--variant=custom", "--skip=check/empty") if onto else ("--variant=minbase",)
    argv: list[str | Path] = ["mmdebstrap", "--mode=root", *kind, "--format=directory"]
    argv += [_MAN, *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS)]
    argv += [f"--aptopt={option}" for option in await _apt_options()]
    if packages:
        argv.append(f"--include={','.join(packages)}")
    argv += [source.suite, tree, *source.lines]

    def on_line(line: str) -> None:
        # Lines such as `I: installing remaining packages inside the chroot...`.
        if line.startswith("I: ") and line.endswith("..."):
            progress(line[3:].removesuffix("..."))

    await run(
        argv,
        timeout=1800,
        env=_environment(tree.parent),
        term_grace=10,
        on_line=on_line,
        error_code=_BAKE_FAILED,
    )


def _environment(temporary: Path) -> dict[str, str]:
    """Of the caller's environment only the proxies: nothing else may change what is built."""
    proxies = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
    fixed = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
    return {**proxies, **fixed, "TMPDIR": os.fspath(temporary)}


async def _add_user(tree: Path) -> None:
    """A user without rights and without a password that works."""
    await run(
        ["chroot", tree, "useradd", "-m", "-u", "1000", "-U", "-s", "/bin/bash", USER],
        error_code=_BAKE_FAILED,
    )


async def _pack_locale(tree: Path) -> None:
    """One file for the locale instead of twelve: a shell starts with a tenth less work. Without it all goes on."""
    await run(["chroot", tree, "localedef", "--add-to-archive", "/usr/lib/locale/C.utf8"], check=False)


async def _installed(tree: Path) -> dict[str, str]:
    query = ["chroot", tree, "dpkg-query", "-W", "-f", "${Package} ${Version}\n"]
    result = await run([str(part) for part in query], error_code=_BAKE_FAILED)
    return dict(line.split(" ", 1) for line in result.text.splitlines() if " " in line)


def _configure(tree: Path, source: Source) -> None:
    etc = tree / "etc"
    sources = [re.sub(r"//[^/@ ]+@", "//", line) for line in source.lines]
    content = {
        "hosts": _HOSTS,
        "hostname": f"{HOSTNAME}\n",
        "machine-id": "",
        "fstab": "/dev/vda / ext4 defaults 0 1\n",
        "resolv.conf": f"nameserver {GATEWAY_IP4}\n",
        "apt/sources.list": "".join(f"{line}\n" for line in sources),
        # A sandbox is one program's own machine: `pip install` may do there what it does in a container.
        "pip.conf": "[global]\nbreak-system-packages = true\nroot-user-action = ignore\n",
        "apt/apt.conf.d/99cloche": 'Acquire::Languages "none";\nAPT::Install-Recommends "false";\n',
    }
    for name, text in content.items():
        _replace(etc / name, text)
    for gone in ("etc/apt/apt.conf.d/99mmdebstrap", "var/lib/dbus/machine-id", "etc/.pwd.lock"):
        files.remove_tree(tree / gone)
    for directory in ("var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log", "tmp", "run"):
        _empty(tree / directory)
    for name in ("dpkg/status-old", "dpkg/diversions-old", "dpkg/statoverride-old"):
        files.remove_tree(tree / "var/lib" / name)


def _replace(path: Path, text: str) -> None:
    """Write a file of the tree. A link is replaced, not followed: in here it would lead into the host."""
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o644)


def _empty(directory: Path) -> None:
    """Remove the files below a directory that belongs to the packages; the directories stay."""
    for entry in directory.rglob("*") if directory.is_dir() and not directory.is_symlink() else ():
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()


# ------------------------------------------------------------------ the image


async def make_ext4(tree: Path, target: Path, disk_mb: int) -> None:
    """Put a directory into a new sparse ext4 image that can grow to 256 GiB while it is mounted."""
    await asyncio.to_thread(_make_sparse, target, disk_mb * 1024 * 1024)
    limit = 256 * 1024 * 1024 * 1024 // 4096
    # Everything is initialised now: a kernel thread that did it later would fill every machine's overlay
    # with the same zeros. No blocks are kept for root, who is the only user of most machines.
    features = f"resize={limit},lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0"
    argv: list[str | Path] = ["mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-L", "cloche"]
    argv += ["-J", "size=16", "-E", features, "-d", tree, target]
    await run(argv, timeout=600, error_code=_BAKE_FAILED)
    await run(["e2fsck", "-f", "-n", target], timeout=300, error_code=_BAKE_FAILED)


def _make_sparse(path: Path, size: int) -> None:
    with path.open("xb") as file:
        file.truncate(size)


def describe(image: RootfsImage) -> dict[str, Any]:
    """For a person who asks what is in a template."""
    meta: dict[str, Any] = json.loads((image.path.parent / "meta.json").read_text())
    return meta
