"""How long a create takes, and a create with its first command, by where the machine came from.

The server decides by its pools: the answer's `boot_mode` sorts the runs. `warm` and `launched` need pools, which
are waited for between runs; for `snapshot` start a server with both pools at 0. `--parallel` creates at once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import httpx
from common import Report, client, create, delete, facts, milliseconds, must, parser, percentile

TARGETS = {"warm": (25, 60), "launched": (100, None), "snapshot": (170, 320)}


def wait_for_pools(api: httpx.Client, warm: int, launched: int) -> None:
    """Until the pools are full, and a moment longer so that the refill no longer competes."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = api.get(str(api.base_url).replace("/v1", "").rstrip("/") + "/metrics").text
        counts = {
            line.split('"')[1]: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("cloche_pool_machines{")
        }
        if counts.get("warm", 0) >= warm and counts.get("launched", 0) >= launched:
            break
        time.sleep(0.05)
    time.sleep(0.3)


def one(api: httpx.Client) -> tuple[str, float, float]:
    """Boot mode, milliseconds of the create, milliseconds until the first output was there."""
    began = time.perf_counter()
    sandbox = create(api)
    created = milliseconds(began)
    result = must(api.post(f"/sandboxes/{sandbox['id']}/exec", json={"cmd": "echo ready"}))
    interactive = milliseconds(began)
    assert result["stdout"] == "ready\n", result
    delete(api, sandbox["id"])
    return sandbox["boot_mode"], created, interactive


def burst(api: httpx.Client, count: int) -> tuple[list[float], list[str]]:
    """`count` creates at once: the time of each, and what went wrong."""
    made: list[str] = []
    problems: list[str] = []

    def run(_: int) -> float:
        began = time.perf_counter()
        response = api.post("/sandboxes", json={"ttl_seconds": 600, "metadata": {"bench": "1"}})
        took = milliseconds(began)
        if response.status_code == 201:
            made.append(response.json()["id"])
        else:
            problems.append(f"{response.status_code} {response.text[:200]}")
        return took

    with ThreadPoolExecutor(count) as pool:
        times = list(pool.map(run, range(count)))
        answers = list(pool.map(lambda i: must(api.post(f"/sandboxes/{i}/exec", json={"cmd": "echo ok"})), made))
        assert all(a["stdout"] == "ok\n" for a in answers)
        list(pool.map(lambda i: delete(api, i), made))
    return times, problems


def main() -> None:
    options = parser(__doc__, 40)
    options.add_argument("--warm", type=int, default=2, help="size of the server's warm pool")
    options.add_argument("--launched", type=int, default=2, help="size of the server's pool of launched processes")
    options.add_argument("--parallel", type=int, default=30, help="creates at once in the last part; 0 leaves it out")
    args = options.parse_args()
    with client() as api:
        report = Report("create", facts(api))
        created, interactive = defaultdict(list), defaultdict(list)
        for _ in range(args.runs):
            wait_for_pools(api, args.warm, args.launched)
            mode, first, second = one(api)
            created[mode].append(first)
            interactive[mode].append(second)
        for mode in sorted(created):
            report.add(f"create, {mode}", created[mode], target=TARGETS[mode][0])
            report.add(f"create + first echo, {mode}", interactive[mode], target=TARGETS[mode][1])
        if args.parallel:
            times, problems = burst(api, args.parallel)
            report.add(f"{args.parallel} creates at once ({len(problems)} failed)", times)
            report.facts["burst_p99_ms"] = round(percentile(times, 99))
            for problem in problems:
                print(problem)
        report.finish()


if __name__ == "__main__":
    main()
