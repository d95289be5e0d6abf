"""`cloche-server`: the commands of an operator. Each loads only what it needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from cloche_server import __version__
from cloche_server.cli.common import data_option, fail, settings_from, told
from cloche_server.settings import Settings, flag_name

#: Command name to module and attribute; the module is imported when the command is used.
COMMANDS = {
    "serve": ("cloche_server.cli.main", "serve"),
    "stop": ("cloche_server.cli.control", "stop"),
    "doctor": ("cloche_server.cli.doctor", "doctor"),
    "token": ("cloche_server.cli.tokens", "token"),
    "template": ("cloche_server.cli.templates", "template"),
    "version": ("cloche_server.cli.main", "version"),
}


class _Commands(click.Group):
    """Loads commands by name, and turns what goes wrong into one sentence and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception as error:
            known = told(error)
            if known is None:
                raise
            fail(known)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cloche-server")
def main() -> None:
    """Self-hosted microVM sandboxes for AI agents."""


def _setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for declared in reversed(fields(Settings)):
        if declared.name == "data":
            continue
        command = click.option(
            flag_name(declared.name), declared.name, default=None, help=str(declared.metadata["doc"])
        )(command)
    return command


@click.command()
@data_option
@_setting_options
def serve(**flags: object) -> None:
    """Run the server until SIGTERM. Sandboxes outlive it; the next one takes them over."""
    from cloche_server.main import serve as run_server

    run_server(settings_from(**flags))


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"cloche-server {__version__}")
