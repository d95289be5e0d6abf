"""Certificates by ACME from a real server of that protocol: they come, are renewed, and failures leave the old."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from acme import client, messages
from cryptography import x509
from gateway_site import BOX, Site, site
from josepy import ES256, JWK

from cloche_server.app.certificates import Certificates
from cloche_server.app.ports import PortWish
from cloche_server.core.acme import DAY, PREFIX, UNFINISHED, Wanted
from cloche_server.gateway.gateway import Gateway
from cloche_server.gateway.tls import ByName
from cloche_server.host.clock import SystemClock
from cloche_server.settings import Settings
from cloche_server.storage.certificates import CertificateFiles
from cloche_server.telemetry.metrics import REGISTRY
from cloche_server.wiring_tls import build_certificates
from kit.pebble import Pebble, pebble

pytestmark = pytest.mark.thorough

BASE = "preview.example.test"
OWN = "app.elsewhere.test"
PROTOCOLS = ("h2", "http/1.1")


class Clock(SystemClock):
    """The real time, and what the test adds to it."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


async def soon(check: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.05)


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("cloche_certificate_orders_total", {"outcome": outcome}) or 0.0


@dataclass
class Town:
    """A gateway, an authority that finds it, and certificates."""

    front: Site
    authority: Pebble
    by_name: ByName
    clock: Clock
    settings: Settings
    certificates: Certificates
    running: asyncio.Task[None] | None = None

    @property
    def files(self) -> CertificateFiles:
        return CertificateFiles(self.settings.data, self.settings.preview_acme)

    @property
    def gateway(self) -> Gateway:
        return self.front.gateway

    async def start(self) -> None:
        """As a new server would, on the same data."""
        assert self.front.ports.base is not None
        self.certificates = build_certificates(
            self.settings, self.gateway, self.front.ports, self.front.ports.base, self.clock
        )
        self.certificates.on_change = self.by_name.put
        await self.certificates.load()
        self.running = asyncio.create_task(self.certificates.run())

    async def stop(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait([self.running])

    def later(self, seconds: float) -> None:
        self.clock.ahead += seconds
        self.certificates.poke()

    async def running_once(self) -> None:
        """Lets it look once more, and waits for what it began then."""
        looked = asyncio.Event()
        wanted = self.certificates._wanted

        def once() -> list[Wanted]:
            looked.set()
            self.certificates._wanted = wanted
            return wanted()

        self.certificates._wanted = once
        self.certificates.poke()
        async with asyncio.timeout(60):
            await looked.wait()
        await soon(lambda: not self.certificates._running)

    def shown(self, name: str) -> bool:
        return self.by_name.find(name) is not None

    async def shake(self, name: str | None, root: str) -> tuple[x509.Certificate, str | None]:
        """What a client that trusts `root` gets, and the protocol."""
        context = ssl.create_default_context(cadata=root)
        context.set_alpn_protocols(list(PROTOCOLS))
        context.check_hostname = name is not None
        _, writer = await asyncio.open_connection("127.0.0.1", self.front.port, ssl=context, server_hostname=name or "")
        try:
            connection = writer.get_extra_info("ssl_object")
            return (
                x509.load_der_x509_certificate(connection.getpeercert(binary_form=True)),
                connection.selected_alpn_protocol(),
            )
        finally:
            writer.close()

    async def plain(self, host: str, target: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.authority.http_port)
        writer.write(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        try:
            return await reader.read(-1)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def town(tmp_path: Path, hook: str = "") -> AsyncIterator[Town]:
    door = socket.create_server(("127.0.0.1", 0))
    door.setblocking(False)
    work = tmp_path / "pebble"
    work.mkdir()
    by_name = ByName(None, BASE, PROTOCOLS)
    async with pebble(work, door.getsockname()[1]) as authority:
        settings = Settings(
            data=tmp_path / "data", preview_acme=authority.directory, preview_acme_agree=True,
            preview_acme_email="operator@example.test", preview_acme_ca=authority.ca, preview_acme_hook=hook,
        )  # fmt: skip
        async with site(tmp_path, tls=by_name.context, domain=BASE, plain=door) as front:
            found = Town(front, authority, by_name, Clock(), settings, None)  # type: ignore[arg-type]
            try:
                yield found
            finally:
                await found.stop()


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")


async def test_two_names_get_certificates_and_nobody_else_does(tmp_path: Path) -> None:
    async with town(tmp_path) as here:
        await here.front.ports.declare("w", BOX, PortWish(3000, domain=OWN))
        await here.start()
        await soon(lambda: here.shown(BASE) and here.shown(OWN))
        root = await here.authority.root()
        for name in (BASE, OWN):
            found, protocol = await here.shake(name, root)
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert names.get_values_for_type(x509.DNSName) == [name]
            assert protocol == "h2"
        unnamed, _ = await here.shake(None, root)
        assert BASE in str(unnamed.extensions)
        asked = len(here.authority.names.asked)
        for stranger in ("stranger.example.test", f"3000-{BOX}.{BASE}"):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await here.shake(stranger, root)
        await here.running_once()
        assert len(here.authority.names.asked) == asked, "no handshake makes an order"

        def kept() -> list[Path]:
            return [path for path in here.files.folder.rglob("*") if path.is_file()]

        # The ledger may be written just now, beside its place.
        wanted = {"account.key", "ledger.json", f"{BASE}.pem", f"{OWN}.pem"}
        await soon(lambda: {path.name for path in kept()} == wanted)
        assert {stat.S_IMODE(path.stat().st_mode) for path in kept()} == {0o600}
        assert (await here.plain(BASE, PREFIX.decode() + "abc")).startswith(b"HTTP/1.1 404 ")
        # The domain is given up: its certificate is not shown any more, and shown again without an order.
        await here.front.ports.remove("w", BOX, 3000)
        await soon(lambda: not here.shown(OWN))
        issued = counted("issued")
        await here.front.ports.declare("w", BOX, PortWish(3000, domain=OWN))
        await soon(lambda: here.shown(OWN))
        assert counted("issued") == issued


async def test_certificates_are_renewed_and_a_failure_keeps_the_old_one(tmp_path: Path) -> None:
    async with town(tmp_path) as here:
        await here.start()
        await soon(lambda: here.shown(BASE))
        first, _ = await here.shake(BASE, root := await here.authority.root())
        here.later(59 * DAY)
        await here.running_once()
        assert (await here.shake(BASE, root))[0] == first, "it is not yet time"
        # The authority is down when it is time: what there was stays, and that is told.
        await here.authority.stop()
        stopped = counted("stopped")
        here.later(5 * DAY)
        await soon(lambda: counted("stopped") > stopped)
        assert (await here.shake(BASE, root))[0] == first
        await soon(lambda: here.files.ledger().pause is not None)
        pause = here.files.ledger().pause
        assert pause is not None
        assert (pause.failures, "cannot be asked" in pause.sentence) == (1, True)
        await here.running_once()
        assert counted("stopped") == stopped + 1, "it waits before it asks again"
        # It is up again, and has forgotten our account.
        await here.authority.start()
        renewed = counted("renewed")
        here.later(200)
        await soon(lambda: counted("renewed") > renewed)
        second, _ = await here.shake(BASE, await here.authority.root())
        assert second.serial_number != first.serial_number
        assert here.files.ledger().pause is None
        assert [kept.name for kept in here.files.certificates()] == [BASE]


async def test_an_account_that_was_closed_is_told_and_not_replaced_by_itself(tmp_path: Path) -> None:
    async with town(tmp_path) as here:
        await here.start()
        await soon(lambda: here.shown(BASE))
        await asyncio.to_thread(close_account, here)
        stopped = counted("stopped")
        here.later(64 * DAY)
        await soon(lambda: counted("stopped") > stopped)
        await soon(lambda: here.files.ledger().pause is not None)
        pause = here.files.ledger().pause
        assert pause is not None
        assert "remove account.key" in pause.sentence
        assert here.shown(BASE), "the old one stays"
        await here.stop()
        (here.files.folder / "account.key").unlink()
        renewed = counted("renewed")
        await here.start()
        await soon(lambda: counted("renewed") > renewed)


def close_account(here: Town) -> None:
    key = JWK.load((here.files.folder / "account.key").read_bytes())
    net = client.ClientNetwork(key, alg=ES256)
    net.verify_ssl = str(here.authority.ca)  # type: ignore[assignment]
    speaker = client.ClientV2(client.ClientV2.get_directory(here.authority.directory, net), net)
    found = speaker.query_registration(messages.RegistrationResource(body=messages.Registration(), uri=""))
    speaker.deactivate_registration(found)


async def test_a_wrong_answer_is_no_proof_and_the_name_has_to_wait(tmp_path: Path) -> None:
    async with town(tmp_path) as here:
        await here.start()
        door = here.gateway.door
        assert door is not None
        right = door._answer
        door._answer = lambda host, token: b"something else"
        failed = counted("failed")
        await soon(lambda: counted("failed") > failed)
        await soon(lambda: here.files.ledger().troubles[BASE].failures == 1)
        trouble = here.files.ledger().troubles[BASE]
        assert "has not found the proof: unauthorized" in trouble.sentence
        assert not here.shown(BASE)
        door._answer = right
        # A new server on the same data does not ask any earlier.
        await here.stop()
        await here.start()
        await here.running_once()
        assert len(here.files.ledger().orders) == 1
        here.later(400)
        await soon(lambda: here.shown(BASE))
        await soon(lambda: BASE not in here.files.ledger().troubles)  # which is written a moment later


async def test_a_server_that_ends_in_the_middle_of_an_order_begins_another_one(tmp_path: Path) -> None:
    async with town(tmp_path) as here:
        await here.start()
        door = here.gateway.door
        assert door is not None
        asked: list[str] = []
        right = door._answer

        def cut(host: str, token: str) -> bytes | None:
            asked.append(token)
            assert here.running is not None
            here.running.cancel()
            return right(host, token)

        door._answer = cut
        await soon(lambda: here.running is not None and here.running.done())
        assert asked
        assert right(BASE, asked[0]) is None, "nothing is left open"
        assert not here.shown(BASE)
        await here.start()
        await here.running_once()
        assert len(here.files.ledger().orders) == 1
        here.later(UNFINISHED + 1)
        await soon(lambda: here.shown(BASE))
        assert len(here.files.ledger().orders) == 2


async def test_a_wildcard_is_proven_by_a_record_that_the_hook_sets(tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    records = tmp_path / "pebble" / "records"
    hook.write_text('#!/bin/sh\nset -eu\necho "$ACME_ACTION $ACME_NAME $ACME_VALUE" >> "$1"\n')
    hook.chmod(0o755)
    async with town(tmp_path, hook=f"{hook} {records}") as here:
        await here.start()
        name = f"3000-{BOX}.{BASE}"
        await soon(lambda: here.shown(name) and here.shown(BASE))
        found, _ = await here.shake(name, await here.authority.root())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [f"*.{BASE}"]
        lines = [line.split(" ")[:2] for line in records.read_text().splitlines()]
        record = f"_acme-challenge.{BASE}"
        assert lines == [["set", record], ["clear", record]] * 2, "one after the other, and all are cleared"
        # A hook that fails is told, with what it said.
        hook.write_text("#!/bin/sh\necho no such zone >&2\nexit 3\n")
        failed = counted("failed")
        here.later(64 * DAY)
        await soon(lambda: counted("failed") > failed)
        await soon(lambda: any(t.failures for t in here.files.ledger().troubles.values()))
        sentences = [trouble.sentence for trouble in here.files.ledger().troubles.values() if trouble.failures]
        assert sentences[0].endswith("`hook` ended with exit code 3: no such zone")
        assert here.shown(name)


async def test_without_a_server_nothing_comes_and_nothing_breaks(tmp_path: Path) -> None:
    async with town(tmp_path) as here:
        await here.authority.stop()
        stopped = counted("stopped")
        await here.start()
        await soon(lambda: counted("stopped") > stopped)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await here.shake(BASE, here.authority.ca.read_text())
        moved = await here.plain(f"3000-{BOX}.{BASE}", "/a?b")
        assert moved.startswith(b"HTTP/1.1 308 ")
        assert f"\r\nLocation: https://3000-{BOX}.{BASE}:{here.front.port}/a?b\r\n".encode() in moved
