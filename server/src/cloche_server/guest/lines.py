"""Answers of the agent that come as lines of JSON, one object each, for as long as there is something to say."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

from .errors import protocol_error
from .fields import Fields, parse_object
from .h2stream import Response

#: Bytes of one line: a match with forty lines around it, all of them escaped, has fewer.
LINE_MAX: Final = 1024 * 1024


async def json_lines(response: Response, idle_timeout: float) -> AsyncGenerator[Fields, None]:
    """The objects, without the beats that only fill a silence. The reader's pace is the agent's.

    `idle_timeout`: seconds of silence. Raises `guest.protocol` on what is not such a line, and what `next_chunk` does.
    """
    rest = bytearray()
    try:
        while (chunk := await response.next_chunk(idle_timeout)) is not None:
            begin = 0
            rest += chunk
            while (end := rest.find(b"\n", begin)) >= 0:
                line = bytes(rest[begin:end])
                begin = end + 1
                found = Fields(parse_object(line))
                if found.raw("type") != "beat":
                    yield found
            del rest[:begin]
            if len(rest) > LINE_MAX:
                raise protocol_error("a line that is too long")
        if rest:
            raise protocol_error("a line without its end")
    finally:
        await response.aclose()
