"""The network of real machines: what they reach, what they do not, and what becomes of it when they move."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kit import procs, truth
from kit.client import Api, Box
from kit.outside import NAME, OTHER, Outside, open_outside
from kit.server import Server
from kit.until import until

#: Of programs in the guest: an answer comes at once, or never.
CURL = "curl -sS -m 40"
#: A connection that waits for what the other end says, and writes what it got or why it ended.
HOLD = """
import socket, sys
s = socket.create_connection(('{address}', 7000), 20)
s.settimeout(None)
s.sendall(b'hello')
open('/tmp/held', 'w').write(s.recv(100).decode())
try:
    got = s.recv(100)
    open('/tmp/end', 'w').write('got %r' % got)
except OSError as error:
    open('/tmp/end', 'w').write(type(error).__name__)
"""


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    with open_outside() as made:
        yield made


@pytest.fixture(scope="module")
def netserver(outside: Outside) -> Iterator[Server]:
    server = Server.make(network_resolvers=outside.address, network_ca=outside.ca_file)
    try:
        server.start()
        yield server
        truth.check(server)
    finally:
        server.close()


@pytest.fixture
def netapi(netserver: Server) -> Iterator[Api]:
    yield netserver.api
    for item in netserver.api.list():
        netserver.api.delete(item["id"])
    truth.check(netserver)


def request(api: Api, method: str, path: str, body: Any = None) -> Any:
    """The JSON of a call that the client has no name for."""
    return api.call(method, path, json=body)


def netd_of(server: Server) -> procs.Proc:
    found = [p for p in procs.below(server.data) if "cloche_server.netd" in p.cmdline.split("\0")]
    assert len(found) == 1
    return found[0]


def held(box: Box, outside: Outside) -> None:
    """The sandbox has a connection that nobody ends."""
    box.put("/tmp/hold.py", HOLD.format(address=outside.address).encode())
    box.start("python3 /tmp/hold.py")
    until(lambda: box.exec("test -s /tmp/held").code == 0)


def test_by_default_only_public_addresses(netapi: Api, netserver: Server, outside: Outside) -> None:
    """Neither the host nor what is around it, by no family, whatever root in the guest does."""
    box = netapi.create()
    port = netserver.url.rpartition(":")[2]
    for host in (outside.address, "169.254.169.254", "192.168.127.1", "[fd00:c10c:e::1]"):
        assert '"code": "network.denied"' in box.sh(f"{CURL} http://{host}/"), host
        assert box.exec(f"{CURL} http://{host}:{port}/").code in {7, 55, 56}, f"{host}: refused or reset, at once"
    assert box.exec("ping -c1 -W2 203.0.113.9").code == 1
    vsock = "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).connect((2, 22))"
    assert "Error" in box.exec(["python3", "-c", vsock]).stderr, "there is no other way to the host"
    box.sh("ip link set eth0 address 02:00:00:00:00:77; ip link set eth0 address 02:c1:0c:00:00:02")
    box.sh("ip addr add 10.0.0.5/32 dev eth0; ip route replace default via 192.168.127.1")
    assert "network.denied" in box.sh(f"{CURL} http://{outside.address}/")
    assert box.exec(f"{CURL} --interface 10.0.0.5 http://{outside.address}/").code != 0
    assert outside.requests == []
    log = request(netapi, "GET", f"/v1/sandboxes/{box.id}/network/log?limit=1000")
    refused = [one for one in log["entries"] if one["address"] == outside.address]
    assert {one["verdict"] for one in refused} == {"deny"}
    assert {one["rule"] for one in refused} == {"private-address"}


def test_nothing_is_nothing(netapi: Api, outside: Outside) -> None:
    """Not even a question gets out, and the refusal is quick."""
    box = netapi.create(network={"mode": "none"})
    outside.asked.clear()
    began = time.monotonic()
    assert box.exec(f"getent hosts secret-data.{NAME}").code != 0
    assert '"rule": "mode"' in box.sh(f"{CURL} http://{outside.address}/")
    assert time.monotonic() - began < 30, "refused, not timed out"
    assert outside.asked == []
    told = request(netapi, "GET", f"/v1/sandboxes/{box.id}/network/explain?host={NAME}")
    assert (told["allowed"], told["rule"]) == (False, "mode")


def test_a_change_counts_at_once(netapi: Api, outside: Outside) -> None:
    box = netapi.create(network=outside.policy)
    assert "GET / HTTP/1.1" in box.sh(f"{CURL} http://{outside.address}/")
    held(box, outside)
    changed = request(netapi, "PUT", f"/v1/sandboxes/{box.id}/network", {"mode": "none"})
    assert (changed["mode"], changed["cut"]) == ("none", 1)
    until(lambda: box.exec("test -s /tmp/end").code == 0)
    assert '"rule": "mode"' in box.sh(f"{CURL} http://{outside.address}/")
    request(netapi, "PUT", f"/v1/sandboxes/{box.id}/network", outside.policy)
    assert "GET / HTTP/1.1" in box.sh(f"{CURL} http://{outside.address}/")
    assert request(netapi, "GET", f"/v1/sandboxes/{box.id}/network")["rules"][0]["id"] == "outside"


def test_a_fork_has_the_network_of_its_parent_and_none_of_its_connections(netapi: Api, outside: Outside) -> None:
    parent = netapi.create(network=outside.policy)
    held(parent, outside)
    child = parent.fork()
    assert "GET / HTTP/1.1" in child.sh(f"{CURL} http://{outside.address}/"), "in its first command"
    until(lambda: child.exec("test -s /tmp/end").code == 0)
    assert child.sh("cat /tmp/end") == "ConnectionAbortedError"
    assert parent.exec("test -e /tmp/end").code == 1, "the connection of the parent goes on"
    outside.connections[-1].sendall(b"still there")
    until(lambda: parent.exec("test -s /tmp/end").code == 0)
    assert parent.sh("cat /tmp/end") == "got b'still there'"


def test_sleep_and_restore_keep_the_policy_and_drop_connections(netapi: Api, outside: Outside) -> None:
    box = netapi.create(network=outside.policy)
    held(box, outside)
    snapshot = box.snapshot()
    assert box.verb("hibernate")[0] in {200, 204}
    assert "GET / HTTP/1.1" in box.sh(f"{CURL} http://{outside.address}/"), "woken by the call"
    assert box.sh("cat /tmp/end") == "ConnectionAbortedError"
    box.restore(snapshot)
    assert "GET / HTTP/1.1" in box.sh(f"{CURL} http://{outside.address}/")
    assert request(netapi, "GET", f"/v1/sandboxes/{box.id}/network")["mode"] == "allow-list"


def test_connections_outlive_the_server_and_policy_outlives_netd(
    netapi: Api, netserver: Server, outside: Outside
) -> None:
    box = netapi.create(network=outside.policy)
    held(box, outside)
    netserver.kill()
    netserver.start()
    box = netserver.api.attach(box.id)
    assert box.exec("test -e /tmp/end").code == 1, "netd carries on without a server"
    netd_of(netserver).kill(signal.SIGKILL)
    until(lambda: box.exec("test -s /tmp/end").code == 0)
    until(lambda: "GET / HTTP/1.1" in box.exec(f"{CURL} http://{outside.address}/").stdout)
    assert "network.denied" in box.sh(f"{CURL} http://169.254.169.254/"), "the new one has the policy"


def test_a_secret_goes_where_it_belongs_and_nowhere_else(netapi: Api, netserver: Server, outside: Outside) -> None:
    """The value is put in on the host; the guest never has it."""
    value = "s3cret-value-0123456789"
    request(netapi, "PUT", "/v1/secrets/TOKEN", {"value": value})
    box = netapi.create(
        network=outside.policy,
        secrets=[{"secret": "TOKEN", "env": "TOKEN", "hosts": [NAME], "headers": ["authorization"]}],
    )
    outside.requests.clear()
    echoed = box.sh(f'{CURL} -H "Authorization: Bearer $TOKEN" https://{NAME}/x')
    assert "cloche-secret-token-" in echoed, "what comes back has the placeholder again"
    assert value not in echoed
    assert f"Bearer {value}" in outside.requests[-1]
    refused = box.sh(f'{CURL} -H "Authorization: Bearer $TOKEN" https://{NAME}/ -H "X-Other: $TOKEN"')
    assert "network.secret_violation" in refused
    request(netapi, "PUT", "/v1/secrets/TOKEN", {"value": value + "-rotated"})
    box.sh(f'{CURL} -H "Authorization: Bearer $TOKEN" https://{NAME}/y')
    assert f"Bearer {value}-rotated" in outside.requests[-1]
    code = "import os,urllib.request as u;u.urlopen(u.Request('https://%s/py',headers={'Authorization':os.environ['TOKEN']}))"
    box.sh(f'python3 -c "{code % NAME}"')
    assert f"Authorization: {value}-rotated" in outside.requests[-1]
    before = len(outside.requests)
    box.exec(f'{CURL} -k -H "Authorization: Bearer $TOKEN" https://{OTHER}/')
    assert all(value not in one for one in outside.requests[before:])
    # It is in nothing that is kept: logs, the database, disks, and the memory of a snapshot. This comes before the
    # guest is told what to look for.
    box.snapshot()
    kept = [path for path in netserver.data.iterdir() if path.name not in ("templates", "images", "kernels", "net")]
    words = ["grep", "-rlaF", "--devices=skip", value, *kept]
    searched = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (searched.returncode, searched.stdout) == (1, ""), searched
    found = box.exec(
        f"grep -rl {value} /etc /root /tmp /home /run 2>/dev/null; grep -la {value} /proc/*/environ"
    ).stdout
    assert found.replace("/proc/self/environ", "").strip() == ""
