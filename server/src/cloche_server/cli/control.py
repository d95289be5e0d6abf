"""`cloche-server stop`"""

from __future__ import annotations

import asyncio
import signal

import click

from cloche_server.cli.common import data_option, run_async, settings_from
from cloche_server.core.errors import ClocheError
from cloche_server.engine.qemu.found import find_machines
from cloche_server.host import cgroups, process, uids
from cloche_server.host.cgroups import Groups
from cloche_server.host.clock import SystemClock
from cloche_server.host.instance import find_server
from cloche_server.settings import Settings
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.wiring import end_network, open_database, prepare_data


@click.command()
@click.option("--sandboxes", is_flag=True, help="Also end every sandbox. Without it they run on for the next server.")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds to wait for the server's end.")
@data_option
def stop(sandboxes: bool, timeout: float, data: str | None) -> None:
    """Stop the server of a data directory."""
    settings = settings_from(data=data, log_level="error")
    server = find_server(settings.data)
    if server is None:
        click.echo("no server runs here")
    else:
        process.kill(server.pid, server.start_time, signal.SIGTERM)
        if not run_async(process.wait_exit(server.pid, server.start_time, timeout)):
            raise ClocheError("internal", f"the server (pid {server.pid}) has not ended within {timeout:g} s")
        click.echo(f"stopped the server (pid {server.pid})")
    if sandboxes:
        count = run_async(_end_sandboxes(settings))
        click.echo(f"ended {count} sandbox{'' if count == 1 else 'es'}")
    elif left := run_async(_count(settings)):
        click.echo(
            f"{left} sandbox{' runs' if left == 1 else 'es run'} on without a server, and no TTL ends "
            f"{'it' if left == 1 else 'them'} meanwhile; `cloche-server stop --sandboxes` ends all"
        )


async def _count(settings: Settings) -> int:
    return len(find_machines(settings.data / "sandboxes"))


async def _end_sandboxes(settings: Settings) -> int:
    """Ends the machines; the next server finds their records, and nothing behind them, and clears up."""
    prepare_data(settings.data)
    found = find_machines(settings.data / "sandboxes")
    for ref in found.values():
        process.kill(ref.pid, ref.start_time)
        await process.wait_exit(ref.pid, ref.start_time, 10)
    await end_network(settings)
    block = uids.existing(settings.data, settings.uid_base)
    if block is not None:
        await asyncio.to_thread(lambda: Groups(cgroups.probe(), block.name).remove_all())
    async with open_database(settings.data) as database:
        await SandboxStore(database).delete_all(SystemClock().now())
    return len(found)
