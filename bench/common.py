"""What the benchmarks share: the server's address, a client, percentiles, the table and the JSON file."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

RESULTS = Path(__file__).parent / "results"


def percentile(values: list[float], q: float) -> float:
    """Nearest rank: the smallest value that at least `q` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)]


@dataclass
class Row:
    """One line of the table. `values` in `unit`; `target` is the p50 (or maximum) that was promised."""

    name: str
    values: list[float]
    unit: str = "ms"
    target: float | None = None

    def cells(self) -> list[str]:
        p50, p99 = percentile(self.values, 50), percentile(self.values, 99)
        target = "" if self.target is None else f"{self.target:g}"
        return [
            self.name,
            str(len(self.values)),
            f"{p50:.1f}",
            f"{p99:.1f}",
            f"{max(self.values):.1f}",
            target,
            self.unit,
        ]


@dataclass
class Report:
    """A benchmark's results: prints a table, writes JSON."""

    name: str
    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, values: list[float], unit: str = "ms", target: float | None = None) -> None:
        self.rows.append(Row(name, values, unit, target))

    def finish(self) -> None:
        self.facts["loop_ms_after"] = loop_ms()
        head = ["what", "runs", "p50", "p99", "max", "target p50", "unit"]
        table = [head, *(row.cells() for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        print(f"\n{self.name}: " + ", ".join(f"{k} {v}" for k, v in self.facts.items()))
        for line in table:
            print(
                "  ".join(
                    cell.ljust(width) if i == 0 else cell.rjust(width)
                    for i, (cell, width) in enumerate(zip(line, widths, strict=True))
                )
            )
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}-{time.strftime('%Y%m%dT%H%M%S')}.json"
        path.write_text(
            json.dumps(
                {
                    "name": self.name,
                    "facts": self.facts,
                    "rows": [
                        {
                            "name": row.name,
                            "unit": row.unit,
                            "runs": len(row.values),
                            "p50": percentile(row.values, 50),
                            "p99": percentile(row.values, 99),
                            "max": max(row.values),
                            "target_p50": row.target,
                            "values": row.values,
                        }
                        for row in self.rows
                    ],
                },
                indent=2,
            )
            + "\n"
        )
        print(f"written to {path}")


def client() -> httpx.Client:
    """A client for the running server; address and token come from the environment or `.cloche/env`."""
    env = dict(os.environ)
    file = Path(__file__).parent.parent / ".cloche" / "env"
    if "CLOCHE_API_URL" not in env and file.is_file():
        for line in file.read_text().splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            env.setdefault(name, value.strip("'\""))
    if "CLOCHE_API_URL" not in env or "CLOCHE_API_KEY" not in env:
        sys.exit("no server is known: run ./quickstart, or set CLOCHE_API_URL and CLOCHE_API_KEY")
    return httpx.Client(
        base_url=env["CLOCHE_API_URL"] + "/v1",
        headers={"Authorization": f"Bearer {env['CLOCHE_API_KEY']}"},
        timeout=300,
    )


def facts(api: httpx.Client) -> dict[str, Any]:
    """Machine and engine, for the record."""
    version = api.get(str(api.base_url).replace("/v1", "").rstrip("/") + "/version").json()
    return {**host_facts(), "accel": version["accel"], "server": version["semver"]}


def host_facts() -> dict[str, Any]:
    """The machine, where no sandbox runs."""
    model = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    return {
        "machine": f"{os.cpu_count()} x {model}",
        "kernel": platform.release(),
        "accel": "no guest",
        "load_before": round(os.getloadavg()[0], 2),
        "loop_ms_before": loop_ms(),
    }


def loop_ms() -> float:
    """How fast the machine is at this moment: the median time of a million additions, three times over two seconds.

    A rented machine may run at half its speed for minutes. Compare results of runs whose loops agree.
    """
    took = []
    for _ in range(3):
        began, total = time.perf_counter(), 0
        for number in range(1_000_000):
            total += number
        took.append(milliseconds(began))
        time.sleep(0.5)
    return round(percentile(took, 50), 1)


def parser(doc: str | None, runs: int) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    found = argparse.ArgumentParser(description=doc)
    found.add_argument("--runs", type=int, default=runs, help=f"how often (default {runs})")
    return found


def milliseconds(since: float) -> float:
    return (time.perf_counter() - since) * 1000


def must(response: httpx.Response, *statuses: int) -> Any:
    """The JSON of an answer that has to have one of these statuses."""
    if response.status_code not in (statuses or (200,)):
        sys.exit(f"{response.request.method} {response.request.url}: {response.status_code} {response.text[:500]}")
    return response.json() if response.content else None


def create(api: httpx.Client, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = must(
        api.post("/sandboxes", json={"ttl_seconds": 600, "metadata": {"bench": "1"}, **body}), 201
    )
    return found


def delete(api: httpx.Client, sandbox_id: str) -> None:
    must(api.delete(f"/sandboxes/{sandbox_id}"), 204, 404)
