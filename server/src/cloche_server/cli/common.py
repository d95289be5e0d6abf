"""What the operator commands share: the data option, settings, one sentence for what goes wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import click

from cloche_server.core.errors import ClocheError
from cloche_server.settings import Settings, SettingsError, load
from cloche_server.telemetry import log

_T = TypeVar("_T")

data_option = click.option("--data", default=None, help="Data directory (default /var/lib/cloche, or CLOCHE_DATA).")


def settings_from(**flags: object) -> Settings:
    """The settings in force, and logging set up by them."""
    settings = load(flags)
    log.configure(settings.log_format, settings.log_level)
    return settings


def run_async(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(work)


def told(error: BaseException) -> ClocheError | SettingsError | None:
    """The error that has a sentence for the operator, also when it comes in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, ClocheError | SettingsError) else None


def fail(error: ClocheError | SettingsError) -> NoReturn:
    """Prints the sentence and its details to stderr, and ends with code 1."""
    click.echo(f"cloche-server: {error}", err=True)
    if isinstance(error, ClocheError):
        for name, value in error.details.items():
            if value:
                click.echo(f"  {name}: {value}", err=True)
    sys.exit(1)
