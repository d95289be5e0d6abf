"""Everything in random order against a model: what the API says is what there is, at every step."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kit import leaks, truth
from kit.client import ApiError, Box
from kit.server import Server
from kit.until import until

SEED = int(os.environ.get("CRASH_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
SECONDS = float(os.environ.get("CRASH_SECONDS", "30"))
MOST = 6


@dataclass
class Known:
    """What must be true of one sandbox."""

    box: Box
    failed: bool = False
    expires: float | None = None
    files: dict[str, bytes] = field(default_factory=dict)


class Model:
    def __init__(self, server: Server, chance: random.Random) -> None:
        self.server = server
        self.chance = chance
        self.known: dict[str, Known] = {}
        self.done: list[str] = []

    # ------------------------------------------------------------ moves

    def create(self) -> None:
        if len(self.known) >= MOST:
            return
        ttl = self.chance.choice([None, None, None, 15])
        box = self.server.api.create(**({} if ttl is None else {"ttl_seconds": ttl}))
        self.known[box.id] = Known(box, expires=None if ttl is None else time.time() + ttl)

    def one(self, *, alive: bool = True) -> Known | None:
        now = time.time()
        able = [
            k for k in self.known.values() if (not alive or not k.failed) and (k.expires is None or k.expires - now > 8)
        ]
        return self.chance.choice(able) if able else None

    def exec(self) -> None:
        if known := self.one():
            word = str(self.chance.random())
            assert self._box(known).sh(f"echo {word}") == f"{word}\n"

    def write(self) -> None:
        if known := self.one():
            name = f"/root/f{self.chance.randrange(5)}"
            content = self.chance.randbytes(self.chance.choice([0, 1, 70_000, 900_000]))
            self._box(known).put(name, content)
            known.files[name] = content

    def read(self) -> None:
        if known := self.one():
            for name, content in known.files.items():
                assert self._box(known).get(name) == content

    def delete(self) -> None:
        if known := self.one(alive=False):
            self._box(known).delete()
            del self.known[known.box.id]

    def kill_qemu(self) -> None:
        if known := self.one():
            self.server.qemu(known.box.id).kill()
            until(lambda: self._box(known).refresh()["status"] == "failed", 10)
            known.failed = True

    def kill_qemu_while_it_runs(self) -> None:
        if known := self.one():
            self._box(known).start("sleep 1000")
            self.kill_qemu()

    def power_off(self) -> None:
        if known := self.one():
            self._box(known).start("echo o > /proc/sysrq-trigger")
            until(lambda: self._box(known).refresh()["status"] == "failed", 30)
            known.failed = True

    def kill_server(self) -> None:
        self.server.kill()
        if self.chance.random() < 0.3 and (known := self.one()):
            machine = self.server.qemu(known.box.id)
            machine.kill()
            until(lambda: not machine.alive())
            known.failed = True
        self.server.start()

    def restart_server(self) -> None:
        self.server.restart()

    def change_ttl(self) -> None:
        if known := self.one(alive=False):
            ttl = self.chance.choice([12, 1000, 0])
            self.server.api.call("PATCH", f"{known.box.path}/lifecycle", json={"ttl_seconds": ttl})
            known.expires = time.time() + ttl if ttl else None

    # ------------------------------------------------------------ truth

    def _box(self, known: Known) -> Box:
        known.box.api = self.server.api  # a new server has a new address
        return known.box

    def check(self) -> None:
        """The API tells of exactly what is known; a TTL may be some seconds late and never early."""
        problems = leaks.settled(self._differences, 30)
        assert not problems, f"{problems} after {self.done[-12:]}"

    def _differences(self) -> list[str]:
        now = time.time()
        listed = {item["id"]: item["status"] for item in self.server.api.list()}
        problems = []
        for sandbox_id, known in list(self.known.items()):
            status = listed.pop(sandbox_id, None)
            overdue = known.expires is not None and now >= known.expires - 0.5
            if status is None and overdue:
                del self.known[sandbox_id]
            elif status is None:
                problems.append(f"{sandbox_id} is gone")
            elif overdue and known.expires is not None and now > known.expires + 10:
                problems.append(f"{sandbox_id} should have ended {now - known.expires:.1f} s ago")
            elif status != ("failed" if known.failed else "running"):
                problems.append(f"{sandbox_id} is {status}, and has failed: {known.failed}")
        problems += [f"{sandbox_id} is {status} and unknown" for sandbox_id, status in listed.items()]
        return problems

    def step(self) -> None:
        moves: list[tuple[Callable[[], None], int]] = [
            (self.create, 6),
            (self.exec, 6),
            (self.write, 4),
            (self.read, 4),
            (self.delete, 3),
            (self.kill_qemu, 2),
            (self.kill_qemu_while_it_runs, 1),
            (self.power_off, 1),
            (self.kill_server, 1),
            (self.restart_server, 1),
            (self.change_ttl, 2),
        ]
        (move,) = self.chance.choices([m for m, _ in moves], [w for _, w in moves])
        self.done.append(move.__name__)
        try:
            move()
        except ApiError as error:
            raise AssertionError(f"{move.__name__}: {error} after {self.done[-12:]}") from error
        self.check()


@pytest.mark.slow
def test_everything_in_random_order(new_server: Callable[..., Server]) -> None:
    print(f"CRASH_SEED={SEED}")
    model = Model(new_server(), random.Random(SEED))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        model.step()
    print(f"{len(model.done)} steps: {' '.join(model.done)}")
    truth.check(model.server)
    for known in model.known.values():
        if not known.failed and known.expires is None:
            model._box(known)
            for name, content in known.files.items():
                assert known.box.get(name) == content
    for sandbox_id in list(model.known):
        model.server.api.request("DELETE", f"/v1/sandboxes/{sandbox_id}")
    truth.check(model.server)
    truth.whole(model.server)
    model.server.stop(sandboxes=True)
    assert leaks.left_after_end(model.server.data) == []
