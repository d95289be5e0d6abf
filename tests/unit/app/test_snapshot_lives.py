"""Snapshots, their sandboxes and what is made from them: whichever goes first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from app_host import Crew, Host, settings
from snapshot_kit import create_from, end

from cloche_server.app.fork import ForkRequest
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import Sandbox
from cloche_server.storage import snapshots as snapshots_module
from cloche_server.storage.snapshots import Snapshot
from kit.fake_engine import Gate

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("first", ["snapshot", "sandbox", "child"])
async def test_whichever_goes_first(host: Host, first: str) -> None:
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    child = await create_from(host, made.id)
    ends = {
        "snapshot": lambda: host.snapshots.remove("w", made.id),
        "sandbox": lambda: host.lifecycle.delete("w", record.id),
        "child": lambda: host.lifecycle.delete("w", child.id),
    }
    await ends.pop(first)()
    assert await host.untrue() == []
    if first != "snapshot":
        await host.lifecycle.delete("w", (await create_from(host, made.id)).id)
    for each in ends.values():
        await each()
        assert await host.untrue() == []
    assert await host.left() == []


@pytest.mark.parametrize("call", ["Engine.launch", "Machine.restore", "Guest.renew"])
async def test_removed_while_a_create_from_it_runs(host: Host, call: str) -> None:
    """The create succeeds, or says that it could not; the layer is there for as long as it is needed."""
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    await host.lifecycle.delete("w", record.id)
    gate = host.world.gate[call] = Gate()
    creating = asyncio.ensure_future(create_from(host, made.id))
    await gate.reached.wait()
    await host.snapshots.remove("w", made.id)
    gate.open.set()
    done = await asyncio.gather(creating, return_exceptions=True)
    if call == "Guest.renew":
        assert isinstance(done[0], Sandbox)
    else:
        assert isinstance(done[0], Sandbox) or done[0].code == "snapshot.not_found"  # type: ignore[union-attr]
    assert host.snapshots.list("w") == []
    await end(host)


async def test_many_removes_at_once_let_go_once(host: Host) -> None:
    record = await host.create()
    made = await host.snapshots.take("w", record.id)
    child = await create_from(host, made.id)
    await host.lifecycle.delete("w", record.id)
    done = await asyncio.gather(*(host.snapshots.remove("w", made.id) for _ in range(5)), return_exceptions=True)
    assert all(one is None or (isinstance(one, ClocheError) and one.code == "snapshot.not_found") for one in done)
    assert await host.untrue() == [], "the child still lies over its layer"
    await host.sleep.hibernate("w", child.id)
    await host.sleep.wake("w", child.id)
    await end(host)


async def test_a_remove_whose_caller_goes_away(host: Host) -> None:
    for turns in range(12):
        record = await host.create()
        made = await host.snapshots.take("w", record.id)
        removing = asyncio.ensure_future(host.snapshots.remove("w", made.id))
        for _ in range(turns):
            await asyncio.sleep(0)
        removing.cancel()
        await asyncio.wait({removing})
        assert await host.untrue() == []
        await end(host)


async def test_a_remove_that_fails_can_be_repeated(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)

    def refuse(*_: object) -> None:
        raise OSError(30, "read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(OSError):
            await host.snapshots.remove("w", made.id)
    assert host.snapshots.get("w", made.id) == made
    assert await host.untrue() == []
    await end(host)


async def test_of_another_workspace(host: Host) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)
    with pytest.raises(ClocheError):
        await host.snapshots.remove("other", made.id)
    with pytest.raises(ClocheError):
        async with host.snapshots.source("other", made.id):
            pass
    with pytest.raises(ClocheError) as told:
        host.snapshots.get("other", made.id)
    assert told.value.code == "snapshot.not_found"
    await end(host)


async def test_all_at_once(host: Host, crew: Crew) -> None:
    """Snapshots, creates from them, forks and sleep of one sandbox and its descendants."""
    record = await host.create()
    first = await host.snapshots.take("w", record.id)
    work: list[Any] = [
        *(host.snapshots.take("w", record.id) for _ in range(3)),
        *(create_from(host, first.id) for _ in range(4)),
        *(host.forks.make("w", record.id, ForkRequest(2)) for _ in range(2)),
        host.sleep.hibernate("w", record.id),
        host.snapshots.take("w", record.id),
        host.sleep.pause("w", record.id),
    ]
    done = await asyncio.gather(*work, return_exceptions=True)
    for one in done:
        assert not isinstance(one, BaseException) or isinstance(one, ClocheError), repr(one)
    assert sum(isinstance(one, Snapshot) for one in done) >= 3
    await end(host)
    assert crew.failed == []


async def test_one_that_is_removed_as_soon_as_it_is_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layer is let go of once: the sandbox lies over it."""
    record = await host.create()
    publish, loop = host.catalog.publish, asyncio.get_running_loop()

    def published(*parts: Any) -> Snapshot:
        made = publish(*parts)
        asyncio.run_coroutine_threadsafe(host.snapshots.remove("w", made.id), loop).result()
        return made

    monkeypatch.setattr(host.catalog, "publish", published)
    with contextlib.suppress(ClocheError):
        await host.snapshots.take("w", record.id)
    await end(host)


async def test_one_whose_last_step_fails_is_not_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await host.create()
    staging = snapshots_module.files.staging

    @contextlib.contextmanager
    def failing(parent: Path) -> Iterator[Path]:
        with staging(parent) as staged:
            yield staged
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots_module.files, "staging", failing)
        with pytest.raises(ClocheError):
            await host.snapshots.take("w", record.id)
    assert host.snapshots.list("w") == []
    await end(host)


async def test_no_disk_is_larger_than_the_host_allows(host: Host) -> None:
    made = await host.snapshots.take("w", (await host.create()).id)
    with pytest.raises(ClocheError) as told:
        await create_from(host, made.id, disk_mb=settings(host.root).max_disk_mb + 1)
    assert (told.value.code, told.value.details) == ("request.invalid", {"field": "disk_mb"})
    await end(host)


async def test_a_list_while_one_is_published(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """That happens on a thread, at any moment."""
    record = await host.create()
    made = [await host.snapshots.take("w", record.id) for _ in range(2)]
    found = host.catalog._all

    class Slow(Snapshot):
        def __getattribute__(self, name: str) -> Any:
            if name in {"workspace", "template_id"}:
                found.setdefault("another", made[1])
            return super().__getattribute__(name)

    slow = Slow(**{name: getattr(made[0], name) for name in made[0].__dataclass_fields__})
    for look in (lambda: host.snapshots.list("w"), host.catalog.ids_of_templates):
        found[made[0].id] = slow
        found.pop("another", None)
        assert look()
    found.pop("another")
    found[made[0].id] = made[0]
    await end(host)
