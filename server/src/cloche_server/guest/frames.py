"""Frames of a command's output (docs/agent-protocol.md §3.1), without I/O.

    frame = type (1 byte) · offset (8 bytes, big endian) · length (4 bytes, big endian) · payload

The sender is the guest: every number is bounded, every string cut, and a sequence that the protocol
does not allow is refused with `guest.protocol`.
"""

from __future__ import annotations

import json
import struct
from typing import Final, Literal, NamedTuple, TypeAlias

from .errors import protocol_error
from .fields import Fields, parse_object

MAX_PAYLOAD: Final = 65536
HEADER: Final = struct.Struct(">BQI")
STDOUT: Final = 1
STDERR: Final = 2

_STARTED: Final = 0
_GAP: Final = 3
_EXIT: Final = 4
_HEARTBEAT: Final = 5
_MAX_OFFSET: Final = 2**62

Reason: TypeAlias = Literal["exited", "signaled", "timeout", "oom", "cancelled", "output_limit"]
_REASONS: Final[tuple[Reason, ...]] = (
    "exited",
    "signaled",
    "timeout",
    "oom",
    "cancelled",
    "output_limit",
)


class Started(NamedTuple):
    """First frame. `pid` is 0 when the program could not be started; `started_ns` is Unix time. `stdout_at`,
    `stderr_at`: bytes of each stream before what follows, where that is known."""

    pid: int
    started_ns: int
    stdout_at: int | None = None
    stderr_at: int | None = None


class Output(NamedTuple):
    """Bytes of `STDOUT` or `STDERR`. `offset` counts the bytes of both streams before these."""

    stream: int
    offset: int
    data: bytes


class Gap(NamedTuple):
    """`bytes` of `stream` were dropped here; stream 0 means bytes of both, and then `stdout_at` and `stderr_at` are
    the bytes of each of them up to here."""

    stream: int
    offset: int
    bytes: int
    stdout_at: int | None = None
    stderr_at: int | None = None


class Exit(NamedTuple):
    """Last frame. Times are milliseconds, `max_rss_kb` kibibytes, the rest counts of bytes.

    `detail` is text from the guest: data for the caller, never part of a sentence of ours.
    """

    exit_code: int
    reason: Reason
    signal: str | None
    signal_number: int | None
    duration_ms: float
    user_ms: float
    system_ms: float
    max_rss_kb: int
    detail: str | None
    stdout_bytes: int
    stderr_bytes: int
    stdout_dropped: int
    stderr_dropped: int
    oom_kills: int = 0


class Heartbeat(NamedTuple):
    """The command is alive but silent."""

    offset: int


Frame: TypeAlias = Started | Output | Gap | Exit | Heartbeat


def parse_exit(fields: Fields) -> Exit:
    """The `exit` event of a frame or of an exec record. Raises `guest.protocol`."""
    reason = fields.text("reason", 32)
    for known in _REASONS:
        if reason == known:
            break
    else:
        raise protocol_error("an exit event with an unknown reason")
    number = fields.opt_integer("signal_number", 0, 255)
    return Exit(
        exit_code=fields.integer("exit_code", 0, 255),
        reason=known,
        signal=fields.opt_text("signal", 32),
        signal_number=number,
        duration_ms=fields.number("duration_ms", 0.0),
        user_ms=fields.number("user_ms", 0.0),
        system_ms=fields.number("system_ms", 0.0),
        max_rss_kb=fields.integer("max_rss_kb", default=0),
        detail=fields.opt_text("detail", 2000),
        stdout_bytes=fields.integer("stdout_bytes", default=0),
        stderr_bytes=fields.integer("stderr_bytes", default=0),
        stdout_dropped=fields.integer("stdout_dropped", default=0),
        stderr_dropped=fields.integer("stderr_dropped", default=0),
        oom_kills=fields.integer("oom_kills", default=0),
    )


def _places(fields: Fields) -> tuple[int | None, int | None]:
    return fields.opt_integer("stdout_at", 0, _MAX_OFFSET), fields.opt_integer("stderr_at", 0, _MAX_OFFSET)


