"""Git with a private repository over HTTPS: everything works, and the password never comes into the sandbox."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit import truth
from kit.client import Box
from kit.githost import GitHost
from kit.outside import NAME, Outside, open_outside
from kit.server import Server

PASSWORD = "ghp-0123456789-private"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    with open_outside() as made:
        (tmp_path / "git").mkdir()
        made.git = GitHost(tmp_path, PASSWORD)
        yield made


@pytest.fixture
def box(baked: Path, outside: Outside) -> Iterator[Box]:
    server = Server.make(baked, network_resolvers=outside.address, network_ca=outside.ca_file)
    try:
        server.start()
        server.api.call("PUT", "/v1/secrets/GIT", json={"value": PASSWORD})
        grant = {"secret": "GIT", "env": "GIT", "hosts": [NAME], "headers": ["authorization"]}
        yield server.api.create(network=outside.policy, secrets=[grant])
        truth.check(server)
        for name in ("audit.log", "server.log", "run/netd.log", "cloche.db", "cloche.db-wal"):
            path = server.data / name
            assert not path.exists() or PASSWORD.encode() not in path.read_bytes(), name
    finally:
        server.close()


def git(box: Box, verb: str, **body: Any) -> Any:
    return box.api.call("POST", f"{box.path}/git/{verb}", json={"path": "/app", **body})


def test_the_whole_way_and_back(box: Box, outside: Outside) -> None:
    host = outside.git
    assert host is not None
    bare = host.make("git/app.git", {"readme": "one\n"})
    url = f"https://{NAME}/git/app.git"
    denied = box.api.request("POST", f"{box.path}/git/clone", json={"url": url, "path": "/app"})
    assert denied.json()["code"] == "git.auth_failed", denied.text
    assert host.refused
    assert git(box, "clone", url=url, secret="GIT")["branch"] == "main"
    assert box.sh("cat /app/readme") == "one\n"
    box.sh("echo two >> /app/readme")
    assert [one["path"] for one in git(box, "status")["files"]] == ["readme"]
    assert "+two" in git(box, "diff")["diff"]
    git(box, "checkout", ref="topic", create=True)
    made = git(box, "commit", message="second", all=True, author={"name": "Ann", "email": "ann@example.com"})
    pushed = git(box, "push", secret="GIT")
    assert [one["status"] for one in pushed["refs"]] == ["new"]
    assert host.git("-C", bare, "rev-parse", "topic").strip() == made["hash"]
    # What the host got and what the guest has.
    real = base64.b64encode(f"x-access-token:{PASSWORD}".encode()).decode()
    assert any(real in one for one in host.sent)
    for text in (PASSWORD, real, real[:-4]):
        assert box.exec(f"grep -rlF -- '{text}' /app /root /etc /tmp /run /home /var").code == 1
        assert box.exec(f"cat /proc/[0-9]*/environ | grep -caF -- '{text}'").stdout == "0\n"
    assert box.sh("git -C /app remote get-url origin") == f"{url}\n"
