"""What a machine is started with: its root, its limits, its files and who may read them."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Shape
from cloche_server.engine.qemu import launch, wall
from cloche_server.engine.qemu.launch import Handover, QemuConfig, Start
from cloche_server.engine.qemu.probe import QemuFacts
from cloche_server.engine.qemu.probes import CHECKS, Suspect, probe_vmm
from cloche_server.engine.qemu.wall import Wall
from cloche_server.host import process
from cloche_server.host.cgroups import CgroupFacts, Groups
from cloche_server.host.jail import Root
from cloche_server.host.overlay import HEADER
from cloche_server.host.uids import UidBlock

BASE = 3_000_000_000


@pytest.fixture
def made(tmp_path: Path) -> Wall:
    groups = Groups(CgroupFacts(0, (), (), {}), "b")
    return Wall(Root(()), UidBlock(BASE, BASE, tmp_path / "run"), groups, 5 << 20, "8:0")


async def test_a_root_holds_the_program_and_what_it_is_linked_with(tmp_path: Path) -> None:
    listed = await process.run(["ldd", "/bin/sh"])
    libraries = [Path(one) for one in wall._LIBRARY.findall(listed.text)]
    assert libraries
    root = wall._root(Path("/bin/sh"), libraries, [tmp_path], kvm=False)
    paths = [str(bind.path) for bind in root.binds]
    assert {str(tmp_path), os.path.realpath("/bin/sh"), "/dev/null"} <= set(paths)
    assert not {"/", "/usr", "/etc", "/proc", "/sys", "/usr/bin", "/bin", "/dev", "/home", "/root"} & set(paths)
    assert not any(one != other and one.startswith(other + "/") for one in paths for other in paths)
    assert {bind.path for bind in root.binds if bind.device} == {Path("/dev/null"), Path("/dev/urandom")}
    for link, target in root.links:
        assert (Path("/") / target).is_dir(), link


def test_limits_follow_the_shape(made: Wall) -> None:
    limits = made.limits(Shape(2, 1024), tcg_buffer_mb=128)
    assert limits.cpus == 2.25
    assert limits.memory_bytes == (1024 + 16 + 128 + 256) << 20
    assert (limits.pids, limits.weight, limits.disk_bps, limits.device) == (202, 2, 5 << 20, "8:0")


def test_numbers_go_up_without_gaps_and_everything_opened_is_closed(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with contextlib.ExitStack() as stack:
        hands = Handover(stack)
        hands.give(0, 0)
        assert [hands.open(tmp_path / "f", os.O_RDONLY) for _ in range(3)] == [3, 4, 5]
        assert hands.give(1) == 6
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "console.log").symlink_to("/etc/passwd")
    with contextlib.ExitStack() as stack, pytest.raises(OSError, match="symbolic links"):
        Handover(stack).open(tmp_path / "console.log", launch._APPEND)


def test_a_disk_that_names_a_file_of_the_host_is_not_opened(tmp_path: Path) -> None:
    disk = tmp_path / "top.qcow2"
    name = b"/etc/shadow"
    disk.write_bytes(HEADER.pack(b"QFI\xfb", 3, 512, len(name), 16, 1 << 30, 0, 2).ljust(512, b"\0") + name)
    with contextlib.ExitStack() as stack, pytest.raises(ClocheError) as caught:
        launch._open_disk(disk, Handover(stack))
    assert caught.value.code == "sandbox.boot_failed"
    assert "shadow" not in str(caught.value)


@pytest.mark.parametrize(
    ("disk_mb", "keeps", "limit_mb"),
    [(4096, False, 4096 + 81 + 256), (4096, True, 8192 + 256), (1 << 40, False, 20000)],
)
def test_no_file_is_larger_than_the_own_disk(
    made: Wall, tmp_path: Path, disk_mb: int, keeps: bool, limit_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the front of a disk claims is bounded by what any machine may have."""
    disk = tmp_path / "top.qcow2"
    name = b"below.qcow2"
    disk.write_bytes(HEADER.pack(b"QFI\xfb", 3, 512, len(name), 16, disk_mb << 20, 0, 2).ljust(512, b"\0") + name)
    launcher: Any = None
    config = QemuConfig(QemuFacts("/x", (9, 0, 0)), "tcg", 64, launcher, made, 20000)
    start = Start("m", tmp_path, Shape(1, 8192), tmp_path / "mem", disk, keeps_memory=keeps)
    monkeypatch.setattr(launch, "may_set_limits", lambda: True)
    assert launch._file_limit_mb(config, start) == limit_mb
    monkeypatch.setattr(launch, "may_set_limits", lambda: False)
    assert launch._file_limit_mb(config, start) == 20000, "one that could not grow with the disk"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to groups")
def test_a_memory_file_is_for_its_own_group_only(made: Wall, tmp_path: Path) -> None:
    memory = tmp_path / "mem"
    memory.touch(mode=0o666)
    group = made.uids.readable_by_group(memory)
    status = memory.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (0, group, 0o440)
    assert made.uids.readable_by_group(memory) == group


def test_probes_of_a_process_without_a_jail_have_held_nothing(made: Wall, tmp_path: Path) -> None:
    (tmp_path / "uid").write_text("1")
    suspect = Suspect("m", os.getpid(), tmp_path, tmp_path / "x.qcow2", tmp_path / "mem")
    for one in (probe_vmm(None, suspect), probe_vmm(made, suspect)):
        assert [probe.name for probe in one] == [name for name, _ in CHECKS]
        held = {probe.name for probe in one if probe.held}
        assert not held & {"vmm.user", "vmm.namespaces", "vmm.root", "vmm.memory", "vmm.limits", "vmm.descriptors"}


def test_probes_of_a_process_that_is_gone_say_why(made: Wall, tmp_path: Path) -> None:
    suspect = Suspect("m", 2**22 + 7, tmp_path, tmp_path / "x.qcow2", tmp_path / "mem")
    probes = probe_vmm(made, suspect)
    assert not any(probe.held for probe in probes if probe.name not in {"vmm.strangers", "vmm.own_files"})
    assert all(probe.detail for probe in probes)
