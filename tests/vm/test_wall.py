"""The wall around QEMU: what a program in its place can reach, what is left of it, and that all verbs work inside."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloche_server.engine.qemu.launch import MOST_FILES, file_limit_mb
from cloche_server.engine.qemu.wall import BASE, find_root
from cloche_server.host import cgroups, inspect, mounts, uids
from cloche_server.host.cgroups import Groups, Limits
from cloche_server.host.jail import Bind, Jail, Launcher, Program, Root, may_set_limits
from kit import leaks, procs, truth, walls
from kit.client import Api, Box
from kit.server import Server

pytestmark = pytest.mark.vm

ATTEMPTS = Path(__file__).with_name("jail_attempts.py")
MIB = 1024 * 1024


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


@pytest.fixture
async def root() -> Root:
    """QEMU's own root and, beside it, what runs the attempts."""
    qemu = await find_root("/usr/bin/qemu-system-x86_64", kvm=False)
    python = Path(sys.base_prefix).resolve()
    return Root((*qemu.binds, Bind(python, execute=True), Bind(ATTEMPTS.resolve())), qemu.links)


def run_inside(
    launcher: Launcher, jail: Jail, *words: str, limits: dict[str, int] | None = None, groups: tuple[int, ...] = ()
) -> tuple[int, bytes]:
    """Runs the interpreter in a jail: how it ended, and what it wrote."""
    output = os.memfd_create("output")
    null = os.open(os.devnull, os.O_RDWR)
    try:
        python = str(Path(sys.base_prefix).resolve() / "bin" / Path(os.path.realpath(sys.executable)).name)
        argv = (python, "-I", "-S", *words)
        fds = {0: null, 1: output, 2: output, 3: output}
        pid = launcher.start(Program(argv, fds, jail, cgroups=groups, limits=limits or {"CORE": 0}))
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), os.pread(output, 1 << 20, 0)
    finally:
        os.close(output)
        os.close(null)


@contextlib.contextmanager
def host_secrets() -> Iterator[tuple[str, int]]:
    """An abstract socket and a shared segment of the host that everybody may use who sees them."""
    name, key = f"cloche-test-{os.getpid()}", 0x636C0000 + os.getpid() % 65536
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(key, 4096, 0o1666)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(1)
        try:
            yield name, key
        finally:
            libc.shmctl(segment, 0, None)


async def test_a_program_in_the_place_of_qemu_gets_nowhere(
    sandbox: Box, server: Server, launcher: Launcher, root: Root
) -> None:
    victim = server.qemu(sandbox.id)
    uid, directory = uids.uid_of(victim.pid), server.data / "sandboxes" / sandbox.id
    memory = next(server.data.glob("templates/base-*/mem"))
    mine = walls.block(server.data).take()
    tree = mounts.detached(memory)
    try:
        with host_secrets() as (abstract, segment):
            goal = {
                "files": [
                    *("/etc/passwd", "/etc/shadow", "/proc/self/status", f"/proc/{victim.pid}/mem", "/bin/sh"),
                    *(str(one) for one in (memory, server.data / "cloche.db", server.log)),
                    *(str(server.data / "layers" / name) for name in os.listdir(server.data / "layers")),  # noqa: PTH208
                    *(str(directory / name) for name in ("console.log", "qemu.log", "uid")),
                ],
                "folders": ["/proc", "/sys", "/etc", "/home", "/run", "/var", "/dev/shm", "/dev/pts"],
                "sockets": [str(directory / "agent.sock"), str(directory / "qmp.sock")],
                "victim": victim.pid,
                "server": server.pid,
                "uid": uid,
                "port": int(server.url.rpartition(":")[2]),
                "abstract": abstract,
                "segment": segment,
                "hostname": socket.gethostname(),
                "file_limit": 64 * MIB,
            }
            jail = Jail(root, mine, BASE, server.data / "sandboxes" / "other", trees=(("/mem", tree),))
            limits = {"CORE": 0, "NOFILE": MOST_FILES, "FSIZE": 64 * MIB}
            code, output = run_inside(launcher, jail, str(ATTEMPTS.resolve()), json.dumps(goal), limits=limits)
    finally:
        os.close(tree)
    assert code == 0, output
    told = json.loads(output)
    assert len(told) >= 95
    through = {name: what for name, what in told.items() if not what.startswith("refused")}
    assert not through
    assert sandbox.sh("echo unharmed") == "unharmed\n"


