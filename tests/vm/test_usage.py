"""Meters, budgets and lifetimes on real machines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from kit.client import Api, Box
from kit.server import Server
from kit.until import until

_TICKS = os.sysconf("SC_CLK_TCK")
#: Works for ever on one vCPU.
BUSY = "while :; do :; done"


def usage(box: Box) -> dict[str, Any]:
    return dict(box.api.call("GET", f"{box.path}/usage"))


def cpu_of(pid: int) -> float:
    """CPU seconds of a process, as the kernel tells."""
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - a file of the kernel
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def not_less(before: dict[str, Any], after: dict[str, Any]) -> None:
    """What was counted is never taken back."""
    for name in ("cpu_seconds", "memory_provisioned_mib_seconds", "memory_used_mib_seconds", "exec_count", "bytes_in"):
        assert after[name] >= before[name], name
    for state, seconds in before["wall_seconds"].items():
        assert after["wall_seconds"][state] >= seconds, state


def ended(box: Box) -> str:
    """Why it ended, once it has."""

    def told() -> str | None:
        response = box.api.request("GET", box.path)
        return str(response.json()["details"]["termination"]["reason"]) if response.status_code == 404 else None

    reason = until(told, 60)
    box.api.made.pop(box.id, None)
    return str(reason)


def test_work_is_metered_as_the_kernel_counts_it(family: Api, server: Server) -> None:
    box = family.create(metadata={"meter": "here"})
    first, began = usage(box), cpu_of(server.qemu(box.id).pid)
    assert first["cpu_seconds"] < 5, "what its machine did in a pool is not its own"
    box.sh(f"timeout 3 sh -c '{BUSY}' || true", stdin="12345")
    box.put("/tmp/f", b"x" * 1000)
    assert len(box.get("/tmp/f")) == 1000
    time.sleep(0.1)
    after, now = usage(box), cpu_of(server.qemu(box.id).pid)
    used = after["cpu_seconds"] - first["cpu_seconds"]
    assert 1.0 <= used <= now - began + 1.0
    assert used >= 0.5 * (now - began)
    assert after["exec_count"] == first["exec_count"] + 1
    assert after["bytes_in"] - first["bytes_in"] == 1005
    assert after["bytes_out"] - first["bytes_out"] == 1000
    assert after["memory_provisioned_mib_seconds"] >= 3 * box.info["memory_mb"]
    until(lambda: usage(box)["disk_bytes"] > 0, 30)
    until(lambda: usage(box)["memory_used_mib_seconds"] > after["memory_used_mib_seconds"] > 0, 30)
    told = family.call("GET", "/v1/usage", params={"group_by": "meter"})
    (mine,) = [group for group in told["groups"] if group.get("value") == "here"]
    assert mine["count"] == 1
    assert mine["usage"]["cpu_seconds"] >= after["cpu_seconds"]
    box.delete()
    last = usage(box)
    not_less(after, last)
    assert (last["status"], last["disk_bytes"]) == ("deleted", 0)


def test_sleep_counts_its_own_time_and_takes_nothing_back(family: Api) -> None:
    box = family.create()
    box.sh(f"timeout 1 sh -c '{BUSY}' || true")
    before = usage(box)
    box.hibernate()
    asleep = usage(box)
    not_less(before, asleep)
    time.sleep(2)
    later = usage(box)
    assert later["memory_provisioned_mib_seconds"] == asleep["memory_provisioned_mib_seconds"]
    assert later["cpu_seconds"] == asleep["cpu_seconds"]
    assert later["wall_seconds"]["hibernated"] >= asleep["wall_seconds"]["hibernated"] + 1.9
    box.sh("true")
    box.sh(f"timeout 1 sh -c '{BUSY}' || true")
    woken = usage(box)
    not_less(later, woken)
    assert woken["cpu_seconds"] > later["cpu_seconds"]
    assert woken["starts"] == 2


def test_neither_the_end_of_the_server_nor_of_a_machine_takes_anything_back(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_warm=0, pool_launched=0)
    working, crashing = server.api.create(), server.api.create()
    for box in (working, crashing):
        box.sh(f"timeout 2 sh -c '{BUSY}' || true")
    before = usage(working)
    until(lambda: usage(crashing)["memory_used_mib_seconds"] > 0, 30)
    crashed = usage(crashing)
    server.qemu(crashing.id).kill()
    until(lambda: crashing.refresh()["status"] == "failed")
    not_less(crashed, usage(crashing))
    written = usage(crashing)
    time.sleep(2)  # an end is written at once
    server.kill()
    server.start()
    after = usage(server.api.attach(working.id))
    assert after["cpu_seconds"] >= before["cpu_seconds"], "its machine has gone on, and so has its counter"
    assert after["wall_seconds"]["running"] >= before["wall_seconds"]["running"] + 2
    kept = usage(server.api.attach(crashing.id))
    assert kept["cpu_seconds"] >= written["cpu_seconds"]
    assert kept["wall_seconds"]["running"] == written["wall_seconds"]["running"]


def test_a_budget_pauses_a_busy_loop_and_ends_it(family: Api) -> None:
    box = family.create(budget={"cpu_seconds": 6, "grace_seconds": 4})
    box.start(BUSY)
    until(lambda: box.refresh()["status"] == "paused", 60)
    assert box.info["status_reason"] == "budget"
    used = usage(box)["cpu_seconds"]
    assert 6 <= used <= 12, "a freeze that meets a busy guest may take a moment"
    error = box.refused("true")
    assert (error.status, error.code, error.details["limit"]) == (402, "budget.exceeded", "cpu_seconds")
    assert family.request("POST", f"{box.path}/resume").json()["code"] == "budget.exceeded"
    assert ended(box) == "budget"
    assert usage(box)["cpu_seconds"] >= used


def test_a_raise_lets_it_go_on(family: Api) -> None:
    box = family.create(budget={"exec_count": 1, "grace_seconds": 600})
    box.sh("true")
    assert box.refused("true").code == "budget.exceeded"
    until(lambda: box.refresh()["status"] == "paused")
    raised = family.call("PUT", f"{box.path}/budget", json={"exec_count": 5})
    assert (raised["status"], raised["used"]["exec_count"], raised["left"]) == ("ok", 1, {"exec_count": 4})
    box.resume()
    box.sh("true")
    family.call("DELETE", f"{box.path}/budget")
    assert family.request("GET", f"{box.path}/budget").json()["code"] == "budget.not_found"


def test_parent_and_child_draw_on_one_budget(family: Api) -> None:
    parent = family.create(budget={"cpu_seconds": 12, "grace_seconds": 600})
    child = parent.fork()
    assert set(family.call("GET", f"{child.path}/budget")["sandboxes"]) == {parent.id, child.id}
    child.start(BUSY)
    until(lambda: parent.refresh()["status"] == child.refresh()["status"] == "paused", 90)
    assert parent.info["status_reason"] == "budget"
    told = family.call("GET", f"{parent.path}/budget")
    assert told["status"] == "exceeded"
    assert told["used"]["cpu_seconds"] >= 12


def test_a_lifetime_ends_a_persistent_sandbox_whatever_is_renewed(family: Api) -> None:
    box = family.create(persistent=True, max_lifetime_seconds=8)
    end = box.info["ends_at"]
    for body in ({"ttl_seconds": 3600, "persistent": False}, {"persistent": True}):
        family.call("PATCH", f"{box.path}/lifecycle", json=body)
        assert box.refresh()["ends_at"] == end
    assert ended(box) == "max_lifetime"
    assert usage(box)["wall_seconds"]["running"] < 20
