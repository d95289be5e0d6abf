"""One request and its answer: judged, then streamed both ways at once."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, Final

import h11

from cloche_server.core.network import SecretPlace
from cloche_server.netd.flow import Verdict
from cloche_server.netd.http.judge import MAX_PUT_BODY, BodyRewriter, Headers, Judge, body_spelling
from cloche_server.netd.http.link import Link
from cloche_server.netd.http.refusal import Refusal, unusable, upstream_failed, upstream_tls
from cloche_server.netd.http.request import Asked, sent_headers
from cloche_server.netd.http.strip import BodyStripper, Stripper

if TYPE_CHECKING:
    from cloche_server.netd.http.engine import Session

#: A request body that stands still, and a server that says nothing, are waited for so long (seconds).
BODY_SECONDS: Final = 300.0
ANSWER_SECONDS: Final = 3600.0
#: Credentials that hold for the connection they were sent on, and not for the request alone.
_CREDENTIALS: Final = frozenset({b"authorization", b"proxy-authorization"})
_BINDING: Final = (b"ntlm", b"negotiate")
#: What changes nothing, by its definition (RFC 9110).
_SAFE: Final = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_ALLOWED: Final = Verdict(True, "secret", "the value of a secret was put into the request")


class Broken(ConnectionError):
    """The other side has gone in the middle, and no answer can say so any more."""


class Exchange:
    """`switched`: the server has agreed to another protocol, and it was spoken to its end."""

    def __init__(self, session: Session, request: h11.Request, asked: Asked) -> None:
        self.switched = False
        self._session = session
        self._guest = session.guest
        self._request = request
        self._asked = asked
        carrier, target = session.carrier, session.target
        self._judge = Judge(carrier.grants, asked, secure=target.tls, secret=carrier.secret)
        fields = dict(request.headers)
        self._type = fields.get(b"content-type", b"")
        self._length = None if b"transfer-encoding" in fields else int(fields.get(b"content-length", b"0"))
        self._rewriter: BodyRewriter | None = None
        self._stripper = Stripper((), self._judge.put)
        self._answered = False
        self._server_spoke = False
        self._reused = self._waited = False
        self._noted: set[str] = set()

    @property
    def _has_body(self) -> bool:
        return self._length is None or self._length > 0

    async def run(self) -> None:
        """Raises `Refusal` when nothing of an answer was sent to the guest, OSError when its connection is of no use
        any more."""
        session, asked = self._session, self._asked
        carrier, target = session.carrier, session.target
        verdict = carrier.decide_request(target, asked.host, asked.method, asked.path)
        if not verdict.allowed:
            raise Refusal(403, "network.denied", verdict.reason, rule=verdict.rule, host=asked.host)
        with contextlib.ExitStack() as kept:
            head, body = await self._prepare(kept)
            await self._send(verdict, head, body)

    async def _send(self, verdict: Verdict, head: h11.Request, body: bytes | None) -> None:
        session, asked = self._session, self._asked
        carrier, target = session.carrier, session.target
        carrier.note(target, "http", verdict, host=asked.host, method=asked.method, path=asked.path)
        self._note_put()
        if any(value[:9].lower().startswith(_BINDING) for name, value in self._request.headers if name in _CREDENTIALS):
            session.servers.mark_own()
        self._reused = session.servers.has(asked.host)
        server, self._waited = await session.servers.get(asked.host, waiting=self._repeatable)
        try:
            await self._ask(server, head, body)
        except _Closed:
            # It had waited for too long. The guest knows nothing of it, and nothing can have come of the request.
            session.servers.drop()
            self._waited = False
            server, _ = await session.servers.get(asked.host, waiting=False)
            await self._ask(server, head, b"")
        self._note_put()
        if self.switched:
            await self._pass(server)

    async def _ask(self, server: Link, head: h11.Request, body: bytes | None) -> None:
        """`body` None: it comes from the guest."""
        with contextlib.suppress(OSError):  # its answer may be there all the same
            await server.send(head)
        if body is not None:
            with contextlib.suppress(OSError):
                await server.send(*([h11.Data(data=body)] if body else []), h11.EndOfMessage())
        await self._carry(server, body is None)

    @property
    def _repeatable(self) -> bool:
        """It may be sent once more when a server closes a connection that has waited: it changes nothing, and there is
        no body that is gone."""
        return self._request.method in _SAFE and not self._has_body

    # -------------------------------------------------------------- the request

    async def _prepare(self, kept: contextlib.ExitStack) -> tuple[h11.Request, bytes | None]:
        """The head that goes on, and the body when it had to be read whole: `kept` ends when it is not needed any
        more. Raises `Refusal`."""
        judge = self._judge
        target, headers = judge.target(), judge.headers(sent_headers(self._request))
        body = None
        puts_in_body = self._has_body and judge.may_put_in_body
        if puts_in_body and self._length is not None and self._length <= MAX_PUT_BODY:
            kept.enter_context(self._session.room(self._length))
            body = judge.rewrite(await self._whole_body(), SecretPlace.BODY, body_spelling(self._type))
            headers = [(name, value) for name, value in headers if name.lower() != b"expect"]
            headers = _replaced(headers, b"Content-Length", b"%d" % len(body))
        elif self._has_body and judge.grants:
            self._rewriter = BodyRewriter(judge, self._type, fixed=self._length is not None)
        self._stripper = Stripper(judge.values(), judge.put)
        if judge.put.any or puts_in_body:
            # An echo of the value could not be seen in a compressed answer.
            headers = _replaced(headers, b"Accept-Encoding", b"identity")
        try:
            return h11.Request(method=self._request.method, target=target, headers=headers), body
        except h11.LocalProtocolError:
            # Its message holds what is wrong: the value.
            sentence = "the value of a secret has characters that cannot be where it was asked for"
            raise unusable("", self._asked.host, sentence) from None

    async def _whole_body(self) -> bytes:
        guest, parts = self._guest, []
        if guest.http.they_are_waiting_for_100_continue:
            await guest.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        while isinstance(event := await guest.next_event(BODY_SECONDS), h11.Data):
            await self._session.carrier.pace(len(event.data), 0)
            parts.append(bytes(event.data))
        if not isinstance(event, h11.EndOfMessage):
            raise Broken
        return b"".join(parts)

    async def _upload(self, server: Link) -> None:
        """The body, as it comes. Raises `Refusal` for a placeholder, before anything of it was sent."""
        guest, rewriter = self._guest, self._rewriter
        with contextlib.suppress(_ServerGone):
            while isinstance(event := await guest.next_event(BODY_SECONDS), h11.Data):
                data = bytes(event.data)
                await self._session.carrier.pace(len(data), 0)
                await self._to_server(server, h11.Data(data=data if rewriter is None else rewriter.feed(data)))
            if not isinstance(event, h11.EndOfMessage):
                raise Broken
            rest = b"" if rewriter is None else rewriter.finish()
            trailers = self._judge.trailers(event.headers.raw_items())
            await self._to_server(server, h11.Data(data=rest), h11.EndOfMessage(headers=trailers))

    async def _to_server(self, server: Link, *events: h11.Event) -> None:
        sent = [event for event in events if not isinstance(event, h11.Data) or event.data]
        try:
            await server.send(*sent)
        except OSError:
            raise _ServerGone from None
        self._session.servers.count()

    # -------------------------------------------------------------- both ways

    async def _carry(self, server: Link, upload: bool) -> None:
        try:
            if upload and not self._has_body:
                await self._upload(server)
                upload = False
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._watch())]
                if upload:
                    tasks.append(group.create_task(self._upload(server)))
                await self._download(server)
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as several:
            raise _first(several) from None

    async def _watch(self) -> None:
        """A guest that has gone waits for no answer."""
        await self._guest.wait_lost()
        raise Broken

    async def _download(self, server: Link) -> None:
        guest, stripper, stripped = self._guest, self._stripper, None
        while True:
            event = await self._from_server(server)
            if isinstance(event, h11.InformationalResponse):
                if await self._informed(event):
                    return
            elif isinstance(event, h11.Response):
                self._answered = True
                stripped = await self._begin_answer(event)
            elif isinstance(event, h11.Data):
                data = bytes(event.data)
                await self._session.carrier.pace(0, len(data))
                if data := data if stripped is None else stripped.feed(data):
                    await guest.send(h11.Data(data=data))
                self._session.servers.count()
            elif isinstance(event, h11.EndOfMessage):
                rest = b"" if stripped is None else stripped.finish()
                trailers = (
                    stripper.headers(event.headers.raw_items()) if guest.http.their_http_version == b"1.1" else []
                )
                last: list[h11.Event] = [h11.Data(data=rest)] if rest else []
                await guest.send(*last, h11.EndOfMessage(headers=trailers))
                return
            else:
                raise self._server_gone()

    async def _from_server(self, server: Link) -> h11.Event:
        try:
            event: h11.Event = await server.next_event(ANSWER_SECONDS)
        except TimeoutError:
            if self._answered:
                raise Broken from None
            raise Refusal(
                504, "network.upstream_failed", "the server has not answered", host=self._asked.host
            ) from None
        except (OSError, h11.RemoteProtocolError) as error:
            if isinstance(error, ssl.SSLError) and not self._server_spoke and not self._waited:
                # In TLS 1.3 a server that wants a certificate says so only now.
                raise upstream_tls(self._asked.host, error.reason or "") from None
            self._server_spoke = self._server_spoke or bool(server.http.trailing_data[0])
            raise self._server_gone() from None
        if isinstance(event, h11.ConnectionClosed):
            raise self._server_gone()
        self._server_spoke = True
        return event

    def _server_gone(self) -> Exception:
        if self._waited and not self._server_spoke:
            return _Closed()
        if self._answered or (self._reused and not self._server_spoke):
            # A kept connection that ends when it is used again: the guest sees what it would have seen without us,
            # and knows whether it may send the request once more.
            return Broken()
        return upstream_failed(self._asked.host, "the server has closed the connection without a whole answer")

    async def _informed(self, event: h11.InformationalResponse) -> bool:
        """True: the server has switched to another protocol."""
        if self._guest.http.their_http_version == b"1.1":
            headers = self._stripper.headers(event.headers.raw_items())
            await self._guest.send(
                h11.InformationalResponse(status_code=event.status_code, headers=headers, reason=event.reason)
            )
        self.switched = event.status_code == 101
        return self.switched

    async def _begin_answer(self, event: h11.Response) -> BodyStripper | None:
        guest, stripper = self._guest, self._stripper
        headers = stripper.headers(event.headers.raw_items())
        fields = dict(event.headers)
        if b"transfer-encoding" in fields:
            headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
        reason = stripper.reason(bytes(event.reason))
        answer = h11.Response(status_code=event.status_code, headers=headers, reason=reason)
        written = guest.http.send(answer) or b""
        if not self._reframed(event):
            # h11 puts headers of framing last, and says how it frames a body that does not come.
            lines = [b"HTTP/1.1 %d %s" % (event.status_code, reason), *(b"%s: %s" % field for field in headers)]
            written = b"\r\n".join([*lines, b"", b""])
        await guest.write(written)
        if self._request.method == b"HEAD":
            return None
        encoded = fields.get(b"content-encoding", b"identity").lower() != b"identity"
        if encoded or not stripper:
            return None
        return stripper.body(fixed=b"content-length" in fields and b"transfer-encoding" not in fields)

    def _reframed(self, event: h11.Response) -> bool:
        """The guest gets the body in another framing than the server sent it in."""
        bodiless = self._request.method == b"HEAD" or event.status_code in (204, 304)
        framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in event.headers)
        return not bodiless and (not framed or self._guest.http.their_http_version != b"1.1")

    # -------------------------------------------------------------- after a switch

    async def _pass(self, server: Link) -> None:
        """Bytes in both directions, until both have ended; in TLS, where there are no halves, until one has."""
        guest = self._guest
        with contextlib.suppress(OSError):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(guest, server, up=True))
                    group.create_task(self._pump(server, guest, up=False))
            except BaseExceptionGroup as several:
                raise _first(several) from None

    async def _pump(self, source: Link, sink: Link, *, up: bool) -> None:
        data = bytes(source.http.trailing_data[0])
        while data or (data := await source.read()):
            await self._session.carrier.pace(len(data) if up else 0, 0 if up else len(data))
            await sink.write(data)
            self._session.servers.count()
            data = b""
        if not sink.end_writing():
            raise Broken

    def _note_put(self) -> None:
        session, asked = self._session, self._asked
        for secret in [name for name in self._judge.put.secrets if name not in self._noted]:
            self._noted.add(secret)
            verdict = Verdict(True, _ALLOWED.rule, f"{_ALLOWED.reason} ({secret})")
            session.carrier.note(
                session.target, "secret", verdict, host=asked.host, method=asked.method, path=asked.path
            )


class _Closed(Exception):
    """The server has closed a connection that had waited, before it said anything on it."""


class _ServerGone(Exception):
    """The server takes nothing more; its answer may be there already."""


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception that ended all tasks of a group; what followed from it does not count."""
    for error in several.exceptions:
        if isinstance(error, Refusal):
            return error
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _replaced(headers: Headers, name: bytes, value: bytes) -> Headers:
    """With this one header of the name, where the first of it was."""
    made: Headers = []
    done = False
    for given, old in headers:
        if given.lower() != name.lower():
            made.append((given, old))
        elif not done:
            made.append((given, value))
            done = True
    return made if done else [*made, (name, value)]
