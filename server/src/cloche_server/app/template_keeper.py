"""Who uses a template; and the end of those that nobody can use any more.

An older version of a promoted template, and a template that came with an archive, have no name that a create finds:
when no sandbox and no snapshot lies over them, they go. So do boot files that came with an archive.
"""

from __future__ import annotations

import asyncio

from cloche_server.app.pools import Pools
from cloche_server.core.errors import ClocheError
from cloche_server.storage.snapshots import SnapshotCatalog
from cloche_server.storage.templates import TemplateCatalog, TemplateMeta
from cloche_server.store.sandboxes import SandboxStore
from cloche_server.telemetry import log

_log = log.get("templates")

#: Below the data directory: kernels, initramfs and root images that came with archives, by their digests.
BOOT = "boot"


class TemplateKeeper:
    def __init__(
        self, templates: TemplateCatalog, snapshots: SnapshotCatalog, store: SandboxStore, pools: Pools
    ) -> None:
        self._templates = templates
        self._snapshots = snapshots
        self._store = store
        self._pools = pools
        #: What nobody used when `prune` looked before; what is being made just then has found its user by now.
        self._unused: set[str] = set()

    async def check_unused(self, metas: list[TemplateMeta]) -> None:
        """Raises `template.in_use`."""
        over = self._snapshots.ids_of_templates()
        for meta in metas:
            template_id = meta.template.id
            users = await self._store.template_users(template_id)
            if users or template_id in over:
                who = f"{users} sandboxes" if users else "snapshots"
                raise ClocheError(
                    "template.in_use", f"{template_id} is used by {who}; delete them first", details={"id": template_id}
                )

    async def remove(self, meta: TemplateMeta) -> bool:
        """False when a snapshot came to lie over it meanwhile: then it stays."""
        return await asyncio.to_thread(self._remove, meta)

    def _remove(self, meta: TemplateMeta) -> bool:
        with self._templates.use_lock:
            if meta.template.id in self._snapshots.ids_of_templates():
                return False
            self._templates.remove(meta)
            return True

    async def prune(self) -> None:
        """Removes what nobody used, now and at the last call."""
        if self._snapshots.unreadable:
            return  # nobody knows what these lie over
        used = {record.template_id for record in await self._store.living()}
        used |= self._snapshots.ids_of_templates()
        used |= {template.id for template in self._pools.templates}
        unused = {meta.template.id: meta for meta in self._superseded() if meta.template.id not in used}
        for template_id in unused.keys() & self._unused:
            if await self.remove(unused[template_id]):
                _log.info("template.pruned", template_id=template_id)
        self._unused = unused.keys() | await asyncio.to_thread(self._prune_boot, self._unused)

    def _superseded(self) -> list[TemplateMeta]:
        metas = self._templates.all()
        newest = {(m.workspace, m.template.name, m.fingerprint): m.template.id for m in metas if not m.hidden}
        return [
            m
            for m in metas
            if m.hidden
            or (m.workspace is not None and newest[m.workspace, m.template.name, m.fingerprint] != m.template.id)
        ]

    def _prune_boot(self, before: set[str]) -> set[str]:
        """The boot files of archives that no template names; those that were in `before` are removed."""
        root = self._templates.root.parent / BOOT
        if not root.is_dir():
            return set()
        with self._templates.boot_lock:
            metas = self._templates.all()
            named = {path.name for m in metas for path in (m.boot.kernel, m.boot.initrd, m.boot.root_image)}
            unused = {path.name for path in root.iterdir()} - named
            for name in unused & before:
                (root / name).unlink(missing_ok=True)
        return unused
