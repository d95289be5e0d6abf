"""Watching a process that may not be our child: one pidfd, one callback at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Self

from cloche_server.core.ports import Reading
from cloche_server.core.records import ProcessRef
from cloche_server.host import measure, process


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended. Both None: it was not our child, so nobody told us."""

    code: int | None = None
    signal: str | None = None


class ProcessWatch:
    """Knows when `ref` has ended, and reaps it when it is our child."""

    def __init__(self, ref: ProcessRef, pidfd: int) -> None:
        self.ref = ref
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._status = ExitStatus()
        self._reading: Reading | None = None
        self._loop.add_reader(pidfd, self._ended)

    @classmethod
    def open(cls, ref: ProcessRef) -> Self | None:
        """Starts watching; None when the process is gone. Raises OSError when no descriptor is left."""
        try:
            pidfd = os.pidfd_open(ref.pid)
        except ProcessLookupError:
            return None
        try:
            # Compared after opening: what the descriptor stands for can no longer change.
            if process.start_time(ref.pid) == ref.start_time:
                watch = cls(ref, pidfd)
                pidfd = -1
                return watch
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        return None

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.measure()  # before it is reaped: of a child of ours this is all that it has used
        try:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            result = None
        os.close(self._pidfd)
        self._pidfd = -1
        if result is not None:
            if result.si_code == os.CLD_EXITED:
                self._status = ExitStatus(code=result.si_status)
            else:
                self._status = ExitStatus(signal=signal.Signals(result.si_status).name)
        self._done.set()

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    def measure(self) -> Reading | None:
        """What it uses; when it is gone, the last that was read."""
        if not self.ended and (reading := measure.read(self.ref)) is not None:
            self._reading = reading
        return self._reading

    async def wait(self) -> ExitStatus:
        await self._done.wait()
        return self._status

    def kill(self) -> None:
        """SIGKILL through the pidfd: never hits a successor of the pid."""
        if self._pidfd >= 0:
            self.measure()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Stops watching; the process goes on."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
