"""How long a fork, a snapshot, a hibernation and a pause take, on a parent that has written so many MiB of memory.

`pause` is how long the parent stood still, as the server measured it; all else is seen from the client.
"""

from __future__ import annotations

import time
from typing import Any

import httpx
from common import Report, client, create, delete, facts, milliseconds, must, parser
from density import private_mib, vmm_pids

TARGETS = {
    "fork: pause of the parent": 45,
    "fork: answer": 150,
    "fork: answer + first exec": 350,
    "snapshot with memory": 400,
    "create from the snapshot": 25,
    "hibernate": 500,
    "wake + first exec": 400,
    "snapshot of the disk": 400,
    "restore in place": 400,
    "pause": 15,
    "resume": 15,
}


def ok(response: httpx.Response) -> Any:
    return must(response, 200, 201, 204)


def run(api: httpx.Client, sandbox_id: str, command: str) -> None:
    result = ok(api.post(f"/sandboxes/{sandbox_id}/exec", json={"cmd": command}))
    assert result["exit_code"] == 0, result


def timed(times: dict[str, list[float]], what: str, call: Any) -> Any:
    began = time.perf_counter()
    answer = call()
    times.setdefault(what, []).append(milliseconds(began))
    return answer


def one_round(api: httpx.Client, parent: str, times: dict[str, list[float]]) -> None:
    began = time.perf_counter()
    child = timed(times, "fork: answer", lambda: ok(api.post(f"/sandboxes/{parent}/fork", json={})))
    run(api, child["id"], "echo ready")
    times.setdefault("fork: answer + first exec", []).append(milliseconds(began))
    times.setdefault("fork: pause of the parent", []).append(child["pause_ms"])
    delete(api, child["id"])
    snapshot = timed(times, "snapshot with memory", lambda: ok(api.post(f"/sandboxes/{parent}/snapshots")))
    copy = timed(
        times, "create from the snapshot", lambda: ok(api.post("/sandboxes", json={"from_snapshot": snapshot["id"]}))
    )
    delete(api, copy["id"])
    timed(times, "restore in place", lambda: ok(api.post(f"/sandboxes/{parent}/restore")))
    disk = timed(
        times, "snapshot of the disk", lambda: ok(api.post(f"/sandboxes/{parent}/snapshots", json={"memory": False}))
    )
    ok(api.delete(f"/snapshots/{disk['id']}"))
    ok(api.delete(f"/snapshots/{snapshot['id']}"))
    timed(times, "pause", lambda: ok(api.post(f"/sandboxes/{parent}/pause")))
    timed(times, "resume", lambda: ok(api.post(f"/sandboxes/{parent}/resume")))
    timed(times, "hibernate", lambda: ok(api.post(f"/sandboxes/{parent}/hibernate")))
    timed(times, "wake + first exec", lambda: run(api, parent, "echo awake"))


def many(api: httpx.Client, parent: str, count: int, times: dict[str, list[float]]) -> list[float]:
    """Answers the private memory of each child (MiB), which nobody has touched."""
    tree = timed(
        times,
        f"fork into {count}: answer",
        lambda: ok(api.post(f"/sandboxes/{parent}/fork-tree", json={"count": count})),
    )
    assert len(tree["children"]) == count, tree
    memory = [private_mib(pid) for pid in vmm_pids([child["id"] for child in tree["children"]])]
    for child in tree["children"]:
        delete(api, child["id"])
    return memory


def main() -> None:
    options = parser(__doc__, 10)
    options.add_argument("--dirty", type=int, default=40, help="MiB of memory that the parent writes first")
    options.add_argument("--children", type=int, default=10, help="children of the last fork")
    args = options.parse_args()
    with client() as api:
        report = Report("fork", {**facts(api), "dirty_mb": args.dirty})
        parent = create(api)["id"]
        run(api, parent, f"head -c {args.dirty}M /dev/urandom > /dev/shm/dirty; sync")
        times: dict[str, list[float]] = {}
        for _ in range(args.runs):
            one_round(api, parent, times)
        memory = many(api, parent, args.children, times)
        for what, values in times.items():
            report.add(what, values, target=TARGETS.get(what, 1500))
        report.add("private memory of a child", memory, "MiB", 1.3 * args.dirty + 55)
        delete(api, parent)
        report.finish()


if __name__ == "__main__":
    main()
