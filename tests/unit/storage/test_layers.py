"""Layers of a disk: real qcow2 files made by patching a header, and held by exactly those who need them."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import BakedTemplate
from cloche_server.core.records import Shape
from cloche_server.storage import layers as layers_module
from cloche_server.storage.layers import Layers, make_overlay, read_header
from kit.fake_engine import template

MB = 1024 * 1024

needs_qemu_img = pytest.mark.skipif(
    shutil.which("qemu-img") is None,
    reason="QEMU-IMG IS MISSING: nothing proves that what is made is qcow2; install qemu-utils",
)


@pytest.fixture
def base(tmp_path: Path) -> BakedTemplate:
    (tmp_path / "layers").mkdir()
    return template(tmp_path)


@pytest.fixture
def layers(tmp_path: Path, base: BakedTemplate) -> Layers:
    return Layers(tmp_path)


def there(layers: Layers) -> set[str]:
    return {path.name.removesuffix(layers_module.SUFFIX) for path in layers.root.iterdir()}


# ------------------------------------------------------------------ the front of a file


def qemu_img(*words: str | Path) -> str:
    return subprocess.run(["qemu-img", *map(str, words)], check=True, capture_output=True, text=True).stdout


def info(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(qemu_img("info", "-U", "--output=json", path))
    return found


def real_template(data: Path, disk_mb: int = 1024, cluster: str = "65536") -> BakedTemplate:
    """As a bake makes it: a disk and an empty overlay over a name that will be true later."""
    directory = data / "templates" / "base-1"
    directory.mkdir(parents=True)
    (data / "layers").mkdir()
    size, options = str(disk_mb * MB), ["-o", f"cluster_size={cluster}"]
    qemu_img("create", "-q", "-f", "qcow2", directory / "disk.qcow2", size)
    overlay = [directory / "overlay.qcow2", size]
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", "../../x/disk.qcow2", "-F", "qcow2", *options, *overlay)
    return BakedTemplate("base-1", "base", directory, Shape(1, 256), disk_mb, "tcg", 0, 0.0)


@needs_qemu_img
def test_a_layer_over_a_layer_over_a_template_is_a_disk(tmp_path: Path) -> None:
    baked = real_template(tmp_path)
    layers = Layers(tmp_path)
    first = layers.create("first", baked)
    second = layers.create("second", baked, "first")
    chain = json.loads(qemu_img("info", "--output=json", "--backing-chain", second))
    assert [Path(one["filename"]).name for one in chain] == ["second.qcow2", "first.qcow2", "disk.qcow2"]
    assert {one["virtual-size"] for one in chain} == {1024 * MB}
    assert chain[0]["backing-filename"] == "first.qcow2"
    assert chain[1]["backing-filename"] == "../templates/base-1/disk.qcow2"
    assert chain[0]["backing-filename-format"] == "qcow2"
    for path in (first, second):
        assert "No errors were found" in qemu_img("check", path)
        assert path.stat().st_mode & 0o777 == 0o600


@needs_qemu_img
def test_what_is_written_to_a_layer_is_read_through_the_next_and_not_below(tmp_path: Path) -> None:
    baked = real_template(tmp_path)
    layers = Layers(tmp_path)
    first = layers.create("first", baked)
    _qemu_io(first, "write -P 0x41 512M 1M")
    second = layers.create("second", baked, "first")
    _qemu_io(second, "read -P 0x41 512M 1M", "write -P 0x42 512M 64k", "read -P 0x42 512M 64k")
    _qemu_io(first, "read -P 0x41 512M 1M")
    _qemu_io(baked.directory / "disk.qcow2", "read -P 0 512M 1M")
    for path in (first, second):
        assert "No errors were found" in qemu_img("check", path)


def _qemu_io(path: Path, *commands: str) -> None:
    if shutil.which("qemu-io") is None:
        pytest.skip("QEMU-IO IS MISSING: nothing proves that a layer can be written; install qemu-utils")
    words = [word for command in commands for word in ("-c", command)]
    done = subprocess.run(["qemu-io", "-f", "qcow2", *words, path], check=True, capture_output=True, text=True)
    assert "failed" not in done.stdout, done.stdout


@needs_qemu_img
@pytest.mark.parametrize("size_mb", [1, 512, 513, 4096, 40 * 1024, 1024 * 1024])
def test_a_disk_of_another_size(tmp_path: Path, size_mb: int) -> None:
    """The disk of a sandbox may have been grown far beyond its template's."""
    baked = real_template(tmp_path)
    make_overlay(baked.directory / "overlay.qcow2", tmp_path / "o.qcow2", "templates/base-1/disk.qcow2", size_mb * MB)
    assert info(tmp_path / "o.qcow2")["virtual-size"] == size_mb * MB
    assert "No errors were found" in qemu_img("check", tmp_path / "o.qcow2")
    _qemu_io(tmp_path / "o.qcow2", f"write -P 0x41 {size_mb * 1024 - 64}k 64k")
    assert "No errors were found" in qemu_img("check", tmp_path / "o.qcow2")


