"""Data directories for test servers: their own state over the baked templates of a base directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kit import procs, walls

CHECKOUT = Path(__file__).resolve().parents[2]
#: Short, because Unix sockets lie below it.
PREFIX = "ct-"
PARENT = Path("/tmp")


def base_data() -> Path:
    """Where the baked templates are: `CLOCHE_TEST_DATA`, else `CLOCHE_DATA`, else `.cloche/test-data`."""
    for name in ("CLOCHE_TEST_DATA", "CLOCHE_DATA"):
        if os.environ.get(name):
            return Path(os.environ[name])
    return CHECKOUT / ".cloche" / "test-data"


def is_baked(base: Path, name: str = "base") -> bool:
    return any(meta["name"] == name for meta in _metas(base).values())


def not_baked(base: Path, name: str = "base") -> str:
    return f"the template {name} is not baked below {base}; run ./test, which bakes it (or set CLOCHE_TEST_DATA)"


def make(base: Path, *more: str) -> Path:
    """A new data directory that shares what is baked in `base`: `base` and `more`. `remove` it when done."""
    names = ("base", *more)
    for name in names:
        assert is_baked(base, name), not_baked(base, name)
    data = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
    owner = {"pid": os.getpid(), "start": procs.start_time(os.getpid())}
    (data / "owner.json").write_text(json.dumps(owner))
    for part in ("templates", "images", "kernels"):
        (data / part).mkdir(mode=0o700)
    _share(base / "kernels", data / "kernels")
    for directory, meta in _metas(base).items():
        if meta["name"] in names:
            _share(directory, data / "templates" / directory.name)
            image = Path(meta["boot"]["root_image"]).parent
            _share(base / image, data / image)
    return data


def _metas(base: Path) -> dict[Path, dict[str, Any]]:
    """What is said of the templates that are baked, by their directories."""
    paths = sorted(base.glob("templates/[!.]*/meta.json"))
    return {path.parent: json.loads(path.read_text()) for path in paths}


def _share(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700, exist_ok=True)
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if any(part.startswith(".") for part in name.parts):
            continue  # what is still being baked
        copy = target / name
        if path.is_dir():
            copy.mkdir(exist_ok=True)
            continue
        if copy.exists():  # an image below several templates
            continue
        try:
            copy.hardlink_to(path)
        except OSError:  # another file system
            subprocess.run(["cp", "--preserve=mode,timestamps", "--sparse=always", path, copy], check=True)


def unshare(path: Path) -> None:
    """Makes a file of a data directory its own, before a test damages it."""
    copy = path.with_name(path.name + ".own")
    subprocess.run(["cp", "--preserve=mode,timestamps", "--sparse=always", path, copy], check=True)
    copy.replace(path)


def remove(data: Path) -> None:
    """Ends whatever still runs below a data directory, and removes it."""
    assert data.parent == PARENT
    assert data.name.startswith(PREFIX)
    for _ in range(3):
        left = procs.below(data)
        for proc in left:
            proc.kill()
        if not procs.wait_gone(left, 10) and not procs.below(data):
            break
    for mount in reversed(procs.mounts(data)):
        subprocess.run(["umount", "-l", mount], check=False)
    walls.forget(data)
    shutil.rmtree(data, ignore_errors=True)


def sweep() -> None:
    """Clears what killed test runs have left: directories whose owner lives no more."""
    for data in PARENT.glob(PREFIX + "*"):
        try:
            owner = json.loads((data / "owner.json").read_text())
        except (OSError, ValueError):
            continue
        if procs.start_time(int(owner["pid"])) != owner["start"]:
            remove(data)
