"""Ports, previews and signed links."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cloche_fake import FakeCloche, faults

from cloche import AsyncSandbox, ConflictError, NotFoundError, PortError

LISTENS = {
    "port": 3000, "listening": True, "source": "detected", "proxy_url": "http://3000-sb1.localhost:8601",
    "access": "public", "host": "public", "addresses": ["127.0.0.1"], "pid": 7, "process": "node", "new": 1,
}  # fmt: skip
SAID = {"port": 4000, "listening": False, "source": "user", "proxy_url": "/v1/sandboxes/sb1/proxy/4000/"}
TOKEN = {
    "url": "http://localhost:8601/v1/p/a.b/", "host_url": "http://3000-sb1.localhost:8601/?preview_token=a.b",
    "token": "a.b", "sandbox_id": "sb1", "port": 3000, "paths": ["/x"], "expires_at": "2026-01-02T03:04:05Z",
}  # fmt: skip


async def test_ports(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("GET", "/ports", faults.says(200, [LISTENS, SAID]))
    found = await sandbox.ports()
    assert [(port.port, port.listening, port.declared, port.process) for port in found] == [
        (3000, True, False, "node"),
        (4000, False, True, None),
    ]
    assert found[0].addresses == ("127.0.0.1",)
    assert found[0].raw["new"] == 1
    assert found[1].url.endswith("/v1/sandboxes/sb1/proxy/4000/")
    assert found[1].url.startswith("http://127.0.0.1:")
    fake.on("GET", "/ports/3000", faults.says(200, LISTENS))
    assert await sandbox.preview_url(3000) == "http://3000-sb1.localhost:8601"


async def test_saying_something_about_a_port(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/ports", faults.says(201, {**SAID, "access": "basic", "label": "app", "domain": "a.example"}))
    port = await sandbox.expose(4000, access="basic", username="ann", password="long enough", label="app")
    assert (port.access, port.label, port.domain) == ("basic", "app", "a.example")
    fake.on("DELETE", "/ports/4000", faults.says(204))
    await sandbox.unexpose(4000)
    assert (fake.requests[-1].method, fake.requests[-1].path.rpartition("/")[2]) == ("DELETE", "4000")


async def test_a_signed_link(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/preview-token", faults.says(200, TOKEN))
    token = await sandbox.preview_token(3000, ttl_seconds=60, paths=["/x"])
    assert (token.url, token.host_url, token.token) == (TOKEN["url"], TOKEN["host_url"], "a.b")
    assert token.expires_at == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert "a.b" not in repr(token)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("port.not_found", 404, NotFoundError),
        ("port.domain_taken", 409, ConflictError),
        ("port.closed", 502, PortError),
        ("port.of_the_future", 502, PortError),
    ],
)
async def test_refusals(fake: FakeCloche, code: str, status: int, kind: type[Exception]) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("POST", "/ports", faults.error(status, code))
    with pytest.raises(kind):
        await sandbox.expose(1)
