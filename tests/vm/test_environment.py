"""What a command finds around it: user, environment, machine, sizes, names, clock, lifetime."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kit.client import Api, ApiError, Box
from kit.server import Server
from kit.until import Watch, until


@pytest.fixture(scope="module")
def people(shared: Box) -> Box:
    """A sandbox with a user `app` (1234, group `crew` too)."""
    shared.sh("groupadd -g 777 crew && useradd -m -u 1234 -G crew -s /bin/bash app")
    return shared


class TestUser:
    """The same right values on every road."""

    PROBE = 'echo "$(id -u):$(id -g) $(id -G | tr " " ,) $HOME $USER $LOGNAME $(pwd) $(umask) $LANG"'

    @pytest.mark.parametrize(
        ("user", "expected"),
        [
            ("root", "0:0 0 /root root root /root 0022 C.UTF-8"),
            ("app", "1234:1234 1234,777 /home/app app app {cwd} 0022 C.UTF-8"),
            ("1234", "1234:1234 1234,777 /home/app app app {cwd} 0022 C.UTF-8"),
            ("app:crew", "1234:777 777 /home/app app app {cwd} 0022 C.UTF-8"),
            ("1234:777", "1234:777 777 /home/app app app {cwd} 0022 C.UTF-8"),
            ("4242", "4242:0 0 / 4242 4242 {cwd} 0022 C.UTF-8"),
            ("4242:4343", "4242:4343 4343 / 4242 4242 {cwd} 0022 C.UTF-8"),
            ("nobody", "65534:65534 65534 /nonexistent nobody nobody {cwd} 0022 C.UTF-8"),
        ],
    )
    def test_who_one_is(self, people: Box, user: str, expected: str) -> None:
        """The template's own directory is root's home; a test names a directory that everybody may enter."""
        options: dict[str, Any] = {"user": user, "cwd": "/tmp" if user != "root" else "/root"}
        argv = ["/bin/bash", "-c", self.PROBE]
        blocking = people.exec(argv, **options)
        assert blocking.code == 0, blocking.body
        line = blocking.stdout.strip()
        assert line == expected.replace("{cwd}", "/tmp")
        assert people.stream_all(argv, **options).stdout.decode().strip() == line
        exec_id = people.start(argv, **options)
        assert people.follow_all(exec_id).stdout.decode().strip() == line
        if "nobody" not in user:
            assert people.exec(self.PROBE, **options).stdout.strip() == line, "and for a shell string"

    def test_explicit_values_win(self, people: Box) -> None:
        env = {"HOME": "/tmp", "USER": "me", "LANG": "C", "PATH": "/usr/bin:/bin", "TERM": "dumb"}
        shown = people.sh('echo "$HOME $USER $LANG $PATH $TERM"', env=env)
        assert shown == "/tmp me C /usr/bin:/bin dumb\n"

    def test_a_program_is_found_on_the_path_of_the_request(self, people: Box) -> None:
        people.put("/tmp/mybin/hello", b"#!/bin/sh\necho mine\n", mode="755")
        assert people.exec(["hello"], env={"PATH": "/tmp/mybin:/usr/bin:/bin"}).stdout == "mine\n"
        assert people.exec(["hello"]).code == 127

    def test_without_a_directory_it_is_home(self, people: Box) -> None:
        assert people.sh("pwd; cd && pwd", user="app") == "/home/app\n/home/app\n"
        assert people.sh("pwd", user="1234:777") == "/home/app\n"
        assert people.exec(["pwd"], user="nobody").stdout == "/\n", "a home that is not there"
        assert people.exec(["pwd"], user="4242").stdout == "/\n"
        assert people.sh("pwd") == "/root\n"

    def test_rights_are_the_users(self, people: Box) -> None:
        assert people.exec("cat /etc/shadow", user="app", cwd="/tmp").code == 1
        assert people.sh("cd ~ && touch t && ls -l t | cut -d' ' -f3,4", user="app", cwd="/tmp") == "app app\n"
        assert people.exec("echo x > /root/t", user="app", cwd="/tmp").code != 0

    def test_etc_environment_is_read(self, people: Box) -> None:
        people.put("/etc/environment", b"FROM_FILE=yes\nLANG=C.UTF-8\n")
        assert people.sh("echo $FROM_FILE") == "yes\n"
        people.rm("/etc/environment")


class TestSystem:
    def test_the_usual_places(self, shared: Box) -> None:
        text = shared.sh(
            "stat -c '%a %U' /tmp /dev/shm /root; readlink /dev/fd; test -c /dev/pts/ptmx && echo pts; "
            "test -c /dev/null && echo null; test -w /dev/stdout && echo stdout"
        )
        lines = text.splitlines()
        assert lines[:2] == ["1777 root", "1777 root"]
        assert lines[3:] == ["/proc/self/fd", "pts", "null", "stdout"]

    def test_text_of_all_languages_comes_out(self, shared: Box) -> None:
        assert shared.exec("python3 -c 'print(\"é中😀\")' | cat").stdout == "é中😀\n"
        assert (
            shared.exec(["python3", "-c", "import sys; print(sys.stdout.encoding, sys.getfilesystemencoding())"]).stdout
            == "utf-8 utf-8\n"
        )
        assert shared.exec(["sort"], stdin="é\na\n").code == 0

    def test_time_zones(self, shared: Box) -> None:
        assert shared.sh("date +%Z") == "UTC\n"
        assert shared.sh("date +%z", env={"TZ": "IST-5:30"}) == "+0530\n"
        assert shared.sh("date +%z", env={"TZ": "Asia/Kolkata"}) == "+0530\n", "names of zones are known"

    def test_the_loopback_works(self, shared: Box) -> None:
        program = (
            "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
            "c = socket.create_connection(s.getsockname()); a, _ = s.accept(); c.send(b'hi'); print(a.recv(9))\n"
            "s6 = socket.create_server(('::1', 0), family=socket.AF_INET6); print(socket.gethostbyname('localhost'))"
        )
        assert shared.exec(["python3", "-c", program]).stdout == "b'hi'\n127.0.0.1\n"
        assert shared.exec(
            ["python3", "-c", "import socket; print(socket.gethostbyname(socket.gethostname()))"]
        ).stdout.startswith("127.")

    def test_it_sees_its_own_size(self, shared: Box) -> None:
        assert shared.sh("nproc") == "1\n"
        total = int(shared.sh("awk '/MemTotal/ {print $2}' /proc/meminfo"))
        assert 190_000 < total < 262_144


class TestDefaults:
    """`env`, `cwd` and `user` of create are in every command, and a request overrides them."""

    def test_they_are_laid_under_the_request(self, create: Callable[..., Box]) -> None:
        box = create(env={"A": "one", "B": "two words", "HOMEISH": "$HOME"}, cwd="/var", user="nobody")
        assert box.info["env_keys"] == sorted({"A", "B", "HOMEISH", "LANG"})
        assert box.sh('echo "$A|$B|$HOMEISH"; pwd; id -un', user="root") == "one|two words|$HOME\n/var\nroot\n"
        assert box.exec(["id", "-un"]).stdout == "nobody\n"
        assert box.exec(["/bin/sh", "-c", "echo $A $C"], env={"A": "1", "C": "3"}, cwd="/").stdout == "1 3\n"
        assert box.stream_all(["/bin/sh", "-c", "echo $A; pwd"]).stdout == b"one\n/var\n"
        exec_id = box.start(["/bin/sh", "-c", "echo $B; pwd"])
        assert box.follow_all(exec_id).stdout == b"two words\n/var\n"
        box.put("/tmp/by-default", b"")
        assert box.stat("/tmp/by-default")["owner"] == "nobody"
        assert box.exec(["id", "-un"], user="").stdout == "nobody\n", "an empty name is no way to become root"

    @pytest.mark.parametrize(
        "body",
        [{"cwd": "relative"}, {"env": {"A": 1}}, {"env": ["A=1"]}, {"ttl_seconds": -1}, {"cpus": 0}, {"memory_mb": 64},
         {"metadata": {"a": 1}}, {"disk_mb": 1}, {"cpus": 1000}, {"memory_mb": 10_000_000}, {"ttl_seconds": 1.5}],
    )  # fmt: skip
    def test_bad_requests_make_nothing(self, api: Api, body: dict[str, Any]) -> None:
        before = len(api.list())
        response = api.request("POST", "/v1/sandboxes", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["code"] == "request.invalid"
        assert len(api.list()) == before


class TestIdentity:
    """Restored from one snapshot, and yet no two are alike."""

    PROBE = (
        "hostname; cat /etc/hostname /etc/machine-id /proc/sys/kernel/random/uuid; "
        "head -c 16 /dev/urandom | od -An -tx1; echo $RANDOM-$RANDOM-$RANDOM; mktemp -u; "
        "python3 -c 'import random, uuid; print(random.random(), uuid.uuid4())'"
    )

    def test_clock_names_and_random_numbers(self, api: Api) -> None:
        boxes, skews = [], []
        try:
            for _ in range(4):  # more than the pools hold: warm, launched and unpooled ones
                boxes.append(api.create())
                before = time.time()
                told = float(boxes[-1].exec(["date", "+%s.%N"]).stdout)
                skews.append(max(before - told, told - time.time(), 0.0))
            assert max(skews) < 1.0, f"seconds off at the first command: {skews}"
            shown = [box.sh(self.PROBE).splitlines() for box in boxes]
            assert len({box.info["boot_mode"] for box in boxes}) > 1
            for column in zip(*shown, strict=True):
                assert len(set(column)) == len(boxes), f"two sandboxes share {column}"
            for box, lines in zip(boxes, shown, strict=True):
                assert lines[0] == lines[1] == f"sb-{box.id[:12]}"
                assert len(lines[2]) == 32
        finally:
            for box in boxes:
                box.delete()


class TestSizes:
    def test_the_disk_is_grown(self, create: Callable[..., Box]) -> None:
        small, large = create(), create(disk_mb=9000)
        assert large.info["disk_mb"] == 9000
        sizes = [int(box.sh("df -BM --output=size / | tail -1").strip(" M\n")) for box in (small, large)]
        assert 3500 < sizes[0] <= 4096
        assert 8300 < sizes[1] <= 9000
        assert large.sh("fallocate -l 6G /big && stat -c %s /big") == f"{6 << 30}\n"
        assert large.exec("dmesg | grep -ci 'ext4.*error'").stdout == "0\n"

    @pytest.mark.slow
    def test_another_shape_is_baked_once_and_kept(self, api: Api, server: Server) -> None:
        """Two ask at the same time for a shape that nobody has used yet; there is one bake, and both get it."""
        made: list[Box] = []

        def create() -> None:
            made.append(api.create(cpus=2, memory_mb=512))

        threads = [threading.Thread(target=create) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(400)
        try:
            assert len(made) == 2
            for box in made:
                assert (box.info["cpus"], box.info["cpu"], box.info["memory_mb"]) == (2, 2, 512)
                assert box.sh("nproc") == "2\n"
                assert 420_000 < int(box.sh("awk '/MemTotal/ {print $2}' /proc/meminfo")) < 524_288
            assert len(list((server.data / "templates").glob("base-2c512m-*"))) == 1
            watch = Watch()
            made.append(api.create(cpus=2, memory_mb=512))
            assert watch.seconds < 30, "the second time it is there"
            shapes = {(s["cpus"], s["memory_mb"]) for s in api.call("GET", "/v1/templates/base")["shapes"]}
            assert (2, 512) in shapes
            # Both CPUs do work.
            spin = "import time\nt = time.process_time()\nwhile time.process_time() - t < 1: pass"
            assert made[0].exec(f"python3 -c '{spin}' & python3 -c '{spin}'; wait").code == 0
        finally:
            for box in made:
                box.delete()


class TestLifetime:
    def test_a_ttl_deletes(self, api: Api, server: Server) -> None:
        box = api.create(ttl_seconds=4)
        assert box.info["ttl_seconds"] == 4
        assert box.info["expires_at"]
        watch = Watch()
        with pytest.raises(ApiError) as caught:
            box.exec("echo begun; sleep 100")
        assert caught.value.code in {"exec.sandbox_gone", "sandbox.unreachable"}
        assert 1 < watch.seconds < 40
        until(lambda: api.request("GET", box.path).status_code == 404, 20)
        until(lambda: box.id not in server.directories() and box.id not in server.machines(), 20)
        assert box.id not in {item["id"] for item in api.list()}
        api.made.pop(box.id, None)

    def test_a_ttl_can_be_changed(self, create: Callable[..., Box], api: Api) -> None:
        box = create(ttl_seconds=6)
        lifecycle = f"{box.path}/lifecycle"
        told = api.call("PATCH", lifecycle, json={"ttl_seconds": 3600})
        assert told["ttl_seconds"] == 3600
        time.sleep(7)
        assert box.sh("echo alive") == "alive\n"
        told = api.call("PATCH", lifecycle, json={"persistent": True})
        assert told["persistent"] is True
        assert "expires_at" not in told
        assert api.call("GET", lifecycle)["persistent"] is True
        api.call("PATCH", lifecycle, json={"persistent": False, "ttl_seconds": 1})
        until(lambda: api.request("GET", box.path).status_code == 404, 30)

    def test_zero_is_for_ever_and_absent_is_an_hour(self, create: Callable[..., Box]) -> None:
        endless = create(ttl_seconds=0)
        assert "expires_at" not in endless.info
        assert create().info["ttl_seconds"] == 3600

    def test_delete_is_complete_when_it_answers(self, api: Api, server: Server) -> None:
        box = api.create()
        exec_id = box.start("sleep 100")
        box.delete()
        assert box.id not in server.directories()
        assert box.id not in server.machines()
        for method, path in (("GET", box.path), ("DELETE", box.path), ("GET", f"{box.path}/exec/{exec_id}")):
            response = api.request(method, path)
            assert (response.status_code, response.json()["code"]) == (404, "sandbox.not_found")

    def test_metadata_filters(self, create: Callable[..., Box], api: Api) -> None:
        one = create(metadata={"team": "a", "run": "1", "ünï": "é=&", "secret.key": "hush"})
        two = create(metadata={"team": "a", "run": "2"})
        assert "secret.key" not in one.info["metadata"]
        assert "hush" not in str(api.list())

        def found(**wanted: str) -> set[str]:
            return {item["id"] for item in api.list(**{f"metadata.{k}": v for k, v in wanted.items()})}

        assert found(team="a") == {one.id, two.id}
        assert found(team="a", run="2") == {two.id}
        assert found(team="b") == set()
        assert found(**{"ünï": "é=&"}) == {one.id}
        assert found(**{"secret.key": "hush"}) == set()
        changed = api.call("PATCH", two.path, json={"metadata": {"run": None, "new": "x"}})
        assert changed["metadata"] == {"team": "a", "new": "x"}
        assert found(run="2") == set()
        assert [item["id"] for item in api.list() if item["id"] in {one.id, two.id}] == [one.id, two.id], "oldest first"
        assert [item["id"] for item in api.list(limit=1, after=one.id)] == [two.id]
