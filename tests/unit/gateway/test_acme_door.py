"""What is answered without TLS, which certificate a name gets, what is kept on disk, and what `doctor` says of it."""

from __future__ import annotations

import asyncio
import base64
import datetime
import socket
import ssl
import stat
from pathlib import Path

import pytest
from acme import challenges, messages
from gateway_site import BOX, Reply, Site, Wire, answering, site
from josepy import JWK

from cloche_server.app.certificates import Certificates, names_of
from cloche_server.app.challenges import Challenges
from cloche_server.app.ports import PortWish
from cloche_server.cli.doctor_previews import examine_previews
from cloche_server.core.acme import PREFIX, Ledger, Wanted, challenge_token
from cloche_server.core.http1 import RequestHead
from cloche_server.core.previews import PreviewBase
from cloche_server.gateway.door import Door
from cloche_server.gateway.tls import ByName
from cloche_server.host.acme import Authority, Proof, Refused, _Session, life_of, make_account_key
from cloche_server.host.certificates import KeyPair, issue, make_authority
from cloche_server.host.clock import SystemClock
from cloche_server.settings import Settings
from cloche_server.storage.certificates import CertificateFiles, Kept
from cloche_server.wiring_tls import preview_tls

BASE = "preview.example.test"
DIRECTORY = "https://ca.example.test/dir"
CHALLENGE = PREFIX.decode() + "tok-en_1"


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return make_authority("tests", SystemClock().now())


