"""What a program in the guest tries: names, connections, TLS with any first bytes, other protocols.

Each returns a short text, so that a case can say what it expects.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any

import dns.exception
import dns.message
import dns.query
import dns.rcode
import dns.rdatatype
from netns_kit import inside

PATIENCE = 3.0


class Guest:
    """Runs in one network namespace. `ca`: what its TLS trusts."""

    def __init__(self, namespace: str, ca: str) -> None:
        self.namespace = namespace
        self._ca = ca

    def run(self, work: Callable[[], Any]) -> Any:
        return inside(self.namespace, work)

    # ------------------------------------------------------------------ names

    def dns(self, name: str, kind: str = "A", server: str = "192.168.127.1", *, tcp: bool = False) -> list[str]:
        """Texts of the records; or one word: the rcode, `NODATA`, `timeout`, `unreachable`."""

        def ask() -> list[str]:
            query = dns.message.make_query(name, kind, use_edns=0, payload=1232)
            try:
                over = dns.query.tcp if tcp else dns.query.udp
                answer = over(query, server, timeout=PATIENCE)
            except dns.exception.Timeout:
                return ["timeout"]
            except (OSError, EOFError):
                return ["unreachable"]
            if answer.rcode() != dns.rcode.NOERROR:
                return [dns.rcode.to_text(answer.rcode())]
            found = [
                str(one) for rrset in answer.answer for one in rrset if dns.rdatatype.to_text(rrset.rdtype) == kind
            ]
            return found or ["NODATA"]

        result: list[str] = self.run(ask)
        return result

    def dns_raw(self, wire: bytes, server: str = "192.168.127.1", port: int = 53) -> bytes | str:
        return self.udp(server, port, wire)

    def udp(self, address: str, port: int, payload: bytes = b"x" * 40) -> bytes | str:
        """The answer, `refused` or `silent`."""

        def send() -> bytes | str:
            with socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
                sock.settimeout(0.5)
                try:
                    sock.connect((address, port))
                    sock.send(payload)
                    return sock.recv(4096)
                except TimeoutError:
                    return "silent"
                except OSError:
                    return "refused"

        result: bytes | str = self.run(send)
        return result

    # ------------------------------------------------------------------ connections

    def tcp(
        self, address: str, port: int, *pieces: bytes, patience: float = PATIENCE, until: bytes | None = None
    ) -> bytes | str:
        """What comes back until the end (or until `until`), or one word: `reset`, `refused`, `silent`."""

        def talk() -> bytes | str:
            try:
                sock = socket.create_connection((address, port), timeout=patience)
            except TimeoutError:
                return "silent"
            except (ConnectionResetError, ConnectionRefusedError):
                return "reset"  # which of them depends on who was faster
            except OSError:
                return "refused"
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    for piece in pieces:
                        sock.sendall(piece)
                        if len(pieces) > 1:
                            _short_pause()
                    return _all(sock, until)
                except TimeoutError:
                    return "silent"
                except OSError:
                    return "reset"

        result: bytes | str = self.run(talk)
        return result

    def http(self, address: str, host: str, path: str = "/", *, port: int = 80, method: str = "GET") -> bytes | str:
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        return self.tcp(address, port, head.encode("latin-1"), until=b"}" if method == "GET" else None)

    def tls(self, address: str, name: str | None, *, port: int = 443, host: str | None = None) -> str:
        """`ok`, or why not: `alert`, `reset`, `refused`, `silent`. A request is sent and its answer read."""

        def talk() -> str:
            context = ssl.create_default_context(cafile=self._ca)
            context.check_hostname = name is not None
            if name is None:
                context.verify_mode = ssl.CERT_NONE
            try:
                with socket.create_connection((address, port), timeout=PATIENCE) as sock:
                    with context.wrap_socket(sock, server_hostname=name) as secure:
                        secure.sendall(f"GET / HTTP/1.1\r\nHost: {host or name}\r\n\r\n".encode())
                        return "ok" if b" 200 " in secure.recv(4096) else "strange"
            except ssl.SSLError as error:
                return "alert" if "ALERT" in str(error).upper() else f"tls: {error.reason}"
            except TimeoutError:
                return "silent"
            except ConnectionRefusedError:
                return "refused"
            except OSError:
                return "reset"

        result: str = self.run(talk)
        return result

    def https(self, address: str, name: str, request: bytes) -> bytes:
        """All that comes back over TLS; empty when TLS fails."""

        def talk() -> bytes:
            context = ssl.create_default_context(cafile=self._ca)
            data = b""
            with contextlib.suppress(OSError):
                with socket.create_connection((address, 443), timeout=PATIENCE) as sock:
                    with context.wrap_socket(sock, server_hostname=name) as secure:
                        secure.sendall(request)
                        while part := secure.recv(65536):
                            data += part
            return data

        result: bytes = self.run(talk)
        return result


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _all(sock: socket.socket, until: bytes | None) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while True:
            part = sock.recv(65536)
            data += part
            if not part or (until is not None and until in data):
                return data
    if data:
        return data
    raise ConnectionResetError


def _short_pause() -> None:
    """So that the next piece is a packet of its own."""
    time.sleep(0.01)


def client_hello(name: bytes | None, *, ech: bool = False, padding: int = 0, extra: bytes = b"") -> bytes:
    """A ClientHello in one record, with exactly these bytes as server name."""
    extensions = b""
    if name is not None:
        entry = b"\x00" + struct.pack("!H", len(name)) + name
        extensions += _extension(0, struct.pack("!H", len(entry)) + entry)
    if ech:
        extensions += _extension(0xFE0D, os.urandom(64))
    extensions += _extension(10, b"\x00\x02\x00\x1d") + _extension(43, b"\x02\x03\x04") + extra
    if padding:
        extensions += _extension(21, bytes(padding))
    body = b"\x03\x03" + os.urandom(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    body += struct.pack("!H", len(extensions)) + extensions
    return record(b"\x01" + len(body).to_bytes(3, "big") + body)


def _extension(kind: int, value: bytes) -> bytes:
    return struct.pack("!HH", kind, len(value)) + value


def record(message: bytes) -> bytes:
    """One handshake record."""
    return b"\x16\x03\x01" + struct.pack("!H", len(message)) + message


def in_records(hello: bytes, size: int) -> bytes:
    """The same message over many records."""
    message = hello[5:]
    return b"".join(record(message[at : at + size]) for at in range(0, len(message), size))
