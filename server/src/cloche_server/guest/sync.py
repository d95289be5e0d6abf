"""Resynchronisation of the guest link, without I/O.

A virtio-serial port has no connections, so bytes of an abandoned conversation may still be under way
in both directions. Before HTTP/2 starts the host sends lines with a fresh nonce until the agent echoes
the last of them; whatever else arrives is dropped. The rules are in docs/agent-protocol.md §1.1.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

REPEAT_SECONDS: Final = 0.05
"""Pause between two sync lines while no echo has arrived."""

FLUSH: Final = b"\n" * 16384
"""Sent before every line but the first: fills up an HTTP/2 frame that was cut short in the guest."""

_NONCE: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_REST: Final = re.compile(rb"([0-9]{1,9}) ([0-9]{1,9})\n")
_REST_MAX: Final = 9 + 1 + 9 + 1


class Resync:
    """One attempt to get in step with the agent.

    Call `start()` once and send what it returns, then `tick()` every `REPEAT_SECONDS` and send what it
    returns, and `feed()` with everything that arrives. When `ready` is true the next byte to send is the
    HTTP/2 preface. The object keeps less than 100 bytes of input, however much garbage arrives.
    """

    def __init__(self, nonce: str | None = None) -> None:
        """`nonce`: 32 lower-case hex digits; only tests choose it. Raises ValueError on another form."""
        self.nonce: Final = secrets.token_hex(16) if nonce is None else nonce
        if not _NONCE.fullmatch(self.nonce):
            raise ValueError("the nonce of a sync line is 32 lower-case hex digits")
        self.ready = False
        self.generation = 0
        """Highest generation the agent speaks, as of the latest echo; 0 before the first one."""
        self.answered = False
        self._last = -1
        self._tail = b""
        self._prefix = b"\nCLOCHE-SYNC-OK " + self.nonce.encode() + b" "

    def start(self) -> bytes:
        """The bytes that open the attempt."""
        return self._line()

    def tick(self) -> bytes:
        """The bytes to send now that `REPEAT_SECONDS` have passed; empty once an echo has arrived."""
        return b"" if self.answered else FLUSH + self._line()

    def _line(self) -> bytes:
        self._last += 1
        return f"\nCLOCHE-SYNC {self.nonce} {self._last}\n".encode()

    def feed(self, data: bytes) -> bool:
        """Take input; true when the link is in step. Bytes behind the last echo are dropped as well:
        an honest agent is silent until it has seen the preface."""
        buf = self._tail + data
        prefix = self._prefix
        at = 0
        while not self.ready:
            found = buf.find(prefix, at)
            if found < 0:
                # A prefix may be cut anywhere, so as much as could be the start of one is kept.
                self._tail = buf[max(at, len(buf) - len(prefix) + 1) :]
                return False
            rest = buf[found + len(prefix) : found + len(prefix) + _REST_MAX]
            match = _REST.match(rest)
            if match is None and len(rest) < _REST_MAX and b"\n" not in rest:
                self._tail = buf[found:]
                return False
            if match is not None:
                self._echo(int(match[1]), int(match[2]))
            at = found + 1
        self._tail = b""
        return True

    def _echo(self, number: int, generation: int) -> None:
        if number > self._last:
            return  # no such line was sent: not an echo, whoever wrote it
        self.answered = True
        self.generation = generation
        if number == self._last:
            self.ready = True
