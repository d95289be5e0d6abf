"""How long a key takes to be shown, and what a flood of output costs the server.

    python bench/terminal.py [--runs N] [--megabytes N]

A key is typed at a shell in a sandbox and has been shown when its echo is here. The flood is written by a process whose
record is followed by one reader; the growth is that of the server on this machine.
"""

from __future__ import annotations

import time

import httpx
from common import Report, client, create, delete, facts, milliseconds, parser
from exec import rss_mib, server_pid

from cloche import Sandbox


def keys(sandbox: Sandbox, runs: int, report: Report) -> None:
    took = []
    with sandbox.terminal(80, 24) as terminal:
        terminal.write("stty -icanon echo; PS1=; exec cat >/dev/null\n")
        time.sleep(2)
        terminal.write("@")
        seen = b""
        while not seen.endswith(b"@"):
            seen += terminal.read()
        for number in range(runs):
            key = b"abcdefghij"[number % 10 : number % 10 + 1]
            began = time.perf_counter()
            terminal.write(key)
            shown = b""
            while key not in shown:
                shown += terminal.read()
            took.append(milliseconds(began))
            time.sleep(0.02)
        terminal.write(b"\x03")
    report.add("key to echo", took, target=40.0)


def flood(sandbox: Sandbox, megabytes: int, report: Report) -> None:
    pid = server_pid()
    before = peak = rss_mib(pid)
    began = time.perf_counter()
    process = sandbox.processes.start(f"head -c {megabytes << 20} /dev/zero")
    seen = 0
    for event in process.output_bytes():
        seen += len(getattr(event, "data", b""))
        peak = max(peak, rss_mib(pid))
    took = time.perf_counter() - began
    report.add(f"{megabytes} MiB of output", [took * 1000])
    report.add("of it read", [seen / 1048576], "MiB")
    report.add("growth of the server", [peak - before], "MiB", target=32.0)
    process.delete()


def main() -> None:
    options = parser(__doc__, 100)
    options.add_argument("--megabytes", type=int, default=1024)
    chosen = options.parse_args()
    api: httpx.Client = client()
    report = Report("terminal", facts(api))
    made = create(api)
    try:
        sandbox = Sandbox.connect(made["id"], api_url=str(api.base_url).removesuffix("/v1/"), api_key=_key(api))
        keys(sandbox, chosen.runs, report)
        flood(sandbox, chosen.megabytes, report)
    finally:
        delete(api, made["id"])
    report.finish()


def _key(api: httpx.Client) -> str:
    return str(api.headers["Authorization"]).removeprefix("Bearer ")


if __name__ == "__main__":
    main()
