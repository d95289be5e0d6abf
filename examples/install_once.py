"""Set up once, then start from there as often as needed.

A sandbox gets a virtual environment, a package and a process that holds an index in memory. A snapshot of it
keeps all three; the sandbox itself is deleted. Sandboxes that start from the snapshot have everything at once,
and what one of them does is not seen by the others.

. .cloche/env
.cloche/venv/bin/python examples/install_once.py
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from cloche import Sandbox, Snapshot

COUNT = 3
SITE = "/opt/env/lib/python3*/site-packages"
MODULES = 20

#: Holds an index in memory and answers over a pair of pipes; it is there again in every sandbox of the snapshot.
INDEX = """\
import os
from textkit import tools

index = {tools.fold(word): word for word in (f"Word-{n}" for n in range(20000))}
for name in ("/run/ask", "/run/answer"):
    os.mkfifo(name)
while True:
    with open("/run/ask") as ask:
        word = ask.read().strip()
    with open("/run/answer", "w") as answer:
        answer.write(f"{index.get(word, '?')} of {len(index)}")
"""


@dataclass
class Use:
    """One sandbox that started from the snapshot."""

    sandbox: Sandbox
    start_seconds: float
    use_seconds: float
    answer: str
    seen: str


def install(sandbox: Sandbox) -> None:
    """What takes long and need not be done again."""
    sandbox.exec("python3 -m venv --without-pip /opt/env", timeout=120).check()
    package = {"__init__.py": "", "tools.py": "def fold(word):\n    return word.casefold()\n"}
    for number in range(MODULES):
        package[f"part{number}.py"] = "\n".join(f"def f{n}(x):\n    return x * {n}" for n in range(100))
    root = sandbox.exec(f"echo {SITE}").check().stdout.strip()
    for name, text in package.items():
        sandbox.files.write(f"{root}/textkit/{name}", text)
    sandbox.exec(["/opt/env/bin/python", "-m", "compileall", "-q", root], timeout=300).check()
    sandbox.files.write("/srv/index.py", INDEX)
    sandbox.start("exec /opt/env/bin/python /srv/index.py")
    sandbox.exec("until [ -p /run/answer ]; do sleep 0.1; done", timeout=120).check()


def use(snapshot: Snapshot, number: int, clean_up: ExitStack) -> Use:
    """Start a sandbox from the snapshot, ask the process in it, leave a file behind."""
    began = time.perf_counter()
    sandbox = Sandbox.create(from_snapshot=snapshot, ttl_seconds=600, metadata={"example": "install_once"})
    clean_up.callback(sandbox.kill)
    started = time.perf_counter()
    ask = f"echo word-{number} > /run/ask && cat /run/answer"
    answer = sandbox.exec(ask, timeout=60).check().stdout
    sandbox.exec(f"touch /srv/seen-by-{number}").check()
    used = time.perf_counter()
    return Use(sandbox, started - began, used - started, answer, sandbox.exec("ls /srv").check().stdout)


def check(one: Use, number: int) -> bool:
    """The process answered from the index, the package can be imported, and no other sandbox is seen."""
    program = "import textkit.part7 as p; print(p.__cached__.endswith('.pyc'), p.f6(7))"
    imported = one.sandbox.exec(["/opt/env/bin/python", "-c", program], timeout=60).check().stdout.strip()
    answered = one.answer == f"Word-{number} of 20000"
    alone = one.seen.split() == ["index.py", f"seen-by-{number}"]
    return answered and alone and imported == "True 42"


def run(clean_up: ExitStack) -> bool:
    """The whole story. `clean_up` deletes what it makes, whatever happens."""
    began = time.perf_counter()
    first = Sandbox.create(ttl_seconds=900, metadata={"example": "install_once"})
    clean_up.callback(first.kill)
    created = time.perf_counter()
    install(first)
    installed = time.perf_counter()
    print(f"sandbox {first.id}: created in {created - began:.2f} s, set up in {installed - created:.2f} s")

    snapshot = first.snapshot("textkit is installed")
    clean_up.callback(snapshot.delete)
    size = snapshot.info.size_bytes / 2**20
    print(f"snapshot {snapshot.id}: taken in {time.perf_counter() - installed:.2f} s, {size:.0f} MiB of memory")
    first.kill()
    print("the sandbox it was taken of is deleted")

    began = time.perf_counter()
    with ThreadPoolExecutor(COUNT) as pool:
        uses = list(pool.map(lambda number: use(snapshot, number, clean_up), range(COUNT)))
    print(f"\n{COUNT} sandboxes started from it and used, all within {time.perf_counter() - began:.2f} s")
    print(f"{'sandbox':<20}  {'start':>8}  {'use':>8}  answer of the process that came with it")
    for one in uses:
        print(f"{one.sandbox.id:<20}  {one.start_seconds:>6.2f} s  {one.use_seconds:>6.2f} s  {one.answer}")
    good = all(check(one, number) for number, one in enumerate(uses))
    print(f"\nthe package is there, and none sees the files of another: {'yes' if good else 'NO'}")
    return good


def main() -> int:
    """0 when every sandbox had what was set up once."""
    with ExitStack() as clean_up:
        good = run(clean_up)
    print("deleted the sandboxes and the snapshot")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
