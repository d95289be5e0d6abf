"""Layers against a model: a file is there exactly as long as somebody needs it, whoever lets go first."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from cloche_server.storage.layers import SUFFIX, Layers, make_overlay
from kit.fake_engine import template

pytestmark = pytest.mark.thorough

#: Users of a layer: each sandbox or snapshot is a name, and holds one layer as its top.
users = Bundle("users")


class LayersOfSandboxes(RuleBasedStateMachine):
    """Sandboxes write to layers of their own, are captured, forked and deleted; servers end and start."""

    def __init__(self) -> None:
        super().__init__()
        self.data = Path(tempfile.mkdtemp())
        (self.data / "layers").mkdir()
        self.template = template(self.data)
        self.layers = Layers(self.data)
        self.tops: dict[str, str] = {}
        self.parents: dict[str, str | None] = {}
        self.count = 0

    def teardown(self) -> None:
        for user in list(self.tops):
            self.layers.release(self.tops.pop(user))
            self.what_is_needed_is_there()
        assert self.files() == set()
        shutil.rmtree(self.data)

    def new(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def files(self) -> set[str]:
        return {path.name.removesuffix(SUFFIX) for path in (self.data / "layers").iterdir()}

    def make(self, parent: str | None) -> str:
        name = self.new()
        self.layers.create(name, self.template, parent)
        self.parents[name] = parent
        return name

    def use(self, layer: str) -> str:
        user = self.new()
        self.tops[user] = layer
        return user

    @rule(target=users)
    def create(self) -> str:
        return self.use(self.make(None))

    @rule(target=users, user=users)
    def snapshot(self, user: str) -> object:
        """The layer is sealed: its hold passes to the snapshot, and the sandbox goes on over a fresh one."""
        if user not in self.tops:
            return multiple()
        sealed = self.tops[user]
        self.tops[user] = self.make(sealed)
        return self.use(sealed)

    @rule(target=users, user=users, count=st.integers(0, 3), deleted_first=st.booleans())
    def fork(self, user: str, count: int, deleted_first: bool) -> object:
        if user not in self.tops:
            return multiple()
        sealed = self.tops[user]
        self.tops[user] = self.make(sealed)
        if deleted_first:
            self.layers.release(self.tops.pop(user))
        children = [self.use(self.make(sealed)) for _ in range(count)]
        self.layers.release(sealed)
        return multiple(*children)

    @rule(target=users, user=users)
    def create_from(self, user: str) -> object:
        """From a snapshot, which is held meanwhile."""
        if user not in self.tops:
            return multiple()
        self.layers.hold(self.tops[user])
        child = self.use(self.make(self.tops[user]))
        self.layers.release(self.tops[user])
        return child

    @rule(user=consumes(users))
    def delete(self, user: str) -> None:
        if user in self.tops:
            self.layers.release(self.tops.pop(user))

    @rule(orphans=st.integers(0, 2), garbage=st.booleans(), over=st.sampled_from(["n1", "n2", "n3"]))
    def restart(self, orphans: int, garbage: bool, over: str) -> None:
        before = dict(self.layers._holds)
        empty = self.template.directory / "overlay.qcow2"
        for _ in range(orphans):
            make_overlay(empty, self.data / "layers" / (self.new() + SUFFIX), over + SUFFIX, 1 << 30)
        if garbage:
            (self.data / "layers" / (self.new() + SUFFIX)).write_bytes(b"half a file")
        self.layers = Layers(self.data)
        assert self.layers.take_stock(list(self.tops.values())) == orphans + garbage
        assert self.layers._holds == before

    def closure(self) -> set[str]:
        needed: set[str] = set()
        for top in self.tops.values():
            current: str | None = top
            while current is not None and current not in needed:
                needed.add(current)
                current = self.parents[current]
        return needed

    @invariant()
    def what_is_needed_is_there(self) -> None:
        assert self.files() == self.closure()

    @invariant()
    def each_is_held_as_often_as_it_is_used(self) -> None:
        wanted = Counter(self.tops.values())
        wanted.update(parent for name in self.closure() if (parent := self.parents[name]) is not None)
        assert self.layers._holds == dict(wanted)
        for top in self.tops.values():
            assert self.layers.chain(top)[0] == top


TestLayers = LayersOfSandboxes.TestCase
TestLayers.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
