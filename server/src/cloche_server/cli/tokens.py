"""`cloche-server token …`"""

from __future__ import annotations

import json
from datetime import UTC, datetime

import click

from cloche_server.app.tokens import insert
from cloche_server.cli.common import data_option, run_async, settings_from
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import is_sandbox_id
from cloche_server.core.records import TokenInfo
from cloche_server.core.scopes import MAX_EXPIRY_SECONDS, Scope
from cloche_server.host.clock import SystemClock
from cloche_server.settings import Settings
from cloche_server.store.tokens import TokenStore
from cloche_server.wiring import open_database, prepare_data

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.group()
def token() -> None:
    """API tokens. Only their hashes are stored."""


@token.command()
@click.option("--name", default="default", show_default=True, help="What the token is for.")
@click.option("--workspace", default="default", show_default=True, help="Whose sandboxes it opens.")
@click.option(
    "--scope",
    type=click.Choice([scope.value for scope in Scope]),
    default=Scope.ADMIN.value,
    show_default=True,
    help="What it may do: look, use and make sandboxes, or everything.",
)
@click.option("--sandbox", "sandbox_id", default=None, help="Id of the only sandbox it is good for.")
@click.option("--expires-in", default=None, help="How long it lives, such as 90s, 30m, 12h or 7d; default: for ever.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@data_option
def create(
    name: str,
    workspace: str,
    scope: str,
    sandbox_id: str | None,
    expires_in: str | None,
    as_json: bool,
    data: str | None,
) -> None:
    """Make a token and print it, once."""
    now = SystemClock().now()
    ends = None if expires_in is None else now + seconds_of(expires_in)
    if sandbox_id is not None and not is_sandbox_id(sandbox_id):
        raise click.BadParameter("this is not the id of a sandbox", param_hint="--sandbox")
    if not workspace or not workspace.isprintable():
        raise click.BadParameter("a workspace has a printable name", param_hint="--workspace")
    wanted = TokenInfo("", name, workspace, now, None, Scope(scope), sandbox_id, ends)
    text, made = run_async(_create(settings_from(data=data), wanted))
    click.echo(json.dumps({"token": text, **_fields(made)}) if as_json else text)


async def _create(settings: Settings, wanted: TokenInfo) -> tuple[str, TokenInfo]:
    prepare_data(settings.data)
    async with open_database(settings.data) as database:
        return await insert(TokenStore(database), wanted)


def seconds_of(text: str) -> int:
    """A duration such as `90`, `90s`, `30m`, `12h` or `7d`. Raises click's error for anything else."""
    number, unit = (text, "s") if text.isdigit() else (text[:-1], text[-1:])
    if unit not in _UNITS or not (number.isascii() and number.isdigit()) or len(number) > 9:
        raise click.BadParameter("write a number and s, m, h or d, such as 12h", param_hint="--expires-in")
    seconds = int(number) * _UNITS[unit]
    if not 0 < seconds <= MAX_EXPIRY_SECONDS:
        raise click.BadParameter(f"between 1 and {MAX_EXPIRY_SECONDS} seconds", param_hint="--expires-in")
    return seconds


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
        where = f"{item.workspace}/{item.sandbox_id}" if item.sandbox_id else item.workspace
        until = f"  until {_time(item.expires_at)}" if item.expires_at is not None else ""
        made = _time(item.created_at)
        click.echo(f"{item.prefix}…  {_state(item):8}  {item.scope.value:5}  {made}  {where}  {item.name}{until}")


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
    click.echo("revoked; a running server refuses it within a second, and ends what still runs by it")


async def _revoke(settings: Settings, prefix: str) -> bool:
    prepare_data(settings.data)
    async with open_database(settings.data) as database:
        return await TokenStore(database).revoke(prefix, SystemClock().now())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _state(item: TokenInfo) -> str:
    if item.revoked_at is not None:
        return "revoked"
    return "expired" if item.ended(SystemClock().now()) else "active"


def _fields(item: TokenInfo) -> dict[str, object]:
    return {
        "prefix": item.prefix,
        "name": item.name,
        "workspace": item.workspace,
        "scope": item.scope.value,
        "sandbox_id": item.sandbox_id,
        "created_at": _time(item.created_at),
        "expires_at": None if item.expires_at is None else _time(item.expires_at),
        "revoked": item.revoked_at is not None,
    }
