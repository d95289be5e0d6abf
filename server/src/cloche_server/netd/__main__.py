"""`python -m cloche_server.netd`."""

from __future__ import annotations

import sys

from cloche_server.host.clock import SystemClock
from cloche_server.netd.http.engine import Engine
from cloche_server.netd.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], lambda authority: Engine(authority, now=SystemClock().now)))
