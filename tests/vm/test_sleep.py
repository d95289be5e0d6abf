"""Pause and resume, hibernate and wake: nothing is lost, time is right, and every order of calls is survived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kit import truth
from kit.client import Api, Box
from kit.lineage import skew
from kit.server import Server
from kit.until import Watch, until

#: Of calls that meet a sandbox in another state: done, or refused with a reason.
FINE = {200, 201, 204, 409}


def moves(server: Server, box: Box, event: str) -> int:
    """So often the log of the server tells of this move."""
    lines = server.log.read_text("utf-8", "replace").splitlines()
    return sum(
        "sandbox.moved" in line and box.id in line and f"event_name={event}" in line.replace("'", "") for line in lines
    )


def expiry(box: Box) -> float:
    """Seconds until its TTL has passed, as its object tells."""
    from datetime import datetime

    told = datetime.fromisoformat(str(box.refresh()["expires_at"]).replace("Z", "+00:00"))
    return told.timestamp() - time.time()


# ---------------------------------------------------------------- pause and resume


def test_a_hundred_times_back_to_back(family: Api, server: Server) -> None:
    """No call is a silent no-op, and what runs goes on each time."""
    box = family.create()
    counting = box.start("i=0; while :; do echo $((i=i+1)) > /dev/shm/count; done")
    until(lambda: box.exec("test -s /dev/shm/count").code == 0)
    for number in range(100):
        assert box.verb("pause") == (204, "")
        if number % 10 == 0:
            assert box.status() == "paused"
            error = box.refused("true")
            assert (error.status, error.code) == (409, "sandbox.invalid_state")
            assert error.details["status"] == "paused"
        assert box.verb("resume") == (204, "")
        if number % 10 == 0:
            before = box.sh("cat /dev/shm/count")
            until(lambda before=before: box.sh("cat /dev/shm/count") != before)
    assert box.exec_info(counting)["status"] == "running"
    assert skew(box) < 1.0
    for _ in range(2):
        assert box.verb("resume") == (204, ""), "it runs already"
    for _ in range(2):
        assert box.verb("pause") == (204, ""), "it may be repeated"
    truth.check(server)


def test_twenty_of_each_at_once(family: Api, server: Server) -> None:
    """One after the other, in some order; the sandbox is what it says it is."""
    box = family.create()
    with ThreadPoolExecutor(60) as pool:
        running = [pool.submit(box.verb, "pause" if n % 2 else "resume") for n in range(40)]
        running += [pool.submit(_get, box) for _ in range(20)]
        told = [one.result(60) for one in running]
    assert {status for status, _ in told} <= {200, 204}, told
    if box.status() == "paused":
        box.resume()
    truth.usable(box)
    truth.check(server)


def _get(box: Box) -> tuple[int, str]:
    response = box.api.request("GET", box.path)
    assert response.json()["status"] in {"running", "paused"}
    return response.status_code, ""


def test_all_kinds_of_moves_at_once(family: Api, server: Server) -> None:
    """Each is done or refused, none fails, and afterwards it runs commands."""
    box = family.create()
    box.sh("echo kept > /dev/shm/m")
    verbs = ("pause", "resume", "hibernate", "wake", "fork")
    with ThreadPoolExecutor(20) as pool:
        told = list(pool.map(box.verb, verbs * 4))
    assert {status for status, _ in told} <= FINE, told
    forked = [one for one in family.list() if one.get("parent_id") == box.id]
    assert len(forked) == [verb for verb, (status, _) in zip(verbs * 4, told, strict=True) if status == 201].count(
        "fork"
    )
    for one in forked:
        assert family.attach(one["id"]).sh("cat /dev/shm/m") == "kept\n"
        family.delete(one["id"])
    if box.status() == "paused":
        box.resume()
    assert box.sh("cat /dev/shm/m") == "kept\n"
    truth.check(server)


def test_right_after_the_create(family: Api) -> None:
    """What was made a moment ago can be paused, hibernated and deleted."""
    for verb, back in (("pause", "resume"), ("hibernate", "wake")):
        box = family.create()
        assert box.verb(verb)[0] in FINE - {409}
        assert box.verb(back)[0] in FINE - {409}
        truth.usable(box)
        box.delete()


@pytest.mark.parametrize("state", ["paused", "hibernated", "pause", "resume", "hibernate", "wake", "fork", "snapshots"])
def test_delete_in_every_state(family: Api, server: Server, state: str) -> None:
    """Also in the middle of a move: nothing of it is left."""
    box = family.create()
    if state in {"paused", "resume"}:
        box.pause()
    if state in {"hibernated", "wake"}:
        box.hibernate()
    if state in {"paused", "hibernated"}:
        box.delete()
    else:
        with ThreadPoolExecutor() as pool:
            moving = pool.submit(box.verb, state)
            time.sleep(0.05)
            box.delete()
            status, code = moving.result(60)
        assert status in FINE | {404}, (status, code)
    assert family.request("GET", box.path).status_code == 404
    for one in family.list():
        if one.get("parent_id") == box.id:
            truth.usable(family.attach(one["id"]))
            family.delete(one["id"])
    truth.check(server)


def test_a_call_that_runs_while_it_is_paused(family: Api) -> None:
    """Callers wait, and get all of it after the resume."""
    box = family.create()
    with ThreadPoolExecutor() as pool:
        blocking = pool.submit(box.exec, "for i in $(seq 20); do echo $i; sleep 0.1; done; exit 3")
        streamed = pool.submit(box.stream_all, "for i in $(seq 20); do echo $i; sleep 0.1; done")
        until(lambda: len(box.execs()) == 2)
        box.pause()
        time.sleep(3)
        assert not blocking.done()
        box.resume()
        result, seen = blocking.result(60), streamed.result(60)
    assert (result.stdout.split(), result.code) == ([str(i) for i in range(1, 21)], 3)
    assert (seen.stdout.decode().split(), seen.gaps, seen.exit_code) == ([str(i) for i in range(1, 21)], 0, 0)


# ---------------------------------------------------------------- time


@pytest.mark.parametrize(("sleep", "back"), [("pause", "resume"), ("hibernate", "wake")])
def test_time_stands_still_for_timers_and_not_for_the_clock(family: Api, sleep: str, back: str) -> None:
    """No burst of overdue ticks, `sleep` goes on where it was, and the date is right in the first command."""
    box = family.create()
    box.start("while :; do date +%s.%N >> /dev/shm/ticks; sleep 0.2; done")
    sleeping = box.start("sleep 8; echo woken")
    until(lambda: int(box.sh("wc -l < /dev/shm/ticks 2>/dev/null || echo 0")) > 5)
    up = float(box.sh("cut -d' ' -f1 /proc/uptime"))
    watch = Watch()
    assert box.verb(sleep)[0] in {200, 204}
    time.sleep(8)
    assert box.verb(back)[0] in {200, 204}
    away = watch.seconds
    assert skew(box) < 1.0
    assert float(box.sh("cut -d' ' -f1 /proc/uptime")) - up < away - 4
    assert box.exec_info(sleeping)["status"] == "running", "its eight seconds have not passed"
    time.sleep(2)
    ticks = [float(line) for line in box.sh("cat /dev/shm/ticks").split()]
    gap = max(range(1, len(ticks)), key=lambda i: ticks[i] - ticks[i - 1])
    assert ticks[gap] - ticks[gap - 1] > 7, "running processes see the right date as well"
    after = [tick for tick in ticks[gap:] if tick < ticks[gap] + 1]
    assert len(after) <= 10, f"a burst: {after}"
    assert max(ticks) > ticks[gap], "and it goes on"
    assert box.follow_all(sleeping).stdout == b"woken\n"


# ---------------------------------------------------------------- hibernate and wake


def test_everything_is_there_afterwards(family: Api, server: Server) -> None:
    box = family.create(env={"A": "one"})
    box.sh(
        "echo disk > /root/f; echo memory > /dev/shm/m; mkdir /run/t && mount -t tmpfs none /run/t && echo t > /run/t/t"
    )
    counting = box.start("i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); sleep 0.05; done; exit 6")
    pid = box.exec_info(counting)["pid"]
    names = box.sh("hostname; cat /etc/machine-id")
    for _ in range(2):
        box.hibernate()
        assert box.id not in server.machines()
        box.hibernate()
        truth.check(server)
        info = box.refresh()
        assert (info["status"], info["boot_mode"]) == ("hibernated", info["boot_mode"])
        box.wake()
        box.wake()
        assert (box.refresh()["status"], box.info["boot_mode"]) == ("running", "wake")
        assert box.info["boot_ms"] >= 1
        assert box.sh("cat /root/f /dev/shm/m /run/t/t; echo $A") == "disk\nmemory\nt\none\n"
        assert box.sh("hostname; cat /etc/machine-id") == names
    assert box.exec_info(counting)["pid"] == pid
    seen = box.follow_all(counting, 0)
    assert (seen.stdout, seen.exit_code, seen.gaps) == (b"".join(b"line %d\n" % i for i in range(200)), 6, 0)
    truth.check(server)


def test_what_wakes_it_and_what_does_not(family: Api, server: Server) -> None:
    box = family.create()
    exec_id = box.start("echo recorded; exit 4")
    box.follow_all(exec_id)
    box.put("/root/f", b"content")
    box.hibernate()
    for path in ("", "/lifecycle", "/logs"):
        assert family.request("GET", box.path + path).status_code == 200
    assert box.id in {one["id"] for one in family.list(status="hibernated")}
    family.call("PATCH", box.path, json={"metadata": {"a": "1"}})
    assert family.snapshots(sandbox_id=box.id) == []
    assert box.status() == "hibernated"
    for_each: list[tuple[str, Callable[[], Any], Any]] = [
        ("exec", lambda: box.sh("echo awake"), "awake\n"),
        ("stream", lambda: box.stream_all("echo awake").stdout, b"awake\n"),
        ("background", lambda: box.follow_all(box.start("echo awake")).stdout, b"awake\n"),
        ("read", lambda: box.get("/root/f"), b"content"),
        ("write", lambda: box.put("/root/g", b"12345")["bytes"], 5),
        ("stat", lambda: box.stat("/root/f")["size"], 7),
        ("list", lambda: "f" in box.names("/root"), True),
        ("output of a command", lambda: box.exec_info(exec_id)["stdout"], "recorded\n"),
        ("fork", lambda: box.fork().get("/root/f"), b"content"),
        ("snapshot", lambda: len(box.snapshot()) > 10, True),
    ]
    for name, call, expected in for_each:
        if box.status() != "hibernated":
            box.hibernate()
        assert call() == expected, name
        assert box.status() == "running", name
    truth.check(server)


def test_ten_at_once_wake_it_once(family: Api, server: Server) -> None:
    box = family.create()
    box.hibernate()
    before = moves(server, box, "hibernate"), moves(server, box, "wake")
    assert before == (1, 0)
    with ThreadPoolExecutor(12) as pool:
        told = list(pool.map(lambda n: box.sh(f"echo {n}"), range(10)))
    assert told == [f"{n}\n" for n in range(10)]
    assert moves(server, box, "wake") == 1
    truth.check(server)


def test_it_outlives_the_server(new_server: Callable[..., Server]) -> None:
    """Also one that was paused; and both can be deleted by a server that has not put them there."""
    server = new_server(pool_launched=0, pool_warm=0)
    asleep, still, gone = (server.api.create() for _ in range(3))
    for box in (asleep, still, gone):
        box.sh("echo memory > /dev/shm/m")
    asleep.hibernate()
    gone.hibernate()
    still.pause()
    for end in (server.kill, server.terminate):
        end()
        server.start()
        truth.check(server)
        api = server.api
        assert [api.get(box.id)["status"] for box in (asleep, still, gone)] == ["hibernated", "paused", "hibernated"]
    api.delete(gone.id)
    truth.check(server)
    asleep, still = api.attach(asleep.id), api.attach(still.id)
    assert asleep.sh("cat /dev/shm/m") == "memory\n"
    still.resume()
    assert still.sh("cat /dev/shm/m") == "memory\n"
    assert skew(still) < 1.0
    truth.check(server)


def test_no_room_to_wake_up(new_server: Callable[..., Server]) -> None:
    """A hibernated sandbox holds no memory of the host; when there is none it stays as it is, and says so."""
    server = new_server(pool_launched=0, pool_warm=0, memory_overcommit=0.1)
    box = server.api.create()
    box.sh("echo memory > /dev/shm/m")
    box.hibernate()
    made = 0
    while (response := server.api.request("POST", "/v1/sandboxes", json={})).status_code == 201:
        made += 1
        if made > 40:
            pytest.skip("this host has so much memory that filling it takes too long")
    assert response.json()["code"] == "capacity.unavailable"
    assert made
    assert box.verb("wake") == (503, "capacity.unavailable")
    error = box.refused("true")
    assert (error.status, error.code) == (503, "capacity.unavailable")
    assert box.status() == "hibernated"
    server.api.delete(next(one["id"] for one in server.api.list() if one["id"] != box.id))
    assert box.sh("cat /dev/shm/m") == "memory\n"
    truth.check(server)


# ---------------------------------------------------------------- the TTL


def test_the_ttl_ends_it_in_its_sleep(family: Api, server: Server) -> None:
    boxes = [family.create(ttl_seconds=6) for _ in range(2)]
    boxes[0].hibernate()
    boxes[1].pause()
    for box in boxes:
        until(lambda box=box: family.request("GET", box.path).status_code == 404, 40)
        assert family.request("GET", box.path).json()["details"]["termination"]["reason"] == "ttl"
        error = box.refused("true")
        assert (error.status, error.code) == (404, "sandbox.not_found")
    truth.check(server)


@pytest.mark.parametrize(("sleep", "back"), [("pause", "resume"), ("hibernate", "wake")])
def test_the_ttl_is_counted_anew(family: Api, sleep: str, back: str) -> None:
    """As it was set, five times; calls in between shorten nothing."""
    box = family.create(ttl_seconds=1000)
    for ttl in (1000, 1000, 500, 500, 500):
        if ttl != box.info["ttl_seconds"]:
            family.call("PATCH", box.path, json={"ttl_seconds": ttl})
        time.sleep(1.2)
        assert expiry(box) < ttl - 1
        box.verb(sleep)
        assert expiry(box) < ttl - 1
        box.verb(back)
        assert ttl - 1 < expiry(box) <= ttl
        assert box.info["ttl_seconds"] == ttl
        told = box.info["expires_at"]
        box.sh("true")
        box.verb(back)
        assert box.refresh()["expires_at"] == told, "what runs already is left as it is"
    family.call("PATCH", box.path, json={"persistent": True})
    box.verb(sleep)
    box.verb(back)
    assert "expires_at" not in box.refresh()


def test_many_asleep_cost_little(family: Api, server: Server) -> None:
    """Six are put to sleep and woken at the same time; each is itself."""
    boxes = [family.create() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda box: box.sh(f"echo {box.id} > /dev/shm/me"), boxes))
        list(pool.map(lambda box: box.hibernate(), boxes))
        assert not set(server.machines()) & {box.id for box in boxes}
        told = list(pool.map(lambda box: box.sh("cat /dev/shm/me"), boxes))
    assert told == [f"{box.id}\n" for box in boxes]
    truth.check(server)


def test_it_is_woken_while_it_falls_asleep(family: Api) -> None:
    """A command that comes in the middle waits, wakes it, and runs. The caller of one that has just begun may lose it,
    as of any that runs when its sandbox is put to sleep; none is run twice."""
    box, done = family.create(), set()
    box.sh("touch /root/ran")
    for number, seconds in enumerate((0.0, 0.02, 0.05, 0.1, 0.2, 0.5)):
        thread = threading.Thread(target=box.verb, args=("hibernate",))
        thread.start()
        time.sleep(seconds)
        response = family.request("POST", f"{box.path}/exec", json={"cmd": f"echo {number} >> /root/ran"})
        thread.join(60)
        if response.status_code == 200:
            done.add(str(number))
        else:
            assert (response.status_code, response.json()["code"]) == (409, "exec.suspended")
        ran = box.sh("cat /root/ran").split()
        assert set(ran) >= done, "what was told to have run has run"
        assert len(set(ran)) == len(ran), "and nothing twice"
    assert len(done) >= 3
