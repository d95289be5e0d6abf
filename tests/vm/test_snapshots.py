"""Snapshots: durable, whole or refused, and of use when their sandbox is long gone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit import layers, truth
from kit.client import Api, ApiError, Box
from kit.lineage import no_disk_errors, skew
from kit.server import Server
from kit.small_disk import MIB, Filler, small_server
from kit.until import until
from kit.writers import Writers

FIELDS = {
    "id", "sandbox_id", "name", "workspace", "template", "template_resolved", "template_id", "cpus", "memory_mb",
    "disk_mb", "memory", "metadata", "size_bytes", "disk_bytes", "created_at",
}  # fmt: skip


def remove(api: Api, snapshot: str) -> None:
    api.call("DELETE", f"/v1/snapshots/{snapshot}")


def refused(api: Api, **body: object) -> ApiError:
    """Why a sandbox cannot be made."""
    with pytest.raises(ApiError) as told:
        api.create(**body)
    return told.value


# ---------------------------------------------------------------- what they are


def test_list_get_and_delete(family: Api) -> None:
    box, other = family.create(metadata={"a": "1"}), family.create()
    first = family.call("POST", f"{box.path}/snapshots")
    second = family.call("POST", f"{box.path}/snapshots", json={"name": "a name"})
    third = family.call("POST", f"{other.path}/snapshots", json={})
    assert set(second) == FIELDS | {"parent_snapshot_id"}
    assert second["parent_snapshot_id"] == first["id"]
    assert set(first) == FIELDS - {"name"}
    for one in (first, second):
        assert one["sandbox_id"] == box.id
        assert one["memory"] is True
        assert one["size_bytes"] > 1 << 20
        assert one["metadata"] == {"a": "1"}
        for name in ("template", "template_resolved", "template_id", "cpus", "memory_mb", "disk_mb", "workspace"):
            assert one[name] == box.info[name]
    assert second["name"] == "a name"
    assert first["created_at"] < second["created_at"] < third["created_at"]
    assert [one["id"] for one in family.snapshots()][:3] == [third["id"], second["id"], first["id"]]
    assert family.snapshots(sandbox_id=box.id) == [second, first]
    assert family.snapshots(sandbox_id="z" * 20) == []
    assert family.call("GET", f"/v1/snapshots/{first['id']}") == first
    remove(family, first["id"])
    assert family.snapshots(sandbox_id=box.id) == [second]
    for snapshot in (first["id"], "z" * 20, "..", "%2e%2e"):
        for method in ("GET", "DELETE"):
            response = family.request(method, f"/v1/snapshots/{snapshot}")
            assert response.status_code == 404, response.text
        assert refused(family, from_snapshot=snapshot).code == "snapshot.not_found"
    truth.usable(box, other)


def test_of_another_workspace_there_is_none(family: Api, server: Server) -> None:
    snapshot = family.create().snapshot()
    with Api(server.url, server.cli("token", "create", "--workspace", "elsewhere").strip()) as stranger:
        assert stranger.snapshots() == []
        assert stranger.request("GET", f"/v1/snapshots/{snapshot}").status_code == 404
        assert stranger.request("DELETE", f"/v1/snapshots/{snapshot}").status_code == 404
        assert refused(stranger, from_snapshot=snapshot).status == 404
    assert family.snapshots()[0]["id"] == snapshot


def test_many_go_on_from_one_when_its_sandbox_is_gone(family: Api, server: Server) -> None:
    """Memory, processes and disk; the clock is right at once; and each is for itself."""
    source = family.create(env={"A": "one", "B": "two"}, cwd="/var", ttl_seconds=3000, metadata={"of": "source"})
    source.sh("echo disk > /root/f; echo memory > /dev/shm/m; sync")
    ticking = source.start("while :; do echo tick; sleep 0.1; done")
    snapshot = source.snapshot("kept")
    source.sh("echo later > /root/f; rm /dev/shm/m")
    source.delete()
    truth.check(server)
    time.sleep(3)
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda n: family.create(from_snapshot=snapshot, env={"B": str(n)}), range(4)))
    for number, box in enumerate(made):
        assert skew(box) < 1.0
        assert box.info["from_snapshot"] == snapshot
        assert (box.info["metadata"], box.info["boot_mode"]) == ({}, "snapshot")
        assert box.sh("cat /root/f /dev/shm/m; echo $A $B; pwd") == f"disk\nmemory\none {number}\n/var\n"
        assert box.exec_info(ticking)["status"] == "running"
        box.sh(f"echo {number} > /root/f; echo {number} > /dev/shm/m; sync; echo 3 > /proc/sys/vm/drop_caches")
    assert [box.sh("cat /root/f /dev/shm/m") for box in made] == [f"{n}\n{n}\n" for n in range(4)]
    names = [box.sh("hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid").split() for box in made]
    for column in zip(*names, strict=True):
        assert len(set(column)) == len(made), f"two of them share {column}"
    assert len(set().union(*(layers.writers(server)[box.id] for box in made))) == len(made)
    remove(family, snapshot)
    for box in made:
        box.sh("echo 3 > /proc/sys/vm/drop_caches; cat /usr/bin/git > /dev/null")
    no_disk_errors(*made)
    truth.check(server)


def test_sizes_and_templates_beside_it(family: Api) -> None:
    """What older clients send with every create is no error; another size of memory is."""
    snapshot = family.create().snapshot()
    box = family.create(from_snapshot=snapshot, template="ubuntu-24.04", cpus=1, memory_mb=256, disk_mb=5000)
    assert int(box.sh("df -BM --output=size / | tail -1").strip(" M\n")) > 4400
    assert refused(family, from_snapshot=snapshot, memory_mb=512).code == "request.invalid"
    assert refused(family, from_snapshot=snapshot, cpus=2).code == "request.invalid"
    assert refused(family, from_snapshot=snapshot, disk_mb=100).code == "request.invalid"


def test_of_a_paused_sandbox_and_of_one_made_from_a_snapshot(family: Api, server: Server) -> None:
    box = family.create()
    box.start("while :; do date > /dev/shm/tick; sleep 0.1; done")
    box.pause()
    first = box.snapshot()
    assert box.status() == "paused"
    second_box = family.create(from_snapshot=first)
    second_box.sh("echo second > /root/second; sync")
    second = second_box.snapshot()
    assert family.call("GET", f"/v1/snapshots/{second}")["parent_snapshot_id"] == first
    box.delete()
    second_box.delete()
    remove(family, first)
    third = family.create(from_snapshot=second)
    assert third.sh("cat /root/second") == "second\n"
    third.sh("rm /dev/shm/tick; until test -s /dev/shm/tick; do sleep 0.1; done", timeout_seconds=30)
    truth.check(server)


# ---------------------------------------------------------------- nothing is torn


@pytest.mark.slow
def test_twenty_in_the_midst_of_writes(family: Api) -> None:
    """What was acknowledged before a snapshot is in it, and its file system and databases are whole."""
    box = family.create()
    taken = []
    with Writers(box) as writers:
        for _ in range(20):
            taken.append((writers.acknowledged, box.snapshot()))
    last = writers.acknowledged
    assert len({acknowledged for acknowledged, _ in taken}) > 10, "it goes on between them"
    writers.check(box, last)
    for number, (acknowledged, snapshot) in enumerate(taken[::2]):
        copy = family.create(from_snapshot=snapshot)
        writers.check(copy, acknowledged, database=number % 3 == 0)
        copy.delete()


def test_they_outlive_the_server(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=0, pool_warm=0)
    box = server.api.create()
    box.sh("echo kept > /root/f; echo memory > /dev/shm/m")
    snapshot = box.snapshot("kept")
    before = server.api.snapshots()
    server.kill()
    server.start()
    assert server.api.snapshots() == before
    truth.usable(server.api.attach(box.id))
    server.stop(sandboxes=True)
    server.start()
    truth.check(server)
    assert server.api.snapshots() == before
    again = server.api.create(from_snapshot=snapshot)
    assert again.sh("cat /root/f /dev/shm/m") == "kept\nmemory\n"
    assert again.info["from_snapshot"] == snapshot
    remove(server.api, snapshot)
    assert again.sh("cat /root/f /dev/shm/m; python3 -c 'print(1)'") == "kept\nmemory\n1\n"
    truth.check(server)


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def damaged(baked: Path) -> Iterator[Server]:
    server = Server.make(baked, pool_launched=0, pool_warm=0)
    try:
        server.start()
        yield server
    finally:
        server.close()


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def _zero(path: Path) -> None:
    """Four kilobytes as a host leaves them that lost its power."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(bytes(4096))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a byte of its pages": lambda d: _flip(d / "pages", (d / "pages").stat().st_size - 3000),
    "the head of its pages": lambda d: _flip(d / "pages", 17),
    "pages of zeros": lambda d: _zero(d / "pages"),
    "pages cut short": lambda d: os.truncate(d / "pages", (d / "pages").stat().st_size - 4096),
    "empty pages": lambda d: (d / "pages").write_bytes(b""),
    "no pages": lambda d: (d / "pages").unlink(),
    "a byte of its devices": lambda d: _flip(d / "dev", 5000),
    "devices cut short": lambda d: os.truncate(d / "dev", 1000),
    "no devices": lambda d: (d / "dev").unlink(),
    "a description that is none": lambda d: (d / "meta.json").write_text("{"),
    "no description": lambda d: (d / "meta.json").unlink(),
}


