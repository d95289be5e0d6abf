"""Saved memory on disk: the pages that differ from a template, device state, and what it takes to go on from them.

A directory is written under another name, fsynced and renamed: one that has its name is whole. Each file's SHA-256 is
in `meta.json`, and is compared before a machine continues from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import Captured, SavedState
from cloche_server.host import files, pages

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Needs:
    """What a saved memory can only be continued with."""

    template_id: str
    fingerprint: str
    memory_mb: int
    #: The file of zeros that the pages differ from; None: the memory of the template.
    zeros: Path | None = None


def write(directory: Path, captured: Captured, needs: Needs, layers: list[Path], extra: dict[str, Any]) -> None:
    """Writes the files of a capture into an existing, empty directory that is still to be published, and sees the disk
    `layers` it goes with onto the disk. Without pages there is only the description. Blocking. Raises OSError."""
    digests = {}
    if captured.pages is not None:
        digests["pages"] = captured.pages.save(directory / "pages")
        (directory / "dev").write_bytes(captured.device_state)
        digests["dev"] = hashlib.sha256(captured.device_state).hexdigest()
    for path in layers:
        _fsync(path)
    meta = {
        "format": FORMAT,
        "template_id": needs.template_id,
        "fingerprint": needs.fingerprint,
        "memory_mb": needs.memory_mb,
        "cold": needs.zeros is not None,
        "memory": captured.pages is not None,
        "page_count": captured.pages.count if captured.pages is not None else 0,
        "digests": digests,
        **extra,
    }
    (directory / "meta.json").write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")


def read_meta(directory: Path) -> dict[str, Any]:
    """Raises `snapshot.corrupt`."""
    try:
        meta = json.loads((directory / "meta.json").read_bytes())
        if meta["format"] != FORMAT:
            raise ValueError("another format")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise corrupt("its description cannot be read") from error
    return dict(meta)


def load(directory: Path, needs: Needs, *, check: bool = True) -> SavedState:
    """What a machine continues from; with `check` byte by byte what was written. Blocking. Raises `snapshot.corrupt`,
    `snapshot.incompatible`."""
    meta = read_meta(directory)
    if meta.get("fingerprint") != needs.fingerprint or meta.get("template_id") != needs.template_id:
        raise ClocheError(
            "snapshot.incompatible",
            f"it was taken under {meta.get('fingerprint')} on {meta.get('template_id')}; "
            f"this host would continue it under {needs.fingerprint} on {needs.template_id}",
        )
    try:
        for name in ("dev", "pages") if check else ():
            if files.hash_file(directory / name) != meta["digests"][name]:
                raise corrupt(f"its file {name} has changed")
        loaded = pages.load(directory / "pages", needs.memory_mb * 1024 * 1024 // pages.PAGE)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise corrupt("a file of it is missing or damaged") from error
    return SavedState(directory / "dev", loaded, needs.zeros)


def corrupt(why: str) -> ClocheError:
    return ClocheError("snapshot.corrupt", f"the saved memory cannot be used: {why}")


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
