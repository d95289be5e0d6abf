"""Certificates from an authority that speaks ACME (RFC 8555), by way of certbot's library.

That library blocks, so each of its steps runs on a thread of its own, which nothing waits for at the end of the
process. What an authority answers is checked: a certificate that is not for the name and the key is no certificate.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from acme import challenges, client, errors, messages
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from josepy.errors import Error as JoseError
from josepy.jwa import ES256
from josepy.jwk import JWK

from cloche_server import __version__
from cloche_server.core.acme import Life
from cloche_server.host.certificates import KeyPair
from cloche_server.host.clock import SystemClock
from cloche_server.telemetry import log

_log = log.get("acme")

#: One answer of the authority; its look at the challenge; its making of the certificate.
ANSWER_SECONDS: Final = 20
VALIDATE_SECONDS: Final = 120.0
FINALIZE_SECONDS: Final = 90.0
_POLL_LEAST: Final = 1.0
_POLL_MOST: Final = 15.0
_SENTENCE: Final = 400
#: Errors that say nothing about the name that was asked for.
_OF_AUTHORITY: Final = frozenset({"rateLimited", "serverInternal", "badNonce", "accountDoesNotExist"})
_OF_ACCOUNT: Final = frozenset({"unauthorized", "accountDoesNotExist", "externalAccountRequired", "badPublicKey"})

_T = TypeVar("_T")


class Refused(Exception):
    """No certificate. `of_name`: for this name; else the authority or the account stands in the way of all."""

    def __init__(self, sentence: str, *, of_name: bool) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.of_name = of_name


@dataclass(frozen=True, slots=True)
class Proof:
    """What has to be seen by the authority. HTTP-01: `value` under `token`; DNS-01: `value` as TXT of `record`."""

    name: str
    value: str
    token: str = ""
    record: str = ""


Present = Callable[[Proof], AbstractAsyncContextManager[None]]


def make_account_key() -> bytes:
    """A new key of an account (EC P-256), as PEM."""
    return _pem(ec.generate_private_key(ec.SECP256R1()))


def life_of(pair: KeyPair) -> Life:
    """When a certificate begins and ends. Raises ValueError when it is none."""
    leaf = x509.load_pem_x509_certificate(pair.certificate_pem)
    digest = hashlib.sha256(pair.certificate_pem).digest()
    spread = int.from_bytes(digest[:4], "big") / 2**32
    return Life(leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp(), spread)


class Authority:
    """`ca`: a file of authorities (PEM) that the server of the directory is trusted by, instead of the usual ones."""

    def __init__(self, directory: str, email: str, ca: Path | None) -> None:
        self.directory = directory
        self._email = email
        self._ca = ca

    async def issue(self, account_pem: bytes, name: str, *, dns: bool, present: Present) -> KeyPair:
        """A certificate for exactly this name. Raises `Refused`."""
        session = _Session(self.directory, self._email, self._ca, account_pem)
        key_pem, csr_pem = await _on_thread(lambda: _request(name))
        order = await _on_thread(lambda: session.order(csr_pem))
        for authorization in order.authorizations:
            await self._prove(session, authorization, name, dns=dns, present=present)
        chain = await _on_thread(lambda: session.finish(order))
        pair = KeyPair(chain.encode("utf-8"), key_pem)
        _check(pair, name)
        return pair

    async def _prove(self, session: _Session, authorization: Any, name: str, *, dns: bool, present: Present) -> None:
        if authorization.body.status == messages.STATUS_VALID:
            return  # it was proven not long ago
        body, proof = session.proof(authorization, name, dns=dns)
        async with present(proof):
            await _on_thread(lambda: session.answer(body))
            try:
                async with asyncio.timeout(VALIDATE_SECONDS):
                    while True:
                        authorization, wait = await _on_thread(partial(session.look, authorization))
                        if authorization.body.status not in (messages.STATUS_PENDING, messages.STATUS_PROCESSING):
                            break
                        await asyncio.sleep(wait)
            except TimeoutError:
                raise Refused("the authority has not looked at the proof in time", of_name=True) from None
        if authorization.body.status != messages.STATUS_VALID:
            raise Refused(_why_invalid(authorization), of_name=True)


class _Session:
    """The steps of one order. All of them block, and raise `Refused` only. Not for two threads at once."""

    def __init__(self, directory: str, email: str, ca: Path | None, account_pem: bytes) -> None:
        self._directory = directory
        self._email = email
        self._ca = ca
        self._account_pem = account_pem
        self._client: client.ClientV2
        self._key: JWK

    def order(self, csr_pem: bytes) -> messages.OrderResource:
        self._step("the authority cannot be asked", self._open, of_name=False)
        return self._step("the authority takes no order for it", lambda: self._place(csr_pem))

    def _place(self, csr_pem: bytes) -> messages.OrderResource:
        try:
            return self._client.new_order(csr_pem)
        except messages.Error as error:
            if error.code in _OF_ACCOUNT or str(error.typ).endswith(":userActionRequired"):
                raise _shut_out(error) from None
            raise

    def _open(self) -> None:
        self._key = JWK.load(self._account_pem)
        net = client.ClientNetwork(
            self._key, alg=ES256, user_agent=f"cloche-server/{__version__}", timeout=ANSWER_SECONDS
        )
        if self._ca is not None:
            net.verify_ssl = str(self._ca)  # type: ignore[assignment]
        directory = client.ClientV2.get_directory(self._directory, net)
        self._client = client.ClientV2(directory, net)
        if directory.meta.external_account_required:
            raise Refused(
                "the authority gives certificates to accounts only that were made elsewhere (external account "
                "binding), which is not supported; choose another one",
                of_name=False,
            )
        self._client.net.account = self._account()

    def _account(self) -> messages.RegistrationResource:
        """That of our key, which is made when the authority has none."""
        wanted = messages.NewRegistration.from_data(email=self._email or None, terms_of_service_agreed=True)
        try:
            made = self._client.new_account(wanted)
        except errors.ConflictError as known:
            return messages.RegistrationResource(body=messages.Registration(), uri=known.location)
        except messages.Error as error:
            if error.code in _OF_ACCOUNT:
                raise _shut_out(error) from None
            raise
        _log.info("acme.account", directory=self._directory, terms=self._client.directory.meta.terms_of_service)
        return made

    def proof(self, authorization: Any, name: str, *, dns: bool) -> tuple[messages.ChallengeBody, Proof]:
        """What to show. Raises `Refused`."""
        kind = challenges.DNS01 if dns else challenges.HTTP01
        for body in authorization.body.challenges:
            challenge = body.chall
            if isinstance(challenge, challenges.DNS01) and dns:
                bare = name.removeprefix("*.")
                value = challenge.validation(self._key)
                return body, Proof(name, value, record=challenge.validation_domain_name(bare))
            if isinstance(challenge, challenges.HTTP01) and not dns:
                # As base64url any token is safe in a path; the library's `good_token` looks at the bytes within.
                return body, Proof(name, challenge.validation(self._key), token=challenge.encode("token"))
        raise Refused(f"the authority does not offer to prove the name by {kind.typ}", of_name=True)

    def answer(self, body: messages.ChallengeBody) -> None:
        self._step("the authority does not look", lambda: self._client.answer_challenge(body, body.response(self._key)))

    def look(self, authorization: Any) -> tuple[Any, float]:
        """The state of an authorization now, and after how many seconds to look again."""
        found, response = self._step("the authority does not tell", lambda: self._client.poll(authorization))
        text = response.headers.get("Retry-After", "")
        wait = float(text) if text.isascii() and text.isdigit() and len(text) < 6 else _POLL_LEAST
        return found, min(max(wait, _POLL_LEAST), _POLL_MOST)

    def finish(self, order: messages.OrderResource) -> str:
        """The chain as PEM, the certificate first."""
        # The library compares with local time.
        deadline = datetime.datetime.fromtimestamp(SystemClock().now() + FINALIZE_SECONDS)
        made = self._step("the authority gives none", lambda: self._client.finalize_order(order, deadline))
        return str(made.fullchain_pem)

    def _step(self, what: str, act: Callable[[], _T], *, of_name: bool = True) -> _T:
        try:
            return act()
        except messages.Error as error:
            about_name = of_name and error.code not in _OF_AUTHORITY
            raise Refused(f"{what}: {_told(error)}", of_name=about_name) from None
        except errors.TimeoutError:
            raise Refused(f"{what}: it takes too long", of_name=of_name) from None
        except errors.IssuanceError as error:
            raise Refused(f"{what}: {_told(error.error)}", of_name=of_name) from None
        except OSError as error:  # what `requests` raises is of this kind
            raise Refused(f"{what}: {_short(str(error))}", of_name=False) from None
        except (errors.Error, JoseError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"{what}: its answer makes no sense ({_short(repr(error))})", of_name=False) from None


def _request(name: str) -> tuple[bytes, bytes]:
    """A new key, and the request for a certificate, both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)] if len(name) <= 64 else []
    made = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name(subject))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(key), made.public_bytes(serialization.Encoding.PEM)


