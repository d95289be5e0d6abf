"""The unmodified Python client that existing users have, against this server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandastack
import pytest

from kit.server import Server

TEMPLATES = ("code-interpreter", "ubuntu-24.04", "base")


def _client(server: Server, **options: Any) -> pandastack.Client:
    client = pandastack.Client(api_url=server.url, api_key=options.pop("api_key", server.token), **options)
    client.session.trust_env = False
    return client


@pytest.fixture(scope="module")
def client(server: Server) -> pandastack.Client:
    return _client(server)


@pytest.fixture(scope="module")
def box(client: pandastack.Client) -> Iterator[pandastack.Sandbox]:
    with client.sandboxes.create(metadata={"suite": "pandastack"}) as made:
        yield made


# ------------------------------------------------------------------ sandboxes


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_default_template(client: pandastack.Client, template: str) -> None:
    with client.sandboxes.create(template=template) as made:
        assert made.template == template
        assert made.status == "running"
        assert made.cpu >= 1
        assert made.memory_mb >= 128
        assert made.boot_ms is not None
        assert made.exec("echo ok").stdout == "ok\n"


def test_others_are_told_how_to_bake_a_template(server: Server) -> None:
    """These clients name it by themselves, so the base stands in for them; whoever names it on purpose is told."""
    answer = server.api.request("POST", "/v1/sandboxes", json={"template": "code-interpreter"})
    assert answer.status_code == 404
    assert "cloche-server template bake code-interpreter" in answer.json()["error"]


def test_get_list_refresh_and_metadata(client: pandastack.Client, box: pandastack.Sandbox) -> None:
    assert box.metadata == {"suite": "pandastack"}
    assert client.sandboxes.get(box.id).metadata == {"suite": "pandastack"}
    assert box.id in {found.id for found in client.sandboxes.list()}
    assert box.refresh().status == "running"


def test_secret_metadata_does_not_come_back(client: pandastack.Client) -> None:
    with client.sandboxes.create(metadata={"a": "b", "secret.key": "hidden"}) as made:
        assert made.metadata == {"a": "b"}
        assert client.sandboxes.get(made.id).metadata == {"a": "b"}


def test_ttl_and_lifecycle(client: pandastack.Client) -> None:
    with client.sandboxes.create(ttl_seconds=120) as made:
        assert made.lifecycle()["ttl_seconds"] == 120
        told = made.set_ttl(600)
        assert (told["ttl_seconds"], told["persistent"]) == (600, False)
        assert isinstance(told["idle_seconds"], int)
        assert made.set_persistent(True)["persistent"] is True
        assert client.sandboxes.get(made.id).persistent is True
        made.set_persistent(False)


def test_a_negative_ttl(client: pandastack.Client) -> None:
    with pytest.raises(pandastack.BadRequestError, match="ttl_seconds"):
        client.sandboxes.create(ttl_seconds=-1)


def test_the_ttl_ends_a_sandbox(client: pandastack.Client) -> None:
    made = client.sandboxes.create(ttl_seconds=2)
    deadline = time.monotonic() + 30
    with pytest.raises(pandastack.NotFoundError, match="not found"):
        while time.monotonic() < deadline:
            client.sandboxes.get(made.id)
            time.sleep(0.3)


def test_double_delete(client: pandastack.Client) -> None:
    made = client.sandboxes.create()
    made.kill()
    with pytest.raises(pandastack.NotFoundError, match="not found"):
        made.kill()
    with pytest.raises(pandastack.NotFoundError, match="not found"):
        made.exec("true")


def test_the_size_that_deprecated_fields_ask_for_is_ignored_by_the_client(client: pandastack.Client) -> None:
    with pytest.warns(DeprecationWarning, match="cpu/memory_mb"):
        made = client.sandboxes.create(cpu=1, memory_mb=256)
    made.kill()


# ------------------------------------------------------------------ exec


def test_exec(box: pandastack.Sandbox) -> None:
    found = box.exec("echo out; echo err >&2; printf 'ü\\342\\200\\250z'")
    assert (found.stdout, found.stderr, found.exit_code) == ("out\nü\u2028z", "err\n", 0)
    assert box.commands.run("pwd").exit_code == 0
    assert box.exec("true").stdout == ""


def test_a_failure_is_no_exception_unless_asked_for(box: pandastack.Sandbox) -> None:
    assert box.exec("exit 7").exit_code == 7
    assert box.exec("kill -9 $$").exit_code == 137
    with pytest.raises(pandastack.CommandFailed) as told:
        box.exec("echo why >&2; exit 3", check=True)
    assert (told.value.exit_code, told.value.stderr) == (3, "why\n")


def test_a_timeout_kills_the_tree(box: pandastack.Sandbox) -> None:
    began = time.monotonic()
    with pytest.raises(pandastack.SandboxTimeout):
        box.exec("setsid sh -c 'echo $$ > /tmp/deep; exec sleep 300' & sleep 300", timeout_seconds=1)
    assert time.monotonic() - began < 20
    assert box.exec("kill -0 $(cat /tmp/deep)").exit_code != 0


@pytest.mark.slow
def test_a_command_that_outlasts_the_patience_of_the_client(server: Server) -> None:
    """White space begins after `LATE_SECONDS`; the client here gives up after 27 s without a byte."""
    impatient = _client(server, timeout=27.0)
    with impatient.sandboxes.create() as made:
        began = time.monotonic()
        found = made.exec("sleep 31; echo done; exit 4")
        assert time.monotonic() - began > 30
        assert (found.stdout, found.exit_code) == ("done\n", 4)


def test_stream(box: pandastack.Sandbox) -> None:
    out: list[str] = []
    err: list[str] = []
    code = box.exec_stream(
        "echo a; sleep 0.3; printf 'Å\\302\\205\\342\\200\\250'; echo b >&2; exit 5", out.append, err.append
    )
    assert ("".join(out), "".join(err), code) == ("a\nÅ\x85\u2028", "b\n", 5)
    assert len(out) > 1, "the second part comes after a pause, as an event of its own"


def test_a_stream_is_not_held_back(box: pandastack.Sandbox) -> None:
    at: list[float] = []
    box.exec_stream("echo one; sleep 2; echo two", lambda _: at.append(time.monotonic()))
    assert at[-1] - at[0] > 1


def test_a_timeout_of_a_stream(box: pandastack.Sandbox) -> None:
    out: list[str] = []
    with pytest.raises(pandastack.SandboxTimeout):
        box.exec_stream("echo partial; sleep 60", out.append, timeout_seconds=1)
    assert "".join(out) == "partial\n"


def test_a_stream_whose_sandbox_goes_away(client: pandastack.Client) -> None:
    made = client.sandboxes.create()
    out: list[str] = []

    def delete(chunk: str) -> None:
        out.append(chunk)
        made.kill()

    with pytest.raises(pandastack.ServerError, match="went away"):
        made.exec_stream("echo begun; sleep 60", delete)
    assert out == ["begun\n"]


def test_run_code(box: pandastack.Sandbox) -> None:
    assert box.run_code('echo "it\'s $((6*7))"', language="bash").stdout == "it's 42\n"
    if box.exec("command -v python3").exit_code == 0:
        assert box.run_code("print('it is', 6*7)").stdout == "it is 42\n"
    else:
        assert box.run_code("print(1)").exit_code == 127, "the template has no Python, and says so"


# ------------------------------------------------------------------ files


def test_files(box: pandastack.Sandbox, tmp_path: Path) -> None:
    fs = box.filesystem
    data = bytes(range(256)) * 100
    assert fs.write("/tmp/p/a b+c%/ü.bin", data)["bytes"] == len(data)
    assert fs.read("/tmp/p/a b+c%/ü.bin") == data
    fs.write("/tmp/p/text", "grüße\n")
    assert fs.read("/tmp/p/text").decode() == "grüße\n"
    fs.write("/tmp/p/empty", b"")
    assert fs.read("/tmp/p/empty") == b""
    found = fs.stat("/tmp/p/text")
    assert (found.name, found.path, found.is_dir, found.size) == ("text", "/tmp/p/text", False, 8)
    assert abs(found.mtime - time.time()) < 120
    assert fs.exists("/tmp/p/text")
    assert not fs.exists("/tmp/p/nope")
    local = tmp_path / "local"
    local.write_bytes(data)
    fs.upload(local, "/tmp/p/up")
    fs.download("/tmp/p/up", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data


def test_directories(box: pandastack.Sandbox) -> None:
    box.exec("mkdir -p /tmp/w/d/e; touch /tmp/w/d/e/f; ln -s /tmp/w /tmp/w/loop")
    entries = {entry.name: entry for entry in box.filesystem.listdir("/tmp/w")}
    assert set(entries) == {"d", "loop"}
    assert entries["d"].is_dir
    assert entries["d"].path == "/tmp/w/d"
    assert not entries["loop"].is_dir
    walked = [(path, [f.name for f in files]) for path, _, files in box.filesystem.walk("/tmp/w")]
    assert walked == [("/tmp/w", ["loop"]), ("/tmp/w/d", []), ("/tmp/w/d/e", ["f"])]


def test_errors_of_files(box: pandastack.Sandbox) -> None:
    for call in (box.filesystem.read, box.filesystem.stat, box.filesystem.listdir):
        with pytest.raises(pandastack.NotFoundError):
            call("/nope")
    with pytest.raises(pandastack.BadRequestError):
        box.filesystem.read("/etc")
    with pytest.raises(pandastack.BadRequestError):
        box.filesystem.read("relative")


# ------------------------------------------------------------------ logs


def test_logs(box: pandastack.Sandbox) -> None:
    box.exec("echo 'first ü' > /dev/console; echo '  second' > /dev/console")
    deadline = time.monotonic() + 10
    while (lines := list(box.logs()))[-2:] != ["first ü", "  second"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert lines[-2:] == ["first ü", "  second"]


def test_logs_follow(client: pandastack.Client) -> None:
    with client.sandboxes.create() as made:
        lines = made.logs(follow=True)
        made.exec("echo '  one' > /dev/console")
        assert next(lines) == "  one"
        made.exec("echo two > /dev/console; echo three > /dev/console")
        assert [next(lines), next(lines)] == ["two", "three"]
        made.kill()
        assert list(lines) == []
        made.persistent = True  # nothing left to delete


# ------------------------------------------------------------------ templates, identity, what is not there


def test_templates(client: pandastack.Client) -> None:
    listed = client.templates.list()
    assert "base" in {template.name for template in listed}
    for name in ("ubuntu-24.04", "base"):
        assert client.templates.get(name).name == "base"
    with pytest.raises(pandastack.NotFoundError):
        client.templates.get("code-interpreter")  # which is a template of its own, and not baked here
    with pytest.raises(pandastack.NotFoundError):
        client.templates.get("nope")
    with pytest.raises(pandastack.NotFoundError, match="template nope not found"):
        client.sandboxes.create(template="nope")


def test_identity(client: pandastack.Client) -> None:
    assert client.me()["auth_method"] == "token"


def test_a_wrong_token(server: Server) -> None:
    for key in ("pds_" + "0" * 32, "psk_old", "x"):
        with pytest.raises(pandastack.AuthError):
            _client(server, api_key=key).sandboxes.list()
    with pytest.raises(pandastack.AuthError):
        _client(server, api_key="x").sandboxes.create()


def test_what_is_not_there_says_so(client: pandastack.Client) -> None:
    calls = (
        client.templates.builds,
        lambda: client.sandboxes.create(volumes=[{"name": "v"}]),
    )
    for call in calls:
        with pytest.raises(pandastack.ServerError, match="not available in this release"):
            call()


# ------------------------------------------------------------------ forks, snapshots, sleep


def test_fork(client: pandastack.Client) -> None:
    with client.sandboxes.create(metadata={"a": "b"}) as parent:
        parent.exec("echo disk > /root/f; echo memory > /dev/shm/m")
        with parent.fork(metadata={"c": "d"}) as child:
            assert child.id != parent.id
            assert child.status == "running"
            assert {"a": "b", "c": "d", "fork_parent_id": parent.id}.items() <= child.metadata.items()
            assert child.exec("cat /root/f /dev/shm/m").stdout == "disk\nmemory\n"
            child.exec("echo child > /root/f")
            assert parent.exec("cat /root/f").stdout == "disk\n"


def test_fork_tree_and_promote(client: pandastack.Client) -> None:
    with client.sandboxes.create() as parent:
        parent.exec("echo disk > /root/f")
        children = parent.fork_tree(3)
        try:
            assert len({child.id for child in children}) == 3
            assert [child.exec("cat /root/f").stdout for child in children] == ["disk\n"] * 3
            told = children[0].promote(cleanup_siblings=True)
            assert told["winner"] == children[0].id
            assert set(told["deleted"]) == {child.id for child in children[1:]}
            assert told["failures"] == {}
            left = {found.id for found in client.sandboxes.list()}
            assert left >= {parent.id, children[0].id}
            assert not left & set(told["deleted"])
        finally:
            for child in children:
                with contextlib.suppress(pandastack.NotFoundError):
                    child.kill()


def test_explore(client: pandastack.Client) -> None:
    """The best of several attempts is kept, the others are gone, and the parent is as it was."""
    with client.sandboxes.create() as parent:
        found = parent.explore(
            ["echo 3 > /root/result", "echo 9 > /root/result", "exit 1"],
            score_fn=lambda made, _: float(made.exec("cat /root/result").stdout or 0),
        )
        assert found.errors == []
        assert found.reap_failures == {}
        assert found.winner is not None
        with found.winner as winner:
            assert winner.exec("cat /root/result").stdout == "9\n"
            assert len(found.reaped) == 2
            assert parent.exec("ls /root/result").exit_code != 0
            assert not set(found.reaped) & {one.id for one in client.sandboxes.list()}


def test_snapshots(client: pandastack.Client) -> None:
    with client.sandboxes.create() as made:
        made.exec("echo disk > /root/f; echo memory > /dev/shm/m")
        snapshot = made.snapshot()
    listed = {found["id"]: found for found in client.snapshots.list()}
    assert listed[snapshot]["sandbox_id"] == made.id
    assert [found["id"] for found in client.snapshots.list(sandbox_id=made.id)] == [snapshot]
    assert client.snapshots.get(snapshot) == listed[snapshot]
    assert {"id", "sandbox_id", "template", "size_bytes", "created_at"} <= set(listed[snapshot])
    with client.sandboxes.create(from_snapshot=snapshot) as again:
        assert again.exec("cat /root/f /dev/shm/m").stdout == "disk\nmemory\n"
        client.snapshots.delete(snapshot)
        assert again.exec("cat /root/f").stdout == "disk\n"
    with pytest.raises(pandastack.NotFoundError):
        client.snapshots.get(snapshot)
    with pytest.raises(pandastack.NotFoundError):
        client.sandboxes.create(from_snapshot=snapshot)


def test_pause_and_hibernate(client: pandastack.Client) -> None:
    with client.sandboxes.create() as made:
        made.exec("echo memory > /dev/shm/m")
        made.pause()
        assert made.refresh().status == "paused"
        made.resume()
        assert made.exec("cat /dev/shm/m").stdout == "memory\n"
        made.hibernate()
        assert made.refresh().status == "hibernated"
        assert made.exec("cat /dev/shm/m").stdout == "memory\n", "a command wakes it"
        made.hibernate()
        made.wake()
        assert made.refresh().status == "running"
        assert made.filesystem.read("/dev/shm/m") == b"memory\n"


# ------------------------------------------------------------------ capacity


def test_capacity_is_waited_for(new_server: Any) -> None:
    full = new_server(max_sandboxes=1, pool_warm=0, pool_launched=0)
    events: list[pandastack.CreateRetryEvent] = []
    client = _client(full, max_create_retry_seconds=60, on_create_retry=events.append)
    first = client.sandboxes.create()

    refused = _client(full, max_create_retry_seconds=0)
    with pytest.raises(pandastack.ServerError, match="no capacity"):
        refused.sandboxes.create()
    assert len(client.sandboxes.list()) == 1, "what was refused does not exist"

    def free(event: pandastack.CreateRetryEvent) -> None:
        events.append(event)
        if len(events) == 1:
            first.kill()

    client.on_create_retry = free
    with client.sandboxes.create() as second:
        assert second.exec("echo room").stdout == "room\n"
    assert events
    assert (events[0].status_code, events[0].retry_after_seconds) == (503, 5.0)
