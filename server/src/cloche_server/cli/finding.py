"""What `doctor` says about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about this host. `fail`: sandboxes cannot run; `warn`: they run with less."""

    name: str
    level: str
    found: str
    advice: str = ""
