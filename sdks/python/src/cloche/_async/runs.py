"""One-shot runs: a program in, its output out, nothing left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import _call, _wire, _wire_network, _wire_runs
from .._call import SLOW, Call
from ..network import NetworkPolicy
from ..runs import Run, RunFailure, RunLanguage, RunResult
from .transport import AsyncTransport


class AsyncRuns:
    """Programs that run once, each in a fresh sandbox of its own that is gone afterwards."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def run(
        self,
        language: str,
        source: str,
        *,
        stdin: str | bytes | None = None,
        files: Mapping[str, str | bytes] | None = None,
        args: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        compiler_options: Sequence[str] | None = None,
        expected_output: str | None = None,
        compare: str | None = None,
        timeout_seconds: float | None = None,
        compile_timeout_seconds: float | None = None,
        memory_mb: int | None = None,
        template: str | None = None,
        network: NetworkPolicy | Mapping[str, Any] | str | None = None,
    ) -> RunResult:
        """Run a program and wait for its end, however it ends: `RunResult.status` says how.

        `files`: further files beside the source, by relative path. Without `network` there is none. With
        `expected_output` the result has a verdict; `compare` is `exact`, `trim` or `tokens`.
        """
        body = _wire_runs.body(
            language, source, files, stdin, args=args, env=env, compiler_options=compiler_options,
            expected_output=expected_output, compare=compare, timeout_seconds=timeout_seconds,
            compile_timeout_seconds=compile_timeout_seconds, memory_mb=memory_mb, template=template,
            network=_wire_network.policy_body(network),
        )  # fmt: skip
        call = Call("POST", _call.path("run"), json=body, silence=SLOW)
        return _wire_runs.result(_wire.record(await self._transport.json(call)))

    async def batch(self, runs: Sequence[Mapping[str, Any]]) -> Sequence[RunResult | RunFailure]:
        """Run several, given as the API takes them (`language`, `source`, …); each place holds a result, or why there
        is none."""
        call = Call("POST", _call.path("run", "batch"), json={"runs": [dict(one) for one in runs]}, silence=SLOW)
        data = _wire.record(await self._transport.json(call))
        return [_wire_runs.item(one) for one in _wire.records(_wire.required(data, "results"))]

    async def submit(
        self,
        language: str,
        source: str,
        *,
        stdin: str | bytes | None = None,
        files: Mapping[str, str | bytes] | None = None,
        callback_url: str | None = None,
        callback_secret: str | None = None,
        **more: Any,
    ) -> Run:
        """Let a program wait for its turn, and do not wait for it: `get` asks for the result, `callback_url` gets it.
        Further fields are those of the API."""
        body = _wire_runs.body(
            language, source, files, stdin, wait=False, callback_url=callback_url, callback_secret=callback_secret,
            **more,
        )  # fmt: skip
        data = await self._transport.json(Call("POST", _call.path("run"), json=body))
        return _wire_runs.run(_wire.record(data))

    async def get(self, run_id: str) -> Run:
        """A run that nobody waits for, with its result when it has one."""
        data = await self._transport.json(Call("GET", _call.path("run", run_id), kind="safe"))
        return _wire_runs.run(_wire.record(data))

    async def delete(self, run_id: str) -> None:
        """End it if it goes on, and forget it."""
        await self._transport.json(Call("DELETE", _call.path("run", run_id)))

    async def languages(self) -> Sequence[RunLanguage]:
        """What programs may be written in."""
        data = _wire.record(await self._transport.json(Call("GET", _call.path("run", "languages"), kind="safe")))
        return [_wire_runs.language(one) for one in _wire.records(_wire.required(data, "languages"))]
