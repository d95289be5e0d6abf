"""What a recipe adds to the packages of the distribution: Python packages and files of its own.

Wheels are unpacked by `uv` on the host, compared with the digests of the requirements file. No code of a package is
run: there are no builds, and the guest's own interpreter compiles modules without what they would start.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.host.process import run
from cloche_server.storage.recipe_files import PutFile

_BAKE_FAILED: Final = "template.bake_failed"
_ELF: Final = b"\x7fELF"
#: Of the caller's environment: where packages are found, and whom to trust there.
_KEPT: Final = ("UV_", "SSL_CERT_")


def find_uv() -> str:
    """The program that installs wheels. Raises `template.bake_failed`."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise ClocheError(
            _BAKE_FAILED,
            "the recipe has Python packages, and uv, which installs them, was not found; "
            f"install it beside {sys.executable}, or put it on the PATH",
        )
    return found


async def install_python(requirements: str, tree: Path, work: Path, progress: Callable[[str], None]) -> None:
    """Wheels for the guest's interpreter in its `dist-packages`. Raises `template.bake_failed`."""
    version = python_version(tree)
    progress(f"installing Python packages for Python {version}")
    listed = work / "requirements.txt"
    listed.write_text(requirements)
    target = tree / f"usr/local/lib/python{version}/dist-packages"
    argv: list[str | Path] = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    argv += ["--only-binary", ":all:", "--no-config", "--link-mode", "copy", "--target", target]
    argv += ["--python-version", version, "--python-platform", f"{platform.machine()}-unknown-linux-gnu"]
    argv += ["--requirements", listed]
    # Without `--no-config` the folder of whoever bakes would have a say in where packages come from.
    await run(argv, timeout=900, env=_environment(work), error_code=_BAKE_FAILED)
    await asyncio.to_thread(_move_programs, target / "bin", tree / "usr/local/bin")
    progress("compiling Python packages")
    # -S: what packages ask to be run at each start is not. A module that cannot be compiled is for another version.
    compile_: list[str | Path] = ["chroot", tree, "python3", "-I", "-S", "-m", "compileall", "-q", "-j", "2"]
    compile_ += ["-x", "/tests?/"]  # a third of all modules, which nobody loads
    await run([*compile_, f"/usr/local/lib/python{version}/dist-packages"], timeout=900, check=False)


def python_version(tree: Path) -> str:
    """`3.11` for the interpreter that is in the tree."""
    for path in sorted((tree / "usr/bin").glob("python3.*")):
        number = path.name.removeprefix("python3.")
        if number.isdigit():
            return f"3.{number}"
    raise ClocheError(_BAKE_FAILED, "the recipe has Python packages, and there is no Python 3 in the root file system")


def python_packages(tree: Path) -> dict[str, str]:
    """Names and versions of what was installed."""
    found = (tree / "usr/local/lib").glob("python3.*/dist-packages/*.dist-info")
    pairs = (path.name.removesuffix(".dist-info").rpartition("-") for path in found)
    return dict(sorted((name, version) for name, _, version in pairs))


def put_files(tree: Path, files: Sequence[PutFile]) -> None:
    """Writes the files of a recipe. A link on the way is refused: in here it would lead into the host."""
    for file in files:
        path = tree
        *parents, name = file.place.strip("/").split("/")
        for part in parents:
            path /= part
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise ClocheError(_BAKE_FAILED, f"{file.place} cannot be put in: a part of it is no directory")
            path.mkdir(mode=0o755, exist_ok=True)
        path /= name
        path.unlink(missing_ok=True)
        path.write_bytes(file.content)
        path.chmod(file.mode)


def _environment(work: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k.startswith(_KEPT) or k.lower().endswith("_proxy")}
    home = os.environ.get("HOME", "/root")
    return {**kept, "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": home, "TMPDIR": os.fspath(work)}


def _move_programs(source: Path, target: Path) -> None:
    """Programs go where the PATH of the guest leads; the interpreter they name is the guest's."""
    if not source.is_dir():
        return
    for path in source.iterdir():
        place = target / path.name
        place.unlink(missing_ok=True)
        content = path.read_bytes()
        if not content.startswith(_ELF):
            _, _, rest = content.partition(b"\n")
            content = b"#!/usr/bin/python3\n" + rest
        place.write_bytes(content)
        place.chmod(0o755)
    shutil.rmtree(source)
