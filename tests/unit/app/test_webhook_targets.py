"""Where webhooks may point, and what is read of an answer: the sender, with a receiver on this host."""

from __future__ import annotations

import pytest
from app_host import Crew, Host
from events_server import hook, serve
from receiver import Receiver, huge

from cloche_server.host import outbound


async def test_addresses_that_are_not_public_are_refused(host: Host, crew: Crew, receiver: Receiver) -> None:
    """At the call where that is plain, and at the connection in any case: a name is resolved anew each time."""
    async with serve(host, crew) as front:
        for url in (
            receiver.url,
            "http://localhost/",
            "http://[::1]/",
            "http://169.254.169.254/latest",
            "http://10.0.0.1/",
        ):
            response = await front.http.post("/v1/webhooks", json={"url": url})
            assert response.status_code == 400, url
            assert "webhook_private" in response.json()["error"]
        port = receiver.url.rsplit(":", 1)[1].split("/")[0]
        for name in ("127.1", "2130706433"):  # forms that only a resolver understands
            made = await hook(front, f"http://{name}:{port}/")
            tested = (await front.http.post(f"/v1/webhooks/{made['id']}/test")).json()
            assert "webhook_private" in tested["error"]
    assert receiver.connections == 0


async def test_a_name_that_changes_its_mind(
    host: Host, crew: Crew, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that was checked is the one that is connected to: the resolver is asked once for a connection."""
    asked: list[str] = []

    async def resolve(name: str, port: int) -> list[str]:
        asked.append(name)
        return ["192.168.1.1", "127.0.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"]

    monkeypatch.setattr(outbound, "_resolve", resolve)
    port = receiver.url.rsplit(":", 1)[1].split("/")[0]
    async with serve(host, crew) as front:
        made = await hook(front, f"http://rebind.example:{port}/")
        tested = (await front.http.post(f"/v1/webhooks/{made['id']}/test")).json()
    assert "webhook_private" in tested["error"]
    assert (asked, receiver.connections) == (["rebind.example"], 0)


async def test_limits_of_what_is_read(receiver: Receiver) -> None:
    sender = outbound.Sender(private=True)
    receiver.reactions = [huge]
    got = await sender.post(receiver.url, {}, b"{}")
    assert (got.status, len(got.body)) == (200, outbound.MOST_READ)
    await sender.aclose()


async def test_it_goes_through_no_proxy(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    sender = outbound.Sender(private=True)
    assert (await sender.post(receiver.url, {"a": "b"}, b"{}")).status == 204
    assert receiver.got[0].headers["host"] in receiver.url
    await sender.aclose()
