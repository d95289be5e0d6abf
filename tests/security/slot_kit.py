"""A guest and its slot for tests: what the server makes for a microVM, with a veth where the tap would be.

`make_slot` is the seam: whatever makes namespaces as `docs/network.md` says can stand here.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from netns_kit import inside, ip, ip_in, nft_in

from cloche_server.core import network as net

RULES = f"""
table inet slot {{
    chain take {{
        type nat hook prerouting priority dstnat; policy accept;
        iifname "{net.TAP}" udp dport 53 redirect to :{net.DNS_PORT}
        iifname "{net.TAP}" meta l4proto tcp redirect to :{net.TCP_PORT}
    }}
    chain local {{
        type filter hook input priority filter; policy drop;
        ct state established accept
        ct status dnat accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        meta l4proto tcp reject with tcp reset
        reject with icmpx admin-prohibited
    }}
    chain arrive {{
        type filter hook prerouting priority filter; policy accept;
        iifname != "{net.TAP}" accept
        ct state established,related accept
        ct status dnat accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit }} accept
        reject with icmpx admin-prohibited
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
    }}
}}
"""


@dataclass(frozen=True)
class Slot:
    guest: str
    slot: str
    sockets: tuple[socket.socket, ...]

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def make_slot(guest: str, slot: str) -> Slot:
    """Two namespaces with these names, and the four sockets of the slot in the order of the control link."""
    ip(
        f"netns add {guest}\nnetns add {slot}\n"
        f"link add {net.TAP} netns {slot} address {net.GATEWAY_MAC} type veth "
        f"peer name eth0 netns {guest} address {net.GUEST_MAC}\n"
    )
    ip_in(
        slot,
        f"addr add {net.GATEWAY_IP4}/{net.PREFIX_IP4} dev {net.TAP}\n"
        f"addr add {net.GATEWAY_IP6}/{net.PREFIX_IP6} dev {net.TAP} nodad\n"
        f"link set lo up\nlink set {net.TAP} up\n",
    )
    nft_in(slot, RULES)
    inside(slot, _answer_every_refusal)
    ip_in(
        guest,
        f"addr add {net.GUEST_IP4}/{net.PREFIX_IP4} dev eth0\n"
        f"addr add {net.GUEST_IP6}/{net.PREFIX_IP6} dev eth0 nodad\n"
        f"link set lo up\nlink set eth0 up\n"
        f"route add default via {net.GATEWAY_IP4}\nroute add ::/0 via {net.GATEWAY_IP6}\n",
    )
    return Slot(guest, slot, inside(slot, slot_sockets))


def _answer_every_refusal() -> None:
    """Otherwise the kernel tells a guest of its refusals once a second only, and the rest time out."""
    Path("/proc/sys/net/ipv4/icmp_ratelimit").write_text("0")
    Path("/proc/sys/net/ipv6/icmp/ratelimit").write_text("0")


def slot_sockets() -> tuple[socket.socket, ...]:
    made = []
    for family, kind, port in (
        (socket.AF_INET, socket.SOCK_STREAM, net.TCP_PORT),
        (socket.AF_INET6, socket.SOCK_STREAM, net.TCP_PORT),
        (socket.AF_INET, socket.SOCK_DGRAM, net.DNS_PORT),
        (socket.AF_INET6, socket.SOCK_DGRAM, net.DNS_PORT),
    ):
        sock = socket.socket(family, kind)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        if kind == socket.SOCK_STREAM:
            sock.listen(512)
        made.append(sock)
    return tuple(made)
