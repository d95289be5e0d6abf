"""Checkpoints: a sandbox is taken back to a moment it had before; and snapshots of the disk alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kit import layers, truth
from kit.client import Api, ApiError, Box
from kit.lineage import no_disk_errors, skew
from kit.server import Server
from kit.until import until


def refused(box: Box, snapshot: str | None = None) -> ApiError:
    with pytest.raises(ApiError) as told:
        box.restore(snapshot)
    return told.value


def test_there_and_back_again(family: Api, server: Server) -> None:
    """Memory, processes and disk are what they were; what it is called and who it is stays."""
    box = family.create(name="checkpoints", metadata={"k": "v"}, env={"A": "1"})
    box.sh("echo one > /root/f; echo one > /dev/shm/m; sync")
    ticking = box.start("while :; do date +%s.%N >> /dev/shm/ticks; sleep 0.1; done")
    first = box.snapshot("first")
    who = box.sh("hostname; cat /etc/machine-id")
    box.kill(ticking)
    box.sh("echo two > /root/f; echo two > /dev/shm/m; rm /dev/shm/ticks")
    second = box.snapshot("second")
    for snapshot, word in ((first, "one"), (second, "two"), (first, "one")):
        done = box.restore(snapshot)
        assert (done["id"], done["name"], done["metadata"]) == (box.id, "checkpoints", {"k": "v"})
        assert (done["status"], done["checkpoint_id"]) == ("running", snapshot)
        assert skew(box) < 1.0
        assert box.sh("cat /root/f /dev/shm/m; echo $A") == f"{word}\n{word}\n1\n"
        assert box.sh("hostname; cat /etc/machine-id") == who
    count = int(box.sh("wc -l < /dev/shm/ticks"))
    until(lambda: int(box.sh("wc -l < /dev/shm/ticks")) > count)
    assert box.exec_info(ticking)["status"] == "running"
    third = family.call("POST", f"{box.path}/snapshots")
    assert third["parent_snapshot_id"] == first
    lineage = family.call("GET", f"/v1/snapshots/{third['id']}/lineage")
    assert [one["id"] for one in lineage["ancestors"]] == [first]
    assert (lineage["children"], lineage["sandboxes"]) == ([], [box.id])
    assert {one["id"] for one in family.call("GET", f"/v1/snapshots/{first}/lineage")["children"]} == {
        second,
        third["id"],
    }
    box.sh("echo 3 > /proc/sys/vm/drop_caches; cat /usr/bin/git > /dev/null")
    no_disk_errors(box)
    truth.check(server)


@pytest.mark.parametrize("state", ["paused", "hibernated", "stopped", "failed"])
def test_from_every_state(family: Api, server: Server, state: str) -> None:
    box = family.create()
    box.sh("echo kept > /dev/shm/m; echo kept > /root/f")
    snapshot = box.snapshot()
    box.sh("echo lost > /root/f; sync")
    if state == "paused":
        box.pause()
    elif state == "hibernated":
        box.hibernate()
    elif state == "stopped":
        box.verb("stop")
    else:
        server.machines()[box.id].kill()
    until(lambda: box.status() == state)
    box.restore()
    assert box.sh("cat /dev/shm/m /root/f") == "kept\nkept\n"
    family.call("DELETE", f"/v1/snapshots/{snapshot}")
    box.hibernate()
    assert box.sh("cat /dev/shm/m /root/f") == "kept\nkept\n"
    truth.check(server)


def test_calls_wait_for_it_and_a_foreign_one_gives_no_names(family: Api) -> None:
    """Any snapshot of that size will do. Whose it was is told apart from who the sandbox is."""
    source, box = family.create(), family.create()
    source.sh("echo of source > /root/f")
    snapshot = source.snapshot()
    with ThreadPoolExecutor() as pool:
        restoring = pool.submit(box.restore, snapshot)
        until(lambda: restoring.done() or box.status() == "restoring", 30)
        results = [one.result() for one in [pool.submit(box.exec, "cat /root/f") for _ in range(5)]]
        restoring.result()
    assert {one.stdout for one in results} == {"of source\n"}
    names = [one.sh("hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid").split() for one in (source, box)]
    assert all(mine != other for mine, other in zip(*names, strict=True))


def test_what_is_damaged_or_does_not_fit_changes_nothing(family: Api, server: Server) -> None:
    box, large = family.create(), family.create(disk_mb=5000)
    box.sh("echo here > /dev/shm/m; echo here > /root/f; sync")
    assert refused(box).code == "request.invalid"
    assert refused(box, "z" * 20).code == "snapshot.not_found"
    assert refused(box, large.snapshot()).code == "request.invalid"
    snapshot = box.snapshot()
    assert family.call("POST", f"/v1/snapshots/{snapshot}/verify") == {"id": snapshot, "ok": True, "problems": []}
    top = server.data / "layers" / f"{layers.snapshots(server.data)[snapshot]['layer_id']}.qcow2"
    with top.open("r+b") as file:
        file.seek(70_000)
        before = file.read(4096)
        file.seek(70_000)
        file.write(bytes(255 - byte for byte in before))
    told = family.call("POST", f"/v1/snapshots/{snapshot}/verify")
    assert not told["ok"]
    assert "layer" in told["problems"][0]
    assert refused(box, snapshot).code == "snapshot.corrupt"
    assert box.sh("cat /dev/shm/m") == "here\n"
    with top.open("r+b") as file:
        file.seek(70_000)
        file.write(before)
    box.restore(snapshot)
    assert box.sh("cat /dev/shm/m /root/f") == "here\nhere\n"
    family.call("DELETE", f"/v1/snapshots/{snapshot}")


# ---------------------------------------------------------------- the disk alone


@pytest.mark.slow
@pytest.mark.parametrize("state", ["running", "paused", "stopped"])
def test_the_disk_alone(family: Api, server: Server, state: str) -> None:
    """All that was written is in it, synced or not; nothing runs in what is made of it."""
    box = family.create(env={"A": "1"})
    box.start("while :; do echo x >> /root/grows; done")
    box.put("/root/f", b"written and not synced")
    box.sh("mkdir /root/many; cd /root/many; for i in $(seq 300); do echo $i > $i; done; echo m > /dev/shm/m")
    if state == "paused":
        box.pause()
    elif state == "stopped":
        assert box.verb("stop")[0] == 200
    taken = family.call("POST", f"{box.path}/snapshots", json={} if state == "stopped" else {"memory": False})
    assert (taken["memory"], taken["size_bytes"] < 1 << 16, taken["disk_bytes"] > 1 << 16) == (False, True, True)
    assert box.status() == state
    box.delete()
    one = family.create(from_snapshot=taken["id"])
    other = family.create(from_snapshot=taken["id"], disk_mb=one.info["disk_mb"] + 1000)
    assert one.info["boot_mode"] == "cold"
    for made in (one, other):
        assert made.sh("cat /root/f; ls /root/many | wc -l; cat /root/many/300; echo $A") == (
            "written and not synced300\n300\n1\n"
        )
        assert made.exec("test -e /dev/shm/m").code == 1
        assert made.execs() == []
    no_disk_errors(one, other)
    names = [made.sh("hostname; cat /etc/machine-id").split() for made in (one, other)]
    assert all(mine != its for mine, its in zip(*names, strict=True))
    assert int(other.sh("df -BM --output=size / | tail -1").strip(" M\n")) > one.info["disk_mb"] + 600
    one.sh("echo memory > /dev/shm/m")
    child = one.fork()
    assert child.sh("cat /dev/shm/m") == "memory\n"
    child.sh("rm -r /root/many")
    assert other.restore(taken["id"])["boot_mode"] == "cold"
    assert other.sh("ls /root/many | wc -l") == "300\n"
    truth.check(server)
