"""The output of a process for one reader, at its own pace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass

from cloche_server.app.access import Access
from cloche_server.app.entry import Entry
from cloche_server.app.exec import STREAM_NAMES, end_of, lost
from cloche_server.core.command import CommandEnd
from cloche_server.core.errors import ClocheError
from cloche_server.core.output import ChunkDecoder
from cloche_server.guest.frames import STDERR, STDOUT, Exit, Frame, Gap, Output
from cloche_server.guest.streams import ExecCall
from cloche_server.telemetry import metrics


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one stream. `at`: the bytes of that stream before these, None where that is not known. `next`: where a
    reader who has seen them goes on."""

    stream: str
    data: bytes
    at: int | None
    next: int


@dataclass(frozen=True, slots=True)
class Loss:
    """`count` bytes are missing here."""

    stream: str
    count: int
    next: int


@dataclass(frozen=True, slots=True)
class SoFar:
    """All that was there when the reader came. `next` is where to go on later."""

    next: int


@dataclass(frozen=True, slots=True)
class TextChunk:
    """As `Chunk`, in text. `next` is None where another stream is in mid-character, so that nothing but a repetition
    would be exact."""

    stream: str
    text: str
    at: int | None
    next: int | None


Item = Chunk | Loss | SoFar | CommandEnd


class ProcessStream:
    """Iterate once over `items` or `texts`, and always `aclose`. The last item is `CommandEnd`, or `SoFar` with `until`
    (an offset), or the iteration raises."""

    def __init__(
        self,
        entry: Entry,
        call: ExecCall,
        access: Access,
        stream: str | None,
        offset: int,
        encoding: str,
        until: int | None,
    ) -> None:
        self._entry = entry
        self._call = call
        self._stream = stream
        self._encoding = encoding
        self._until = until
        self._next = offset
        self._own: dict[int, int | None] = {STDOUT: None, STDERR: None}
        self._held = ExitStack()
        self._held.enter_context(access.busy(entry))

    @property
    def offset(self) -> int:
        """Where a reader who has seen all that came goes on."""
        return self._next

    async def aclose(self) -> None:
        self._held.close()
        await self._call.__aexit__(None, None, None)

    async def items(self) -> AsyncIterator[Item]:
        """Bytes as they come."""
        begun = False
        try:
            while True:
                if self._until is not None and self._next >= self._until:
                    yield SoFar(self._next)
                    return
                frame: Frame | None = await anext(self._call, None)
                if frame is None:
                    return
                if not begun:
                    begun = True
                    self._begin()
                yield self._translate(frame)
        except ClocheError as error:
            raise await lost(self._entry, error) from error

    def _begin(self) -> None:
        started = self._call.started
        if self._stream is not None:
            self._own[STDERR if self._stream == "stderr" else STDOUT] = self._next
        elif self._next == 0:
            self._own = {STDOUT: 0, STDERR: 0}
        else:
            self._own = {STDOUT: started.stdout_at, STDERR: started.stderr_at}

    def _translate(self, frame: Frame) -> Item:
        if isinstance(frame, Output):
            at = self._own[frame.stream]
            self._own[frame.stream] = None if at is None else at + len(frame.data)
            self._next = frame.offset + len(frame.data)
            self._entry.traffic.out(len(frame.data))
            return Chunk(STREAM_NAMES[frame.stream], frame.data, at, self._next)
        if isinstance(frame, Gap):
            self._next = frame.offset + frame.bytes
            if frame.stream == 0:
                self._own = {STDOUT: frame.stdout_at, STDERR: frame.stderr_at}
            else:
                at = self._own[frame.stream]
                self._own[frame.stream] = None if at is None else at + frame.bytes
            return Loss(STREAM_NAMES.get(frame.stream, "both"), frame.bytes, self._next)
        assert isinstance(frame, Exit), "an iteration gives nothing else"
        metrics.execs.labels(frame.reason).inc()
        return end_of(frame)

    async def texts(self) -> AsyncIterator[TextChunk | Loss | SoFar | CommandEnd]:
        """Text that never cuts a character, or base64."""
        decoders = {name: ChunkDecoder(self._encoding) for name in STREAM_NAMES.values()}
        async for item in self.items():
            if not isinstance(item, Chunk):
                for name, decoder in decoders.items():
                    # A character that a loss has cut stays half: what comes behind it is not its other half.
                    cut = not isinstance(item, Loss) or item.stream in (name, "both")
                    if cut and (rest := decoder.finish()):
                        yield TextChunk(name, rest, None, None if isinstance(item, Loss) else self._next)
                yield item
                continue
            decoder = decoders[item.stream]
            at = None if item.at is None else item.at - decoder.pending
            if text := decoder.feed(item.data):
                others = any(d.pending for name, d in decoders.items() if name != item.stream)
                yield TextChunk(item.stream, text, at, None if others else item.next - decoder.pending)
