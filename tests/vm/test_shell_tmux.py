"""`cloche shell` in a real terminal, which tmux is: typing, size, keys, characters, full screens, coming back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import procs
from kit.client import Api, Box
from kit.tmux import Tmux
from kit.until import until

#: What the installed command `cloche` does; in the file's own process, so that signals go to it.
PROGRAM = "import sys; from cloche.cli import main; sys.exit(main())"


@pytest.fixture
def screen(api: Api, shared: Box, tmp_path: Path) -> Iterator[Tmux]:
    """A terminal in which `cloche` finds the server, with a prompt of a line of its own."""
    env = {**os.environ, "CLOCHE_API_URL": api.url, "CLOCHE_API_KEY": api.token, "COLUMNS": "33"}
    with Tmux(tmp_path, env) as made:
        made.type(f"cd {tmp_path}; PS1='here$ '; cloche() {{ {sys.executable} -c '{PROGRAM}' \"$@\"; }}; clear")
        made.until("here$")
        yield made


def enter(screen: Tmux, words: str) -> None:
    """Joins a shell of the sandbox, and gives it a plain prompt."""
    screen.type(f"stty -g > before; cloche shell {words}; echo ended-$?; stty -g > after")
    until(lambda: any("root@" in line for line in screen.lines()), 60)
    screen.type("PS1='there# '; clear")
    screen.until("there#")


def leave(screen: Tmux, tmp_path: Path, code: int) -> None:
    """Waits until the shell has ended; the terminal is as it was before."""
    screen.until(f"ended-{code}")
    screen.type("echo")
    until(lambda: (tmp_path / "after").exists() and (tmp_path / "after").read_text())
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()


def test_a_whole_session(screen: Tmux, shared: Box, tmp_path: Path) -> None:
    enter(screen, shared.id)
    screen.type("stty size; echo sum-$((40+2))")
    screen.until("sum-42")
    assert "30 100" in screen.lines(), "the size of the window, not what is exported as COLUMNS"
    screen.resize(70, 20)
    screen.type("clear; stty size")
    screen.until("20 70")
    # Ctrl-C goes to what runs there, and nothing here ends.
    screen.type("clear; sleep 4321")
    until(lambda: shared.exec("pgrep -fcx 'sleep 4321'").stdout.strip() == "1")
    screen.key("C-c")
    screen.until("there#")
    screen.type("echo code-$?")
    screen.until("code-130")
    # Wide and combining characters, typed and shown, are whole.
    screen.type("clear; echo '[日本語 é e\u0301 한글 ☕ 😀]'")
    screen.until("[日本語 é e\u0301 한글 ☕ 😀]")
    screen.type("exit 7")
    leave(screen, tmp_path, 7)


def test_a_program_that_fills_the_screen(screen: Tmux, shared: Box, tmp_path: Path) -> None:
    shared.sh("seq -f 'line %.0f' 500 > /tmp/long")
    enter(screen, shared.id)
    screen.type("less /tmp/long")
    screen.until("line 29")
    assert screen.lines() == [*(f"line {n}" for n in range(1, 30)), "/tmp/long"], "exactly what fits"
    screen.key("G")
    screen.until("line 500")
    screen.resize(80, 15)
    screen.key("g")
    until(lambda: screen.lines()[:14] == [f"line {n}" for n in range(1, 15)])
    screen.key("q")
    screen.until("there#")
    assert "line 5" not in screen.lines(), "the screen of before is back"
    screen.key("C-d")
    leave(screen, tmp_path, 0)


def test_coming_back(screen: Tmux, shared: Box, tmp_path: Path) -> None:
    """Whoever is cut off is told how to come back, finds the same shell, and sees what it has shown meanwhile."""
    enter(screen, shared.id)
    wait = "until [ -e /tmp/go ]; do sleep 0.1; done"
    screen.type(f"clear; kept=value-$((6*7)); echo begun; {wait}; echo meanwhile-$kept")
    screen.until("begun")  # what was typed has arrived
    client = until(lambda: [p for p in _clients(shared.id) if p.alive()])[0]
    os.kill(client.pid, signal.SIGTERM)
    leave(screen, tmp_path, 143)
    shared.put("/tmp/go", b"")
    found = [one for one in shared.api.call("GET", f"{shared.path}/processes")["processes"] if one["pty"]]
    running = [one for one in found if one["status"] == "running"]
    # A line that is too long for the screen breaks at a space.
    told = re.search(
        rf"comebackwith:clocheshell{shared.id}--process(\w+)--from(\d+)", "".join(screen.lines()).replace(" ", "")
    )
    assert told, "how to come back is told"
    process, offset = told.groups()
    assert process in {one["process_id"] for one in running}
    (tmp_path / "after").unlink()
    screen.type("clear")
    screen.type(f"cloche shell {shared.id} --process {process} --from {offset}; echo ended-$?; stty -g > after")
    screen.until("meanwhile-value-42")
    screen.type("exit $((kept=5))")
    leave(screen, tmp_path, 5)


def test_failures_leave_the_terminal_alone(screen: Tmux, tmp_path: Path) -> None:
    screen.type(f"stty -g > before; cloche shell {'x' * 20}; echo ended-$?; stty -g > after")
    leave(screen, tmp_path, 127)
    assert any("sandbox" in line for line in screen.lines())


def test_without_a_terminal(api: Api, shared: Box, tmp_path: Path) -> None:
    """With an input that stays open the client ends when the shell has; with one that ends, the shell ends."""
    os.mkfifo(tmp_path / "never")
    held = os.open(tmp_path / "never", os.O_RDWR)
    try:
        os.write(held, b"echo shown-$((40+2)); exit 7\n")
        env = {**os.environ, "CLOCHE_API_URL": api.url, "CLOCHE_API_KEY": api.token}
        words = [sys.executable, "-c", PROGRAM, "shell", shared.id]
        done = subprocess.run(words, stdin=held, capture_output=True, timeout=60, env=env)
    finally:
        os.close(held)
    assert done.returncode == 7, done.stderr
    assert b"shown-42" in done.stdout
    # One that ends is the end of whatever reads it, although it comes long before the shell looks.
    for given, code in ((b"", 0), (b"cat; (exit 5)\n", 5)):
        done = subprocess.run(words, input=given, capture_output=True, timeout=60, env=env)
        assert done.returncode == code, (done.stdout, done.stderr)


def _clients(sandbox_id: str) -> list[procs.Proc]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            start = procs.start_time(int(entry.name))
            if words[2:-1] == [PROGRAM.encode(), b"shell", sandbox_id.encode()] and start is not None:
                found.append(procs.Proc(int(entry.name), start, "", ""))
    return found
