"""A real `cloche-server` process with a data directory of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from click.testing import CliRunner

from cloche_server.cli.tokens import token
from kit import data as test_data
from kit import procs
from kit.client import Api, Box

COMMAND = Path(sys.executable).with_name("cloche-server")
START_TIMEOUT = 90.0
STOP_TIMEOUT = 60.0
#: Small pools that do not practise: each machine in them takes CPU time away from the tests. Archives are taken, which
#: is off by default.
DEFAULTS = {"pool_launched": 1, "pool_warm": 1, "pool_practice_seconds": 0, "max_import_mb": 32768}


class Server:
    """Make it with `Server.make`, and `close` it: then nothing of it is left.

    `settings` are settings of the server by their names. They can be changed between a stop and a start.
    """

    def __init__(self, data: Path, settings: Mapping[str, object]) -> None:
        self.data = data
        self.settings = dict(settings)
        self.log = data / "server.log"
        self.url = ""
        self.token = ""
        #: What serves; other commands always come from the installed program.
        self.command: list[str | Path] = [COMMAND]
        self._process: subprocess.Popen[bytes] | None = None
        self._api: Api | None = None
        self._made: dict[str, Box] = {}

    @classmethod
    def make(cls, base: Path | None = None, *templates: str, **settings: object) -> Server:
        """A server that has not been started, over the template `base`, and others, of the data directory `base`."""
        return cls(test_data.make(base or test_data.base_data(), *templates), {**DEFAULTS, **settings})

    # ------------------------------------------------------------ life

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> None:
        """Starts the process and, unless `wait` is False, waits until it is ready."""
        assert not self.running
        if not self.token:
            self.token = self._first_token()
        flags = [
            word
            for name, value in {"host": "127.0.0.1", "port": 0, "preview_port": 0, **self.settings}.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.command, "serve", "--data", self.data, "--log-format", "console", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )
        if wait:
            self.wait_ready()

    def _first_token(self) -> str:
        """What `token create` prints. In this process: to start another takes longer than to make a token."""
        ours = {name: None for name in os.environ if name.startswith("CLOCHE_")}
        words = ["create", "--data", str(self.data)]
        # In a thread, because the command has an event loop of its own.
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(CliRunner().invoke, token, words, env=ours).result()
        assert done.exit_code == 0, f"no token: {done.output}{done.exception!r}"
        return done.stdout.strip()

    def wait_ready(self, seconds: float = START_TIMEOUT) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.running, f"the server ended at its start:\n{self.log_tail()}"
            if self._find_url() and self._is_ready():
                return
            time.sleep(0.05)
        raise AssertionError(f"the server was not ready within {seconds:g} s:\n{self.log_tail()}")

    def _find_url(self) -> bool:
        from cloche_server.host.instance import find_server

        found = find_server(self.data)
        if found is None or found.pid != self.pid:
            return False
        if found.url != self.url:
            self.url = found.url
            self._close_api()
        return True

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=10, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self, *, sandboxes: bool = False) -> str:
        """`cloche-server stop`; its output. Sandboxes run on unless `sandboxes`."""
        text = self.cli("stop", *(["--sandboxes"] if sandboxes else []))
        self._reap()
        return text

    def terminate(self, number: int = signal.SIGTERM) -> None:
        """A signal to the process, and the wait for its end."""
        os.kill(self.pid, number)
        self._reap()

    def kill(self) -> None:
        """`kill -9`: no chance to tidy up. Sandboxes run on."""
        self.terminate(signal.SIGKILL)

    def restart(self) -> None:
        """Start after a stop or a kill (a running one is stopped first), on a new port."""
        if self.running:
            self.terminate()
        self.start()

    def _reap(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {STOP_TIMEOUT:g} s:\n{self.log_tail()}") from None

    def close(self) -> None:
        """Ends the server and all its machines, and removes the data directory."""
        self._close_api()
        if self.running:
            assert self._process is not None
            self._process.kill()
            self._process.wait()
        test_data.remove(self.data)

    # ------------------------------------------------------------ use

    @property
    def api(self) -> Api:
        """A client with this server's token, kept for as long as the address stays."""
        if self._api is None:
            self._api = Api(self.url, self.token, self._made)
        return self._api

    def _close_api(self) -> None:
        if self._api is not None:
            self._api.close()
            self._api = None

    def cli(self, *words: str) -> str:
        """Runs `cloche-server` on this data directory; stdout of a run that must succeed."""
        done = self.cli_raw(*words)
        assert done.returncode == 0, f"cloche-server {' '.join(words)} failed: {done.stderr}{done.stdout}"
        return done.stdout

    def cli_raw(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, *words, "--data", self.data],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            env=environment(),
            check=False,
        )

    # ------------------------------------------------------------ looking at it

    def log_tail(self, lines: int = 60) -> str:
        try:
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])
        except OSError:
            return ""

    def directories(self) -> set[str]:
        """Names below `sandboxes/`."""
        with contextlib.suppress(FileNotFoundError):
            return {path.name for path in (self.data / "sandboxes").iterdir()}
        return set()

    def machines(self) -> dict[str, procs.Proc]:
        """The QEMU processes of this data directory, by machine id."""
        root = str(self.data / "sandboxes")
        return {
            Path(proc.cwd).name: proc
            for proc in procs.below(self.data)
            if proc.is_qemu and str(Path(proc.cwd).parent) == root
        }

    def qemu(self, sandbox_id: str) -> procs.Proc:
        """The QEMU process of a sandbox."""
        found = self.machines()
        assert sandbox_id in found, f"no QEMU process of {sandbox_id}; there are {sorted(found)}"
        return found[sandbox_id]

    def machine_report(self, sandbox_id: str) -> str:
        """The ends of the console log and of QEMU's own log."""
        parts = []
        for name in ("console.log", "qemu.log"):
            path = self.data / "sandboxes" / sandbox_id / name
            try:
                text = path.read_bytes()[-3000:].decode("utf-8", "replace")
            except OSError as error:
                text = f"({error.strerror})"
            parts.append(f"--- {sandbox_id} {name}\n{text}")
        return "\n".join(parts)


def environment() -> dict[str, str]:
    """Ours without the settings of some other server; how machines are accelerated stays."""
    return {k: v for k, v in os.environ.items() if not k.startswith("CLOCHE_") or k == "CLOCHE_ACCEL"}