@needs_qemu_img
@pytest.mark.parametrize("cluster", ["4096", "65536", "2097152"])
def test_other_sizes_of_a_cluster(tmp_path: Path, cluster: str) -> None:
    baked = real_template(tmp_path, cluster=cluster)
    layers = Layers(tmp_path)
    layers.create("first", baked)
    second = layers.create("second", baked, "first")
    assert read_header(second).cluster_bits == int(cluster).bit_length() - 1
    assert "No errors were found" in qemu_img("check", second)


@needs_qemu_img
def test_a_long_name_and_then_a_short_one(tmp_path: Path) -> None:
    """Nothing of the longer name is left behind the shorter."""
    baked = real_template(tmp_path)
    long, short = tmp_path / "long.qcow2", tmp_path / "short.qcow2"
    make_overlay(baked.directory / "overlay.qcow2", long, "a" * 1000, MB)
    assert read_header(long).backing == "a" * 1000
    make_overlay(long, short, "é.qcow2", MB)
    assert read_header(short).backing == "é.qcow2"
    assert info(short)["backing-filename"] == "é.qcow2"
    assert b"aaaa" not in short.read_bytes()
    with pytest.raises(ValueError, match="too long"):
        make_overlay(long, tmp_path / "x.qcow2", "a" * 1024, MB)


def test_a_disk_that_no_table_of_one_cluster_describes(tmp_path: Path, base: BakedTemplate) -> None:
    with pytest.raises(ValueError, match="too large"):
        make_overlay(base.directory / "overlay.qcow2", tmp_path / "x.qcow2", "b", 1 << 60)
    assert not (tmp_path / "x.qcow2").exists()


def front(**changes: int | bytes) -> bytes:
    fields: dict[str, int | bytes] = {
        "magic": b"QFI\xfb", "version": 3, "offset": 512, "length": 4, "bits": 16, "size": 1 << 30, "crypt": 0, "l1": 2,
    }  # fmt: skip
    fields.update(changes)
    return struct.pack(">4sIQIIQII", *fields.values()).ljust(512, b"\0") + b"base"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        front()[:39],
        front()[:513],
        front(magic=b"QED\0"),
        front(offset=0),
        front(offset=1 << 16),
        front(length=0),
        front(length=1024),
        front(length=2**32 - 1),
        front(bits=8),
        front(bits=22),
        front(bits=2**32 - 1),
        front()[:-4] + b"\xff\xfe\xff\xfe",
    ],
)
def test_what_is_no_overlay_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(ValueError):
        read_header(tmp_path / "x")


