"""TLS of previews, built and joined: files of the operator, certificates by ACME, or both."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from cloche_server.app.ports import Ports
from cloche_server.core.previews import PreviewBase, split_host
from cloche_server.gateway.door import Door
from cloche_server.gateway.gateway import Gateway
from cloche_server.gateway.tls import ByName, Certificate
from cloche_server.host.clock import Clock
from cloche_server.settings import Settings

if TYPE_CHECKING:
    from cloche_server.app.certificates import Certificates


def build_certificates(
    settings: Settings, gateway: Gateway, ports: Ports, base: PreviewBase, clock: Clock
) -> Certificates:
    """Certificates by ACME, whose proofs the gateway answers from now on."""
    # Only here: the library takes its time and memory, which servers without ACME need not give.
    from cloche_server.app.certificates import Certificates, names_of
    from cloche_server.app.challenges import Challenges
    from cloche_server.host.acme import Authority
    from cloche_server.storage.certificates import CertificateFiles

    challenges = Challenges(settings.preview_acme_hook)
    own, hook = settings.preview_cert is not None, bool(settings.preview_acme_hook)
    found = Certificates(
        CertificateFiles(settings.data, settings.preview_acme),
        Authority(settings.preview_acme, settings.preview_acme_email, settings.preview_acme_ca),
        challenges,
        clock,
        lambda: names_of(base, ports, own=own, hook=hook),
    )
    ports.on_domains = found.poke

    def knows(host: str) -> bool:
        return host == base.domain or split_host(host, base.domain) is not None or ports.at_domain(host) is not None

    gateway.door = Door(challenges.answer, knows, base.port)
    return found


@contextlib.asynccontextmanager
async def preview_tls(
    settings: Settings, gateway: Gateway, ports: Ports, base: PreviewBase | None, clock: Clock
) -> AsyncIterator[ssl.SSLContext | None]:
    """What the listener of previews is to use; within the block certificates are kept up to date.

    Raises `host.unsupported`."""
    usual = None
    watching: list[asyncio.Task[None]] = []
    if settings.preview_cert is not None and settings.preview_key is not None:
        own = await asyncio.to_thread(Certificate, settings.preview_cert, settings.preview_key, gateway.protocols)
        usual = own.context
        watching.append(asyncio.create_task(own.watch(), name="certificate"))
    context = usual
    try:
        if settings.preview_acme and base is not None:
            certificates = build_certificates(settings, gateway, ports, base, clock)
            by_name = ByName(usual, base.domain, gateway.protocols)
            certificates.on_change = by_name.put
            await certificates.load()
            watching.append(asyncio.create_task(certificates.run(), name="certificates"))
            context = by_name.context
        yield context
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
