"""Create a sandbox, run a small program in it, delete it, and say how long each took.

Only the standard library, and only the public API: what `./quickstart` ends with.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

PROGRAM = """\
import os, platform
squares = [n * n for n in range(1, 6)]
print("hello from", platform.release(), "with", os.cpu_count(), "CPU; squares:", squares)
"""


def call(method: str, path: str, body: object = None) -> Any:
    """One request to the API; the decoded answer."""
    request = urllib.request.Request(  # noqa: S310 - the address comes from our own configuration
        os.environ["CLOCHE_API_URL"] + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": "Bearer " + os.environ["CLOCHE_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
        content = response.read()
    return json.loads(content) if content else None


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return action(), (time.perf_counter() - start) * 1000


def main() -> int:
    # Of this machine, through no proxy that the environment may name.
    urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))
    try:
        box, create_ms = timed(lambda: call("POST", "/v1/sandboxes", {"template": "base", "ttl_seconds": 300}))
        path = f"/v1/sandboxes/{box['id']}"
        try:
            run = {"argv": ["python3", "-c", PROGRAM], "timeout_seconds": 60}
            result, exec_ms = timed(lambda: call("POST", f"{path}/exec", run))
        finally:
            _, delete_ms = timed(lambda: call("DELETE", path))
    except urllib.error.HTTPError as error:
        print(f"{error.code}: {error.read().decode('utf-8', 'replace')[:2000]}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"the server cannot be reached: {error}", file=sys.stderr)
        return 1
    boundary = box.get("isolation") or box.get("boundary")
    print(f"        sandbox {box['id']}, {json.dumps(boundary)}")
    print(f"        > {result['stdout'].strip()}")
    print(
        f"        create {create_ms:.0f} ms, run {exec_ms:.0f} ms, delete {delete_ms:.0f} ms, "
        f"in all {create_ms + exec_ms + delete_ms:.0f} ms"
    )
    if result["exit_code"] != 0:
        print(result["stderr"], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
