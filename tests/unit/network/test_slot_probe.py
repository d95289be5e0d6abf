"""The look at a slot from the host's side, at real namespaces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche_server.core.network import TAP
from cloche_server.host import netns
from cloche_server.host.process import feed
from cloche_server.network.probes import probe_slot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    path = tmp_path / "slot"

    def make(*commands: str, cards: tuple[str, ...] = (TAP,), forward: bool = False) -> Path:
        def furnish() -> None:
            for card in cards:
                os.close(netns.open_tap(card, make=True))
            feed(["ip", "-batch", "-"], "\n".join(["link set lo up", *commands]) + "\n")
            Path("/proc/sys/net/ipv4/ip_forward").write_text(str(int(forward)))

        netns.create(path, furnish)
        return path

    yield make
    netns.remove(path)


CARD = (f"link set {TAP} up", f"address add 192.168.127.1/30 dev {TAP}")


def test_one_card_and_no_way_out(made: Callable[..., Path]) -> None:
    probe = probe_slot(made(*CARD))
    assert (probe.name, probe.held) == ("network.slot", True)


@pytest.mark.parametrize(
    ("commands", "furniture", "told"),
    [
        (CARD, {"cards": (TAP, "other")}, "interfaces other"),
        (CARD, {"forward": True}, "forwards packets"),
        ((*CARD, f"route add default via 192.168.127.2 dev {TAP}"), {}, "a route by tap0"),
    ],
)
def test_what_should_not_be_there(
    made: Callable[..., Path], commands: tuple[str, ...], furniture: dict[str, Any], told: str
) -> None:
    probe = probe_slot(made(*commands, **furniture))
    assert not probe.held
    assert told in probe.detail


def test_the_network_of_the_host_is_no_slot(tmp_path: Path) -> None:
    assert not probe_slot(Path("/proc/self/ns/net")).held
    probe = probe_slot(tmp_path / "none")
    assert not probe.held
    assert "could not be tried" in probe.detail
