"""The listener, and the key that clients know the server by."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path
from typing import Final

import asyncssh
from asyncssh.kex import get_kex_algs

from cloche_server.app.sshkeys import SshAddress
from cloche_server.core.errors import ClocheError
from cloche_server.core.sshkeys import fingerprint_of
from cloche_server.host import files
from cloche_server.ssh.flow import PACKET, WINDOW, Connection
from cloche_server.ssh.house import House
from cloche_server.ssh.visitor import Visitor

#: How keys are agreed on, where it is at hand. Those over prime fields are missing: one of 8192 bits takes a tenth of a
#: second of everybody's time, and whoever connects may ask for it before saying who it is.
EXCHANGES: Final = (
    *("mlkem768x25519-sha256", "sntrup761x25519-sha512", "sntrup761x25519-sha512@openssh.com"),
    *("curve25519-sha256", "curve25519-sha256@libssh.org"),
    *("ecdh-sha2-nistp256", "ecdh-sha2-nistp384", "ecdh-sha2-nistp521"),
)
#: Ciphers that processors have instructions for; without them transfers are several times as slow.
CIPHERS: Final = ("aes256-gcm@openssh.com", "aes128-gcm@openssh.com", "aes256-ctr", "aes128-ctr")
MACS: Final = (
    *("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com"),
    *("hmac-sha2-256", "hmac-sha2-512"),
)
#: How clients prove that they have a key. None by SHA-1.
SIGNATURES: Final = (
    *("ssh-ed25519", "sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com"),
    *("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "rsa-sha2-256", "rsa-sha2-512"),
)
#: A client that answers none of so many questions is gone; one is asked when nothing has come for so long (seconds).
KEEPALIVE_SECONDS: Final = 30
KEEPALIVE_COUNT: Final = 4
HOST_KEY: Final = "ssh_host_ed25519_key"


def host_key(data: Path) -> asyncssh.SSHKey:
    """The key of this data directory, made once. Blocks. Raises `host.unsupported` for one that cannot be read."""
    path = data / HOST_KEY
    if not path.exists():
        made = asyncssh.generate_private_key("ssh-ed25519", comment="cloche")
        files.write_atomic(path, made.export_private_key(), 0o600)
    try:
        return asyncssh.import_private_key(path.read_bytes())
    except (OSError, asyncssh.KeyImportError) as error:
        raise ClocheError(
            "host.unsupported",
            f"the SSH host key {path} cannot be read; put it back, or remove it to have a new one made",
        ) from error


class SshServer:
    """`run` it; it serves until `stop`."""

    def __init__(self, house: House, key: asyncssh.SSHKey) -> None:
        self._house = house
        self._key = key
        self._stopping = asyncio.Event()

    def address(self, port: int) -> SshAddress:
        """What clients are told."""
        kind, key, *_ = self._key.export_public_key().decode().split()
        return SshAddress(port, f"{kind} {key}", fingerprint_of(self._key.public_data))

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, listener: socket.socket, grace: float) -> None:
        """Serves until `stop`; what is open then has `grace` seconds to go."""
        # It would write names, commands and variables of clients to the log.
        logging.getLogger("asyncssh").setLevel(logging.CRITICAL)
        options = await self._options()
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            self._house.open(group)
            server = await loop.create_server(lambda: Connection(loop, options), sock=listener, backlog=256)
            try:
                await self._stopping.wait()
            finally:
                server.close()
                self._house.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        await self._house.wait_empty()
                self._house.cut()

    async def _options(self) -> asyncssh.SSHServerConnectionOptions:
        made: asyncssh.SSHServerConnectionOptions = await asyncssh.SSHServerConnectionOptions.construct(
            None,
            server_factory=lambda: Visitor(self._house),
            server_host_keys=[self._key],
            server_version="Cloche",
            login_timeout=self._house.limits.login,
            keepalive_interval=KEEPALIVE_SECONDS,
            keepalive_count_max=KEEPALIVE_COUNT,
            kex_algs=[one for one in EXCHANGES if one.encode() in get_kex_algs()],
            encryption_algs=list(CIPHERS),
            mac_algs=list(MACS),
            signature_algs=list(SIGNATURES),
            compression_algs=["none"],
            encoding=None,
            window=WINDOW,
            max_pktsize=PACKET,
            line_editor=False,
            allow_scp=False,
            agent_forwarding=False,
            x11_forwarding=False,
            host_based_auth=False,
            gss_host=None,
            gss_kex=False,
            gss_auth=False,
            rdns_lookup=False,
            known_client_hosts=None,
            authorized_client_keys=None,
        )
        return made
