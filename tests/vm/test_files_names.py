"""Names of every kind go round, and one odd entry never breaks a list."""

from __future__ import annotations

import base64
import hashlib

import pytest

from kit.client import ApiError, Box
from kit.until import Watch

NAMES = [
    "a b", " lead", "trail ", "🤣.txt", "\u00e9", "e\u0301", "50%2Foff", "100%", "%00", "q?x=1&y#z", "a+b",
    "a'b", 'a"b',
    "-rf", "--", ".hidden", "..data", "...", "new\nline", "tab\there", "back\\slash", "$(touch pwn)", "`id`", "*", "~",
    "a:b", "a;b", "a|b", "cr\rhere", "\x01\x1b[31m", "\u2028", "\u202etxt.exe", "{x}", "<>", "x" * 255, "é" * 127,
    "日" * 85,
]  # fmt: skip


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


class TestRoundTrip:
    @pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
    def test_write_list_stat_read_move_delete(self, shared: Box, name: str) -> None:
        shared.rm("/tmp/names")
        shared.mkdir("/tmp/names")
        path, content = f"/tmp/names/{name}", name.encode() * 3
        answer = shared.put(path, content)
        assert answer.pop("etag").startswith('"')
        assert answer == {"path": path, "bytes": len(content), "created": True}
        entries = shared.ls("/tmp/names")["entries"]
        assert [e["name"] for e in entries] == [name]
        assert entries[0]["path"] == path
        assert "name_b64" not in entries[0]
        stat = shared.stat(path)
        assert (stat["name"], stat["size"], stat["type"], stat["is_dir"]) == (name, len(content), "file", False)
        assert shared.get(path) == content
        assert shared.get(path.encode()) == content, "path_b64 is the same"
        program = "import os, sys; sys.stdout.buffer.write(os.listdir(b'/tmp/names')[0])"
        assert shared.exec(["python3", "-c", program], encoding="base64").raw_stdout == name.encode()
        moved = shared.move(path, "/tmp/names/plain")
        assert moved["name"] == "plain"
        assert shared.move("/tmp/names/plain", path)["name"] == name
        assert shared.names("/tmp/names") == [name]
        shared.rm(path)
        assert shared.names("/tmp/names") == []

    def test_nothing_ran(self, shared: Box) -> None:
        assert shared.exec("ls pwn /pwn /tmp/pwn /root/pwn /tmp/names/pwn 2>/dev/null").stdout == ""

    @pytest.mark.parametrize("name", ["x" * 256, "é" * 128, "日" * 86])
    def test_too_long_a_name_is_said(self, shared: Box, name: str) -> None:
        for method, route in (("PUT", ""), ("GET", ""), ("GET", "/stat"), ("DELETE", "")):
            response = shared.fs_raw(method, route, f"/tmp/{name}", must_exist="1" if method == "DELETE" else "0")
            assert response.status_code == 400, (method, route, response.text)
            assert response.json()["code"] == "file.name_too_long"
        assert shared.fs_raw("PUT", "", "/tmp" + "/dir" * 1100).json()["code"] == "file.name_too_long"

    def test_the_longest_path(self, shared: Box) -> None:
        path = "/tmp" + ("/" + "d" * 250) * 15
        assert shared.put(path + "/f", b"deep")["created"] is True
        assert shared.get(path + "/f") == b"deep"
        shared.rm("/tmp/" + "d" * 250)

    @pytest.mark.parametrize("path", ["", "relative", "./x", "~/x", "/tmp/a\0b"])
    def test_no_path(self, shared: Box, path: str) -> None:
        for method, route in (("PUT", ""), ("GET", ""), ("GET", "/dir"), ("GET", "/stat"), ("DELETE", "")):
            response = shared.fs_raw(method, route, path)
            assert (response.status_code, response.json()["code"]) == (400, "request.invalid"), (method, route)
        response = shared.api.request("PUT", f"{shared.path}/fs", content=b"x")
        assert response.status_code == 400

    def test_dots_and_slashes_mean_what_they_mean_in_the_kernel(self, shared: Box) -> None:
        shared.put("/tmp/dots/a/f", b"1")
        assert shared.get("/tmp/dots/a/../a/./f") == b"1"
        assert shared.get("//tmp///dots//a/f") == b"1"
        assert shared.get("/../../tmp/dots/a/f") == b"1"
        assert {e["name"] for e in shared.ls("/tmp/dots/a/..")["entries"]} == {"a"}
        shared.put("/tmp/dots/%2e%2e/f", b"2")
        assert shared.names("/tmp/dots") == ["%2e%2e", "a"]

    def test_bytes_that_are_not_text(self, shared: Box) -> None:
        raw = b"bad\xff\xfename"
        shared.sh("rm -rf /tmp/raw; mkdir /tmp/raw; touch /tmp/raw/good")
        shared.exec(["python3", "-c", f"open(b'/tmp/raw/' + {raw!r}, 'w').write('made inside')"])
        entries = {e["name"]: e for e in shared.ls("/tmp/raw")["entries"]}
        assert len(entries) == 2
        odd = next(entry for name, entry in entries.items() if name != "good")
        assert odd["name"].replace("\ufffd", "") == "badname"
        assert odd["name_b64"] == b64(raw)
        path = b"/tmp/raw/" + raw
        assert shared.get(path) == b"made inside"
        assert shared.stat(path)["name_b64"] == b64(raw)
        shared.put(path, b"from outside")
        assert shared.get(path) == b"from outside"
        shared.put(b"/tmp/raw/\x80new", b"n")
        assert {e.get("name_b64") for e in shared.ls("/tmp/raw")["entries"]} == {None, b64(raw), b64(b"\x80new")}
        shared.rm(path)
        shared.rm(b"/tmp/raw/\x80new")
        assert shared.names("/tmp/raw") == ["good"]
        bad = shared.api.request("GET", f"{shared.path}/fs", params={"path_b64": "!!!"})
        assert bad.status_code == 400


