"""What a guest is answered instead of what it asked for. Codes are for programs in the guest, and stand in
`docs/network.md`; nothing of a secret but its name is ever told."""

from __future__ import annotations

import json
from typing import Final

import h11

VIOLATION: Final = "network.secret_violation"
_REASONS: Final = {
    400: b"Bad Request",
    403: b"Forbidden",
    408: b"Request Timeout",
    421: b"Misdirected Request",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
    502: b"Bad Gateway",
    504: b"Gateway Timeout",
}


class Refusal(Exception):
    """A request that is not carried, or not to its end. `rule`: word for the decision log, when it belongs there."""

    def __init__(
        self, status: int, code: str, sentence: str, *, rule: str = "", host: str = "", secret: str = ""
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code
        self.rule = rule
        self.host = host
        self.secret = secret

    def body(self) -> bytes:
        told = {"error": str(self), "code": self.code}
        told |= {name: value for name in ("rule", "secret", "host") if (value := getattr(self, name))}
        return json.dumps(told).encode("ascii") + b"\n"

    def events(self, method: bytes | None) -> list[h11.Event]:
        """The answer, after which the connection ends."""
        body = self.body()
        head = h11.Response(
            status_code=self.status,
            reason=_REASONS[self.status],
            headers=[
                (b"Content-Type", b"application/json"),
                (b"Content-Length", b"%d" % len(body)),
                (b"Cache-Control", b"no-store"),
                (b"Connection", b"close"),
            ],
        )
        return [head, *([] if method == b"HEAD" else [h11.Data(data=body)]), h11.EndOfMessage()]


def violation(secret: str, host: str, sentence: str) -> Refusal:
    """A placeholder where it must not be."""
    return Refusal(403, VIOLATION, sentence, rule="violation", host=host, secret=secret)


def unusable(secret: str, host: str, sentence: str) -> Refusal:
    """A placeholder that may be here, but whose value cannot."""
    return Refusal(403, "network.secret_unusable", sentence, rule="secret-unusable", host=host, secret=secret)


def upstream_failed(host: str, sentence: str) -> Refusal:
    return Refusal(502, "network.upstream_failed", sentence, host=host)


def untrusted(host: str) -> Refusal:
    sentence = "the certificate of the server cannot be verified, so nothing was sent to it"
    return Refusal(502, "network.upstream_untrusted", sentence, rule="untrusted", host=host)
