"""Between the JSON of the API and the records of `ssh`."""

from __future__ import annotations

from ._wire import Json, required, timestamp
from .ssh import SshKey, SshServer


def ssh_key(data: Json) -> SshKey:
    """A key that is accepted."""
    return SshKey(
        id=str(required(data, "id")),
        kind=str(data.get("kind") or ""),
        public_key=str(data.get("public_key") or ""),
        fingerprint=str(data.get("fingerprint") or ""),
        comment=str(data.get("comment") or ""),
        sandbox_id=data.get("sandbox_id"),
        created_at=timestamp(data.get("created_at")),
        expires_at=timestamp(data.get("expires_at")),
    )


def ssh_server(data: Json) -> SshServer:
    """Where SSH is served."""
    if not data.get("enabled"):
        return SshServer(enabled=False)
    key, name = str(data.get("host_key") or ""), str(data.get("fingerprint") or "")
    return SshServer(True, int(required(data, "port")), key, name)
