"""Which templates there are, and the end of those that a workspace has promoted."""

from __future__ import annotations

from cloche_server.app.template_keeper import TemplateKeeper
from cloche_server.core.errors import ClocheError
from cloche_server.storage.templates import Family, TemplateCatalog
from cloche_server.telemetry import log

_log = log.get("templates")


class Templates:
    def __init__(self, catalog: TemplateCatalog, keeper: TemplateKeeper) -> None:
        self._catalog = catalog
        self._keeper = keeper

    def list(self, workspace: str) -> list[Family]:
        return self._catalog.families(workspace)

    def get(self, workspace: str, name: str) -> Family:
        """By name or alias. Raises `template.not_found`."""
        resolved = self._catalog.resolve(name, workspace)
        for family in self._catalog.families(workspace):
            if family.name == resolved:
                return family
        raise ClocheError("template.not_found", "template not found; `GET /v1/templates` lists what there is")

    async def remove(self, workspace: str, name: str) -> None:
        """All versions of a template that the workspace has promoted. Raises `template.not_found`, `template.in_use`,
        and `request.invalid` for one of all workspaces."""
        family = self.get(workspace, name)
        if family.workspace is None:
            raise ClocheError(
                "request.invalid",
                f"the template {family.name} belongs to all workspaces; "
                "only the operator of the server removes it, with `cloche-server template rm`",
                details={"field": "name"},
            )
        doomed = [m for m in self._catalog.visible(workspace) if m.template.name == family.name]
        await self._keeper.check_unused(doomed)
        for meta in doomed:
            if not await self._keeper.remove(meta):
                await self._keeper.check_unused([meta])
        _log.info("template.removed", name=family.name, versions=len(doomed))
