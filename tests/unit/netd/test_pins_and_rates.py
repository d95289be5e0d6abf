"""Pins, bandwidth, the journal's proposals: all with a time that is handed in."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address

from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.netctl import LogEntry
from cloche_server.core.network import Transport
from cloche_server.netd.bucket import Bucket
from cloche_server.netd.journal import KEPT, DecisionLog, Learner
from cloche_server.netd.pins import LONGEST, MAX_ADDRESSES, MAX_NAMES, SHORTEST, Pins

ONE, TWO = ip_address("45.90.1.1"), ip_address("45.90.1.2")


def test_pins_live_at_least_half_an_hour() -> None:
    pins = Pins()
    pins.add("a.test", [ONE, TWO], ttl=5, now=0)
    pins.add("b.test", [ONE], ttl=10**9, now=0)
    assert pins.has("a.test", TWO, SHORTEST - 1)
    assert not pins.has("a.test", TWO, SHORTEST + 1)
    assert not pins.has("c.test", ONE, 1)
    assert pins.names_of(ONE, 1) == ["a.test", "b.test"]
    assert pins.names_of(ONE, SHORTEST + 1) == ["b.test"]
    assert pins.names_of(ONE, LONGEST + 1) == []
    assert pins.addresses_of("a.test", 1) == [ONE, TWO]


def test_pins_are_bounded() -> None:
    pins = Pins()
    for number in range(MAX_NAMES + 10):
        pins.add(f"n{number}", [ONE], 1, 0)
    assert not pins.has("n9", ONE, 1)
    assert pins.has("n10", ONE, 1)
    many = [IPv4Address(0x2D5A0000 + number) for number in range(MAX_ADDRESSES + 5)]
    pins.add("many", many, 1, 0)
    assert len(pins.addresses_of("many", 1)) == MAX_ADDRESSES
    assert not pins.names_of(many[0], 1)
    assert pins.names_of(many[-1], 1) == ["many"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([ONE, TWO]), st.floats(0, 10**5)), max_size=30))
def test_both_directions_agree(steps: list[tuple[str, IPv4Address, float]]) -> None:
    pins = Pins()
    for name, address, now in sorted(steps, key=lambda step: step[2]):
        pins.add(name, [address], 60, now)
        for other in (ONE, TWO):
            assert pins.names_of(other, now) == [one for one in "abc" if pins.has(one, other, now)]


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 300_000)), max_size=60))
def test_no_more_passes_than_the_rate(steps: list[tuple[float, int]]) -> None:
    rate = 100_000.0
    bucket = Bucket(rate, 0)
    now, passed = 0.0, 0
    for pause, want in steps:
        now += pause
        granted = bucket.take(want, now)
        assert 0 <= granted <= want
        bucket.give_back(granted // 3)
        passed += granted - granted // 3
        assert passed <= rate * now + rate * 0.25 + 16384
    assert bucket.delay() > 0


def test_a_rate_that_changes_holds_at_once() -> None:
    bucket = Bucket(0, 0)
    assert bucket.take(10**9, 0) == 10**9
    bucket.change(1000, 0)
    assert bucket.take(10**6, 0) <= 16384
    assert bucket.take(10**6, 1) == 1000
    bucket.change(0, 1)
    assert bucket.take(10**9, 1) == 10**9


@given(st.integers(1000, 10**6), st.lists(st.tuples(st.integers(0, 65_507), st.floats(0, 0.5)), max_size=50))
def test_datagrams_pass_whole_and_keep_to_the_rate(rate: int, steps: list[tuple[int, float]]) -> None:
    bucket, now, passed = Bucket(rate, 0), 0.0, 0
    for size, pause in steps:
        now += pause
        passed += size if bucket.spend(size, now) else 0
        # One that is larger than what may pass at once leaves a debt, and is paid before the next.
        assert passed <= rate * now + max(rate * 0.25, 16384) + 65_507
    assert bucket.spend(65_507, now + 65_507 * 2 / rate + 10), "after a rest every datagram passes"
    assert Bucket(0, 0).spend(10**9, 0)


def test_no_rate_is_no_limit() -> None:
    assert Bucket(0, 0).take(10**9, 0) == 10**9


def test_proposals_are_the_least() -> None:
    learner = Learner()
    learner.asked("only.test")
    learner.asked("a.test")
    learner.connected("a.test", str(ONE), 443)
    learner.connected("git.test", str(ONE), 22)
    learner.connected("git.test", str(ONE), 443)
    learner.connected("", str(TWO), 5432)
    learner.connected("ntp.test", str(ONE), 123, Transport.UDP)
    learner.connected("a.test", str(ONE), 7000, Transport.UDP)
    assert learner.proposal() == [
        {"id": "learned-1", "action": "allow", "domain": "a.test"},
        {"id": "learned-2", "action": "allow", "domain": "a.test", "ports": [7000], "protocol": "udp"},
        {"id": "learned-3", "action": "allow", "domain": "git.test", "ports": [22, 443], "protocol": "tcp"},
        {"id": "learned-4", "action": "allow", "domain": "ntp.test", "ports": [123], "protocol": "udp"},
        {"id": "learned-5", "action": "allow", "domain": "only.test"},
        {"id": "learned-6", "action": "allow", "cidr": str(TWO), "ports": [5432], "protocol": "tcp"},
    ]


def test_what_is_refused_all_the_time_takes_no_more_room() -> None:
    """Denials are in this ring only: no event, no row and no memory of the server comes of them."""
    log, learner = DecisionLog(lambda: 0.0), Learner()
    long = "x" * 100_000
    for number in range(3 * KEPT):
        log.add(LogEntry(0, 0.0, "http", "deny", "default", "no rule", name=long, method=long, path=long))
        learner.connected(f"n{number}.test", str(ONE), number)
        learner.connected("one.test" if number else "n0.test", str(ONE), number)
        learner.connected("", str(IPv4Address(number)), number)
        learner.connected("n0.test", str(ONE), number)
    assert len(log._entries) == KEPT
    assert sum(len(one.name) + len(one.method) + len(one.path) for one in log._entries) < KEPT * 1200
    proposal = learner.proposal()
    assert len(proposal) <= 4000
    assert max(len(rule.get("ports", ())) for rule in proposal) == 64
