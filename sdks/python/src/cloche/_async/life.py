"""The life of a sandbox: its states, its children, its snapshots, its time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Self

from .. import _call, _wire, _wire_usage
from .._call import SLOW, Call, Kind
from ..errors import NotFoundError, ProtocolError, SandboxGone, SandboxNotFound, WaitTimeout
from ..models import ForkResult, Lifecycle, Promotion, SandboxEvent, SandboxInfo
from ..usage import Budget, BudgetStatus
from .events import sandbox_events
from .snapshot import AsyncSnapshot
from .transport import AsyncTransport

IdleAction = Literal["pause", "hibernate", "stop", "delete"]

#: A wait asks again that often, so that no connection stands still for long.
WAIT_SECONDS: Final = 20.0
#: A stop may take ten minutes, and a boot follows it in a restart.
STOP: Final = 1000.0


class AsyncLife:
    """What `AsyncSandbox` can do about its state. Not for direct use."""

    def __init__(self, transport: AsyncTransport, info: SandboxInfo) -> None:
        self._transport = transport
        self._path = _call.path("sandboxes", info.id)
        self.info = info

    async def refresh(self) -> Self:
        """Ask the server for `info` again."""
        data = await self._transport.json(Call("GET", self._path, kind="safe"))
        self.info = _wire.sandbox_info(_wire.record(data))
        return self

    async def wait(self, status: str | Sequence[str] = "running", timeout: float | None = None) -> Self:
        """Wait until it is in a state, or in one of several, and return it with `info` as it is then.

        After `timeout` seconds `WaitTimeout` is raised; `SandboxGone` when it fails before, `SandboxNotFound` when
        it ends. This wakes nothing and is no activity.
        """
        wanted = [status] if isinstance(status, str) else list(status)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            query = _call.params(status=",".join(wanted), timeout=round(min(left, WAIT_SECONDS), 3))
            call = Call("GET", f"{self._path}/wait", params=query, kind="safe", silence=3 * WAIT_SECONDS)
            self.info = _wire.sandbox_info(_wire.record(await self._transport.json(call)))
            if self.info.status in wanted:
                return self
            if self.info.status == "failed":
                reason = self.info.termination.reason if self.info.termination else "for an unknown reason"
                raise SandboxGone(f"the sandbox has failed: {reason}", "sandbox.failed")
            if left <= WAIT_SECONDS and deadline is not None:
                raise WaitTimeout(f"the sandbox is {self.info.status} after {timeout:g} s, not {' or '.join(wanted)}")

    async def events(self, tail: int = 50, types: Sequence[str] | None = None) -> Sequence[SandboxEvent]:
        """What has happened to it: the newest `tail` events, oldest first. This works after its end, too."""
        return await sandbox_events(self._transport, self.info.id, tail, types)

    # --- children

    async def fork(
        self,
        count: int = 1,
        *,
        ttl_seconds: int | None = None,
        persistent: bool | None = None,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        budget: Literal["share", "split"] | None = None,
        max_lifetime_seconds: int | None = None,
    ) -> ForkResult[Self]:
        """Make `count` children of this very moment: its memory, its running processes, its disk.

        It stands still for some milliseconds and goes on; the children are ready for commands when this returns.
        `ttl_seconds` and `persistent` are those of the parent unless given; `metadata` and `env` come on top of
        the parent's. `name` is for an only child. A budget of the parent is shared with the children, or what is left
        of it divided evenly (`"split"`). They end with the parent's `max_lifetime_seconds`, or after their own.

        The result is a sequence of the children that live; when some do not, its `errors` says
        why; when none does, that is raised and nothing is left. A server without room is asked again for a while.
        """
        body = _wire.given(count=count, ttl_seconds=ttl_seconds, persistent=persistent)
        body |= _wire.given(metadata=dict(metadata or {}) or None, env=dict(env or {}) or None)
        body |= _wire.given(name=name, budget=budget, max_lifetime_seconds=max_lifetime_seconds)
        call = Call("POST", f"{self._path}/fork-tree", json=body, kind="fork", silence=SLOW)
        data = _wire.record(await self._transport.json(call))
        children = tuple(
            type(self)(self._transport, _wire.sandbox_info(child))
            for child in _wire.records(_wire.required(data, "children"))
        )
        if not children:
            raise ProtocolError("the server answered with a fork that has no children")
        return ForkResult(
            children=children,
            tree_id=str(data.get("tree_id") or ""),
            parent_id=str(data.get("parent_id") or self.info.id),
            errors=_wire.fork_errors(data),
            pause_ms=float(data.get("pause_ms") or 0),
        )

    async def promote(self, cleanup_siblings: bool = False) -> Promotion:
        """Keep this child of a fork; with `cleanup_siblings` the other children of that fork are deleted."""
        body = {"cleanup_siblings": cleanup_siblings}
        data = await self._transport.json(Call("POST", f"{self._path}/promote", json=body, kind="safe", silence=SLOW))
        return _wire.promotion(_wire.record(data))

    async def snapshot(self, name: str | None = None, *, memory: bool | None = None) -> AsyncSnapshot:
        """Take a durable snapshot, memory and processes included; it outlives the sandbox.

        The sandbox stands still for a moment and goes on. `create(from_snapshot=…)` starts from it, `restore` goes back
        to it. With `memory=False` it holds the disk only, and what starts from it boots; so it is for a sandbox that
        is stopped or has failed.
        """
        call = Call("POST", f"{self._path}/snapshots", json=_wire.given(name=name, memory=memory), silence=SLOW)
        return AsyncSnapshot(self._transport, _wire.snapshot_info(_wire.record(await self._transport.json(call))))

    async def restore(self, snapshot: str | AsyncSnapshot | None = None) -> Self:
        """Take it back to a snapshot: memory, processes and disk are those of that moment, and what came after it is
        lost. Its id, name and labels stay. None: the snapshot that was last taken of it, or that it last went on from.
        """
        origin = snapshot.id if isinstance(snapshot, AsyncSnapshot) else snapshot
        call = Call("POST", f"{self._path}/restore", json=_wire.given(snapshot_id=origin), kind="safe", silence=SLOW)
        self.info = _wire.sandbox_info(_wire.record(await self._transport.json(call)))
        return self

    # --- sleep. Each of these is fine when it is so already, so it may be repeated like a call that changes nothing.

    async def pause(self) -> Self:
        """Let it stand still: its memory stays where it is, commands are refused with `InvalidStateError`."""
        return await self._move("pause")

    async def resume(self) -> Self:
        """Let it go on after a pause. Its TTL is counted anew."""
        return await self._move("resume")

    async def hibernate(self) -> Self:
        """Save its memory on disk and free what it uses. The next command or file call wakes it."""
        return await self._move("hibernate")

    async def wake(self) -> Self:
        """Let it go on after hibernation. Its TTL is counted anew."""
        return await self._move("wake")

    # --- power: `start` runs a command, so what starts the machine is called `boot`

    async def stop(self, timeout_seconds: float | None = None, force: bool = False) -> Self:
        """Shut its guest down in order; the disk is kept, memory is not. `boot` starts it again.

        `TimeoutError` when that takes longer than `timeout_seconds` (the server's default: 30): nothing was killed, and
        it may still end. With `force` it is killed then, and what was not on its disk is lost.
        """
        return await self._move("stop", _power(timeout_seconds, force))

    async def boot(self) -> Self:
        """Start it from its disk after `stop`, or after it has failed. Its TTL is counted anew."""
        return await self._move("start")

    async def restart(self, timeout_seconds: float | None = None, force: bool = False) -> Self:
        """`stop`, when there is something to stop, and `boot`."""
        return await self._move("restart", _power(timeout_seconds, force))

    async def _move(self, verb: str, body: dict[str, Any] | None = None) -> Self:
        # A restart that is sent again would be another one.
        kind: Kind = "other" if verb == "restart" else "safe"
        silence = SLOW if body is None else STOP
        await self._transport.json(Call("POST", f"{self._path}/{verb}", json=body, kind=kind, silence=silence))
        return await self.refresh()

    # --- budget

    async def budget(self) -> BudgetStatus | None:
        """What it may use, and has used together with those that share its budget; None when it has none."""
        try:
            data = await self._transport.json(Call("GET", f"{self._path}/budget", kind="safe"))
        except SandboxNotFound:
            raise
        except NotFoundError:
            return None
        return _wire_usage.budget_status(_wire.record(data))

    async def set_budget(self, budget: Budget | Mapping[str, float]) -> BudgetStatus:
        """Set all limits anew, or raise them; what was used stays used. One that was paused at a limit is then to be
        resumed. A sandbox that had no budget is counted from now."""
        body = _wire_usage.budget_body(budget)
        data = await self._transport.json(Call("PUT", f"{self._path}/budget", json=body, kind="safe"))
        return _wire_usage.budget_status(_wire.record(data))

    async def delete_budget(self) -> None:
        """Let it use as much as it wants. Those that share the budget keep it."""
        await self._transport.json(Call("DELETE", f"{self._path}/budget", kind="safe"))

    # --- time and labels

    async def lifecycle(self) -> Lifecycle:
        """When it will end."""
        data = await self._transport.json(Call("GET", f"{self._path}/lifecycle", kind="safe"))
        return _wire.lifecycle(_wire.record(data))

    async def set_ttl(self, ttl_seconds: int) -> Lifecycle:
        """Let it end `ttl_seconds` from now; 0 means never."""
        body = {"ttl_seconds": ttl_seconds}
        data = await self._transport.json(Call("PATCH", f"{self._path}/lifecycle", json=body))
        return _wire.lifecycle(_wire.record(data))

    async def set_idle(self, idle_seconds: int | None = None, idle_action: IdleAction | None = None) -> Self:
        """What happens after so long without activity, counted from now; 0 seconds mean never."""
        return await self._patch(_wire.given(idle_seconds=idle_seconds, idle_action=idle_action))

    async def set_metadata(self, changes: Mapping[str, str | None]) -> Self:
        """Set metadata values; None removes a key; other keys stay."""
        return await self._patch({"metadata": dict(changes)})

    async def _patch(self, body: dict[str, Any]) -> Self:
        data = await self._transport.json(Call("PATCH", self._path, json=body))
        self.info = _wire.sandbox_info(_wire.record(data))
        return self


def _power(timeout_seconds: float | None, force: bool) -> dict[str, Any]:
    return _wire.given(timeout_seconds=timeout_seconds, force=force or None)
