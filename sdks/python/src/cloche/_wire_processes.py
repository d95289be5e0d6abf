"""Between the JSON of the API and the records of `processes`: pure functions, no I/O."""

from __future__ import annotations

from ._wire import Json, record, records, required, termination, timestamp
from .processes import GuestProcess, ProcessInfo, ProcessTable, Written


def process(data: Json) -> ProcessInfo:
    """A process."""
    size = data.get("pty")
    ended = data.get("termination")
    return ProcessInfo(
        process_id=str(required(data, "process_id")),
        pid=int(required(data, "pid")),
        status=str(required(data, "status")),
        name=data.get("name"),
        command=data.get("command"),
        started_at=timestamp(data.get("started_at")),
        stdin=str(data.get("stdin") or "none"),
        pty=(int(size["cols"]), int(size["rows"])) if isinstance(size, dict) else None,
        output_bytes=int(data.get("output_bytes") or 0),
        kept_from=int(data.get("kept_from") or 0),
        stdout_bytes=int(data.get("stdout_bytes") or 0),
        stderr_bytes=int(data.get("stderr_bytes") or 0),
        exit_code=data.get("exit_code"),
        duration_ms=data.get("duration_ms"),
        termination=None if ended is None else termination(ended),
        raw=data,
    )


def guest(data: Json) -> GuestProcess:
    """One of all processes."""
    return GuestProcess(
        pid=int(required(data, "pid")),
        ppid=int(data.get("ppid") or 0),
        user=str(data.get("user") or ""),
        state=str(data.get("state") or ""),
        cpu_ms=float(data.get("cpu_ms") or 0),
        rss_kb=int(data.get("rss_kb") or 0),
        name=str(data.get("name") or ""),
        command=str(data.get("command") or ""),
        process_id=data.get("process_id"),
        raw=data,
    )


def table(data: object) -> ProcessTable:
    """The list of processes, with or without all of them."""
    found = record(data)
    return ProcessTable(
        processes=[process(one) for one in records(found.get("processes"))],
        guest=[guest(one) for one in records(found.get("guest") or [])],
        truncated=bool(found.get("truncated")),
    )


def written(data: object) -> Written:
    """The answer to a write."""
    found = record(data)
    return Written(int(required(found, "bytes")), bool(found.get("closed")))
