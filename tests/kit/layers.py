"""The disk layers and snapshots of a data directory: which there are, who needs them, and who may write to them."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kit.server import Server

SUFFIX = ".qcow2"


def there(data: Path) -> set[str]:
    """Names of all files below `layers/`, without the suffix of a layer."""
    with contextlib.suppress(FileNotFoundError):
        return {path.name.removesuffix(SUFFIX) for path in (data / "layers").iterdir()}
    return set()


def below(data: Path, layer: str) -> str | None:
    """The layer under a layer; None when that is the disk of a template. Raises OSError for a layer that is gone."""
    with (data / "layers" / (layer + SUFFIX)).open("rb") as file:
        offset, length = struct.unpack(">8xQI", file.read(20))
        file.seek(offset)
        backing = file.read(length).decode()
    return None if "/" in backing else backing.removesuffix(SUFFIX)


def needed(data: Path, tops: Iterable[str]) -> set[str]:
    """The layers in `tops` and all that lie under them, whether or not they are there."""
    found: set[str] = set()
    for top in tops:
        current: str | None = top
        while current and current not in found:
            found.add(current)
            try:
                current = below(data, current)
            except OSError:
                current = None
    return found


def depth(data: Path, layer: str) -> int:
    return len(needed(data, [layer]))


def snapshots(data: Path) -> dict[str, dict[str, Any]]:
    """What the snapshots on disk say of themselves, by the names of their directories."""
    root = data / "snapshots"
    names = [path.name for path in root.iterdir() if not path.name.startswith(".")] if root.is_dir() else []
    return {name: json.loads((root / name / "meta.json").read_text()) for name in names}


def recorded(data: Path) -> dict[str, tuple[str, str]]:
    """State and layer of every sandbox that the database knows as living."""
    query = "SELECT id, status, layer_id FROM sandboxes WHERE status <> 'deleted'"
    with contextlib.closing(sqlite3.connect(f"file:{data}/cloche.db?mode=ro", uri=True)) as db:
        return {str(i): (str(status), str(layer)) for i, status, layer in db.execute(query)}


def writers(server: Server) -> dict[str, set[str]]:
    """The layers each machine has open for writing, by the name of the machine."""
    root = f"{(server.data / 'layers').resolve()}/"
    return {name: _writes(proc.pid, root) for name, proc in server.machines().items()}


def _writes(pid: int, root: str) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
                flags = int(info.split("flags:")[1].split()[0], 8)
                if target.startswith(root) and flags & os.O_ACCMODE != os.O_RDONLY:
                    found.add(target.removeprefix(root).removesuffix(SUFFIX))
    return found


def problems(server: Server, pooled: set[str]) -> list[str]:
    """Layers and snapshots that nobody holds or that are missing, and machines that write where they must not.
    `pooled` are the machines that are no sandboxes; each has a layer of its own name."""
    data, rows, held = server.data, recorded(server.data), snapshots(server.data)
    tops = {layer for _, layer in rows.values()} | {str(meta["layer_id"]) for meta in held.values()} | pooled
    have, need = there(data), needed(data, tops - {""})
    found = [f"layer {name} is held by nobody" for name in have - need]
    found += [f"layer {name} is needed, and is not there" for name in need - have]
    writing = writers(server)
    for name, (status, layer) in rows.items():
        if status in {"running", "paused"} and writing.get(name, {layer}) != {layer}:
            found.append(f"machine {name} may write to {writing[name]}, its layer is {layer}")
    workspace = server.api.call("GET", "/v1/me")["workspace"]
    listed = {one["id"] for one in server.api.snapshots()}
    mine = {name for name, meta in held.items() if meta["workspace"] == workspace}
    if listed != mine:
        found.append(f"snapshots are listed and not there: {listed - mine}, there and not listed: {mine - listed}")
    return found


def litter(server: Server, listed: dict[str, str]) -> list[str]:
    """What a capture, a hibernation or a wake has left in the directories of sandboxes and beside them."""
    found = []
    for name, status in listed.items():
        directory = server.data / "sandboxes" / name
        names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
        odd = {one for one in names if one.startswith(".")}
        if status in {"running", "paused"} and "state" in names:
            odd.add("state")
        if status == "hibernated" and "state" not in names:
            found.append(f"sandbox {name} is hibernated, and its memory is not there")
        found += [f"left in the directory of {name}, which is {status}: {one}" for one in odd]
    return found
