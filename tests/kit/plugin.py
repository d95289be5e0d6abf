"""Fixtures of the tests on real machines, and what a failure of one of them shows."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit import data as test_data
from kit import leaks, schedule
from kit.client import Api, Box
from kit.server import Server

_TESTS = Path(__file__).resolve().parents[1]
#: Every server that lives now, for reports and for the very end.
_SERVERS: list[Server] = []


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM ends a run like Ctrl-C does: fixtures are torn down."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def pytest_unconfigure(config: pytest.Config) -> None:
    while _SERVERS:
        _SERVERS.pop().close()


def _boots(path: Path) -> bool:
    """Whether what lies there uses machines: all in these folders does, and nothing elsewhere."""
    return any(path.is_relative_to(_TESTS / folder) for folder in ("vm", "conformance"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _boots(item.path):
            item.add_marker(pytest.mark.vm)
        elif item.get_closest_marker("vm"):
            raise pytest.UsageError(f"{item.nodeid} is marked vm outside the folders of such tests: it would never run")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What `-m` leaves out as a whole need not be read, which takes each worker seconds."""
    if collection_path.parent != _TESTS or not collection_path.is_dir():
        return None
    wanted, boots = config.getoption("markexpr"), _boots(collection_path)
    return (wanted == "vm" and not boots) or (wanted.startswith("not vm") and boots) or None


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_order_items(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, long tests begin early. Without, all run in the order of their files."""
    if out := schedule.left_out(items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]
    if config.getoption("dist", "no") == "loadgroup" or os.environ.get("PYTEST_XDIST_WORKER"):
        schedule.sort(items)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup` means our groups."""
    return schedule.scheduler(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and item.get_closest_marker("vm"):
        for server in _SERVERS:
            report.sections.append((f"server log {server.data}", server.log_tail()))
            shown = [box.id for box in _boxes_of(item) if box.id in server.directories()]
            for sandbox_id in shown:
                report.sections.append((f"sandbox {sandbox_id}", server.machine_report(sandbox_id)))
    return report


def _boxes_of(item: pytest.Item) -> list[Box]:
    values: list[Any] = list(getattr(item, "funcargs", {}).values())
    boxes = {value.id: value for value in values if isinstance(value, Box)}
    for value in values:
        if isinstance(value, Server):
            value = value.api
        if isinstance(value, Api):
            boxes.update(value.made)
    return list(boxes.values())


# ------------------------------------------------------------------ servers


@pytest.fixture(scope="session")
def baked() -> Path:
    """The base data directory; a test that needs it fails when nothing is baked there."""
    base = test_data.base_data()
    if not test_data.is_baked(base):
        pytest.fail(test_data.not_baked(base), pytrace=False)
    test_data.sweep()
    return base


def _open(server: Server) -> Server:
    _SERVERS.append(server)
    server.start()
    return server


def _close(server: Server) -> None:
    if server in _SERVERS:
        _SERVERS.remove(server)
    server.close()


@pytest.fixture(scope="session")
def server(baked: Path) -> Iterator[Server]:
    """One server for most tests. At the end it must hold what its API knows, and leave nothing behind."""
    made = Server.make(baked)
    try:
        _open(made)
        yield made
        _check_leaks(made)
    finally:
        _close(made)


def _check_leaks(server: Server) -> None:
    assert server.running, f"the server did not live to the end:\n{server.log_tail()}"
    log = server.log.read_text("utf-8", "replace")
    crashed = [line for line in log.splitlines() if "request.crashed" in line or "Traceback" in line]
    assert not crashed, f"the server has logged crashes: {crashed[:5]}\n{server.log_tail()}"
    problems = leaks.unknown_to_api(server)
    assert not problems, f"leaks while the server runs: {problems}"
    server.stop(sandboxes=True)
    problems = leaks.left_after_end(server.data)
    assert not problems, f"left behind by `stop --sandboxes`: {problems}"


@pytest.fixture
def new_server(baked: Path) -> Iterator[Callable[..., Server]]:
    """Makes started servers with settings of their own, for tests that kill them. All end with the test."""
    made: list[Server] = []

    def make(*, start: bool = True, **settings: object) -> Server:
        server = Server.make(baked, **settings)
        made.append(server)
        _SERVERS.append(server)
        if start:
            server.start()
        return server

    yield make
    for server in made:
        _close(server)


@pytest.fixture(scope="session")
def api(server: Server) -> Api:
    return server.api


# ------------------------------------------------------------------ sandboxes


@pytest.fixture
def create(api: Api) -> Iterator[Callable[..., Box]]:
    """Makes sandboxes that are deleted after the test."""
    made: list[Box] = []

    def make(**body: Any) -> Box:
        made.append(api.create(**body))
        return made[-1]

    yield make
    for box in made:
        _delete(box)


@pytest.fixture
def sandbox(create: Callable[..., Box]) -> Box:
    """A fresh sandbox for one test."""
    return create()


@pytest.fixture
def family(api: Api, server: Server) -> Iterator[Api]:
    """The client. What a test makes with it, forks and snapshots included, is deleted after it, and nothing is left."""
    before, taken = set(api.made), {one["id"] for one in api.snapshots()}
    yield api
    for box in [box for name, box in api.made.items() if name not in before]:
        _delete(box)
    for one in api.snapshots():
        if one["id"] not in taken:
            api.call("DELETE", f"/v1/snapshots/{one['id']}")
    problems = leaks.unknown_to_api(server)
    assert not problems, f"left by a test: {problems}"


@pytest.fixture(scope="module")
def shared(api: Api) -> Iterator[Box]:
    """One sandbox for all tests of a module that do not disturb each other."""
    box = api.create()
    yield box
    _delete(box)


def _delete(box: Box) -> None:
    response = box.api.request("DELETE", box.path)
    assert response.status_code in {204, 404}, response.text
    box.api.made.pop(box.id, None)
