"""Which templates there are."""

from __future__ import annotations

from cloche_server.core.errors import ClocheError
from cloche_server.storage.templates import Family, TemplateCatalog


class Templates:
    def __init__(self, catalog: TemplateCatalog) -> None:
        self._catalog = catalog

    def list(self) -> list[Family]:
        return self._catalog.families()

    def get(self, name: str) -> Family:
        """By name or alias. Raises `template.not_found`."""
        resolved = self._catalog.resolve(name)
        for family in self._catalog.families():
            if family.name == resolved:
                return family
        raise ClocheError("template.not_found", "template not found; `GET /v1/templates` lists what there is")
