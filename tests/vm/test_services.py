"""Services in a real machine, through all that can happen to it: one sandbox, one life."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.client import Api, Box
from kit.server import Server
from kit.until import until

SERVICES: list[dict[str, Any]] = [
    {
        "name": "web",
        "argv": ["python3", "-u", "-m", "http.server", "8000", "--bind", "127.0.0.1"],
        "health": {"http": {"port": 8000}, "interval_seconds": 1, "timeout_seconds": 20},
        "depends_on": ["first"],
        "backoff_seconds": 0.5,
    },
    {"name": "first", "command": "echo caf\N{LATIN SMALL LETTER E WITH ACUTE}; printf '\\377\\n'", "restart": "no"},
    {
        # It takes no notice of TERM, and neither does what it leaves behind.
        "name": "stubborn",
        "command": "trap '' TERM; (while :; do sleep 1; done) & echo $! >/tmp/child; while :; do sleep 1; done",
        "stop_grace_seconds": 0.5,
        "health": {"command": "sleep 600", "timeout_seconds": 0.5, "retries": 1, "start_period_seconds": 0,
                   "interval_seconds": 0.5, "on_unhealthy": "report"},
    },
    {"name": "missing", "argv": ["/no/such/program"], "backoff_seconds": 0.1, "max_restarts": 2},
]  # fmt: skip
WEB = [f"service.{kind}" for kind in ("started", "healthy")]


@pytest.fixture
def own(baked: Path) -> Iterator[Server]:
    """A server that may be killed."""
    server = Server.make(baked, pool_warm=0, pool_launched=0)
    server.start()
    try:
        yield server
    finally:
        server.close()


def service(api: Api, box: Box, name: str = "web", state: str = "healthy") -> dict[str, Any]:
    """One in a state, which has to come."""
    found = api.call("GET", f"/v1/sandboxes/{box.id}/services/{name}/wait?state={state}&timeout=90")
    assert found["state"] == state, found
    return dict(found)


def events(api: Api, box: Box, name: str = "web") -> list[dict[str, Any]]:
    told = api.call("GET", f"/v1/sandboxes/{box.id}/events?type=service.*&tail=200")["events"]
    return [one for one in told if one["payload"]["service"] == name]


def kinds(api: Api, box: Box, *wanted: str, name: str = "web") -> None:
    """These are told, and nothing else."""
    until(lambda: [one["type"] for one in events(api, box, name)][-1:] == [wanted[-1]], 30)
    assert [one["type"] for one in events(api, box, name)] == [*wanted]


def goes_on(api: Api, box: Box, pid: int) -> None:
    """The same process lives, and is looked after."""
    found = service(api, box)
    assert (found["pid"], found["restarts"]) == (pid, 0)
    assert box.exec(f"kill -0 {pid}").code == 0


def as_they_are(api: Api, box: Box) -> int:
    """What a create with services has made."""
    first = service(api, box)
    assert service(api, box, "first", "stopped")["last_exit"]["exit_code"] == 0
    assert service(api, box, "missing", "failed")["restarts"] == 2
    assert service(api, box, "stubborn", "unhealthy")["pid"] > 0
    kinds(api, box, *WEB)
    kinds(api, box, "service.started", "service.exited", name="first")
    kinds(api, box, *(["service.started", "service.exited"] * 3), "service.gave_up", name="missing")
    kinds(api, box, "service.started", "service.unhealthy", name="stubborn")
    assert events(api, box, "missing")[1]["payload"]["exit_code"] == 127
    return int(first["pid"])


def stopped_with_all_it_left(api: Api, box: Box) -> None:
    child = box.sh("cat /tmp/child").strip()
    found = api.call("POST", f"/v1/sandboxes/{box.id}/services/stubborn/stop")
    assert (found["state"], found["last_exit"]["termination"]["signal"]) == ("stopped", "SIGKILL")
    assert box.exec(f"kill -0 {child}").code != 0, "what it left behind lives on"
    api.call("DELETE", f"/v1/sandboxes/{box.id}/services/stubborn")


def forked(api: Api, box: Box, pid: int) -> None:
    """A fork has its own of it: what is done to one is not done to the other, nor told of it."""
    child = box.fork()
    goes_on(api, child, pid)
    child.sh(f"kill -9 {pid}")
    api.call("GET", f"/v1/sandboxes/{child.id}/services/web/wait?state=backoff&timeout=30")
    again = service(api, child)
    assert again["restarts"] == 1
    assert again["pid"] != pid
    kinds(api, child, "service.exited", *WEB)
    assert events(api, child)[0]["payload"]["retry_in_seconds"] == 0.5
    child.delete()


def logs_by_cursor(api: Api, box: Box) -> None:
    path = f"/v1/sandboxes/{box.id}/logs"
    page = api.call("GET", f"{path}?source=service:first&format=json")
    assert [one["line"] for one in page["lines"]] == [
        "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
        "\N{REPLACEMENT CHARACTER}",
    ]
    assert not page["gap_bytes"]
    rest = api.call("GET", f"{path}?source=service:first&format=json&from={page['next']}")
    assert rest["lines"] == []


def test_a_life_with_services(own: Server) -> None:
    box = own.api.create(services=SERVICES, wait_for_services_seconds=90)
    assert {one["name"] for one in box.info["services"]} == {one["name"] for one in SERVICES}
    pid = as_they_are(own.api, box)
    stopped_with_all_it_left(own.api, box)
    logs_by_cursor(own.api, box)
    snapshot = own.api.call("POST", f"{box.path}/snapshots", json={})
    for verb in ("pause", "resume", "hibernate", "wake"):
        box.verb(verb)
    goes_on(own.api, box, pid)
    forked(own.api, box, pid)
    goes_on(own.api, box, pid)
    kinds(own.api, box, *WEB)

    # While no server runs its process ends; the next one is told of it, once.
    box.start(f"sleep 1; kill -9 {pid}")
    own.kill()
    own.start()
    box = own.api.attach(box.id)
    until(lambda: service(own.api, box)["restarts"] == 1, 60)
    kinds(own.api, box, *WEB, "service.exited", *WEB)
    assert json.dumps(events(own.api, box)[2]["payload"]).count("KILL") >= 1

    # Back to when it had not ended; and then a boot, from the disk alone.
    own.api.call("POST", f"{box.path}/restore", json={"snapshot_id": snapshot["id"]})
    goes_on(own.api, box, pid)
    box.sh("echo kept >/root/kept; sync")
    own.api.call("POST", f"{box.path}/stop")
    own.api.call("POST", f"{box.path}/start")
    assert service(own.api, box)["restarts"] == 0
    assert box.sh("cat /root/kept; stat -c %a /var/lib/cloche/services.json") == "kept\n600\n"
    assert [one["type"] for one in events(own.api, box)][-2:] == WEB
    log = own.api.call("GET", f"{box.path}/logs?source=service:web&format=json")
    assert any("GET / HTTP/1.1" in line["line"] for line in log["lines"])
    said = own.api.call("GET", f"{box.path}/logs?source=agent&format=json")["lines"]
    assert any("cloche-agent" in line["line"] for line in said)
