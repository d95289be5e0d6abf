"""A terminal without a screen: tmux, driven by its commands, shows what a person would see."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from kit.until import until


class Tmux:
    """One window with a shell of its own server. Use it as a context manager."""

    def __init__(self, work: Path, env: Mapping[str, str], cols: int = 100, rows: int = 30) -> None:
        self._socket = work / "tmux"
        self._env = {**env, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        self._size = str(cols), str(rows)

    def __enter__(self) -> Self:
        cols, rows = self._size
        self._run("-u", "-f", "/dev/null", "new-session", "-d", "-x", cols, "-y", rows, "bash --norc --noprofile")
        self._run("set-option", "-g", "window-size", "manual")
        return self

    def __exit__(self, *_: object) -> None:
        self._run("kill-server")

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words], env=self._env, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, f"tmux {words}: {done.stderr}"
        return done.stdout

    def type(self, text: str) -> None:
        """The text, and Enter."""
        self._run("send-keys", "-l", text)
        self.key("Enter")

    def key(self, name: str) -> None:
        """A key by the name that tmux has for it."""
        self._run("send-keys", name)

    def resize(self, cols: int, rows: int) -> None:
        self._run("resize-window", "-x", str(cols), "-y", str(rows))

    def lines(self) -> list[str]:
        """What is on the screen now, without spaces at the ends of lines and empty lines at the end."""
        return self._run("capture-pane", "-p").rstrip("\n").split("\n")

    def until(self, line: str, seconds: float = 60.0) -> None:
        """Waits for a line that is this one."""

        def shown() -> bool:
            self.last = self.lines()
            return line in self.last

        try:
            until(shown, seconds)
        except AssertionError:
            raise AssertionError(f"no line {line!r} in:\n" + "\n".join(self.last)) from None
