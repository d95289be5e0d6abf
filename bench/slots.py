#!/usr/bin/env python3
"""Network slots: what one costs a create, prepared and not, and what two hundred leave behind.

    bench/slots.py [--runs 50] [--many 200]

Needs root; starts no machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from common import Report

from cloche_server.network.slots import Slots


async def timed(slots: Slots, names: list[str]) -> list[float]:
    """Milliseconds of each `open`."""
    took = []
    for name in names:
        began = time.perf_counter()
        card = await slots.open(name)
        took.append((time.perf_counter() - began) * 1000)
        os.close(card)
    return took


async def run(root: Path, runs: int, many: int) -> Report:
    slots = Slots(root, runs)
    fresh = await timed(slots, [f"fresh{number}" for number in range(runs)])
    await slots.take_stock(())
    keeping = asyncio.ensure_future(slots.run())
    while len(list(root.iterdir())) < runs:
        await asyncio.sleep(0.05)
    keeping.cancel()
    ready = await timed(slots, [f"ready{number}" for number in range(runs)])
    sockets = []
    for number in range(runs):
        began = time.perf_counter()
        made = await slots.sockets(f"ready{number}")
        sockets.append((time.perf_counter() - began) * 1000)
        made.close()
    await slots.take_stock(())
    plenty = Slots(root, 0)
    began = time.perf_counter()
    for number in range(many):
        os.close(await plenty.open(f"many{number}"))
    made_in = time.perf_counter() - began
    began = time.perf_counter()
    await plenty.take_stock(())
    gone_in = time.perf_counter() - began
    left = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(root) in line]
    print(
        f"{many} slots made in {made_in:.1f} s, removed in {gone_in:.1f} s; left: {len(left)} mounts, "
        f"{len(list(root.iterdir()))} files"
    )
    result = Report("slots", {"cpus": os.cpu_count(), "load": os.getloadavg()[0]})
    result.add("open, not prepared", fresh)
    result.add("open, prepared", ready, target=10)
    result.add("sockets for netd", sockets)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--many", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cb-") as work:
        asyncio.run(run(Path(work), options.runs, options.many)).finish()


if __name__ == "__main__":
    main()
