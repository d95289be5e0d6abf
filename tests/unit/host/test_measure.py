"""What a process uses, read from outside; of one that has ended, its last word."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from cloche_server.core.records import ProcessRef
from cloche_server.host import measure, process
from cloche_server.host.watch import ProcessWatch

pytestmark = pytest.mark.thorough

#: Works on two threads until it has used a third of a second, tells, and waits.
BUSY = """
import threading, time
held = bytearray(b'x' * 32 * 2**20)
def work():
    while time.process_time() < 0.35: pass
threads = [threading.Thread(target=work) for _ in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
print('done', flush=True); input()
"""


def busy() -> tuple[subprocess.Popen[bytes], ProcessRef]:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    start = process.start_time(child.pid)
    assert start is not None
    return child, ProcessRef(child.pid, start)


def test_all_threads_count_and_so_does_memory_of_its_own() -> None:
    child, ref = busy()
    try:
        found = measure.read(ref)
        assert found is not None
        assert found.cpu_seconds >= 0.3
        assert 32 * 2**20 <= found.memory_bytes < 2**30
        assert measure.read(ProcessRef(ref.pid, ref.start_time + 1)) is None, "another process of that number"
    finally:
        child.kill()
        child.wait()
    assert measure.read(ref) is None


async def test_the_last_word_of_a_child_is_what_it_has_used_in_all() -> None:
    child, ref = busy()
    watch = ProcessWatch.open(ref)
    assert watch is not None
    assert child.stdin is not None
    child.stdin.close()  # it ends by itself, and nobody has read it before
    await asyncio.wait_for(watch.wait(), 30)
    child.returncode = 0  # the watch has reaped it
    found = watch.measure()
    assert found is not None
    assert found.cpu_seconds >= 0.3
    watch.close()


async def test_a_kill_is_read_before() -> None:
    child, ref = busy()
    watch = ProcessWatch.open(ref)
    assert watch is not None
    watch.kill()
    found = watch.measure()
    assert found is not None
    assert found.cpu_seconds >= 0.3
    await asyncio.wait_for(watch.wait(), 30)
    child.returncode = -9
    after = watch.measure()
    assert after is not None
    assert after.cpu_seconds >= found.cpu_seconds
    watch.close()
