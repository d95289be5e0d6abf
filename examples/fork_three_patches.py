"""Try three patches at once, each in its own fork of one warmed sandbox, and keep the one that works.

A repository with a failing test is made once, and a test server that has imported everything keeps running
beside it. The sandbox is then forked into three: each child has the repository and that very process, so that
its tests run without a new interpreter. The best child is promoted, its siblings are deleted.

. .cloche/env
.cloche/venv/bin/python examples/fork_three_patches.py
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from cloche import Sandbox

REPO = "/srv/repo"
FILES = {
    "prices.py": """\
def total(cents, discount=0):
    return sum(cents) * (1 - discount)


def show(cents):
    return f"{cents / 100:.1f} EUR"
""",
    "test_prices.py": """\
import unittest

from prices import show, total


class Prices(unittest.TestCase):
    def test_total(self):
        self.assertEqual(total([100, 250]), 350)

    def test_a_discount_yields_whole_cents(self):
        self.assertEqual(repr(total([999], 0.1)), "899")

    def test_two_digits(self):
        self.assertEqual(show(899), "8.99 EUR")

    def test_nothing(self):
        self.assertEqual(show(total([])), "0.00 EUR")
""",
}

#: Listens for requests, and runs the tests of the repository in a fork of its own: what it has imported is there.
TEST_SERVER = """\
import http.server, json, os, socketserver, sys, unittest
import argparse, asyncio, csv, decimal, email, inspect, logging, sqlite3, unittest.mock

sys.path.insert(0, ".")
sys.dont_write_bytecode = True


def run():
    result = unittest.TestResult()
    unittest.defaultTestLoader.discover(".").run(result)
    bad = result.failures + result.errors
    why = [text.strip().splitlines()[-1] for _, text in bad]
    return {"run": result.testsRun, "bad": len(bad), "why": why, "server": os.getppid()}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        back, forth = os.pipe()
        if os.fork() == 0:
            os.write(forth, json.dumps(run()).encode())
            os._exit(0)
        os.close(forth)
        os.wait()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.read(back, 65536))
        os.close(back)

    def address_string(self):
        return "-"


with socketserver.UnixStreamServer("/run/tests.sock", Handler) as server:
    server.serve_forever()
"""
WARM_TESTS = "curl -s --unix-socket /run/tests.sock http://tests/"
COLD_TESTS = "python3 -c 'import argparse, asyncio, csv, decimal, email, logging, sqlite3'; python3 -m unittest -q"

PATCHES = {
    "only the digits": """\
--- a/prices.py
+++ b/prices.py
@@ -5 +5 @@
-    return f"{cents / 100:.1f} EUR"
+    return f"{cents / 100:.2f} EUR"
""",
    "digits and cents": """\
--- a/prices.py
+++ b/prices.py
@@ -2 +2 @@
-    return sum(cents) * (1 - discount)
+    return round(sum(cents) * (1 - discount))
@@ -5 +5 @@
-    return f"{cents / 100:.1f} EUR"
+    return f"{cents / 100:.2f} EUR"
""",
    "rewritten in a hurry": """\
