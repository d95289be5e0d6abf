"""Control groups, version 2 and 1, on trees of plain files: what is written where, in which order, and removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche_server.host import cgroups
from cloche_server.host.cgroups import Groups, Limits, probe, values

LIMITS = Limits(cpus=1.25, weight=1, memory_bytes=600 << 20, pids=201, disk_bps=1 << 20, device="8:0")


def tree_2(root: Path, controllers: str = "cpuset cpu io memory pids") -> Path:
    (root / "cgroup.controllers").write_text(controllers)
    (root / "cgroup.subtree_control").write_text("")
    return root


def tree_1(root: Path, *controllers: str) -> Path:
    for name in controllers:
        (root / name).mkdir()
        (root / name / "cgroup.procs").touch()
    return root


def kernel_makes_files(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A directory of a real control group is never empty."""
    mkdir = Path.mkdir

    def make(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        mkdir(self, mode, parents, exist_ok)
        for name in (*names, "cgroup.procs", "cgroup.subtree_control"):
            (self / name).touch()

    rmdir = Path.rmdir

    def remove(self: Path) -> None:
        for one in self.iterdir():
            one.unlink()
        rmdir(self)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)


def test_version_2_is_taken_where_it_has_everything(tmp_path: Path) -> None:
    facts = probe(tree_2(tmp_path))
    assert (facts.version, facts.missing) == (2, ())
    assert set(facts.roots) == {"cpu", "memory", "pids", "io"}
    assert set(facts.roots.values()) == {tmp_path}


def test_version_1_has_a_hierarchy_each(tmp_path: Path) -> None:
    facts = probe(tree_1(tmp_path, "cpu", "memory", "pids", "blkio"))
    assert (facts.version, facts.missing) == (1, ())
    assert facts.roots["memory"] == tmp_path / "memory"


@pytest.mark.parametrize(
    ("controllers", "version", "missing"),
    [("memory", 1, ("cpu", "pids")), ("", 0, ("cpu", "memory", "pids"))],
)
def test_what_is_missing_is_named(tmp_path: Path, controllers: str, version: int, missing: tuple[str, ...]) -> None:
    facts = probe(tree_1(tmp_path, *controllers.split()))
    assert (facts.version, facts.missing) == (version, missing)


def test_a_part_of_version_2_is_better_than_nothing(tmp_path: Path) -> None:
    facts = probe(tree_2(tmp_path, "cpu pids"))
    assert (facts.version, facts.missing, set(facts.roots)) == (2, ("memory",), {"cpu", "pids"})


def test_values_of_version_2() -> None:
    assert values(2, LIMITS) == {
        "cpu": [("cpu.max", "125000 100000"), ("cpu.weight", "100")],
        "memory": [("memory.max", "629145600"), ("memory.swap.max", "629145600"), ("memory.oom.group", "1")],
        "pids": [("pids.max", "201")],
        "io": [("io.max", "8:0 rbps=1048576 wbps=1048576")],
    }


def test_values_of_version_1() -> None:
    assert values(1, LIMITS) == {
        "cpu": [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "125000"), ("cpu.shares", "1024")],
        "memory": [("memory.limit_in_bytes", "629145600"), ("memory.memsw.limit_in_bytes", "629145600")],
        "pids": [("pids.max", "201")],
        "blkio": [
            ("blkio.throttle.read_bps_device", "8:0 1048576"),
            ("blkio.throttle.write_bps_device", "8:0 1048576"),
        ],
    }


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_limit_of_the_disk_none_is_written(version: int) -> None:
    wanted = values(version, Limits(1.0, 1, 1 << 30, 100))
    assert not wanted["io" if version == 2 else "blkio"]


