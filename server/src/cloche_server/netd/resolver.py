"""Names for guests: what arrives at the slot's resolver, over UDP and TCP, whichever resolver the guest meant.

A guest's bytes are read and dropped; answers are made anew from what was found, so nothing passes through as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any, Final

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from cloche_server.core.names import canonical_name
from cloche_server.core.policy import Decision, Outcome
from cloche_server.netd.lookup import AAAA, A, Busy, Found
from cloche_server.netd.upstream import UpstreamFailed

if TYPE_CHECKING:
    from cloche_server.netd.session import Session

#: Kinds that hold hints for ECH and HTTP/3; an empty answer makes a client go without.
_HINTS: Final = frozenset({dns.rdatatype.HTTPS, dns.rdatatype.SVCB})
_HEADER: Final = 12
_PLAIN_SIZE: Final = 512
_PAYLOAD: Final = 1232
#: Members come and go (seconds).
GROUP_TTL: Final = 1
_TCP_IDLE: Final = 10.0
_TCP_QUESTIONS: Final = 100
_MAX_DATAGRAM: Final = 4096
_AT_ONCE: Final = 128


async def answer(session: Session, wire: bytes, *, tcp: bool = False) -> bytes | None:
    """The answer to one message of a guest; None where there is none to give."""
    if len(wire) < _HEADER or wire[2] & 0x80:
        return None
    if wire[2] >> 3 & 15 != dns.opcode.QUERY:
        return _bare(wire, dns.rcode.NOTIMP)
    try:
        query = dns.message.from_wire(wire, ignore_trailing=False, question_only=False)
    except (dns.exception.DNSException, ValueError, IndexError, OverflowError):
        return _bare(wire, dns.rcode.FORMERR)
    if len(query.question) != 1:
        return _bare(wire, dns.rcode.FORMERR)
    response = _response(query)
    await _fill(session, response)
    limit = 65535 if tcp else (min(max(query.payload, _PLAIN_SIZE), _PAYLOAD) if query.edns >= 0 else _PLAIN_SIZE)
    return _encode(response, limit)


def _bare(wire: bytes, rcode: dns.rcode.Rcode) -> bytes:
    """A header alone, for what cannot be read."""
    return wire[:2] + bytes((0x80 | (wire[2] & 0x79), 0x80 | int(rcode))) + bytes(8)


def _response(query: dns.message.Message) -> dns.message.Message:
    response = dns.message.QueryMessage(id=query.id)
    response.flags = dns.flags.QR | dns.flags.RA | (query.flags & dns.flags.RD)
    response.question = list(query.question)
    if query.edns >= 0:
        response.use_edns(0, payload=_PAYLOAD)
    return response


def _encode(response: dns.message.Message, limit: int) -> bytes:
    with contextlib.suppress(dns.exception.TooBig):
        return response.to_wire(max_size=limit)
    response.flags |= dns.flags.TC
    response.answer.clear()
    return response.to_wire(max_size=max(limit, _PAYLOAD))


async def _fill(session: Session, response: dns.message.Message) -> None:
    question = response.question[0]
    text = question.name.to_text(omit_final_dot=True)
    name = canonical_name(text)
    if name is not None and question.rdclass == dns.rdataclass.IN and _fill_group(session, response, name):
        return
    decision = _judge(session, name, question.rdclass, question.rdtype)
    if not decision.allowed or name is None:
        session.record_name(text, decision)
        response.set_rcode(dns.rcode.REFUSED)
        return
    if question.rdtype in _HINTS:
        return
    try:
        found = await session.lookups.find(name, question.rdtype)
    except Busy:
        session.record_name(text, Decision(Outcome.DENY, "limit", "the sandbox asks for too many names at once"))
        response.set_rcode(dns.rcode.REFUSED)
        return
    except UpstreamFailed as error:
        session.record_name(text, Decision(Outcome.DENY, "upstream", str(error)))
        response.set_rcode(dns.rcode.SERVFAIL)
        return
    if found.stripped and not found.addresses:
        decision = Decision(Outcome.DENY, "private-address", "the name has addresses only that are not public")
    session.record_name(text, decision)
    if session.policy.decide_name(name).allowed:  # the policy may have changed meanwhile
        _put(response, question.name, question.rdtype, found)
    else:
        response.set_rcode(dns.rcode.REFUSED)


def _fill_group(session: Session, response: dns.message.Message, name: str) -> bool:
    """Answers for members of the sandbox's group; whatever else is in its zone does not exist. Nobody is asked."""
    groups, sandbox = session.shared.groups, session.sandbox
    member = groups.named(sandbox, name)
    if member is None and not groups.owns(sandbox, name):
        return False
    if member is None:
        session.record_name(name, Decision(Outcome.DENY, "group", "the network group has no such member"))
        response.set_rcode(dns.rcode.NXDOMAIN)
        return True
    session.record_name(name, Decision(Outcome.ALLOW, "group", "a member of the network group of the sandbox"))
    question = response.question[0]
    if question.rdtype == A:
        response.answer.append(dns.rrset.from_text(question.name, GROUP_TTL, "IN", "A", member.address))
    return True