async def ask(front: Site, port: int, host: str, target: str, method: str = "GET") -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wire = Wire(reader, writer)
    try:
        await wire.send(f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return await wire.reply(method)
    finally:
        wire.close()


async def test_only_an_order_under_way_is_answered_and_never_by_a_guest(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    proofs = Challenges("")
    async with site(tmp_path, domain=BASE, plain=listener) as front:
        front.gateway.door = Door(proofs.answer, lambda host: host.endswith(BASE) or host == "own.test", 8443)
        await front.ports.declare("w", BOX, PortWish(3000, domain="own.test"))
        async with await front.serve(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nguest")):
            assert (await ask(front, port, "own.test", CHALLENGE)).status == 404
            async with proofs.present(Proof("own.test", "tok-en_1.print", token="tok-en_1")):
                for where in (port, front.port):
                    found = await ask(front, where, "OWN.test.:80", CHALLENGE)
                    assert (found.status, found.body) == (200, b"tok-en_1.print")
                assert (await ask(front, port, "own.test", CHALLENGE, "HEAD")).get("content-length") == "14"
                assert (await ask(front, port, "other.test", CHALLENGE)).status == 404
                assert (await ask(front, port, "own.test", CHALLENGE + "x")).status == 404
                assert (await ask(front, port, "own.test", CHALLENGE, "POST")).status == 404
            assert (await ask(front, port, "own.test", CHALLENGE)).status == 404
            moved = await ask(front, port, f"3000-{BOX}.{BASE}:80", "/a%2Fb?c=d", "POST")
            assert (moved.status, moved.get("location")) == (308, f"https://3000-{BOX}.{BASE}:8443/a%2Fb?c=d")
            assert (await ask(front, port, "stranger.test", "/")).status == 404
            assert front.world.dialed == [], "without TLS nothing reaches a guest"
            # With TLS the paths of a guest are its own, but for those of an order.
            assert (await ask(front, front.port, "own.test", CHALLENGE)).body == b"guest"


async def test_each_name_gets_its_own_certificate(authority: KeyPair) -> None:
    now = SystemClock().now()
    by_name = ByName(None, BASE, ("http/1.1",))
    assert by_name.find(BASE) is by_name.find(None) is None
    await by_name.put(BASE, issue(authority, BASE, now))
    await by_name.put(f"*.{BASE}", issue(authority, f"*.{BASE}", now))
    await by_name.put("own.test", issue(authority, "own.test", now))
    assert by_name.find("OWN.test.") is by_name.find("own.test") is not None
    assert by_name.find(f"a.{BASE}") is by_name.find(f"b.{BASE}") is not by_name.find(BASE)
    assert by_name.find(None) is by_name.find(BASE) is not None
    for other in (f"a.b.{BASE}", "test", "", "a.own.test", f"x{BASE}"):
        assert by_name.find(other) is None
    before = by_name.find("own.test")
    broken = KeyPair(issue(authority, "own.test", now).certificate_pem, issue(authority, "own.test", now).key_pem)
    with pytest.raises(ssl.SSLError):
        await by_name.put("own.test", broken)
    assert by_name.find("own.test") is before, "what cannot be used changes nothing"
    await by_name.put("own.test", None)
    assert by_name.find("own.test") is None


async def test_files_of_the_operator_stay_for_all_other_names(authority: KeyPair) -> None:
    usual = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    by_name = ByName(usual, BASE, ("http/1.1",))
    await by_name.put("own.test", issue(authority, "own.test", SystemClock().now()))
    assert by_name.context is usual
    assert by_name.find(None) is None
    assert by_name.find(BASE) is None
    assert by_name.find("own.test") is not None


async def test_names_of_sandboxes_are_never_asked_for(tmp_path: Path) -> None:
    async with site(tmp_path, domain=BASE) as front:
        base = PreviewBase("https", BASE)
        await front.ports.declare("w", BOX, PortWish(3000, domain="own.test"))
        own, wild = Wanted("own.test", "w"), [Wanted(BASE, dns=True), Wanted(f"*.{BASE}", dns=True)]
        assert names_of(base, front.ports, own=False, hook=False) == [Wanted(BASE), own]
        assert names_of(base, front.ports, own=False, hook=True) == [*wild, own]
        assert names_of(base, front.ports, own=True, hook=True) == [own]
        assert names_of(PreviewBase("https", "localhost"), front.ports, own=False, hook=True) == [own]


def test_what_is_on_disk_is_private_and_comes_back(tmp_path: Path, authority: KeyPair) -> None:
    files = CertificateFiles(tmp_path, DIRECTORY)
    files.prepare()
    wild = Kept(f"*.{BASE}", issue(authority, f"*.{BASE}", SystemClock().now()))
    files.keep(wild)
    files.keep_account(b"account")
    ledger = Ledger()
    ledger.begin(Wanted("a.test", "w"), 5.0)
    ledger.failed("a.test", "no “quotes”", 6.0, 0.5)
    ledger.stopped("b.test", "down", 7.0, 0.5)
    files.keep_ledger(ledger)
    again = CertificateFiles(tmp_path, DIRECTORY)
    assert list(again.certificates()) == [wild]
    assert (again.account(), again.ledger()) == (b"account", ledger)
    for path in files.folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    other = CertificateFiles(tmp_path, "https://trial.example.test/dir")
    assert (other.account(), list(other.certificates())) == (None, []), "another authority has a place of its own"
    for nonsense in (b"{", b"[]", b'{"orders": [{}], "troubles": {}, "pause": null}'):
        (files.folder / "ledger.json").write_bytes(nonsense)
        assert again.ledger() == Ledger()
    (files.folder / "certificates" / "own.test.pem").write_bytes(b"# else.test\nnonsense")
    (files.folder / "certificates" / "cut.test.pem").write_bytes(b"# cut.test\n" + wild.pair.key_pem[:90])
    assert list(again.certificates()) == [wild]
    files.remove(wild.name)
    assert list(again.certificates()) == []


async def test_a_certificate_that_cannot_be_shown_is_left_out_and_old_ones_are_removed(
    tmp_path: Path, authority: KeyPair
) -> None:
    clock, files = SystemClock(), CertificateFiles(tmp_path, DIRECTORY)
    files.prepare()
    good, odd = (issue(authority, name, clock.now()) for name in ("own.test", "odd.test"))
    files.keep(Kept("own.test", good))
    files.keep(Kept("odd.test", KeyPair(odd.certificate_pem, good.key_pem)))
    files.keep(Kept("gone.test", issue(authority, "gone.test", clock.now() - 60 * 86400)))
    wanted = [Wanted("own.test", "w")]
    kept = Certificates(files, Authority(DIRECTORY, "", None), Challenges(""), clock, lambda: wanted)
    by_name = ByName(None, BASE, ("http/1.1",))
    kept.on_change = by_name.put
    wanted.append(Wanted("odd.test", "w"))
    await kept.load()
    assert by_name.find("own.test") is not None
    assert by_name.find("odd.test") is None
    wanted.pop()
    async with asyncio.TaskGroup() as group:
        await kept._look(group)
    assert {one.name for one in files.certificates()} == {"own.test", "odd.test"}


async def test_what_a_server_begins_with_is_joined(tmp_path: Path, authority: KeyPair) -> None:
    """Certificates that are kept are shown before the first connection, and the authority is not asked again."""
    files = CertificateFiles(tmp_path / "data", DIRECTORY)
    files.prepare()
    now = SystemClock().now()
    for name in (BASE, "own.test"):
        files.keep(Kept(name, issue(authority, name, now)))
    settings = Settings(data=tmp_path / "data", preview_acme=DIRECTORY, preview_acme_agree=True)
    async with site(tmp_path, domain=BASE) as front:
        await front.ports.declare("w", BOX, PortWish(3000, domain="own.test"))
        base = front.ports.base
        async with preview_tls(settings, front.gateway, front.ports, base, SystemClock()) as context:
            assert context is not None
            server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
            trusting = ssl.create_default_context(cadata=authority.certificate_pem.decode())
            for name in (BASE, "own.test"):
                _, writer = await asyncio.open_connection(
                    *server.sockets[0].getsockname(), ssl=trusting, server_hostname=name
                )
                writer.close()
            server.close()
            assert front.gateway.door is not None
            moved = front.gateway.door.plain(RequestHead(b"GET", b"/", 1, (), b"own.test"))
            assert moved.headers[0] == (b"Location", f"https://own.test:{front.port}/".encode())
        async with preview_tls(Settings(data=tmp_path), front.gateway, front.ports, base, SystemClock()) as context:
            assert context is None
    assert files.ledger().orders == []


async def test_a_hook_that_cannot_be_run_refuses_the_order() -> None:
    proof = Proof(f"*.{BASE}", "value", record=f"_acme-challenge.{BASE}")
    with pytest.raises(Refused, match="is not installed"):
        async with Challenges("/does/not/exist now").present(proof):
            pytest.fail("the record is not there")


def test_any_token_is_shown_as_it_is_written_in_a_path() -> None:
    """Its bytes are random: a slash among them is none in the path."""
    token = b"/../" * 8
    session = _Session(DIRECTORY, "", None, make_account_key())
    session._key = JWK.load(session._account_pem)
    offered = messages.ChallengeBody(chall=challenges.HTTP01(token=token), uri="https://ca.example.test/c")
    body = messages.Authorization(challenges=[offered])
    _, proof = session.proof(messages.AuthorizationResource(body=body, uri=""), BASE, dns=False)
    assert proof.token == base64.urlsafe_b64encode(token).decode().rstrip("=")
    assert challenge_token(PREFIX + proof.token.encode()) == proof.token
    assert proof.value.startswith(proof.token + ".")
    with pytest.raises(Refused, match="dns-01"):
        session.proof(messages.AuthorizationResource(body=body, uri=""), BASE, dns=True)


async def test_doctor_tells_what_is_good_missing_and_over(tmp_path: Path, authority: KeyPair) -> None:
    assert await examine_previews(Settings(data=tmp_path)) == []
    now = SystemClock().now()
    settings = Settings(data=tmp_path, preview_acme=DIRECTORY, preview_acme_agree=True, preview_domain=BASE)
    (missing,) = await examine_previews(settings)
    assert (missing.level, missing.found) == ("warn", f"{BASE}: there is none yet")
    files = CertificateFiles(tmp_path, DIRECTORY)
    files.prepare()
    pairs = {BASE: issue(authority, BASE, now), "old.test": issue(authority, "old.test", now - 60 * 86400)}
    for name, pair in pairs.items():
        files.keep(Kept(name, pair))
    until = {
        name: datetime.datetime.fromtimestamp(life_of(pair).ends, datetime.UTC).strftime("%Y-%m-%d")
        for name, pair in pairs.items()
    }
    ledger = Ledger()
    ledger.failed("new.test", "the authority has not found the proof", now, 0.5)
    files.keep_ledger(ledger)
    told = {finding.found: finding.level for finding in await examine_previews(settings)}
    assert told == {
        f"{BASE}: good until {until[BASE]}": "ok",
        f"old.test: expired on {until['old.test']}": "warn",
        "new.test: none was given: the authority has not found the proof": "warn",
    }
    ledger.failed(BASE, "no", now, 0.5)
    ledger.stopped("x", "the authority cannot be asked", now, 0.5)
    files.keep_ledger(ledger)
    told = {finding.found: finding.level for finding in await examine_previews(settings)}
    assert told[f"{BASE}: good until {until[BASE]}, but not renewed: no"] == "warn"
    assert told["the authority cannot be asked"] == "warn"
    own = Settings(data=tmp_path / "else", preview_cert=tmp_path / "cert.pem", preview_key=tmp_path / "key.pem")
    assert "cannot be used" in (await examine_previews(own))[0].found
    (tmp_path / "cert.pem").write_bytes(pairs["old.test"].certificate_pem)
    assert "expired on" in (await examine_previews(own))[0].found
