"""What is told about SSH: keys that are accepted, and how the server is reached."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class SshKey:
    """A public key that opens sandboxes. `sandbox_id`: the only one, else all of the workspace. `fingerprint` as
    `ssh-keygen -l` shows it."""

    id: str
    kind: str
    public_key: str
    fingerprint: str
    comment: str
    sandbox_id: str | None = None
    created_at: datetime | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class SshServer:
    """Where sandboxes are reached by SSH: `port` of the server, and its `host_key` as in a `known_hosts` file. Without
    `enabled` they are not."""

    enabled: bool
    port: int = 0
    host_key: str = ""
    fingerprint: str = ""