async def test_the_memory_of_a_template_is_read_by_its_own_machines_only(
    sandbox: Box, server: Server, launcher: Launcher, root: Root
) -> None:
    """The same file under the same name, without the group that its own machines have."""
    memory = next(server.data.glob("templates/base-*/mem"))
    block = walls.block(server.data)
    group = block.group_of(memory.stat())
    script = "import os,sys; os.write(1, os.pread(os.open('/mem', os.O_RDONLY), 1, 0) and b'read')"
    for groups, wanted in (((group,), b"read"), ((), b"PermissionError"), ((group + 1,), b"PermissionError")):
        tree = mounts.detached(memory)
        try:
            jail = Jail(root, block.take(), BASE, Path("/work"), groups, (("/mem", tree),))
            _, output = run_inside(launcher, jail, "-c", script)
        finally:
            os.close(tree)
        assert wanted in output
    assert sandbox.sh("echo alive") == "alive\n"


async def test_who_takes_too_much_memory_is_ended_and_nobody_else(
    sandbox: Box, server: Server, launcher: Launcher, root: Root
) -> None:
    facts = cgroups.probe()
    assert not facts.missing, f"this host has no {facts.missing}"
    block = walls.block(server.data)
    groups, name = Groups(facts, block.name), "hog"
    fds, failures = groups.make(name, Limits(cpus=0.5, weight=1, memory_bytes=96 * MIB, pids=16))
    assert not failures
    try:
        jail = Jail(root, block.take(), BASE, Path("/work"))
        hog = "import os; os.write(1, b'begun'); x = bytearray(512 << 20); os.write(1, b'all of it')"
        code, output = run_inside(launcher, jail, "-c", hog, groups=tuple(fds))
        assert (code, output) == (-9, b"begun")
        many = """if True:
            import os, time
            made = 0
            try:
                while made < 100 and os.fork():
                    made += 1
            except OSError:
                os.write(1, b"%d" % made)
            time.sleep(0.2)"""
        _, output = run_inside(launcher, jail, "-c", many, groups=tuple(fds))
        assert int(output) == 15
    finally:
        for fd in fds:
            os.close(fd)
        assert groups.remove(name)
    assert sandbox.sh("echo alive") == "alive\n"


def selftest(api: Api, box: Box) -> dict[str, bool]:
    answer = api.call("POST", f"/v1/sandboxes/{box.id}/selftest")
    probes = answer["probes"]
    assert {one["name"] for one in answer["skipped"]} <= {"network.dns", "network.host6"}, answer["skipped"]
    assert all(isinstance(probe["detail"], str) and probe["detail"] for probe in probes)
    failed = [probe for probe in probes if not probe["held"]]
    assert not failed
    return {probe["name"]: probe["held"] for probe in probes}


def test_every_way_to_a_running_machine_ends_inside_the_wall(family: Api, server: Server) -> None:
    """Create, fork, snapshot, wake, restore, stop and start, adopted by another server: all are jailed, and work."""
    api = family
    box = api.create()
    assert box.refresh()["isolation"]["jailed"] is True
    tried = {"vmm.user", "vmm.namespaces", "vmm.root", "vmm.limits", "guest.devices", "network.host", "network.slot"}
    assert tried <= set(selftest(api, box))
    box.sh("echo kept > /root/kept; sync")
    child = box.fork()
    selftest(api, child)
    selftest(api, box)  # over its new layer
    assert child.sh("cat /root/kept") == "kept\n"
    snapshot = child.snapshot()
    child.sh("rm /root/kept")
    child.restore(snapshot)
    assert child.sh("cat /root/kept") == "kept\n"
    selftest(api, child)
    box.hibernate()
    assert box.id not in walls.groups(server.data)
    box.wake()
    selftest(api, box)
    api.call("POST", f"{box.path}/stop")
    api.call("POST", f"{box.path}/start")
    assert box.sh("cat /root/kept") == "kept\n"
    selftest(api, box)  # of a kernel that was booted