def test_what_is_damaged_is_not_started(damaged: Server) -> None:
    """Refused, whether or not it was used before; nothing is left; whole again it works."""
    api = damaged.api
    box = api.create()
    box.sh("echo kept > /root/f")
    snapshot = box.snapshot()
    directory = damaged.data / "snapshots" / snapshot
    whole = damaged.data / "whole"
    shutil.copytree(directory, whole)
    for number, (name, harm) in enumerate(DAMAGE.items()):
        if number % 2 == 0:
            api.create(from_snapshot=snapshot).delete()
        harm(directory)
        error = refused(api, from_snapshot=snapshot)
        assert (error.status, error.code) == (500, "snapshot.corrupt"), name
        assert damaged.directories() == {box.id}, name
        shutil.copytree(whole, directory, dirs_exist_ok=True)
    made = api.create(from_snapshot=snapshot)
    assert made.sh("cat /root/f") == "kept\n"
    shutil.rmtree(whole)
    truth.check(damaged)
    truth.usable(box, made)
    for one in (made, box):
        one.delete()
    remove(api, snapshot)
    truth.check(damaged)


def test_a_damaged_one_can_be_deleted(damaged: Server) -> None:
    """Also when it was damaged before the server began, and is not known as a snapshot any more."""
    api = damaged.api
    box = api.create()
    first, second = box.snapshot(), box.snapshot()
    (damaged.data / "snapshots" / first / "pages").unlink()
    remove(api, first)
    truth.check(damaged)
    (damaged.data / "snapshots" / second / "pages").unlink()
    damaged.restart()
    api = damaged.api
    assert [one["id"] for one in api.snapshots()] == [second]
    assert refused(api, from_snapshot=second).code == "snapshot.corrupt"
    remove(api, second)
    api.delete(box.id)
    truth.check(damaged)