@given(st.binary(max_size=600) | st.builds(lambda raw: b"QFI\xfb" + raw, st.binary(max_size=600)))
@hypothesis_settings(max_examples=200, deadline=None)
def test_garbage_is_refused_or_read_within_bounds(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.qcow2"
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except ValueError:
        return
    assert 0 < len(header.backing.encode()) <= 1023
    assert 9 <= header.cluster_bits <= 21


# ------------------------------------------------------------------ who holds what


def test_the_last_to_let_go_removes_it_and_what_lay_below(layers: Layers, base: BakedTemplate) -> None:
    layers.create("a", base)
    layers.create("b", base, "a")
    layers.create("c", base, "b")
    assert layers.chain("c") == ["c", "b", "a"]
    assert layers.bytes_of("c") >= layers.bytes_of("a") > 0
    layers.release("a")
    layers.release("b")
    assert there(layers) == {"a", "b", "c"}
    layers.release("c")
    assert there(layers) == set()


def test_two_over_one(layers: Layers, base: BakedTemplate) -> None:
    layers.create("a", base)
    for name in ("b", "c"):
        layers.create(name, base, "a")
    layers.release("a")
    layers.release("b")
    assert there(layers) == {"a", "c"}
    layers.release("c")
    assert there(layers) == set()


def test_letting_go_of_what_is_gone_harms_nobody(layers: Layers, base: BakedTemplate) -> None:
    layers.create("a", base)
    layers.create("b", base, "a")
    layers.release("b")
    layers.release("b")
    layers.release("never")
    assert there(layers) == {"a"}, "b let go of it once"
    layers.release("a")
    assert there(layers) == set()


@pytest.mark.parametrize("what", ["missing", "damaged", "no template"])
def test_a_layer_that_cannot_be_made_leaves_nothing(layers: Layers, base: BakedTemplate, what: str) -> None:
    layers.create("a", base)
    if what == "missing":
        layers.path("a").unlink()
    elif what == "damaged":
        layers.path("a").write_bytes(b"not a disk")
    else:
        (base.directory / "overlay.qcow2").unlink()
    with pytest.raises(ClocheError) as told:
        layers.create("b", base, "a")
    assert told.value.code == "template.corrupt"
    assert "b" not in there(layers)
    layers.release("b")
    layers.release("a")
    assert there(layers) == set()


def test_a_full_disk_leaves_nothing(layers: Layers, base: BakedTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    layers.create("a", base)

    def full(_source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(layers_module.files, "copy_sparse", full)
    with pytest.raises(OSError):
        layers.create("b", base, "a")
    assert there(layers) == {"a"}
    layers.release("a")
    assert there(layers) == set()


def test_one_file_that_resists_keeps_none_below_it(
    layers: Layers, base: BakedTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers.create("a", base)
    layers.create("b", base, "a")
    layers.release("a")
    unlink, resists = Path.unlink, {layers.path("b")}

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path in resists:
            raise OSError(5, "input/output error")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    with pytest.raises(OSError):
        layers.release("b")
    assert there(layers) == {"b"}
    resists.clear()
    layers.release("b")
    assert there(layers) == set(), "letting go may be repeated after a failure"


def test_many_threads_at_once(layers: Layers, base: BakedTemplate) -> None:
    """The children of one fork are made on threads, and all hold the same layer."""

    class Slow(dict[str, int]):
        """Another thread gets its turn between a look and what is made of it; else this would hardly ever fail."""

        def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
            found = super().get(key, default)
            time.sleep(0)
            return found

    layers._holds = Slow()
    layers.create("parent", base)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(40):
            layers.create(f"{number}-{turn}", base, "parent")
            layers.hold("parent")
            layers.release(f"{number}-{turn}")
            layers.release("parent")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert layers._holds == {"parent": 1}
    assert there(layers) == {"parent"}
    layers.release("parent")
    assert there(layers) == set()


# ------------------------------------------------------------------ a new start


def test_stock_is_taken_from_the_files(tmp_path: Path, layers: Layers, base: BakedTemplate) -> None:
    layers.create("a", base)
    layers.create("b", base, "a")
    layers.create("c", base, "b")
    layers.create("lonely", base, "a")
    again = Layers(tmp_path)
    assert again.take_stock(["c", "b", "c"]) == 1
    assert there(again) == {"a", "b", "c"}
    assert again.chain("c") == ["c", "b", "a"]
    for name in ("c", "b"):
        again.release(name)
        assert there(again) == {"a", "b", "c"}
    again.release("c")
    assert there(again) == set()


def test_stock_of_nothing(tmp_path: Path, layers: Layers, base: BakedTemplate) -> None:
    assert Layers(tmp_path / "nowhere").take_stock([]) == 0
    assert layers.take_stock(["gone"]) == 0
    layers.create("a", base)
    (layers.root / "half.qcow2").write_bytes(b"QF")
    assert layers.take_stock([]) == 2
    assert there(layers) == set()


def test_what_is_under_an_unreadable_layer_is_kept(tmp_path: Path, layers: Layers, base: BakedTemplate) -> None:
    """What it lies over is not known, so nothing can be told to be of no use."""
    layers.create("a", base)
    layers.create("b", base, "a")
    layers.path("b").write_bytes(b"damaged")
    assert layers.take_stock(["b"]) == 0
    assert there(layers) == {"a", "b"}
    assert layers.take_stock([]) == 2, "with nobody to need it, it goes like any other"


def test_files_that_name_each_other(layers: Layers, base: BakedTemplate) -> None:
    for name, below in (("a", "b"), ("b", "a"), ("self", "self")):
        make_overlay(base.directory / "overlay.qcow2", layers.path(name), f"{below}.qcow2", MB)
    layers.take_stock(["a", "self"])
    assert there(layers) == {"a", "b", "self"}
    assert layers.chain("a") == ["a", "b"]
    assert layers.chain("self") == ["self"]
