"""What a disk lies over: only what we made it lie over, whatever a machine has written into it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloche_server.host import overlay
from cloche_server.host.overlay import HEADER, below, chain, read_header, record_below


def disk(path: Path, backing: str) -> Path:
    """The front of a qcow2 file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = backing.encode()
    front = HEADER.pack(b"QFI\xfb", 3, 512, len(name), 16, 1 << 30, 0, 2)
    path.write_bytes(front.ljust(512, b"\0") + name)
    return path


def host(tmp_path: Path) -> Path:
    """A layer over another one over the disk of a template over an image."""
    (tmp_path / "images/i1").mkdir(parents=True)
    (tmp_path / "images/i1/rootfs.raw").touch()
    disk(tmp_path / "templates/t1/disk.qcow2", "../../images/i1/rootfs.raw")
    disk(tmp_path / "layers/below.qcow2", "../templates/t1/disk.qcow2")
    return disk(tmp_path / "layers/top.qcow2", "below.qcow2")


def test_the_chain_ends_at_the_image(tmp_path: Path) -> None:
    names = [str(path.relative_to(tmp_path)) for path in chain(host(tmp_path))]
    assert names == [
        "layers/top.qcow2",
        "layers/below.qcow2",
        "templates/t1/disk.qcow2",
        "images/i1/rootfs.raw",
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/shadow", "../../../etc/shadow", "../cloche.db", "json:{}", "nbd://1.2.3.4/x", "/dev/vda", "a/b.qcow2"),
        *("../templates/t1/mem", "../templates/../cloche.db", "../templates/t1/../../x/disk.qcow2", ".qcow2", "x"),
        *("../../images/i1/../../cloche.db", "../../images/i1/rootfs.raw/..", "fat:/root", "below.qcow2\n"),
    ],
)
def test_other_names_are_not_followed(name: str, tmp_path: Path) -> None:
    top = disk(host(tmp_path), name)
    with pytest.raises(ValueError, match="none of ours"):
        chain(top)


def test_a_name_that_was_written_down_cannot_be_changed(tmp_path: Path) -> None:
    """Not even to that of another layer, which would be somebody else's disk."""
    top = host(tmp_path)
    record_below(top, "below.qcow2")
    if overlay.recorded_below(top) is None:
        pytest.skip("this file system has no such attributes")
    assert below(top) == "below.qcow2"
    disk(tmp_path / "layers/theirs.qcow2", "../templates/t1/disk.qcow2")
    with top.open("r+b") as file:
        file.seek(512)
        file.write(b"theirs.qcow2")
        file.seek(0)
        file.write(HEADER.pack(b"QFI\xfb", 3, 512, 12, 16, 1 << 30, 0, 2))
    with pytest.raises(ValueError, match="changed"):
        chain(top)


def test_a_disk_over_itself_is_refused(tmp_path: Path) -> None:
    top = disk(tmp_path / "layers/one.qcow2", "two.qcow2")
    disk(tmp_path / "layers/two.qcow2", "one.qcow2")
    with pytest.raises(ValueError, match="over itself"):
        chain(top)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(front=st.binary(max_size=700) | st.binary(max_size=600).map(lambda raw: b"QFI\xfb\0\0\0\3" + raw))
def test_hostile_bytes_are_read_or_refused(front: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hostile.qcow2"
    path.write_bytes(front)
    try:
        header = read_header(path)
        assert len(header.backing.encode()) <= overlay.NAME_MAX
        found = below(path)
    except ValueError:
        return
    assert not Path(found).is_absolute()
