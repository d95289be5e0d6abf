"""Between the JSON of the API and the records of `models`: pure functions, no I/O.

Reading is tolerant (unknown fields are ignored, absent ones get a default), because the server may be
newer; but an answer of the wrong kind is a `ProtocolError`, never a half-empty record.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict

from . import models
from ._codes import class_for
from .errors import ClocheError, ProtocolError
from .models import ExecResult, Termination

Json = Mapping[str, Any]
Output = Literal["utf-8", "base64"]


class ExecOptions(TypedDict, total=False):
    """Options of every way to run a command."""

    env: Mapping[str, str] | None
    cwd: str | None
    user: str | None
    stdin: str | bytes | None
    timeout: float | None
    max_output_bytes: int | None
    on_output_limit: Literal["truncate", "kill"] | None
    detach: bool


def exec_body(
    cmd: str | Sequence[str],
    encoding: Output,
    exec_id: str,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    stdin: str | bytes | None = None,
    timeout: float | None = None,
    max_output_bytes: int | None = None,
    on_output_limit: str | None = None,
    detach: bool = False,
) -> dict[str, Any]:
    """The body of an exec request. A string is for the login shell, a list is an argument vector."""
    body: dict[str, Any] = {"exec_id": exec_id, "encoding": encoding}
    if isinstance(cmd, str):
        body["cmd"] = cmd
    elif isinstance(cmd, Sequence) and not isinstance(cmd, bytes | bytearray):
        body["argv"] = _arguments(cmd)
    else:
        raise TypeError(f"cmd is a string or a list of strings, not {type(cmd).__name__}")
    if timeout is not None and timeout < 0:
        raise ValueError("timeout must not be negative")
    body |= given(env=dict(env) if env else None, cwd=cwd, user=user, timeout_seconds=timeout)
    body |= given(max_output_bytes=max_output_bytes, on_output_limit=on_output_limit, detach=detach or None)
    if isinstance(stdin, str):
        body["stdin"] = stdin
    elif stdin is not None:
        body |= {"stdin": base64.b64encode(stdin).decode(), "stdin_base64": True}
    return body


def given(**fields: Any) -> dict[str, Any]:
    """The fields of a body that have a value; None means that the server decides."""
    return {name: value for name, value in fields.items() if value is not None}


def _arguments(cmd: Sequence[str]) -> list[str]:
    if not cmd:
        raise ValueError("the argument list is empty")
    for item in cmd:
        if not isinstance(item, str):
            raise TypeError(f"arguments are strings, not {type(item).__name__}")
    return list(cmd)


# --- reading


def record(value: object) -> Json:
    """`value`, if it is a JSON object."""
    if not isinstance(value, Mapping):
        raise ProtocolError(f"the server answered with {type(value).__name__} where an object belongs")
    return value


def records(value: object) -> list[Json]:
    """`value`, if it is a JSON array of objects."""
    if not isinstance(value, list):
        raise ProtocolError(f"the server answered with {type(value).__name__} where an array belongs")
    return [record(item) for item in value]


def required(data: Json, name: str) -> Any:
    """A field that must be there."""
    try:
        return data[name]
    except KeyError:
        raise ProtocolError(f"the server's answer lacks the field {name!r}") from None


def parse_json(body: bytes) -> Any:
    """JSON of the server; white space in front of it (sent to keep a connection alive) is legal."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("the server's answer is not JSON; is the address that of a Cloche server?") from None


def timestamp(value: object) -> datetime | None:
    """An RFC 3339 time."""
    if not isinstance(value, str) or not value:
        return None
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return None


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError("the server sent output that is not base64") from None


def output(data: Json, name: str, encoding: Output) -> Any:
    """A field with output: bytes if `encoding` (what was asked for) is base64, else text."""
    value = str(data.get(name) or "")
    sent = data.get("encoding", encoding)
    if encoding == "base64":
        return _unbase64(value) if sent == "base64" else value.encode()
    return _unbase64(value).decode("utf-8", "replace") if sent == "base64" else value


def termination(value: object) -> Termination:
    """The cause of the end of a command."""
    data = value if isinstance(value, Mapping) else {}
    return Termination(
        reason=str(data.get("reason") or "exited"),
        signal=data.get("signal"),
        signal_number=data.get("signal_number"),
        detail=data.get("detail"),
        oom_kills=int(data.get("oom_kills") or 0),
    )


