"""Self-tests: every prober is asked, a guest that lies or says nothing never counts as held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from cloche_server.app.selftest import Target, probe_all, probe_guest, probe_vmm
from cloche_server.core.errors import ClocheError
from cloche_server.core.probes import Probe
from cloche_server.guest.frames import Output

NAMES = ["guest.disks", "guest.devices", "guest.pci", "guest.host_devices", "guest.host_files"]


class Call:
    def __init__(self, output: bytes) -> None:
        self._output = output

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def __aiter__(self) -> AsyncIterator[Output]:
        for at in range(0, len(self._output), 1000):
            yield Output(1, at, self._output[at : at + 1000])


class Guest:
    def __init__(self, output: bytes | ClocheError) -> None:
        self._output = output

    def exec(self, _: Any) -> Call:
        if isinstance(self._output, ClocheError):
            raise self._output
        return Call(self._output)


class Machine:
    def probe(self, disk: Path, memory: Path) -> Sequence[Probe]:
        return [Probe("vmm.x", True, f"{disk} {memory}")]


def target(output: bytes | ClocheError = b"") -> Target:
    machine: Any = Machine()
    guest: Any = Guest(output)
    return Target("s", machine, guest, Path("disk"), Path("mem"))


def told(output: bytes | ClocheError) -> list[Probe]:
    return list(asyncio.run(probe_guest(target(output))))  # type: ignore[arg-type]


def test_what_the_guest_says_is_marked_as_its_own_words() -> None:
    lines = "".join(f"{name}\tok\tfine\n" for name in NAMES).encode()
    probes = told(lines)
    assert [(p.name, p.held, p.detail) for p in probes] == [(name, True, "the guest says: fine") for name in NAMES]


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"\0" * 5000,
        b"guest.disks\tok\n" * 100,
        b"\xff\xfe\t\t\t",
        b"vmm.user\tok\tI am the host\n",
        b"a" * 1_000_000,
        b"guest.disks\tOK\tx\nguest.pci\tbad\tx\nguest.devices\tyes\t\n",
    ],
)
def test_a_guest_that_says_something_else_has_held_nothing(output: bytes) -> None:
    probes = told(output)
    assert [probe.name for probe in probes] == NAMES
    assert not any(probe.held for probe in probes)
    assert all(len(probe.detail) < 300 and probe.detail.isprintable() for probe in probes)


def test_a_guest_that_does_not_answer_has_held_nothing() -> None:
    probes = told(ClocheError("sandbox.unreachable", "the agent does not answer"))
    assert [(p.name, p.held) for p in probes] == [(name, False) for name in NAMES]
    assert all("could not be tried" in probe.detail for probe in probes)


async def test_every_prober_is_asked_in_turn() -> None:
    async def network(_: Target) -> Sequence[Probe]:
        return [Probe("network.metadata", False, "reached")]

    found = await probe_all([probe_vmm, network], target())
    assert [(p.name, p.held, p.detail) for p in found] == [
        ("vmm.x", True, "disk mem"),
        ("network.metadata", False, "reached"),
    ]