class TestListing:
    def test_odd_entries_are_all_there(self, shared: Box) -> None:
        shared.sh(
            "rm -rf /tmp/odd; mkdir /tmp/odd; cd /tmp/odd; ln -s /no/where broken; ln -s self self; mkfifo fifo; "
            "touch alien; chown 54321:54322 alien; mkdir dir; mkdir -m 0 closed; "
            "touch -d @0 old; touch -d '2200-01-01' future; "
            "mknod null c 1 3; mknod blk b 254 99; ln -s dir todir; "
            "truncate -s 5G huge; chmod 4755 old; ln -s $'\\xff\\xfe' badtarget; "
            "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\""
        )
        entries = {e["name"]: e for e in shared.ls("/tmp/odd")["entries"]}
        types = {name: entry["type"] for name, entry in entries.items()}
        assert types == {
            "broken": "symlink", "self": "symlink", "fifo": "fifo", "alien": "file", "dir": "dir", "closed": "dir",
            "old": "file", "future": "file", "null": "char", "blk": "block", "todir": "symlink", "sock": "socket",
            "huge": "file", "badtarget": "symlink",
        }  # fmt: skip
        assert (entries["alien"]["uid"], entries["alien"]["owner"], entries["alien"]["group"]) == (
            54321,
            "54321",
            "54322",
        )
        assert entries["broken"]["target"] == "/no/where"
        assert entries["todir"]["is_dir"] is False
        assert entries["dir"]["is_dir"] is True
        assert entries["huge"]["size"] == 5 << 30
        assert entries["old"]["mtime"] == 0
        assert entries["old"]["mode"] == "4755"
        assert entries["future"]["mtime"] == 7258118400
        assert list(entries) == sorted(entries)
        assert shared.stat("/tmp/odd/broken")["type"] == "symlink"
        assert shared.stat("/tmp/odd/todir", follow="1")["type"] == "dir"
        for name in ("broken", "self"):
            response = shared.fs_raw("GET", "/stat", f"/tmp/odd/{name}", follow="1")
            assert response.status_code in {400, 404}, response.text

    @pytest.mark.parametrize(
        ("name", "codes"),
        [
            ("fifo", {"file.not_a_regular_file"}),
            ("sock", {"file.not_a_regular_file"}),
            ("null", {"file.not_a_regular_file"}),
            ("dir", {"file.is_directory"}),
            ("broken", {"file.not_found"}),
            ("self", {"request.invalid"}),
        ],
    )
    def test_odd_entries_are_not_read(self, shared: Box, name: str, codes: set[str]) -> None:
        watch = Watch()
        response = shared.fs_raw("GET", "", f"/tmp/odd/{name}")
        assert 400 <= response.status_code < 500, response.text
        assert response.json()["code"] in codes
        assert watch.seconds < 15, "a FIFO without a writer must not hang"

    def test_failure_never_looks_like_empty(self, shared: Box) -> None:
        shared.sh("rm -rf /tmp/empty; mkdir /tmp/empty; touch /tmp/a-file; mkdir -p -m 700 /root/private")
        assert shared.ls("/tmp/empty") == {"path": "/tmp/empty", "entries": [], "truncated": False}
        cases = [
            ("/tmp/missing", None, 404, "file.not_found"),
            ("/tmp/a-file", None, 400, "file.not_a_directory"),
            ("/tmp/a-file/below", None, 400, "file.not_a_directory"),
            ("/root/private", "nobody", 403, "file.permission_denied"),
        ]
        for path, user, status, code in cases:
            response = shared.fs_raw("GET", "/dir", path, None, **({"user": user} if user else {}))
            assert (response.status_code, response.json()["code"]) == (status, code), path

    def test_entries_that_come_and_go_meanwhile(self, shared: Box) -> None:
        shared.sh("rm -rf /tmp/churn; mkdir /tmp/churn; cd /tmp/churn; touch stay-1 stay-2")
        program = (
            "import os, itertools\nos.chdir('/tmp/churn')\n"
            "for i in itertools.count():\n open(f'go-{i % 50}', 'w').close()\n"
            " try: os.unlink(f'go-{(i * 7) % 50}')\n except OSError: pass"
        )
        exec_id = shared.start(["python3", "-c", program])
        try:
            for _ in range(25):
                found = shared.ls("/tmp/churn")
                names = [e["name"] for e in found["entries"]]
                assert {"stay-1", "stay-2"} <= set(names)
                assert len(names) == len(set(names))
                assert not found["truncated"]
        finally:
            shared.kill(exec_id)

    @pytest.mark.slow
    def test_20000_files_in_pages(self, shared: Box) -> None:
        """A tenth of the 200 000 of the report: two full pages, and what is beyond the cap is said to be there."""
        program = (
            "import os\nos.makedirs('/tmp/many')\nos.chdir('/tmp/many')\n"
            "for i in range(20000): open(f'f{i:05}-é', 'w').close()"
        )
        assert shared.exec(["python3", "-c", program]).code == 0
        first = shared.ls("/tmp/many")
        assert first["truncated"] is True
        assert len(first["entries"]) == 10_000
        names = [e["name"] for e in first["entries"]]
        cursor = first["next"]
        while cursor:
            page = shared.ls("/tmp/many", after=cursor, limit=3000)
            names += [e["name"] for e in page["entries"]]
            assert page["truncated"] == ("next" in page)
            cursor = page.get("next")
        assert names == [f"f{i:05}-é" for i in range(20000)]
        assert shared.sh("echo quick") == "quick\n"
        watch = Watch()
        shared.rm("/tmp/many")
        assert watch.seconds < 120
        with pytest.raises(ApiError) as caught:
            shared.ls("/tmp/many")
        assert caught.value.code == "file.not_found"

    def test_a_page_may_end_at_a_name_that_is_no_text(self, shared: Box) -> None:
        names = sorted([b"a", b"b\xff", b"b\xff\xfe", b"c\x80", b"d"])
        shared.sh("rm -rf /tmp/rawpages; mkdir /tmp/rawpages")
        shared.exec(["python3", "-c", f"for n in {names!r}: open(b'/tmp/rawpages/' + n, 'w')"])
        seen: list[bytes] = []
        cursor: dict[str, str] = {}
        for _ in range(9):
            page = shared.ls("/tmp/rawpages", limit=1, **cursor)
            entry = page["entries"][0]
            padded = entry["name_b64"] + "=" * (-len(entry["name_b64"]) % 4) if "name_b64" in entry else ""
            seen.append(base64.urlsafe_b64decode(padded) if padded else entry["name"].encode())
            if not page["truncated"]:
                break
            cursor = {"after": page["next"]}
        assert seen == names


