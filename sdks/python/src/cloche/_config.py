"""Connection settings: arguments, then the environment, then nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .errors import ConfigError

ENV_URL = "CLOCHE_API_URL"
ENV_KEY = "CLOCHE_API_KEY"

DEFAULT_TIMEOUT = 30.0
DEFAULT_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the server is and how long to wait for it."""

    api_url: str
    api_key: str = field(repr=False)
    timeout: float = DEFAULT_TIMEOUT
    max_retry_seconds: float = DEFAULT_RETRY_SECONDS


def resolve(
    api_url: str | None = None,
    api_key: str | None = None,
    timeout: float | None = None,
    max_retry_seconds: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Put the settings together; what is missing is said by name."""
    env = os.environ if environ is None else environ
    url = api_url or env.get(ENV_URL, "")
    key = api_key or env.get(ENV_KEY, "")
    missing = [f"{name} ({arg}=…)" for name, arg, value in _named(url, key) if not value.strip()]
    if missing:
        raise ConfigError(f"the Cloche server is not configured: set {' and '.join(missing)}")
    wait = DEFAULT_TIMEOUT if timeout is None else timeout
    budget = DEFAULT_RETRY_SECONDS if max_retry_seconds is None else max_retry_seconds
    if wait <= 0 or budget < 0:
        raise ConfigError("timeout must be above 0 and max_retry_seconds not below 0")
    return Settings(normalise_url(url), _checked_key(key.strip()), wait, budget)


def _named(url: str, key: str) -> list[tuple[str, str, str]]:
    return [(ENV_URL, "api_url", url), (ENV_KEY, "api_key", key)]


def _checked_key(key: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("the API key holds characters that a key cannot have")
    return key


def normalise_url(url: str) -> str:
    """`https://host[:port][/prefix]`, with or without a trailing slash or `/v1`."""
    text = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        valid = False
        parts = urlsplit("")
    if not valid:
        raise ConfigError(f"the server address {url!r} is not of the form http(s)://host[:port]")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("the server address must not carry a user name, a password, a query or a fragment")
    return text
