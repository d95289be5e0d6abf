#!/usr/bin/env python3
"""What the network costs on the host's side: a policy of 1000 rules, connections, throughput, refusals. As root.

    .cloche/venv/bin/python bench/network.py

Everything runs in network namespaces: a guest behind a veth where the tap would be, netd as the real process, and
servers elsewhere. `bare` is the same bytes over one veth without netd.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "security"))

import netns_kit
import world_kit as world_of
from common import Report, host_facts, parser
from guest_kit import Guest, client_hello

import conftest as site_of
from cloche_server.core.policy import Claim, ClaimKind, Policy
from cloche_server.core.policy_input import parse_policy

SIZE = 256 * 1024 * 1024
PORT = 7100
SERVE = f"""
import socket
s = socket.create_server(("{{address}}", {PORT}), reuse_port=False)
while True:
    c, _ = s.accept()
    try:
        data = bytes(1 << 20)
        if c.recv(1) == b"d":
            for _ in range({SIZE} >> 20):
                c.sendall(data)
        else:
            while c.recv(1 << 20):
                pass
    except OSError:
        pass
    c.close()
"""


def large_policy(rules: int) -> dict[str, Any]:
    made: list[dict[str, Any]] = [
        {
            "action": "deny" if number % 7 == 0 else "allow",
            "domain": f"{'*.' if number % 3 else ''}h{number}.example.com",
        }
        for number in range(rules - 2)
    ]
    made += [{"action": "allow", "domain": "a.test"}, {"action": "allow", "domain": "a.test", "ports": [7000, PORT]}]
    return {"mode": "allow-list", "rules": made}


def microseconds(work: Callable[[], object], times: int = 2000) -> float:
    work()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times * 1e6


def policy_cost(report: Report) -> None:
    address = ip_address(world_of.A4)
    for rules in (2, 1000):
        begin = time.perf_counter()
        policy = Policy(parse_policy(large_policy(rules)))
        built = time.perf_counter() - begin
        claim = Claim(ClaimKind.TLS, "a.test")

        def both(policy: Policy = policy, claim: Claim = claim) -> None:
            policy.decide_address(address, 443, names=["a.test"])
            policy.decide_connection(address, 443, claim=claim, names=["a.test"])

        report.add(f"policy of {rules} rules: judging a connection", [microseconds(both) for _ in range(5)], "us")
        report.add(f"policy of {rules} rules: made", [built * 1e3])


def spent_ms(work: Callable[[], object], times: int = 60) -> list[float]:
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        spent.append((time.perf_counter() - begin) * 1e3)
    return spent


def connections(report: Report, site: Any, guest: Guest) -> None:
    def echo() -> None:
        with socket.create_connection((world_of.A4, 7000)) as sock:
            sock.sendall(b"x\n")
            sock.recv(2)

    def refused() -> None:
        with socket.create_connection((world_of.B4, 443)) as sock:
            try:
                sock.sendall(hello)
                sock.recv(100)
            except OSError:
                pass

    hello = client_hello(b"b.test")
    for rules in (2, 1000):
        site.renew(**large_policy(rules))
        guest.dns("a.test")
        report.add(f"connect and echo, {rules} rules", guest.run(lambda: spent_ms(echo)))
        report.add(f"TLS refused, {rules} rules", guest.run(lambda: spent_ms(refused)))
    site.renew(mode="none")

    def reset() -> None:
        try:
            with socket.create_connection((world_of.A4, 7000)) as sock:
                sock.recv(1)
        except OSError:
            pass

    report.add("refused by address (RST)", guest.run(lambda: spent_ms(reset)))


def fetch(namespace: str, address: str, way: str) -> float:
    """MB per second, seen by the guest."""
    code = f"""
import socket, time
s = socket.create_connection(("{address}", {PORT}))
b = time.perf_counter()
n = 0
buf = bytearray(1 << 20)
if "{way}" == "d":
    s.sendall(b"d")
    while got := s.recv_into(buf):
        n += got
else:
    s.sendall(b"u")
    for _ in range({SIZE} >> 20):
        s.sendall(buf); n += len(buf)
    s.shutdown(1); s.recv(1)
print(n / (time.perf_counter() - b) / 1e6)
"""
    argv = ["ip", "netns", "exec", namespace, sys.executable, "-c", code]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def throughput(report: Report, runs: int, site: Any, world_ns: str, slot_ns: str, guest_ns: str) -> None:
    site.renew(mode="open")
    servers = []
    for namespace, address in ((world_ns, world_of.A4), (slot_ns, "192.168.127.1")):
        code = SERVE.replace("{address}", address)
        servers.append(subprocess.Popen(["ip", "netns", "exec", namespace, sys.executable, "-c", code]))
    time.sleep(1)
    try:
        netns_kit.nft_in(
            slot_ns,
            f'insert rule inet cloche to_us iifname "tap0" tcp dport {PORT} ip daddr 192.168.127.1 accept\n'
            f'insert rule inet cloche arriving iifname "tap0" tcp dport {PORT} accept\n',
        )
        for way, word in (("d", "download"), ("u", "upload")):
            bare, carried = [], []
            for _ in range(runs):  # one beside the other: what else the machine does meets both
                bare.append(fetch(guest_ns, "192.168.127.1", way))
                carried.append(fetch(guest_ns, world_of.A4, way))
            report.add(f"{word}: bare", bare, "MB/s")
            report.add(f"{word}: through netd", carried, "MB/s")
            shares = [through / plain * 100 for through, plain in zip(carried, bare, strict=True)]
            report.add(f"{word}: of what bare has", shares, "%", target=50.0)
    finally:
        for server in servers:
            server.kill()
            server.wait()


def main() -> None:
    options = parser(__doc__, 7).parse_args()
    report = Report("network", host_facts())
    policy_cost(report)
    prefix = f"nb{os.getpid()}"
    with tempfile.TemporaryDirectory() as where, site_of._site(Path(where), prefix) as site:
        guest = Guest(site.slot.guest, str(site.world.ca))
        connections(report, site, guest)
        throughput(report, options.runs, site, f"{prefix}w", f"{prefix}s", f"{prefix}g")
    report.finish()


if __name__ == "__main__":
    main()