def _check(pair: KeyPair, name: str) -> None:
    try:
        leaf = x509.load_pem_x509_certificate(pair.certificate_pem)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        key = serialization.load_pem_private_key(pair.key_pem, None)
        fits = key.public_key() == leaf.public_key()
        good = fits and name in names.get_values_for_type(x509.DNSName)
    except (ValueError, x509.ExtensionNotFound, UnsupportedAlgorithm):
        good = False
    if not good:
        raise Refused("what the authority sent is no certificate for this name and its key", of_name=False)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _shut_out(error: messages.Error) -> Refused:
    return Refused(
        f"the authority does not let our account in ({_told(error)}); when it was closed, remove account.key below "
        "acme/ in the data directory for a new one, and restart the server",
        of_name=False,
    )


def _told(error: messages.Error) -> str:
    return _short(f"{error.code or error.typ}: {error.detail or error.title or 'no reason was given'}")


def _short(text: str) -> str:
    """Others have written it: one line, not too long."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= _SENTENCE else line[:_SENTENCE] + "…"


def _why_invalid(authorization: Any) -> str:
    for body in authorization.body.challenges or ():
        if body.error is not None:
            return f"the authority has not found the proof: {_told(body.error)}"
    return f"the authority has not found the proof ({authorization.body.status.name})"


async def _on_thread(act: Callable[[], _T]) -> _T:
    """As `asyncio.to_thread`, but on a thread of its own, which the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def tell(result: _T | None, error: BaseException | None) -> None:
        if done.done():
            return  # nobody waits any more
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = act()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name="acme", daemon=True).start()
    return await done