def exec_result(data: Json, encoding: Output) -> ExecResult[Any]:
    """A finished command."""
    return ExecResult(
        exec_id=str(data.get("exec_id") or ""),
        stdout=output(data, "stdout", encoding),
        stderr=output(data, "stderr", encoding),
        exit_code=int(required(data, "exit_code")),
        duration_ms=float(data.get("duration_ms") or 0),
        termination=termination(data.get("termination")),
        truncated=bool(data.get("truncated", False)),
        stdout_dropped_bytes=int(data.get("stdout_dropped_bytes") or 0),
        stderr_dropped_bytes=int(data.get("stderr_dropped_bytes") or 0),
        stdout_head_bytes=data.get("stdout_head_bytes"),
        stderr_head_bytes=data.get("stderr_head_bytes"),
    )


def exit_event(data: Json) -> models.Exit:
    """The last event of a stream."""
    return models.Exit(
        exit_code=int(required(data, "exit_code")),
        duration_ms=float(data.get("duration_ms") or 0),
        termination=termination(data.get("termination")),
        truncated=bool(data.get("truncated", False)),
        stdout_dropped_bytes=int(data.get("stdout_dropped_bytes") or 0),
        stderr_dropped_bytes=int(data.get("stderr_dropped_bytes") or 0),
    )


def stream_event(event: str, data: Json, event_id: str, encoding: Output) -> models.ExecEvent[Any] | None:
    """An event of an exec stream; None for one this release does not know."""
    offset = int(event_id) if event_id.isascii() and event_id.isdigit() else None
    if event == "stdout":
        return models.Stdout(output(data, "chunk", encoding), offset)
    if event == "stderr":
        return models.Stderr(output(data, "chunk", encoding), offset)
    if event == "gap":
        return models.Gap(int(data.get("bytes") or 0), offset, str(data.get("stream") or "both"))
    if event == "exit":
        return exit_event(data)
    return None


class TextDecoder:
    """Turns the bytes of a stream into text, however its pieces cut the characters.

    It lives as long as the stream does, over broken connections: what is asked for again begins in bytes, so
    a character of which one half came before the break and one after is whole.
    """

    def __init__(self) -> None:
        self._decoders = _decoders()

    def feed(self, event: models.ExecEvent[Any]) -> list[models.ExecEvent[Any]]:
        """The events with text that `event` makes known: none while a character is incomplete."""
        if isinstance(event, models.Stdout | models.Stderr):
            text = self._decoders[type(event)].decode(event.data)
            return [type(event)(text, event.offset)] if text else []
        rest = [(kind, decoder.decode(b"", final=True)) for kind, decoder in self._decoders.items()]
        self._decoders = _decoders()
        return [*(kind(text) for kind, text in rest if text), event]


def _decoders() -> dict[type[Any], codecs.IncrementalDecoder]:
    make = codecs.getincrementaldecoder("utf-8")
    return {models.Stdout: make("replace"), models.Stderr: make("replace")}


def exec_info(data: Json, encoding: Output = "utf-8") -> models.ExecInfo:
    """A command in a list, running or finished."""
    finished = data.get("exit_code") is not None
    return models.ExecInfo(
        exec_id=str(required(data, "exec_id")),
        running=not finished,
        pid=data.get("pid"),
        result=exec_result(data, encoding) if finished else None,
        raw=data,
    )


def sandbox_info(data: Json) -> models.SandboxInfo:
    """A sandbox."""
    isolation = data.get("isolation") or {}
    ended = data.get("termination")
    template = str(data.get("template") or "")
    return models.SandboxInfo(
        id=str(required(data, "id")),
        status=str(data.get("status") or ""),
        template=template,
        template_resolved=str(data.get("template_resolved") or template),
        template_id=str(data.get("template_id") or ""),
        cpus=int(data.get("cpus") or data.get("cpu") or 0),
        memory_mb=int(data.get("memory_mb") or 0),
        disk_mb=int(data.get("disk_mb") or 0),
        isolation=models.Isolation(
            boundary=str(isolation.get("boundary") or ""),
            vmm=str(isolation.get("vmm") or ""),
            accel=str(isolation.get("accel") or ""),
            jailed=bool(isolation.get("jailed")),
        ),
        metadata=dict(data.get("metadata") or {}),
        env_keys=tuple(data.get("env_keys") or ()),
        created_at=timestamp(data.get("created_at")),
        started_at=timestamp(data.get("started_at")),
        expires_at=timestamp(data.get("expires_at")),
        ends_at=timestamp(data.get("ends_at")),
        max_lifetime_seconds=int(data.get("max_lifetime_seconds") or 0),
        ttl_seconds=int(data.get("ttl_seconds") or 0),
        persistent=bool(data.get("persistent", False)),
        boot_ms=float(data.get("boot_ms") or 0),
        boot_mode=str(data.get("boot_mode") or ""),
        termination=_sandbox_termination(ended) if isinstance(ended, Mapping) else None,
        name=data.get("name"),
        status_reason=data.get("status_reason"),
        idle_seconds=int(data.get("idle_seconds") or 0),
        idle_action=str(data.get("idle_action") or ""),
        parent_id=data.get("parent_id"),
        fork_tree_id=data.get("fork_tree_id"),
        from_snapshot=data.get("from_snapshot"),
        network_group=data.get("network_group"),
        raw=data,
    )


