"""What holds for every test. Fixtures for real machines come from `kit`; other tests have their own beside them."""

from __future__ import annotations

import gc
import os

import hypothesis
import pytest
import structlog

pytest_plugins = ["kit.plugin"]

# The same examples in every run, so that a failure is one of the change and not of the day; and no limit of time for
# one of them, which would tell how busy the machine is. `HYPOTHESIS_PROFILE=deep` looks elsewhere each time, and
# further wherever a test names no number of its own.
hypothesis.settings.register_profile("run", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile("deep", deadline=None, derandomize=False, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "run"))

# Lines and tracebacks as the server writes them. What structlog does on its own renders every local variable of a
# traceback, for seconds. Where they go stays its own affair: to what is the standard output at that moment.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        structlog.dev.ConsoleRenderer(colors=False),
    ]
)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded now stays to the end: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
