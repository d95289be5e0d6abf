"""The input of a command as one long call: bytes go out as long as there are any, and none waits for an answer."""

from __future__ import annotations

from typing import Final

from ..core.errors import ClocheError
from .h2stream import Response, Stream

#: Bytes that may be under way to one command that does not read, and to one that moves files. The agent holds them in
#: the guest's memory.
IN_FLIGHT: Final = 256 * 1024
IN_FLIGHT_OF_FILES: Final = 1024 * 1024


class GuestFeed:
    """Make it with `GuestClient.process_feed`, and always `close` it."""

    def __init__(self, stream: Stream, response: Response) -> None:
        self._stream = stream
        self._response = response

    async def write(self, data: bytes) -> bool:
        """Waits while much is under way. False: the command takes no more. Raises LinkLost, StreamBroken."""
        try:
            if not self._stream.ended:
                await self._stream.send(data)
        except ClocheError:
            if not self._stream.ended:
                raise
        return not self._stream.ended

    def finish(self) -> None:
        """The end of the input, behind all that was written."""
        if not self._stream.closed:
            self._stream.finish()

    def close(self) -> None:
        """What is still under way may be lost, unless the command has taken it all."""
        self._response.close()
