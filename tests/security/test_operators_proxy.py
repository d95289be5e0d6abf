"""Where the operator has a proxy, everything that is allowed goes through it, and nothing else reaches it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import netns_kit
import pytest
from guest_kit import Guest
from world_kit import A4, B4, METADATA4

ECHO = 7000
RULES = {
    "mode": "allow-list",
    "rules": [
        {"id": "a", "action": "allow", "domain": "a.test", "ports": [80, 443, ECHO]},
        {"id": "read", "action": "allow", "domain": "b.test", "methods": ["GET"], "paths": ["/ok*"]},
        {"id": "u", "action": "allow", "protocol": "udp", "cidr": A4, "ports": [ECHO]},
    ],
}


@dataclass
class Proxy:
    """Of both kinds, by the first byte. `asked`: for which places, and with which name and password."""

    server: socket.socket
    asked: list[tuple[str, int]] = field(default_factory=list)
    users: set[str] = field(default_factory=set)

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.server.accept()
                # As a thread of this one, it lives in the same namespace.
                threading.Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), peer, peer.makefile("rb") as file:
            first = file.read(1)
            host, port = self._socks(peer, file) if first == b"\x05" else self._connect(first, file)
            self.asked.append((host, port))
            with socket.create_connection((host, port), 10) as other:
                peer.sendall(b"\x05\x00\x00\x01" + bytes(6) if first == b"\x05" else b"HTTP/1.1 200 OK\r\n\r\n")
                threading.Thread(target=_pass, args=(other, peer), daemon=True).start()
                while data := file.read1(65536):
                    other.sendall(data)

    def _connect(self, first: bytes, file: Any) -> tuple[str, int]:
        head = first.decode() + file.readline().decode()
        while (line := file.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"proxy-authorization"):
                self.users.add(line.split()[-1].decode())
        host, _, port = head.split()[1].rpartition(":")
        return host.strip("[]"), int(port)

    def _socks(self, peer: socket.socket, file: Any) -> tuple[str, int]:
        file.read(file.read(1)[0])
        peer.sendall(b"\x05\x02")
        file.read(1)
        user = file.read(file.read(1)[0])
        self.users.add((user + b":" + file.read(file.read(1)[0])).decode())
        peer.sendall(b"\x01\x00")
        kind = file.read(4)[3]
        host = str(ip_address(file.read(4 if kind == 1 else 16)))
        return host, int.from_bytes(file.read(2), "big")


def _pass(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture(params=["http", "socks5"])
def proxy(site: Any, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    found = Proxy(site.host(lambda: socket.create_server(("127.0.0.1", 0))))
    netns_kit.start_inside(site.netd.namespace, found.serve)
    url = f"{request.param}://user:pass@127.0.0.1:{found.server.getsockname()[1]}"
    site.netd.call("configure", proxy=url)
    try:
        yield found
    finally:
        site.netd.call("configure", proxy=None)
        found.server.close()


def test_what_is_allowed_goes_through_it_and_nothing_else(site: Any, proxy: Proxy) -> None:
    site.renew(**RULES)
    guest = Guest(site.slot.guest, str(site.world.ca))
    assert guest.dns("a.test") == [A4], "names are resolved by the platform all the same"
    assert guest.tls(A4, "a.test") == "ok"
    assert guest.http(A4, "a.test").startswith(b"HTTP/1.1 200")  # type: ignore[union-attr]
    assert guest.tcp(A4, ECHO, b"echo\n", until=b"\n") == b"echo\n"
    assert guest.dns("b.test") == [B4]
    assert guest.http(B4, "b.test", "/ok").startswith(b"HTTP/1.1 200")  # type: ignore[union-attr]
    assert set(proxy.asked) == {(A4, 443), (A4, 80), (A4, ECHO), (B4, 80)}
    assert len(proxy.users) == 1, "with the name and password of the operator, each time"
    before = list(proxy.asked)
    assert guest.http(B4, "b.test", "/other").startswith(b"HTTP/1.1 403")  # type: ignore[union-attr]
    assert guest.tls(A4, "other.test") == "alert"
    assert guest.http(METADATA4, "x").startswith(b"HTTP/1.1 403")  # type: ignore[union-attr]
    assert guest.tcp("127.0.0.1", proxy.server.getsockname()[1], b"CONNECT x") in {"reset", "refused"}
    assert guest.udp(A4, ECHO) == "refused", "it carries none"
    told = site.netd.call("explain", sandbox="box", host=A4, port=ECHO, protocol="udp")["verdict"]
    assert (told["allowed"], "by a proxy only" in told["reason"]) == (False, True)
    assert proxy.asked == before
