"""How fast a sandbox may be asked and a preview be guessed at, and what is kept of it."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_site import BOX, OWNER, Site, mirror, site

from cloche_server.app.audit import AuditEntry
from cloche_server.app.ports import PortWish
from cloche_server.core.errors import ClocheError
from cloche_server.core.previews import PortAccess
from cloche_server.gateway import admission
from cloche_server.gateway.brakes import Brakes
from cloche_server.gateway.tunnel import tunnel

KEY = "dGhlIHNhbXBsZSBub25jZQ=="


class Still(Brakes):
    """Of a world in which no time passes, however slow the machine is."""

    def request(self, sandbox_id: str, now: float) -> None:
        super().request(sandbox_id, 0.0)

    def wrong(self, sandbox_id: str, client: str, now: float) -> None:
        super().wrong(sandbox_id, client, 0.0)

    def check_guess(self, sandbox_id: str, client: str, now: float) -> None:
        super().check_guess(sandbox_id, client, 0.0)


@pytest.fixture
async def closed(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, usual=PortAccess.TOKEN, brakes=Still(0, 1, 3)) as made:
        async with await made.serve(mirror), await made.serve(mirror, 4000):
            yield made


async def test_wrong_tokens_are_bounded_and_right_ones_are_not(closed: Site) -> None:
    token, _ = await closed.ports.token("w", BOX, 3000, None, [])
    for _ in range(5):
        assert (await closed.ask("GET / HTTP/1.1")).status == 401, "who sends nothing has guessed nothing"
    ways = ["X-Preview-Token: x", "Authorization: Bearer x", "Cookie: cloche_preview=x"]
    for way in ways:
        assert (await closed.ask(f"GET / HTTP/1.1\n{way}")).status == 401
    for way in ways:
        reply = await closed.ask(f"GET / HTTP/1.1\n{way}")
        assert (reply.status, json.loads(reply.body)["code"]) == (429, "request.rate_limited")
        assert int(reply.get("retry-after") or 0) >= 1
    page = await closed.ask("GET /?preview_token=x HTTP/1.1\nAccept: text/html")
    assert (page.status, b"429 Too Many Requests" in page.body) == (429, True)
    assert (await closed.ask(f"GET / HTTP/1.1\nX-Preview-Token: {token}")).status == 200
    assert (await closed.ask("GET / HTTP/1.1")).status == 401


async def test_a_password_is_not_looked_at_when_too_many_were_wrong(
    closed: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await closed.ports.declare("w", BOX, PortWish(4000, access=PortAccess.BASIC, username="me", password="open sesame"))
    checked: list[str] = []
    check = admission.check_password

    def counted(stored: str, given: str) -> bool:
        checked.append(given)
        return check(stored, given)

    monkeypatch.setattr(admission, "check_password", counted)
    host = closed.host.replace("3000-", "4000-")

    async def ask(password: str) -> int:
        sent = base64.b64encode(f"me:{password}".encode()).decode()
        return (await closed.ask(f"GET / HTTP/1.1\nAuthorization: Basic {sent}", host=host)).status

    assert await ask("open sesame") == 200
    assert [await ask(f"guess {number}") for number in range(5)] == [401, 401, 401, 429, 429]
    assert len(checked) == 4
    assert await ask("open sesame") == 200, "who was in before is not locked out"


async def test_requests_to_a_sandbox_are_bounded(tmp_path: Path) -> None:
    async with site(tmp_path, brakes=Still(60, 4, 0)) as made, await made.serve(mirror):
        assert [(await made.ask("GET / HTTP/1.1")).status for _ in range(5)] == [200] * 4 + [429]
        reply = await made.ask("GET / HTTP/1.1")
        assert "try again in" in json.loads(reply.body)["error"]
        assert len(made.world.dialed) == 4, "what is refused does not reach the guest"


def test_addresses_and_sandboxes_are_apart_and_one_machine_s_addresses_are_not() -> None:
    brakes = Brakes(0, 0, 1)
    brakes.wrong("a", "2001:db8::1", 0)
    for client in ("2001:db8::1", "2001:db8::2%eth0"):
        for call in (brakes.wrong, brakes.check_guess):
            with pytest.raises(ClocheError, match="try again in 60 s"):
                call("a", client, 0)
    for sandbox, client in (("b", "2001:db8::1"), ("a", "2001:db8:0:1::1"), ("a", "192.0.2.1"), ("a", "?")):
        brakes.check_guess(sandbox, client, 0)
        brakes.wrong(sandbox, client, 0)
    brakes.check_guess("a", "2001:db8::1", 60)


async def test_a_tunnel_that_is_opened_is_in_the_audit_log_without_its_token(tmp_path: Path) -> None:
    kept: list[AuditEntry] = []
    async with site(tmp_path) as made, await made.serve(mirror):
        made.gateway.tunnel = tunnel
        made.gateway.audit = kept.append
        upgrade = "Connection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13"
        path = f"/v1/sandboxes/{BOX}/tunnel/3000"
        wire = await made.connect()
        lines = (
            f"GET {path} HTTP/1.1\nHost: localhost\nAuthorization: Bearer {OWNER}\nSec-WebSocket-Key: {KEY}\n{upgrade}"
        )
        await wire.send(lines.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        assert (await wire.head()).status == 101
        wire.close()
        await made.ask("GET / HTTP/1.1")
    (entry,) = kept
    assert (entry.workspace, entry.sandbox_id, entry.token, entry.status) == ("w", BOX, "prefix-w", 101)
    assert entry.route == "/v1/sandboxes/{sandbox_id}/tunnel/{port}"
    assert OWNER not in repr(entry)
