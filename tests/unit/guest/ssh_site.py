"""An SSH server over the real agent in its developer mode, and the clients that people have."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncssh

from cloche_server.app.attached import Attachments
from cloche_server.app.audit import AuditEntry
from cloche_server.app.calls import Calls
from cloche_server.app.entry import Traffic, not_found
from cloche_server.app.listening import Listening
from cloche_server.app.sshkeys import SshKeys, WantedKey
from cloche_server.core.lifecycle import Status
from cloche_server.core.records import ExecDefaults, TokenInfo
from cloche_server.core.scopes import Scope
from cloche_server.core.sshkeys import SshKey
from cloche_server.guest.client import GuestClient
from cloche_server.host.clock import SystemClock
from cloche_server.ssh.house import House, Limits
from cloche_server.ssh.server import SshServer

W, SB, OTHER = "w", "s" * 20, "t" * 20
TOKEN = "pds_" + "0123456789abcdef" * 2
READER = "pds_" + "f" * 32
NARROW = "pds_" + "e" * 32
OWNER = TokenInfo("pds_01234567", "t", W, 0.0, scope=Scope.ADMIN)


class Access:
    """Two sandboxes of one workspace whose guest is the agent; the first one has a name."""

    def __init__(self, guest: GuestClient) -> None:
        self.guest = guest
        self.busy_now = 0
        self.refusal: Exception | None = None
        self.entries: dict[str, Any] = {one: _entry(one) for one in (SB, OTHER)}

    async def find(self, workspace: str, sandbox_id: str) -> Any:
        if workspace != W or sandbox_id not in self.entries:
            raise not_found("with this id")
        return self.entries[sandbox_id]

    def named(self, workspace: str, name: str) -> Any:
        return self.entries[SB] if (workspace, name) == (W, "box") else None

    async def serving(self, workspace: str, sandbox_id: str) -> tuple[Any, GuestClient]:
        if self.refusal is not None:
            raise self.refusal
        return await self.find(workspace, sandbox_id), self.guest

    @contextlib.contextmanager
    def busy(self, _: Any) -> Iterator[None]:
        self.busy_now += 1
        try:
            yield
        finally:
            self.busy_now -= 1

    def count_exec(self, _: Any) -> None:
        return


def _entry(sandbox_id: str) -> Any:
    record = SimpleNamespace(
        id=sandbox_id, workspace=W, defaults=ExecDefaults(), is_read=False, status=Status.RUNNING, termination=None
    )
    return SimpleNamespace(record=record, traffic=Traffic(), ended=asyncio.Event(), machine=None)


class Shelf:
    """Keys in memory; the real store has tests of its own."""

    def __init__(self) -> None:
        self.kept: list[SshKey] = []

    async def insert(self, key: SshKey) -> None:
        self.kept.append(key)

    async def of(self, workspace: str) -> list[SshKey]:
        return [one for one in self.kept if one.workspace == workspace]

    async def with_fingerprint(self, fingerprint: str) -> list[SshKey]:
        return [one for one in self.kept if one.fingerprint == fingerprint]

    async def delete(self, key_id: str, workspace: str) -> bool:
        self.kept = [one for one in self.kept if one.id != key_id]
        return True


class Dialer:
    def __init__(self, guest: GuestClient) -> None:
        self.guest = guest

    async def dial(self, workspace: str | None, sandbox_id: str, port: int) -> Any:
        return await self.guest.tunnel(port)

    async def dial_unix(self, workspace: str, sandbox_id: str, path: str) -> Any:
        return await self.guest.unix_tunnel(path, None)

    async def listen(self, workspace: str, sandbox_id: str, where: int | str) -> Any:
        made = await (
            self.guest.listen_port(where, None) if isinstance(where, int) else self.guest.listen_unix(where, None)
        )
        return Listening(made, self.guest.accept, contextlib.nullcontext())


@dataclass
class SshSite:
    """`folder` has the client's key, `key`, and what it knows of the server."""

    port: int
    folder: Path
    access: Any
    keys: SshKeys
    house: House
    tokens: Any
    audit: list[AuditEntry]

    def options(self) -> list[str]:
        told = {
            "UserKnownHostsFile": str(self.folder / "known"),
            "IdentityFile": str(self.folder / "key"),
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "yes",
            "BatchMode": "yes",
            "ConnectTimeout": "20",
        }
        return ["-F", "none", *(word for name, value in told.items() for word in ("-o", f"{name}={value}"))]

    async def ssh(self, *words: str, user: str = SB, given: bytes = b"", flags: Sequence[str] = ()) -> Done:
        command = ["ssh", *self.options(), "-p", str(self.port), *flags, f"{user}@127.0.0.1", *words]
        return await run(command, given)

    async def connect(self, **options: Any) -> asyncssh.SSHClientConnection:
        """A client that says exactly what a test wants."""
        usual: dict[str, Any] = {"username": SB, "client_keys": [str(self.folder / "key")], "known_hosts": None}
        return await asyncssh.connect("127.0.0.1", self.port, config=None, agent_path=None, **{**usual, **options})


@dataclass(frozen=True)
class Done:
    code: int
    out: bytes
    err: str


async def run(command: Sequence[str | Path], given: bytes = b"", env: Mapping[str, str] | None = None) -> Done:
    def work() -> Done:
        done = subprocess.run(
            command, input=given, capture_output=True, check=False, timeout=60, env={**os.environ, **(env or {})}
        )
        return Done(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))

    return await asyncio.to_thread(work)


@contextlib.asynccontextmanager
async def ssh_site(guest: GuestClient, folder: Path, limits: Limits | None = None) -> AsyncIterator[SshSite]:
    access: Any = Access(guest)

    async def find(text: str) -> TokenInfo | None:
        scope = {TOKEN: Scope.EXEC, NARROW: Scope.EXEC, READER: Scope.READ}.get(text)
        only = OTHER if text == NARROW else None
        return None if scope is None else TokenInfo(text[:12], "t", W, 0.0, scope=scope, sandbox_id=only)

    tokens: Any = SimpleNamespace(find=find, calls=Calls())
    shelf: Any = Shelf()
    dialer: Any = Dialer(guest)
    keys = SshKeys(shelf, access, tokens, SystemClock())
    house = House(keys, Attachments(access), dialer, SystemClock(), limits or Limits())
    audit: list[AuditEntry] = []
    house.audit = audit.append
    own, theirs = asyncssh.generate_private_key("ssh-ed25519"), asyncssh.generate_private_key("ssh-ed25519")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    own_text = own.export_public_key().decode()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {own_text}")
    (folder / "key").write_bytes(theirs.export_private_key())
    (folder / "key").chmod(0o600)
    await keys.create(OWNER, WantedKey(theirs.export_public_key().decode(), comment="mine"))
    server = SshServer(house, own)
    serving = asyncio.create_task(server.run(listener, 2.0))
    try:
        yield SshSite(port, folder, access, keys, house, tokens, audit)
    finally:
        server.stop()
        await serving
