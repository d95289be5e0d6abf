"""Processes and terminals of a real machine: one sandbox, its fork, and a stop."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kit.client import Api, Box
from kit.sockets import Refused, Socket
from kit.until import until


class Procs:
    """The routes of processes of one sandbox."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.api = box.api
        self.root = f"/v1/sandboxes/{box.id}"

    def start(self, **body: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.api.call("POST", f"{self.root}/processes", json=body)
        return found

    def call(self, method: str, id_: str, rest: str = "", **options: Any) -> Any:
        return self.api.call(method, f"{self.root}/processes/{id_}{rest}", **options)

    def raw(self, id_: str, **params: Any) -> bytes:
        path = f"{self.root}/processes/{id_}/output"
        headers = {"Accept": "application/octet-stream"}
        return self.api.request("GET", path, params={"follow": "false", **params}, headers=headers).content

    def all(self) -> dict[str, str]:
        return {one["process_id"]: one["status"] for one in self.api.call("GET", f"{self.root}/processes")["processes"]}

    def socket(self, rest: str = "/terminal", token: str | None = "", **options: Any) -> Socket:
        sent = self.api.token if token == "" else token
        return Socket(self.api.url, self.root + rest, sent, **options)


@pytest.fixture(scope="module")
def procs(api: Api) -> Iterator[Procs]:
    box = api.create(ttl_seconds=600)
    yield Procs(box)
    box.delete()


def test_size_resize_and_ctrl_c(procs: Procs) -> None:
    shell = "stty size; trap 'stty size' WINCH; echo ready; while :; do sleep 0.1; done"
    one = procs.start(command=shell, pty={"cols": 120, "rows": 40}, name="sized")
    assert (one["status"], one["stdin"], one["pty"]) == ("running", "pty", {"cols": 120, "rows": 40})
    until(lambda: b"40 120\r\nready" in procs.raw(one["process_id"]))
    procs.call("POST", one["process_id"], "/resize", json={"cols": 132, "rows": 50})
    until(lambda: b"50 132" in procs.raw(one["process_id"]))
    for cols in (0, 65535):
        refused = procs.api.request(
            "POST", f"{procs.root}/processes/{one['process_id']}/resize", json={"cols": cols, "rows": 5}
        )
        assert refused.status_code == 400
    procs.call("POST", one["process_id"], "/resize", json={"cols": 1, "rows": 1})
    until(lambda: procs.raw(one["process_id"]).endswith(b"1 1\r\n"))
    procs.call("DELETE", one["process_id"])
    assert one["process_id"] not in procs.all()
    sleeper = procs.start(command="echo up; exec sleep 100", pty={"cols": 80, "rows": 24})["process_id"]
    until(lambda: b"up" in procs.raw(sleeper))
    assert procs.call("POST", sleeper, "/stdin", content=b"\x03") == {"bytes": 1, "closed": False}
    ended = procs.call("GET", sleeper, "/wait", params={"timeout": 30})
    assert (ended["exit_code"], ended["termination"]["signal"]) == (130, "SIGINT")
    late = procs.api.request("POST", f"{procs.root}/processes/{sleeper}/resize", json={"cols": 9, "rows": 9})
    assert (late.status_code, late.json()["code"]) == (409, "process.ended")


def test_a_job_is_stopped_and_brought_back(procs: Procs) -> None:
    with procs.socket("/ssh?cols=80&rows=24") as shell:
        shell.type(b"sh -c 'echo job-$((40+1)); exec sleep 4343'\n")
        shell.until(b"job-41")
        until(lambda: procs.box.exec("pgrep -fx 'sleep 4343'").stdout)
        shell.type(b"\x1a")
        shell.until(b"Stopped")
        assert procs.box.exec("ps -o stat= -p $(pgrep -fx 'sleep 4343')").stdout.startswith("T")
        shell.type(b"fg\n")
        until(lambda: procs.box.exec("ps -o stat= -p $(pgrep -fx 'sleep 4343')").stdout.startswith("S"))
        shell.type(b"\x03")
        shell.type(b"echo back-$((40+2)) $?\n")
        shell.until(b"back-42 130")
        shell.type(b"exit 4\n")
        shell.end()
        assert shell.texts[-1] == {"exit": 4}


def test_five_megabytes_of_input(procs: Procs) -> None:
    one = procs.start(argv=["sha256sum"], stdin="pipe")["process_id"]
    data = bytes(range(256)) * 20_000
    assert procs.call("POST", one, "/stdin?close=true", content=data)["bytes"] == len(data)
    assert procs.call("GET", one, "/wait")["exit_code"] == 0
    assert procs.raw(one).split()[0].decode() == hashlib.sha256(data).hexdigest()
    late = procs.api.request("POST", f"{procs.root}/processes/{one}/stdin", content=b"x")
    assert (late.status_code, late.json()["code"]) == (409, "process.ended")


def test_offsets_and_the_whole_tree(procs: Procs) -> None:
    shell = "echo é; echo err >&2; setsid sleep 321 & (sleep 321 &) ; wait"
    one = procs.start(command=shell, rlimits={"nofile": 64})["process_id"]
    until(lambda: procs.call("GET", one)["output_bytes"] == 7)
    assert procs.raw(one, stream="stdout", **{"from": 2}) == b"\n"
    assert procs.raw(one, stream="stderr") == b"err\n"
    listed = procs.api.call("GET", f"{procs.root}/processes", params={"all": "true"})
    mine = [found["command"] for found in listed["guest"] if found.get("process_id") == one]
    until(lambda: procs.box.exec("pgrep -fcx 'sleep 321'").stdout.strip() == "2")
    assert mine
    assert not listed["truncated"]
    procs.call("POST", one, "/signal", json={"signal": "TERM", "target": "tree"})
    assert procs.call("GET", one, "/wait")["termination"]["signal"] == "SIGTERM"
    until(lambda: procs.box.exec("pgrep -fcx 'sleep 321'").stdout.strip() == "0")


def test_a_terminal_and_its_client_who_comes_back(procs: Procs) -> None:
    with procs.socket("/terminal?cols=100&rows=30&linger_seconds=60") as first:
        first.type(b"stty size; echo over-$((40+1))\n")
        first.until(b"over-41")
        assert b"30 100" in first.shown
        told = first.texts[0]
    seen = told["offset"] + len(first.shown)
    rest = f"/terminal?process={told['process']}&from={seen}&cols=90&rows=20"
    with procs.socket(rest, None, protocols=("cloche.terminal", f"bearer.{procs.api.token}")) as second:
        assert second.protocol == "cloche.terminal"
        second.type("stty size; echo 'käse'\n".encode())
        second.until("käse\r\n".encode())
        assert b"over-41" not in second.shown
        assert b"20 90" in second.shown
        second.tell({"resize": {"cols": 0, "rows": 9}})
        second.type(b"exit 7\n")
        second.end()
        assert second.texts[-1] == {"exit": 7}
        assert second.code == 1000
        assert any("error" in text for text in second.texts)
    with pytest.raises(Refused) as caught:
        procs.socket("/terminal", None)
    assert caught.value.status == 401
    assert b"auth.missing_token" in caught.value.body
    with pytest.raises(Refused) as caught:
        procs.socket("/terminal?process=nope")
    assert caught.value.status == 404


def left_behind(procs: Procs) -> tuple[str, int]:
    """A shell that waits two seconds for its client, which is gone; its process, and its pid in the sandbox."""
    with procs.socket("/terminal?linger_seconds=2") as shell:
        shell.type(b"echo pid-$$-$((40+2))\n")
        shell.until(b"-42\r\n")
        found = re.search(rb"pid-(\d+)-42", shell.shown)
        assert found is not None
        return str(shell.texts[0]["process"]), int(found[1])


def test_a_shell_waits_for_its_client_no_longer_than_told(procs: Procs) -> None:
    one, pid = left_behind(procs)
    assert procs.box.exec(["kill", "-0", str(pid)]).code == 0, "it waits"
    until(lambda: procs.call("GET", one)["status"] == "exited", 30)
    assert procs.box.exec(["test", "-e", f"/proc/{pid}"]).code == 1


def test_a_shell_that_ends_with_its_connection(procs: Procs) -> None:
    with procs.socket("/ssh?rows=24&cols=80") as shell:
        shell.type(b"sleep 4242\n")
        until(lambda: procs.box.exec("pgrep -fcx 'sleep 4242'").stdout.strip() == "1")
        assert shell.texts == []
    with procs.socket("/exec/pty") as other:
        other.tell({"stdin": "exit 3\n"})
        other.end()
        assert other.texts[-1] == {"exit": 3}
    until(lambda: procs.box.exec("pgrep -fcx 'sleep 4242'").stdout.strip() == "0", 60, every=0.5)


def test_input_that_nobody_takes(procs: Procs) -> None:
    """One that ends meanwhile, and one whose input is closed and who goes on."""
    one = procs.start(command="sleep 1; exit 3", stdin="pipe")["process_id"]
    path = f"{procs.root}/processes/{one}/stdin"
    written = procs.api.request("POST", path, params={"close": "true"}, content=bytes(5_000_000))
    assert written.status_code in {200, 409}, written.text
    if written.status_code == 200:
        assert written.json()["bytes"] < 5_000_000, "no more than its pipe holds"
    else:
        assert written.json()["code"] in {"process.ended", "process.no_input"}
    assert procs.call("GET", one, "/wait", params={"timeout": 30})["exit_code"] == 3
    deaf = procs.start(command="cat >/dev/null; exec sleep 60", stdin="pipe")["process_id"]
    procs.call("POST", deaf, "/stdin?close=true", content=b"all")
    late = procs.api.request("POST", f"{procs.root}/processes/{deaf}/stdin", content=b"x")
    assert (late.status_code, late.json()["code"]) == (409, "process.no_input")
    assert procs.call("GET", deaf)["status"] == "running"
    procs.call("DELETE", deaf)


@pytest.mark.parametrize("size", [(65535, 65535), (0, 24), (80, 0), (1001, 24)])
def test_a_silly_size_starts_nothing(procs: Procs, size: tuple[int, int]) -> None:
    before = procs.all()
    body = {"command": "stty size", "pty": {"cols": size[0], "rows": size[1]}}
    refused = procs.api.request("POST", f"{procs.root}/processes", json=body)
    assert (refused.status_code, refused.json()["code"]) == (400, "request.invalid")
    with pytest.raises(Refused) as caught:
        procs.socket(f"/terminal?cols={size[0]}&rows={size[1]}")
    assert caught.value.status == 400
    assert procs.all() == before


def test_a_terminal_of_another_user(procs: Procs) -> None:
    """It is theirs, and it is the controlling one: Ctrl-C reaches what runs there."""
    shell = "id -un; stat -c '%U' $(tty); stty size </dev/tty; echo up; exec sleep 100"
    one = procs.start(command=["/bin/sh", "-c", shell], user="nobody", cwd="/", pty={"cols": 120, "rows": 40})
    until(lambda: b"up" in procs.raw(one["process_id"]))
    assert procs.raw(one["process_id"]).split() == [b"nobody", b"nobody", b"40", b"120", b"up"]
    procs.call("POST", one["process_id"], "/stdin", content=b"\x03")
    assert procs.call("GET", one["process_id"], "/wait", params={"timeout": 30})["exit_code"] == 130


def test_what_a_fork_has_and_a_stop_takes_away(procs: Procs) -> None:
    pipe = procs.start(command="cat", stdin="pipe", name="survivor")["process_id"]
    screen = procs.start(pty={"cols": 80, "rows": 24})["process_id"]
    procs.api.call("POST", f"{procs.root}/hibernate")
    assert procs.all()[pipe] == procs.all()[screen] == "running", "asking wakes it"
    made = procs.api.call("POST", f"{procs.root}/fork", json={})
    twin = Procs(procs.api.keep(made.get("children", [made])[0]))
    found = twin.all()
    assert found[pipe] == found[screen] == "running"
    for one, text in ((procs, b"old"), (twin, b"new")):
        one.call("POST", pipe, "/stdin?close=true", content=text)
        assert one.call("GET", pipe, "/wait", params={"timeout": 30})["exit_code"] == 0
        assert one.raw(pipe) == text
        one.call("POST", screen, "/stdin", content=b"echo alive-$((40+2))\n")
        until(lambda one=one: b"alive-42" in one.raw(screen))  # type: ignore[misc]
    twin.box.delete()
    procs.api.call("POST", f"{procs.root}/stop", json={"force": True})
    procs.api.call("POST", f"{procs.root}/start")
    found = procs.all()
    assert found[screen] == "lost"
    assert pipe not in found
    assert procs.call("GET", screen)["status"] == "lost"
    refused = procs.api.request("POST", f"{procs.root}/processes/{screen}/signal", json={"signal": "TERM"})
    assert (refused.status_code, refused.json()["code"]) == (409, "process.lost")
    procs.call("DELETE", screen)
    assert procs.all() == {}
    began = time.monotonic()
    again = procs.start(argv=["sleep", "0.1"])["process_id"]
    assert procs.call("GET", again, "/wait")["exit_code"] == 0
    assert time.monotonic() - began < 30
