"""Sockets on addresses of this host that remember what reaches them: what a guest says of its attempts may be a lie."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from cloche_server.host.addresses import local_addresses

_MOST: Final = 4096
_SECONDS: Final = 2.0


class Witness:
    """`ports`: where it listens, by address and `tcp` or `udp`."""

    def __init__(self) -> None:
        self.ports: dict[tuple[str, str], int] = {}
        self._seen = bytearray()

    def saw(self, token: str) -> bool:
        """Whether these words have arrived."""
        return token.encode() in self._seen

    def note(self, data: bytes) -> None:
        self._seen += data[:_MOST] + b"\n"
        del self._seen[: max(0, len(self._seen) - 256 * _MOST)]

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_SECONDS):
                self.note(await reader.read(_MOST))
                writer.write(b"HTTP/1.0 200 OK\r\n\r\nreached\n")
                await writer.drain()
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, witness: Witness) -> None:
        self._witness = witness

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._witness.note(data)


def outward() -> list[IPv4Address | IPv6Address]:
    """Addresses of this host that others may know it by: neither loopback nor link-local."""
    found = [one for one in local_addresses() if not (one.is_loopback or one.is_link_local or one.is_unspecified)]
    return sorted(found, key=lambda one: (one.version, int(one)))


@contextlib.asynccontextmanager
async def listening(addresses: Sequence[str], udp_port: int) -> AsyncIterator[Witness]:
    """Listens on these addresses while the block lasts: TCP on a free port, UDP on this one or, where somebody has it,
    on a free one. Addresses where it cannot are left out."""
    witness = Witness()
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        for address in addresses:
            with contextlib.suppress(OSError):
                server = await asyncio.start_server(witness._stream, address, 0, limit=_MOST)
                stack.callback(server.close)
                witness.ports[address, "tcp"] = server.sockets[0].getsockname()[1]
            for port in (udp_port, 0):
                with contextlib.suppress(OSError):
                    family = socket.AF_INET6 if ":" in address else socket.AF_INET
                    transport, _ = await loop.create_datagram_endpoint(
                        lambda: _Datagrams(witness), (address, port), family=family
                    )
                    stack.callback(transport.close)
                    witness.ports[address, "udp"] = transport.get_extra_info("sockname")[1]
                    break
        yield witness
