"""How many flows of datagrams there are: each takes a port of the host, which all sandboxes share."""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest

from cloche_server.core.policy import Decision, Outcome
from cloche_server.netd import datagrams
from cloche_server.netd.datagrams import Datagrams


def _table(name: str, shared: Any, count: int) -> Datagrams:
    made = Datagrams.__new__(Datagrams)
    session: Any = SimpleNamespace(shared=shared, close=lambda flow: flow.ended.append(flow.number))
    made.session = session
    made._flows = OrderedDict()
    for number in range(count):
        flow: Any = SimpleNamespace(close=lambda: None, flow=SimpleNamespace(number=number, ended=shared.ended))
        made._flows[4000 + number, ip_address("192.0.2.1"), 7000] = flow
    shared.datagrams[name] = made
    return made


def test_a_sandbox_with_many_flows_gives_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datagrams, "MOST_TOGETHER", 10)
    shared: Any = SimpleNamespace(datagrams={}, ended=[])
    crowd, few = _table("crowd", shared, 8), _table("few", shared, 2)
    few._make_room()
    assert (len(crowd._flows), len(few._flows)) == (7, 2)
    assert shared.ended == [0], "the one that was idle longest"
    few._make_room()
    assert (len(crowd._flows), len(few._flows)) == (7, 2), "there is room now"


def test_one_sandbox_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datagrams, "MOST_FLOWS", 4)
    shared: Any = SimpleNamespace(datagrams={}, ended=[])
    table = _table("one", shared, 6)
    table._make_room()
    assert (len(table._flows), shared.ended) == (3, [0, 1, 2])


async def test_a_flood_of_what_belongs_to_no_flow_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datagrams, "MOST_JUDGED", 3)
    shared: Any = SimpleNamespace(datagrams={}, ended=[])
    table = _table("one", shared, 1)
    known = next(iter(table._flows))
    carried: list[bytes] = []
    told: list[str] = []
    judged: list[int] = []
    flow: Any = table._flows[known]
    flow.send = carried.append
    times = iter([0.0] * 11 + [1.0])

    def judge(address: Any, port: int) -> Decision:
        judged.append(port)
        return Decision(Outcome.DENY, "udp", "no rule")

    session: Any = table.session
    session.judge_datagram, session.peer, session.own_address = judge, lambda _: None, None
    table._waiting, table._second, table._judged = {}, 0.0, 0
    table._loop = SimpleNamespace(time=lambda: next(times))  # type: ignore[assignment]
    monkeypatch.setattr(table, "settle", lambda *_: None)
    monkeypatch.setattr(table, "_tell", lambda _, decision: told.append(decision.rule))
    for port in range(1, 12):
        table._take((4000, ip_address("192.0.2.9"), port), b"x")
    table._take(known, b"of a flow")
    assert (judged, told, carried) == ([1, 2, 3], ["limit"], [b"of a flow"])
    table._take((4000, ip_address("192.0.2.9"), 99), b"x")
    assert judged[-1] == 99, "a second later"
