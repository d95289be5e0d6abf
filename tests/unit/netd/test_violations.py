"""What a guest does with placeholders is told in bounded words, once a minute, and until somebody has heard it."""

from __future__ import annotations

import asyncio

import pytest

from cloche_server.netd import violations as module
from cloche_server.netd.violations import APART, Violations


class Times:
    now = 1000.0


def made() -> Violations:
    return Violations(lambda: Times.now, lambda: Times.now)


def add(kept: Violations, *, sandbox: str = "s", secret: str = "KEY", host: str = "evil.test") -> None:
    kept.add(sandbox, "w", secret, host, "GET")


async def test_the_first_one_is_told_at_once_and_the_others_together_later(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = made()
    add(kept)
    first = await kept.read("", 0)
    assert first["entries"] == [
        {"sandbox": "s", "workspace": "w", "secret": "KEY", "host": "evil.test", "method": "GET", "count": 1,
         "at": Times.now}
    ]  # fmt: skip
    for _ in range(1000):
        add(kept, host="other.test")
    second = await kept.read(first["next"], 0)
    assert second["entries"] == []
    monkeypatch.setattr(Times, "now", Times.now + APART)
    (told,) = (await kept.read(second["next"], 0))["entries"]
    assert (told["count"], told["host"]) == (1000, "other.test")


async def test_what_nobody_has_confirmed_is_told_again() -> None:
    """A server that was killed before it wrote the event down."""
    kept = made()
    add(kept)
    first = await kept.read("", 0)
    add(kept)
    again = await kept.read("", 0)
    assert [one["count"] for one in again["entries"]] == [2]
    late = await kept.read(first["next"], 0)  # not the last answer any more
    assert [one["count"] for one in late["entries"]] == [2]
    assert (await kept.read(late["next"], 0))["entries"] == []


async def test_a_reader_waits_for_the_next_one() -> None:
    kept = Violations(lambda: Times.now, asyncio.get_running_loop().time)
    reader = asyncio.ensure_future(kept.read("", 30))
    await asyncio.sleep(0)
    add(kept)
    assert len((await reader)["entries"]) == 1


async def test_memory_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 10)
    kept = made()
    for number in range(50):
        add(kept, sandbox=f"s{number}", host="x" * 10_000)
    assert len(kept) == 10
    answer = await kept.read("", 0)
    assert [one["sandbox"] for one in answer["entries"]] == [f"s{number}" for number in range(40, 50)]
    assert all(len(one["host"]) < 1000 for one in answer["entries"])
    await kept.read(answer["next"], 0)
    monkeypatch.setattr(Times, "now", Times.now + APART)
    await kept.read("", 0)
    assert len(kept) == 0
