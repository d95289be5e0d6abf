"""Snapshots on disk: whole or not there, refused when damaged or of another machine, and gone when removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import Captured
from cloche_server.core.records import ExecDefaults, Shape
from cloche_server.host import files
from cloche_server.host.pages import PAGE, Pages
from cloche_server.storage import saved
from cloche_server.storage import snapshots as snapshots_module
from cloche_server.storage.snapshots import Snapshot, SnapshotCatalog

RUNS = [(0, 2), (100, 1)]


def captured() -> Captured:
    return Captured(b"device state", Pages(RUNS, memoryview(bytearray(b"m" * 3 * PAGE))), 1.0)


def snapshot(number: int = 1, **changes: Any) -> Snapshot:
    one = Snapshot(
        id=f"snapshot{number}",
        workspace="w",
        sandbox_id="sandbox",
        name="näme",
        created_at=float(number),
        template="py",
        template_name="base",
        template_id="base-1",
        fingerprint="f1",
        shape=Shape(2, 256),
        disk_mb=2048,
        layer_id="layer",
        defaults=ExecDefaults({"A": "1"}, "/srv", "user"),
        metadata={"k": "v"},
        parent_snapshot_id="parent",
    )
    return replace(one, **changes)


@pytest.fixture
def catalog(tmp_path: Path) -> SnapshotCatalog:
    catalog = SnapshotCatalog(tmp_path)
    assert catalog.read() == []
    return catalog


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path = tmp_path / "layer.qcow2"
    path.write_bytes(b"disk")
    return path


def names(catalog: SnapshotCatalog) -> set[str]:
    return {path.name for path in catalog.root.iterdir()}


def test_what_is_published_is_found_again(tmp_path: Path, catalog: SnapshotCatalog, layer: Path) -> None:
    done = catalog.publish(snapshot(), captured(), [layer])
    assert done == snapshot(size_bytes=done.size_bytes)
    assert done.size_bytes >= 3 * PAGE
    for each in (catalog, SnapshotCatalog(tmp_path)):
        assert each.read() == each.of("w") == [done]
        assert each.get("w", done.id) == done
        state = each.load(done, "f1")
        assert state.device_state.read_bytes() == b"device state"
        assert (state.pages.runs, bytes(state.pages.data)) == (tuple(RUNS), b"m" * 3 * PAGE)
        state.pages.close()
    assert names(catalog) == {done.id}
    assert (catalog.root / done.id).stat().st_mode & 0o077 == 0, "only root may look in"


def test_newest_first_and_only_ones_own(catalog: SnapshotCatalog) -> None:
    for number, workspace in ((2, "w"), (1, "w"), (3, "w"), (4, "other")):
        catalog.publish(snapshot(number, workspace=workspace), captured(), [])
    assert [one.id for one in catalog.of("w")] == ["snapshot3", "snapshot2", "snapshot1"]
    assert [one.id for one in catalog.of("other")] == ["snapshot4"]
    assert catalog.of("nobody") == []
    for workspace, name in (("w", "snapshot4"), ("other", "snapshot1"), ("w", "no"), ("w", "../snapshots/snapshot1")):
        with pytest.raises(ClocheError) as told:
            catalog.get(workspace, name)
        assert told.value.code == "snapshot.not_found"


def test_what_is_removed_is_gone(tmp_path: Path, catalog: SnapshotCatalog) -> None:
    done = catalog.publish(snapshot(), captured(), [])
    state = catalog.load(done, "f1")
    assert catalog.remove(done) is True
    assert names(catalog) == set()
    assert catalog.of("w") == SnapshotCatalog(tmp_path).read() == []
    assert bytes(state.pages.data) == b"m" * 3 * PAGE, "what is in use already stays readable"
    state.pages.close()
    assert catalog.remove(done) is False, "somebody else has: its layer is let go of once"
    with pytest.raises(ClocheError) as told:
        catalog.load(done, "f1")
    assert told.value.code == "snapshot.corrupt"


def test_what_cannot_be_removed_is_still_there(catalog: SnapshotCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    done = catalog.publish(snapshot(), captured(), [])

    def refuse(*_: object) -> None:
        raise OSError(30, "read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(OSError):
            catalog.remove(done)
    assert catalog.get("w", done.id) == done
    catalog.load(done, "f1").pages.close()
    assert catalog.remove(done) is True


def test_what_somebody_has_removed_by_hand(catalog: SnapshotCatalog) -> None:
    done = catalog.publish(snapshot(), captured(), [])
    shutil.rmtree(catalog.root / done.id)
    assert catalog.remove(done) is True
    assert catalog.of("w") == []


# ------------------------------------------------------------------ damage


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "shorter":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "longer":
        path.write_bytes(raw + b"x")
    else:
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


@pytest.mark.parametrize("name", ["pages", "dev"])
@pytest.mark.parametrize("how", ["gone", "shorter", "longer", "one bit"])
def test_a_damaged_file_is_refused(tmp_path: Path, catalog: SnapshotCatalog, name: str, how: str) -> None:
    done = catalog.publish(snapshot(), captured(), [])
    catalog.load(done, "f1").pages.close()  # seen whole before: a file that changes is looked at again
    damage(catalog.root / done.id / name, how)
    for each in (catalog, SnapshotCatalog(tmp_path)):
        with pytest.raises(ClocheError) as told:
            each.load(done, "f1")
        assert told.value.code == "snapshot.corrupt"


def test_digests_are_compared_once(catalog: SnapshotCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    done = catalog.publish(snapshot(), captured(), [])
    hashed: list[str] = []
    hash_file = files.hash_file

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(files, "hash_file", counting)
    for _ in range(3):
        catalog.load(done, "f1").pages.close()
    assert sorted(hashed) == ["dev", "pages"]


@given(st.integers(0, 2000), st.integers(0, 255))
@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_description_is_never_more_than_refused(catalog: SnapshotCatalog, at: int, value: int) -> None:
    done = snapshot()
    if "snapshot1" not in names(catalog):
        catalog.publish(done, captured(), [])
    meta = catalog.root / done.id / "meta.json"
    whole = meta.read_bytes()
    raw = bytearray(whole)
    raw[at % len(raw)] = value
    meta.write_bytes(bytes(raw))
    try:
        catalog.read()
        catalog.load(done, "f1").pages.close()
    except ClocheError as error:
        assert error.code in {"snapshot.corrupt", "snapshot.incompatible"}  # noqa: PT017
    finally:
        meta.write_bytes(whole)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"x"',
        b"{}",
        b'{"format": 2}',
        b'{"format": "1"}',
        b"\xff\xfe",
        b'{"format": 1}',
    ],
)
def test_a_description_that_is_none(tmp_path: Path, catalog: SnapshotCatalog, raw: bytes) -> None:
    """It is not listed, not removed either, and the others are."""
    done = catalog.publish(snapshot(1), captured(), [])
    other = catalog.publish(snapshot(2), captured(), [])
    (catalog.root / done.id / "meta.json").write_bytes(raw)
    again = SnapshotCatalog(tmp_path)
    assert again.read() == [other]
    assert again.unreadable == (done.id,)
    assert names(again) == {done.id, other.id}
    with pytest.raises(ClocheError):
        again.load(done, "f1")


def test_a_description_without_digests(catalog: SnapshotCatalog) -> None:
    done = catalog.publish(snapshot(), captured(), [])
    path = catalog.root / done.id / "meta.json"
    whole = json.loads(path.read_bytes())
    for digests in (None, {}, [], {"dev": whole["digests"]["dev"]}, {"dev": 1, "pages": 2}):
        path.write_text(json.dumps({**whole, "digests": digests}))
        with pytest.raises(ClocheError) as told:
            catalog.load(done, "f1")
        assert told.value.code == "snapshot.corrupt"


# ------------------------------------------------------------------ another machine


def test_another_machine_does_not_continue_it(catalog: SnapshotCatalog) -> None:
    done = catalog.publish(snapshot(), captured(), [])
    with pytest.raises(ClocheError) as told:
        catalog.load(done, "f2")
    assert told.value.code == "snapshot.incompatible"
    assert "f1" in told.value.message
    assert "f2" in told.value.message
    with pytest.raises(ClocheError) as told:
        catalog.load(replace(done, template_id="base-2"), "f1")
    assert told.value.code == "snapshot.incompatible"
    assert "base-2" in told.value.message
    catalog.load(done, "f1").pages.close()


def test_a_memory_of_another_size_is_refused(catalog: SnapshotCatalog) -> None:
    """More pages than the memory has are not written past its end."""
    pages = Pages([(256 * 256 - 1, 1)], memoryview(bytearray(PAGE)))
    done = catalog.publish(snapshot(), Captured(b"", pages, 1.0), [])
    catalog.load(done, "f1").pages.close()
    with pytest.raises(ClocheError) as told:
        catalog.load(replace(done, shape=Shape(2, 255)), "f1")
    assert told.value.code == "snapshot.corrupt"


# ------------------------------------------------------------------ interruptions


def full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "no space left on device")


def full_above(path: Path) -> None:
    if path.name == "snapshots":
        full()


PLACES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "pages": lambda patched: patched.setattr(Pages, "save", full),
    "device state": lambda patched: patched.setattr(Path, "write_bytes", full),
    "description": lambda patched: patched.setattr(Path, "write_text", full),
    "its layers": lambda patched: patched.setattr(saved, "_fsync", full),
    "its name": lambda patched: patched.setattr(Path, "rename", full),
    "its directory": lambda patched: patched.setattr(files, "fsync_dir", full),
    "the directory above": lambda patched: patched.setattr(files, "fsync_dir", full_above),
    "the look at it": lambda patched: patched.setattr(snapshots_module, "_size", full),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_a_publish_that_fails_leaves_nothing(
    tmp_path: Path, catalog: SnapshotCatalog, layer: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with monkeypatch.context() as patched:
        PLACES[place](patched)
        with pytest.raises((OSError, ClocheError)):
            catalog.publish(snapshot(), captured(), [layer])
    assert names(catalog) == set()
    assert catalog.of("w") == SnapshotCatalog(tmp_path).read() == []
    catalog.publish(snapshot(), captured(), [layer])
    assert len(catalog.of("w")) == 1


def test_a_layer_that_is_gone_is_no_snapshot(catalog: SnapshotCatalog, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        catalog.publish(snapshot(), captured(), [tmp_path / "gone.qcow2"])
    assert names(catalog) == set()


def test_what_a_killed_server_was_writing_is_swept(tmp_path: Path, catalog: SnapshotCatalog) -> None:
    done = catalog.publish(snapshot(1), captured(), [])
    for half in (".staging-4194304-1-abcd", ".staging-1-1-abcd"):
        (catalog.root / half / "snapshot").mkdir(parents=True)
        shutil.copy(catalog.root / done.id / "meta.json", catalog.root / half / "snapshot")
    again = SnapshotCatalog(tmp_path)
    assert again.read() == [done]
    assert names(again) == {done.id}
    assert again.unreadable == ()
