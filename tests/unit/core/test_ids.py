"""Ids and tokens look as clients expect."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core import ids
from cloche_server.core.expiry import expires_at, is_due


@given(st.binary(min_size=16, max_size=16))
def test_sandbox_ids_fit_into_host_names(random: bytes) -> None:
    text = ids.id_from_random(random)
    assert re.fullmatch(r"[a-z0-9]{20}", text)
    assert ids.is_sandbox_id(text)


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_other_randomness_gives_other_ids(one: bytes, two: bytes) -> None:
    differ = int.from_bytes(one, "big") % 34**20 != int.from_bytes(two, "big") % 34**20
    assert (ids.id_from_random(one) != ids.id_from_random(two)) == differ


@given(st.binary(min_size=16, max_size=16))
def test_tokens(random: bytes) -> None:
    token = ids.token_from_random(random)
    assert re.fullmatch(r"pds_[0-9a-f]{32}", token)
    assert ids.is_token(token)
    assert ids.token_prefix(token) == token[:12]
    assert token[12:] not in ids.token_hash(token)


@given(st.text(max_size=40))
def test_hashing_any_text_is_fine(text: str) -> None:
    assert len(ids.token_hash(text)) == 64


def test_ttl() -> None:
    assert expires_at(100.0, 60, persistent=False) == 160.0
    assert expires_at(100.0, 0, persistent=False) is None
    assert expires_at(100.0, 60, persistent=True) is None
    assert not is_due(159.9, 160.0)
    assert is_due(160.0, 160.0)
    assert not is_due(1e12, None)
