"""A headless Chromium, spoken to over pipes; and a Vite project with all that it needs, for a guest."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from kit.data import CHECKOUT

CHROMIUM = ("chromium-headless-shell", "chromium")
VITE = "8.4.0"
#: Where the package is kept between runs.
CACHE = CHECKOUT / ".cloche" / f"vite-{VITE}"


def chromium() -> str | None:
    return next((found for name in CHROMIUM if (found := shutil.which(name)) is not None), None)


def vite() -> Path:
    """A directory with `node_modules`. Raises OSError, `subprocess.SubprocessError` where it cannot be installed."""
    if not (CACHE / "node_modules").is_dir():
        CACHE.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE.parent) as made:
            options = ["--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", made]
            subprocess.run(
                ["npm", "install", *options, f"vite@{VITE}"], check=True, capture_output=True, cwd=made, timeout=240
            )
            Path(made).rename(CACHE)
            Path(made).mkdir()
    return CACHE


def packed(files: dict[str, str]) -> bytes:
    """A tar with node, the libraries that a guest may lack, `node_modules`, and these files, all below `app`."""
    node = shutil.which("node")
    assert node is not None
    with tempfile.TemporaryFile() as raw:
        with tarfile.open(fileobj=raw, mode="w") as tar:
            tar.add(Path(node).resolve(), "app/bin/node")
            for name in ("libstdc++.so.6", "libgcc_s.so.1"):
                tar.add(_library(node, name).resolve(), f"app/lib/{name}")
            tar.add(vite() / "node_modules", "app/node_modules")
            for name, text in files.items():
                info = tarfile.TarInfo(f"app/{name}")
                info.size = len(text.encode())
                with tempfile.TemporaryFile() as one:
                    one.write(text.encode())
                    one.seek(0)
                    tar.addfile(info, one)
        raw.seek(0)
        return raw.read()


def _library(program: str, name: str) -> Path:
    told = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    return Path(next(line.split("=> ")[1].split(" (")[0] for line in told.splitlines() if name in line))


class Browser:
    """One page of a Chromium of its own; end it by leaving the `with`."""

    def __init__(self, program: str) -> None:
        self._home = tempfile.mkdtemp(prefix="browser-")
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()
        script = f'exec "$@" 3<&{theirs} 4>&{answers}'
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                "-",
                program,
                *arguments,
                "--remote-debugging-pipe",
                f"--user-data-dir={self._home}",
            ],
            pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(answers)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        deadline = time.monotonic() + 10
        while Path(self._home).exists() and time.monotonic() < deadline:
            shutil.rmtree(self._home, ignore_errors=True)  # its children end after it, and write until then
            time.sleep(0.05)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            told = self._next(deadline)
            if told.get("id") == self._number:
                assert "error" not in told, told
                return dict(told["result"])

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 65536)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def value(self, script: str) -> Any:
        """What an expression is in the page now; None while there is none."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, script: str, wanted: object, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (found := self.value(script)) != wanted:
            page = self.value("document.documentElement && document.documentElement.outerHTML")
            assert time.monotonic() < deadline, f"{script} is {found!r}, not {wanted!r}, in {str(page)[:2000]}"
            time.sleep(0.1)
