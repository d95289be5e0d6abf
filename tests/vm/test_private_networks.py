"""Network groups of real machines: members reach each other by name, nobody else does, and it outlasts what happens."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from kit import procs, truth
from kit.client import Api, Box
from kit.server import Server
from kit.until import until

#: Says who has called, and then whatever it hears. So it does with datagrams.
SERVE = """
import socket, socketserver, threading
class Talk(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(('%s hears %s\\n' % (open('/tmp/me').read(), self.client_address[0])).encode())
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
def datagrams(sock):
    while True:
        data, caller = sock.recvfrom(65535)
        sock.sendto(('%s hears %s' % (open('/tmp/me').read(), caller[0])).encode(), caller)
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(('0.0.0.0', 9000))
threading.Thread(target=datagrams, args=(sock,), daemon=True).start()
Server(('0.0.0.0', 9000), Talk).serve_forever()
"""
CALL = """
import socket, sys
with socket.create_connection((sys.argv[1], 9000), 20) as s:
    f = s.makefile('rwb')
    print(f.readline().decode().strip())
    f.write(b'ping\\n'); f.flush()
    assert f.readline() == b'ping\\n'
"""
ASK = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(10)
    s.connect((sys.argv[1], 9000)); s.send(b'x'); print(s.recv(1000).decode())
"""
NONE = {"mode": "none"}


@pytest.fixture(scope="module")
def groupserver() -> Iterator[Server]:
    server = Server.make()
    try:
        server.start()
        yield server
        truth.check(server)
    finally:
        server.close()


@pytest.fixture
def groupapi(groupserver: Server) -> Iterator[Api]:
    yield groupserver.api
    for item in groupserver.api.list():
        groupserver.api.delete(item["id"])
    truth.check(groupserver)


def furnish(box: Box, name: str) -> Box:
    """It listens, and can call."""
    box.put("/tmp/me", name.encode())
    box.put("/tmp/serve.py", SERVE.encode())
    box.put("/tmp/call.py", CALL.encode())
    box.put("/tmp/ask.py", ASK.encode())
    box.start("python3 /tmp/serve.py")
    until(lambda: box.exec("python3 /tmp/call.py 127.0.0.1").code == 0)
    return box


def call(box: Box, name: str) -> str:
    return box.sh(f"python3 /tmp/call.py {name}").strip()


def address(box: Box, name: str) -> str:
    return box.sh(f"getent ahostsv4 {name} | head -1 | cut -d' ' -f1").strip()


def test_members_reach_each_other_through_everything(groupapi: Api, groupserver: Server) -> None:
    db = furnish(groupapi.create(name="db", network=NONE, network_group="team"), "db")
    web = furnish(groupapi.create(name="web", network=NONE, network_group="team"), "web")
    at_db, at_web = address(web, "db"), address(db, "web")
    assert at_db != at_web
    assert call(web, "db") == f"db hears {at_web}"
    assert call(db, "web.team.internal") == f"web hears {at_db}"
    assert call(web, f"{db.id}.team.internal") == f"db hears {at_web}"
    assert web.sh("python3 /tmp/ask.py db").strip() == f"db hears {at_web}", "by UDP as well"
    assert web.exec("curl -sS -m 20 http://db:9001/").code in {7, 55, 56}, "refused at once"

    child = web.fork()
    assert child.refresh()["network_group"] == "team"
    at_child = address(web, child.id)
    assert at_child not in {at_db, at_web}
    assert call(child, "db") == f"db hears {at_child}", "an address of its own"

    with Api(groupserver.url, groupserver.cli("token", "create", "--workspace", "elsewhere").strip()) as elsewhere:
        stranger = elsewhere.create(name="thief", network_group="team")
        try:
            stranger.put("/tmp/call.py", CALL.encode())
            stranger.put("/tmp/ask.py", ASK.encode())
            assert stranger.exec(f"python3 /tmp/call.py {db.id}.team.internal").code != 0
            assert stranger.exec(f"python3 /tmp/call.py {at_db}").code != 0
            assert stranger.exec(f"python3 /tmp/ask.py {at_db}").code != 0
        finally:
            stranger.delete()
    lone = groupapi.create(network={"mode": "open"})
    lone.put("/tmp/call.py", CALL.encode())
    for name in ("db", "db.team.internal", at_db):
        assert lone.exec(f"python3 /tmp/call.py {name}").code != 0, name

    assert [one["id"] for one in groupapi.list(network_group="team")] == [db.id, web.id, child.id]
    groupserver.kill()
    groupserver.start()
    api = groupserver.api
    db, web, lone = api.attach(db.id), api.attach(web.id), api.attach(lone.id)
    assert call(web, "db") == f"db hears {at_web}"
    (netd,) = [p for p in procs.below(groupserver.data) if "cloche_server.netd" in p.cmdline.split("\0")]
    netd.kill(signal.SIGKILL)
    until(lambda: web.exec("python3 /tmp/call.py db").stdout.strip() == f"db hears {at_web}")
    assert web.sh("python3 /tmp/ask.py db").strip() == f"db hears {at_web}"

    assert db.verb("hibernate")[0] in {200, 204}
    until(lambda: "hibernated" in explain(api, web, "db")["reason"])
    assert web.exec("python3 /tmp/call.py db").code != 0
    assert db.sh("cat /tmp/me") == "db", "woken by the call"
    assert until(lambda: web.exec("python3 /tmp/call.py db").stdout.strip()) == f"db hears {at_web}"

    api.call("PATCH", f"/v1/sandboxes/{lone.id}", json={"network_group": "team"})
    assert call(lone, "db").startswith("db hears 198.19.")
    api.call("PATCH", f"/v1/sandboxes/{lone.id}", json={"network_group": ""})
    assert lone.exec("python3 /tmp/call.py db").code != 0
    db.delete()
    assert web.exec("getent hosts db.team.internal").code != 0
    log = api.call("GET", f"/v1/sandboxes/{web.id}/network/log?limit=1000")["entries"]
    assert {one["rule"] for one in log if one["name"] == "db"} == {"group"}


def explain(api: Api, box: Box, host: str) -> dict[str, object]:
    answer: dict[str, object] = api.call("GET", f"/v1/sandboxes/{box.id}/network/explain?host={host}&port=9000")
    return answer
