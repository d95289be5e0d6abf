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
    505: b"HTTP Version Not Supported",
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


#: How a connection of HTTP/2 begins, and the word of the log for it.
PREFACE: Final = b"PRI * HTTP/2.0\r\n"
HTTP2: Final = "http2"
_SETTINGS: Final = bytes(3) + b"\x04" + bytes(5)
_HTTP_1_1_REQUIRED: Final = 13


def http2() -> Refusal:
    sentence = "HTTP/2, and gRPC with it, is not spoken to names whose requests are read; use HTTP/1.1"
    return Refusal(505, "network.bad_request", sentence, rule=HTTP2)


def goaway(refusal: Refusal) -> bytes:
    """The refusal in HTTP/2: settings, and that the connection ends because HTTP/1.1 is required."""
    told = refusal.body()
    head = (8 + len(told)).to_bytes(3, "big") + b"\x07" + bytes(5)
    return _SETTINGS + head + bytes(4) + _HTTP_1_1_REQUIRED.to_bytes(4, "big") + told


def upstream_tls(host: str, reason: str) -> Refusal:
    """`reason`: the word of OpenSSL."""
    if "CERTIFICATE_REQUIRED" in reason:
        sentence = "the server wants a certificate of its client, and there is none to give; nothing was sent to it"
        return Refusal(502, "network.upstream_failed", sentence, rule="client-certificate", host=host)
    words = reason.lower().replace("_", " ")
    sentence = f"the server does not speak TLS with us ({words}); perhaps it wants a certificate of its client"
    return Refusal(502, "network.upstream_failed", sentence, rule="upstream-tls", host=host)


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
