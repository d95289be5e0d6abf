"""Pebble, the small ACME server for tests, on loopback, with the names that it looks up.

It is built once from its pinned source and kept below `.cloche`. Where that cannot be done, tests are skipped, loudly.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import dns.flags
import dns.message
import dns.rdatatype
import dns.rrset
import pytest

from cloche_server.host.certificates import issue, make_authority
from kit.data import CHECKOUT

VERSION = "v2.10.3"
SOURCE = "github.com/letsencrypt/pebble/v2/cmd/pebble"
BUILD_SECONDS = 600


def binary() -> Path:
    """Skips the test when there is none and none can be built."""
    folder = CHECKOUT / ".cloche" / f"pebble-{VERSION}"
    made = folder / "pebble"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers of one run
        if not made.exists():
            _build(folder)
    return made


def _build(folder: Path) -> None:
    kept = CHECKOUT / ".cloche" / "go" / "bin" / "go"
    go = shutil.which("go") or next((str(p) for p in (Path("/usr/local/go/bin/go"), kept) if p.exists()), None)
    if go is None:
        pytest.skip(f"ACME IS NOT TESTED: there is no Go to build {SOURCE}@{VERSION} with")
    environment = {**os.environ, "GOBIN": str(folder / "new"), "GOTOOLCHAIN": "local", "GOFLAGS": "-trimpath"}
    try:
        done = subprocess.run(
            [go, "install", f"{SOURCE}@{VERSION}"],
            env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False,
        )  # fmt: skip
        said, failed = done.stderr, done.returncode != 0
    except subprocess.TimeoutExpired:
        said, failed = "it took too long", True
    if failed:
        pytest.skip(f"ACME IS NOT TESTED: {SOURCE}@{VERSION} cannot be built: {said.strip()[-500:]}")
    (folder / "new" / "pebble").replace(folder / "pebble")
    shutil.rmtree(folder / "new")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@dataclass
class Names:
    """All names lead to loopback. `records`: a file with lines `set|clear NAME VALUE`, of TXT records."""

    records: Path
    asked: list[str] = field(default_factory=list)

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
                wire = self._answer(dns.message.from_wire(await reader.readexactly(size))).to_wire()
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