--- a/prices.py
+++ b/prices.py
@@ -2 +2 @@
-    return sum(cents) * (1 - discount)
+    return int(sum(cents * (1 - discount)))
""",
}


@dataclass
class Outcome:
    """What became of a patch."""

    child: Sandbox
    patch: str
    tests: dict[str, int]
    apply_seconds: float
    test_seconds: float

    @property
    def good(self) -> bool:
        """All tests ran, and none failed."""
        return self.tests["run"] >= 4 and not self.tests["bad"]


def warm_tests(sandbox: Sandbox) -> dict[str, int]:
    """Run the tests in the process that has been running since before the fork."""
    found: dict[str, int] = json.loads(sandbox.exec(WARM_TESTS, timeout=60).check().stdout)
    return found


def prepare(sandbox: Sandbox) -> int:
    """Make the repository, warm the test server, see the tests fail. Returns the pid of the server."""
    for name, text in FILES.items():
        sandbox.files.write(f"{REPO}/{name}", text)
    sandbox.files.write("/srv/test_server.py", TEST_SERVER)
    identity = "git -c user.name=example -c user.email=example@localhost"
    sandbox.exec(f"git init -q && git add -A && {identity} commit -qm 'Prices'", cwd=REPO).check()
    server = sandbox.start("exec python3 /srv/test_server.py", cwd=REPO)
    sandbox.exec("until [ -S /run/tests.sock ]; do sleep 0.1; done", timeout=120).check()
    before = warm_tests(sandbox)
    print(f"repository: {before['bad']} of {before['run']} tests fail; test server: process {server.pid}")
    if server.pid is None or before["server"] != server.pid:
        raise RuntimeError(f"process {before['server']} ran the tests")
    return server.pid


def attempt(child: Sandbox, patch: str) -> Outcome:
    """Apply a patch in its child and run the tests there."""
    began = time.perf_counter()
    child.exec("git apply --unidiff-zero -", cwd=REPO, stdin=PATCHES[patch]).check()
    applied = time.perf_counter()
    tests = warm_tests(child)
    return Outcome(child, patch, tests, applied - began, time.perf_counter() - applied)


def show(outcomes: list[Outcome]) -> None:
    """The table."""
    print(f"\n{'child':<20}  {'patch':<20}  {'failed':>6}  {'apply':>9}  {'test':>9}")
    for one in outcomes:
        failed = f"{one.tests['bad']}/{one.tests['run']}"
        times = f"{one.apply_seconds * 1000:>6.0f} ms  {one.test_seconds * 1000:>6.0f} ms"
        print(f"{one.child.id:<20}  {one.patch:<20}  {failed:>6}  {times}")


def choose(parent: Sandbox, outcomes: list[Outcome], pid: int) -> bool:
    """Promote the child whose tests pass; True when all is as it should be."""
    same = all(one.tests["server"] == pid for one in outcomes)
    print(f"\nthe same test server in all of them, process {pid}: {'yes' if same else 'NO'}")
    winners = [one for one in outcomes if one.good]
    if len(winners) != 1:
        print(f"{len(winners)} patches work, not 1")
        return False
    winner = winners[0].child
    promoted = winner.promote(cleanup_siblings=True)
    print(f"promoted: {winner.id}, {winners[0].patch!r}; deleted: {len(promoted.deleted)} siblings")
    print(winner.exec("git diff --stat", cwd=REPO).check().stdout.rstrip())
    unchanged = parent.exec("git diff --quiet", cwd=REPO).ok
    print(f"the parent's repository is unchanged: {'yes' if unchanged else 'NO'}")
    return same and unchanged and len(promoted.deleted) == len(outcomes) - 1


def run(clean_up: ExitStack) -> bool:
    """The whole story. `clean_up` deletes what it makes, whatever happens."""
    began = time.perf_counter()
    parent = Sandbox.create(ttl_seconds=900, metadata={"example": "fork_three_patches"})
    clean_up.callback(parent.kill)
    pid = prepare(parent)
    print(f"created and warmed in {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    parent.exec(COLD_TESTS, cwd=REPO, timeout=120)
    print(f"the tests in a new interpreter: {(time.perf_counter() - began) * 1000:.0f} ms")
    began = time.perf_counter()
    warm_tests(parent)
    print(f"the tests in the warm one: {(time.perf_counter() - began) * 1000:.0f} ms")

    began = time.perf_counter()
    children = parent.fork(len(PATCHES))
    for child in children:
        clean_up.callback(child.kill)
    took = (time.perf_counter() - began) * 1000
    print(f"forked into {len(children)} in {took:.0f} ms; the parent stood still for {children.pause_ms:.0f} ms")
    for error in children.errors.values():
        raise error
    with ThreadPoolExecutor(len(children)) as pool:
        outcomes = list(pool.map(attempt, children, PATCHES))
    show(outcomes)
    return choose(parent, outcomes, pid)


def main() -> int:
    """0 when exactly the right patch has won."""
    with ExitStack() as clean_up:
        good = run(clean_up)
    print("deleted the rest")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
