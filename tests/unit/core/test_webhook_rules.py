"""Webhooks by rule: signatures, delays, and which addresses are public."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.webhooks import (
    FIRST_DELAY,
    LONGEST_DELAY,
    check_url,
    delay,
    is_public,
    secret_from_random,
    signed_headers,
)


def test_the_signature_of_the_specification() -> None:
    """The example that its reference libraries are tested with."""
    headers = signed_headers(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(st.binary(min_size=32, max_size=32), st.text("abc-019", min_size=1), st.integers(0, 2**40), st.binary())
def test_signatures_are_of_id_time_and_body(random: bytes, name: str, at: int, body: bytes) -> None:
    secret = secret_from_random(random)
    headers = signed_headers(secret, name, at, body)
    assert (headers["webhook-id"], headers["webhook-timestamp"]) == (name, str(at))
    wanted = hmac.new(random, b".".join([name.encode(), str(at).encode(), body]), hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(wanted).decode()


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_delays_grow_and_are_bounded(failures: int, random: float) -> None:
    found = delay(failures, random)
    assert FIRST_DELAY * 0.75 <= found <= LONGEST_DELAY
    assert delay(failures + 1, random) >= found
    assert delay(1, 0) == FIRST_DELAY
    assert delay(40, 0) == LONGEST_DELAY


PRIVATE = [
    "127.0.0.1",
    "127.255.0.9",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "224.0.0.1",
    "239.1.1.1",
    "255.255.255.255",
    "240.0.0.1",
    "192.0.2.1",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd12::1",
    "fec0::1",
    "feff::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "2002:7f00:1::",
    "2002:c0a8:101::",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "2001:0:1:2:3:4:5:6",
    "2001:db8::1",
]
PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::101:101", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("address", PRIVATE)
def test_these_are_not_public(address: str) -> None:
    assert not is_public(address)
    if ":" not in address:
        with pytest.raises(ValueError, match="webhook_private"):
            check_url(f"http://{address}/", private=False)
        check_url(f"http://{address}/", private=True)


@pytest.mark.parametrize("address", PUBLIC)
def test_these_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST.", "a.localhost"])
def test_names_of_this_host(name: str) -> None:
    with pytest.raises(ValueError, match="webhook_private"):
        check_url(f"https://{name}:1/x", private=False)
