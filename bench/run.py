"""What a one-shot run takes, from the POST to its answer, and whether twenty at once all succeed."""

from __future__ import annotations

import concurrent.futures
import time

import httpx
from common import Report, client, facts, milliseconds, must, parser

HELLO = {"language": "python", "source": "print('hello')", "expected_output": "hello"}


def one(api: httpx.Client) -> tuple[float, dict[str, float]]:
    began = time.perf_counter()
    answer = must(api.post("/run", json=HELLO))
    took = milliseconds(began)
    if answer["verdict"] != "accepted":
        raise SystemExit(f"the program did not say hello: {answer}")
    return took, answer["timing_ms"]


def main() -> None:
    arguments = parser(__doc__, runs=30)
    arguments.add_argument("--pause", type=float, default=3.0, help="seconds between runs, for the pools (default 3)")
    options = arguments.parse_args()
    with client() as api:
        report = Report("run", facts(api))
        for _ in range(3):
            one(api)
        total, phases = [], []
        for _ in range(options.runs):
            took, timing = one(api)
            total.append(took)
            phases.append(timing)
            time.sleep(options.pause)  # the pools fill and practise again, as they do between the calls of people
        report.add("run: Python hello", total, target=600.0)
        for phase in ("create", "files", "run"):
            report.add(f"run: {phase}", [timing[phase] for timing in phases])
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            each = list(pool.map(lambda _: one(api)[0], range(20)))
        report.add("run: 20 at once, each", each)
        report.add("run: 20 at once, all", [milliseconds(began)])
        report.finish()


if __name__ == "__main__":
    main()
