"""A small world outside of the host, in a network namespace: names, HTTP and HTTPS that say what they were asked, a TCP
service that keeps connections, and one that sends datagrams back. Its addresses are private, so a sandbox needs a rule
with a network for it."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dns.flags
import dns.message
import dns.rrset
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cloche_server.host import netns
from kit.githost import GitHost

NAME = "outside.test"
OTHER = "other.test"


@dataclass
class Outside:
    """`asked`: names that were asked for. `requests`: heads of HTTP requests. `datagrams`: ports they came from, and
    what they said. `address` is where everything is, `host` the host's own address beside it."""

    address: str
    host: str
    ca_file: Path
    asked: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)
    datagrams: list[tuple[int, str]] = field(default_factory=list)
    #: Answers requests for paths that begin with `/git/`, instead of saying what they were.
    git: GitHost | None = None

    @property
    def network(self) -> str:
        return f"{self.address}/32"

    @property
    def policy(self) -> dict[str, object]:
        rules: list[dict[str, object]] = [{"id": "outside", "action": "allow", "cidr": self.network}]
        rules += [{"id": name.split(".")[0] + "-name", "action": "allow", "domain": name} for name in (NAME, OTHER)]
        return {"mode": "allow-list", "rules": rules}


@contextlib.contextmanager
def open_outside() -> Iterator[Outside]:
    number = os.getpid() % 16000
    base = f"10.{192 + number // 4096}.{number // 16 % 256}.{number % 16 * 16}".rsplit(".", 1)
    ours, theirs = (f"{base[0]}.{int(base[1]) + n}" for n in (1, 2))
    work = Path(tempfile.mkdtemp(prefix="ct-out-", dir="/tmp"))
    here, there = f"cto{os.getpid()}", f"ctp{os.getpid()}"
    space = work / "net"
    netns.create(space, lambda: None)
    listeners: list[socket.socket] = []
    try:
        subprocess.run(["ip", "link", "add", here, "type", "veth", "peer", "name", there], check=True)
        subprocess.run(["ip", "link", "set", there, "netns", space], check=True)
        subprocess.run(["ip", "address", "add", f"{ours}/28", "dev", here], check=True)
        subprocess.run(["ip", "link", "set", here, "up"], check=True)

        def furnish() -> None:
            for words in (["address", "add", f"{theirs}/28", "dev", there], ["link", "set", there, "up"]):
                subprocess.run(["ip", *words], check=True)
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            for port in (80, 443, 7000):
                listeners.append(netns.bound(socket.SOCK_STREAM, socket.AF_INET, port))
            for port in (53, 7001):
                listeners.append(netns.bound(socket.SOCK_DGRAM, socket.AF_INET, port))

        netns.inside(space, furnish)
        context = make_certificate(work)
        outside = Outside(theirs, ours, work / "ca.pem")
        http, https, keep, names, echo = listeners
        for one in listeners:
            one.setblocking(True)
        _serve(http, lambda peer: _talk(peer, outside))
        _serve(https, lambda peer: _talk(context.wrap_socket(peer, server_side=True), outside))
        _serve(keep, lambda peer: _keep(peer, outside))
        threading.Thread(target=_names, args=(names, outside), daemon=True).start()
        threading.Thread(target=_echo, args=(echo, outside), daemon=True).start()
        yield outside
        for one in outside.connections:
            one.close()
    finally:
        for one in listeners:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        subprocess.run(["ip", "link", "del", here], check=False)
        netns.remove(space)
        shutil.rmtree(work, ignore_errors=True)


def _serve(listener: socket.socket, talk: Callable[[socket.socket], None]) -> None:
    def one(peer: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            talk(peer)

    def run() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(peer,), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()


def _talk(peer: socket.socket, outside: Outside) -> None:
    """Answers one request with what it was, headers included."""
    with peer, peer.makefile("rb") as file:
        lines: list[bytes] = []
        while (line := file.readline()) not in (b"\r\n", b""):
            lines.append(line)
        if not lines:
            return
        head = b"".join(lines)
        outside.requests.append(head.decode("latin-1"))
        if outside.git is not None and lines[0].split(b" ")[1].startswith(b"/git/"):
            peer.sendall(outside.git.answer(lines, file))
            return
        peer.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % len(head)
        )
        peer.sendall(head)


def _keep(peer: socket.socket, outside: Outside) -> None:
    outside.connections.append(peer)
    while data := peer.recv(65536):
        peer.sendall(data)


def _echo(sock: socket.socket, outside: Outside) -> None:
    while True:
        try:
            payload, sender = sock.recvfrom(65535)
        except OSError:
            return
        if not sender:  # shut down
            return
        outside.datagrams.append((sender[1], payload.decode("latin-1")))
        sock.sendto(payload, sender)


def _names(sock: socket.socket, outside: Outside) -> None:
    while True:
        try:
            wire, sender = sock.recvfrom(4096)
        except OSError:
            return
        if not wire:
            return
        question = dns.message.from_wire(wire)
        asked = question.question[0]
        name = asked.name.to_text(omit_final_dot=True).lower()
        outside.asked.append(name)
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.RA
        if name in (NAME, OTHER) and asked.rdtype == 1:
            answer.answer.append(dns.rrset.from_text(asked.name, 60, "IN", "A", outside.address))
        sock.sendto(answer.to_wire(), sender)


def make_certificate(where: Path) -> ssl.SSLContext:
    """An authority in `ca.pem`, and a server's context with a certificate of it for both names."""
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)

    def builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        name, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, issuer))
        made = x509.CertificateBuilder().subject_name(name).issuer_name(by).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number())
        return made.not_valid_before(now - day).not_valid_after(now + day)

    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = (
        builder("test authority", "test authority", ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    names = x509.SubjectAlternativeName([x509.DNSName(NAME), x509.DNSName(OTHER)])
    leaf = builder(NAME, "test authority", key).add_extension(names, critical=False).sign(ca_key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    (where / "ca.pem").write_bytes(ca.public_bytes(pem))
    (where / "leaf.pem").write_bytes(
        leaf.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(where / "leaf.pem")
    return context
