"""Random verbs on real machines against a model, several at once, with kills of server and VMM in between.

Each sandbox has a word on its disk and a word in its memory. Whatever is done to it, both are afterwards what the model
says, its state is the one that is told, and nothing is left that nobody knows. `RANDOM_SECONDS` says for how long,
`RANDOM_SEED` repeats a run.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from kit import leaks, truth
from kit.client import Box
from kit.lineage import skew
from kit.server import Server
from kit.until import until

SEED = int(os.environ.get("RANDOM_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
SECONDS = float(os.environ.get("RANDOM_SECONDS", "30"))
MOST = 5
MOST_SNAPSHOTS = 4

#: What must be refused in which state.
ILLEGAL = {
    "running": ["resume-not", "start-not"],
    "paused": ["stop"],
    "stopped": ["pause", "resume", "hibernate", "wake", "fork"],
    "failed": ["pause", "resume", "hibernate", "wake", "stop", "fork"],
}
#: What keeps disk and memory, in whatever order it comes.
HARMLESS = ["pause", "resume", "hibernate", "wake", "snapshots", "fork"]


@dataclass(frozen=True)
class Words:
    """What lies on the disk and in the memory; None: nothing, it has booted since."""

    disk: str
    memory: str | None


@dataclass
class Known:
    box: Box
    status: str
    words: Words


class Model:
    def __init__(self, server: Server, chance: random.Random) -> None:
        self.server = server
        self.chance = chance
        self.boxes: dict[str, Known] = {}
        self.snapshots: dict[str, Words] = {}
        self.done: Counter[str] = Counter()
        self.last: list[str] = []

    # ------------------------------------------------------------ moves of one sandbox

    def look(self, one: Known) -> None:
        """A hibernated one is woken by it."""
        if one.status in {"running", "hibernated"}:
            one.status = "running"
            told = one.box.sh("cat /root/word; cat /dev/shm/word 2>/dev/null || true").split()
            assert told == [word for word in (one.words.disk, one.words.memory) if word is not None]
            assert skew(one.box) < 2.0

    def write(self, one: Known) -> None:
        if one.status in {"running", "hibernated"}:
            word = f"w{self.chance.randrange(1 << 40)}"
            one.box.sh(f"echo {word} > /root/word; sync; echo {word} > /dev/shm/word")
            one.status, one.words = "running", Words(word, word)

    def pause(self, one: Known) -> None:
        if one.status in {"running", "paused"}:
            one.box.pause()
            one.status = "paused"

    def resume(self, one: Known) -> None:
        if one.status in {"running", "paused"}:
            one.box.resume()
            one.status = "running"

    def hibernate(self, one: Known) -> None:
        if one.status in {"running", "paused", "hibernated"}:
            one.box.hibernate()
            one.status = "hibernated"

    def wake(self, one: Known) -> None:
        if one.status in {"running", "hibernated"}:
            one.box.wake()
            one.status = "running"

    def stop(self, one: Known) -> None:
        if one.status in {"running", "hibernated", "stopped"}:
            assert one.box.verb("stop")[0] == 200
            one.status, one.words = "stopped", replace(one.words, memory=None)

    def start(self, one: Known) -> None:
        if one.status in {"stopped", "failed"}:
            assert one.box.verb("start")[0] == 200
            one.status, one.words = "running", replace(one.words, memory=None)

    def snapshot(self, one: Known) -> None:
        if len(self.snapshots) >= MOST_SNAPSHOTS:
            return
        at_rest = one.status in {"stopped", "failed"}
        memory = not at_rest and self.chance.random() < 0.6
        taken = one.box.snapshot(memory=memory)
        self.snapshots[taken] = one.words if memory else replace(one.words, memory=None)
        one.status = "running" if one.status == "hibernated" else one.status

    def restore(self, one: Known) -> None:
        if self.snapshots:
            snapshot = self.chance.choice(list(self.snapshots))
            one.box.restore(snapshot)
            one.status, one.words = "running", self.snapshots[snapshot]

    def fork(self, one: Known) -> None:
        if one.status in {"running", "paused", "hibernated"} and len(self.boxes) < MOST:
            child = one.box.fork()
            one.status = "running" if one.status == "hibernated" else one.status
            self.boxes[child.id] = Known(child, "running", one.words)

    def delete(self, one: Known) -> None:
        one.box.delete()
        del self.boxes[one.box.id]

    def kill_vmm(self, one: Known) -> None:
        if one.status in {"running", "paused"}:
            self.server.qemu(one.box.id).kill()
            until(lambda: one.box.status() == "failed", 20)
            one.status, one.words = "failed", replace(one.words, memory=None)

    def refused(self, one: Known) -> None:
        """What is not possible says so, says what is, and changes nothing."""
        for verb in ILLEGAL.get(one.status, []):
            if verb.endswith("-not"):
                assert one.box.verb(verb.removesuffix("-not"))[0] < 300, "it is so already"
                continue
            answer = one.box.api.request("POST", f"{one.box.path}/{verb}", json={} if verb == "fork" else None)
            assert answer.status_code == 409, f"{verb} of a {one.status} one: {answer.text}"
            assert answer.json()["details"]["status"] == one.status
            assert verb not in answer.json()["details"]["allowed"]

    def race(self, one: Known) -> None:
        """Several at once end in one order or another."""
        if one.status not in {"running", "paused", "hibernated"}:
            return
        room = MOST - len(self.boxes)
        verbs = [verb for verb in self.chance.sample(HARMLESS, 3) if verb != "fork" or room > 0]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda verb: one.box.api.request("POST", f"{one.box.path}/{verb}"), verbs))
        for verb, answer in zip(verbs, answers, strict=True):
            assert answer.is_success or answer.status_code == 409, f"{verb} among {verbs}: {answer.text}"
            if answer.is_success and verb == "snapshots":
                self.snapshots[answer.json()["id"]] = one.words
            elif answer.is_success and verb == "fork":
                child = one.box.api.keep(answer.json())
                self.boxes[child.id] = Known(child, "running", one.words)
        one.status = one.box.status()
        assert one.status in {"running", "paused", "hibernated"}

    # ------------------------------------------------------------ moves of the whole

    def create(self) -> None:
        if len(self.boxes) >= MOST:
            return
        if self.snapshots and self.chance.random() < 0.5:
            snapshot = self.chance.choice(list(self.snapshots))
            box = self.server.api.create(from_snapshot=snapshot)
            self.boxes[box.id] = Known(box, "running", self.snapshots[snapshot])
            return
        one = Known(self.server.api.create(), "running", Words("", None))
        self.write(one)
        self.boxes[one.box.id] = one

    def delete_snapshot(self) -> None:
        if self.snapshots:
            snapshot = self.chance.choice(list(self.snapshots))
            self.server.api.call("DELETE", f"/v1/snapshots/{snapshot}")
            del self.snapshots[snapshot]

    def kill_server(self) -> None:
        self.server.kill()
        self.server.start()
        self._new_address()

    def restart_server(self) -> None:
        self.server.restart()
        self._new_address()

    def _new_address(self) -> None:
        for one in self.boxes.values():
            one.box.api = self.server.api

    def together(self) -> None:
        """Different things to different sandboxes, at the same time."""
        chosen = self.chance.sample(list(self.boxes.values()), min(3, len(self.boxes)))
        moves = self.chance.choices(CALM, k=len(chosen))
        self.last += [
            f"({move.__name__} {one.box.id[:4]} {one.status})" for move, one in zip(moves, chosen, strict=True)
        ]
        with ThreadPoolExecutor() as pool:
            for each in [pool.submit(move, self, one) for move, one in zip(moves, chosen, strict=True)]:
                each.result()

    # ------------------------------------------------------------ truth

    def step(self) -> None:
        names = [*(move.__name__ for move in ALONE), *WHOLE]
        (name,) = self.chance.choices(names, [*(2 for _ in ALONE), *WHOLE.values()])
        if name in WHOLE:
            self.last.append(name)
            getattr(self, name)()
        elif self.boxes:
            one = self.chance.choice(list(self.boxes.values()))
            self.last.append(f"{name} {one.box.id[:4]} {one.status}")
            getattr(self, name)(one)
        self.done[name] += 1
        problems = leaks.settled(self._differences, 60)
        assert not problems, problems

    def _differences(self) -> list[str]:
        listed = {item["id"]: item["status"] for item in self.server.api.list()}
        known = {name: one.status for name, one in self.boxes.items()}
        taken = {one["id"] for one in self.server.api.snapshots()}
        problems = [f"told are {listed}, known {known}"] if listed != known else []
        return problems + ([f"snapshots {taken}, known {set(self.snapshots)}"] if taken != set(self.snapshots) else [])


Move = Callable[[Model, Known], None]
#: These may be done to several at once: none of them changes which sandboxes there are.
CALM: list[Move] = [Model.look, Model.write, Model.pause, Model.resume, Model.hibernate, Model.wake, Model.stop,
                    Model.start, Model.restore, Model.refused, Model.kill_vmm]  # fmt: skip
ALONE: list[Move] = [*CALM, Model.look, Model.write, Model.snapshot, Model.fork, Model.delete, Model.race]
WHOLE = {"create": 5, "delete_snapshot": 2, "kill_server": 1, "restart_server": 1, "together": 8}


@pytest.mark.slow
def test_random_verbs(new_server: Callable[..., Server]) -> None:
    print(f"RANDOM_SEED={SEED}")
    model = Model(new_server(), random.Random(SEED))
    deadline = time.monotonic() + SECONDS
    steps = 0
    try:
        while time.monotonic() < deadline:
            model.step()
            steps += 1
            if steps % 10 == 0:
                truth.check(model.server)
        for one in list(model.boxes.values()):
            if one.status == "paused":
                model.resume(one)
            elif one.status in {"stopped", "failed"}:
                model.start(one)
            model.look(one)
    finally:
        print(f"{steps} steps: {dict(model.done)}; the last: {' '.join(model.last[-16:])}")
    truth.check(model.server)
    for one in list(model.boxes.values()):
        model.delete(one)
    for snapshot in model.snapshots:
        model.server.api.call("DELETE", f"/v1/snapshots/{snapshot}")
    truth.check(model.server)
    truth.whole(model.server)
    model.server.stop(sandboxes=True)
    assert leaks.left_after_end(model.server.data) == []