class FrameDecoder:
    """Turns chunks of any size into frames; keeps at most one unfinished frame (64 KiB and a header).

    `attached`: the stream is the answer to a start, so its first frame has to be `started`. The answer
    to "output from offset N" may begin with any frame but the last.
    """

    def __init__(self, *, attached: bool = True) -> None:
        self._buf = bytearray()
        self._need_started = attached
        self._may_start = True
        self._offset = 0 if attached else -1  # -1: the first frame says where it begins
        self.done = False
        """The exit frame has been decoded; nothing may follow it."""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises ClocheError `guest.protocol` on nonsense, after which
        the decoder must not be used again."""
        buf = self._buf
        buf += data
        frames: list[Frame] = []
        at = 0
        while len(buf) - at >= HEADER.size:
            kind, offset, length = HEADER.unpack_from(buf, at)
            self._check_header(kind, offset, length)
            end = at + HEADER.size + length
            if end > len(buf):
                break
            frames.append(self._decode(kind, offset, bytes(memoryview(buf)[at + HEADER.size : end])))
            at = end
        del buf[:at]
        if self.done and buf:
            raise protocol_error("bytes after the exit frame")
        return frames

    def end(self) -> None:
        """The stream has ended. Raises `guest.protocol` unless that was right after an exit frame."""
        if not self.done:
            raise protocol_error("the output ended without an exit frame")

    def _check_header(self, kind: int, offset: int, length: int) -> None:
        # Checked before the payload is there, so that a wild length never makes the buffer grow.
        if length > MAX_PAYLOAD:
            raise protocol_error("a frame that is too long")
        if kind > _HEARTBEAT:
            raise protocol_error("a frame of an unknown type")
        if self.done:
            raise protocol_error("a frame after the exit frame")
        if self._need_started and kind != _STARTED:
            raise protocol_error("output before the started frame")
        if kind == _STARTED and not self._may_start:
            raise protocol_error("a second started frame")
        # Strict, so that output which got lost on the way is never taken for complete.
        if offset > _MAX_OFFSET or (offset != self._offset and self._offset >= 0):
            raise protocol_error("an offset that does not follow")

    def _decode(self, kind: int, offset: int, payload: bytes) -> Frame:
        self._may_start = self._need_started = False
        self._offset = offset
        if kind in (STDOUT, STDERR):
            self._offset += len(payload)
            return Output(kind, offset, payload)
        if kind == _HEARTBEAT:
            if payload:
                raise protocol_error("a heartbeat with a payload")
            return Heartbeat(offset)
        fields = Fields(parse_object(payload))
        if kind == _STARTED:
            return Started(fields.integer("pid", 0, 2**31), fields.integer("started_ns", default=0), *_places(fields))
        if kind == _GAP:
            count = fields.integer("bytes", 0, _MAX_OFFSET)
            gap = Gap(fields.integer("stream", 0, 2), offset, count, *_places(fields))
            self._offset += gap.bytes
            return gap
        self.done = True
        return parse_exit(fields)


def encode_frame(frame: Frame, offset: int = 0) -> bytes:
    """The bytes of a frame, for fakes and tests. `offset` is used for frames that carry none.

    Raises ValueError when the payload is longer than a frame may be.
    """
    if isinstance(frame, Output):
        return _pack(frame.stream, frame.offset, frame.data)
    if isinstance(frame, Heartbeat):
        return _pack(_HEARTBEAT, frame.offset, b"")
    if isinstance(frame, Gap):
        gap = {name: value for name, value in frame._asdict().items() if value is not None and name != "offset"}
        return _pack(_GAP, frame.offset, json.dumps(gap).encode())
    kind = _STARTED if isinstance(frame, Started) else _EXIT
    event = {name: value for name, value in frame._asdict().items() if value is not None}
    return _pack(kind, offset, json.dumps(event).encode())


def _pack(kind: int, offset: int, payload: bytes) -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise ValueError("the payload of a frame is at most 65536 bytes")
    return HEADER.pack(kind, offset, len(payload)) + payload
