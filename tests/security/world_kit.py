"""The internet of the tests: a zone with a log of its questions, hosts A and B with HTTPS, HTTP, WebSocket and echo."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
from netns_kit import inside, start_inside

T = TypeVar("T")
#: Addresses that count as public; they exist in the namespaces of the tests only.
A4, B4, DNS4, GW4 = "45.90.1.10", "45.90.2.10", "45.90.3.53", "45.90.0.1"
A6, B6 = "2a0f:9400:1::10", "2a0f:9400:2::10"
NETD4, NETD6, WORLD6 = "45.90.0.2", "2a0f:9400::2", "2a0f:9400::1"
PRIVATE4 = "10.77.0.10"
METADATA4 = "169.254.169.254"
#: On which every host sends datagrams back.
UDP_PORTS = (443, 7000)

ZONE: dict[tuple[str, str], list[str]] = {
    ("a.test", "A"): [A4],
    ("a.test", "AAAA"): [A6],
    ("www.a.test", "A"): [A4],
    ("alias.a.test", "CNAME"): ["a.test."],
    ("b.test", "A"): [B4],
    ("b.test", "AAAA"): [B6],
    ("a.test.b.test", "A"): [B4],
    ("nota.test", "A"): [B4],
    ("fronted.test", "A"): [A4],
    ("rebind.a.test", "A"): ["127.0.0.1", PRIVATE4, METADATA4, "192.168.127.1", NETD4],
    ("rebind.a.test", "AAAA"): ["::1", "fd00::10", "::ffff:127.0.0.1", "fe80::1"],
    ("mixed.a.test", "A"): [PRIVATE4, A4],
    ("toprivate.a.test", "CNAME"): ["inside.test."],
    ("inside.test", "A"): [PRIVATE4],
    ("togroup.a.test", "A"): ["198.19.7.2"],
    ("a.test", "TXT"): ["hello"],
    ("a.test", "HTTPS"): ["1 . alpn=h3,h2 ech=AEX+DQBBAAA="],
    ("big.a.test", "TXT"): ["x" * 200 for _ in range(1)],
}


@dataclass
class Log:
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line)

    def clear(self) -> None:
        self.lines.clear()


class World:
    """Servers on threads in one namespace. `a` and `b`: what reached the hosts; `zone`: names that were asked for."""

    def __init__(self, namespace: str, where: Path) -> None:
        self.namespace = namespace
        self.a, self.b, self.zone, self.other = Log(), Log(), Log(), Log()
        self._socks: list[socket.socket] = []
        self.ca = where / "ca.pem"
        make_certificates(where)
        for log, name, addresses in (
            (self.a, "a", (A4, A6)),
            (self.b, "b", (B4, B6)),
            (self.other, "b", (PRIVATE4, METADATA4, NETD4_INNER)),
        ):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(where / f"{name}.pem", where / f"{name}.key")
            context.set_alpn_protocols(["http/1.1"])
            for address in addresses:
                for port, tls in ((80, None), (443, context), (8443, context), (8080, None), (22, None), (7000, None)):
                    self._serve(address, port, tls, log)
                for port in UDP_PORTS:
                    self._echo_datagrams(address, port, log)
        self._serve_dns()

    def _listen(self, address: str, port: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
        def make() -> socket.socket:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            if kind == socket.SOCK_STREAM:
                sock.listen(256)
            return sock

        sock = inside(self.namespace, make)
        self._socks.append(sock)
        return sock

    def _serve(self, address: str, port: int, tls: ssl.SSLContext | None, log: Log) -> None:
        sock = self._listen(address, port)

        def accept() -> None:
            while True:
                try:
                    peer, _ = sock.accept()
                except OSError:
                    return
                log.add(f"accept {address} {port}")
                threading.Thread(target=self._talk, args=(peer, port, tls, log), daemon=True).start()

        start_inside(self.namespace, accept)

    def _talk(self, peer: socket.socket, port: int, tls: ssl.SSLContext | None, log: Log) -> None:
        with contextlib.suppress(OSError, ssl.SSLError, ValueError):
            peer.settimeout(20)
            if tls is not None:
                peer = tls.wrap_socket(peer, server_side=True)
            if port == 22:
                peer.sendall(b"SSH-2.0-test\r\n")
                log.add("ssh " + repr(peer.recv(100)))
            elif port == 7000:
                echo(peer)
            else:
                talk_http(peer, log)
        peer.close()

    def inside(self, work: Callable[[], T]) -> T:
        return inside(self.namespace, work)

    def _echo_datagrams(self, address: str, port: int, log: Log) -> None:
        sock = self._listen(address, port, socket.SOCK_DGRAM)

        def serve() -> None:
            while True:
                try:
                    payload, sender = sock.recvfrom(65536)
                    if sender is None:  # it was shut down
                        return
                    log.add(f"datagram {address} {port}")
                    sock.sendto(payload, sender)
                except OSError:
                    return

        start_inside(self.namespace, serve)

    def _serve_dns(self) -> None:
        udp = self._listen(DNS4, 53, socket.SOCK_DGRAM)
        tcp = self._listen(DNS4, 53)

        def datagrams() -> None:
            while True:
                try:
                    wire, sender = udp.recvfrom(4096)
                    if not wire:
                        return
                    udp.sendto(self.resolve(wire, 1232), sender)
                except OSError:
                    return

        def streams() -> None:
            while True:
                try:
                    peer, _ = tcp.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), peer:
                    peer.settimeout(5)
                    length = int.from_bytes(peer.recv(2), "big")
                    made = self.resolve(peer.recv(length), 65535)
                    peer.sendall(len(made).to_bytes(2, "big") + made)

        start_inside(self.namespace, datagrams)
        start_inside(self.namespace, streams)

    def resolve(self, wire: bytes, limit: int) -> bytes:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        self.zone.add(f"{name} {kind}")
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        owner = question.name
        for _ in range(4):
            alias = ZONE.get((name, "CNAME"))
            if alias is None or kind == "CNAME":
                break
            response.answer.append(dns.rrset.from_text(owner, 60, "IN", "CNAME", alias[0]))
            name = alias[0].rstrip(".")
            owner = dns.name.from_text(name)
        values = ZONE.get((name, kind))
        if name.endswith("wild.test") and kind == "A":
            values = [A4]
        if values:
            response.answer.append(dns.rrset.from_text_list(owner, 60, "IN", kind, values))
        elif not any(known == name for known, _ in ZONE):
            response.set_rcode(dns.rcode.NXDOMAIN)
        try:
            return response.to_wire(max_size=limit)
        except dns.exception.TooBig:
            response.answer.clear()
            response.flags |= dns.flags.TC
            return response.to_wire()

    def close(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


#: An address of the host that netd runs on, where a service of the host listens.
NETD4_INNER = "45.90.0.1"


def echo(peer: socket.socket) -> None:
    while data := peer.recv(65536):
        peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)


def talk_http(peer: socket.socket, log: Log) -> None:
    """HTTP/1.1 with keep-alive: says what was asked for; `/redirect` leads to B; a WebSocket echoes."""
    file = peer.makefile("rb")
    while line := file.readline():
        if not line.strip():
            continue
        headers: dict[str, str] = {}
        while (header := file.readline().strip()) != b"":
            key, _, value = header.decode("latin-1").partition(":")
            headers[key.lower()] = value.strip()
        log.add(f"http {line.decode('latin-1').strip()} host={headers.get('host')}")
        file.read(int(headers.get("content-length", "0")))
        if headers.get("upgrade", "").lower() == "websocket":
            key = headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
            peer.sendall(
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
            )
            while data := peer.recv(4096):
                peer.sendall(data)
            return
        if b"/redirect" in line:
            peer.sendall(b"HTTP/1.1 302 Found\r\nLocation: https://b.test/\r\nContent-Length: 0\r\n\r\n")
            continue
        body = f"hello from {headers.get('host')}\n".encode()
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def make_certificates(where: Path) -> None:
    """A CA, and certificates of the hosts A and B."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=where, capture_output=True, check=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "30", "-subj", "/CN=test")
    for name, hosts in (("a", "a.test,*.a.test,*.wild.test,fronted.test"), ("b", "b.test,*.b.test,nota.test")):
        names = ",".join(f"DNS:{host}" for host in hosts.split(","))
        (where / f"{name}.ext").write_text(f"subjectAltName={names}\n")
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}.test")
        signing = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        openssl(*signing, "-days", "30", "-extfile", f"{name}.ext", "-out", f"{name}.pem")
