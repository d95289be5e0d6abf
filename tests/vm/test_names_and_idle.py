"""Names, idle actions and waiting, on real machines."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from kit import truth
from kit.client import Api, ApiError, Box
from kit.server import Server
from kit.until import until


def ask(api: Api, **body: object) -> tuple[int, dict[str, object]]:
    response = api.request("POST", "/v1/sandboxes", json=body)
    return response.status_code, response.json()


def test_ten_who_connect_at_once_get_one_sandbox(family: Api, server: Server) -> None:
    with ThreadPoolExecutor(10) as pool:
        told = list(pool.map(lambda _: ask(family, name="shared", if_exists="connect"), range(10)))
    assert sorted(status for status, _ in told) == [200] * 9 + [201]
    assert len({str(body["id"]) for _, body in told}) == 1
    box = family.keep(told[0][1])
    assert ask(family, name="shared")[0] == 409
    box.hibernate()
    status, found = ask(family, name="shared", if_exists="connect", ttl_seconds=5)
    assert (status, found["id"], found["status"]) == (200, box.id, "running")
    assert found["ttl_seconds"] != 5
    status, other = ask(family, name="shared", if_exists="replace")
    assert status == 201
    assert other["id"] != box.id
    family.keep(other)
    assert [one["id"] for one in family.list(name="shared")] == [other["id"]]
    truth.check(server)


def test_nothing_going_on_hibernates_it_and_the_reason_can_be_read(family: Api, server: Server) -> None:
    box = family.create(idle_seconds=2)
    box.sh("echo kept > /dev/shm/m")
    waited = family.call("GET", f"{box.path}/wait", params={"status": "hibernated", "timeout": 60})
    assert (waited["status"], waited["status_reason"]) == ("hibernated", "idle")
    assert box.refresh()["status"] == "hibernated", "reading it wakes nothing"
    assert box.sh("cat /dev/shm/m") == "kept\n"
    assert box.refresh()["status"] == "running"


def test_what_goes_on_keeps_it_awake_for_its_whole_length(family: Api, server: Server) -> None:
    """A silent command, and a slow download."""
    box = family.create(idle_seconds=3)
    box.sh("sleep 8")
    assert box.refresh()["status"] == "running"
    box.sh("head -c 40000000 /dev/zero > /root/big")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(_slow_download, box)
        time.sleep(6)
        assert box.refresh()["status"] == "running"
        assert slow.result(60) == 40_000_000
    until(lambda: box.refresh()["status"] == "hibernated", 60)


def _slow_download(box: Box) -> int:
    """Stands still in the middle: more is under way than fits into the sockets."""
    size = 0
    with box.api.http.stream("GET", f"{box.path}/fs", params={"path": "/root/big"}, timeout=60) as response:
        for number, part in enumerate(response.iter_raw(65536)):
            size += len(part)
            if number == 1:
                time.sleep(9)
    return size


def test_an_idle_one_may_also_be_deleted(family: Api, server: Server) -> None:
    box = family.create(idle_seconds=1, idle_action="delete")
    until(lambda: _ended(box) == "idle", 60)
    truth.check(server)


def _ended(box: Box) -> str:
    try:
        box.refresh()
    except ApiError as error:
        return str(error.details["termination"]["reason"])
    return ""
