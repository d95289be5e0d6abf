"""What the API may do over a host in memory, of which a test chooses what it needs."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from app_host import Host

from cloche_server.app.services import Services


def services_on(host: Host, **chosen: Any) -> Services:
    """The verbs of `host`, and what is chosen beside them or instead; all else is None, and nobody asks for it."""
    needed = {one.name: None for one in fields(Services) if one.default is MISSING and one.default_factory is MISSING}
    ours = {
        "settings": host.creator._settings, "clock": host.clock, "isolation": host.machines.engine.isolation,
        "access": host.access, "creator": host.creator, "lifecycle": host.lifecycle, "sleep": host.sleep,
        "power": host.power, "forks": host.forks, "snapshots": host.snapshots, "restores": host.restores,
        "meters": host.meters, "budgets": host.spending,
    }  # fmt: skip
    unknown = chosen.keys() - {one.name for one in fields(Services)}
    assert not unknown, f"Services has no {unknown}"
    found: dict[str, Any] = {**needed, **ours, **chosen}
    return Services(**found)
