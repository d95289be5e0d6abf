"""What kind of place an address is."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.addresses import NEVER, AddressClass, classify, embedded, opens, parse_address
from cloche_server.core.webhooks import is_public

HOST = frozenset({ip_address("45.90.0.2"), ip_address("2a0f:9400::2"), ip_address("127.0.0.1")})


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("8.8.8.8", "public"),
        ("45.90.0.2", "host"),
        ("2a0f:9400::2", "host"),
        ("2a0f:9400::3", "public"),
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("::1", "loopback"),
        ("10.0.0.1", "private"),
        ("172.31.255.255", "private"),
        ("172.32.0.0", "public"),
        ("192.168.1.1", "private"),
        ("100.64.0.1", "private"),
        ("100.128.0.1", "public"),
        ("fd12::1", "private"),
        ("fec0::1", "private"),
        ("169.254.1.1", "link-local"),
        ("fe80::1", "link-local"),
        ("169.254.169.254", "metadata"),
        ("169.254.170.2", "metadata"),
        ("100.100.100.200", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("168.63.129.16", "metadata"),
        ("192.168.127.1", "slot"),
        ("192.168.127.2", "slot"),
        ("192.168.127.4", "private"),
        ("fd00:c10c:e::2", "slot"),
        ("224.0.0.251", "multicast"),
        ("ff02::1", "multicast"),
        ("255.255.255.255", "broadcast"),
        ("0.0.0.0", "loopback"),
        ("0.1.2.3", "reserved"),
        ("::", "loopback"),
        ("240.0.0.1", "reserved"),
        ("198.18.0.1", "reserved"),
        ("192.0.2.7", "documentation"),
        ("203.0.113.9", "documentation"),
        ("2001:db8::1", "documentation"),
        ("2001:2::1", "reserved"),
        ("4000::1", "reserved"),
        ("::8.8.8.8", "reserved"),
        ("::ffff:10.0.0.1", "private"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:169.254.169.254", "metadata"),
        ("::ffff:8.8.8.8", "public"),
        ("64:ff9b::10.0.0.1", "private"),
        ("64:ff9b::8.8.8.8", "public"),
        ("64:ff9b::45.90.0.2", "host"),
        ("64:ff9b:1::8.8.8.8", "private"),
        ("2002:a00:1::1", "private"),
        ("2002:808:808::1", "public"),
        ("2002:a9fe:a9fe::1", "metadata"),
        ("2001:0:808:808::f5ff:fffe", "private"),  # Teredo to 10.0.0.1
        ("2001:0:a00:1::f7f7:f7f7", "private"),  # Teredo through 10.0.0.1
        ("2001:0:808:808::f7f7:f7f7", "public"),
    ],
)
def test_kinds(text: str, kind: str) -> None:
    assert classify(ip_address(text), HOST) == AddressClass(kind)


@given(st.ip_addresses())
def test_what_is_public_here_is_public_for_the_standard_library_too(address: object) -> None:
    found = classify(address)  # type: ignore[arg-type]
    if found is AddressClass.PUBLIC and embedded(address) is None:  # type: ignore[arg-type]
        assert is_public(str(address))


@pytest.mark.parametrize(
    "text", ["2852039166", "0251.0376.0251.0376", "0xa9fea9fe", "127.1", "1.2.3.4.5", "", "1" * 99]
)
def test_other_spellings_are_no_addresses(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


def test_zones_and_mapped_forms_are_taken_off() -> None:
    assert str(parse_address("fe80::1%tap0")) == "fe80::1"
    assert str(parse_address("::ffff:1.2.3.4")) == "1.2.3.4"


@pytest.mark.parametrize(
    ("network", "address", "opened"),
    [
        ("10.0.0.0/8", "10.0.0.1", True),
        ("0.0.0.0/0", "10.0.0.1", True),
        ("0.0.0.0/0", "127.0.0.1", False),
        ("127.0.0.0/8", "127.0.0.1", True),
        ("0.0.0.0/0", "169.254.169.254", False),
        ("169.254.0.0/16", "169.254.169.254", False),
        ("169.254.169.254/32", "169.254.169.254", True),
        ("169.254.0.0/16", "169.254.3.3", True),
        ("45.90.0.0/24", "45.90.0.2", False),
        ("45.90.0.2/32", "45.90.0.2", True),
        ("192.168.127.1/32", "192.168.127.1", False),
        ("224.0.0.0/4", "224.0.0.1", False),
        ("::/0", "fe80::1", False),
        ("fe80::/64", "fe80::1", True),
        ("::/0", "::1", False),
        ("::1/128", "::1", True),
    ],
)
def test_what_a_network_opens(network: str, address: str, opened: bool) -> None:
    place = ip_address(address)
    assert opens(ip_network(network), place, classify(place, HOST)) is opened


@given(st.ip_addresses(), st.integers(0, 128))
def test_nothing_opens_what_is_never_reached(address: object, length: int) -> None:
    network = ip_network(f"{address}/{min(length, address.max_prefixlen)}", strict=False)  # type: ignore[attr-defined]
    kind = classify(address)  # type: ignore[arg-type]
    assert not (kind in NEVER and opens(network, address, kind))  # type: ignore[arg-type]
