"""Archives that were made to do harm are refused, and leave nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from archive_site import Site, packed, pieces, refused, unpacked

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("quick_disk")]


def forged(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The archive with another manifest, and an end that belongs to it."""
    from cloche_server.storage.archive import END, MANIFEST, end_of, padding, tar_header

    tar = unpacked(raw)
    size = int(tar[124:135], 8)
    manifest = json.loads(tar[512 : 512 + size])
    change(manifest)
    text = json.dumps(manifest).encode()
    rest = tar[512 + size + -size % 512 :]
    rest = rest[: rest.rindex(END.encode().ljust(100, b"\0"))]
    end = end_of(text)
    head = tar_header(MANIFEST, len(text)) + text + padding(len(text))
    return packed(head + rest + tar_header(END, len(end)) + end + padding(len(end)) + bytes(1024))


FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "format": lambda m: m.update(format=2),
    "kind": lambda m: m.update(kind="other"),
    "no snapshot": lambda m: m.pop("snapshot"),
    "page count": lambda m: m["snapshot"].update(page_count=2),
    "layers": lambda m: m["snapshot"].update(layers=["../../etc/passwd", "x" * 10]),
    "layer twice": lambda m: m["snapshot"].update(layers=[m["snapshot"]["layers"][0]] * 2),
    "layer names": lambda m: m["snapshot"].update(layers=["a" * 20, "b" * 20]),
    "disk": lambda m: m["snapshot"].update(disk_mb=9),
    "memory": lambda m: m["snapshot"].update(memory_mb=4),
    "truth": lambda m: m["snapshot"].update(cold=1),
    "time": lambda m: m["snapshot"].update(created_at=1e300),
    "env": lambda m: m["snapshot"]["defaults"].update(env={"A=B": "1"}),
    "cwd": lambda m: m["snapshot"]["defaults"].update(cwd="srv"),
    "user": lambda m: m["snapshot"]["defaults"].update(user="a\nb"),
    "metadata": lambda m: m["snapshot"].update(metadata={"k": 1}),
    "half a character": lambda m: m["snapshot"].update(name="\ud800"),
    "image": lambda m: m["template"].update(image="../../../etc/shadow"),
    "another image": lambda m: m["template"].update(image="images/j/rootfs.raw"),
    "template name": lambda m: m["template"].update(name="../base"),
    "template id": lambda m: m["template"].update(id="../x"),
    "another template": lambda m: m["template"].update(id="base-2"),
    "template disk": lambda m: m["template"].update(disk_mb=9),
    "digest": lambda m: m["template"]["digests"].update(mem="0" * 64),
    "member name": lambda m: m["members"][0].update(name="../pages"),
    "member size": lambda m: m["members"][0].update(size=m["members"][0]["size"] + 512),
    "member huge": lambda m: m["members"][1].update(size=1 << 40),
    "member digest": lambda m: m["members"][0].update(sha256="0" * 64),
    "one less": lambda m: m["members"].pop(),
    "one more": lambda m: m["members"].append(m["members"][0]),
    "nested": lambda m: m.update(x=json.loads("[" * 50 + "]" * 50)),
}


@pytest.mark.parametrize("what", FORGERIES)
async def test_a_forged_manifest(site: Site, other: Site, what: str) -> None:
    raw = await site.archive(site.snapshot(site.bake()))
    assert (await refused(other, forged(raw, FORGERIES[what]))).code == "request.invalid"


async def test_one_that_was_only_packed_again_is_taken(site: Site, other: Site) -> None:
    raw = forged(await site.archive(site.snapshot(site.bake())), lambda _: None)
    assert (await other.importer.take_in("w", pieces(raw))).name == "näme of it"


async def test_one_of_before_there_were_disks_alone(site: Site, other: Site) -> None:
    raw = forged(await site.archive(site.snapshot(site.bake())), lambda m: m["snapshot"].pop("memory"))
    assert (await other.importer.take_in("w", pieces(raw))).memory


async def test_names_of_an_archive_never_become_names_here(site: Site, other: Site) -> None:
    """Whoever makes an archive may choose ids: those of what is here are not touched."""
    theirs = other.snapshot(other.bake())
    before = {name: (other.data / name).read_bytes() for name in other.files()}
    raw = await site.archive(site.snapshot(site.bake(), 1))
    chosen = forged(raw, lambda m: m["snapshot"].update(id=theirs.id, sandbox_id=theirs.sandbox_id))
    made = await other.importer.take_in("w", pieces(chosen))
    assert made.id != theirs.id
    assert {name: (other.data / name).read_bytes() for name in before} == before
    assert replace(other.snapshots.get("w", theirs.id)) == theirs
