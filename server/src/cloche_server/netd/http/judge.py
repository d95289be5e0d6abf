"""Where placeholders stand in a request, and what becomes of each: the value, nothing (they may pass), or a refusal."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from cloche_server.core.names import matches
from cloche_server.core.network import SecretGrant, SecretPlace
from cloche_server.core.secrets import grant_reaches
from cloche_server.netd.http.refusal import Refusal, unusable, violation
from cloche_server.netd.http.request import Asked
from cloche_server.netd.http.scan import Hit, Spelling, placeholders

Headers = list[tuple[bytes, bytes]]

#: The largest body of fixed length that a value is put into (bytes).
MAX_PUT_BODY: Final = 16 * 1024 * 1024
_BASIC: Final = re.compile(rb"(?P<scheme>basic +)(?P<token>[A-Za-z0-9+/=_-]+) *", re.IGNORECASE)
_FIELD_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_CREDENTIALS: Final = (b"authorization", b"proxy-authorization")


@dataclass(frozen=True, slots=True)
class Value:
    """A value that may be put into this request. `secret`: its name."""

    secret: str
    placeholder: bytes
    value: bytes = field(repr=False)


@dataclass(slots=True)
class Put:
    """What was put in: the server knows it from now on. `secrets`: their names. `basics`: whole credentials, as the
    server got them and as the guest had written them."""

    secrets: dict[str, None] = field(default_factory=dict)
    basics: list[tuple[bytes, bytes]] = field(default_factory=list, repr=False)

    @property
    def any(self) -> bool:
        return bool(self.secrets)


class Judge:
    """One request. `secure`: it goes over TLS whose server was verified; nothing else gets a value. `secret` gives the
    value that a name has now; it is asked once, so that a rotation does not change a request half-way."""

    def __init__(
        self, grants: Sequence[SecretGrant], asked: Asked, *, secure: bool, secret: Callable[[str], str | None]
    ) -> None:
        self.asked = asked
        self.grants = tuple(grants)
        self.scanner = placeholders(tuple(grant.placeholder for grant in grants))
        self.put = Put()
        self._reaches = [secure and grant_reaches(grant, asked.host, asked.method, asked.path) for grant in grants]
        self._passes = [any(matches(host, asked.host) for host in grant.pass_hosts) for grant in grants]
        self._values: list[bytes | None] = []
        for grant, reaches in zip(self.grants, self._reaches, strict=True):
            value = secret(grant.secret) if reaches else None
            self._values.append(None if value is None else value.encode("utf-8", "surrogatepass"))

    def values(self) -> list[Value]:
        """All that could be put into this request, in whatever place."""
        pairs = zip(self.grants, self._values, strict=True)
        return [Value(g.secret, g.placeholder.encode("ascii"), value) for g, value in pairs if value is not None]

    @property
    def may_put_in_body(self) -> bool:
        pairs = zip(self.grants, self._reaches, strict=True)
        return any(reaches and SecretPlace.BODY in grant.places for grant, reaches in pairs)

    # -------------------------------------------------------------- head

    def target(self) -> bytes:
        """The target of the request as it goes on. Raises `Refusal`."""
        path, mark, query = self.asked.target.partition(b"?")
        self._only_pass(path)
        if not mark:
            return path
        return path + mark + self.rewrite(query, SecretPlace.QUERY, _percent)

    def headers(self, headers: Headers) -> Headers:
        """The headers of the request as they go on. Raises `Refusal`."""
        if not self.grants:
            return headers
        self._only_pass(self.asked.method.encode("ascii"))
        for name, _ in headers:
            self._only_pass(name.lower())
        return [(name, self._header(name.lower(), value)) for name, value in headers]

    def trailers(self, headers: Headers) -> Headers:
        """Nothing is put into trailers. Raises `Refusal`."""
        for name, value in headers:
            self._only_pass(name.lower())
            self._only_pass(value)
        return headers

    def _header(self, name: bytes, value: bytes) -> bytes:
        if name == b"host":
            self._only_pass(value)
            return value
        if name in _CREDENTIALS and (basic := _BASIC.fullmatch(value)):
            return self._basic(name, value, basic["scheme"], basic["token"])
        return self._checked(self.rewrite(value, SecretPlace.HEADER, _spelled, name.decode("ascii")))

    def _basic(self, name: bytes, value: bytes, scheme: bytes, token: bytes) -> bytes:
        try:
            plain = base64.b64decode(token.replace(b"-", b"+").replace(b"_", b"/") + b"=" * (-len(token) % 4))
        except (binascii.Error, ValueError):
            plain = b""
        made = self.rewrite(plain, SecretPlace.HEADER, _plain, name.decode("ascii"))
        if made == plain:  # a placeholder may still stand in it as it is
            return self._checked(self.rewrite(value, SecretPlace.HEADER, _spelled, name.decode("ascii")))
        encoded = base64.b64encode(made)
        self.put.basics.append((encoded, token))
        return scheme + encoded

    def _checked(self, value: bytes) -> bytes:
        if self.put.any and not _FIELD_VALUE.fullmatch(value):
            raise unusable("", self.asked.host, "the value of a secret has characters that no header can have")
        return value

    # -------------------------------------------------------------- each place

    def rewrite(
        self, data: bytes, place: SecretPlace, spell: Callable[[bytes, Spelling], bytes], header: str | None = None
    ) -> bytes:
        """`data`, which is whole, with the values in it. Raises `Refusal`."""
        made, at = [], 0
        while (hit := self.scanner.find(data, at)) is not None:
            made.append(data[at : hit.start])
            made.append(self.instead(data, hit, place, spell, header))
            at = hit.end
        return b"".join([*made, data[at:]]) if made else data

    def instead(
        self,
        data: bytes,
        hit: Hit,
        place: SecretPlace | None,
        spell: Callable[[bytes, Spelling], bytes],
        header: str | None = None,
    ) -> bytes:
        """What stands there then. Raises `Refusal`."""
        grant = self.grants[hit.index]
        if self._reaches[hit.index] and place in grant.places and self._in_header(grant, header):
            value = self._values[hit.index]
            if value is None:
                raise unusable(grant.secret, self.asked.host, "the workspace has no secret of this name any more")
            self.put.secrets[grant.secret] = None
            return spell(value, hit.spelling)
        if self._passes[hit.index]:
            return data[hit.start : hit.end]
        raise self.violated(hit.index)

    @staticmethod
    def _in_header(grant: SecretGrant, header: str | None) -> bool:
        return header is None or not grant.headers or header in grant.headers

    def violated(self, index: int) -> Refusal:
        sentence = "the request holds the placeholder of a secret that may not be used in this way, and was not sent"
        return violation(self.grants[index].secret, self.asked.host, sentence)

    def _only_pass(self, data: bytes) -> None:
        """For places that no value is put into."""
        at = 0
        while (hit := self.scanner.find(data, at)) is not None:
            self.instead(data, hit, None, _plain)
            at = hit.end


# ------------------------------------------------------------------ spelling a value


def _plain(value: bytes, _how: Spelling) -> bytes:
    return value


def _percent(value: bytes, _how: Spelling) -> bytes:
    return quote(value, safe="").encode("ascii")


def _json(value: bytes, _how: Spelling) -> bytes:
    return json.dumps(value.decode("utf-8", "replace"))[1:-1].encode("ascii")


def _spelled(value: bytes, how: Spelling) -> bytes:
    """In the way in which the placeholder was."""
    if how is Spelling.PERCENT:
        return _percent(value, how)
    return _json(value, how) if how is Spelling.JSON else value


def body_spelling(content_type: bytes) -> Callable[[bytes, Spelling], bytes]:
    kind = content_type.partition(b";")[0].strip().lower()
    if kind == b"application/x-www-form-urlencoded":
        return _percent
    if kind == b"application/json" or kind.endswith(b"+json"):
        return _json
    return _spelled


class BodyRewriter:
    """The body of one request, in pieces. `fixed`: its length has been told, so no value can be put in."""

    def __init__(self, judge: Judge, content_type: bytes, *, fixed: bool) -> None:
        self._judge = judge
        self._spell = body_spelling(content_type)
        self._fixed = fixed
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        """What can go on now. Raises `Refusal` before anything of a placeholder has."""
        return self._go_on(self._kept + data, last=False)

    def finish(self) -> bytes:
        return self._go_on(self._kept, last=True)

    def _go_on(self, data: bytes, *, last: bool) -> bytes:
        judge, made, at = self._judge, [], 0
        while (hit := judge.scanner.find(data, at)) is not None:
            made.append(data[at : hit.start])
            put = judge.instead(data, hit, SecretPlace.BODY, self._spell)
            if self._fixed and put != data[hit.start : hit.end]:
                sentence = f"a value is put into bodies of known length only up to {MAX_PUT_BODY} bytes"
                raise unusable(judge.grants[hit.index].secret, judge.asked.host, sentence)
            made.append(put)
            at = hit.end
        end = len(data) if last else judge.scanner.held(data, at)
        self._kept = data[end:]
        return b"".join([*made, data[at:end]]) if made else data[at:end]
