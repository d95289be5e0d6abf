"""`python -m cloche_server.netd`."""

from __future__ import annotations

import sys
from pathlib import Path

from cloche_server.host.clock import SystemClock
from cloche_server.netd.flow import HttpEngine
from cloche_server.netd.http.engine import Engine
from cloche_server.netd.main import Authorities, main


def make_engine(authorities: Authorities, extra_ca: Path | None) -> HttpEngine:
    return Engine(authorities, now=SystemClock().now, extra_ca=extra_ca)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], make_engine))
