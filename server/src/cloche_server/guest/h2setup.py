"""The HTTP/2 library, set up for a guest: nothing it keeps is without a bound."""

from __future__ import annotations

from typing import Final

import h2.config
import h2.connection
import h2.exceptions
import h2.settings
from h2.frame_buffer import FrameBuffer
from hpack.exceptions import HPACKError
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import DataFrame, Frame

from .h2stream import STREAM_WINDOW

CONNECTION_WINDOW: Final = 64 * 1024 * 1024
"""Bytes that may be under way on all streams together; it only has to be more than the line holds."""

# With its head as long as two of the pieces that the driver in the guest takes at once: without, the head of every full
# frame would be a third one.
MAX_FRAME: Final = 65536 - 9
_HEADER_LIST: Final = 16384

# What the HTTP/2 library may raise on hostile input; not all of its checks use its own errors.
REFUSALS: Final = (
    h2.exceptions.H2Error,
    HPACKError,
    HyperframeError,
    ValueError,
    LookupError,
    TypeError,
    AssertionError,
)


class Connection(h2.connection.H2Connection):
    """The library's connection with smaller memories."""

    # Only frames under way at a reset meet a closed stream; the default of 65536 records costs 10 MB a link.
    MAX_CLOSED_STREAMS = 4096
    DEFAULT_MAX_HEADER_LIST_SIZE = _HEADER_LIST


class _LeanData(DataFrame):
    # The library forms the text of every frame for a log that nobody reads; for DATA that means the whole
    # payload in hexadecimal, which is most of the cost of receiving it.
    def __repr__(self) -> str:
        return "DataFrame"


class _LeanBuffer(FrameBuffer):
    def __next__(self) -> Frame:
        frame = super().__next__()
        if frame.__class__ is DataFrame:
            frame.__class__ = _LeanData
        return frame


def _make_lean(conn: Connection) -> None:
    # Relies on an inner table of the library; a version without it merely stays as slow as it is.
    table = getattr(conn, "_frame_dispatch_table", None)
    if isinstance(table, dict) and DataFrame in table:
        table[_LeanData] = table[DataFrame]
        conn.incoming_buffer = _LeanBuffer(server=False)


def new_connection() -> Connection:
    """A connection with our settings; the preface is in its output. Whatever it sends is bounded by them."""
    code = h2.settings.SettingCodes
    config = h2.config.H2Configuration(
        client_side=True,
        header_encoding=None,
        validate_outbound_headers=False,  # they are made in this file
        normalize_outbound_headers=False,
    )
    conn = Connection(config)
    conn.local_settings = h2.settings.Settings(
        client=True,
        initial_values={
            code.ENABLE_PUSH: 0,
            # Not 0, though the agent opens none: the library counts the head of an answer to a call that was reset, and
            # whose stream it has forgotten since, as the opening of one, and would end the link for all calls on it.
            code.MAX_CONCURRENT_STREAMS: 1,
            code.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            code.MAX_FRAME_SIZE: MAX_FRAME,
            code.MAX_HEADER_LIST_SIZE: _HEADER_LIST,
        },
    )
    _make_lean(conn)
    conn.max_inbound_frame_size = MAX_FRAME
    conn.initiate_connection()
    conn.increment_flow_control_window(CONNECTION_WINDOW - 65535)
    return conn


class FrameGuard:
    """Follows the frame boundaries of the input and refuses a frame that is too long at its header.

    The library checks that only when the whole frame is there, so it would gather 16 MiB first.
    """

    __slots__ = ("_head", "_skip")

    def __init__(self) -> None:
        self._head = b""
        self._skip = 0

    def accepts(self, data: memoryview) -> bool:
        """Whether every frame that begins in `data`, the next part of the input, has a legal length."""
        at, size = 0, len(data)
        while True:
            step = min(self._skip, size - at)
            self._skip -= step
            at += step
            if self._skip:
                return True
            need = 9 - len(self._head)
            self._head += data[at : at + need]
            at += need
            if len(self._head) < 9:
                return True
            self._skip = int.from_bytes(self._head[:3], "big")
            self._head = b""
            if self._skip > MAX_FRAME:
                return False
