"""Services in a real machine: a boot, a fork and a wake have what belongs to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit.client import Api, Box

WEB = {
    "argv": ["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"],
    "health": {"http": {"port": 8000}, "interval_seconds": 1, "timeout_seconds": 20},
    "depends_on": ["first"],
}


def service(api: Api, box: Box, name: str = "web") -> dict[str, Any]:
    return dict(api.call("GET", f"/v1/sandboxes/{box.id}/services/{name}"))


def healthy(api: Api, box: Box) -> dict[str, Any]:
    found = api.call("GET", f"/v1/sandboxes/{box.id}/services/web/wait?state=healthy&timeout=90")
    assert found["state"] == "healthy", found
    return dict(found)


def test_a_service_goes_on_and_comes_back(api: Api, create: Callable[..., Box]) -> None:
    box = create()
    path = f"/v1/sandboxes/{box.id}"
    api.call("PUT", f"{path}/services/first", json={"command": "echo done", "restart": "no"})
    api.call("PUT", f"{path}/services/web", json=WEB)
    first = healthy(api, box)
    assert service(api, box, "first")["state"] == "stopped"
    # Asleep and awake: the same process, which the agent still looks after.
    api.call("POST", f"{path}/hibernate")
    api.call("POST", f"{path}/wake")
    assert healthy(api, box)["pid"] == first["pid"]
    # A fork has its own of it: what is done to one is not done to the other.
    child = box.fork()
    assert healthy(api, child)["pid"] == first["pid"]
    child.sh(f"kill -9 {first['pid']}")
    api.call("GET", f"/v1/sandboxes/{child.id}/services/web/wait?state=backoff&timeout=30")
    again = healthy(api, child)
    assert again["restarts"] == 1
    assert again["pid"] != first["pid"]
    assert healthy(api, box)["restarts"] == 0
    child.delete()
    # A boot, from the disk alone.
    box.sh("echo kept >/root/kept")
    api.call("POST", f"{path}/stop")
    api.call("POST", f"{path}/start")
    booted = healthy(api, box)
    assert booted["restarts"] == 0
    assert box.sh("cat /root/kept; stat -c %a /var/lib/cloche/services.json") == "kept\n600\n"
    log = api.call("GET", f"{path}/logs?source=service:web&format=json")
    assert any("GET / HTTP/1.1" in line["line"] for line in log["lines"])
    assert any(
        "cloche-agent" in line["line"] for line in api.call("GET", f"{path}/logs?source=agent&format=json")["lines"]
    )
