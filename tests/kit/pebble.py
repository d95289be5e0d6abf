"""Pebble, the small ACME server for tests, on loopback, with the names that it looks up.

It is built once from sources that are pinned by their sums, and kept below `.cloche`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import dns.flags
import dns.message
import dns.rdatatype
import dns.rrset
import pytest

from cloche_server.host.certificates import issue, make_authority
from kit.data import CHECKOUT
from kit.free_ports import free_port

VERSION = "v2.10.3"
#: Its sources, with the sums of all of them.
MODULE = Path(__file__).parent / "pebble_module"
SOURCE = "github.com/letsencrypt/pebble/v2/cmd/pebble"
#: Of what is fetched, and of what is then built.
FETCH_SECONDS = 90
BUILD_SECONDS = 300
#: So long others of the same run need not try again.
REMEMBER_SECONDS = 120


def binary() -> Path:
    """Built at the first call. The test fails when that cannot be done, and says why."""
    folder = CHECKOUT / ".cloche" / f"pebble-{VERSION}"
    made, why = folder / "pebble", folder / "failed"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers of one run
        if made.exists():
            return made
        if why.exists() and time.time() - why.stat().st_mtime < REMEMBER_SECONDS:
            pytest.fail(why.read_text(), pytrace=False)
        try:
            build(folder)
        except BuildError as error:
            why.write_text(str(error))
            pytest.fail(str(error), pytrace=False)
    return made


class BuildError(Exception):
    """A sentence."""


def build(folder: Path, environment: Mapping[str, str] = os.environ, seconds: float = FETCH_SECONDS) -> None:
    """`folder/pebble` from its sources. Raises `BuildError`."""
    kept = CHECKOUT / ".cloche" / "go" / "bin" / "go"
    go = shutil.which("go") or next((str(p) for p in (Path("/usr/local/go/bin/go"), kept) if p.exists()), None)
    if go is None:
        raise BuildError(f"{SOURCE} {VERSION} cannot be built for the tests of ACME: there is no Go; ./test brings one")
    ours = {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly", "CGO_ENABLED": "0", "GIT_TERMINAL_PROMPT": "0"}
    everything = {**environment, **ours}
    _go([go, "list", "-deps", SOURCE], everything, seconds, "fetched from the module proxy")
    new = folder / "new"
    _go([go, "build", "-trimpath", "-buildvcs=false", "-o", str(new), SOURCE], everything, BUILD_SECONDS, "built")
    new.replace(folder / "pebble")


def _go(words: list[str], environment: Mapping[str, str], seconds: float, done: str) -> None:
    process = subprocess.Popen(
        words, cwd=MODULE, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its compilers
        process.communicate()
        said = f"it took longer than {seconds:g} s"
    if process.returncode != 0:
        raise BuildError(
            f"{SOURCE} {VERSION} cannot be {done} for the tests of ACME: {said.strip()[-500:]} "
            "(Go needs a module proxy that answers: see `go env GOPROXY`)"
        )


@dataclass
class Names:
    """All names lead to loopback. `records`: a file with lines `set|clear NAME VALUE`, of TXT records. While `held` is
    there and not set, nobody gets an answer, and `waiting` counts who has asked."""

    records: Path
    asked: list[str] = field(default_factory=list)
    held: asyncio.Event | None = None
    waiting: int = 0

    def texts(self, name: str) -> list[str]:
        found: list[str] = []
        for line in self.records.read_text().splitlines() if self.records.exists() else []:
            action, record, value = line.split(" ")
            if record == name and action == "set":
                found.append(value)
            elif record == name:
                found.remove(value)
        return found

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                query = await reader.readexactly(size)
                if self.held is not None:
                    self.waiting += 1
                    await self.held.wait()
                wire = self._answer(dns.message.from_wire(query)).to_wire()
                writer.write(len(wire).to_bytes(2, "big") + wire)
                await writer.drain()
        writer.close()

    def _answer(self, query: dns.message.Message) -> dns.message.Message:
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        asked = query.question[0]
        name = asked.name.to_text(omit_final_dot=True).lower()
        self.asked.append(name)
        if asked.rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(asked.name, 1, "IN", "A", "127.0.0.1"))
        elif asked.rdtype == dns.rdatatype.TXT and (texts := self.texts(name)):
            answer.answer.append(dns.rrset.from_text(asked.name, 1, "IN", "TXT", *(f'"{text}"' for text in texts)))
        return answer


@dataclass
class Pebble:
    """`directory` is what the server is told; `ca` trusts it; `http_port` is where it looks for proofs."""

    program: Path
    folder: Path
    names: Names
    http_port: int
    dns_port: int = 0
    port: int = field(default_factory=free_port)
    admin: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def directory(self) -> str:
        return f"https://localhost:{self.port}/dir"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def prepare(self) -> None:
        authority = make_authority("tests", time.time())
        own = issue(authority, "localhost", time.time())
        self.ca.write_bytes(authority.certificate_pem)
        (self.folder / "cert.pem").write_bytes(own.certificate_pem)
        (self.folder / "key.pem").write_bytes(own.key_pem)
        settings = {
            "listenAddress": f"127.0.0.1:{self.port}",
            "managementListenAddress": f"127.0.0.1:{self.admin}",
            "certificate": str(self.folder / "cert.pem"),
            "privateKey": str(self.folder / "key.pem"),
            "httpPort": self.http_port,
            "tlsPort": free_port(),
            "keyAlgorithm": "ecdsa",
            "retryAfter": {"authz": 1, "order": 1},
            "profiles": {"default": {"description": "ninety days", "validityPeriod": 90 * 86400}},
        }
        (self.folder / "pebble.json").write_text(json.dumps({"pebble": settings}))

    async def start(self) -> None:
        """A server that knows nothing of an earlier one."""
        quick = {"PEBBLE_VA_NOSLEEP": "1", "PEBBLE_WFE_NONCEREJECT": "0", "PEBBLE_AUTHZREUSE": "0"}
        log = (self.folder / "pebble.log").open("ab")
        self.process = await asyncio.to_thread(
            subprocess.Popen,
            [self.program, "-config", "pebble.json", "-dnsserver", f"127.0.0.1:{self.dns_port}"],
            cwd=self.folder, env={"PATH": "/nowhere", **quick}, stdout=log, stderr=log,
        )  # fmt: skip
        log.close()
        for _ in range(300):
            with contextlib.suppress(OSError):
                await self.root()
                return
            assert self.process.poll() is None, (self.folder / "pebble.log").read_text()[-2000:]
            await asyncio.sleep(0.1)
        raise AssertionError("pebble does not answer")

    async def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
            self.process = None

    async def root(self) -> str:
        """The authority that certificates lead to (PEM); a new one at each start."""
        trusting = ssl.create_default_context(cafile=str(self.ca))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting)
        )

        def ask() -> str:
            with opener.open(f"https://localhost:{self.admin}/roots/0", timeout=10) as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(ask)


@contextlib.asynccontextmanager
async def pebble(folder: Path, http_port: int) -> AsyncIterator[Pebble]:
    """A running one; it may be stopped and started again within the block."""
    program = await asyncio.to_thread(binary)
    names = Names(folder / "records")
    serving = await asyncio.start_server(names.serve, "127.0.0.1", 0)
    found = Pebble(program, folder, names, http_port, serving.sockets[0].getsockname()[1])
    found.prepare()
    try:
        await found.start()
        yield found
    finally:
        await found.stop()
        serving.close()
