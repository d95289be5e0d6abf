"""Archives: a snapshot goes out, and comes in here and on another server, whole or not at all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit import layers, truth
from kit.client import Api, ApiError, Box
from kit.lineage import no_disk_errors, skew
from kit.procs import below, rss_mib
from kit.server import Server
from kit.small_disk import MIB, Filler, small_server
from kit.until import until

pytestmark = pytest.mark.slow


def prepared(api: Api) -> tuple[str, str]:
    """A snapshot of a sandbox that is gone, over two layers, and a command that runs in it."""
    box = api.create(env={"A": "one"})
    box.sh("echo disk > /root/f; sync")
    first = box.snapshot()
    box.sh("echo memory > /dev/shm/m; echo more >> /root/f; sync")
    ticking = box.start("i=0; while :; do echo $((i=i+1)) > /dev/shm/tick; sleep 0.1; done")
    until(lambda: box.exec("test -s /dev/shm/tick").code == 0)
    snapshot = box.snapshot("näme")
    box.delete()
    api.call("DELETE", f"/v1/snapshots/{first}")
    return snapshot, ticking


def export(api: Api, snapshot: str, target: Path, **query: str) -> None:
    with api.http.stream("GET", f"/v1/snapshots/{snapshot}/export", params=query) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/zstd"
        with target.open("wb") as file:
            for piece in answer.iter_raw():
                file.write(piece)


def take_in(api: Api, source: Path, **query: str) -> dict[str, Any]:
    with source.open("rb") as file:
        pieces = iter(lambda: file.read(1 << 18), b"")
        return dict(api.call("POST", "/v1/snapshots/import", params=query, content=pieces))


def goes_on(box: Box, ticking: str) -> None:
    assert box.sh("cat /root/f /dev/shm/m; echo $A") == "disk\nmore\nmemory\none\n"
    assert box.exec_info(ticking)["status"] == "running"
    before = box.sh("cat /dev/shm/tick")
    until(lambda: box.sh("cat /dev/shm/tick") != before)
    assert skew(box) < 1.0
    box.sh("echo 3 > /proc/sys/vm/drop_caches; cat /usr/bin/git /usr/bin/python3 > /dev/null")
    no_disk_errors(box)


def remove(api: Api, snapshot: str) -> None:
    api.call("DELETE", f"/v1/snapshots/{snapshot}")


def test_a_disk_alone(family: Api, tmp_path: Path) -> None:
    box = family.create()
    box.sh("echo kept > /root/f; echo gone > /dev/shm/m")
    snapshot = box.snapshot(memory=False)
    export(family, snapshot, tmp_path / "a")
    remove(family, snapshot)
    made = take_in(family, tmp_path / "a")
    assert made["memory"] is False
    again = family.create(from_snapshot=made["id"])
    assert again.info["boot_mode"] == "cold"
    assert again.sh("cat /root/f; cat /dev/shm/m 2>/dev/null || echo no memory") == "kept\nno memory\n"


@pytest.mark.parametrize("template", ["true", "false"])
def test_out_and_in_again(family: Api, server: Server, tmp_path: Path, template: str) -> None:
    snapshot, ticking = prepared(family)
    before = family.call("GET", f"/v1/snapshots/{snapshot}")
    export(family, snapshot, tmp_path / "a", template=template)
    remove(family, snapshot)
    truth.check(server)
    made = take_in(family, tmp_path / "a")
    same = set(before) - {"id", "size_bytes", "disk_bytes", "parent_snapshot_id"}
    assert {name: made[name] for name in same} == {name: before[name] for name in same}
    assert made["id"] != snapshot
    boxes = [family.create(from_snapshot=made["id"]) for _ in range(2)]
    for box in boxes:
        goes_on(box, ticking)
    assert len({box.sh("cat /proc/sys/kernel/random/uuid") for box in boxes}) == 2
    for box in boxes:
        box.delete()
    remove(family, made["id"])
    truth.check(server)


def test_on_another_server(family: Api, new_server: Callable[..., Server], tmp_path: Path) -> None:
    """One that has never seen the template: it comes with the archive, belongs to the workspace, and has no name."""
    snapshot, ticking = prepared(family)
    export(family, snapshot, tmp_path / "whole")
    export(family, snapshot, tmp_path / "bare", template="false")
    remove(family, snapshot)
    other = new_server(start=False, pool_launched=0, pool_warm=0, pool_template="")
    shutil.rmtree(other.data / "templates")
    (other.data / "templates").mkdir(mode=0o700)
    other.start()
    api = other.api
    with pytest.raises(ApiError) as told:
        take_in(api, tmp_path / "bare")
    assert told.value.code == "snapshot.incompatible"
    made = take_in(api, tmp_path / "whole", name="from afar")
    assert made["name"] == "from afar"
    assert api.call("GET", "/v1/templates") == []
    box = api.create(from_snapshot=made["id"])
    goes_on(box, ticking)
    other.kill()
    other.start()
    api = other.api
    box = api.attach(box.id)
    child = box.fork()
    goes_on(child, ticking)
    again = take_in(api, tmp_path / "bare")
    assert again["template_id"] == made["template_id"]
    api.call("POST", f"/v1/snapshots/{made['id']}/promote", json={"name": "mine"})
    goes_on(api.create(template="mine"), ticking)
    api.call("POST", f"{box.path}/restart", json={})
    assert box.sh("cat /root/f") == "disk\nmore\n"
    truth.check(other)


def test_a_reader_that_hangs_up_or_is_slow(family: Api, server: Server) -> None:
    box = family.create()
    box.sh("head -c 40000000 /dev/urandom > /dev/shm/big")
    snapshot = box.snapshot()
    with family.http.stream("GET", f"/v1/snapshots/{snapshot}/export") as answer:
        pieces = answer.iter_raw()
        next(pieces)
    with family.http.stream("GET", f"/v1/snapshots/{snapshot}/export") as answer:
        pieces = answer.iter_raw(65536)
        next(pieces)
        resting = rss_mib(server.pid)
        time.sleep(3)
        assert rss_mib(server.pid) < resting + 64, "what is not read is not made"
        remove(family, snapshot)
        assert sum(len(piece) for piece in pieces) > 40_000_000, "it was open, and comes whole"
    truth.check(server)


def test_a_sender_that_hangs_up_and_bytes_that_are_none(family: Api, server: Server, tmp_path: Path) -> None:
    snapshot = family.create().snapshot()
    export(family, snapshot, tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()

    def half() -> Iterator[bytes]:
        yield raw[: len(raw) // 2]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        httpx.post(
            f"{server.url}/v1/snapshots/import",
            content=half(),
            headers={"Authorization": f"Bearer {server.token}"},
            trust_env=False,
        )
    for wrong in (raw[: len(raw) // 2], b"", raw[:1000] + b"x" + raw[1001:], b"{}" * 1000):
        response = family.request("POST", "/v1/snapshots/import", content=wrong)
        assert (response.status_code, response.json()["code"]) == (400, "request.invalid"), response.text
    assert len(family.snapshots()) == 1
    until(lambda: not truth.staged(server.data), 30)
    truth.check(server)


def test_kill_in_an_import(new_server: Callable[..., Server], tmp_path: Path) -> None:
    server = new_server(pool_launched=0, pool_warm=0)
    snapshot, ticking = prepared(server.api)
    export(server.api, snapshot, tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()

    def then_kill() -> Iterator[bytes]:
        yield raw[: len(raw) * 2 // 3]
        until(lambda: truth.staged(server.data), 30)
        server.kill()
        yield raw[len(raw) * 2 // 3 :]

    with pytest.raises(httpx.TransportError):
        server.api.request("POST", "/v1/snapshots/import", content=then_kill())
    server.start()
    until(lambda: not truth.staged(server.data), 30)
    assert [one["id"] for one in server.api.snapshots()] == [snapshot]
    truth.check(server)
    made = take_in(server.api, tmp_path / "a")
    remove(server.api, snapshot)
    goes_on(server.api.create(from_snapshot=made["id"]), ticking)
    assert not [proc for proc in below(server.data) if "qemu-img" in proc.cmdline]


def test_no_room_on_the_disk_of_the_host(baked: Path, tmp_path: Path) -> None:
    """A sentence, and nothing is left."""
    with small_server(baked) as small:
        api, filler = small.api, Filler(small.data)
        box = api.create()
        box.sh("head -c 30000000 /dev/urandom > /dev/shm/big")
        snapshot = box.snapshot()
        box.delete()
        export(api, snapshot, tmp_path / "a")
        before = layers.there(small.data)
        filler.fill(8 * MIB)
        for call in (
            lambda: take_in(api, tmp_path / "a"),
            lambda: api.call("POST", f"/v1/snapshots/{snapshot}/promote", json={"name": "mine"}),
        ):
            with pytest.raises(ApiError) as told:
                call()
            assert (told.value.status, told.value.code) == (507, "host.disk_full"), told.value
            assert [one["id"] for one in api.snapshots()] == [snapshot]
            assert layers.there(small.data) == before
            assert not truth.staged(small.data)
        filler.free()
        made = take_in(api, tmp_path / "a")
        again = api.create(from_snapshot=made["id"])
        assert again.sh("stat -c %s /dev/shm/big") == "30000000\n"
        again.delete()
        for one in (snapshot, made["id"]):
            remove(api, one)
        truth.check(small)
