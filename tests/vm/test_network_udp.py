"""Datagrams of real machines: where a rule says so, and nowhere else, whatever becomes of machine, policy and netd."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kit import procs, sse, truth
from kit.client import Api, Box
from kit.outside import Outside, open_outside
from kit.server import Server
from kit.until import until

ECHO = 7001
#: What one datagram to each of `address:port` meets, a line each.
TRY = """
import socket, sys
for one in sys.argv[1:]:
    address, _, port = one.rpartition('@')
    with socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(5)
        try:
            s.connect((address, int(port)))
            s.send(b'hello')
            print(s.recv(100).decode())
        except TimeoutError:
            print('silent')
        except OSError:
            print('refused')
"""
#: One socket that never stops asking; what it says is in /tmp/me, what it meets in /tmp/met.
KEEP = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1)
s.connect((sys.argv[1], 7001))
while True:
    try:
        s.send(open('/tmp/me', 'rb').read())
        met = s.recv(100).decode()
    except OSError as error:
        met = 'silent' if isinstance(error, TimeoutError) else 'refused'
    open('/tmp/met', 'w').write(met)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    with open_outside() as made:
        yield made


@pytest.fixture
def udpserver(outside: Outside) -> Iterator[Server]:
    server = Server.make(network_resolvers=outside.address, network_ca=outside.ca_file)
    try:
        server.start()
        yield server
        for item in server.api.list():
            server.api.delete(item["id"])
        truth.check(server)
    finally:
        server.close()


def opened(outside: Outside, **more: Any) -> dict[str, Any]:
    rule = {"id": "echo", "action": "allow", "protocol": "udp", "cidr": outside.network, "ports": [ECHO]}
    return {"mode": "allow-list", "rules": [rule], **more}


def network(box: Box, what: str = "", **body: Any) -> Any:
    method = "PUT" if body else "GET"
    return box.api.call(method, f"/v1/sandboxes/{box.id}/network{what}", json=body or None)


def tried(box: Box, *where: str) -> list[str]:
    return box.sh(f"python3 /tmp/try.py {' '.join(where)}").split()


def met(box: Box, word: str) -> bool:
    return box.exec("cat /tmp/met").stdout == word


def ports_of(outside: Outside, word: str) -> set[int]:
    """From which ports of the host somebody has said it."""
    return {port for port, said in outside.datagrams if said == word}


def rows(box: Box, **wanted: Any) -> list[dict[str, Any]]:
    entries = network(box, "/log?limit=1000")["entries"]
    return [one for one in entries if one["kind"] == "udp" and all(one[key] == wanted[key] for key in wanted)]


def follow(box: Box) -> list[tuple[str, dict[str, Any]]]:
    """What a reader of the log's stream is told while the policy closes everything and the sandbox is deleted; it goes
    on where another one has left off."""
    told: list[tuple[str, dict[str, Any]]] = []
    first = network(box, "/log?limit=1")["entries"][0]["seq"]
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(first)}
    with box.api.http.stream("GET", f"/v1/sandboxes/{box.id}/network/log", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        network(box, mode="none", rules=[])
        for event in sse.parse(response.iter_bytes()):
            told.append((event.name, event.data))
            assert len(told) < 100
            if event.data.get("end") and box.id in box.api.made:
                box.delete()
    assert min(one["seq"] for name, one in told if name == "decision") > first
    return told


def only_where_a_rule_says_so(box: Box, outside: Outside) -> None:
    """Neither another port, nor the host, a neighbour, metadata or the gateway, under a rule for everything too."""
    echo = f"{outside.address}@{ECHO}"
    assert tried(box, echo, f"{outside.address}@7002") == ["hello", "refused"]
    everything = [
        {"action": "allow", "protocol": "udp", "cidr": cidr, "ports": ["1-65535"]} for cidr in ("0.0.0.0/0", "::/0")
    ]
    network(box, mode="open", rules=everything)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("0.0.0.0", 0))
        listening.setblocking(False)
        port = listening.getsockname()[1]
        closed = (outside.host, "169.254.169.254", "192.168.127.1", "198.19.0.1", "fd00:c10c:e::1", "fe80::1")
        assert set(tried(box, *(f"{one}@{port}" for one in closed))) == {"refused"}
        with pytest.raises(BlockingIOError):
            listening.recv(10)
    told = network(box, f"/explain?host={outside.host}&protocol=udp&port={ECHO}")
    assert (told["allowed"], told["rule"]) == (False, "private-address")
    assert {one["verdict"] for one in rows(box, address=outside.host)} == {"deny"}
    # What was wanted and refused is proposed, and works then.
    network(box, mode="allow-list", rules=[], learn=True)
    assert tried(box, echo) == ["refused"]
    proposal = network(box, "/proposal")
    assert [(one["protocol"], one["ports"], one["cidr"]) for one in proposal["rules"]] == [
        ("udp", [ECHO], outside.address)
    ]
    network(box, mode=proposal["mode"], rules=proposal["rules"])
    assert tried(box, echo) == ["hello"]


def test_datagrams_of_a_machine_its_child_and_a_new_netd(udpserver: Server, outside: Outside) -> None:
    api: Api = udpserver.api
    box = api.create(network=opened(outside))
    box.put("/tmp/try.py", TRY.encode())
    only_where_a_rule_says_so(box, outside)

    network(box, **opened(outside))
    box.put("/tmp/keep.py", KEEP.encode())
    box.put("/tmp/me", b"parent")
    box.start(f"python3 /tmp/keep.py {outside.address}")
    until(lambda: met(box, "parent"))
    changed = network(box, mode="none", rules=[])
    assert changed["mode"] == "none"
    assert changed["cut"] >= 1, "flows that are over are remembered for a while"
    until(lambda: met(box, "refused"))
    network(box, **opened(outside))
    until(lambda: met(box, "parent"))
    ends = rows(box, end=True, reason="cut: the policy changed", verdict="allow", rule="echo")
    assert any(one["bytes_sent"] > 0 and one["bytes_received"] > 0 for one in ends)

    # A child goes on with the same socket, which is another flow.
    before = ports_of(outside, "parent")
    child = box.fork()
    child.put("/tmp/me", b"child")
    until(lambda: met(child, "child"))
    assert not ports_of(outside, "child") & before
    assert met(box, "parent")
    assert {one["rule"] for one in rows(child, verdict="allow")} == {"echo"}
    told = follow(child)
    until(lambda: met(box, "parent"))
    assert [name for name, _ in told[-1:]] == ["end"]
    assert "cut: the policy changed" in {one["reason"] for name, one in told if name == "decision"}

    # The server ends, and nothing stops; netd ends, and its successor has the policy.
    udpserver.kill()
    udpserver.start()
    box = udpserver.api.attach(box.id)
    (netd,) = [p for p in procs.below(udpserver.data) if "cloche_server.netd" in p.cmdline.split("\0")]
    netd.kill(signal.SIGKILL)
    outside.datagrams.clear()
    until(lambda: ports_of(outside, "parent"))
    until(lambda: met(box, "parent"))
    assert tried(box, f"{outside.address}@7002", f"169.254.169.254@{ECHO}") == ["refused", "refused"]
