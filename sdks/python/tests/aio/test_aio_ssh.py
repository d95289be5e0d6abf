"""Keys for SSH, and where it is served."""

from __future__ import annotations

from cloche_fake import FakeCloche, faults

from cloche import AsyncClient

KEY = {
    "id": "ssh_1", "kind": "ssh-ed25519", "public_key": "ssh-ed25519 AAAA", "fingerprint": "SHA256:x", "comment": "c",
    "created_at": "2026-01-02T03:04:05Z", "new": 1,
}  # fmt: skip


async def test_keys(fake: FakeCloche) -> None:
    async with AsyncClient() as client:
        fake.on("POST", "/ssh-keys", faults.says(201, KEY))
        made = await client.ssh_keys.create("ssh-ed25519 AAAA c", expires_in_seconds=60)
        assert (made.id, made.fingerprint, made.sandbox_id, made.expires_at) == ("ssh_1", "SHA256:x", None, None)
        fake.on("GET", "/ssh-keys", faults.says(200, {"keys": [KEY, {**KEY, "sandbox_id": "sb1"}]}))
        assert [one.sandbox_id for one in await client.ssh_keys.list()] == [None, "sb1"]
        fake.on("DELETE", "/ssh-keys/ssh_1", faults.says(204, None))
        await client.ssh_keys.delete("ssh_1")


async def test_the_server(fake: FakeCloche) -> None:
    async with AsyncClient() as client:
        fake.on("GET", "/ssh", faults.says(200, {"enabled": False}))
        assert not (await client.ssh_keys.server()).enabled
        told = {"enabled": True, "port": 2222, "host_key": "ssh-ed25519 AAAA", "fingerprint": "SHA256:x"}
        fake.on("GET", "/ssh", faults.says(200, told))
        assert (await client.ssh_keys.server()).port == 2222