def _sandbox_termination(data: Json) -> models.SandboxTermination:
    return models.SandboxTermination(
        reason=str(data.get("reason") or ""),
        signal=data.get("signal"),
        detail=data.get("detail"),
        at=timestamp(data.get("at")),
    )


def lifecycle(data: Json) -> models.Lifecycle:
    """When a sandbox ends."""
    return models.Lifecycle(
        ttl_seconds=int(data.get("ttl_seconds") or 0),
        persistent=bool(data.get("persistent", False)),
        idle_seconds=float(data.get("idle_seconds") or 0),
        expires_at=timestamp(data.get("expires_at")),
    )


def fork_errors(data: Json) -> dict[int, ClocheError]:
    """Why children of a fork did not come to life, by their number."""
    found = {}
    for item in records(data.get("errors") or []):
        code = str(item.get("code") or "")
        found[int(required(item, "index"))] = class_for(code, 0)(str(item.get("err") or "it failed"), code)
    return found


def promotion(data: Json) -> models.Promotion:
    """What promoting did."""
    return models.Promotion(
        winner=str(required(data, "winner")),
        tree_id=str(data.get("tree_id") or ""),
        deleted=tuple(data.get("deleted") or ()),
        failures=dict(data.get("failures") or {}),
    )


def snapshot_info(data: Json) -> models.SnapshotInfo:
    """A snapshot."""
    return models.SnapshotInfo(
        id=str(required(data, "id")),
        sandbox_id=str(data.get("sandbox_id") or ""),
        name=data.get("name"),
        template=str(data.get("template") or ""),
        template_resolved=str(data.get("template_resolved") or ""),
        template_id=str(data.get("template_id") or ""),
        cpus=int(data.get("cpus") or 0),
        memory_mb=int(data.get("memory_mb") or 0),
        disk_mb=int(data.get("disk_mb") or 0),
        memory=bool(data.get("memory", True)),
        metadata=dict(data.get("metadata") or {}),
        size_bytes=int(data.get("size_bytes") or 0),
        disk_bytes=int(data.get("disk_bytes") or 0),
        parent_snapshot_id=data.get("parent_snapshot_id"),
        created_at=timestamp(data.get("created_at")),
        raw=data,
    )


def lineage(data: Json) -> models.SnapshotLineage:
    """Where a snapshot comes from."""
    return models.SnapshotLineage(
        ancestors=[snapshot_info(one) for one in records(required(data, "ancestors"))],
        children=[snapshot_info(one) for one in records(required(data, "children"))],
        sandboxes=[str(one) for one in data.get("sandboxes") or ()],
        missing_ancestor_id=data.get("missing_ancestor_id"),
        raw=data,
    )


def load(data: Json) -> models.Load:
    """What runs in a sandbox."""
    return models.Load(
        cpu_ms=float(data.get("cpu_ms") or 0),
        memory_bytes=int(data.get("memory_bytes") or 0),
        memory_limit_bytes=int(data.get("memory_limit_bytes") or 0),
        processes=int(data.get("processes") or 0),
        disk_used_bytes=int(data.get("disk_used_bytes") or 0),
        disk_bytes=int(data.get("disk_bytes") or 0),
        raw=data,
    )


def template(data: Json) -> models.Template:
    """A template."""
    return models.Template(
        name=str(required(data, "name")),
        state=str(data.get("state") or ""),
        aliases=tuple(data.get("aliases") or ()),
        description=str(data.get("description") or ""),
        cpus=int(data.get("cpu") or 0),
        memory_mb=int(data.get("memory_mb") or 0),
        disk_mb=int(data.get("disk_mb") or 0),
        size_bytes=int(data.get("size_bytes") or 0),
        created_at=timestamp(data.get("created_at")),
        is_global=bool(data.get("is_global", True)),
        from_snapshot=data.get("from_snapshot"),
        raw=data,
    )
