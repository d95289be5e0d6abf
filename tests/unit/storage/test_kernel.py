"""Modules are found, ordered and unpacked; a kernel counts only when it is complete."""

from __future__ import annotations

import json
import lzma
import struct
from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.host.process import Completed
from cloche_server.storage import initramfs, kernel


def module(depends: str) -> bytes:
    """A minimal ELF file: null section, names, `.modinfo`."""
    names = b"\0.shstrtab\0.modinfo\0"
    info = b"license=GPL\0depends=" + depends.encode() + b"\0name=x\0"
    names_at, info_at = 64, 64 + len(names)
    table = (info_at + len(info) + 7) // 8 * 8
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 1)

    def section(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 1, 0)

    body = header + names + info
    sections = section(0, 0, 0) + section(1, names_at, len(names)) + section(11, info_at, len(info))
    return body.ljust(table, b"\0") + sections


def make_tree(tree: Path, modules: dict[str, str], builtin: tuple[str, ...] = ()) -> Path:
    directory = tree / "kernel/drivers"
    directory.mkdir(parents=True)
    for name, depends in modules.items():
        content = module(depends)
        (directory / name).write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    (tree / "modules.builtin").write_text("".join(f"kernel/{name}.ko\n" for name in builtin))
    return tree


def names(tree: Path, *wanted: str) -> list[str]:
    return [path.name for path, _ in kernel.load_order(tree, wanted)]


def test_dependencies_come_first_and_once(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"a.ko": "b,c", "b.ko": "c", "c.ko": "", "unused.ko": ""})
    assert names(tree, "a", "c", "b") == ["c.ko", "b.ko", "a.ko"]


def test_dash_and_underscore_are_the_same(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"virtio-rng.ko": "virtio_ring", "virtio_ring.ko": ""})
    assert names(tree, "virtio_rng") == ["virtio_ring.ko", "virtio-rng.ko"]


def test_builtin_modules_are_left_out(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"a.ko": "base"}, builtin=("drivers/base", "fs/ext4/ext4"))
    assert names(tree, "ext4", "a") == ["a.ko"]


def test_packed_modules_are_unpacked(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"a.ko.xz": "b", "b.ko": ""})
    order = kernel.load_order(tree, ["a"])
    assert [content[:4] for _, content in order] == [b"\x7fELF", b"\x7fELF"]


def test_a_missing_module_is_named_with_who_needs_it(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"a.ko": "gone"})
    with pytest.raises(ClocheError, match="no module gone") as caught:
        names(tree, "a")
    assert caught.value.details == {"for": ("a",)}


def test_a_circle_of_dependencies_ends(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"a.ko": "b", "b.ko": "a"})
    assert names(tree, "a") == ["b.ko", "a.ko"]


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not a module at all" * 10, module("a")[:200]])
def test_a_broken_module_is_an_error(content: bytes) -> None:
    with pytest.raises(ClocheError) as caught:
        kernel.module_depends(content)
    assert caught.value.code == "template.bake_failed"


# ------------------------------------------------------------------ on disk


def make_kernel(data: Path, version: str) -> kernel.GuestKernel:
    unpacked = data / f"unpacked-{version}"
    (unpacked / "boot").mkdir(parents=True)
    (unpacked / "boot" / f"vmlinuz-{version}").write_bytes(b"kernel")
    needed = {f"{name}.ko": "" for name in kernel.MODULES if name != "ext4"}
    make_tree(unpacked / "lib/modules" / version, needed, builtin=("fs/ext4",))
    target = data / "kernels" / version
    target.mkdir(parents=True)
    return kernel._collect(unpacked, target, ["linux-image"])


def test_the_newest_complete_kernel_is_found(tmp_path: Path) -> None:
    assert kernel.find_kernel(tmp_path) is None
    for version in ("6.1.0-9-cloud-amd64", "6.1.0-57-cloud-amd64", "5.10.0-99-cloud-amd64"):
        make_kernel(tmp_path, version)
    newest = kernel.find_kernel(tmp_path)
    assert newest is not None
    assert newest.version == "6.1.0-57-cloud-amd64"
    assert newest.vmlinuz.read_bytes() == b"kernel"
    (newest.modules_dir / "overlay.ko").unlink()
    older = kernel.find_kernel(tmp_path)
    assert older is not None
    assert older.version == "6.1.0-9-cloud-amd64"


def test_a_kernel_of_an_older_layout_does_not_count(tmp_path: Path) -> None:
    made = make_kernel(tmp_path, "6.1.0")
    meta = made.vmlinuz.with_name("meta.json")
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "layout": 0}))
    assert kernel.find_kernel(tmp_path) is None


async def test_what_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_kernel(tmp_path, "6.1.0")

    async def forbidden(*_args: object, **_options: object) -> Completed:
        raise AssertionError("no program may run")

    monkeypatch.setattr(kernel, "run", forbidden)
    assert await kernel.fetch_kernel(tmp_path, print) == made


DEPENDS = {
    "linux-image-cloud-amd64": "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-57-cloud-amd64\n",
    "linux-image-virtual": "linux-image-virtual\n  Depends: linux-image-6.8.0-50-generic\n",
    "linux-image-6.1.0-57-cloud-amd64": "x\n  Depends: kmod\n |Depends: linux-initramfs-tool\n",
    "linux-image-6.8.0-50-generic": "x\n  Depends: kmod\n  Depends: linux-modules-6.8.0-50-generic\n",
}


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("linux-image-cloud-amd64", ["linux-image-6.1.0-57-cloud-amd64"]),
        ("linux-image-virtual", ["linux-image-6.8.0-50-generic", "linux-modules-6.8.0-50-generic"]),
    ],
)
async def test_the_meta_package_is_resolved(monkeypatch: pytest.MonkeyPatch, known: str, expected: list[str]) -> None:
    async def fake(argv: list[str], **_options: object) -> Completed:
        name = argv[-1]
        hidden = name in kernel.META_PACKAGES and name != known
        return Completed(b"" if hidden else DEPENDS[name].encode(), b"", 100 if hidden else 0)

    monkeypatch.setattr(kernel, "run", fake)
    assert await kernel._lookup() == expected


# ------------------------------------------------------------------ initramfs


async def test_initramfs_is_named_by_its_content(tmp_path: Path) -> None:
    made = make_kernel(tmp_path, "6.1.0")
    agent = tmp_path / "agent"
    agent.write_bytes(b"one")
    first = await initramfs.build_initramfs(made, agent, tmp_path / "out")
    assert await initramfs.build_initramfs(made, agent, tmp_path / "out") == first
    agent.write_bytes(b"two")
    assert await initramfs.build_initramfs(made, agent, tmp_path / "out") != first
    content = first.read_bytes()
    assert content.startswith(b"070701")
    assert b"virtio_mmio.ko\nvirtio_blk.ko\n" in content


async def test_without_an_agent_there_is_no_initramfs(tmp_path: Path) -> None:
    made = make_kernel(tmp_path, "6.1.0")
    with pytest.raises(ClocheError, match="agent binary"):
        await initramfs.build_initramfs(made, tmp_path / "none", tmp_path / "out")