class TestDirectoriesAndMoves:
    def test_mkdir(self, shared: Box) -> None:
        shared.rm("/tmp/made")
        entry = shared.mkdir("/tmp/made/deep/er", mode="0750")
        assert (entry["name"], entry["type"], entry["mode"]) == ("er", "dir", "0750")
        assert shared.mkdir("/tmp/made/deep/er")["mode"] == "0750", "again is no error and changes nothing"
        cases = [
            ({"path": "/tmp/made", "parents": False}, "file.exists"),
            ({"path": "/tmp/made/x/y", "parents": False}, "file.not_found"),
            ({"path": "/etc/passwd/x"}, "file.not_a_directory"),
            ({"path": "/etc/passwd"}, "file.exists"),
        ]
        for body, code in cases:
            response = shared.api.request("POST", f"{shared.path}/fs/mkdir", json=body)
            assert response.json()["code"] in {code, "file.not_a_directory"}, (body, response.text)
            assert 400 <= response.status_code < 500

    def test_move(self, shared: Box) -> None:
        shared.rm("/tmp/mv")
        shared.put("/tmp/mv/a", b"a")
        shared.put("/tmp/mv/b", b"b")
        shared.mkdir("/tmp/mv/d")
        response = shared.api.request("POST", f"{shared.path}/fs/move", json={"from": "/tmp/mv/a", "to": "/tmp/mv/b"})
        assert (response.status_code, response.json()["code"]) == (409, "file.exists")
        assert shared.get("/tmp/mv/b") == b"b"
        shared.move("/tmp/mv/a", "/tmp/mv/b", overwrite=True)
        assert shared.get("/tmp/mv/b") == b"a"
        assert shared.names("/tmp/mv") == ["b", "d"]
        missing = shared.api.request("POST", f"{shared.path}/fs/move", json={"from": "/tmp/mv/zz", "to": "/tmp/mv/y"})
        assert missing.status_code == 404
        inside = shared.api.request("POST", f"{shared.path}/fs/move", json={"from": "/tmp/mv", "to": "/tmp/mv/d/x"})
        assert 400 <= inside.status_code < 500, inside.text
        assert shared.names("/tmp/mv") == ["b", "d"]

    def test_move_to_another_file_system(self, shared: Box) -> None:
        """/dev/shm is another one: content, mode, time, owner and links arrive."""
        shared.sh(
            "rm -rf /root/tree /dev/shm/tree; mkdir -p /root/tree/sub; cd /root/tree; "
            "head -c 3000000 /dev/urandom > big; "
            "ln -s big link; chmod 751 sub; touch -d @1000000 big; chown 1:2 big; chmod 4711 big"
        )
        digest = shared.sh("sha256sum < /root/tree/big")
        shared.move("/root/tree", "/dev/shm/tree")
        assert shared.exec("ls /root/tree").code != 0
        assert shared.sh("sha256sum < /dev/shm/tree/big") == digest
        assert (
            shared.sh("cd /dev/shm/tree; stat -c '%a %u:%g %Y' big; readlink link; stat -c %a sub")
            == "4711 1:2 1000000\nbig\n751\n"
        )
        shared.rm("/dev/shm/tree")

    def test_delete(self, shared: Box) -> None:
        shared.put("/tmp/del/a/b/c", b"")
        not_empty = shared.fs_raw("DELETE", "", "/tmp/del", recursive="false")
        assert (not_empty.status_code, not_empty.json()["code"]) == (409, "file.not_empty")
        shared.rm("/tmp/del")
        shared.rm("/tmp/del")
        gone = shared.fs_raw("DELETE", "", "/tmp/del", must_exist="1")
        assert (gone.status_code, gone.json()["code"]) == (404, "file.not_found")
        assert shared.fs_raw("DELETE", "", "/proc/1/status").status_code in {403, 400, 409, 500}
        root = shared.fs_raw("DELETE", "", "/")
        assert 400 <= root.status_code < 500, "the whole file system must not go by a slip"
        assert shared.sh("echo alive") == "alive\n"


def test_files_without_a_size(shared: Box) -> None:
    """The kernel says 0 for these and yields bytes all the same."""
    assert shared.get("/proc/self/status").startswith(b"Name:")
    assert b"MemTotal" in shared.get("/proc/meminfo")
    assert shared.get("/sys/kernel/mm/transparent_hugepage/enabled") or True
    assert hashlib.sha256(shared.get("/etc/passwd")).hexdigest() == shared.sh("sha256sum < /etc/passwd").split()[0]
