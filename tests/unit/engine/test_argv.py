"""The command line of QEMU, golden: what a machine is made of is decided here and nowhere else.

`pytest --update-golden` rewrites the files; the review reads the difference.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cloche_server.engine.qemu import argv
from cloche_server.engine.qemu.argv import ColdBoot, DiskFile, VmPlan, build_argv, machine_digest

GOLDEN = Path(__file__).parent / "golden"


def plan(**changes: object) -> VmPlan:
    values: dict[str, object] = {
        "binary": "/usr/bin/qemu-system-x86_64",
        "name": "cloche-abc",
        "accel": "tcg",
        "cpus": 1,
        "memory_mb": 256,
        "memory": Path("/mem"),
        "node": "labc",
        "layers": (DiskFile("qcow2", (6, 7)), DiskFile("qcow2", (8,)), DiskFile("raw", (9,))),
        "tcg_buffer_mb": 64,
        "qmp_fd": 3,
        "agent_fd": 4,
        "console_fd": 5,
        **changes,
    }
    return VmPlan(**values)  # type: ignore[arg-type]


BOOT = ColdBoot(Path("/kernel"), Path("/initrd"), 2445405)
PLANS = {
    "clone-tcg": plan(),
    "clone-kvm": plan(accel="kvm"),
    "clone-tcg-2cpu": plan(cpus=2, memory_mb=1024),
    "bake-tcg": plan(boot=BOOT, keeps_memory=True),
    "start-tcg": plan(boot=BOOT),
    "bake-kvm": plan(boot=BOOT, accel="kvm", keeps_memory=True),
}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    text = "\n".join(build_argv(PLANS[name])) + "\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_a_clone_cannot_write_what_others_share() -> None:
    for wanted in (plan(), plan(boot=BOOT)):
        memory = next(word for word in build_argv(wanted) if word.startswith("memory-backend-file"))
        assert "share=off,readonly=on" in memory


def test_no_file_of_a_disk_is_opened_by_its_name() -> None:
    """Neither by QEMU's words nor by what stands in one of the files: all of them are named, and are descriptors."""
    words = build_argv(plan())
    disk = json.loads(words[words.index("-blockdev") + 1])
    layers = []
    while disk is not None:
        layers.append(disk)
        disk = disk.get("backing")
    assert [layer["file"]["filename"] for layer in layers] == ["/dev/fdset/2", "/dev/fdset/3", "/dev/fdset/4"]
    assert ["read-only" in layer for layer in layers] == [False, True, True]
    assert not any(word.startswith("/") for word in words[1:])
    assert not any("path=/" in word and "path=/dev/fdset/" not in word and "/mem" not in word for word in words)


def test_what_is_shared_is_handed_over_to_be_read_only() -> None:
    fdsets = [word for word in build_argv(plan()) if word.startswith("fd=")]
    assert fdsets[1:] == ["fd=6,set=2,opaque=labc writes", "fd=7,set=2", "fd=8,set=3", "fd=9,set=4"]


def test_a_card_leads_to_the_tap_that_was_handed_over_or_nowhere() -> None:
    wanted = PLANS["clone-tcg"]
    assert "hubport,id=n0,hubid=0" in build_argv(wanted)
    words = build_argv(replace(wanted, nic_fd=7))
    assert "tap,id=n0,fd=7" in words
    assert sum(word == "-netdev" for word in words) == 1


def test_there_is_no_way_to_start_programs() -> None:
    for wanted in PLANS.values():
        words = build_argv(wanted)
        assert any("spawn=deny" in word for word in words)
        assert "-nodefaults" in words


def test_what_a_snapshot_depends_on_is_in_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that was baked with another command line or other kernel words is not restored."""
    before = machine_digest("tcg")
    assert before == machine_digest("tcg") != machine_digest("kvm")
    monkeypatch.setattr(argv, "TCG_KERNEL_WORDS", ())
    without_words = machine_digest("tcg")
    monkeypatch.setitem(argv.CPU_MODEL, "tcg", "max")
    assert len({before, without_words, machine_digest("tcg")}) == 3
