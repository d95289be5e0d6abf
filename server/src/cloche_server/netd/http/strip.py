"""Values out of answers: a server that got a value may send it back, in the spellings that echoes usually have."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, quote_plus

from cloche_server.netd.http.judge import Headers, Put, Value
from cloche_server.netd.http.scan import Literals

#: Shorter values stand in anything by chance; taking them out would damage what has nothing to do with them (bytes).
MIN_VALUE: Final = 8
_FILL: Final = b"*"


def _spellings(value: Value) -> dict[bytes, bytes]:
    """How a value may come back, each with what the guest gets instead."""
    raw, instead = value.value, value.placeholder
    text = raw.decode("utf-8", "surrogateescape")
    found = {
        base64.b64encode(raw): base64.b64encode(instead),
        base64.urlsafe_b64encode(raw): base64.urlsafe_b64encode(instead),
    }
    plain = [
        quote(raw, safe=""),
        quote(raw),
        quote_plus(raw),
        quote(raw, safe="").lower(),
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
        json.dumps(text)[1:-1].replace("/", "\\/"),
        html.escape(text),
    ]
    return found | {one.encode("utf-8", "surrogateescape"): instead for one in plain} | {raw: instead}


class Stripper:
    """For the answer to one request."""

    def __init__(self, values: Sequence[Value], put: Put) -> None:
        instead: dict[bytes, bytes] = {}
        for value in values:
            if len(value.value) >= MIN_VALUE:
                instead |= _spellings(value)
        instead |= dict(put.basics)
        self._instead = list(instead.values())
        self._literals = Literals(list(instead))

    def __bool__(self) -> bool:
        return bool(self._instead)

    def headers(self, headers: Headers) -> Headers:
        """Without values."""
        return [(name, self._whole(value)) for name, value in headers] if self else headers

    def reason(self, reason: bytes) -> bytes:
        return self._whole(reason) if self else reason

    def _whole(self, data: bytes) -> bytes:
        made, end = self._replace(data, fixed=False, last=True)
        return made if end == len(data) else data

    def _replace(self, data: bytes, *, fixed: bool, last: bool) -> tuple[bytes, int]:
        """What goes on, and how much of `data` that stands for."""
        made, at = [], 0
        while (hit := self._literals.find(data, at)) is not None:
            made.append(data[at : hit.start])
            made.append(_fitted(self._instead[hit.index], hit.end - hit.start) if fixed else self._instead[hit.index])
            at = hit.end
        end = len(data) if last else self._literals.held(data, at)
        return (b"".join([*made, data[at:end]]) if made else data[at:end]), end

    def body(self, *, fixed: bool) -> BodyStripper:
        """For a body in pieces. `fixed`: its length has been told, so what stands instead of a value is cut or filled
        to its length."""
        return BodyStripper(self, fixed=fixed)


class BodyStripper:
    def __init__(self, stripper: Stripper, *, fixed: bool) -> None:
        self._stripper = stripper
        self._fixed = fixed
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        data = self._kept + data
        made, end = self._stripper._replace(data, fixed=self._fixed, last=False)
        self._kept = data[end:]
        return made

    def finish(self) -> bytes:
        data, self._kept = self._kept, b""
        return self._stripper._replace(data, fixed=self._fixed, last=True)[0]


def _fitted(instead: bytes, length: int) -> bytes:
    return instead[:length].ljust(length, _FILL)
