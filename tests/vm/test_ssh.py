"""SSH to a real machine: who comes in, a command, a terminal, files, sleep, and what is left when a side dies."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import shlex
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit.client import Api, Box
from kit.free_ports import free_port
from kit.openssh import OpenSsh, run
from kit.server import Server
from kit.sockets import Socket
from kit.until import until


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    server = Server.make(ssh_port=free_port())
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def api(own: Server) -> Iterator[Api]:
    with Api(own.url, own.token) as made:
        yield made


@pytest.fixture(scope="module")
def box(api: Api) -> Box:
    return api.create(name="box", ttl_seconds=600)


@pytest.fixture(scope="module")
def client(own: Server, api: Api, box: Box, tmp_path_factory: pytest.TempPathFactory) -> OpenSsh:
    return OpenSsh.make(api, int(str(own.settings["ssh_port"])), tmp_path_factory.mktemp("ssh"))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _running(box: Box, marker: str) -> bool:
    """Whether a command with this text in its words lives in the sandbox."""
    return box.exec(["pgrep", "-f", f"{marker[:-1]}[{marker[-1]}]"]).code == 0


def test_commands_end_as_they_end(client: OpenSsh, box: Box) -> None:
    done = client.run("id -un; cat; echo err >&2; exit 7", given=b"given")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"root\ngiven", b"err\n")
    for script, code in (("exit 255", 255), ("nosuchprogram", 127), ("/etc/passwd", 126), ("exit 256", 0)):
        assert client.run(f"sh -c {shlex.quote(script)}").returncode == code, script
    # OpenSSH has one code for all signals; that it was one, it says itself.
    killed = client.run("kill -9 $$", flags=["-v"])
    assert killed.returncode == 255
    assert b"exit-signal" in killed.stderr
    assert client.run("head -c 3", given=bytes(5_000_000)).stdout == b"\0\0\0"
    assert client.run("grep -E 'SigBlk|SigIgn' /proc/self/status").stdout.split()[1::2] == [b"0" * 16] * 2
    probe = 'echo "$HOME $USER $LOGNAME $SHELL $PATH $LANG $(umask) $(pwd)"'
    assert client.run(probe).stdout.decode() == box.sh(probe), "the same as for any command"
    by_id = client.run(given=b"echo $((6*7))\n", box=box.id)
    assert (by_id.returncode, by_id.stdout) == (0, b"42\n")


def test_a_sandbox_with_a_user_and_variables_of_its_own(client: OpenSsh, api: Api) -> None:
    """Nothing is said by the client: a command, a shell and a terminal are what any command is."""
    own = api.create(user="daemon", env={"A": "of-the-sandbox"}, cwd="/var", ttl_seconds=600)
    probe = 'echo "$(id) $HOME $USER $A $(umask) $(pwd)"'
    told = own.exec(["/bin/sh", "-c", probe]).stdout
    assert told.startswith("uid=1(daemon)")
    assert told.endswith("of-the-sandbox 0022 /var\n")
    assert client.run(f"/bin/sh -c '{probe}'", box=own.id).stdout.decode() == told
    shown = client.run(f"/bin/sh -c '{probe}; stat -c %U $(tty)'", flags=["-tt"], box=own.id).stdout.decode()
    assert shown.replace("\r", "") == f"{told}daemon\n"
    own.delete()


def test_an_input_that_never_ends_keeps_nobody(client: OpenSsh, tmp_path: Path) -> None:
    """The client ends when its command has, although its own input is still open."""
    os.mkfifo(tmp_path / "never")
    held = os.open(tmp_path / "never", os.O_RDWR)
    try:
        done = subprocess.run(client.command(["echo done; exit 3"]), stdin=held, capture_output=True, timeout=60)
    finally:
        os.close(held)
    assert (done.returncode, done.stdout) == (3, b"done\n")


def test_bytes_are_whole_both_ways(client: OpenSsh, tmp_path: Path) -> None:
    data = os.urandom(16_000_000)
    (tmp_path / "up").write_bytes(data)
    assert client.run("sha256sum", given=data).stdout.split()[0].decode() == _sha(data)
    client.sftp(f"put {tmp_path / 'up'} /tmp/sftp\nget /tmp/sftp {tmp_path / 'down'}\nrename /tmp/sftp /tmp/whole\n")
    assert _sha((tmp_path / "down").read_bytes()) == _sha(data)
    assert client.run("sha256sum < /tmp/whole").stdout.split()[0].decode() == _sha(data)
    assert _sha(client.run("cat /tmp/whole").stdout) == _sha(data)
    data = data[:3_000_000]
    (tmp_path / "up").write_bytes(data)
    for mode in ("-O", "-s"):
        client.scp(mode, "-p", tmp_path / "up", "box@127.0.0.1:/tmp/scp")
        client.scp(mode, "-p", "box@127.0.0.1:/tmp/scp", tmp_path / mode)
        assert (tmp_path / mode).read_bytes() == data
        assert int((tmp_path / mode).stat().st_mtime) == int((tmp_path / "up").stat().st_mtime)


@pytest.mark.skipif(shutil.which("rsync") is None, reason="there is no rsync on this machine")
def test_rsync(client: OpenSsh, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "é 😀").write_bytes(os.urandom(100_000))
    (tree / "link").symlink_to("deep")
    there = " ".join(["ssh", *client.options(), "-p", str(client.port)])
    for source, target in ((f"{tree}/", "box@127.0.0.1:/tmp/r/"), ("box@127.0.0.1:/tmp/r/", f"{tmp_path / 'back'}/")):
        done = run(["rsync", "-a", "--delete", "-e", there, source, target])
        assert done.returncode == 0, done.stderr
    assert run(["diff", "-r", str(tree), str(tmp_path / "back")]).returncode == 0
    assert (tmp_path / "back" / "link").readlink() == Path("deep")


def test_a_terminal_has_the_size_of_the_window_and_its_keys_work(client: OpenSsh) -> None:
    pid, fd = pty.fork()
    if pid == 0:
        words = client.command(["trap 'stty size' WINCH; trap 'exit 130' INT; stty size; while :; do sleep .1; done"])
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.execvp(words[0], [words[0], "-tt", *words[1:]])
    shown = b""

    def shows(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(fd, 4096)

    try:
        shows(b"40 120")
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 132, 0, 0))
        shows(b"50 132")
        os.write(fd, b"\x03")
        _, status = os.waitpid(pid, 0)
        pid = 0
        assert os.waitstatus_to_exitcode(status) == 130
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(fd)


def test_many_sessions_and_many_connections(client: OpenSsh) -> None:
    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(lambda n: client.run(f"echo {n}; exit {n}"), range(16)))
    assert [(one.returncode, one.stdout) for one in done] == [(n, f"{n}\n".encode()) for n in range(16)]


def test_a_client_that_hangs_up_takes_its_command_along(client: OpenSsh, box: Box) -> None:
    # Not before `nohup` has done what it is for.
    script = "(nohup sleep 4711.2 >/dev/null 2>&1 &); until pgrep -fx 'sleep 4711.2'; do sleep 0.1; done >/dev/null; "
    script += "echo up; sleep 4711.1"
    waiting = subprocess.Popen(client.command([script]), stdout=subprocess.PIPE)
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == b"up\n"
    waiting.kill()
    waiting.communicate()
    until(lambda: not _running(box, "sleep 4711.1"))
    assert _running(box, "sleep 4711.2"), "what ignores a hang-up goes on"


def test_sleep_wakes(client: OpenSsh, api: Api, box: Box) -> None:
    api.call("POST", f"/v1/sandboxes/{box.id}/hibernate")
    assert client.run("echo woken").stdout == b"woken\n"


def test_a_server_that_is_killed_leaves_nothing_behind(own: Server, client: OpenSsh, box: Box) -> None:
    waiting = [
        subprocess.Popen(client.command(["echo up; exec sleep 4712.1"], flags), stdout=subprocess.PIPE)
        for flags in ((), ("-R", "4713:127.0.0.1:1"), ("-tt",))
    ]
    for one in waiting:
        assert one.stdout is not None
        assert one.stdout.readline().strip() == b"up"
    # A terminal over a WebSocket, whose shell waits for its client: the agent counts that time, whoever serves.
    shell = Socket(own.url, f"/v1/sandboxes/{box.id}/terminal?linger_seconds=2", own.token)
    shell.type(b"exec sleep 4712.2\n")
    shell.until(b"sleep 4712.2")
    until(lambda: _running(box, "sleep 4712.2"))
    reach = ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/4713"]
    assert box.exec(reach).code == 0
    own.kill()
    for one in waiting:
        assert one.wait(60) == 255
        one.communicate()
    shell.close()
    own.start()
    with Api(own.url, own.token) as again:
        found = again.attach(box.id)
        until(lambda: not _running(found, "sleep 4712.1"))
        until(lambda: not _running(found, "sleep 4712.2"))
        screen = shell.texts[0]["process"]
        assert again.call("GET", f"/v1/sandboxes/{box.id}/processes/{screen}")["termination"]["signal"] == "SIGHUP"
        assert found.exec(reach).code != 0
        assert client.run("echo back").stdout == b"back\n"


def test_a_key_that_is_deleted_ends_what_it_has_opened(own: Server, client: OpenSsh) -> None:
    waiting = subprocess.Popen(client.command(["echo up; sleep 1000"]), stdout=subprocess.PIPE)
    try:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"up\n"
        with Api(own.url, own.token) as again:
            again.call("DELETE", f"/v1/ssh-keys/{client.key_id}")
        until(lambda: waiting.poll() is not None)
    finally:
        waiting.kill()
        waiting.wait()
    assert client.run("true").returncode == 255
