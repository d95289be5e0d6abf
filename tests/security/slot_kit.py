"""A guest and its slot for tests: the server's own addresses, rules and sockets, with a veth where the tap would be."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from netns_kit import inside, ip, ip_in

from cloche_server.core import network as net
from cloche_server.network.slots import furnish_slot, make_sockets


@dataclass(frozen=True)
class Slot:
    guest: str
    slot: str
    sockets: tuple[socket.socket, ...]

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def make_slot(guest: str, slot: str) -> Slot:
    """Two namespaces with these names, and the sockets of the slot in the order of the control link."""
    ip(
        f"netns add {guest}\nnetns add {slot}\n"
        f"link add {net.TAP} netns {slot} address {net.GATEWAY_MAC} type veth "
        f"peer name eth0 netns {guest} address {net.GUEST_MAC}\n"
    )
    inside(slot, furnish_slot)
    ip_in(
        guest,
        f"addr add {net.GUEST_IP4}/{net.PREFIX_IP4} dev eth0\n"
        f"addr add {net.GUEST_IP6}/{net.PREFIX_IP6} dev eth0 nodad\n"
        f"link set lo up\nlink set eth0 up\n"
        f"route add default via {net.GATEWAY_IP4}\nroute add ::/0 via {net.GATEWAY_IP6}\n",
    )
    return Slot(guest, slot, inside(slot, slot_sockets))


def slot_sockets() -> tuple[socket.socket, ...]:
    return make_sockets().all()
