"""Archives from strangers: whatever the bytes are, it is refused or whole, and files have names of ours."""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cloche_server.core.errors import ClocheError
from cloche_server.storage.archive import (
    END,
    MANIFEST,
    end_of,
    member_names,
    padding,
    parse_json,
    parse_manifest,
    read_tar_header,
    tar_header,
)
from cloche_server.storage.archive_read import Unpacker
from cloche_server.storage.qcow2 import read_front, rename_backing

pytestmark = pytest.mark.thorough

NAMES = member_names(2, with_template=True, memory=True)
CONTENT = {name: (name.encode() * 700)[: 900 + 40 * number] for number, name in enumerate(NAMES)}
CONTENT["template/mem"] = b"m" * 5000 + bytes((1 << 20) - 5000)
MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def described() -> dict[str, Any]:
    digests = {name: _sha(CONTENT[f"template/{name}"]) for name in ("mem", "dev", "disk.qcow2")}
    size = {"cpus": 1, "memory_mb": 1, "disk_mb": 8}
    return {
        "format": 1,
        "kind": "cloche-snapshot",
        "fingerprint": "qemu",
        "snapshot": {
            "sandbox_id": "a" * 20, "name": None, "created_at": 5.0, "template": "std", **size, "cold": False,
            "memory": True, "page_count": 3,
            "layers": ["b" * 20, "c" * 20], "defaults": {"env": {"A": "1"}}, "metadata": {},
        },
        "template": {
            "id": "base-1", "name": "base", "digests": digests, **size, "accel": "tcg", "thaw": False,
            "image": "images/i/rootfs.raw",
        },
        "members": [{"name": n, "size": len(raw), "sha256": _sha(raw)} for n, raw in CONTENT.items()],
    }  # fmt: skip


def tar_of(manifest: bytes) -> bytes:
    end = end_of(manifest)
    whole = [(MANIFEST, manifest), *CONTENT.items(), (END, end)]
    return b"".join(tar_header(name, len(raw)) + raw + padding(len(raw)) for name, raw in whole) + bytes(1024)


TAR = tar_of(json.dumps(described()).encode())
WHOLE = zstandard.ZstdCompressor(level=1).compress(TAR)


def refused(error: ClocheError) -> None:
    assert error.code == "request.invalid"
    assert "etc" not in error.message, "nothing of the archive stands in a sentence"


def take(raw: bytes, piece: int = 1 << 16) -> dict[str, Any] | None:
    """What is made of an archive; None when it is refused. Nothing is outside the staging directory in any case."""
    with tempfile.TemporaryDirectory() as root:
        staged = Path(root) / "a" / "staged"
        staged.mkdir(parents=True)
        unpacker = Unpacker(staged, lambda _: set(), 0)
        done = None
        try:
            for at in range(0, len(raw), piece):
                unpacker.feed(raw[at : at + piece])
            unpacker.finish()
        except ClocheError as error:
            refused(error)
        else:
            done = {name: (staged / name).read_bytes() for name in NAMES}
        finally:
            unpacker.close()
        found = {str(path.relative_to(staged)) for path in Path(root).rglob("*") if not path.is_dir()}
        assert found <= set(NAMES)
        return done


def packed(tar: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(tar)


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_a_whole_one_in_pieces_of_any_size(piece: int) -> None:
    assert take(WHOLE, piece) == CONTENT


def boundaries() -> list[int]:
    """Where a member, its content, and its padding begin."""
    found, at = [], 0
    sizes = [len(json.dumps(described())), *(len(raw) for raw in CONTENT.values()), len(end_of(b""))]
    for size in sizes:
        found += [at, at + 512, at + 512 + size, at + 512 + size + -size % 512]
        at = found[-1]
    return found


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_cut_at_every_boundary_it_is_refused(shift: int) -> None:
    ends = boundaries()
    assert ends[-1] == len(TAR) - 1024
    for at in ends[:-1]:
        assert take(packed(TAR[: max(0, at + shift)])) is None, at


def test_cut_anywhere_before_its_end_it_is_refused() -> None:
    for at in range(0, len(WHOLE) - 40, 11):
        assert take(WHOLE[:at]) is None, at


@MANY
@given(st.integers(0, 12_000) | st.integers(0, len(TAR) - 1), st.binary(min_size=1, max_size=16))
@example(156, b"2")
@example(156, b"L")
@example(124, b"\x80")
def test_other_bytes_in_it(at: int, change: bytes) -> None:
    """All content is covered by digests. In headers there is room for what nobody looks at: owner, time, mode."""
    changed = TAR[:at] + change + TAR[at + len(change) :]
    taken = take(packed(changed))
    assert taken in (None, CONTENT)


@MANY
@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=8))
def test_other_bytes_of_the_compressed_one(at: int, change: bytes) -> None:
    assert take(WHOLE[:at] + change + WHOLE[at + len(change) :]) in (None, CONTENT)


@MANY
@given(st.binary(max_size=4096), st.booleans())
def test_any_bytes(raw: bytes, compressed: bool) -> None:
    assert take(packed(raw) if compressed else raw) is None


def paths(node: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [where, *(found for key, value in items for found in paths(value, (*where, key)))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("../../etc/passwd"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@MANY
@given(st.sampled_from(paths(described())), JSON)
def test_any_value_in_a_manifest(where: tuple[Any, ...], value: Any) -> None:
    manifest = described()
    if not where:
        manifest = value
    else:
        node = manifest
        for key in where[:-1]:
            node = node[key]
        node[where[-1]] = value
    try:
        parsed = parse_manifest(json.dumps(manifest).encode())
    except ClocheError as error:
        refused(error)
    else:
        assert [one.name for one in parsed.members] == NAMES


@MANY
@given(st.binary(min_size=512, max_size=512))
def test_any_tar_header(block: bytes) -> None:
    with pytest.raises(ClocheError):
        read_tar_header(block)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b"NaN", b"\xff", b'{"a": 1e999}x'])
def test_json_that_costs(raw: bytes) -> None:
    with pytest.raises(ClocheError):
        parse_json(raw)


@MANY
@given(st.integers(0, 640), st.binary(min_size=1, max_size=12))
def test_other_bytes_in_the_front_of_a_disk(at: int, change: bytes) -> None:
    """It is refused, or names one file below it, which we write anew."""
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "disk"
        raw = qcow2_front()
        path.write_bytes(raw[:at] + change + raw[at + len(change) :])
        try:
            read_front(path)
            rename_backing(path, "ours.qcow2")
        except ValueError:
            return
        again = read_front(path)
        assert again.backing == "ours.qcow2"
        assert [one.name for one in Path(root).iterdir()] == ["disk"]


def qcow2_front() -> bytes:
    """The tables of an empty overlay over a file."""
    name = b"../templates/base-1/disk.qcow2"
    head = struct.pack(
        ">4sIQIIQIIQQIIQQQQII",
        b"QFI\xfb",
        3,
        560,
        len(name),
        16,
        8 << 20,
        0,
        1,
        3 << 16,
        1 << 16,
        1,
        0,
        0,
        0,
        0,
        0,
        4,
        112,
    )
    front = head.ljust(112, b"\0") + struct.pack(">II8s", 0xE2792ACA, 5, b"qcow2") + struct.pack(">II", 0, 0)
    return front.ljust(560, b"\0") + name.ljust(4096, b"\0") + bytes(4 * 65536)
