"""Against a real server: set CLOCHE_API_URL and CLOCHE_API_KEY. Skipped, and said so, without them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import (
    AsyncSandbox,
    AuthError,
    CommandTimeout,
    Exit,
    FileNotFound,
    InvalidRequestError,
    InvalidStateError,
    IsADirectory,
    NameTaken,
    NotADirectory,
    Sandbox,
    SandboxNotFound,
    Snapshot,
    SnapshotNotFound,
    Stderr,
    Stdout,
    TemplateNotFound,
    WaitTimeout,
)

pytestmark = pytest.mark.skipif(
    not (os.environ.get("CLOCHE_API_URL") and os.environ.get("CLOCHE_API_KEY")),
    reason="NO LIVE SERVER: set CLOCHE_API_URL and CLOCHE_API_KEY to test against one",
)

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S)
BIG = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create(ttl_seconds=900, metadata={"made-by": "sdk-tests"}) as made:
        yield made


def test_life() -> None:
    with Sandbox.create(metadata={"live": "a b&c"}, ttl_seconds=300, env={"FROM_CREATE": "é"}, cwd="/tmp") as made:
        assert made.status == "running"
        assert made.template == "base"
        assert made.isolation.boundary == "microvm"
        assert [found.id for found in Sandbox.list(metadata={"live": "a b&c"})] == [made.id]
        assert Sandbox.connect(made.id).info.created_at == made.info.created_at
        assert made.set_ttl(600).ttl_seconds == 600
        assert made.set_metadata({"live": None, "x": "y"}).metadata == {"x": "y"}
        assert made.exec("echo $FROM_CREATE; pwd").stdout == "é\n/tmp\n"
        assert made.load().memory_limit_bytes > 2**26
        assert made.usage().wall_seconds["running"] > 0
        assert made.logs(tail=5) is not None
    made.kill()
    with pytest.raises(SandboxNotFound):
        made.refresh()


def test_same_idempotency_key_same_sandbox() -> None:
    key = os.urandom(8).hex()
    with Sandbox.create(idempotency_key=key, ttl_seconds=60) as made:
        assert Sandbox.create(idempotency_key=key, ttl_seconds=60).id == made.id


def test_refusals() -> None:
    with pytest.raises(AuthError) as caught:
        Sandbox.create(api_key="pds_" + "0" * 32)
    assert "token" in caught.value.message
    with pytest.raises(TemplateNotFound):
        Sandbox.create("no-such-template")


def test_exec(sandbox: Sandbox) -> None:
    result = sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    words = ["a b", "$HOME", "x'y", "", "*", "line1\nline2", "é\u2028"]
    assert sandbox.exec(["printf", "%s|", *words]).stdout == "".join(f"{word}|" for word in words)
    assert sandbox.exec("cat", stdin="日本").stdout == "日本"
    assert sandbox.exec_bytes("cat", stdin=bytes(range(256))).stdout == bytes(range(256))
    assert sandbox.exec("cat; echo end").stdout == "end\n"
    killed = sandbox.exec("kill -9 $$")
    assert (killed.exit_code, killed.termination.reason, killed.termination.signal) == (137, "signaled", "SIGKILL")
    assert sandbox.exec("no-such-program").exit_code == 127
    assert sandbox.exec("pwd; echo $A", cwd="/usr", env={"A": "1 2"}).stdout == "/usr\n1 2\n"
    with pytest.raises(InvalidRequestError):
        sandbox.exec("true", cwd="/no/such")
    with pytest.raises(InvalidRequestError):
        sandbox.exec("true", user="nobody-of-that-name")


def test_large_output(sandbox: Sandbox) -> None:
    text = sandbox.exec("yes ☕ | head -n 100000 | tr -d '\\n'").stdout
    assert text == "☕" * 100_000
    cut = sandbox.exec("head -c 3000000 /dev/zero | tr '\\0' x", max_output_bytes=100_000)
    assert cut.truncated
    assert cut.stdout_dropped_bytes == 2_900_000
    seen: list[str] = []
    followed = sandbox.exec("head -c 3000000 /dev/zero | tr '\\0' x", max_output_bytes=100_000, on_stdout=seen.append)
    assert (followed.truncated, followed.stdout_dropped_bytes) == (True, 2_900_000)
    assert followed.stdout == cut.stdout


@pytest.mark.parametrize("follow", [False, True])
def test_timeout(sandbox: Sandbox, follow: bool) -> None:
    callback = print if follow else None
    with pytest.raises(CommandTimeout) as caught:
        sandbox.exec("echo so far; sleep 60", timeout=1, on_stdout=callback)
    assert caught.value.timeout_seconds == 1
    if not follow:
        assert caught.value.stdout == "so far\n"


@pytest.mark.slow
def test_timeout_told_late(sandbox: Sandbox) -> None:
    with pytest.raises(CommandTimeout) as caught:
        sandbox.exec("echo so far; sleep 60", timeout=18)
    assert caught.value.stdout == "so far\n"


def test_stream(sandbox: Sandbox) -> None:
    script = 'for c in 346 227 245 303 251; do printf "\\\\$c"; sleep 0.05; done; echo e >&2; exit 7'
    events = list(sandbox.exec_stream(script))
    assert "".join(event.data for event in events if isinstance(event, Stdout)) == "日é"
    assert "".join(event.data for event in events if isinstance(event, Stderr)) == "e\n"
    assert isinstance(events[-1], Exit)
    assert events[-1].exit_code == 7
    with sandbox.exec_stream("echo first; sleep 100") as stream:
        assert next(stream) == Stdout("first\n", 6)
    assert sandbox.exec("echo after").ok


def test_background(sandbox: Sandbox) -> None:
    job = sandbox.start("for i in $(seq 20); do echo $i; sleep 0.1; done; exit 4")
    assert job.pid
    with pytest.raises(WaitTimeout):
        job.wait(timeout=0.2)
    first = job.stream()
    for _ in range(3):
        last = next(first)
        assert isinstance(last, Stdout)
    first.close()
    rest = list(sandbox.attach(job.exec_id).stream(from_offset=last.offset or 0))
    lines = "".join(event.data for event in rest if isinstance(event, Stdout)).split()
    assert lines[-1] == "20"
    assert lines[0] == str(21 - len(lines))
    assert job.wait().exit_code == 4
    assert job.result().stdout.split() == [str(number) for number in range(1, 21)]
    assert job.exec_id in [info.exec_id for info in sandbox.execs()]
    endless = sandbox.start(["sleep", "1000"])
    endless.kill()
    assert endless.wait(timeout=10).exit_code != 0


def test_a_character_around_the_offset_one_resumes_from(sandbox: Sandbox) -> None:
    job = sandbox.start("printf 'a\\346'; sleep 0.5; printf '\\227\\245b'")
    assert "".join(event.data for event in job.stream() if isinstance(event, Stdout)) == "a日b"
    assert "".join(event.data for event in job.stream(1) if isinstance(event, Stdout)) == "日b"
    assert job.result().stdout == "a日b"
    assert job.result_bytes().stdout == "a日b".encode()


def test_files(sandbox: Sandbox) -> None:
    files = sandbox.files
    base = "/tmp/names"
    files.mkdir(base)
    names = ["a b", "🤣.txt", "é", "e\u0301", "50%2Foff", "q?x=1&y#z", "a+b", "'\"", "-rf", "line\nbreak", "\\", "$(x)"]
    for name in names:
        files.write(f"{base}/{name}", name)
        assert files.read_text(f"{base}/{name}") == name
    files.write(f"{base}/".encode() + b"bad\xff", b"raw")
    listed = files.list(base)
    assert {entry.name for entry in listed} == {*names, "bad\udcff"}
    assert all(files.exists(entry.path) for entry in listed)
    assert [entry.name for entry in files.iter_dir(base, page_size=2)] == [entry.name for entry in listed]
    moved = files.move(f"{base}/é", f"{base}/moved é")
    assert (moved.name, files.read_text(moved.path)) == ("moved é", "é")
    files.write(f"{base}/x", "1", mode=0o750)
    files.write(f"{base}/x", "2", append=True)
    assert (files.read(f"{base}/x"), files.stat(f"{base}/x").mode) == (b"12", 0o750)
    for kind, call in (
        (FileNotFound, lambda: files.read("/nope")),
        (FileNotFound, lambda: files.list("/nope")),
        (FileNotFound, lambda: files.remove("/nope")),
        (IsADirectory, lambda: files.read("/tmp")),
        (NotADirectory, lambda: files.list(f"{base}/x")),
    ):
        with pytest.raises(kind):
            call()
    files.remove(base, recursive=True)
    assert not files.exists(base)


def test_large_files_in_flat_memory(sandbox: Sandbox, tmp_path: Path) -> None:
    local, back = tmp_path / "local", tmp_path / "back"
    block = os.urandom(1024 * 1024)
    with local.open("wb") as file:
        for _ in range(BIG // len(block)):
            file.write(block)
    tracemalloc.start()
    try:
        assert sandbox.files.upload(local, "/tmp/big").bytes == BIG
        assert sandbox.files.download("/tmp/big", back) == BIG
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expected = hashlib.sha256(local.read_bytes()).hexdigest()
    assert hashlib.sha256(back.read_bytes()).hexdigest() == expected
    assert sandbox.exec("sha256sum < /tmp/big").stdout.split()[0] == expected
    sandbox.files.remove("/tmp/big")
    assert peak < 6 * 1024 * 1024


async def test_asynchronous() -> None:
    async with await AsyncSandbox.create(ttl_seconds=120) as made:
        results = await asyncio.gather(*(made.exec(f"echo {number}") for number in range(10)))
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(10)]
        assert [type(event) async for event in made.exec_stream("echo x")] == [Stdout, Exit]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await made.exec("sleep 77; touch /tmp/late")
        await asyncio.sleep(0.5)
        assert (await made.exec("ps -ef | grep -c '[s]leep 77'")).stdout == "0\n"
    with pytest.raises(SandboxNotFound):
        await made.refresh()


def test_names() -> None:
    name = f"sdk-{os.urandom(6).hex()}"
    with Sandbox.create(name=name, ttl_seconds=120, idle_seconds=600, idle_action="pause") as made:
        assert (made.name, made.info.idle_seconds, made.info.idle_action) == (name, 600, "pause")
        with pytest.raises(NameTaken) as caught:
            Sandbox.create(name=name)
        assert caught.value.sandbox_id == made.id
        assert Sandbox.create(name=name, if_exists="connect").id == made.id
        assert [found.id for found in Sandbox.list(name=name)] == [made.id]
        with Sandbox.create(name=name, if_exists="replace", ttl_seconds=120) as second:
            assert second.id != made.id
            with pytest.raises(SandboxNotFound):
                made.refresh()
            assert second.set_idle(300).info.idle_seconds == 300


def test_sleep(sandbox: Sandbox) -> None:
    sandbox.exec("echo kept > /dev/shm/memory").check()
    assert (sandbox.pause().status, sandbox.info.status_reason) == ("paused", "asked")
    with pytest.raises(InvalidStateError):
        sandbox.exec("true")
    with pytest.raises(WaitTimeout):
        sandbox.wait("running", timeout=0.2)
    assert sandbox.resume().status == "running"
    assert sandbox.hibernate().status == "hibernated"
    assert sandbox.wait(["paused", "hibernated"], timeout=5).status == "hibernated"
    assert sandbox.exec("cat /dev/shm/memory").stdout == "kept\n"
    assert sandbox.wait(timeout=5).status == "running"
    sandbox.hibernate()
    assert sandbox.wake().status == "running"


def test_fork_and_promote(sandbox: Sandbox) -> None:
    sandbox.exec("echo before > /dev/shm/memory; echo before > /root/disk").check()
    job = sandbox.start("sleep 1000")
    children = sandbox.fork(2, ttl_seconds=120, metadata={"of": "sdk-tests"}, env={"CHILD": "yes"})
    try:
        assert (len(children), children.errors, children.parent_id) == (2, {}, sandbox.id)
        assert children.pause_ms > 0
        sandbox.exec("echo after > /root/disk").check()
        winner, other = children
        for child in children:
            assert child.info.fork_tree_id == children.tree_id
            assert (child.info.parent_id, child.metadata["of"]) == (sandbox.id, "sdk-tests")
            assert child.exec("cat /dev/shm/memory /root/disk; echo $CHILD").stdout == "before\nbefore\nyes\n"
            assert child.exec(f"kill -0 {job.pid}").ok
        assert winner.promote(cleanup_siblings=True).deleted == (other.id,)
        with pytest.raises(SandboxNotFound):
            other.refresh()
        with pytest.raises(InvalidRequestError):
            sandbox.promote()
    finally:
        for child in children:
            child.kill()
        job.kill()


def test_snapshots(sandbox: Sandbox) -> None:
    sandbox.exec("echo before > /dev/shm/memory").check()
    snapshot = sandbox.snapshot("sdk-tests")
    try:
        assert (snapshot.name, snapshot.sandbox_id) == ("sdk-tests", sandbox.id)
        assert (snapshot.info.memory, snapshot.info.memory_mb) == (True, sandbox.info.memory_mb)
        sandbox.exec("echo after > /dev/shm/memory").check()
        assert [one.id for one in Snapshot.list(sandbox_id=sandbox.id)] == [snapshot.id]
        assert Snapshot.get(snapshot.id).info == snapshot.info
        with Sandbox.create(from_snapshot=snapshot, ttl_seconds=120, env={"NEW": "yes"}) as made:
            assert made.info.from_snapshot == snapshot.id
            assert made.exec("cat /dev/shm/memory; echo $NEW").stdout == "before\nyes\n"
            snapshot.delete()
            assert made.exec("cat /dev/shm/memory").stdout == "before\n"
        with pytest.raises(SnapshotNotFound):
            Sandbox.create(from_snapshot=snapshot)
    finally:
        snapshot.delete()


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_every_snippet_of_the_readme_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), {"__name__": "__main__"})
