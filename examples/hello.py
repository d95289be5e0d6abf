"""The first lines with Cloche: make a sandbox, run code in it, look at the result.

. .cloche/env
.cloche/venv/bin/python examples/hello.py
"""

from __future__ import annotations

import time

from cloche import Sandbox

PROGRAM = """
import platform, sys
print("hello from", platform.node(), "on Linux", platform.release())
print("this goes to stderr", file=sys.stderr)
"""


def main() -> None:
    """Create, write, run, read, delete."""
    began = time.perf_counter()
    with Sandbox.create(ttl_seconds=300) as sandbox:
        created = time.perf_counter()
        sandbox.files.write("/srv/hello.py", PROGRAM)
        result = sandbox.exec("python3 /srv/hello.py || echo hello from a shell on Linux $(uname -r)")
        ran = time.perf_counter()
        print(f"sandbox {sandbox.id}, boundary {sandbox.isolation.boundary} ({sandbox.isolation.accel})")
        print(f"stdout: {result.stdout.strip()}")
        print(f"stderr: {result.stderr.strip()}")
        print(f"exit code {result.exit_code}, ended by: {result.termination}")
        print(f"create {(created - began) * 1000:.0f} ms, write and run {(ran - created) * 1000:.0f} ms")


if __name__ == "__main__":
    main()
