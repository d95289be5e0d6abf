"""Secrets that a sandbox may use without knowing them: names and values, grants as they come in JSON, and what a grant
matches. Pure; where values are kept is `store/secrets.py`, where they are put in is `netd/http/`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.names import matches
from cloche_server.core.network import SecretGrant, SecretPlace
from cloche_server.core.policy_paths import path_matches

#: Bytes of UTF-8.
MAX_VALUE: Final = 64 * 1024
MAX_GRANTS: Final = 64
#: Of each list in a grant.
MAX_ITEMS: Final = 64
MAX_PLACEHOLDER: Final = 128
MIN_PLACEHOLDER: Final = 16
#: Random bytes in a placeholder that is made here.
PLACEHOLDER_RANDOM: Final = 12

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_ENV: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_PLACEHOLDER: Final = re.compile(r"[A-Za-z0-9._~-]+")
_PATH: Final = re.compile(r"/[!-)+-~]*\*?")
#: Framing and routing: what stands there is not for a secret.
_NO_HEADERS: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "expect", "te", "trailer"}
)

#: Where the agent puts the certificate of the workspace's authority, and the authorities of the image with it.
CA_FILE: Final = "/etc/cloche/ca.pem"
CA_BUNDLE: Final = "/etc/cloche/ca-bundle.pem"
#: Defaults of the environment of a sandbox with grants: how programs are told whom to trust. Those that know only one
#: file get the bundle; what is added to a list of its own gets the single certificate.
TRUST_ENV: Final[Mapping[str, str]] = {
    "SSL_CERT_FILE": CA_BUNDLE,
    "REQUESTS_CA_BUNDLE": CA_BUNDLE,
    "CURL_CA_BUNDLE": CA_BUNDLE,
    "GIT_SSL_CAINFO": CA_BUNDLE,
    "PIP_CERT": CA_BUNDLE,
    "AWS_CA_BUNDLE": CA_BUNDLE,
    "CARGO_HTTP_CAINFO": CA_BUNDLE,
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": CA_BUNDLE,
    "NIX_SSL_CERT_FILE": CA_BUNDLE,
    "npm_config_cafile": CA_BUNDLE,
    "NODE_EXTRA_CA_CERTS": CA_FILE,
    "DENO_CERT": CA_FILE,
}


@dataclass(frozen=True, slots=True)
class SecretInfo:
    """What may be known of a secret. `version` grows with each new value; times are Unix seconds."""

    workspace: str
    name: str
    description: str | None
    version: int
    created_at: float
    updated_at: float


def _invalid(field: str, sentence: str) -> ClocheError:
    return ClocheError("request.invalid", sentence, details={"field": field})


def check_name(name: str) -> None:
    """Raises `request.invalid`."""
    if not NAME.fullmatch(name):
        raise _invalid("name", "the name of a secret has 1 to 128 letters, digits, `_`, `.` and `-`, no digit first")


def check_value(value: str) -> None:
    """Raises `request.invalid`; its sentence says nothing about the value."""
    if not value:
        raise _invalid("value", "the value of a secret is not empty")
    if len(value.encode("utf-8", "surrogatepass")) > MAX_VALUE:
        raise _invalid("value", f"the value of a secret has at most {MAX_VALUE} bytes")
    if any(character in value for character in "\0\r\n"):
        raise _invalid("value", "the value of a secret holds no NUL and no end of line")


# ------------------------------------------------------------------ matching


def grant_reaches(grant: SecretGrant, host: str, method: str, path: str) -> bool:
    """Whether the value may be put into a request like this at all."""
    return (
        any(matches(pattern, host) for pattern in grant.hosts)
        and (not grant.methods or method in grant.methods)
        and (not grant.paths or path_matches(grant.paths, path, strict=True))
    )


# ------------------------------------------------------------------ JSON


def parse_grants(raw: object, random: Callable[[int], bytes]) -> tuple[SecretGrant, ...]:
    """The `secrets` of a create. `random` gives that many fresh bytes. Raises `request.invalid` with the field."""
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes):
        raise _invalid("secrets", "secrets is a list")
    if len(raw) > MAX_GRANTS:
        raise _invalid("secrets", f"a sandbox has at most {MAX_GRANTS} secrets")
    grants = tuple(_parse_grant(item, f"secrets.{number}", random) for number, item in enumerate(raw))
    for number, grant in enumerate(grants):
        for other in grants[:number]:
            if grant.env is not None and grant.env == other.env:
                raise _invalid(f"secrets.{number}.env", "two secrets cannot be in one variable")
            if grant.placeholder in other.placeholder or other.placeholder in grant.placeholder:
                raise _invalid(f"secrets.{number}.placeholder", "no placeholder is a part of another one")
    return grants


def _parse_grant(raw: object, where: str, random: Callable[[int], bytes]) -> SecretGrant:
    if not isinstance(raw, Mapping):
        raise _invalid(where, "each secret is an object")
    secret = raw.get("secret")
    if not isinstance(secret, str) or not NAME.fullmatch(secret):
        raise _invalid(f"{where}.secret", "secret is the name of a secret of the workspace")
    hosts = _list(raw, "hosts", where, _host)
    if not hosts:
        raise _invalid(f"{where}.hosts", "hosts names at least one host that the value may go to")
    headers = _list(raw, "headers", where, _header)
    places = tuple(SecretPlace(one) for one in _list(raw, "in", where, _place)) or (SecretPlace.HEADER,)
    if headers and SecretPlace.HEADER not in places:
        raise _invalid(f"{where}.headers", "headers are named, but `in` has no `header`")
    return SecretGrant(
        secret=secret,
        placeholder=_placeholder(raw.get("placeholder"), secret, f"{where}.placeholder", random),
        hosts=hosts,
        env=_env(raw.get("env"), f"{where}.env"),
        methods=_list(raw, "methods", where, _method),
        paths=_list(raw, "paths", where, _path),
        headers=headers,
        places=places,
        pass_hosts=_list(raw, "pass_hosts", where, _host),
    )


def _list(raw: Mapping[str, Any], name: str, where: str, check: Callable[[str, str], str]) -> tuple[str, ...]:
    found = raw.get(name)
    if found is None:
        return ()
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or len(found) > MAX_ITEMS:
        raise _invalid(f"{where}.{name}", f"{name} is a list of at most {MAX_ITEMS} texts")
    result = []
    for number, item in enumerate(found):
        place = f"{where}.{name}.{number}"
        if not isinstance(item, str):
            raise _invalid(place, f"{name} holds texts only")
        result.append(check(item, place))
    return tuple(dict.fromkeys(result))


def _host(text: str, where: str) -> str:
    host = text.lower().removesuffix(".")
    name = host.removeprefix("*.")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise _invalid(
            where, "a host is a name like `api.example.com` or `*.example.com`, without scheme, port and path"
        )
    if labels[-1].isdigit():
        raise _invalid(where, "a value goes to names only, whose certificate can be checked, not to addresses")
    if host.startswith("*.") and len(labels) < 2:
        raise _invalid(where, "a wildcard needs at least two labels below it, as in `*.example.com`")
    return host


def _header(text: str, where: str) -> str:
    name = text.lower()
    if not _TOKEN.fullmatch(name):
        raise _invalid(where, "this is not the name of a header")
    if name in _NO_HEADERS:
        raise _invalid(where, f"no secret may be in the header {name}")
    return name


def _method(text: str, where: str) -> str:
    if not _TOKEN.fullmatch(text):
        raise _invalid(where, "this is not an HTTP method")
    return text.upper()


def _path(text: str, where: str) -> str:
    if len(text) > 2048 or not (text == "*" or _PATH.fullmatch(text)):
        raise _invalid(where, "a path begins with `/`, is percent-encoded, and may end in `*`")
    return "/*" if text == "*" else text


def _place(text: str, where: str) -> str:
    if text not in set(SecretPlace):
        raise _invalid(where, "a secret can be in `header`, `query` or `body`")
    return text


def _env(found: object, where: str) -> str | None:
    if found is None:
        return None
    if not isinstance(found, str) or not _ENV.fullmatch(found):
        raise _invalid(where, "env is the name of a variable: letters, digits and `_`, no digit first")
    return found


def _placeholder(found: object, secret: str, where: str, random: Callable[[int], bytes]) -> str:
    if found is None:
        # The name in it is for people who meet it in an error; it is the random part that makes it unique.
        return f"cloche-secret-{secret.lower()[:80]}-{random(PLACEHOLDER_RANDOM).hex()}"
    if not isinstance(found, str) or not _PLACEHOLDER.fullmatch(found):
        raise _invalid(where, "a placeholder has letters, digits, `-`, `.`, `_` and `~` only")
    if not MIN_PLACEHOLDER <= len(found) <= MAX_PLACEHOLDER:
        raise _invalid(where, f"a placeholder has {MIN_PLACEHOLDER} to {MAX_PLACEHOLDER} characters")
    return found


def shown_grant(grant: SecretGrant) -> dict[str, Any]:
    """As in the JSON of a sandbox; lists that are empty are left out."""
    lists = {
        "hosts": grant.hosts,
        "methods": grant.methods,
        "paths": grant.paths,
        "headers": grant.headers,
        "in": tuple(place.value for place in grant.places),
        "pass_hosts": grant.pass_hosts,
    }
    shown: dict[str, Any] = {"secret": grant.secret, "placeholder": grant.placeholder}
    if grant.env is not None:
        shown["env"] = grant.env
    return shown | {name: list(values) for name, values in lists.items() if values}


def guest_env(grants: Sequence[SecretGrant]) -> dict[str, str]:
    """What programs find in their environment when their HTTPS may be read: whom to trust, and placeholders."""
    return {**TRUST_ENV, **{grant.env: grant.placeholder for grant in grants if grant.env is not None}}