def test_a_machine_joins_one_group_of_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = probe(tree_2(tmp_path))
    kernel_makes_files(monkeypatch, "cpu.max", "cpu.weight", "memory.max", "pids.max")
    groups = Groups(facts, "b1")
    fds, failures = groups.make(".m1", LIMITS)
    assert not failures
    assert len(fds) == 1
    folder = tmp_path / "cloche/b1/m1"
    assert (folder / "cpu.max").read_text() == "125000 100000"
    assert (folder / "memory.max").read_text() == "629145600"
    for above in (tmp_path, tmp_path / "cloche", tmp_path / "cloche/b1"):
        assert (above / "cgroup.subtree_control").read_text().startswith("+")
    os.write(fds[0], b"0")
    os.close(fds[0])
    assert (folder / "cgroup.procs").read_text() == "0"
    # A file that is none of the kernel's keeps what it is longer than what is written.
    groups.stand_back(".m1", 20, back=True)
    assert (folder / "cpu.weight").read_text() == "200"
    groups.stand_back(".m1", 20, back=False)
    assert (folder / "cpu.weight").read_text() == "2000"
    (folder / "cgroup.procs").write_text("77\n")
    assert groups.held(".m1", 77) == {"cpu": "125000 100000", "memory": "629145600", "pids": "201"}
    assert groups.held(".m1", 78) == {}
    assert groups.machines() == {"m1"}
    assert groups.remove(".m1")
    assert groups.remove(".m1"), "it may be removed twice"
    assert not folder.exists()


def test_and_one_in_each_hierarchy_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = probe(tree_1(tmp_path, "cpu", "memory", "pids", "blkio"))
    kernel_makes_files(monkeypatch, "memory.limit_in_bytes", "cpu.cfs_quota_us", "pids.max", "cpu.shares")
    groups = Groups(facts, "b1")
    fds, failures = groups.make("m1", LIMITS)
    for fd in fds:
        os.close(fd)
    assert (len(fds), failures) == (4, [])
    assert (tmp_path / "memory/cloche/b1/m1/memory.limit_in_bytes").read_text() == "629145600"
    assert (tmp_path / "cpu/cloche/cpu.shares").read_text() == "8192"
    groups.stand_back("m1", 11, back=True)
    assert (tmp_path / "cpu/cloche/b1/m1/cpu.shares").read_text() == "1126"
    groups.stand_back("nobody", 1, back=True)
    groups.make("m2", LIMITS)
    assert groups.sweep(["m1"]) == []
    assert groups.machines() == {"m1"}
    groups.leave()
    assert groups.machines() == {"m1"}
    groups.make("m2", LIMITS)
    groups.remove("m1")
    groups.remove("m2")
    groups.leave()
    assert not (tmp_path / "memory/cloche/b1").exists()
    groups.make("m3", LIMITS)
    groups.remove_all()
    assert not (tmp_path / "memory/cloche/b1").exists()


def test_a_group_with_a_process_in_it_stays_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = probe(tree_1(tmp_path, "pids"))
    groups = Groups(facts, "b1")
    groups.make("m1", LIMITS)
    monkeypatch.setattr(cgroups.time, "sleep", lambda _: None)

    def busy(_: Path) -> None:
        raise OSError(16, "busy")

    monkeypatch.setattr(Path, "rmdir", busy)
    assert not groups.remove("m1")
    assert groups.sweep([]) == ["m1"]


def test_what_cannot_be_limited_is_told_and_no_error(tmp_path: Path) -> None:
    facts = probe(tree_1(tmp_path, "memory", "pids"))
    (tmp_path / "memory/cloche").write_text("in the way")
    fds, failures = Groups(facts, "b1").make("m1", LIMITS)
    for fd in fds:
        os.close(fd)
    assert [failure.split(":")[0] for failure in failures] == ["memory"]


def test_a_disk_is_named_by_its_numbers(tmp_path: Path) -> None:
    name = cgroups.device_of(tmp_path)
    assert name == "" or [part.isdigit() for part in name.split(":")] == [True, True]


def test_what_is_not_handed_down_is_told_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose processes are in what looks like the root."""
    facts = probe(tree_2(tmp_path))
    kernel_makes_files(monkeypatch)
    (tmp_path / "cgroup.subtree_control").unlink()
    (tmp_path / "cgroup.subtree_control").mkdir()
    groups = Groups(facts, "b1")
    for _ in range(2):
        failures = groups.trial()
        assert {failure.split()[0] for failure in failures} == {"cpu", "memory", "pids", "io"}
        assert groups.machines() == set()
    (tmp_path / "cgroup.subtree_control").rmdir()
    (tmp_path / "cgroup.subtree_control").touch()
    assert groups.trial() == [], "once it can, it is"
