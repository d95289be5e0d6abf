"""SSH: keys that open sandboxes, and where it is served."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _call, _wire, _wire_ssh
from .._call import Call
from ..ssh import SshKey, SshServer
from .transport import AsyncTransport


class AsyncSshKeys:
    """Public keys that sandboxes are opened with over SSH; `client.ssh_keys`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        public_key: str,
        *,
        comment: str | None = None,
        sandbox_id: str | None = None,
        expires_in_seconds: float | None = None,
    ) -> SshKey:
        """Accept a public key, one line as in a file that ends in `.pub`: for one sandbox, or all of the workspace.

        It opens no more, and lives no longer, than the token of this client.
        """
        body = _wire.given(public_key=public_key, comment=comment, sandbox_id=sandbox_id)
        body |= _wire.given(expires_in_seconds=expires_in_seconds)
        made = await self._transport.json(Call("POST", _call.path("ssh-keys"), json=body))
        return _wire_ssh.ssh_key(_wire.record(made))

    async def list(self) -> Sequence[SshKey]:
        """Those that are accepted, oldest first."""
        data = _wire.record(await self._transport.json(Call("GET", _call.path("ssh-keys"), kind="safe")))
        return [_wire_ssh.ssh_key(item) for item in _wire.records(_wire.required(data, "keys"))]

    async def delete(self, key_id: str) -> None:
        """Accept it no more; connections that it has opened end."""
        await self._transport.json(Call("DELETE", _call.path("ssh-keys", key_id)))

    async def server(self) -> SshServer:
        """Where SSH is served, if it is."""
        data = await self._transport.json(Call("GET", _call.path("ssh"), kind="safe"))
        return _wire_ssh.ssh_server(_wire.record(data))
