"""Fixtures of the use cases over a host in memory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from app_host import Crew, Host, assemble
from archive_site import Site
from receiver import Receiver, listening

from cloche_server.app import machines as machines_module
from cloche_server.app import reconcile as reconcile_module
from cloche_server.app import supervisor as supervisor_module
from cloche_server.core.records import ProcessRef
from cloche_server.store.db import Database
from kit.fake_engine import FakeGuest, World


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(tmp_path / "c.db")
    await database.open()
    yield database
    await database.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(FakeGuest, "world", world, raising=False)
    monkeypatch.setattr(machines_module, "GuestClient", FakeGuest)
    monkeypatch.setattr(reconcile_module, "GuestClient", FakeGuest)
    return world


@pytest.fixture
async def crew() -> AsyncIterator[Crew]:
    crew = Crew()
    yield crew
    await crew.end()


@pytest.fixture
def killing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process table of the fake host."""

    def kill(pid: int, start_time: int, *_: int) -> bool:
        for machine in list(world.alive.values()):
            if machine.ref == ProcessRef(pid, start_time):
                machine.die()
                machine.release()
                return True
        return False

    async def wait_exit(*_: object) -> bool:
        return True

    monkeypatch.setattr(reconcile_module.process, "kill", kill)
    monkeypatch.setattr(reconcile_module.process, "wait_exit", wait_exit)


@pytest.fixture
async def second(tmp_path: Path, database: Database, world: World, killing: None) -> AsyncIterator[Host]:
    """Another server on the same data."""
    crew = Crew()
    database.new = False
    yield assemble(tmp_path, database, world, crew)
    await crew.end()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of the tasks of sandboxes take no time."""
    monkeypatch.setattr(supervisor_module, "AGAIN_AFTER", 0.02)
    monkeypatch.setattr(supervisor_module, "LONGEST_WAIT", 0.02)


@pytest.fixture
def host(tmp_path: Path, database: Database, world: World, crew: Crew) -> Host:
    return assemble(tmp_path, database, world, crew)


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about a power cut: waiting for the disk would take most of their time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def site(tmp_path: Path, world: World) -> Site:
    return Site(tmp_path / "here", world)


@pytest.fixture
def other(tmp_path: Path, world: World) -> Site:
    """A server elsewhere."""
    return Site(tmp_path / "there", world)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with listening() as receiver:
        yield receiver
