"""Writes keep owner and mode, make parents that belong to the user, and are atomic."""

from __future__ import annotations

import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import pytest

from kit.client import Box
from kit.until import until


@pytest.fixture(scope="module")
def home(shared: Box) -> Box:
    """A sandbox with a user `app` who owns /home/app."""
    shared.sh("useradd -m -u 1234 -s /bin/bash app")
    return shared


def modes(box: Box, *paths: str) -> list[str]:
    return box.sh(f"stat -c '%U:%G %a' {' '.join(paths)}").splitlines()


class TestOwnerAndMode:
    def test_parents_belong_to_the_user(self, home: Box) -> None:
        home.put("/home/app/a/b/c.txt", b"c", user="app")
        assert modes(home, "/home/app/a", "/home/app/a/b", "/home/app/a/b/c.txt") == ["app:app 755"] * 2 + [
            "app:app 644"
        ]
        assert home.exec("touch a/b/d && rm -r a", user="app", cwd="/home/app").code == 0

    def test_a_script_keeps_its_mode_and_owner(self, home: Box) -> None:
        home.put("/home/app/run.sh", b"#!/bin/sh\necho one\n", user="app", mode="0755")
        for content, user in ((b"#!/bin/sh\necho two\n", "app"), (b"#!/bin/sh\necho three\n", "root")):
            home.put("/home/app/run.sh", content, user=user)
            assert modes(home, "/home/app/run.sh") == ["app:app 755"]
        assert home.exec(["/home/app/run.sh"]).stdout == "three\n"

    @pytest.mark.parametrize(("asked", "got"), [("0640", "640"), ("640", "640"), ("755", "755"), ("4755", "4755"),
                                                ("0", "0"), ("1777", "1777"), ("00644", "644")])  # fmt: skip
    def test_the_mode_is_octal_and_exact(self, home: Box, asked: str, got: str) -> None:
        home.rm("/home/app/moded")
        home.put("/home/app/moded", b"x", mode=asked)
        assert modes(home, "/home/app/moded") == [f"root:root {got}"]

    @pytest.mark.parametrize("mode", ["8", "rwx", "0o755", "-1", "77777", "", " 755", "1.5"])
    def test_what_is_no_mode_is_refused(self, home: Box, mode: str) -> None:
        response = home.fs_raw("PUT", "", "/home/app/nomode", b"x", mode=mode)
        assert (response.status_code, response.json()["code"]) == (400, "request.invalid")
        assert home.exec("ls /home/app/nomode").code != 0

    def test_modification_times(self, home: Box) -> None:
        home.put("/home/app/timed", b"x", mtime="1700000000.25")
        stat = home.stat("/home/app/timed")
        assert (stat["mtime"], stat["mtime_ns"]) == (1_700_000_000, 1_700_000_000_250_000_000)
        response = home.fs_raw("GET", "", "/home/app/timed")
        assert response.headers["x-file-mtime-ns"] == "1700000000250000000"
        assert response.headers["x-file-mode"] == "0644"

    def test_rights_are_the_users(self, home: Box) -> None:
        home.sh(
            "echo old > /home/app/readonly; chown app /home/app/readonly; chmod 444 /home/app/readonly; "
            "echo old > /root/roots; chmod 644 /root/roots; mkdir -p -m 777 /tmp/open; echo old > /tmp/open/roots"
        )
        for path in ("/home/app/readonly", "/root/roots", "/root/new", "/etc/new", "/tmp/open/roots"):
            response = home.fs_raw("PUT", "", path, b"evil", user="app")
            assert (response.status_code, response.json()["code"]) == (403, "file.permission_denied"), path
        assert (
            home.sh("cat /home/app/readonly /root/roots /tmp/open/roots; ls /root/new /etc/new 2>/dev/null; true")
            == "old\n" * 3
        )
        home.put("/home/app/readonly", b"root may")
        assert modes(home, "/home/app/readonly") == ["app:root 444"]
        for method, route in (("GET", ""), ("DELETE", "")):
            assert home.fs_raw(method, route, "/etc/shadow", user="app").status_code == 403

    def test_a_link_is_followed_and_kept(self, home: Box) -> None:
        home.sh("cd /home/app && rm -f target link && echo old > target && chmod 751 target && ln -s target link")
        assert home.put("/home/app/link", b"new")["created"] is False
        assert home.sh("cd /home/app && readlink link && cat target && stat -c %a target") == "target\nnew751\n"

    def test_hard_links_and_what_else_has_the_file_open(self, home: Box) -> None:
        """Who has the old file open goes on reading the old one: that is what replacing means."""
        home.sh("cd /tmp && rm -f hl1 hl2 && echo old > hl1 && ln hl1 hl2")
        home.put("/tmp/hl1", b"new")
        assert home.get("/tmp/hl1") == b"new"
        assert home.get("/tmp/hl2") == b"old\n"

    def test_a_running_program_can_be_replaced(self, home: Box) -> None:
        home.sh("cp /bin/sleep /tmp/busy")
        exec_id = home.start(["/tmp/busy", "74"])
        until(lambda: home.exec("pgrep -x busy").code == 0)
        home.put("/tmp/busy", b"#!/bin/sh\necho replaced\n")
        assert home.exec(["/tmp/busy"]).stdout == "replaced\n"
        assert home.exec_info(exec_id)["status"] == "running"
        home.kill(exec_id)

    @pytest.mark.parametrize(
        ("path", "status"),
        [("/tmp", 400), ("/etc/passwd/x", 400), ("/tmp/pipe", 400), ("/dev/null", 400), ("/tmp/", 400), ("/", 400),
         ("/proc/nothing", 0), ("/sys/nothing", 0)],
    )  # fmt: skip
    def test_what_is_no_place_for_a_file(self, home: Box, path: str, status: int) -> None:
        home.sh("rm -f /tmp/pipe; mkfifo /tmp/pipe")
        response = home.fs_raw("PUT", "", path, b"x")
        assert response.status_code == status or (not status and response.status_code in {400, 403, 404, 409, 500})
        assert response.json()["error"]
        assert home.sh("test -c /dev/null && test -p /tmp/pipe && test -d /tmp && echo fine") == "fine\n"


