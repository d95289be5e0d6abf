"""What `doctor` says about certificates of previews: those of the operator's files, and those by ACME."""

from __future__ import annotations

import asyncio
import datetime

from cryptography import x509

from cloche_server.cli.finding import OK, WARN, Finding
from cloche_server.core.acme import Ledger, Trouble
from cloche_server.core.previews import is_domain
from cloche_server.host.clock import SystemClock
from cloche_server.settings import Settings
from cloche_server.storage.certificates import CertificateFiles

_SOON = 7 * 86400.0
_NAME = "certificate"


async def examine_previews(settings: Settings) -> list[Finding]:
    """Nothing, where neither is in use."""
    return await asyncio.to_thread(lambda: [*_own(settings), *_acme(settings)])


def _own(settings: Settings) -> list[Finding]:
    path = settings.preview_cert
    if path is None:
        return []
    advice = "write a new one there; the server reads it by itself"
    try:
        ends = _ends(path.read_bytes())
    except (OSError, ValueError) as error:
        return [Finding(_NAME, WARN, f"{path} cannot be used: {error}", advice)]
    return [_judge(str(path), ends, None, _SOON, advice)]


def _acme(settings: Settings) -> list[Finding]:
    if not settings.preview_acme:
        return []
    files = CertificateFiles(settings.data, settings.preview_acme)
    ledger = files.ledger()
    found: list[Finding] = []
    seen: set[str] = set()
    for kept in files.certificates():
        seen.add(kept.name)
        trouble = ledger.troubles.get(kept.name)
        try:
            ends = _ends(kept.pair.certificate_pem)
        except ValueError as error:
            found.append(Finding(_NAME, WARN, f"{kept.name}: cannot be used: {error}", "the server orders a new one"))
            continue
        found.append(_judge(kept.name, ends, trouble, 0.0, _advice(trouble or ledger.pause)))
    for name, trouble in ledger.troubles.items():
        if name not in seen and trouble.failures:
            found.append(Finding(_NAME, WARN, f"{name}: none was given: {trouble.sentence}", _advice(trouble)))
    return [*found, *_pause(ledger), *_base(settings, seen | ledger.troubles.keys())]


def _pause(ledger: Ledger) -> list[Finding]:
    if ledger.pause is None:
        return []
    return [Finding("acme", WARN, ledger.pause.sentence, _advice(ledger.pause))]


def _base(settings: Settings, seen: set[str]) -> list[Finding]:
    """`preview_url` may name another domain, so that its names are not missed here."""
    domain = settings.preview_domain.lower()
    if settings.preview_cert is not None or settings.preview_url or domain in seen or not is_domain(domain):
        return []
    return [Finding(_NAME, WARN, f"{domain}: there is none yet", "start the server, and look into its log")]


def _judge(what: str, ends: float, trouble: Trouble | None, soon: float, advice: str) -> Finding:
    now = SystemClock().now()
    if ends <= now:
        return Finding(_NAME, WARN, f"{what}: expired on {_day(ends)}", advice)
    if trouble is not None and trouble.failures:
        return Finding(_NAME, WARN, f"{what}: good until {_day(ends)}, but not renewed: {trouble.sentence}", advice)
    if ends <= now + soon:
        return Finding(_NAME, WARN, f"{what}: ends on {_day(ends)}", advice)
    return Finding(_NAME, OK, f"{what}: good until {_day(ends)}")


def _advice(trouble: Trouble | None) -> str:
    if trouble is None:
        return "start the server, which renews it"
    return f"see docs/previews.md; it is tried again after {_moment(trouble.next_at)} while the server runs"


def _ends(pem: bytes) -> float:
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


def _day(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d")


def _moment(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
