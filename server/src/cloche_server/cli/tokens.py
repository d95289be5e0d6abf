"""`cloche-server token …`"""

from __future__ import annotations

import json
from datetime import UTC, datetime

import click

from cloche_server.cli.common import data_option, run_async, settings_from
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import TokenInfo
from cloche_server.host.clock import SystemClock, random_bytes
from cloche_server.settings import Settings
from cloche_server.store.db import Conflict
from cloche_server.store.tokens import TokenStore
from cloche_server.wiring import open_database, prepare_data


@click.group()
def token() -> None:
    """API tokens. Only their hashes are stored."""


@token.command()
@click.option("--name", default="default", show_default=True, help="What the token is for.")
@click.option("--workspace", default="default", show_default=True, help="Whose sandboxes it opens.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@data_option
def create(name: str, workspace: str, as_json: bool, data: str | None) -> None:
    """Make a token and print it, once."""
    text = run_async(_create(settings_from(data=data), name, workspace))
    if as_json:
        click.echo(json.dumps({"token": text, "prefix": text[:12], "name": name, "workspace": workspace}))
    else:
        click.echo(text)


async def _create(settings: Settings, name: str, workspace: str) -> str:
    prepare_data(settings.data)
    async with open_database(settings.data) as database:
        store = TokenStore(database)
        for _ in range(10):
            try:
                return await store.create(name, workspace, random_bytes(16), SystemClock().now())
            except Conflict:
                continue
    raise ClocheError("internal", "no free token prefix was found")


@token.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@data_option
def list_(as_json: bool, data: str | None) -> None:
    """List tokens by their prefixes."""
    tokens = run_async(_list(settings_from(data=data)))
    if as_json:
        click.echo(json.dumps([_fields(item) for item in tokens], indent=2))
        return
    for item in tokens:
        state = "revoked" if item.revoked_at else "active"
        click.echo(f"{item.prefix}…  {state:8}  {_time(item.created_at)}  {item.workspace}  {item.name}")


async def _list(settings: Settings) -> list[TokenInfo]:
    prepare_data(settings.data)
    async with open_database(settings.data) as database:
        return await TokenStore(database).list()


@token.command()
@click.argument("prefix")
@data_option
def revoke(prefix: str, data: str | None) -> None:
    """End a token, by its prefix (`pds_` and 8 digits)."""
    if not run_async(_revoke(settings_from(data=data), prefix[:12])):
        raise ClocheError(
            "auth.invalid_token", "no active token has this prefix; `cloche-server token list` shows them"
        )
    click.echo("revoked; a running server refuses it within a second")


async def _revoke(settings: Settings, prefix: str) -> bool:
    prepare_data(settings.data)
    async with open_database(settings.data) as database:
        return await TokenStore(database).revoke(prefix, SystemClock().now())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _fields(item: TokenInfo) -> dict[str, object]:
    return {
        "prefix": item.prefix,
        "name": item.name,
        "workspace": item.workspace,
        "created_at": _time(item.created_at),
        "revoked": item.revoked_at is not None,
    }
