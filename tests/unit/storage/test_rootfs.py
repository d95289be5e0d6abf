"""The root file system: where packages come from, what is set up, and the image; no packages are fetched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.host import files, process
from cloche_server.storage import rootfs
from cloche_server.storage.recipe import Recipe

RECIPE = Recipe("base", ("git",))
MIRROR = "http://user:secret@mirror.test/debian/"
SOURCE = rootfs.Source("bookworm", (f"deb {MIRROR} bookworm main",))
TARGETS = [
    (MIRROR, "bookworm-backports", "main"),
    (MIRROR, "bookworm", "main"),
    (MIRROR, "bookworm", "contrib"),
    (MIRROR, "bookworm-updates", "main"),
    ("http://other.test/tools", "stable", "main"),
    ("http://security.test/", "bookworm-security", "main"),
]


@pytest.fixture(autouse=True)
def no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootfs, "_KEYRINGS", ())


def test_the_suite_of_the_host_with_updates_and_security() -> None:
    source = rootfs.choose_source(TARGETS, "bookworm", "bookworm")
    assert source.lines == (
        f"deb {MIRROR} bookworm main",
        f"deb {MIRROR} bookworm-updates main",
        "deb http://security.test/ bookworm-security main",
    )


def test_another_suite_from_the_main_archive() -> None:
    source = rootfs.choose_source(TARGETS, "bookworm", "trixie")
    assert source == rootfs.Source("trixie", (f"deb {MIRROR} trixie main",))


def test_without_a_mirror_it_says_what_to_set() -> None:
    with pytest.raises(ClocheError, match="CLOCHE_GUEST_MIRROR"):
        rootfs.choose_source([], "bookworm", "bookworm")


async def test_the_environment_overrides_suite_and_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOCHE_GUEST_SUITE", "trixie")
    monkeypatch.setenv("CLOCHE_GUEST_MIRROR", "http://mine.test/debian")
    assert await rootfs.find_source() == rootfs.Source("trixie", ("deb http://mine.test/debian trixie main",))


def make_tree(tree: Path) -> None:
    for name in (
        "etc/apt/apt.conf.d",
        "var/lib/apt/lists/partial",
        "var/log/apt",
        "tmp",
        "run",
        "var/lib/dpkg",
    ):
        (tree / name).mkdir(parents=True)
    for name in (
        "etc/hosts",
        "etc/apt/apt.conf.d/99mmdebstrap",
        "var/log/apt/history.log",
        "var/lib/apt/lists/x",
    ):
        (tree / name).write_text("from the build")


def test_the_tree_is_set_up(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tmp_path / "tree/etc/resolv.conf").symlink_to(outside)
    (tmp_path / "tree/var/log/link").symlink_to(tmp_path)
    rootfs._configure(tmp_path / "tree", SOURCE)
    etc = tmp_path / "tree/etc"
    assert (etc / "hostname").read_text() == "sandbox\n"
    assert "127.0.1.1 sandbox" in (etc / "hosts").read_text()
    assert (etc / "machine-id").read_text() == ""
    assert not (etc / "apt/apt.conf.d/99mmdebstrap").exists()
    assert outside.read_text() == "precious"
    assert list((tmp_path / "tree/var/log").iterdir()) == [tmp_path / "tree/var/log/apt"]
    assert list((tmp_path / "tree/var/lib/apt/lists").iterdir()) == [tmp_path / "tree/var/lib/apt/lists/partial"]


def test_no_password_of_a_mirror_gets_into_the_guest(tmp_path: Path) -> None:
    make_tree(tmp_path)
    rootfs._configure(tmp_path, SOURCE)
    assert (tmp_path / "etc/apt/sources.list").read_text() == "deb http://mirror.test/debian/ bookworm main\n"


# ------------------------------------------------------------------ the image


@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="e2fsprogs is not installed")
async def test_the_image_is_sparse_sound_and_can_grow(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("content")
    image = tmp_path / "rootfs.raw"
    await rootfs.make_ext4(tree, image, 1024)
    assert image.stat().st_size == 1024 * 1024 * 1024
    assert files.allocated_bytes(image) < 64 * 1024 * 1024
    shown = (await process.run(["debugfs", "-R", "cat /file", image])).text
    assert shown == "content"
    header = (await process.run(["dumpe2fs", "-h", image])).text
    for feature in ("has_journal", "resize_inode", "extent", "64bit"):
        assert feature in header
    assert "Reserved block count:     0\n" in header


Build = Callable[..., Coroutine[Any, Any, None]]


def fake_build(disk_mb: int, *, fail: list[ClocheError] | None = None) -> tuple[Build, list[bool]]:
    """Stands for the packages: makes an image of the right size, or fails. Records the use of RAM."""
    calls: list[bool] = []

    async def build(_recipe: Recipe, _source: Any, work: Path, *_: Any, ram_mb: int) -> None:
        calls.append(ram_mb > 0)
        (work / "tree").mkdir()
        if ram_mb:
            await process.run(["mount", "-t", "tmpfs", "tmpfs", work / "tree"])
        if fail:
            raise fail.pop(0)
        with (work / "image/rootfs.raw").open("xb") as file:
            file.truncate(disk_mb * 1024 * 1024)

    return build, calls


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    async def source() -> rootfs.Source:
        return SOURCE

    async def installed(_tree: Path) -> dict[str, str]:
        return {"git": "1:2.39"}

    monkeypatch.setattr(rootfs, "find_source", source)
    monkeypatch.setattr(rootfs, "_installed", installed)
    monkeypatch.setattr(rootfs, "_ram_mb", lambda: 0)
    return monkeypatch


async def test_an_image_is_built_once(tmp_path: Path, prepared: pytest.MonkeyPatch) -> None:
    build, calls = fake_build(1024)
    prepared.setattr(rootfs, "_build", build)
    first = await rootfs.build_rootfs(RECIPE, tmp_path / "images", 1024, lambda _text: None)
    assert await rootfs.build_rootfs(RECIPE, tmp_path / "images", 1024, lambda _text: None) == first
    assert calls == [False]
    assert first.path == tmp_path / "images" / first.id / "rootfs.raw"
    assert [entry.name for entry in (tmp_path / "images").iterdir()] == [first.id]
    meta = json.loads((first.path.parent / "meta.json").read_text())
    assert meta["packages"] == {"git": "1:2.39"}


async def test_an_incomplete_image_is_built_again(tmp_path: Path, prepared: pytest.MonkeyPatch) -> None:
    build, calls = fake_build(1024)
    prepared.setattr(rootfs, "_build", build)
    image = await rootfs.build_rootfs(RECIPE, tmp_path, 1024, lambda _text: None)
    with image.path.open("r+b") as file:
        file.truncate(1)
    assert await rootfs.build_rootfs(RECIPE, tmp_path, 1024, lambda _text: None) == image
    assert len(calls) == 2


async def test_a_failed_build_leaves_nothing(tmp_path: Path, prepared: pytest.MonkeyPatch) -> None:
    build, _calls = fake_build(1024, fail=[ClocheError("template.bake_failed", "no")])
    prepared.setattr(rootfs, "_build", build)
    with pytest.raises(ClocheError, match="no"):
        await rootfs.build_rootfs(RECIPE, tmp_path / "images", 1024, lambda _text: None)
    assert list((tmp_path / "images").iterdir()) == []


async def test_a_full_ram_disk_is_followed_by_the_real_one(tmp_path: Path, prepared: pytest.MonkeyPatch) -> None:
    if (await process.run(["unshare", "-m", "true"], check=False)).returncode != 0:
        pytest.skip("mounting is not allowed here")
    build, calls = fake_build(1024, fail=[ClocheError("host.disk_full", "full")])
    prepared.setattr(rootfs, "_build", build)
    prepared.setattr(rootfs, "_ram_mb", lambda: 2048)
    await rootfs.build_rootfs(RECIPE, tmp_path, 1024, lambda _text: None)
    assert calls == [True, False]
    assert files.mounts_below(tmp_path) == []


async def test_a_full_real_disk_is_told(tmp_path: Path, prepared: pytest.MonkeyPatch) -> None:
    build, calls = fake_build(1024, fail=[ClocheError("host.disk_full", "full")])
    prepared.setattr(rootfs, "_build", build)
    with pytest.raises(ClocheError) as caught:
        await rootfs.build_rootfs(RECIPE, tmp_path, 1024, lambda _text: None)
    assert caught.value.code == "host.disk_full"
    assert calls == [False]


async def test_what_lies_below_is_built_first_and_handed_on(tmp_path: Path, prepared: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, str | None]] = []

    async def build(recipe: Recipe, _source: Any, work: Path, _mb: int, _progress: Any, below: Any, **_: Any) -> None:
        built.append((recipe.name, below and below.path.parent.name))
        (work / "tree").mkdir()
        with (work / "image" / "rootfs.raw").open("xb") as file:
            file.truncate(1024 * 1024)

    prepared.setattr(rootfs, "_build", build)
    upper = Recipe("upper", ("git", "jq"), disk_mb=1, below=Recipe("base", ("git",), disk_mb=1))
    made = await rootfs.build_rootfs(upper, tmp_path, 1, lambda _: None)
    below = await rootfs.build_rootfs(Recipe("base", ("git",)), tmp_path, 1, lambda _: None)
    assert built == [("base", None), ("upper", below.id)]
    assert made.id != below.id


async def test_only_what_is_missing_is_installed_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And everything where the image below cannot be mounted."""
    installed: list[tuple[list[str], bool]] = []
    mounts = True

    async def bootstrap(packages: Any, *_: Any, onto: bool = False) -> None:
        installed.append((sorted(packages), onto))

    async def copied(_image: Path, tree: Path, *_: Any) -> bool:
        (tree / "dev").mkdir(exist_ok=True)
        return mounts

    async def nothing(*_: Any) -> None:
        pass

    for name in ("_add_user", "_pack_locale", "make_ext4"):
        monkeypatch.setattr(rootfs, name, nothing)
    monkeypatch.setattr(rootfs, "_bootstrap", bootstrap)
    monkeypatch.setattr(rootfs, "_configure", lambda *_: None)
    monkeypatch.setattr(rootfs, "copy_image", copied)
    below = rootfs.RootfsImage("x", tmp_path / "rootfs.raw", 1, "bookworm", 1)
    for number, (names, mounts) in enumerate(((("git", "jq"), True), (("git",), True), (("git", "jq"), False))):  # noqa: B007
        recipe = Recipe("upper", names, below=Recipe("base", ("git",)))
        work = tmp_path / str(number)
        work.mkdir()
        await rootfs._build(recipe, SOURCE, work, 1, lambda _: None, below, ram_mb=0)
    assert installed == [(["jq"], True), (["git", "jq"], False)]
