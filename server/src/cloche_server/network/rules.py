"""What every slot is made of, as text for `ip` and `nft`; the same for all, without any policy (`docs/network.md`)."""

from __future__ import annotations

from typing import Final

from cloche_server.core.network import (
    DNS_PORT,
    GATEWAY_IP4,
    GATEWAY_IP6,
    GATEWAY_MAC,
    GROUP_NETWORK4,
    GUEST_IP4,
    GUEST_IP6,
    GUEST_MAC,
    PREFIX_IP4,
    PREFIX_IP6,
    TAP,
    TCP_PORT,
    UDP_MARK,
    UDP_PORT,
    UDP_TABLE,
)

#: The neighbour is known beforehand, so that the first packet waits for nobody, and cannot be another one. What members
#: of groups have as addresses are every slot's own: a connection into it may come from one of them and is answered.
#: What a guest sends there is redirected as everything else is.
LINKS: Final = f"""\
link set lo up
link set {TAP} address {GATEWAY_MAC}
address add {GATEWAY_IP4}/{PREFIX_IP4} dev {TAP}
address add {GATEWAY_IP6}/{PREFIX_IP6} dev {TAP} nodad
link set {TAP} up
route add local {GROUP_NETWORK4} dev lo
neighbour replace {GUEST_IP4} lladdr {GUEST_MAC} dev {TAP} nud permanent
neighbour replace {GUEST_IP6} lladdr {GUEST_MAC} dev {TAP} nud permanent
"""

#: Datagrams of any destination end in the slot: those that have our mark, which only our rules give.
UDP_LINKS: Final = f"""\
route replace local 0.0.0.0/0 dev lo table {UDP_TABLE}
route replace local ::/0 dev lo table {UDP_TABLE}
"""

SYSCTLS: Final = (
    (f"ipv6/conf/{TAP}/accept_dad", "0"),
    (f"ipv6/conf/{TAP}/accept_ra", "0"),
    ("ipv4/ip_forward", "0"),
    ("ipv6/conf/all/forwarding", "0"),
    # Otherwise a guest hears of one refusal a second, and what else is refused times out.
    ("ipv4/icmp_ratelimit", "0"),
    ("ipv6/icmp/ratelimit", "0"),
)

#: Untracked: a guest could fill the host's table of connections with datagrams.
#: Early: what nobody will carry is refused, so that a guest learns of it at once. Datagrams are caught where netd has
#: opened the socket for them, because a rule of the policy allows some, and refused here otherwise.
#: Arriving: only what was redirected, and answers to what the host has asked.
RULES: Final = f"""\
table inet cloche {{
  chain untracked {{
    type filter hook prerouting priority raw; policy accept;
    iifname "{TAP}" udp dport != 53 notrack
  }}
  chain untracked_answers {{
    type filter hook output priority raw; policy accept;
    udp sport != {DNS_PORT} notrack
  }}
  chain early {{
    type filter hook prerouting priority -150; policy accept;
    iifname != "{TAP}" accept
    ip saddr != {GUEST_IP4} drop
    meta nfproto ipv6 ip6 saddr != {{ {GUEST_IP6}, fe80::/10, :: }} drop
    meta l4proto tcp accept
    udp dport 53 accept
    meta l4proto icmpv6 icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
    ip daddr {GATEWAY_IP4} icmp type echo-request accept
    ip6 daddr {GATEWAY_IP6} icmpv6 type echo-request accept
    ip daddr {{ 224.0.0.0/4, 255.255.255.255 }} drop
    ip6 daddr ff00::/8 drop
    ip saddr {GUEST_IP4} meta l4proto udp tproxy ip to :{UDP_PORT} meta mark set {UDP_MARK} accept
    ip6 saddr {GUEST_IP6} meta l4proto udp tproxy ip6 to :{UDP_PORT} meta mark set {UDP_MARK} accept
    reject with icmpx admin-prohibited
  }}
  chain to_us {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname "{TAP}" meta l4proto tcp redirect to :{TCP_PORT}
    iifname "{TAP}" udp dport 53 redirect to :{DNS_PORT}
  }}
  chain arriving {{
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    iifname "{TAP}" ct state established accept
    iifname "{TAP}" tcp dport {TCP_PORT} ct status dnat accept
    iifname "{TAP}" udp dport {DNS_PORT} ct status dnat accept
    iifname "{TAP}" meta l4proto udp meta mark {UDP_MARK} accept
    iifname "{TAP}" meta l4proto {{ icmp, icmpv6 }} accept
    meta l4proto tcp reject with tcp reset
    reject with icmpx admin-prohibited
  }}
  chain passing {{
    type filter hook forward priority filter; policy drop;
  }}
}}
"""

#: The same rules for a slot that an earlier server has made, in one step.
RENEWED_RULES: Final = "table inet cloche {}\ndelete table inet cloche\n" + RULES
