"""One server per data directory: a lock that dies with its holder, and a file that says where it listens."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from cloche_server.core.errors import ClocheError
from cloche_server.host import files, process
from cloche_server.host.machine import boot_id


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The server that holds a data directory."""

    pid: int
    start_time: int
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class Instance:
    """Holds the lock of a data directory. Raises `host.unsupported` when another server has it."""

    def __init__(self, data: Path) -> None:
        self._run = data / "run"
        self._data = data
        self._lock = -1
        self.same_boot = True

    def __enter__(self) -> Self:
        self._lock = os.open(self._run / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            other = find_server(self._data)
            where = f" (pid {other.pid}, {other.url})" if other else ""
            raise ClocheError(
                "host.unsupported",
                f"another server{where} runs on {self._data}; stop it with `cloche-server stop`, or use another --data",
            ) from None
        boot = boot_id()
        marker = self._run / "boot_id"
        self.same_boot = not marker.exists() or marker.read_text("ascii").strip() == boot
        files.write_atomic(marker, boot + "\n")
        return self

    def announce(self, host: str, port: int) -> None:
        """Says where the server listens, for `stop` and `quickstart`."""
        pid = os.getpid()
        told = {"pid": pid, "start_time": process.start_time(pid), "host": host, "port": port}
        files.write_atomic(self._run / "server.json", json.dumps(told) + "\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self._run / "server.json").unlink(missing_ok=True)
        os.close(self._lock)


def find_server(data: Path) -> RunningServer | None:
    """The living server of a data directory, or None."""
    try:
        told = json.loads((data / "run" / "server.json").read_text("utf-8"))
        server = RunningServer(int(told["pid"]), int(told["start_time"]), str(told["host"]), int(told["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return server if process.is_alive(server.pid, server.start_time) else None
