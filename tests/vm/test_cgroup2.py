"""Limits by control groups of version 2, on a real kernel that has only those: that of a guest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloche_server.host import cgroups
from kit.client import Box

pytestmark = pytest.mark.vm


def test_version_2_on_a_real_kernel(sandbox: Box) -> None:
    """The code that limits machines on a host runs inside a guest here, and the guest's kernel keeps the limits."""
    box = sandbox
    box.put("/root/v2/cgroups.py", Path(cgroups.__file__).read_bytes())
    box.put("/root/v2/inside.py", Path(__file__).with_name("cgroup2_inside.py").read_bytes())
    done = box.exec("python3 /root/v2/inside.py /root/v2", timeout_seconds=90)
    assert done.code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["version"], told["missing"]) == (2, [])
    assert told["failures"] == told["failures_again"] == []
    for controllers in told["handed_down"]:
        assert {"cpu", "io", "memory", "pids"} <= set(controllers)
    assert told["held"] == {"cpu": "25000 100000", "memory": str(64 << 20), "pids": "8"}
    assert told["held_by_another"] == {}
    assert told["swap_and_oom"] == ["1", "200"]
    assert "rbps=4194304 wbps=4194304" in told["io"]
    assert told["removed_while_used"] is False
    assert told["memory"] == [-9, -9], "who takes too much ends, and all of its machine with it"
    assert told["oom_kills"] >= 1
    assert told["forks"] == 7
    assert told["spun"] == 0
    assert told["throttled"] > 0
    assert told["killed"] is True
    assert told["machines"] == ["m1", "m2"]
    assert (told["resisting"], told["kept"], told["left"]) == ([], ["m2"], False)
    assert told["removed"] is True
    assert "memory" in {one.split()[0] for one in told["in_a_container"]}, told["in_a_container"]
    assert told["joined_there"] == 0, "it runs without these limits, and it runs"
