"""Certificates by ACME for a real server that is killed in the middle of an order."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from cloche_server.storage.certificates import CertificateFiles
from kit import truth
from kit.free_ports import free_port
from kit.pebble import Pebble, pebble
from kit.server import Server

BASE = "preview.example.test"


async def soon(check: Callable[[], object], server: Server) -> None:
    for _ in range(600):
        if check():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(server.log_tail())


def preview_port(server: Server) -> int:
    """Where previews are, as the server tells when it is ready."""
    line = next(one for one in reversed(server.log_tail().splitlines()) if "previews=" in one)
    return int(line.partition("previews=")[2].split()[0].rpartition(":")[2].strip("'/"))


def handshake(port: int, name: str, root: str) -> tuple[x509.Certificate, str | None]:
    context = ssl.create_default_context(cadata=root)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", port), 20) as plain,
        context.wrap_socket(plain, server_hostname=name) as done,
    ):
        found = done.getpeercert(binary_form=True)
        assert found is not None
        return x509.load_der_x509_certificate(found), done.selected_alpn_protocol()


def a_minute_later(files: CertificateFiles) -> None:
    """As if the server had been away for so long."""
    path = files.folder / "ledger.json"
    told = json.loads(path.read_bytes())
    for one in (*told["orders"], *told["troubles"].values()):
        one["at"] -= 61
    for one in told["troubles"].values():
        one["next_at"] -= 61
    path.write_text(json.dumps(told))


async def use(server: Server, root: str) -> bytes:
    """A client on HTTP/2 that trusts nobody but the authority; the certificate's bytes."""
    port = preview_port(server)
    shown, protocol = await asyncio.to_thread(handshake, port, BASE, root)
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert (names.get_values_for_type(x509.DNSName), protocol) == ([BASE], "h2")
    for stranger in ("stranger.example.test", f"3000-sb-none.{BASE}"):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(handshake, port, stranger, root)
    trusting = ssl.create_default_context(cadata=root)
    async with httpx.AsyncClient(http2=True, verify=trusting, trust_env=False) as http:
        answer = await http.get(f"https://127.0.0.1:{port}/", headers={"Host": BASE}, extensions={"sni_hostname": BASE})
    assert (answer.http_version, answer.status_code) == ("HTTP/2", 404)
    return shown.public_bytes(Encoding.DER)


async def through(authority: Pebble, server: Server) -> None:
    files = CertificateFiles(server.data, authority.directory)
    authority.names.held = asyncio.Event()
    await asyncio.to_thread(server.start)
    await soon(lambda: authority.names.waiting, server)
    await asyncio.to_thread(server.kill)
    authority.names.held.set()
    assert [one.name for one in files.ledger().orders] == [BASE], "it was written down before it was placed"
    assert list(files.certificates()) == []
    a_minute_later(files)
    await asyncio.to_thread(server.start)
    await soon(lambda: list(files.certificates()), server)
    root = await authority.root()
    await soon(lambda: "certificate.issued" in server.log_tail(), server)
    first = await use(server, root)
    assert len(files.ledger().orders) == 2
    # Without an authority it is shown by the next server at once.
    await authority.stop()
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    assert await use(server, root) == first
    moved = httpx.get(f"http://127.0.0.1:{authority.http_port}/a", headers={"Host": BASE}, trust_env=False)
    assert (moved.status_code, moved.headers["Location"]) == (308, f"https://{BASE}:{preview_port(server)}/a")


async def test_killed_in_an_order_it_has_a_certificate_in_the_end(
    baked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "localhost,127.0.0.1")
    server = Server.make(
        baked,
        preview_domain=BASE,
        preview_acme_port=free_port(),
        pool_launched=0,
        pool_warm=0,
    )
    try:
        async with pebble(tmp_path, int(str(server.settings["preview_acme_port"]))) as authority:
            server.settings |= {"preview_acme": authority.directory, "preview_acme_ca": authority.ca}
            server.settings["preview_acme_agree"] = True
            await through(authority, server)
            truth.check(server)
    finally:
        server.close()
