"""What QEMU calls the layers of a disk, and which layer a machine writes to."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final

_ID: Final = re.compile(r"[a-z0-9]{1,30}")
_LETTER: Final = "l"


_WRITES: Final = " writes"


def node_of(disk: Path) -> str:
    """The name of the node of a layer. Of a file that is no layer (in a bake) it is just a name."""
    name = disk.stem
    return _LETTER + (name if _ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:20])


def active_node(answer: Any) -> tuple[str, str]:
    """The node that the disk writes to and the id of its layer, from the answer to `query-block`. Raises ValueError,
    LookupError, TypeError."""
    inserted = next((one["inserted"] for one in answer if "inserted" in one), None)
    if inserted is None:
        raise LookupError("no disk")
    node = str(inserted["node-name"])
    if not node.startswith("#"):
        return node, node.removeprefix(_LETTER)
    # A machine of a server that named no nodes.
    return node, file_of(str(inserted["file"])).stem


def file_of(name: str) -> Path:
    """The file of a disk, from the name QEMU gives it: the path, or for a disk that was given another layer while it
    ran `json:` and the nodes it consists of. Raises ValueError, LookupError, TypeError."""
    if not name.startswith("json:"):
        return Path(name)
    node = json.loads(name.removeprefix("json:"))
    while "filename" not in node:
        node = node["file"]
    return Path(node["filename"])


def rw_tag(node: str) -> str:
    """What the descriptor is marked with through which a node may be written."""
    return node + _WRITES


def marked_for_writing(answer: Any) -> list[tuple[int, int, str]]:
    """Set, number and node of every descriptor through which a node may be written, from the answer to
    `query-fdsets`. Raises LookupError, TypeError, ValueError."""
    found = []
    for fdset in answer:
        for one in fdset["fds"]:
            node = str(one.get("opaque", "")).removesuffix(_WRITES)
            if node and one["opaque"] == rw_tag(node):
                found.append((int(fdset["fdset-id"]), int(one["fd"]), node))
    return found


def write_fds(answer: Any, node: str) -> list[tuple[int, int]]:
    """Set and number of the descriptors that are marked so, from the answer to `query-fdsets`."""
    found = []
    for fdset in answer:
        for one in fdset["fds"]:
            if one.get("opaque") == rw_tag(node):
                found.append((int(fdset["fdset-id"]), int(one["fd"])))
    return found
