"""The catalogue of baked templates: complete or absent, and damage is noticed before a machine is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Shape
from cloche_server.storage.templates import FILES, TemplateCatalog, TemplateMeta


def bake(data: Path, template_id: str, **changes: Any) -> TemplateMeta:
    """Publishes a template of small files."""
    image = data / "images" / "i" / "rootfs.raw"
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(b"image")
    staged = data / "templates" / f".staging-{template_id}"
    staged.mkdir(parents=True)
    for name in FILES:
        (staged / name).write_bytes(name.encode() * 100)
    meta = {
        "id": template_id,
        "name": "base",
        "aliases": ["code-interpreter"],
        "description": "d",
        "defaults": {"env": {"A": "1"}, "cwd": "/root", "user": "root"},
        "cpus": 1,
        "memory_mb": 256,
        "disk_mb": 4096,
        "accel": "tcg",
        "fingerprint": "f1",
        "inputs": "x",
        "boot": {"kernel": "kernels/k/vmlinuz", "initrd": "kernels/k/initrd", "root_image": "images/i/rootfs.raw"},
        "created_at": 1.0,
        **changes,
    }
    return TemplateCatalog(data).publish(staged, meta)


def test_what_is_published_is_found_again(tmp_path: Path) -> None:
    meta = bake(tmp_path, "base-1")
    catalog = TemplateCatalog(tmp_path)
    assert catalog.all() == [meta]
    assert catalog.get("base-1") == meta
    assert catalog.get("other") is None
    assert catalog.find("base", Shape(1, 256), "f1") == meta
    assert catalog.find("base", Shape(2, 256), "f1") is None
    assert catalog.find("base", Shape(1, 256), "f2") is None
    assert not list((tmp_path / "templates").glob(".staging*"))
    catalog.check(meta)
    assert catalog.checked(meta)


def test_names_aliases_and_the_newest(tmp_path: Path) -> None:
    bake(tmp_path, "base-1", created_at=1.0)
    newer = bake(tmp_path, "base-2", created_at=2.0)
    bake(tmp_path, "other-1", name="other", aliases=[], created_at=3.0)
    catalog = TemplateCatalog(tmp_path)
    assert catalog.resolve("base") == "base"
    assert catalog.resolve("code-interpreter") == "base"
    assert catalog.resolve("nothing") is None
    assert catalog.find("base", Shape(1, 256), "f1") == newer
    assert [family.name for family in catalog.families()] == ["base", "other"]


def test_a_running_catalogue_sees_what_another_process_bakes_and_removes(tmp_path: Path) -> None:
    catalog = TemplateCatalog(tmp_path)
    assert catalog.all() == []
    meta = bake(tmp_path, "base-1")
    assert catalog.all() == [meta]
    TemplateCatalog(tmp_path).remove(meta)
    assert catalog.all() == []
    assert list((tmp_path / "templates").iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_damage_is_noticed(tmp_path: Path, name: str) -> None:
    meta = bake(tmp_path, "base-1")
    catalog = TemplateCatalog(tmp_path)
    catalog.check(meta)
    path = meta.template.directory / name
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(b"X" + content[1:])
    assert not catalog.checked(meta)
    with pytest.raises(ClocheError, match="has changed") as caught:
        catalog.check(meta)
    assert caught.value.code == "template.corrupt"
    path.write_bytes(content[:-1])
    with pytest.raises(ClocheError, match="another size"):
        catalog.check(meta)
    path.unlink()
    with pytest.raises(ClocheError, match="missing"):
        catalog.check(meta)


def test_a_template_without_its_image_is_damaged(tmp_path: Path) -> None:
    meta = bake(tmp_path, "base-1")
    (tmp_path / "images" / "i" / "rootfs.raw").unlink()
    with pytest.raises(ClocheError, match="image"):
        TemplateCatalog(tmp_path).check(meta)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "id": "base-1"}'])
def test_a_directory_that_is_no_template_is_ignored(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "templates" / "base-1"
    directory.mkdir(parents=True)
    (directory / "meta.json").write_text(text)
    assert TemplateCatalog(tmp_path).all() == []


def test_leftovers_of_an_interrupted_removal_are_swept(tmp_path: Path) -> None:
    left = tmp_path / "templates" / ".removed-base-1"
    left.mkdir(parents=True)
    (left / "mem").write_bytes(b"x")
    TemplateCatalog(tmp_path).sweep()
    assert not left.exists()
