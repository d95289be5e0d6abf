"""netd as a process: what it gives up, that there is one of it, and that it outlives its clients."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from guest_kit import Guest
from netd_kit import UID
from world_kit import A4

from cloche_server.core.netctl import PROTOCOL

pytestmark = pytest.mark.thorough


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_it_has_no_rights(site: Any) -> None:
    found = status(site.netd.process.pid)
    for field in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(found[field], 16) == 0, field
    assert found["Uid"].split() == [str(UID)] * 4
    assert found["Gid"].split() == [str(UID)] * 4
    assert found["Groups"] == ""
    assert found["NoNewPrivs"] == "1"


def test_it_comes_before_what_computes(site: Any) -> None:
    assert os.getpriority(os.PRIO_PROCESS, site.netd.process.pid) == os.getpriority(os.PRIO_PROCESS, 0) - 5


def test_its_memory_is_not_for_others_of_its_user(site: Any) -> None:
    assert Path(f"/proc/{site.netd.process.pid}/maps").stat().st_uid == 0
    done = subprocess.run(
        ["/usr/bin/head", "-c1", f"/proc/{site.netd.process.pid}/environ"],
        user=UID,
        group=UID,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        check=False,
    )
    assert b"Permission denied" in done.stderr


def test_its_socket_is_for_root_only(site: Any) -> None:
    found = site.netd.socket.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (0, 0o600)


def test_it_holds_many_files(site: Any) -> None:
    limits = Path(f"/proc/{site.netd.process.pid}/limits").read_text("ascii")
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(line.split()[3]) >= min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def test_there_is_one_of_it(site: Any) -> None:
    second = site.netd.start()
    assert second.wait(30) == 3
    assert site.netd.call("hello")["version"] == PROTOCOL


def test_it_outlives_its_clients(site: Any) -> None:
    site.renew(mode="open")
    before = site.netd.call("hello")["sandboxes"]
    client = site.netd.client()
    client.close()
    code = (
        "import socket, sys, os\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(b'\\0\\0'); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(site.netd.socket)], check=False, capture_output=True)
    assert site.netd.call("hello")["sandboxes"] == before
    assert site.netd.process.poll() is None


def test_nothing_failed_in_a_way_nobody_thought_of(site: Any) -> None:
    """Last of this file: what netd has reported in the whole run so far."""
    assert site.netd.errors.read_text() == "" or "another netd holds" in site.netd.errors.read_text()
    assert "failed" not in site.netd.errors.read_text()


def test_what_a_sandbox_did_is_counted_learned_and_explained(site: Any) -> None:
    guest = Guest(site.slot.guest, str(site.world.ca))
    site.renew(mode="open", learn=True)
    guest.dns("a.test")
    assert guest.tls(A4, "a.test") == "ok"
    assert guest.tcp(A4, 22, until=b"SSH") != "reset"
    while site.netd.call("stats", sandbox="box")["open"]:
        os.sched_yield()
    stats = site.netd.call("stats", sandbox="box")
    assert stats["connections"] == 2
    assert stats["bytes_sent"] > 100
    assert stats["bytes_received"] > 100
    assert site.netd.call("learned", sandbox="box")["rules"] == [
        {"id": "learned-1", "action": "allow", "domain": "a.test", "ports": [22, 443], "protocol": "tcp"}
    ]
    ends = [entry for entry in site.log() if entry["end"]]
    assert sorted(entry["port"] for entry in ends) == [22, 443]
    assert all(entry["bytes_received"] for entry in ends)