def test_a_disk_layer_that_is_missing(damaged: Server) -> None:
    api = damaged.api
    box = api.create()
    snapshot = box.snapshot()
    box.delete()
    layer = layers.snapshots(damaged.data)[snapshot]["layer_id"]
    path = damaged.data / "layers" / f"{layer}.qcow2"
    kept = path.read_bytes()
    for harm in (path.unlink, lambda: path.write_bytes(b"no layer"), lambda: path.write_bytes(kept[:50])):
        harm()
        error = refused(api, from_snapshot=snapshot)
        assert error.code in {"template.corrupt", "snapshot.corrupt"}, error
        assert damaged.directories() == set()
        path.write_bytes(kept)
    truth.usable(made := api.create(from_snapshot=snapshot))
    made.delete()
    remove(api, snapshot)
    truth.check(damaged)


# ---------------------------------------------------------------- a full disk


@pytest.fixture(scope="module")
def small(baked: Path) -> Iterator[Server]:
    with small_server(baked) as made:
        yield made


@pytest.fixture
def filler(small: Server) -> Iterator[Filler]:
    made = Filler(small.data)
    yield made
    made.free()


def _answers(box: Box) -> bool:
    return bool(box.api.request("POST", f"{box.path}/exec", json={"cmd": "true"}).status_code == 200)


@pytest.mark.parametrize("leave", [0, 8 * MIB], ids=["nothing", "too little"])
def test_no_room_on_the_disk_of_the_host(small: Server, filler: Filler, leave: int) -> None:
    """A sentence; the sandbox goes on; what was taken before is whole; delete makes room."""
    api = small.api
    box = api.create()
    box.sh("echo kept > /root/f; echo memory > /dev/shm/m; head -c 20000000 /dev/urandom > /dev/shm/big; sync")
    old = box.snapshot()
    filler.fill(leave)
    for _ in range(3):
        with pytest.raises(ApiError) as told:
            box.snapshot()
        assert (told.value.status, told.value.code) == (507, "host.disk_full"), told.value
        assert [one["id"] for one in api.snapshots()] == [old]
        assert len(list((small.data / "snapshots").iterdir())) == 1
    assert box.verb("hibernate") == (507, "host.disk_full")
    if not leave:
        assert box.verb("fork") == (507, "host.disk_full")
    assert box.status() == "running"
    filler.free()
    until(lambda: _answers(box), 60)
    assert box.sh("cat /root/f /dev/shm/m") == "kept\nmemory\n"
    truth.check(small)
    made = api.create(from_snapshot=old)
    assert made.sh("cat /root/f /dev/shm/m") == "kept\nmemory\n"
    filler.fill()
    remove(api, old)
    for one in (made, box):
        one.delete()
    filler.free()
    truth.check(small)
    assert small.directories() == set()
    assert layers.there(small.data) == set()
