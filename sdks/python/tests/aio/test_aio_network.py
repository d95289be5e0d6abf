"""The network of a sandbox, and secrets."""

from __future__ import annotations

from cloche_fake import FakeCloche, faults

from cloche import AsyncClient, AsyncSandbox, NetworkPolicy

POLICY = {
    "mode": "allow-list",
    "rules": [{"id": "a", "action": "allow", "domain": "a.test"}],
    "limits": {},
    "learn": True,
}
ENTRY = {
    "seq": 3, "at": "2026-01-02T03:04:05Z", "kind": "tcp", "verdict": "deny", "rule": "default", "reason": "no rule",
    "name": "b.test", "address": "192.0.2.1", "port": 443, "end": False, "new": 1,
}  # fmt: skip


async def test_a_policy_is_sent_and_read(fake: FakeCloche) -> None:
    grants = [{"secret": "S", "hosts": ["a.test"]}]
    sandbox = await AsyncSandbox.create(network="none", secrets=grants)
    assert fake.bodies[-1]["network"] == {"mode": "none"}
    assert fake.bodies[-1]["secrets"] == grants
    fake.on("GET", "/network", faults.says(200, POLICY))
    policy = await sandbox.network()
    assert (policy.mode, policy.learn, policy.rules[0]["domain"]) == ("allow-list", True, "a.test")
    fake.on("PUT", "/network", faults.says(200, {**POLICY, "cut": 2}, fake.bodies))
    assert (await sandbox.set_network(policy)).cut == 2
    assert fake.bodies[-1] == POLICY
    fake.on("PUT", "/network", faults.says(200, {**POLICY, "cut": 0}))
    assert await sandbox.set_network(NetworkPolicy("open")) == policy


async def test_a_network_group_is_asked_for_and_changed(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create(network_group="team")
    assert fake.bodies[-1]["network_group"] == "team"
    told = {**sandbox.info.raw, "network_group": "crew"}
    fake.on("PATCH", sandbox.id, faults.says(200, told, fake.bodies))
    assert (await sandbox.set_network_group("crew")).info.network_group == "crew"
    assert fake.bodies[-1] == {"network_group": "crew"}
    fake.on("PATCH", sandbox.id, faults.says(200, {**sandbox.info.raw, "network_group": None}, fake.bodies))
    await sandbox.set_network_group(None)
    assert fake.bodies[-1] == {"network_group": ""}
    assert sandbox.info.network_group is None


async def test_what_was_decided_and_why(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    fake.on("GET", "/network/log", faults.says(200, {"entries": [ENTRY], "next": 3, "lost": 0}))
    (one,) = await sandbox.network_log(after=2)
    assert (one.seq, one.allowed, one.name, one.port, one.raw["new"]) == (3, False, "b.test", 443, 1)
    fake.on(
        "GET", "/network/explain", faults.says(200, {"allowed": False, "rule": "mode", "reason": "off", "step": "x"})
    )
    assert (await sandbox.explain_network("b.test")).reason == "off"
    fake.on("GET", "/network/proposal", faults.says(200, {"mode": "allow-list", "rules": []}))
    assert (await sandbox.propose_network()).mode == "allow-list"


async def test_secrets(fake: FakeCloche) -> None:
    told = {"name": "S", "version": 2, "description": "of a test", "created_at": "x", "updated_at": "y"}
    async with AsyncClient() as client:
        fake.on("PUT", "/secrets/S", faults.says(201, told, fake.bodies))
        assert (await client.secrets.put("S", "value", description="of a test")).version == 2
        assert fake.bodies[-1] == {"value": "value", "description": "of a test"}
        fake.on("GET", "/secrets", faults.says(200, {"secrets": [told]}))
        assert [one.name for one in await client.secrets.list()] == ["S"]
        fake.on("GET", "/secrets/S", faults.says(200, told))
        assert (await client.secrets.get("S")).description == "of a test"
        fake.on("DELETE", "/secrets/S", faults.says(204))
        await client.secrets.delete("S")
