"""Snapshots as templates: by name, as often as wanted, for their workspace, and from a pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kit import truth
from kit.client import Api, ApiError, Box
from kit.lineage import no_disk_errors, skew
from kit.server import Server
from kit.until import until


def promote(api: Api, snapshot: str, name: str, **body: Any) -> dict[str, Any]:
    return dict(api.call("POST", f"/v1/snapshots/{snapshot}/promote", json={"name": name, **body}))


def remove(api: Api, name: str) -> None:
    api.call("DELETE", f"/v1/templates/{name}")


def refused(api: Api, method: str, path: str, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as told:
        api.call(method, path, json=body or None)
    return told.value


def prepared(api: Api) -> tuple[str, str]:
    """A snapshot of a sandbox that is gone, with something on disk, in memory, and a command that runs."""
    box = api.create(env={"A": "one"}, cwd="/srv", user="games")
    box.sh("echo disk > /root/f; echo memory > /dev/shm/m; sync", user="root")
    ticking = box.start("i=0; while :; do echo $((i=i+1)) > /dev/shm/tick; sleep 0.1; done")
    until(lambda: box.exec("test -s /dev/shm/tick").code == 0)
    snapshot = box.snapshot()
    box.delete()
    return snapshot, ticking


def goes_on(box: Box, ticking: str) -> None:
    """It is what was in the snapshot, and alive."""
    assert box.sh("cat /root/f /dev/shm/m; echo $A; pwd", user="root") == "disk\nmemory\none\n/srv\n"
    assert box.exec(["id", "-un"]).stdout == "games\n"
    assert box.exec_info(ticking)["status"] == "running"
    before = box.sh("cat /dev/shm/tick")
    until(lambda: box.sh("cat /dev/shm/tick") != before)
    assert skew(box) < 1.0
    box.sh("echo 3 > /proc/sys/vm/drop_caches; cat /usr/bin/git /usr/bin/python3 > /dev/null", user="root")
    no_disk_errors(box)


def test_by_name_as_often_as_wanted(family: Api, server: Server) -> None:
    snapshot, ticking = prepared(family)
    made = promote(family, snapshot, "warm-start", aliases=["ws"], description="ready to go")
    assert (made["name"], made["is_global"], made["from_snapshot"]) == ("warm-start", False, snapshot)
    family.call("DELETE", f"/v1/snapshots/{snapshot}")
    boxes = [family.create(template=name) for name in ("warm-start", "ws")]
    for box in boxes:
        goes_on(box, ticking)
        assert (box.info["template_resolved"], box.info["template_id"]) == ("warm-start", made["shapes"][0]["id"])
    names = [box.sh("hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid", user="root").split() for box in boxes]
    assert all(left != right for left, right in zip(*names, strict=True)), names
    # What is made of it can be captured and slept like any other.
    child = boxes[0].fork()
    goes_on(child, ticking)
    boxes[1].hibernate()
    goes_on(boxes[1], ticking)
    again = family.create(from_snapshot=child.snapshot())
    goes_on(again, ticking)
    assert refused(family, "DELETE", "/v1/templates/warm-start").code == "template.in_use"
    for box in (*boxes, child, again):
        box.delete()
    for one in family.snapshots(sandbox_id=child.id):
        family.call("DELETE", f"/v1/snapshots/{one['id']}")
    remove(family, "warm-start")
    truth.check(server)


def test_of_one_that_was_booted_from_its_disk(family: Api, server: Server) -> None:
    box = family.create()
    box.sh("echo kept > /root/f; sync")
    family.call("POST", f"{box.path}/stop", json={})
    family.call("POST", f"{box.path}/start", json={})
    box.sh("echo memory > /dev/shm/m")
    promote(family, box.snapshot(), "cold-start")
    box.delete()
    made = family.create(template="cold-start")
    assert made.sh("cat /root/f /dev/shm/m") == "kept\nmemory\n"
    no_disk_errors(made)
    family.call("POST", f"{made.path}/restart", json={})
    assert made.sh("cat /root/f") == "kept\n"
    made.delete()
    remove(family, "cold-start")
    truth.check(server)


def test_a_larger_disk_and_other_sizes(family: Api) -> None:
    box = family.create(disk_mb=5000)
    promote(family, box.snapshot(), "large")
    made = family.create(template="large", disk_mb=6000)
    assert int(made.sh("df -BM --output=size / | tail -1").strip(" M\n")) > 5400
    for body in ({"cpus": 2}, {"memory_mb": 512}, {"disk_mb": 4096}):
        assert refused(family, "POST", "/v1/sandboxes", template="large", **body).code == "request.invalid"
    made.delete()
    remove(family, "large")


def test_of_another_workspace_there_is_none(family: Api, server: Server) -> None:
    snapshot = family.create().snapshot()
    promote(family, snapshot, "ours")
    with Api(server.url, server.cli("token", "create", "--workspace", "elsewhere").strip()) as stranger:
        assert "ours" not in {one["name"] for one in stranger.call("GET", "/v1/templates")}
        for method in ("GET", "DELETE"):
            assert refused(stranger, method, "/v1/templates/ours").code == "template.not_found"
        assert refused(stranger, "POST", "/v1/sandboxes", template="ours").code == "template.not_found"
    assert refused(family, "POST", f"/v1/snapshots/{snapshot}/promote", name="base").code == "template.name_taken"
    assert refused(family, "DELETE", "/v1/templates/base").status == 400
    assert "ours" in server.cli("template", "list")
    remove(family, "ours")


def test_a_pool_of_it(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=0, pool_warm=0)
    snapshot, ticking = prepared(server.api)
    promote(server.api, snapshot, "warm-start")
    workspace = server.api.call("GET", "/v1/me")["workspace"]
    server.settings.update(pool_warm=1, pool_template=f"{workspace}/warm-start")
    server.restart()
    until(lambda: server.api.metrics().get('cloche_pool_machines{kind="warm"}') == 1, 90)
    box = server.api.create(template="warm-start")
    assert box.info["boot_mode"] == "warm"
    goes_on(box, ticking)


def test_kill_in_a_promotion(new_server: Callable[..., Server]) -> None:
    """Nothing of it is left but what the next start sweeps, and then it can be done."""
    server = new_server(pool_launched=0, pool_warm=0)
    api = server.api
    box = api.create()
    box.sh("head -c 60000000 /dev/urandom > /root/big; sync")
    snapshot = box.snapshot()
    before = {path.name for path in (server.data / "templates").iterdir()}

    def ask() -> None:
        with pytest.raises(httpx.TransportError):
            api.request("POST", f"/v1/snapshots/{snapshot}/promote", json={"name": "mine"})

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: truth.staged(server.data), 30, every=0.005)
    server.kill()
    asking.join()
    server.start()
    until(lambda: not truth.staged(server.data), 30)
    assert {path.name for path in (server.data / "templates").iterdir()} == before
    promote(server.api, snapshot, "mine")
    assert server.api.create(template="mine").sh("stat -c %s /root/big") == "60000000\n"
    truth.check(server)
