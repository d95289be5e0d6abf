"""Making, finding and ending sandboxes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cloche_fake import KEY, FakeCloche, faults

from cloche import (
    AsyncClient,
    AsyncSandbox,
    AuthError,
    ConfigError,
    SandboxNotFound,
    TemplateNotFound,
    UnsupportedError,
)


async def test_create_use_and_kill_at_the_end_of_the_block(fake: FakeCloche) -> None:
    async with await AsyncSandbox.create() as sandbox:
        assert sandbox.id in fake.sandboxes
        assert sandbox.status == "running"
        assert sandbox.template == "base"
        assert sandbox.isolation.accel == "tcg"
        assert sandbox.info.created_at == datetime(2025, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    assert fake.sandboxes == {}


async def test_create_sends_what_was_asked_for_and_nothing_else(fake: FakeCloche) -> None:
    await AsyncSandbox.create()
    await AsyncSandbox.create(
        "ubuntu-24.04", cpus=2, memory_mb=512, disk_mb=8192, ttl_seconds=60, metadata={"a": "b"}, env={"X": "1"},
        cwd="/srv", user="agent", minimum_boundary="any",
    )  # fmt: skip
    assert fake.bodies[0] == {"template": "base"}
    assert fake.bodies[1] == {
        "template": "ubuntu-24.04", "cpus": 2, "memory_mb": 512, "disk_mb": 8192, "ttl_seconds": 60,
        "metadata": {"a": "b"}, "env": {"X": "1"}, "cwd": "/srv", "user": "agent", "minimum_boundary": "any",
    }  # fmt: skip


async def test_an_error_in_the_block_is_the_one_that_is_seen(fake: FakeCloche) -> None:
    async def work() -> None:
        async with await AsyncSandbox.create() as sandbox:
            fake.on("DELETE", sandbox.id, faults.error(500, "internal"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await work()
    assert "could not be killed" in caught.value.__notes__[0]


async def test_kill_of_what_is_gone_is_fine(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    await sandbox.kill()
    await sandbox.kill()
    with pytest.raises(SandboxNotFound):
        await sandbox.refresh()


async def test_connect_and_list_by_metadata(fake: FakeCloche) -> None:
    first = await AsyncSandbox.create(metadata={"run": "a b&c"})
    await AsyncSandbox.create(metadata={"run": "2"})
    found = await AsyncSandbox.list(metadata={"run": "a b&c"})
    assert [sandbox.id for sandbox in found] == [first.id]
    assert len(await AsyncSandbox.list()) == 2
    again = await AsyncSandbox.connect(first.id)
    assert again.info == first.info
    with pytest.raises(SandboxNotFound) as caught:
        await AsyncSandbox.connect("no/such?one")
    assert (caught.value.code, caught.value.status, caught.value.request_id) == ("sandbox.not_found", 404, "req1")


async def test_ttl_metadata_load_logs(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create(ttl_seconds=5, metadata={"a": "1", "b": "2"})
    assert (await sandbox.set_ttl(90)).ttl_seconds == 90
    assert (await sandbox.lifecycle()).ttl_seconds == 90
    assert (await sandbox.refresh()).info.ttl_seconds == 90
    await sandbox.set_metadata({"a": None, "c": "3"})
    assert sandbox.metadata == {"b": "2", "c": "3"}
    assert (await sandbox.load()).memory_bytes == 1000
    assert await sandbox.logs(tail=10) == "boot é\n"


async def test_a_client_of_its_own(fake: FakeCloche, monkeypatch: pytest.MonkeyPatch) -> None:
    address = fake.address
    monkeypatch.delenv("CLOCHE_API_URL")
    monkeypatch.delenv("CLOCHE_API_KEY")
    with pytest.raises(ConfigError, match=r"CLOCHE_API_URL .* and CLOCHE_API_KEY"):
        await AsyncSandbox.create()
    async with AsyncClient(address + "/v1/", KEY) as client:
        async with await AsyncSandbox.create(client=client) as sandbox:
            assert (await sandbox.exec("echo hi")).stdout == "hi\n"
        assert [template.name for template in await client.templates()] == ["base"]
        assert (await client.version())["version"] == "0.1.0"
        with pytest.raises(TypeError):
            await AsyncSandbox.create(client=client, api_key="x")
    async with await AsyncSandbox.create(api_url=address, api_key=KEY) as sandbox:
        assert sandbox.id


async def test_refusals_have_types(fake: FakeCloche) -> None:
    with pytest.raises(AuthError, match="the token is unknown") as caught:
        await AsyncSandbox.create(api_key="pds_wrong")
    assert caught.value.status == 401
    assert "pds_wrong" not in repr(caught.value) + str(caught.value)
    with pytest.raises(TemplateNotFound, match="there is no template nope"):
        await AsyncSandbox.create("nope")
    fake.on("POST", "/v1/sandboxes", faults.error(501, "not_implemented"))
    with pytest.raises(UnsupportedError):
        await AsyncSandbox.create()