def test_files_are_as_large_as_its_own_disk_and_grow_with_it(server: Server, api: Api) -> None:
    for disk_mb in (4096, 6144):
        box = api.create(disk_mb=disk_mb)
        limits = inspect.hard_limits(server.qemu(box.id).pid)
        fits, given = file_limit_mb(disk_mb) * MIB, limits["Max file size"]
        assert given != "unlimited"
        assert int(given) == fits if may_set_limits() else int(given) >= fits
        assert limits["Max open files"] == str(MOST_FILES)
        box.sh("dd if=/dev/zero of=/root/f bs=1M count=8 conv=fsync; fstrim / || true")


def test_parallel_creates_have_users_of_their_own(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=0, pool_warm=0)
    with ThreadPoolExecutor(20) as pool:
        boxes = list(pool.map(lambda _: server.api.create(), range(20)))
    machines = server.machines()
    users = [uids.uid_of(machines[box.id].pid) for box in boxes]
    assert len(set(users)) == 20
    assert 0 not in users
    assert walls.groups(server.data) == {box.id for box in boxes}
    server.stop(sandboxes=True)
    assert not leaks.left_after_end(server.data)


def test_kill_of_server_launcher_and_machine_leaves_nothing(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=0, pool_warm=0)
    kept, lost = server.api.create(), server.api.create()
    user = uids.uid_of(server.qemu(kept.id).pid)

    (launcher,) = walls.launchers(server.pid)
    os.kill(launcher, 9)
    later = server.api.create()  # a launcher is started again
    assert later.sh("echo later") == "later\n"
    assert walls.launchers(server.pid) != [launcher]

    server.qemu(lost.id).kill()
    assert leaks.settled(lambda: [] if lost.id not in walls.groups(server.data) else ["its groups are there"], 10) == []

    launcher = walls.launchers(server.pid)[0]
    server.kill()
    assert procs.wait_gone([procs.Proc(launcher, procs.start_time(launcher) or 0, "", "")], 5) == []
    server.qemu(later.id).kill()  # while nobody watches
    server.start()
    truth.check(server)
    kept = server.api.attach(kept.id)
    assert kept.refresh()["isolation"]["jailed"] is True
    assert kept.sh("echo still here") == "still here\n"
    assert uids.uid_of(server.qemu(kept.id).pid) == user
    assert walls.groups(server.data) == {kept.id}
    assert user not in {uids.uid_of(server.qemu(server.api.create().id).pid) for _ in range(2)}

    server.stop(sandboxes=True)
    assert not leaks.left_after_end(server.data)


def test_doctor_makes_a_sandbox_and_tries_it(new_server: Callable[..., Server]) -> None:
    server = new_server(start=False)
    done = server.cli_raw("doctor", "--probe", "--json")
    assert done.returncode == 0, done.stdout
    findings = {one["name"]: one["level"] for one in json.loads(done.stdout)["findings"]}
    assert findings["jail"] == "ok"
    assert findings["vmm.root"] == findings["vmm.strangers"] == findings["guest.disks"] == "ok"
    assert not leaks.left_after_end(server.data)


def test_machines_of_a_server_without_jails_run_on_and_say_so(new_server: Callable[..., Server]) -> None:
    server = new_server(pool_launched=0, pool_warm=0, jail="off")
    box = server.api.create()
    assert box.refresh()["isolation"]["jailed"] is False
    assert uids.uid_of(server.qemu(box.id).pid) == 0
    probes = server.api.call("POST", f"{box.path}/selftest")["probes"]
    assert not any(probe["held"] for probe in probes if probe["name"].startswith("vmm."))
    server.kill()
    server.settings["jail"] = "on"
    server.start()
    box = server.api.attach(box.id)
    assert box.refresh()["isolation"]["jailed"] is False
    child = box.fork()
    assert child.refresh()["isolation"]["jailed"] is True
    selftest(server.api, child)
    box.hibernate()
    box.wake()
    assert box.refresh()["isolation"]["jailed"] is True
    selftest(server.api, box)
