"""The ledger against a model: whatever happens, it holds exactly what is held."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from app_host import settings
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.app.capacity import OVERHEAD_MB, Capacity, refused
from cloche_server.core.admission import Usage
from cloche_server.core.records import Resources
from cloche_server.host import machine as host_machine

KEYS = st.sampled_from("abcdef")
SIZES = st.builds(Resources, st.just(1), st.sampled_from([128, 256, 4096]), st.sampled_from([1024, 8192]))
STEPS = st.lists(
    st.tuples(st.sampled_from(["promise", "take_over", "fail", "wake", "release"]), KEYS, SIZES), max_size=40
)


def ledger(**changes: object) -> Capacity:
    with (
        mock.patch.object(host_machine, "memory", return_value=host_machine.Memory(8192, 4096)),
        mock.patch.object(host_machine, "disk", return_value=host_machine.Disk(20000, 10000)),
    ):
        return Capacity(settings(Path("/"), memory_overcommit=1.0, disk_overcommit=1.0, **changes))


@given(STEPS)
def test_it_never_drifts(steps: list[tuple[str, str, Resources]]) -> None:
    capacity = ledger(max_sandboxes=4)
    model: dict[str, tuple[Resources, bool]] = {}
    with (
        mock.patch.object(host_machine, "memory", return_value=host_machine.Memory(8192, 4096)),
        mock.patch.object(host_machine, "disk", return_value=host_machine.Disk(20000, 10000)),
    ):
        for verb, key, size in steps:
            if verb == "promise" and key not in model:
                refusal = capacity.try_promise(key, size)
                memory = sum(r.memory_mb + OVERHEAD_MB for r, alive in model.values() if alive)
                disk = sum(r.disk_mb for r, _ in model.values())
                fits = len(model) < 4 and memory + size.memory_mb + OVERHEAD_MB <= 8192 and disk + size.disk_mb <= 20000
                assert (refusal is None) == fits
                if refusal is None:
                    model[key] = (size, True)
                else:
                    error = refused(refusal)
                    assert error.retry_after
                    assert error.message.endswith("try again later")
            elif verb == "take_over":
                capacity.take_over(key, size)
                model[key] = (size, True)
            elif verb == "fail":
                capacity.without_memory(key)
                if key in model:
                    model[key] = (model[key][0], False)
            elif verb == "wake" and key in model:
                held, alive = model[key]
                memory = sum(r.memory_mb + OVERHEAD_MB for k, (r, on) in model.items() if on and k != key)
                disk = sum(r.disk_mb for r, _ in model.values())
                fits = len(model) <= 4 and memory + held.memory_mb + OVERHEAD_MB <= 8192 and disk <= 20000
                assert (capacity.try_memory(key) is None) == (alive or fits)
                model[key] = (held, alive or fits)
            elif verb == "release":
                capacity.release(key)
                model.pop(key, None)
            assert capacity.usage() == Usage(
                len(model),
                sum(r.memory_mb + OVERHEAD_MB for r, alive in model.values() if alive),
                sum(r.disk_mb for r, _ in model.values()),
                4096,
                10000,
            )
        for key in list(model):
            capacity.release(key)
        assert capacity.usage() == Usage(0, 0, 0, 4096, 10000)
