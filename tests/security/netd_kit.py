"""netd as the real process in a namespace of its own, and calls to it from plain test code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cloche_server.host.fdlink import FdClient, LinkLost

UID = 61234


class Netd:
    """Started in `namespace`; the link to it lives on an event loop of its own."""

    def __init__(self, namespace: str, where: Path) -> None:
        self.socket = where / "netd.sock"
        self.errors = where / "netd.log"
        self.trusted = where / "ca.pem"
        self.namespace = namespace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.process = self.start()
        self._client = self._connect()

    def start(self) -> subprocess.Popen[bytes]:
        argv = ["ip", "netns", "exec", self.namespace, sys.executable, "-m", "cloche_server.netd"]
        with self.errors.open("ab") as log:
            return subprocess.Popen(
                [*argv, "--socket", str(self.socket), "--uid", str(UID)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONFAULTHANDLER": "1",
                    "SSL_CERT_FILE": str(self.trusted),
                    "PYTHONPATH": os.pathsep.join(sys.path),
                },
            )

    def _connect(self) -> FdClient:
        for _ in range(200):
            try:
                return self._run(FdClient.connect(self.socket))
            except OSError:
                assert self.process.poll() is None, self.errors.read_text()
                time.sleep(0.05)
        raise AssertionError("netd does not listen: " + self.errors.read_text())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def call(self, op: str, *, fds: Sequence[int] = (), **fields: Any) -> Any:
        try:
            return self._run(self._client.call(op, fds=fds, timeout=20, **fields))
        except LinkLost:
            pytest.fail(f"netd has gone ({self.process.poll()}): {self.errors.read_text()}")

    def client(self) -> FdClient:
        """Another client of the same netd."""
        return self._run(FdClient.connect(self.socket))

    def close(self) -> None:
        async def end() -> None:
            self._client.close()

        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()
