"""`cloche-server`: the commands of an operator."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import fields
from typing import Any, TypeVar

import click

from cloche_server import __version__
from cloche_server.core.errors import ClocheError
from cloche_server.settings import Settings, SettingsError, flag_name, load
from cloche_server.telemetry import log

_T = TypeVar("_T")


class _Commands(click.Group):
    """Turns what goes wrong into one sentence on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ClocheError, SettingsError) as error:
            _fail(error)
        except BaseExceptionGroup as group:
            leaf = _first(group)
            if not isinstance(leaf, ClocheError):
                raise
            _fail(leaf)
        except KeyboardInterrupt:
            sys.exit(130)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(error: Exception) -> None:
    click.echo(f"cloche-server: {error}", err=True)
    if isinstance(error, ClocheError):
        for name, value in error.details.items():
            if value:
                click.echo(f"  {name}: {value}", err=True)
    sys.exit(1)


def _setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for declared in reversed(fields(Settings)):
        if declared.name == "data":
            continue
        command = click.option(
            flag_name(declared.name), declared.name, default=None, help=str(declared.metadata["doc"])
        )(command)
    return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cloche-server")
def main() -> None:
    """Self-hosted microVM sandboxes for AI agents."""


data_option = click.option("--data", default=None, help="Data directory (default /var/lib/cloche, or CLOCHE_DATA).")


def settings_from(**flags: object) -> Settings:
    """The settings in force, and logging set up by them."""
    settings = load(flags)
    log.configure(settings.log_format, settings.log_level)
    return settings


def run_async(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(work)


@main.command()
@data_option
@_setting_options
def serve(**flags: object) -> None:
    """Run the server until SIGTERM. Sandboxes outlive it; the next one takes them over."""
    from cloche_server.main import serve as run_server

    run_server(settings_from(**flags))


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"cloche-server {__version__}")


def _register() -> None:
    from cloche_server.cli import control, doctor, templates, tokens

    for module in (control, doctor, templates, tokens):
        module.register(main)


_register()
