"""Questions to the host's own resolvers: fresh id, port and letter case for each, answers that fit exactly, TCP when an
answer was cut."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype

#: For one question, retries included (seconds).
TIMEOUT: Final = 5.0
_TRIES: Final = (0.8, 1.2, 2.0)
_RESOLV_CONF: Final = Path("/etc/resolv.conf")
_PAYLOAD: Final = 1232
_MAX_DATAGRAM: Final = 65535


class UpstreamFailed(Exception):
    """No resolver gave an answer that can be used; the message is a sentence."""


class Upstream:
    """`servers`: addresses and ports; None: those of the host's resolv.conf, read anew when it changes."""

    def __init__(self, servers: Sequence[tuple[str, int]] | None = None) -> None:
        self.servers: Sequence[tuple[str, int]] | None = servers
        self._read_at: tuple[int, int] | None = None
        self._of_host: Sequence[tuple[str, int]] = ()

    def current(self) -> Sequence[tuple[str, int]]:
        if self.servers is not None:
            return self.servers
        with contextlib.suppress(OSError):
            status = _RESOLV_CONF.stat()
            mark = (status.st_mtime_ns, status.st_ino)
            if mark != self._read_at:
                self._of_host = parse_resolv_conf(_RESOLV_CONF.read_text("utf-8", "replace"))
                self._read_at = mark
        return self._of_host

    async def ask(self, name: dns.name.Name, kind: dns.rdatatype.RdataType) -> dns.message.Message:
        """The answer, whatever its rcode. Raises UpstreamFailed."""
        servers = self.current()
        if not servers:
            raise UpstreamFailed("the host has no resolver")
        try:
            async with asyncio.timeout(TIMEOUT):
                for number, patience in enumerate(_TRIES):
                    answer = await self._try(servers[number % len(servers)], name, kind, patience)
                    if answer is not None and answer.rcode() in {dns.rcode.NOERROR, dns.rcode.NXDOMAIN}:
                        return answer
        except TimeoutError:
            pass
        raise UpstreamFailed("the resolvers of the host gave no answer")

    async def _try(
        self, server: tuple[str, int], name: dns.name.Name, kind: dns.rdatatype.RdataType, patience: float
    ) -> dns.message.Message | None:
        query = _query(name, kind)
        try:
            async with asyncio.timeout(patience):
                answer = await _over_udp(server, query)
        except (OSError, TimeoutError):
            return None
        if not answer.flags & dns.flags.TC:
            return answer
        try:
            return await _over_tcp(server, query)
        except OSError:
            return None


def _query(name: dns.name.Name, kind: dns.rdatatype.RdataType) -> dns.message.QueryMessage:
    query = dns.message.make_query(_mixed_case(name), kind, use_edns=0, payload=_PAYLOAD)
    query.id = secrets.randbelow(65536)
    return query


def _mixed_case(name: dns.name.Name) -> dns.name.Name:
    """Each letter in a random case, which an answer has to repeat: bits that a forger has to guess."""
    bits = secrets.randbits(256)
    labels = []
    for label in name.labels:
        mixed = bytearray(label)
        for at, byte in enumerate(mixed):
            if bytes((byte,)).isalpha():
                mixed[at] = byte ^ (0x20 if bits & 1 else 0)
                bits = bits >> 1 or secrets.randbits(256)
        labels.append(bytes(mixed))
    return dns.name.Name(labels)


def answers_query(query: dns.message.Message, wire: bytes) -> dns.message.Message | None:
    """The answer to exactly this question, or None for anything else."""
    try:
        answer = dns.message.from_wire(wire, ignore_trailing=False)
    except (dns.exception.DNSException, ValueError, IndexError):
        return None
    if answer.id != query.id or not answer.flags & dns.flags.QR or answer.opcode() != query.opcode():
        return None
    if len(answer.question) != 1:
        return None
    asked, told = query.question[0], answer.question[0]
    if told.rdtype != asked.rdtype or told.rdclass != asked.rdclass or told.name.labels != asked.name.labels:
        return None
    return answer


async def _over_udp(server: tuple[str, int], query: dns.message.Message) -> dns.message.Message:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.connect(server)  # a port of its own, and datagrams of nobody else
        await loop.sock_sendall(sock, query.to_wire())
        while True:
            answer = answers_query(query, await loop.sock_recv(sock, _MAX_DATAGRAM))
            if answer is not None:
                return answer


async def _over_tcp(server: tuple[str, int], query: dns.message.Message) -> dns.message.Message | None:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, server)
        wire = query.to_wire()
        await loop.sock_sendall(sock, len(wire).to_bytes(2, "big") + wire)
        data = b""
        while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2], "big"):
            part = await loop.sock_recv(sock, _MAX_DATAGRAM)
            if not part:
                return None
            data += part
        return answers_query(query, data[2 : 2 + int.from_bytes(data[:2], "big")])


def parse_resolv_conf(text: str) -> list[tuple[str, int]]:
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            with contextlib.suppress(ValueError):
                ipaddress.ip_address(words[1])
                found.append((words[1], 53))
    return found[:3]
