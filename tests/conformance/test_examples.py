"""The programs in `examples/`, as somebody runs them: they succeed, say so, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import procs
from kit.client import Api
from kit.server import Server, environment

EXAMPLES = Path(__file__).parents[2] / "examples"
#: What each prints when all went well.
LINES = {
    "hello.py": ["exit code 0, ended by: exited"],
    "dev_server.py": [
        "the server is healthy, and at http://3000-",
        "the page: <!doctype html><title>Hello</title><h1>Hello</h1>",
        "the change is seen from outside: yes",
    ],
    "fork_three_patches.py": [
        "the same test server in all of them, process ",
        "'digits and cents'; deleted: 2 siblings",
        "the parent's repository is unchanged: yes",
        "deleted the rest",
    ],
    "install_once.py": [
        "Word-2 of 20000",
        "the package is there, and none sees the files of another: yes",
        "deleted the sandboxes and the snapshot",
    ],
}
#: These need another template than the base, and are run in `tests/vm`.
ELSEWHERE = {"data_analysis.py"}


def _environment(server: Server, token: str | None = None) -> dict[str, str]:
    settings = {"CLOCHE_API_URL": server.url, "CLOCHE_API_KEY": token or server.token}
    return {**environment(), **settings, "PYTHONUNBUFFERED": "1"}


def _held(api: Api) -> set[str]:
    """Sandboxes and snapshots."""
    found = [api.call("GET", "/v1/sandboxes"), api.call("GET", "/v1/snapshots")["snapshots"]]
    return {str(one["id"]) for each in found for one in each}


@pytest.fixture
def nothing_left(api: Api) -> Iterator[None]:
    """The test ends with as many sandboxes and snapshots as it began with."""
    before = _held(api)
    yield
    assert _held(api) <= before


def test_all_examples_are_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(LINES) | ELSEWHERE


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", LINES)
def test_example(server: Server, name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(
        command, env=_environment(server), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    for line in LINES[name]:
        assert line in done.stdout


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("name", "line"), [("fork_three_patches.py", "forked into 3"), ("install_once.py", "snapshot ")]
)
def test_an_interrupted_example_tidies_up(server: Server, name: str, line: str) -> None:
    """Ctrl-C in the middle, while threads are at work."""
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / name)],
        env=_environment(server),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=procs.heed_interrupts,
    ) as process:
        try:
            assert process.stdout is not None
            assert any(told.startswith(line) for told in process.stdout), process.communicate()[1]
            os.kill(process.pid, signal.SIGINT)
            process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode != 0


@pytest.mark.parametrize("name", LINES)
def test_an_example_that_cannot_work_says_so(server: Server, name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name)]
    wrong = _environment(server, token="pds_" + "0" * 32)
    done = subprocess.run(command, env=wrong, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "AuthError" in done.stderr
