"""What netd needs to read the HTTPS of a workspace: its authority, and the values of its secrets as they are now."""

from __future__ import annotations

from cloche_server.app.secrets import Secrets
from cloche_server.app.supervisor import Supervisor
from cloche_server.core.errors import ClocheError
from cloche_server.core.ports import Network
from cloche_server.core.records import Sandbox
from cloche_server.telemetry import log

_log = log.get("broker")


class Broker:
    """Hands the material of workspaces to netd: before a sandbox needs it, and whenever it changes."""

    def __init__(self, secrets: Secrets, supervisor: Supervisor, network: Network) -> None:
        self._secrets = secrets
        self._supervisor = supervisor
        self._network = network
        secrets.on_change.append(self._changed)

    async def ready(self, record: Sandbox) -> str | None:
        """Before the network of a sandbox is opened; returns the certificate that it has to trust, None when nothing of
        it is read. Raises `secret.unavailable`, `secret.not_found`, `network.unavailable`."""
        if not record.is_read or not self._network.enabled:
            return None
        missing = await self._secrets.missing(record.workspace, {grant.secret for grant in record.grants})
        if missing:
            raise ClocheError(
                "secret.not_found",
                f"the workspace has no secret {missing[0]}; `PUT /v1/secrets/{missing[0]}` makes it",
                details={"secrets": missing},
            )
        return await self._provide(record.workspace)

    async def _provide(self, workspace: str) -> str:
        material = await self._secrets.material(workspace)
        authority = {"certificate": material.ca_cert_pem, "key": material.ca_key_pem}
        await self._network.provide(workspace, dict(material.values), authority)
        return material.ca_cert_pem

    async def _changed(self, workspace: str) -> None:
        entries = self._supervisor.entries()
        if any(entry.record.workspace == workspace and entry.record.is_read for entry in entries):
            try:
                await self._provide(workspace)
            except ClocheError as error:  # a netd that comes is given what is true then
                _log.error("secrets.not_handed_over", workspace=workspace, code=error.code)
