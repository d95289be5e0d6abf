"""Whichever way a program is started, it finds the same around it, also after a pause and a hibernation."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kit.client import Api, Box
from kit.sockets import Socket

#: Not `TERM` and `PWD`, which say what is different.
PROBE = (
    'echo "<$(id -u):$(id -g):$(id -G) $HOME $USER $LOGNAME $SHELL $PATH $LANG $A $(umask) '
    "$(ulimit -n):$(ulimit -u):$(ulimit -c) $( (ulimit -aS; ulimit -aH) | sha256sum | cut -c1-16) "
    '$(env | grep -vE "^(TERM|PWD|OLDPWD|SHLVL|_)=" | sort | sha256sum | cut -c1-16) $(pwd)>"'
)


@pytest.fixture(scope="module")
def box(api: Api) -> Iterator[Box]:
    made = api.create(ttl_seconds=600, env={"A": "of-the-sandbox"}, cwd="/var")
    made.sh("groupadd -g 777 crew && useradd -m -u 1234 -G crew -s /bin/bash app")
    yield made
    made.delete()


def line(text: str) -> str:
    assert text.count("<") == text.count(">") == 1, text
    return text[text.index("<") : text.index(">") + 1]


def process(box: Box, **body: Any) -> str:
    path = f"{box.path}/processes"
    one = box.api.call("POST", path, json=body)["process_id"]
    assert box.api.call("GET", f"{path}/{one}/wait")["exit_code"] == 0
    raw = box.api.request(
        "GET", f"{path}/{one}/output", params={"follow": "false"}, headers={"Accept": "application/octet-stream"}
    )
    box.api.call("DELETE", f"{path}/{one}")
    return line(raw.text)


def service(box: Box, **body: Any) -> str:
    path = f"{box.path}/services/probe"
    box.api.call("PUT", path, json={"restart": "no", **body})
    box.api.call("GET", f"{path}/wait", params={"state": "stopped", "timeout": 60})
    text = box.api.request("GET", f"{box.path}/logs", params={"source": "service:probe"}).text
    box.api.call("DELETE", path)
    return line(text)


def roads(box: Box, **who: Any) -> dict[str, str]:
    argv = ["/bin/bash", "-c", PROBE]
    return {
        "exec": line(box.sh(PROBE, **who)),
        "argv": line(box.exec(argv, **who).stdout),
        "stream": line(box.stream_all(PROBE, **who).stdout.decode()),
        "background": line(box.follow_all(box.start(PROBE, **who)).stdout.decode()),
        "process": process(box, command=PROBE, **who),
        "terminal": process(box, argv=argv, pty={"cols": 300, "rows": 24}, **who),
        "service": service(box, command=PROBE, **who),
    }


@pytest.mark.parametrize("user", ["app", "1234:777", "4242"])
def test_the_same_by_every_way(box: Box, user: str) -> None:
    told = roads(box, user=user, cwd="/tmp")
    assert len(set(told.values())) == 1, told
    assert " of-the-sandbox 0022 " in told["exec"]
    assert told["exec"].endswith(" /tmp>")
    home = "/" if user == "4242" else "/home/app"
    assert f" {home} " in told["exec"]


def at_a_terminal(box: Box) -> str:
    with Socket(box.api.url, f"{box.path}/terminal?cols=400", box.api.token) as shell:
        shell.type(b"clear; " + PROBE.encode() + b"\n")
        shell.until(b" /var>")
        found = re.findall(rb"<\d[^<>$]* /var>", bytes(shell.shown))
        assert len(found) == 1, bytes(shell.shown)
        return str(found[0].decode())


def test_the_same_after_a_pause_and_a_hibernation(box: Box) -> None:
    before = roads(box)
    assert {*before.values(), at_a_terminal(box)} == {before["exec"]}, before
    assert before["exec"].startswith("<0:0:0 /root root root /bin/")
    assert before["exec"].endswith(" /var>")
    for asleep, awake in (("pause", "resume"), ("hibernate", "wake")):
        box.api.call("POST", f"{box.path}/{asleep}")
        time.sleep(0.5)
        box.api.call("POST", f"{box.path}/{awake}")
        told = roads(box, user="app")
        assert set(told.values()) == {told["exec"]}, told
        assert told["exec"].startswith("<1234:1234:1234 777 /home/app app app /bin/bash ")
        assert at_a_terminal(box) == before["exec"] == line(box.sh(PROBE))


def test_a_sandbox_with_a_user_of_its_own(api: Api) -> None:
    """By every way, with nothing said in the call; the shell of a terminal too."""
    box = api.create(ttl_seconds=600, env={"A": "of-the-sandbox"}, cwd="/var", user="daemon")
    try:
        told = roads(box, env={"SHELL": "/bin/bash"})
        assert set(told.values()) == {told["exec"]}, told
        assert told["exec"].startswith("<1:1:1 /usr/sbin daemon daemon /bin/bash ")
        assert at_a_terminal(box).startswith("<1:1:1 /usr/sbin daemon daemon /")
    finally:
        box.delete()
