"""Structured logging: one canonical line per operation, JSON or console, never a secret."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, cast

import structlog

_TOKEN = re.compile(r"pds_[0-9a-f]{8,32}")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _redact(_logger: object, _method: str, event: Any) -> Any:
    """Tokens never reach the log, wherever they came from."""
    for key, value in event.items():
        if isinstance(value, str) and "pds_" in value:
            event[key] = _TOKEN.sub("pds_[redacted]", value)
    return event


def configure(log_format: str, level: str) -> None:
    """Sets the format (`auto`, `json`, `console`) and the lowest level, once at start."""
    if log_format == "auto":
        log_format = "console" if sys.stderr.isatty() else "json"
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if log_format == "console"
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard module; only their warnings are of interest.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")


def get(name: str) -> structlog.stdlib.BoundLogger:
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(component=name))