def _judge(
    session: Session, name: str | None, rdclass: dns.rdataclass.RdataClass, kind: dns.rdatatype.RdataType
) -> Decision:
    if name is None or rdclass != dns.rdataclass.IN:
        return Decision(Outcome.DENY, "no-name", "this is not the name of a host")
    decision = session.policy.decide_name(name)
    if not decision.allowed or kind in _HINTS:
        return decision
    return session.lookups.permits_kind(name, kind) or decision


def _put(response: dns.message.Message, asked: dns.name.Name, kind: dns.rdatatype.RdataType, found: Found) -> None:
    response.set_rcode(found.rcode)
    if kind in {A, AAAA} and not found.addresses and found.stripped:
        return
    name = asked
    for _, target in found.chain:
        response.answer.append(dns.rrset.from_text(name, found.ttl, "IN", "CNAME", target.to_text()))
        name = target
    if found.addresses:
        texts = [str(address) for address in found.addresses]
        response.answer.append(dns.rrset.from_text_list(name, found.ttl, "IN", kind, texts))
    for rrset in found.records:
        copied = dns.rrset.from_rdata_list(name, found.ttl, list(rrset))
        response.answer.append(copied)


# ------------------------------------------------------------------ transports


async def serve_tcp(session: Session, sock: socket.socket) -> None:
    """DNS over TCP, as far as a guest needs it; the caller closes the socket."""
    loop = asyncio.get_running_loop()
    for _ in range(_TCP_QUESTIONS):
        async with asyncio.timeout(_TCP_IDLE):
            length = int.from_bytes(await _exactly(sock, 2), "big")
            wire = await _exactly(sock, length)
            made = await answer(session, wire, tcp=True)
            if made is None:
                return
            await loop.sock_sendall(sock, len(made).to_bytes(2, "big") + made)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise ConnectionError("the guest has ended the connection")
        data += part
    return data


class UdpResolver:
    """The two UDP sockets of one slot. `tasks` owns the questions that are under way."""

    def __init__(self, session: Session, socks: tuple[socket.socket, ...], tasks: asyncio.TaskGroup) -> None:
        self._session = session
        self._socks = socks
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        for sock in socks:
            sock.setblocking(False)
            self._loop.add_reader(sock.fileno(), self._receive, sock)

    def _receive(self, sock: socket.socket) -> None:
        for _ in range(16):
            try:
                wire, sender = sock.recvfrom(_MAX_DATAGRAM)
            except OSError:
                return
            if len(self._running) < _AT_ONCE:  # more of them are lost, as datagrams are
                task = self._tasks.create_task(self._answer(sock, wire, sender))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _answer(self, sock: socket.socket, wire: bytes, sender: tuple[Any, ...]) -> None:
        try:
            made = await answer(self._session, wire)
            if made is not None:
                sock.sendto(made, sender)
        except OSError:
            pass  # the guest does not listen any more
        except Exception as error:  # noqa: BLE001 - whatever a question does, it ends none of the others
            self._session.shared.report_failure("a question", error)

    def close(self) -> None:
        for sock in self._socks:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())
            sock.close()
        for task in self._running:
            task.cancel()
