"""Stop and start: the disk is kept, nothing is killed behind anybody's back, and every order of calls is survived."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kit import truth
from kit.client import Api, Box
from kit.lineage import skew
from kit.server import Server
from kit.until import until


def move(box: Box, verb: str, **body: object) -> str:
    """Asks for a move that has to succeed; the state after it."""
    return str(box.api.call("POST", f"{box.path}/{verb}", json=body)["status"])


def refused(box: Box, verb: str, **body: object) -> tuple[int, str]:
    response = box.api.request("POST", f"{box.path}/{verb}", json=body)
    return response.status_code, str(response.json().get("code"))


@pytest.mark.slow
def test_what_is_on_the_disk_is_kept_and_memory_is_not(family: Api, server: Server) -> None:
    box = family.create()
    name = box.sh("hostname; cat /etc/machine-id")
    box.sh("echo disk > /root/f; echo memory > /dev/shm/m")
    assert move(box, "stop") == "stopped"
    assert box.id not in server.machines(), "a stopped sandbox has no process"
    assert move(box, "stop") == "stopped", "it may be repeated"
    error = box.refused("true")
    assert (error.status, error.code) == (409, "sandbox.invalid_state")
    assert "start" in error.details["allowed"]
    assert "crashed" not in error.details["allowed"]
    assert move(box, "start") == "running"
    assert move(box, "start") == "running", "it may be repeated"
    assert box.refresh()["boot_mode"] == "cold"
    assert (
        box.sh("cat /root/f; test -e /dev/shm/m || echo gone; hostname; cat /etc/machine-id") == f"disk\ngone\n{name}"
    )
    assert skew(box) < 1.0
    assert box.sh("dmesg | grep -ci 'ext4.*error' || true") == "0\n"
    # What was booted can do what a restored one can.
    child = box.fork()
    assert child.sh("cat /root/f") == "disk\n"
    box.sh("echo again > /dev/shm/m")
    box.hibernate()
    assert box.sh("cat /dev/shm/m") == "again\n"
    snapshot = box.snapshot()
    copy = family.create(from_snapshot=snapshot)
    assert copy.sh("cat /dev/shm/m") == "again\n"
    assert move(box, "restart") == "running"
    assert box.sh("cat /root/f") == "disk\n"
    truth.check(server)


def test_processes_are_told_first_and_a_file_they_write_then_is_kept(family: Api, server: Server) -> None:
    box = family.create()
    box.start("trap 'echo told > /root/told; exit 0' TERM; while :; do sleep 0.1; done")
    until(lambda: box.exec("pgrep -f 'trap'").code == 0)
    assert move(box, "stop") == "stopped"
    assert move(box, "start") == "running"
    assert box.sh("cat /root/told") == "told\n"


def test_a_failed_sandbox_can_be_started_again(family: Api, server: Server) -> None:
    box = family.create()
    box.sh("echo synced > /root/f; sync")
    server.machines()[box.id].kill()
    until(lambda: box.refresh()["status"] == "failed")
    assert move(box, "start") == "running"
    assert box.sh("cat /root/f") == "synced\n"
    assert "termination" not in box.refresh()
    truth.check(server)


def test_a_guest_that_powers_itself_off_has_ended_and_can_be_started(family: Api, server: Server) -> None:
    box = family.create()
    box.sh("echo kept > /root/f; sync")
    box.start("sync; echo o > /proc/sysrq-trigger")
    until(lambda: box.refresh()["status"] == "failed", 60)
    assert move(box, "start") == "running"
    assert box.sh("cat /root/f") == "kept\n"


@pytest.mark.slow
def test_many_at_once_and_a_delete_among_them(family: Api, server: Server) -> None:
    box = family.create()
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(refused, box, verb) for verb in ("stop", "start", "restart") * 4]
        told = [one.result(240) for one in asked]
    assert {status for status, _ in told} <= {200, 409, 504}, told
    until(lambda: box.refresh()["status"] in {"running", "stopped"}, 60)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(refused, box, "restart")
        box.delete()
        assert other.result(120)[0] in {200, 404, 409, 500, 502}
    truth.check(server)


@pytest.mark.slow
def test_a_stopped_one_survives_its_server_and_half_way_moves_come_to_an_end(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_warm=0, pool_launched=0)
    stopped, starting, stopping = (server.api.create() for _ in range(3))
    for box in (stopped, starting):
        box.sh("echo kept > /root/f; sync")
        assert move(box, "stop") == "stopped"
    stopping.start("trap '' TERM; sleep 600")
    with ThreadPoolExecutor(2) as pool:
        pool.submit(lambda: server.api.request("POST", f"{starting.path}/start"))
        pool.submit(lambda: server.api.request("POST", f"{stopping.path}/stop"))
        until(lambda: starting.refresh()["status"] == "starting" and stopping.refresh()["status"] == "stopping")
        server.kill()
    server.start()
    for box in (stopped, starting, stopping):
        again = server.api.attach(box.id)
        until(lambda again=again: again.refresh()["status"] == "stopped")
        assert move(again, "start") == "running"
        truth.usable(again)
    assert server.api.attach(stopped.id).sh("cat /root/f") == "kept\n"
    truth.check(server)
