"""netd from its start to its end: sockets as root, everything else as a user without rights."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import fcntl
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import dns.message
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import uvloop

from cloche_server.host import privileges
from cloche_server.host.addresses import local_addresses
from cloche_server.host.fdlink import listen
from cloche_server.netd.control import Control
from cloche_server.netd.flow import HttpEngine
from cloche_server.netd.registry import Registry
from cloche_server.netd.shared import Authority, Shared
from cloche_server.netd.vigil import ALONE_SECONDS, until_alone

EXIT_RUNNING: Final = 3
_OPEN_FILES: Final = 262_144
#: Above machines and other processes that compute: all guests wait for this one, and it needs little.
_PRECEDENCE: Final = 5
#: A workspace's certificate authority, if there is one.
Authorities = Callable[[str], Authority | None]
#: `Path`: a PEM file of authorities that are trusted besides those of the host.
EngineFactory = Callable[[Authorities, Path | None], HttpEngine | None]


def no_engine(_authorities: Authorities, _extra_ca: Path | None) -> HttpEngine | None:
    """Connections whose requests would have to be read are refused."""
    return None


def main(argv: Sequence[str], make_engine: EngineFactory = no_engine) -> int:
    """Runs netd; returns its exit code: 0 stopped, 3 another one holds the socket."""
    options = _options(argv)
    path: Path = options.socket
    lock = _lock(path)
    if lock is None:
        _report(f"another netd holds {path}")
        return EXIT_RUNNING
    listener = listen(path)
    _load_everything()
    shared = Shared(report=_report)
    # With what it trusts, which may lie where only root can read.
    shared.engine = make_engine(shared.vault.authority, options.extra_ca)
    privileges.raise_open_files(_OPEN_FILES)
    privileges.take_precedence(_PRECEDENCE)
    if os.geteuid() == 0 or options.uid != os.geteuid():
        privileges.drop(options.uid, options.gid if options.gid is not None else options.uid)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    gc.freeze()
    uvloop.run(_run(listener, shared, options.alone_seconds))
    os.close(lock)
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("cloche-netd", description="Carries what sandboxes send. Started by the server.")
    parser.add_argument("--socket", type=Path, required=True, help="where the server talks to it")
    parser.add_argument("--uid", type=int, required=True, help="the user it becomes")
    parser.add_argument("--gid", type=int, help="its group; the number of the user if left out")
    parser.add_argument("--extra-ca", type=Path, help="authorities (PEM) of servers, besides those of the host")
    parser.add_argument(
        "--alone-seconds",
        type=float,
        default=ALONE_SECONDS,
        help="it ends by itself when it has had no server and no machine for so long",
    )
    return parser.parse_args(argv)


def _lock(path: Path) -> int | None:
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _load_everything() -> None:
    """What would be imported on first use: the code may lie where the user we become cannot read."""
    for kind in dns.rdatatype.RdataType:
        with contextlib.suppress(Exception):
            dns.rdata.get_rdata_class(dns.rdataclass.IN, kind)  # type: ignore[no-untyped-call]
    dns.message.from_text("id 1\nopcode QUERY\n;QUESTION\na. IN A\n;ANSWER\na. 1 IN A 1.2.3.4\n").to_wire()
    dns.message.make_query("a.", "A", use_edns=0).to_wire()
    for encoding in ("ascii", "latin-1", "utf-8", "idna", "punycode"):
        codecs.lookup(encoding)
    local_addresses()
    with contextlib.suppress(OSError):
        socket.getaddrinfo("127.0.0.1", 1)


async def _run(listener: socket.socket, shared: Shared, alone_seconds: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        registry = Registry(shared, tasks)
        control = Control(listener, registry, tasks)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, registry.stopping.set)
        watch = tasks.create_task(_watch(registry, control, alone_seconds))
        await registry.stopping.wait()
        watch.cancel()
        if control.has_clients:
            await asyncio.sleep(0.05)  # the answer to `stop` is on its way
        control.close()
        registry.close()


async def _watch(registry: Registry, control: Control, alone_seconds: float) -> None:
    await until_alone(lambda: control.has_clients or registry.serves, alone_seconds)
    _report("no server, and no machine that is served: it ends")
    registry.stopping.set()


def _report(line: str) -> None:
    sys.stderr.write(f"netd: {line}\n")
    sys.stderr.flush()
