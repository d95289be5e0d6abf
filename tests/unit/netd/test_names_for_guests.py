"""The resolver of a sandbox: what it asks for, what it answers, what it keeps; over any bytes of a guest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.core.policy_input import parse_policy
from cloche_server.netd import lookup
from cloche_server.netd.resolver import answer
from cloche_server.netd.session import Session
from cloche_server.netd.shared import Shared
from cloche_server.netd.upstream import Upstream, UpstreamFailed

Zone = dict[tuple[str, str], list[str]]


class ZoneUpstream(Upstream):
    """Answers from a table; aliases come alone, so that they have to be followed."""

    def __init__(self, zone: Zone) -> None:
        super().__init__(())
        self.zone = zone
        self.asked: list[str] = []
        self.wait: Callable[[], Any] | None = None

    async def ask(self, name: dns.name.Name, kind: dns.rdatatype.RdataType) -> dns.message.Message:
        text = name.to_text(omit_final_dot=True)
        self.asked.append(f"{text} {dns.rdatatype.to_text(kind)}")
        if self.wait is not None:
            await self.wait()
        response = dns.message.make_response(dns.message.make_query(name, kind))
        alias = self.zone.get((text, "CNAME"))
        values = self.zone.get((text, dns.rdatatype.to_text(kind)))
        if values == ["fail"]:
            raise UpstreamFailed("no answer")
        if alias:
            response.answer.append(dns.rrset.from_text(name, 60, "IN", "CNAME", alias[0]))
        elif values:
            response.answer.append(dns.rrset.from_text_list(name, 100, "IN", kind, values))
        elif not any(known == text for known, _ in self.zone):
            response.set_rcode(dns.rcode.NXDOMAIN)
        return response


ZONE: Zone = {
    ("a.test", "A"): ["45.90.1.10"],
    ("a.test", "AAAA"): ["::ffff:45.90.1.10"],
    ("a.test", "TXT"): ['"hello"'],
    ("one.test", "CNAME"): ["two.test."],
    ("two.test", "CNAME"): ["a.test."],
    ("loop.test", "CNAME"): ["loop.test."],
    ("pool.test", "CNAME"): ["loop2.test."],
    ("loop2.test", "CNAME"): ["pool.test."],
    ("private.test", "A"): ["10.0.0.1", "45.90.1.11"],
    ("down.test", "A"): ["fail"],
    ("many.test", "A"): [f"45.90.{n // 200}.{n % 200 + 1}" for n in range(150)],
}


def session(mode: str = "open", *rules: dict[str, Any]) -> tuple[Session, ZoneUpstream]:
    upstream = ZoneUpstream(ZONE)
    shared = Shared(upstream=upstream)
    return Session("s", "w", parse_policy({"mode": mode, "rules": list(rules)}), (), shared), upstream


async def ask(box: Session, name: str, kind: str = "A", **options: Any) -> dns.message.Message:
    wire = await answer(box, dns.message.make_query(name, kind, **options).to_wire())
    assert wire is not None
    return dns.message.from_wire(wire)


def texts(message: dns.message.Message) -> list[str]:
    return [f"{dns.rdatatype.to_text(rrset.rdtype)} {one}" for rrset in message.answer for one in rrset]


async def test_answers_are_kept_and_pinned() -> None:
    box, upstream = session()
    for _ in range(3):
        assert texts(await ask(box, "a.test")) == ["A 45.90.1.10"]
    assert upstream.asked == ["a.test A"]
    assert box.names_of(ip_address("45.90.1.10")) == ["a.test"]


async def test_aliases_are_followed_and_pinned_to_the_name_that_was_asked() -> None:
    box, upstream = session()
    assert texts(await ask(box, "one.test")) == ["CNAME two.test.", "CNAME a.test.", "A 45.90.1.10"]
    assert upstream.asked == ["one.test A", "two.test A", "a.test A"]
    assert box.names_of(ip_address("45.90.1.10")) == ["one.test"]


@pytest.mark.parametrize("name", ["loop.test", "pool.test", "down.test"])
async def test_what_leads_nowhere_fails(name: str) -> None:
    box, upstream = session()
    assert (await ask(box, name)).rcode() == dns.rcode.SERVFAIL
    assert len(upstream.asked) <= 8


async def test_private_addresses_are_taken_out() -> None:
    box, _ = session()
    assert texts(await ask(box, "private.test")) == ["A 45.90.1.11"]
    box, _ = session("open", {"action": "allow", "cidr": "10.0.0.0/8"})
    assert sorted(texts(await ask(box, "private.test"))) == ["A 10.0.0.1", "A 45.90.1.11"]


async def test_names_that_do_not_exist_do_not_exist() -> None:
    box, _ = session()
    assert (await ask(box, "none.test")).rcode() == dns.rcode.NXDOMAIN
    message = await ask(box, "a.test", "MX")
    assert (message.rcode(), message.answer) == (dns.rcode.NOERROR, [])


async def test_mapped_addresses_are_no_ipv6_answers() -> None:
    box, _ = session()
    assert texts(await ask(box, "a.test", "AAAA")) == []


async def test_what_is_refused_is_not_asked_for() -> None:
    box, upstream = session("allow-list", {"action": "allow", "domain": "a.test"})
    for name, kind in (("b.test", "A"), ("a.test", "NULL"), ("x.a.test", "TXT"), (".", "NS"), ("b.test", "HTTPS")):
        assert (await ask(box, name, kind)).rcode() == dns.rcode.REFUSED, name
    assert texts(await ask(box, "a.test", "HTTPS")) == []
    assert upstream.asked == []
    assert texts(await ask(box, "a.test", "TXT")) == ['TXT "hello"']


async def test_large_answers_are_cut_for_udp() -> None:
    box, _ = session()
    small = await ask(box, "many.test")
    assert small.flags & dns.flags.TC
    wire = await answer(box, dns.message.make_query("many.test", "A").to_wire(), tcp=True)
    assert wire is not None
    assert len(texts(dns.message.from_wire(wire))) == 64


async def test_the_rate_bounds_what_leaves() -> None:
    box, upstream = session()
    codes = [(await ask(box, f"data{number}.test")).rcode() for number in range(200)]
    assert codes.count(dns.rcode.REFUSED) > 100
    assert len(upstream.asked) < 100
    entries = (await box.log.read(0, 1000, 0))["entries"]
    assert any(entry["rule"] == "limit" for entry in entries)


async def test_questions_at_once_are_bounded() -> None:
    box, upstream = session()
    gate = asyncio.Event()
    upstream.wait = gate.wait
    box.lookups._rate = lookup.Bucket(0, 0)
    asking = [asyncio.create_task(ask(box, f"n{number}.test")) for number in range(lookup.AT_ONCE + 5)]
    while not [task for task in asking if task.done()]:
        await asyncio.sleep(0)
    gate.set()
    codes = [message.rcode() for message in await asyncio.gather(*asking)]
    assert codes.count(dns.rcode.REFUSED) == 5


async def test_a_policy_that_changes_meanwhile_holds() -> None:
    box, upstream = session()

    async def change() -> None:
        box.replace(parse_policy({"mode": "none"}), ())

    upstream.wait = change
    message = await ask(box, "a.test")
    assert (message.rcode(), message.answer) == (dns.rcode.REFUSED, [])


@settings(max_examples=150)
@given(st.binary(max_size=80), st.integers(0, 45), st.booleans())
def test_any_bytes_of_a_guest(noise: bytes, at: int, fresh: bool) -> None:
    good = dns.message.make_query("a.test", "A", use_edns=0).to_wire()
    wire = noise if fresh else good[:at] + noise + good[at + len(noise) :]

    async def run() -> bytes | None:
        box, _ = session()
        return await answer(box, wire)

    made = asyncio.run(run())
    if made is None:
        assert len(wire) < 12 or wire[2] & 0x80
    else:
        assert made[:2] == wire[:2]
        assert made[2] & 0x80
        assert len(made) <= 1232
        dns.message.from_wire(made)
