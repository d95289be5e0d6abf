"""Signed links to files: what their text is, and that no other text does."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.filelinks import FileLink, mint, read

KEY = b"k" * 32
_LETTERS = string.ascii_letters + string.digits + "-_"


@given(path=st.binary(min_size=1, max_size=40), user=st.text(max_size=9), most=st.integers(0, 2**40))
def test_what_is_made_is_read(path: bytes, user: str, most: int) -> None:
    link = FileLink("sbx_1", "a|b %", "PUT", path, 1000, user, most)
    text = mint(KEY, link)
    assert read(KEY, text, 999.9) == link
    assert read(KEY, text, 1000.0) is None
    assert read(b"o" * 32, text, 0.0) is None


@given(at=st.integers(0, 10**6), letter=st.sampled_from(_LETTERS), size=st.integers(1, 6))
def test_no_other_text_is_good(at: int, letter: str, size: int) -> None:
    """Not even one that base64 decodes to the same bytes."""
    text = mint(KEY, FileLink("sbx_1", "default", "GET", b"/" + b"x" * size, 1000))
    at %= len(text)
    other = text[:at] + letter + text[at + 1 :]
    assert (read(KEY, other, 0.0) is not None) == (other == text)


def test_the_last_character_of_the_payload_has_one_form_only() -> None:
    for size in range(3):
        text = mint(KEY, FileLink("sbx_1", "default", "GET", b"/" + b"x" * size, 1000))
        head, _, tail = text.partition(".")
        good = [letter for letter in _LETTERS if read(KEY, f"{head[:-1]}{letter}.{tail}", 0.0)]
        assert good == [head[-1]]
