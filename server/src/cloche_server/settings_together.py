"""What settings that are each in range say against one another."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final

from cloche_server.core import acme

if TYPE_CHECKING:
    from cloche_server.settings import Settings

#: `<data>/run/.staging-<pid>-<start>-<random>/agent.sock` must fit into the 107 bytes of a Unix socket address.
MAX_DATA_DIR_LENGTH: Final = 50

#: As browsers send it: lower case, no path, no port that goes without saying.
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")


def obstacle(settings: Settings) -> str | None:
    """What is wrong, as a sentence; None: nothing."""
    if len(str(settings.data)) > MAX_DATA_DIR_LENGTH:
        return (
            f"data = {settings.data}: the path is longer than {MAX_DATA_DIR_LENGTH} characters, "
            "and the Unix sockets below it would not fit; choose a shorter one"
        )
    if settings.default_memory_mb > settings.max_memory_mb or settings.default_cpus > settings.max_cpus:
        return "the default size of a sandbox is above the largest size that is allowed"
    for origin in settings.origins:
        if _ORIGIN.fullmatch(origin) is None:
            return (
                f"cors_origins: {origin!r} is not an origin; write scheme, name and port as browsers do, without a "
                "path (`https://app.example.com`), and name each one: `*` is not taken"
            )
    if (settings.preview_cert is None) != (settings.preview_key is None):
        return "preview_cert and preview_key go together"
    if settings.preview_url and not settings.preview_url.startswith(("http://", "https://")):
        return f"preview_url = {settings.preview_url}: it begins with http:// or https://"
    if settings.exec_default_timeout > settings.exec_max_timeout:
        return "exec_default_timeout is above exec_max_timeout"
    return acme.obstacle(settings) or _network(settings)


def _network(settings: Settings) -> str | None:
    for name, text, parse in (
        ("network_never", settings.network_never, ipaddress.ip_network),
        ("network_resolvers", settings.network_resolvers, ipaddress.ip_address),
    ):
        for part in filter(None, (part.strip() for part in text.split(","))):
            try:
                parse(part)
            except ValueError:
                return f"{name}: {part!r} is not {'a network' if 'never' in name else 'an address'}"
    if settings.network_proxy and not settings.network_proxy.startswith(("http://", "socks5://")):
        return "network_proxy begins with http:// or socks5://"  # never quoted: it may hold a password
    return None
