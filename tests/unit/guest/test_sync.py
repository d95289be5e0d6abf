"""Resynchronisation of the guest link."""

from __future__ import annotations

import pytest

from cloche_server.guest.sync import FLUSH, Resync

NONCE = "0123456789abcdef" * 2


def echo(number: int, generation: int = 1, nonce: str = NONCE) -> bytes:
    return f"\nCLOCHE-SYNC-OK {nonce} {number} {generation}\n".encode()


def test_first_line_goes_alone_and_later_ones_flush_first() -> None:
    sync = Resync(NONCE)
    assert sync.start() == f"\nCLOCHE-SYNC {NONCE} 0\n".encode()
    assert sync.tick() == FLUSH + f"\nCLOCHE-SYNC {NONCE} 1\n".encode()
    assert len(FLUSH) == 16384


def test_ready_on_the_echo_of_the_only_line() -> None:
    sync = Resync(NONCE)
    sync.start()
    assert sync.feed(echo(0))
    assert sync.ready
    assert sync.generation == 1


def test_waits_for_the_echo_of_the_last_line_and_sends_no_more() -> None:
    sync = Resync(NONCE)
    sync.start()
    sync.tick()
    sync.tick()
    assert not sync.feed(echo(0))
    assert sync.answered
    assert sync.tick() == b""
    assert not sync.feed(echo(1))
    assert sync.feed(echo(2))


def test_duplicates_and_echoes_of_lines_never_sent_change_nothing() -> None:
    sync = Resync(NONCE)
    sync.start()
    assert not sync.feed(echo(7))
    assert not sync.answered
    sync.tick()
    assert not sync.feed(echo(0) * 5)
    assert sync.feed(echo(1) * 3)


@pytest.mark.parametrize(
    "junk",
    [
        b"\x00" * 70000,
        echo(0, nonce="f" * 32),
        echo(0)[:-1] + b"x\n",
        echo(0)[:30],
        f"\nCLOCHE-SYNC-OK {NONCE} -1 1\n".encode(),
        f"\nCLOCHE-SYNC-OK {NONCE} 0\n".encode(),
        f"\nCLOCHE-SYNC-OK {NONCE} 0 {'9' * 40}\n".encode(),
        f"\nCLOCHE-SYNC {NONCE} 0\n".encode(),
    ],
)
def test_garbage_before_the_echo_is_dropped(junk: bytes) -> None:
    sync = Resync(NONCE)
    sync.start()
    assert not sync.feed(junk)
    assert not sync.answered
    assert sync.feed(echo(0))


def test_fresh_nonces_and_only_well_formed_ones() -> None:
    assert Resync().nonce != Resync().nonce
    with pytest.raises(ValueError):
        Resync("ABC")
