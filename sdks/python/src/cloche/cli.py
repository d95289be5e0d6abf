"""The command `cloche`: what is easier in a shell than in a program."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ._async.client import AsyncClient
from ._async.sandbox import AsyncSandbox
from ._config import Settings, resolve
from ._shell import shell
from ._ssh import command, run
from ._tunnel import Refused, carry
from .errors import ClocheError, SandboxNotFound, TransportError

_Joined = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

#: Exit codes: those of a failure that is not of what runs in a sandbox begin at 125.
FAILED: Final = 125
UNREACHABLE: Final = 126
NOT_FOUND: Final = 127
INTERRUPTED: Final = 130
_EPILOG: Final = """\
The server is found by CLOCHE_API_URL and CLOCHE_API_KEY.
Exit codes: 125 the server refused or failed, 126 it cannot be reached, 127 there is no such sandbox,
130 interrupted, 2 wrong arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "shell":
            return asyncio.run(shell(options.sandbox, options.process, options.from_offset))
        if options.command == "ssh":
            return asyncio.run(_ssh_to(options.sandbox, options.arguments, show=options.show))
        return asyncio.run(_tunnel(options.sandbox, options.port, options.local))
    except KeyboardInterrupt:
        return INTERRUPTED
    except SandboxNotFound as error:
        _say(str(error))
        return NOT_FOUND
    except TransportError as error:
        _say(str(error))
        return UNREACHABLE
    except ClocheError as error:
        _say(str(error))
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cloche", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    tunnel = commands.add_parser(
        "tunnel",
        help="reach a TCP port of a sandbox at a port of this machine",
        description="Listens on a port of 127.0.0.1 and joins each connection to a TCP port of a sandbox.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tunnel.add_argument("sandbox", metavar="ID", help="id of the sandbox")
    tunnel.add_argument("port", metavar="PORT", type=_port, help="port in the sandbox")
    tunnel.add_argument(
        "--local", metavar="PORT", type=_port, help="port of this machine; default: the same, or any when that is taken"
    )
    terminal = commands.add_parser(
        "shell",
        help="a terminal in a sandbox",
        description="A login shell of a sandbox at this terminal. Its exit code is that of the shell.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    terminal.add_argument("sandbox", metavar="ID", help="id of the sandbox")
    terminal.add_argument(
        "--process", metavar="PROCESS", help="the terminal of a process that runs, instead of a shell"
    )
    terminal.add_argument(
        "--from", dest="from_offset", metavar="OFFSET", type=_offset, help="with --process: show it again from there"
    )
    _add_ssh(commands)
    return parser


def _add_ssh(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ssh = commands.add_parser(
        "ssh",
        help="a sandbox by the ssh of this machine",
        description="Calls ssh with the port and the host key of the server. It asks for a key that the workspace "
        "accepts, or for a token as the password. What follows the sandbox is a command.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ssh.add_argument("--print", dest="show", action="store_true", help="print the command instead")
    ssh.add_argument("sandbox", metavar="SANDBOX", help="id or name of the sandbox")
    ssh.add_argument("arguments", metavar="COMMAND", nargs=argparse.REMAINDER)


async def _ssh_to(sandbox: str, arguments: Sequence[str], *, show: bool) -> int:
    async with AsyncClient() as client:
        words = command(client.api_url, await client.ssh_keys.server(), sandbox, arguments)
    return run(words, show=show)


def _offset(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError("an offset is a number")
    return int(text)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError("a port is a number from 1 to 65535")
    return int(text)


async def _tunnel(sandbox_id: str, port: int, local: int | None) -> int:
    settings = resolve(None, None, None, None)
    sandbox = await AsyncSandbox.connect(sandbox_id)  # says at once when that is not possible

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _join(settings, sandbox.id, port, reader, writer)

    server = await _listen(joined, port, local)
    address = server.sockets[0].getsockname()
    print(f"127.0.0.1:{address[1]} leads to port {port} of sandbox {sandbox.id}; Ctrl-C ends it", flush=True)
    async with server:
        await server.serve_forever()
    return 0


async def _listen(joined: _Joined, port: int, local: int | None) -> asyncio.Server:
    try:
        return await asyncio.start_server(joined, "127.0.0.1", local or port)
    except OSError as error:
        if local is not None:
            raise ClocheError(
                f"port {local} of this machine cannot be used ({error.strerror})", "client.local_port"
            ) from error
    return await asyncio.start_server(joined, "127.0.0.1", 0)


async def _join(
    settings: Settings, sandbox_id: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        await carry(settings, sandbox_id, port, reader, writer)
    except Refused as error:
        _say(str(error))
    except (OSError, asyncio.IncompleteReadError) as error:
        _say(f"the connection broke: {error}")
    finally:
        with contextlib.suppress(OSError):
            writer.close()


def _say(text: str) -> None:
    print(f"cloche: {text}", file=sys.stderr, flush=True)
