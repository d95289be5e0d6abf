"""More sandboxes beside the one that tries, and the server's part in a network group: sockets made in their slots."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import netns_kit
from netd_kit import Netd
from slot_kit import Slot, make_slot

from cloche_server.core.groups import Group, Member, group_to_json
from cloche_server.network import slots

#: Where the members of group `team` in these tests see each other.
BOX, DB, FOREIGN = "198.19.7.1", "198.19.7.2", "198.19.7.3"
PORTS = (53, 80, 443, 9000)
UDP = 9000


class Town:
    """`db`: of the workspace of the sandbox `box` that tries; `foreign`: of another one. Each says on `PORTS` who it is
    and who has called, and then whatever it hears; a datagram to `UDP` it sends back behind that. `heard`: who was
    called, by whom."""

    def __init__(self, netd: Netd, slot: Slot, prefix: str, attach: Callable[..., None]) -> None:
        self.netd = netd
        self._attach = attach
        self._prefix = prefix
        self.heard: list[tuple[str, str]] = []
        self.slots: dict[str, Slot] = {"box": slot}
        self._servers: list[socket.socket] = []
        self._stop = threading.Event()
        self._client: Any = None
        self._thread = threading.Thread(target=self._serve_doors, daemon=True)

    def open(self) -> None:
        for name in ("db", "foreign"):
            self.slots[name] = make_slot(f"{self._prefix}{name[0]}g", f"{self._prefix}{name[0]}s")
            for port in PORTS:
                self._listen(name, port)
            self._listen_for_datagrams(name)
        self._thread.start()

    def _listen(self, name: str, port: int) -> None:
        def make() -> socket.socket:
            return socket.create_server(("0.0.0.0", port), backlog=64)

        sock = netns_kit.inside(self.slots[name].guest, make)
        self._servers.append(sock)

        def accept() -> None:
            while True:
                try:
                    peer, caller = sock.accept()
                except OSError:
                    return
                self.heard.append((name, caller[0]))
                threading.Thread(target=talk, args=(peer, caller[0]), daemon=True).start()

        def talk(peer: socket.socket, caller: str) -> None:
            with contextlib.suppress(OSError), peer:
                peer.settimeout(20)
                peer.sendall(f"{name} hears {caller}\n".encode())
                while data := peer.recv(65536):
                    peer.sendall(data)

        netns_kit.start_inside(self.slots[name].guest, accept)

    def _listen_for_datagrams(self, name: str) -> None:
        def make() -> socket.socket:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.bind(("0.0.0.0", UDP))
            return sock

        sock = netns_kit.inside(self.slots[name].guest, make)
        self._servers.append(sock)

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    payload, caller = sock.recvfrom(65535)
                    if sock.fileno() < 0 or self._stop.is_set():
                        return
                    self.heard.append((name, caller[0]))
                    sock.sendto(f"{name} hears {caller[0]}\n".encode() + payload, caller)

        netns_kit.start_inside(self.slots[name].guest, answer)

    def _serve_doors(self) -> None:
        """As the server does it."""
        while not self._stop.is_set():
            for sandbox, count in self.netd.call("wanted", wait=0.5)["wanted"].items():
                slot = self.slots[sandbox].slot
                doors = netns_kit.inside(slot, lambda count=count: slots._doors(count))
                try:
                    self.netd.call("supply", sandbox=sandbox, fds=[one.fileno() for one in doors.all()])
                finally:
                    doors.close()

    # ------------------------------------------------------------------ what cases do

    def attach(self, sandbox: str, **policy: Any) -> None:
        workspace = "x" if sandbox == "foreign" else "w"
        self._attach(self.netd, self.slots[sandbox], policy or {"mode": "none"}, sandbox, workspace)

    def detach(self, sandbox: str) -> None:
        self.netd.call("detach", sandbox=sandbox)

    def groups(self, *members: Member, workspace: str = "w", whole: bool = False) -> None:
        """Who is in group `team` of a workspace from now on."""
        group = group_to_json(Group(workspace, "team", members))
        self.netd.call("groups", groups=[group], whole=whole)

    def settle(self) -> None:
        """`box` and `db` are in a group of workspace `w`, `foreign` in one of the same name of workspace `x`."""
        self.heard.clear()
        for sandbox in ("db", "foreign"):
            self.attach(sandbox)
        self.groups(member("box", BOX), member("db", DB), whole=True)
        self.groups(member("foreign", FOREIGN), workspace="x")

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        for sock in self._servers:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for name, slot in self.slots.items():
            if name != "box":
                slot.close()
                netns_kit.remove(slot.guest, slot.slot)


def member(name: str, address: str, *, status: str = "running", shown: str | None = None) -> Member:
    """`name` is the id as well; `shown`: another name than that."""
    return Member(name, name if shown is None else shown, address, status)


def hello(answer: bytes | str) -> str:
    """The first line that came back."""
    return answer if isinstance(answer, str) else answer.decode().partition("\n")[0]


def who(names: Sequence[str], log: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(one["name"], one["rule"]) for one in log if one["name"] in names]


def prefix() -> str:
    return f"cu{os.getpid()}"
