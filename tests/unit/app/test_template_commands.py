"""`cloche-server template` and templates of workspaces."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from archive_site import Site
from click.testing import CliRunner, Result

from cloche_server.cli.templates import template
from kit.fake_engine import World

pytestmark = pytest.mark.usefixtures("quick_disk")


def run(site: Site, *words: str) -> Result:
    return CliRunner().invoke(template, [*words, "--data", str(site.data)])


@pytest.fixture
def site(world: World) -> Iterator[Site]:
    """Below a short path: the command checks its length."""
    with tempfile.TemporaryDirectory(prefix="cl-") as root:
        yield Site(Path(root) / "d", world)


@pytest.fixture
def promoted(site: Site) -> Any:
    base = site.bake()
    snapshot = site.snapshot(base)
    return asyncio.run(site.promoter.promote("w", snapshot.id, "mine"))


def test_they_are_listed_with_their_workspace(site: Site, promoted: Any) -> None:
    lines = run(site, "list").output.splitlines()
    assert len(lines) == 2
    assert [line.endswith("of workspace w") for line in lines] == [promoted.template.id in line for line in lines]
    assert '"workspace": "w"' in run(site, "list", "--json").output


def test_removal_by_names_that_say_whose(site: Site, promoted: Any) -> None:
    snapshot = site.snapshots.of("w")[0]
    over = site.snapshot(promoted, depth=1)
    assert run(site, "rm", "mine").exception.code == "template.not_found"  # type: ignore[union-attr]
    for name in ("w/mine", promoted.template.id, "base"):
        error: Any = run(site, "rm", name).exception
        assert error.code == "template.in_use", "snapshots lie over it"
    site.snapshots.remove(over)
    assert run(site, "rm", "w/mine").output == f"removed {promoted.template.id}\n"
    site.snapshots.remove(snapshot)
    assert run(site, "rm", "base").output.startswith("removed base-")
    assert site.templates.all() == []
