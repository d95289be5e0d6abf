"""The link of one sandbox, made when it is needed, and plain calls over it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from ..core.errors import ClocheError
from .errors import CallContext, LinkLost, StreamBroken, agent_error, protocol_error
from .fields import parse_json
from .h2link import Link, Response
from .h2stream import Stream

CALL_SECONDS: Final = 30.0
ANSWER_MAX: Final = 256 * 1024
"""Bytes of an ordinary JSON answer; decoding more would hold up the event loop, honest ones have far less."""
_ERROR_MAX: Final = 64 * 1024
_JSON_TYPE: Final = (("content-type", "application/json"),)


def to_json(value: object) -> bytes:
    """JSON in UTF-8. Raises `request.invalid` for text that has no UTF-8 form (lone surrogates)."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError:
        raise ClocheError("request.invalid", "A text of the request is not valid Unicode.") from None


class Caller:
    """Holds at most one link and connects when a call needs it; concurrent calls share one attempt.

    A lost link fails the calls that were on it; the next call connects again. Only a call that the agent
    cannot have begun is sent a second time.
    """

    def __init__(self, path: str, *, connect_timeout: float = 10.0) -> None:
        """`path`: the Unix socket of the sandbox's agent port. `connect_timeout` in seconds."""
        self._path = path
        self.connect_timeout: Final = connect_timeout
        self._link: Link | None = None
        self._lock = asyncio.Lock()
        self._attempts = 0
        self._closed = False
        #: Tunnels that have ended, of which the last bytes are under way.
        self.lingering: set[Stream] = set()

    @property
    def link(self) -> Link | None:
        """The present link, None before the first and after a lost one."""
        return self._link if self._link is not None and self._link.is_open else None

    async def connect(self, timeout: float | None = None) -> Link:
        """Make sure that there is a link. Raises LinkLost. `timeout`: seconds, default `connect_timeout`."""
        if self._link is not None and self._link.is_open:
            return self._link
        seconds = self.connect_timeout if timeout is None else timeout
        seen = self._attempts
        try:
            async with asyncio.timeout(seconds), self._lock:
                if self._closed:
                    raise LinkLost("the client was closed", not_run=True)
                if self._link is not None and self._link.is_open:
                    return self._link
                if self._attempts != seen:
                    # Those who waited for an attempt share its failure; else each would wait for its own.
                    raise LinkLost("an attempt to connect has just failed", not_run=True)
                return await self._make(seconds)
        except TimeoutError:
            raise LinkLost(f"it did not answer within {seconds:g} seconds", not_run=True) from None

    async def _make(self, seconds: float) -> Link:
        try:
            link = await Link.connect(self._path, timeout=seconds)
        except LinkLost:
            self._attempts += 1
            raise
        if self._closed:
            await link.aclose()
            raise LinkLost("the client was closed", not_run=True)
        self._link = link
        return link

    async def aclose(self) -> None:
        """End the link; calls under way fail with LinkLost and later ones too. May be called twice.

        An attempt to connect that is under way is left to its caller and comes to nothing.
        """
        self._closed = True
        if self._link is not None:
            await self._link.aclose()

    async def open(
        self,
        method: str,
        path: str,
        ctx: CallContext,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Sequence[tuple[str, str]] = (),
        body: bytes | AsyncIterator[bytes] | None = None,
        timeout: float = CALL_SECONDS,
    ) -> Response:
        """Make a call and return its answer, unread; an error answer is raised as ClocheError."""
        for again in (True, False):
            link = await self.connect(min(timeout, self.connect_timeout))
            try:
                response = await link.request(method, path, query=query, headers=headers, body=body, timeout=timeout)
                break
            except (LinkLost, StreamBroken) as error:
                if not (again and error.not_run and (body is None or isinstance(body, bytes))):
                    raise
        if response.status >= 400:
            raise agent_error(response.status, await _error_body(response, timeout), ctx)
        if not 200 <= response.status < 300 or not response.sent_all:
            await response.aclose()
            raise protocol_error("an answer that does not fit the call")
        return response

    async def duplex(
        self, path: str, ctx: CallContext, *, query: Sequence[tuple[str, str]], most: int, timeout: float = CALL_SECONDS
    ) -> tuple[Stream, Response]:
        """A call whose body and answer go on side by side, see `Link.duplex`; error answers are raised as in `open`."""
        target = path + "?" + "&".join(f"{name}={value}" for name, value in query) if query else path
        for again in (True, False):
            link = await self.connect(min(timeout, self.connect_timeout))
            try:
                stream, response = await link.duplex(target, most, timeout)
                break
            except (LinkLost, StreamBroken) as error:
                if not (again and error.not_run):
                    raise
        try:
            if response.status >= 400:
                raise agent_error(response.status, await _error_body(response, timeout), ctx)
            if response.status != 200:
                raise protocol_error("an answer that does not fit the call")
        except BaseException:
            await response.aclose()
            raise
        return stream, response

    async def call(
        self,
        method: str,
        path: str,
        ctx: CallContext,
        *,
        query: Sequence[tuple[str, str]] = (),
        json_body: object = None,
        timeout: float = CALL_SECONDS,
        limit: int = ANSWER_MAX,
    ) -> Any:
        """A call with JSON both ways; None for an empty answer (204). `limit`: bytes of the answer."""
        response = await self.open_json(method, path, ctx, query=query, json_body=json_body, timeout=timeout)
        return await self.read_json(response, limit=limit, timeout=timeout)

    async def open_json(
        self,
        method: str,
        path: str,
        ctx: CallContext,
        *,
        query: Sequence[tuple[str, str]] = (),
        json_body: object = None,
        timeout: float = CALL_SECONDS,
    ) -> Response:
        """As `open`, with a JSON body unless that is None."""
        body = None if json_body is None else to_json(json_body)
        headers = () if body is None else _JSON_TYPE
        return await self.open(method, path, ctx, query=query, headers=headers, body=body, timeout=timeout)

    async def read_json(self, response: Response, *, limit: int = ANSWER_MAX, timeout: float = CALL_SECONDS) -> Any:
        """The JSON of an answer, None if its body is empty."""
        data = await response.read(limit, timeout=timeout)
        return parse_json(data) if data else None


async def _error_body(response: Response, timeout: float) -> object:
    try:
        return parse_json(await response.read(_ERROR_MAX, timeout=timeout))
    except (StreamBroken, ClocheError) as error:
        if isinstance(error, LinkLost):
            raise
        return None
