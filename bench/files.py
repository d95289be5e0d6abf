"""How fast files move, up and down, and how many small ones a second.

    python bench/files.py [--sizes 1,64,512] [--runs N] [--small N]

Sizes are in MiB, speeds in MiB/s. A large file is moved fewer times than a small one. `growth` is by how much the
memory of the server on this machine grew at most while files moved.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from common import Report, client, create, delete, facts, milliseconds, must, parser
from exec import rss_mib, server_pid

CHUNK = 256 * 1024
#: Block that large files are made of; its digest, repeated, tells whether what comes back is what went in.
BLOCK = os.urandom(1 << 20)


def body(mib: int) -> Iterator[bytes]:
    for _ in range(mib):
        for at in range(0, len(BLOCK), CHUNK):
            yield BLOCK[at : at + CHUNK]


def digest(mib: int) -> str:
    found = hashlib.sha256()
    for _ in range(mib):
        found.update(BLOCK)
    return found.hexdigest()


class Moves:
    """Files of one sandbox, and how far the memory of the server has grown meanwhile."""

    def __init__(self, api: httpx.Client, sandbox_id: str) -> None:
        self._api = api
        self._route = f"/sandboxes/{sandbox_id}/fs"
        self._pid = server_pid()
        self._before = self.peak = rss_mib(self._pid)

    @property
    def growth(self) -> float:
        return self.peak - self._before

    def _look(self) -> None:
        self.peak = max(self.peak, rss_mib(self._pid))

    def up(self, path: str, content: Any) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        must(self._api.put(self._route, params={"path": path}, content=content, headers=headers))
        self._look()

    def down(self, path: str) -> str:
        """The SHA-256 of what has come."""
        found, count = hashlib.sha256(), 0
        with self._api.stream("GET", self._route, params={"path": path}) as response:
            for chunk in response.iter_bytes(CHUNK):
                found.update(chunk)
                count += 1
                if count % 64 == 0:
                    self._look()
        self._look()
        return found.hexdigest()

    def stat(self, path: str) -> None:
        must(self._api.get(f"{self._route}/stat", params={"path": path}))

    def remove(self, path: str) -> None:
        must(self._api.delete(self._route, params={"path": path}), 200, 204)


def large(moves: Moves, mib: int, runs: int, report: Report) -> None:
    up, down, wanted = [], [], digest(mib)
    for _ in range(runs):
        began = time.perf_counter()
        moves.up("/root/big", body(mib))
        up.append(mib / (time.perf_counter() - began))
        began = time.perf_counter()
        came = moves.down("/root/big")
        down.append(mib / (time.perf_counter() - began))
        if came != wanted:
            raise SystemExit(f"a file of {mib} MiB did not come back as it went in")
    moves.remove("/root/big")
    report.add(f"upload {mib} MiB", up, "MiB/s", 25)
    report.add(f"download {mib} MiB", down, "MiB/s", 25)


def small(moves: Moves, count: int, report: Report) -> None:
    """Files of 1 KiB, one after another: each call, and all of them as calls per second."""
    verbs: dict[str, Callable[[str], object]] = {
        "write": lambda path: moves.up(path, BLOCK[:1024]),
        "read": moves.down,
        "stat": moves.stat,
        "delete": moves.remove,
    }
    for name, verb in verbs.items():
        took = []
        for number in range(count):
            began = time.perf_counter()
            verb(f"/root/small/{number}")
            took.append(milliseconds(began))
        report.add(f"{name} 1 KiB", took)
        report.add(f"{name} 1 KiB, calls", [1000 * count / sum(took)], "1/s")


def main() -> None:
    options = parser(__doc__, 5)
    options.add_argument("--sizes", default="1,64,512", help="MiB of the large files")
    options.add_argument("--small", type=int, default=100, help="number of small files")
    args = options.parse_args()
    with client() as api:
        report = Report("files", facts(api))
        sandbox = create(api, disk_mb=4096)
        try:
            moves = Moves(api, sandbox["id"])
            small(moves, args.small, report)
            for mib in (int(size) for size in args.sizes.split(",")):
                large(moves, mib, max(1, args.runs if mib < 256 else args.runs // 2), report)
            report.add("growth of the server", [moves.growth], "MiB", 32)
        finally:
            delete(api, sandbox["id"])
        report.finish()


if __name__ == "__main__":
    main()
