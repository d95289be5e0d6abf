"""Jails as the launcher is told of them, the filter of system calls, and programs that are really started."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche_server.host import seccomp
from cloche_server.host.jail import ENVIRONMENT, Bind, Jail, Launcher, Program, Root, request_of
from cloche_server.host.seccomp import jail_filter

ROOT = Root((Bind(Path("/usr/lib"), execute=True), Bind(Path("/dev/null"), device=True)), (("/lib", "usr/lib"),))


def jail(**changes: object) -> Jail:
    values: dict[str, object] = {
        **{"root": ROOT, "uid": 3_000_000_001, "base": Path("/run/cloche/root"), "cwd": Path("/d/s/x")},
        **{"groups": (7,), "trees": (("/mem", 44),), **changes},
    }
    return Jail(**values)  # type: ignore[arg-type]


def test_every_descriptor_is_sent_and_has_its_number() -> None:
    program = Program(("/usr/bin/x", "-y"), {0: 40, 1: 41, 2: 41, 3: 42}, jail(), cgroups=(50, 51), limits={"CORE": 0})
    request, sent = request_of(program, status=60)
    assert request["count"] == len(sent)
    assert {number: sent[index] for number, index in request["fds"].items()} == {"0": 40, "1": 41, "2": 41, "3": 42}
    assert sent[request["status"]] == 60
    assert [sent[index] for index in request["groups"]] == [50, 51]
    assert [(sent[index], name) for index, name in request["jail"]["trees"]] == [(44, "/mem")]
    json.dumps(request)


def test_nothing_of_our_environment_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOCHE_NETWORK_PROXY", "http://user:secret@proxy")
    request, _ = request_of(Program(("/x",), {0: 0}, jail()), 1)
    assert request["env"] == ENVIRONMENT
    assert "secret" not in json.dumps(request)


def test_what_is_bound_is_no_device_and_no_program_unless_it_is_said() -> None:
    request, _ = request_of(Program(("/x",), {0: 0}, jail(root=Root((Bind(Path("/a")), *ROOT.binds)))), 1)
    assert request["jail"]["binds"] == [
        ["/a", "/a", []],
        ["/usr/lib", "/usr/lib", ["exec"]],
        ["/dev/null", "/dev/null", ["dev"]],
    ]
    assert request["jail"]["namespaces"] == ["mnt", "uts", "ipc", "pid", "net"]


def run_filter(number: int, argument: int = 0, arch: int = 0xC000003E, second: int = 0) -> int:
    """What the filter answers: a machine for the few instructions it consists of."""
    code = [struct.unpack_from("=HBBI", jail_filter(), at) for at in range(0, len(jail_filter()), 8)]
    data = struct.pack("=IIQ6Q", number, arch, 0, argument, second, 0, 0, 0, 0)
    at = value = 0
    while True:
        kind, yes, no, word = code[at]
        at += 1
        if kind == 0x06:
            return word
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, word)
        elif kind == 0x15:
            at += yes if value == word else no
        elif kind == 0x35:
            at += yes if value >= word else no
        else:
            assert kind == 0x45
            at += yes if value & word else no


ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


@pytest.mark.thorough
def test_the_filter_refuses_what_is_listed_and_nothing_else() -> None:
    for number in range(470):
        answer = run_filter(number, argument=1)
        if number in seccomp.REFUSED:
            assert answer == ERRNO | 1, number
        elif number in seccomp.ABSENT or number == 435:
            assert answer == ERRNO | 38, number
        else:
            assert answer == ALLOW, number


def test_threads_may_be_made_but_no_namespaces() -> None:
    assert run_filter(56, argument=0x3D0F00) == ALLOW  # what makes a thread
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert run_filter(56, argument=flag | 17) == ERRNO | 1


@pytest.mark.parametrize(("family", "answer"), [(1, ALLOW), (2, ERRNO | 97), (10, ERRNO | 97), (16, ERRNO | 97)])
def test_only_unix_sockets(family: int, answer: int) -> None:
    assert run_filter(41, argument=family) == answer


@pytest.mark.parametrize(
    ("number", "second", "answer"),
    [
        *((72, command, ALLOW) for command in (0, 1, 2, 3, 4, 1030, 1031, 1033)),
        *((72, command, ERRNO | 22) for command in (5, 6, 7, 36, 37, 38, 1024)),
        *((285, mode, ALLOW) for mode in (0, 3, 16)),
        *((285, mode, ERRNO | 95) for mode in (1, 2, 8, 17, 32, 64, 1 << 31)),
        (72, 1 << 32 | 37, ERRNO | 22),
    ],
)
def test_locks_and_room_that_no_limit_counts(number: int, second: int, answer: int) -> None:
    """A lock on a shared file would keep others from starting; room beyond the end of a file is not in its size."""
    assert run_filter(number, second=second) == answer


def test_calls_of_another_architecture_end_the_process() -> None:
    assert run_filter(0, arch=0x40000003) == KILL
    assert run_filter(0x40000000 + 1) == ERRNO | 38


# ------------------------------------------------------------------ without a jail: what needs no privilege


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


def run(launcher: Launcher, *argv: str, cwd: Path | None = None) -> tuple[int, bytes]:
    output = os.memfd_create("output")
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        pid = launcher.start(Program(argv, {0: null, 1: output, 2: output, 5: output}, None, cwd))
        _, status = os.waitpid(pid, 0)  # our own child, though another process has made it
        return os.waitstatus_to_exitcode(status), os.pread(output, 65536, 0)
    finally:
        os.close(output)
        os.close(null)


def test_a_program_is_our_child_with_just_the_descriptors_it_was_given(launcher: Launcher, tmp_path: Path) -> None:
    code, output = run(launcher, "/bin/sh", "-c", "pwd; ls /proc/$$/fd; echo five >&5; exit 3", cwd=tmp_path)
    assert code == 3
    assert output.decode().split() == [str(tmp_path), "0", "1", "2", "5", "five"]


def test_signals_are_what_programs_expect(launcher: Launcher) -> None:
    _, output = run(launcher, "/bin/sh", "-c", "grep SigIgn /proc/self/status; ulimit -c")
    ignored = int(output.split()[1], 16)
    assert not ignored & (1 << 1 | 1 << 12 | 1 << 14), "SIGINT, SIGPIPE and SIGTERM have their meaning"
    assert output.split()[2] == b"0"


def test_a_program_that_is_not_there_is_an_error_and_no_zombie(launcher: Launcher) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="No such file"):
            run(launcher, "/no/such/program")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG) if not launcher.pid else os.waitpid(launcher.pid + 1, os.WNOHANG)


def test_a_launcher_that_died_is_started_again(launcher: Launcher) -> None:
    run(launcher, "/bin/true")
    first = launcher.pid
    os.kill(first, 9)
    assert run(launcher, "/bin/echo", "again") == (0, b"again\n")
    assert launcher.pid != first


def test_more_descriptors_than_one_message_carries(launcher: Launcher) -> None:
    output, null = os.memfd_create("output"), os.open(os.devnull, os.O_RDONLY)
    try:
        fds = {0: null, 1: output, 2: output, **dict.fromkeys(range(3, 450), null)}
        pid = launcher.start(Program(("/bin/sh", "-c", "ls /proc/$$/fd | wc -l"), fds, None))
        os.waitpid(pid, 0)
        assert os.pread(output, 100, 0) == b"450\n"
    finally:
        os.close(output)
        os.close(null)