class TestAppend:
    def test_it_adds_in_place(self, home: Box) -> None:
        home.rm("/tmp/log")
        assert home.put("/tmp/log", b"one\n", append="1")["created"] is True
        inode = home.sh("stat -c %i /tmp/log")
        assert home.put("/tmp/log", b"two\n", append="true")["created"] is False
        assert home.get("/tmp/log") == b"one\ntwo\n"
        assert home.sh("stat -c %i /tmp/log") == inode

    def test_appends_at_once_do_not_mix(self, home: Box) -> None:
        home.rm("/tmp/log")
        lines = [f"{n:05}".encode() * 200 + b"\n" for n in range(30)]
        threads = [threading.Thread(target=home.put, args=("/tmp/log", line), kwargs={"append": "1"}) for line in lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(home.get("/tmp/log").splitlines(keepends=True)) == lines

    def test_a_bad_flag_is_refused(self, home: Box) -> None:
        assert home.fs_raw("PUT", "", "/tmp/log", b"x", append="maybe").status_code == 400


class TestAtomicity:
    READER = (
        "import sys, time\nseen = {}\nend = time.time() + 60\n"
        "while time.time() < end:\n"
        " data = open('/tmp/atomic', 'rb').read()\n"
        " kinds = bytes(set(data)).decode()\n"
        " if len(data) != SIZE or len(kinds) != 1: print('torn', len(data), kinds); sys.exit(1)\n"
        " seen[kinds] = seen.get(kinds, 0) + 1\n"
        " if kinds == 'Z': break\n"
        "print(sorted(seen))\n"
    )

    @pytest.mark.slow
    def test_a_reader_sees_the_old_or_the_new(self, home: Box) -> None:
        size = 2_000_000
        home.put("/tmp/atomic", b"A" * size)
        with home.stream(["python3", "-c", self.READER.replace("SIZE", str(size))]) as events:
            for number in range(16):
                home.put("/tmp/atomic", (b"B", b"A")[number % 2] * size)
            home.put("/tmp/atomic", b"Z" * size)
            texts = [event.data for event in events]
        assert texts[-1]["exit_code"] == 0, texts
        assert "'Z'" in texts[-2]["chunk"]

    def test_writers_at_once_leave_one_of_their_files(self, home: Box) -> None:
        contents = [bytes([65 + n]) * 500_000 for n in range(8)]
        threads = [threading.Thread(target=home.put, args=("/tmp/contested", content)) for content in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert home.get("/tmp/contested") in contents
        assert leftovers(home, "/tmp") == ""

    @pytest.mark.parametrize("how", ["reset", "close", "chunked", "half-request"])
    @pytest.mark.parametrize("append", [False, True])
    def test_a_client_that_dies_in_mid_upload(self, home: Box, how: str, append: bool) -> None:
        if append:
            pytest.skip("an append is in place: what came in time is there") if how != "chunked" else None
        home.sh("rm -rf /tmp/up; mkdir /tmp/up; echo old > /tmp/up/f; chmod 600 /tmp/up/f")
        url, more = urlsplit(home.api.url), "&append=1" if append else ""
        sock = socket.create_connection((str(url.hostname), int(url.port or 0)))
        length = "Transfer-Encoding: chunked" if how == "chunked" else "Content-Length: 5000000"
        head = (
            f"PUT {home.path}/fs?path=%2Ftmp%2Fup%2Ff{more} HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {home.api.token}\r\n{length}\r\n\r\n"
        )
        sock.sendall(head.encode())
        if how == "chunked":
            sock.sendall(b"80000\r\n" + b"n" * 0x80000 + b"\r\n" + b"80000\r\n" + b"n" * 1000)
        elif how != "half-request":
            sock.sendall(b"n" * 1_000_000)
        until(lambda: how == "half-request" or leftovers(home, "/tmp/up") or append, 20)
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        until(lambda: leftovers(home, "/tmp/up") == "", 20)
        assert home.sh("ls -A /tmp/up; stat -c %a /tmp/up/f") == "f\n600\n"
        content = home.get("/tmp/up/f")
        assert content == b"old\n" or (append and content.startswith(b"old\n") and set(content[4:]) <= {ord("n")})

    def test_a_sandbox_deleted_in_mid_upload(self, sandbox: Box) -> None:
        def slowly() -> object:
            yield b"x" * 100_000
            sandbox.delete()
            yield b"x" * 100_000
            time.sleep(1)
            yield b"x" * 100_000

        response = sandbox.fs_raw("PUT", "", "/tmp/f", slowly())  # type: ignore[arg-type]
        assert response.status_code in {404, 409, 502}, response.text


def leftovers(box: Box, directory: str) -> str:
    return box.exec(f"ls -A {directory} | grep cloche-tmp").stdout
