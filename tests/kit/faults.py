"""A real server that kills itself with SIGKILL at a chosen moment: `server.command = faults.COMMAND`.

`arm(server, "QemuMachine.restore:before")` chooses the moment: the next call of that method is not begun
(`before`), or has just done its work (`after`). `:2` at the end means the second call from now on, and
`:1:qemu` that not the server dies but the machine it has started last. `qmp.stop:after` is about one QMP command.
The product has no such hook; this program lays itself around the methods of the server that it runs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.server import Server

COMMAND: list[str | Path] = [sys.executable, Path(__file__)]
ARMED = "armed"

#: Class or module by the name that moments use, and where it is.
PLACES = {
    "Creator": "cloche_server.app.create",
    "Machines": "cloche_server.app.machines",
    "Pools": "cloche_server.app.pools",
    "Baker": "cloche_server.app.bake",
    "Supervisor": "cloche_server.app.supervisor",
    "SandboxStore": "cloche_server.store.sandboxes",
    "IdempotencyStore": "cloche_server.store.tokens",
    "QemuEngine": "cloche_server.engine.qemu.driver",
    "QemuMachine": "cloche_server.engine.qemu.machine",
    "GuestClient": "cloche_server.guest.client",
    "TemplateCatalog": "cloche_server.storage.templates",
    "present": "cloche_server.api",
    "Layers": "cloche_server.storage.layers",
    "SnapshotCatalog": "cloche_server.storage.snapshots",
    "saved": "cloche_server.storage",
    "sleep": "cloche_server.app",
}
POINTS = (
    "Creator._reserve",
    "SandboxStore.insert",
    "SandboxStore.update",
    "SandboxStore.forget",
    "QemuEngine.launch",
    "QemuEngine._spawn",
    "QemuMachine.connect",
    "QemuMachine.command",
    "QemuMachine.restore",
    "QemuMachine.kill",
    "QemuMachine.save_device_state",
    "QemuMachine.pause",
    "QemuMachine.resume",
    "GuestClient.connect",
    "GuestClient.renew",
    "GuestClient.quiesce",
    "GuestClient.freeze",
    "GuestClient.thaw",
    "Machines.remove_directory",
    "Machines.relaunch",
    "Machines.release_layer",
    "Layers.create",
    "SnapshotCatalog.publish",
    "SnapshotCatalog.remove",
    "saved.write",
    "sleep._use_up",
    "TemplateCatalog.publish",
    "Baker._prove",
    "present.sandbox",
    "present.fork_tree",
    "present.snapshot",
)


def arm(server: Server, moment: str | None) -> None:
    """Chooses the moment of the server's death; None: it lives."""
    path = server.data / ARMED
    if moment is None:
        path.unlink(missing_ok=True)
        return
    name = moment.split(":")[0]
    assert name in POINTS or name.startswith("qmp."), f"{name} is not among the points of this module"
    path.with_suffix(".new").write_text(moment)
    path.with_suffix(".new").replace(path)


class _Bomb:
    def __init__(self, armed: Path) -> None:
        self._armed = armed
        self._data = armed.parent
        self._moment = ""
        self._calls = 0

    def pass_by(self, names: tuple[str, ...], when: str) -> None:
        try:
            moment = self._armed.read_text()
        except OSError:
            return
        if moment != self._moment:
            self._moment, self._calls = moment, 0
        parts = moment.split(":")
        wanted, at, count, victim = [*parts, *("", "before", "1", "server")[len(parts) :]]
        if at != when or wanted not in names:
            return
        self._calls += 1
        if self._calls >= int(count):
            self._armed.unlink(missing_ok=True)
            if victim == "server":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                self._kill_newest()

    def _kill_newest(self) -> None:
        machines = [
            (int((entry / "stat").read_text().rpartition(")")[2].split()[19]), int(entry.name))
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and f"{self._data}/sandboxes/" in f"{_link(entry / 'cwd')}/"
        ]
        if machines:
            os.kill(max(machines)[1], signal.SIGKILL)
            time.sleep(0.2)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _wrapped(function: Callable[..., Any], name: str, bomb: _Bomb) -> Callable[..., Any]:
    def names(args: tuple[Any, ...]) -> tuple[str, ...]:
        return (name, f"qmp.{args[1]}") if name == "QemuMachine.command" else (name,)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            bomb.pass_by(names(args), "before")
            result = await function(*args, **kwargs)
            bomb.pass_by(names(args), "after")
            return result

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bomb.pass_by(names(args), "before")
        result = function(*args, **kwargs)
        bomb.pass_by(names(args), "after")
        return result

    return call


def install(armed: Path) -> None:
    bomb = _Bomb(armed)
    for point in POINTS:
        owner_name, method = point.split(".")
        module = importlib.import_module(PLACES[owner_name])
        owner = getattr(module, owner_name, None) or importlib.import_module(f"{PLACES[owner_name]}.{owner_name}")
        setattr(owner, method, _wrapped(getattr(owner, method), point, bomb))


def main() -> None:
    from cloche_server.cli.main import main as cli

    data = Path(sys.argv[sys.argv.index("--data") + 1])
    install(data / ARMED)
    cli()


if __name__ == "__main__":
    main()
