"""Admission: refuses before, accepts up to the limit, and names what is short."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.admission import Limits, Usage, admit
from cloche_server.core.records import Resources

LIMITS = Limits(
    max_sandboxes=4, memory_mb=2000, memory_reserve_mb=500, disk_mb=20000, disk_reserve_mb=1000, overhead_mb=64
)
FREE = Usage(sandboxes=0, memory_mb=0, disk_mb=0, available_memory_mb=4000, free_disk_mb=9000)
SMALL = Resources(cpus=1, memory_mb=256, disk_mb=4096)


def test_fits_on_an_empty_host() -> None:
    assert admit(LIMITS, FREE, SMALL) is None


@pytest.mark.parametrize(
    ("usage", "resource"),
    [
        (replace(FREE, sandboxes=4), "sandboxes"),
        (replace(FREE, memory_mb=2000 - 256 - 64 + 1), "memory"),
        (replace(FREE, available_memory_mb=500 + 63), "memory"),
        (replace(FREE, disk_mb=20000 - 4096 + 1), "disk"),
        (replace(FREE, free_disk_mb=999), "disk"),
    ],
)
def test_names_what_is_short(usage: Usage, resource: str) -> None:
    refusal = admit(LIMITS, usage, SMALL)
    assert refusal is not None
    assert refusal.resource == resource
    assert refusal.message


@pytest.mark.parametrize(
    "usage",
    [
        replace(FREE, sandboxes=3),
        replace(FREE, memory_mb=2000 - 256 - 64),
        replace(FREE, available_memory_mb=564),
        replace(FREE, disk_mb=20000 - 4096),
        replace(FREE, free_disk_mb=1000),
    ],
)
def test_the_limit_itself_is_allowed(usage: Usage) -> None:
    assert admit(LIMITS, usage, SMALL) is None


@given(st.lists(st.tuples(st.integers(128, 4096), st.integers(1024, 30000)), max_size=30))
def test_what_is_admitted_never_exceeds_the_promises(wishes: list[tuple[int, int]]) -> None:
    usage = FREE
    for memory, disk in wishes:
        if admit(LIMITS, usage, Resources(1, memory, disk)) is None:
            usage = replace(
                usage,
                sandboxes=usage.sandboxes + 1,
                memory_mb=usage.memory_mb + memory + LIMITS.overhead_mb,
                disk_mb=usage.disk_mb + disk,
            )
    assert usage.sandboxes <= LIMITS.max_sandboxes
    assert usage.memory_mb <= LIMITS.memory_mb
    assert usage.disk_mb <= LIMITS.disk_mb
