"""Forks: each child goes on from the memory and disk of its parent, and shares nothing with anybody afterwards."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kit import layers, truth
from kit.client import Api, Box
from kit.lineage import no_disk_errors, skew
from kit.server import Server
from kit.until import until
from kit.writers import Writers

#: A process that keeps what it has read in its own memory, and tells it.
KEEPER = "mkfifo /run/in; all=; while :; do read -r line < /run/in; all=$all$line; echo $all > /dev/shm/told; done"
#: Draws random numbers from the kernel as fast as it can.
DRAWER = """
import os
out = os.open("/root/drawn", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
random = os.open("/proc/sys/kernel/random/uuid", os.O_RDONLY)
while not os.path.exists("/root/stop"):
    os.write(out, os.pread(random, 100, 0))
"""


def each(boxes: list[Box], work: Callable[[Box], object]) -> None:
    """`work` on all of them at once."""
    with ThreadPoolExecutor(len(boxes)) as pool:
        list(pool.map(work, boxes))


def tell(box: Box, word: str) -> str:
    """What the keeper in it knows after it has read `word`."""
    box.sh(f"echo {word} > /run/in")
    until(lambda: word in box.sh("cat /dev/shm/told"))
    return box.sh("cat /dev/shm/told").strip()


# ---------------------------------------------------------------- nothing is shared


def test_memory_and_processes_go_on_apart(family: Api, server: Server) -> None:
    parent = family.create()
    parent.start(KEEPER)
    until(lambda: parent.exec("test -p /run/in").code == 0)
    assert tell(parent, "before") == "before"
    pid = parent.sh("pgrep -of 'read -r line'")
    one, two = parent.forks(2)
    assert tell(one, "one") == "beforeone"
    assert tell(parent, "parent") == "beforeparent"
    assert tell(two, "two") == "beforetwo"
    assert tell(one, "again") == "beforeoneagain"
    for child in (one, two):
        assert child.sh("pgrep -of 'read -r line'") == pid
    truth.usable(parent, one, two)
    truth.check(server)


@pytest.mark.slow
def test_eight_write_the_same_names(family: Api, server: Server) -> None:
    """Everybody reads back what it has written itself, from the disk, also when the parent is gone."""
    parent = family.create()
    parent.sh("mkdir /root/same; for i in $(seq 100); do echo parent $i > /root/same/$i; done; sync")
    children = parent.forks(8)

    def write(box: Box) -> None:
        box.sh(
            f"for i in $(seq 100); do echo {box.id} $i > /root/same/$i; done;"
            f" yes {box.id} | head -c 4000000 > /root/same/big; sync; echo 3 > /proc/sys/vm/drop_caches"
        )

    def read(box: Box) -> None:
        lines = box.sh(f"cd /root/same; cat $(seq 100); yes {box.id} | head -c 4000000 | cmp - big").splitlines()
        assert lines == [f"{box.id} {i}" for i in range(1, 101)]

    each(children, write)
    assert parent.sh("cd /root/same; ls | wc -l; cat 1 100") == "100\nparent 1\nparent 100\n"
    each(children, read)
    writing = layers.writers(server)
    used = [writing[box.id] for box in (parent, *children)]
    assert all(len(one) == 1 for one in used), f"one writable layer for each machine: {writing}"
    assert len(set().union(*used)) == 9, "and each its own"
    parent.delete()
    each(children[:4], lambda box: box.sh("echo 3 > /proc/sys/vm/drop_caches"))
    each(children[:4], read)
    no_disk_errors(*children)


def test_random_numbers_differ_from_the_first_one(family: Api) -> None:
    """Parent and children draw all the time; up to the fork all have drawn the same, and then never again."""
    parent = family.create()
    drawing = parent.start(["python3", "-c", DRAWER])
    until(lambda: int(parent.sh("wc -l < /root/drawn 2>/dev/null || echo 0")) > 50)
    everybody = [parent, *parent.forks(3)]
    more = "n=$(wc -l < /root/drawn); until [ $(wc -l < /root/drawn) -gt $n ]; do :; done; touch /root/stop"
    each(everybody, lambda box: box.sh(more))
    each(everybody, lambda box: box.follow_all(drawing))
    drawn = [box.sh("cat /root/drawn").split() for box in everybody]
    at = {_common(a, b) for a, b in itertools.combinations(drawn, 2)}
    print(f"drawn before the fork: {at}, in all: {[len(one) for one in drawn]}")
    assert len(at) == 1, f"two of them have drawn the same after the fork: {at}"
    after = [number for one in drawn for number in one[min(at) :]]
    assert len(after) > len(everybody)
    assert len(set(after)) == len(after)
    assert not set(after) & set(drawn[0][: min(at)])


def _common(one: list[str], other: list[str]) -> int:
    """So many values are the same at the beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_names_and_clock(family: Api) -> None:
    """In the first command already."""
    parent = family.create()
    parent.start("while :; do date +%s.%N > /dev/shm/now; sleep 0.1; done")
    shown, skews = [], []
    for child in parent.forks(3):
        skews.append(skew(child))
        shown.append(child.sh("hostname; cat /etc/hostname /etc/machine-id /proc/sys/kernel/random/uuid").splitlines())
        assert shown[-1][0] == shown[-1][1] == f"sb-{child.id[:12]}"
        assert len(shown[-1][2]) == 32
        child.sh("sleep 0.5")
        told = until(lambda child=child: child.sh("cat /dev/shm/now"))  # it is empty for a moment now and then
        assert abs(float(told) - time.time()) < 10, "running processes see it too"
    shown.append(parent.sh("hostname; cat /etc/hostname /etc/machine-id /proc/sys/kernel/random/uuid").splitlines())
    assert shown[-1][0] == f"sb-{parent.id[:12]}"
    for column in zip(*shown, strict=True):
        assert len(set(column)) == len(shown), f"two of them share {column}"
    assert max(skews) < 1.0, skews


# ---------------------------------------------------------------- what runs in the parent


def test_running_commands_go_on_in_both(family: Api) -> None:
    """The callers of the parent notice nothing; in a child the same commands are listed, and can be killed there."""
    parent = family.create()
    detached = parent.start("i=0; while [ $i -lt 90 ]; do echo line $i; i=$((i+1)); sleep 0.05; done; exit 7")
    with ThreadPoolExecutor() as pool:
        blocking = pool.submit(parent.exec, "sleep 7; echo whole; exit 5", exec_id="blocking")
        streamed = pool.submit(
            parent.stream_all, "for i in $(seq 90); do echo $i; sleep 0.05; done", exec_id="streamed"
        )
        until(lambda: {one["exec_id"] for one in parent.execs()} >= {"blocking", "streamed", detached})
        children = parent.forks(2)
        for child in children:
            listed = {one["exec_id"]: one["status"] for one in child.execs()}
            assert listed == dict.fromkeys(("blocking", "streamed", detached), "running")
        for name in ("blocking", "streamed", detached):
            children[0].kill(name)
        until(lambda: children[0].sh("pgrep -x sleep | wc -l") == "0\n")
        ended = children[1].follow_all(detached)
        assert (ended.stdout, ended.exit_code) == (b"".join(b"line %d\n" % i for i in range(90)), 7)
        assert (blocking.result(60).stdout, blocking.result().code) == ("whole\n", 5)
        seen = streamed.result(60)
    assert (seen.gaps, seen.exit_code) == (0, 0)
    assert seen.stdout.decode().split() == [str(i) for i in range(1, 91)]
    seen = parent.follow_all(detached, 0)
    assert (seen.stdout, seen.exit_code) == (b"".join(b"line %d\n" % i for i in range(90)), 7)
    truth.usable(parent, *children)


def test_many_forks_while_lines_come(family: Api) -> None:
    """Nothing is lost or doubled, however often the parent stands still."""
    parent = family.create()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(parent.stream_all, "for i in $(seq 150); do echo $i; sleep 0.02; done")
        until(lambda: parent.execs())
        forked = 0
        while not running.done():
            parent.fork().delete()
            forked += 1
        seen = running.result()
    assert forked >= 2
    assert (seen.gaps, seen.exit_code) == (0, 0)
    assert seen.stdout.decode().split() == [str(i) for i in range(1, 151)]


def test_under_write_load(family: Api) -> None:
    """What was acknowledged before the fork is in each child; databases and file systems are whole."""
    parent = family.create()
    with Writers(parent) as writers:
        for _ in range(2):
            acknowledged = writers.acknowledged
            child = parent.fork()
            writers.check(child, acknowledged)
            child.delete()
    writers.check(parent, writers.acknowledged)


# ---------------------------------------------------------------- generations


def test_a_fork_of_a_fork_of_a_fork(family: Api, server: Server) -> None:
    """The ancestors are deleted first; what each generation has written is there."""
    line = [family.create()]
    line[0].sh("echo 0 > /root/g0; echo 0 > /dev/shm/g0; sync")
    for number in range(1, 4):
        line.append(line[-1].fork())
        line[-1].sh(f"echo {number} > /root/g{number}; echo {number} > /dev/shm/g{number}; sync")
        assert line[-1].info["parent_id"] == line[-2].id
    youngest = line[-1]
    for box in line[:-1]:
        box.delete()
        truth.check(server)
    youngest.sh("echo 3 > /proc/sys/vm/drop_caches")
    assert youngest.sh("cat /root/g? /dev/shm/g?").split() == ["0", "1", "2", "3"] * 2
    another = youngest.fork()
    youngest.delete()
    assert another.sh("cat /root/g? /dev/shm/g?").split() == ["0", "1", "2", "3"] * 2
    no_disk_errors(another)


def test_of_a_paused_sandbox(family: Api, server: Server) -> None:
    """The children run; the parent stays paused, and goes on when it is told to."""
    parent = family.create()
    ticking = parent.start("while :; do echo tick; sleep 0.1; done")
    until(lambda: parent.exec_info(ticking)["output_bytes"] > 0)
    parent.pause()
    children = parent.forks(2)
    assert parent.status() == "paused"
    assert parent.refused("true").code == "sandbox.invalid_state"
    for child in children:
        assert skew(child) < 1.0
        before = child.exec_info(ticking)["output_bytes"]
        until(lambda child=child, before=before: child.exec_info(ticking)["output_bytes"] > before)
    truth.check(server)
    parent.resume()
    before = parent.exec_info(ticking)["output_bytes"]
    until(lambda: parent.exec_info(ticking)["output_bytes"] > before)
    truth.usable(parent, *children)


# ---------------------------------------------------------------- what is asked for, and what is told


def test_options_and_what_is_told(family: Api) -> None:
    parent = family.create(ttl_seconds=3000, metadata={"a": "1", "b": "2"}, env={"A": "one", "B": "two"}, cwd="/var")
    answer = family.call("POST", f"{parent.path}/fork", json={})
    child = family.keep(answer)
    assert [one["id"] for one in answer["children"]] == [child.id]
    assert (answer["parent_id"], answer["status"], answer["boot_mode"]) == (parent.id, "running", "fork")
    assert answer["fork_tree_id"] == answer["tree_id"]
    assert answer["pause_ms"] > 0
    assert answer["metadata"] == {"a": "1", "b": "2", "fork_parent_id": parent.id, "fork_tree_id": answer["tree_id"]}
    assert (answer["ttl_seconds"], answer["persistent"]) == (3000, False)
    for name in ("template", "template_id", "cpus", "memory_mb", "disk_mb", "env_keys", "workspace", "isolation"):
        assert answer[name] == parent.info[name]
    assert child.sh("echo $A $B; pwd") == "one two\n/var\n"
    others = parent.forks(2, ttl_seconds=77, metadata={"b": "3", "c": "4"}, env={"B": "2", "C": "3"})
    for other in others:
        assert {k: other.info["metadata"][k] for k in "abc"} == {"a": "1", "b": "3", "c": "4"}
        assert other.info["ttl_seconds"] == 77
        assert other.sh("echo $A $B $C") == "one 2 3\n"
        assert other.info["fork_tree_id"] == others[0].info["fork_tree_id"] != answer["tree_id"]
    assert parent.forks(1, persistent=True)[0].info["persistent"] is True
    assert "parent_id" not in parent.refresh()
    assert {box.id for box in (parent, child, *others)} <= {one["id"] for one in family.list()}
    for body in ({"count": 0}, {"count": 17}, {"count": "2"}, {"ttl_seconds": -1}, {"env": {"A": 1}}):
        refused = family.request("POST", f"{parent.path}/fork", json=body)
        assert (refused.status_code, refused.json()["code"]) == (400, "request.invalid"), body
    assert family.request("POST", f"/v1/sandboxes/{'z' * 20}/fork", json={}).status_code == 404


def test_promote(family: Api, server: Server) -> None:
    parent = family.create()
    first, second, third = parent.forks(3)
    other = parent.fork()
    assert parent.verb("promote") == (400, "request.invalid")
    kept = first.promote()
    assert kept == {"winner": first.id, "tree_id": first.info["fork_tree_id"], "deleted": [], "failures": {}}
    done = first.promote(cleanup_siblings=True)
    assert set(done["deleted"]) == {second.id, third.id}
    assert first.promote(cleanup_siblings=True)["deleted"] == []
    assert {box.id for box in (parent, first, other)} <= {one["id"] for one in family.list()}
    truth.usable(parent, first, other)
    truth.check(server)


def test_beyond_the_capacity(new_server: Callable[..., Server]) -> None:
    """What fits is made; when nothing fits, nothing is, and the parent has not stood still for it."""
    server = new_server(max_sandboxes=3, pool_launched=0, pool_warm=0)
    parent = server.api.create()
    answer = server.api.call("POST", f"{parent.path}/fork-tree", json={"count": 5})
    children = [server.api.keep(one) for one in answer["children"]]
    assert len(children) == 2
    assert [one["code"] for one in answer["errors"]] == ["capacity.unavailable"] * 3
    truth.usable(parent, *children)
    before = layers.there(server.data)
    refused = server.api.request("POST", f"{parent.path}/fork", json={})
    assert (refused.status_code, refused.json()["code"]) == (503, "capacity.unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert layers.there(server.data) == before
    truth.check(server)
    children[0].delete()
    truth.usable(parent.fork())
    truth.check(server)


def test_a_caller_that_goes_away(family: Api, server: Server) -> None:
    """No child is left without an owner."""
    parent = family.create()
    known = {one["id"] for one in family.list()}
    for seconds in (0.02, 0.1, 0.3):
        with pytest.raises(Exception, match="timed out"):
            family.request("POST", f"{parent.path}/fork-tree", json={"count": 4}, timeout=seconds)
        truth.check(server, 60)
        assert {one["id"] for one in family.list()} == known
    truth.usable(parent)
