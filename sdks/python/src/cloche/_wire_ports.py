"""Between the JSON of the API and the records of `ports`: pure functions, no I/O."""

from __future__ import annotations

from urllib.parse import urljoin

from ._wire import Json, required, timestamp
from .errors import ProtocolError
from .ports import Port, PreviewToken


def port(data: Json, api_url: str) -> Port:
    """A port; an address that is a path leads to the API itself."""
    return Port(
        port=int(required(data, "port")),
        url=urljoin(api_url, str(required(data, "proxy_url"))),
        listening=bool(data.get("listening")),
        declared=data.get("source") == "user",
        label=data.get("label"),
        access=str(data.get("access") or "public"),
        domain=data.get("domain"),
        addresses=tuple(str(one) for one in data.get("addresses") or ()),
        pid=data.get("pid"),
        process=data.get("process"),
        raw=data,
    )


def preview_token(data: Json, api_url: str) -> PreviewToken:
    """A token with its links."""
    expires = timestamp(data.get("expires_at"))
    if expires is None:
        raise ProtocolError("the answer to a preview token has no end")
    return PreviewToken(
        token=str(required(data, "token")),
        url=urljoin(api_url, str(required(data, "url"))),
        host_url=data.get("host_url"),
        sandbox_id=str(required(data, "sandbox_id")),
        port=int(required(data, "port")),
        paths=tuple(str(one) for one in data.get("paths") or ()),
        expires_at=expires,
    )
