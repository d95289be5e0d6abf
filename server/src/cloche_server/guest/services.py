"""Calls of the agent about services (docs/agent-protocol.md §3.7)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..core.errors import ClocheError
from ..core.process import tag_text
from ..core.services import RESTARTS, SERVICE_NAME, SERVICES_MAX, STATES, HealthCheck, HttpCheck, ServiceSpec, State
from .caller import CALL_SECONDS, Caller
from .decode import printable
from .errors import CallContext, protocol_error
from .fields import Fields, clean_text
from .frames import Exit, parse_exit
from .h2link import Response
from .streams import IDLE_SECONDS, ExecCall

_NAME: Final = re.compile(SERVICE_NAME[1:-1], re.ASCII)
_LIST_BYTES: Final = 8 * 1024 * 1024
_TEXT_MAX: Final = 128 * 1024
_WORDS_MAX: Final = 8192
_MS_MAX: Final = 10**9


@dataclass(frozen=True, slots=True)
class GuestService:
    """What the agent tells of a service. `log_epoch` tells one log from another of the same service; offsets are bytes
    of both streams. `retry` (seconds): until it is started again."""

    name: str
    state: State
    detail: str
    waiting_for: Sequence[str]
    pid: int
    process_id: str | None
    started_ns: int
    restarts: int
    failures: int
    retry: float
    last_exit: Exit | None
    last_exit_ns: int
    log_epoch: str
    log_first: int
    log_next: int
    spec: ServiceSpec


def is_service_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _path(name: str) -> str:
    # A name of another form can't exist, and must not become part of a path.
    if not is_service_name(name):
        raise ClocheError("service.not_found", "There is no service with this name: it is not a valid one.")
    return "/v1/services/" + name


class ServiceCalls:
    """The methods of `GuestClient` about services. Errors: `service.not_found`, and those of every call."""

    _caller: Caller

    async def services(self, *, timeout: float = CALL_SECONDS) -> list[GuestService]:
        """All of them, by name."""
        ctx = CallContext("service")
        answer = await self._caller.call("GET", "/v1/services", ctx, timeout=timeout, limit=_LIST_BYTES)
        return [service(item) for item in Fields(answer).items("services", SERVICES_MAX)]

    async def service(self, name: str, *, timeout: float = CALL_SECONDS) -> GuestService:
        return await self._one("GET", name, "", timeout=timeout)

    async def service_put(
        self, name: str, spec: ServiceSpec, *, timeout: float = CALL_SECONDS
    ) -> tuple[GuestService, bool]:
        """Define one; true: it is new. It takes as long as the one before needs to end. Raises `service.conflict`,
        `service.too_many`, `request.invalid`."""
        ctx = CallContext("service", exec_id=name)
        path, body = _path(name), to_body(name, spec)
        response = await self._caller.open_json("PUT", path, ctx, json_body=body, timeout=timeout)
        created = response.status == 201
        answer = await self._caller.read_json(response, limit=_LIST_BYTES, timeout=timeout)
        return service(answer), created

    async def service_do(self, name: str, verb: str, *, timeout: float = CALL_SECONDS) -> GuestService:
        """`start`, `stop` or `restart`; a stop has ended then."""
        return await self._one("POST", name, "/" + verb, timeout=timeout)

    async def service_wait(
        self, name: str, states: Sequence[str], seconds: float, *, timeout: float = CALL_SECONDS
    ) -> GuestService:
        """Once it is in one of these states, or after so long."""
        query = (("states", ",".join(states)), ("timeout_ms", str(round(seconds * 1000))))
        return await self._one("GET", name, "/wait", query, timeout=timeout + seconds)

    async def _one(
        self, method: str, name: str, what: str, query: Sequence[tuple[str, str]] = (), *, timeout: float
    ) -> GuestService:
        ctx = CallContext("service", exec_id=name)
        answer = await self._caller.call(
            method, _path(name) + what, ctx, query=query, timeout=timeout, limit=_LIST_BYTES
        )
        return service(answer)

    async def service_remove(self, name: str, *, timeout: float = CALL_SECONDS) -> None:
        """Stop and forget it. Raises `service.conflict`: another one depends on it."""
        await self._caller.call("DELETE", _path(name), CallContext("service", exec_id=name), timeout=timeout)

    def service_output(self, name: str, from_offset: int = 0, *, timeout: float = CALL_SECONDS) -> ExecCall:
        """Follow the log of a service, across its runs, until it is removed."""
        path, query = _path(name) + "/output", (("from", str(from_offset)),)

        def start() -> Awaitable[Response]:
            ctx = CallContext("service", exec_id=name)
            return self._caller.open("GET", path, ctx, query=query, timeout=timeout)

        return ExecCall(start, None, attached=False, idle_timeout=IDLE_SECONDS)


# -------------------------------------------------------------------- out


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def to_body(name: str, spec: ServiceSpec) -> dict[str, Any]:
    """The definition as the agent takes it."""
    body: dict[str, Any] = {
        "tag": tag_text(spec.shell, spec.argv, name),
        "log_bytes": spec.buffer_kb * 1024,
        "autostart": spec.autostart,
        "restart": spec.restart,
        "backoff_ms": _ms(spec.backoff),
        "max_backoff_ms": _ms(spec.max_backoff),
        "max_restarts": spec.max_restarts,
        "window_ms": _ms(spec.window),
        "stop_signal": spec.stop_signal,
        "stop_grace_ms": _ms(spec.stop_grace),
        **_command(spec.shell, spec.argv),
    }
    given = {"env": spec.env, "cwd": spec.cwd, "user": spec.user, "rlimits": spec.rlimits}
    body |= {key: value for key, value in given.items() if value}
    if spec.depends_on:
        body["depends_on"] = list(spec.depends_on)
    if spec.health is not None:
        body["health"] = _health_body(spec.health)
    return body


def _command(shell: str | None, argv: Sequence[str] | None) -> dict[str, Any]:
    if argv is not None:
        return {"argv": list(argv)}
    return {} if shell is None else {"shell": shell}


def _health_body(health: HealthCheck) -> dict[str, Any]:
    body: dict[str, Any] = {
        "interval_ms": _ms(health.interval),
        "timeout_ms": _ms(health.timeout),
        "retries": health.retries,
        "start_ms": _ms(health.start_period),
        "on_unhealthy": "restart" if health.restarts else "report",
        **_command(health.shell, health.argv),
    }
    if health.tcp_port is not None:
        body["tcp_port"] = health.tcp_port
    if health.http is not None:
        body["http"] = {"port": health.http.port, "path": health.http.path, "status": health.http.status or 0}
    return body


# -------------------------------------------------------------------- back


def service(body: object) -> GuestService:
    """Raises `guest.protocol` on nonsense."""
    f = Fields(body)
    name = f.text("name", 64)
    if not is_service_name(name):
        raise protocol_error("a service with a name of another form")
    log = Fields(f.raw("log"))
    last = Fields(f.raw("last_exit")) if f.has("last_exit") else None
    epoch = log.text("epoch", 32)
    if not epoch.isascii() or not epoch.isalnum():
        raise protocol_error("a log without an epoch")
    return GuestService(
        name=name,
        state=_one_of(f.text("state", 16), STATES),
        detail=printable(f.text("detail", 500, default="")),
        waiting_for=_names(f, "waiting_for"),
        pid=f.integer("pid", 0, 2**31, default=0),
        process_id=f.opt_text("process_id", 64),
        started_ns=f.integer("started_ns", default=0),
        restarts=f.integer("restarts", default=0),
        failures=f.integer("failures", default=0),
        retry=f.integer("retry_ms", default=0) / 1000,
        last_exit=None if last is None else parse_exit(last),
        last_exit_ns=0 if last is None else last.integer("at_ns", default=0),
        log_epoch=epoch,
        log_first=log.integer("first"),
        log_next=log.integer("next"),
        spec=_spec(Fields(f.raw("spec"))),
    )


def _one_of(text: str, known: Sequence[Any]) -> Any:
    for one in known:
        if text == one:
            return one
    raise protocol_error("a word that is none of those that are known")


def _names(f: Fields, name: str) -> tuple[str, ...]:
    found = tuple(_words(f.items(name, SERVICES_MAX))) if f.has(name) else ()
    if not all(is_service_name(one) for one in found):
        raise protocol_error("a service with a name of another form")
    return found


def _words(items: Sequence[Any]) -> list[str]:
    return [Fields({"word": item}).text("word", _TEXT_MAX) for item in items]


def _argv(f: Fields) -> list[str] | None:
    return _words(f.items("argv", _WORDS_MAX)) if f.has("argv") else None


def _spec(f: Fields) -> ServiceSpec:
    env = f.raw("env") or {}
    rlimits = f.raw("rlimits") or {}
    if not isinstance(env, dict) or not isinstance(rlimits, dict) or len(rlimits) > 16:
        raise protocol_error("a definition of another form")
    texts, numbers = Fields(env), Fields(rlimits)
    return ServiceSpec(
        shell=f.opt_text("shell", _TEXT_MAX),
        argv=_argv(f),
        env={clean_text(key, _TEXT_MAX): texts.text(key, _TEXT_MAX) for key in env},
        cwd=f.opt_text("cwd", 4096),
        user=f.opt_text("user", 256),
        rlimits={clean_text(key, 16): numbers.integer(key, -1) for key in rlimits},
        buffer_kb=f.integer("log_bytes", 0, 2**30) // 1024,
        autostart=f.flag("autostart"),
        restart=_one_of(f.text("restart", 16), RESTARTS),
        backoff=_seconds(f, "backoff_ms"),
        max_backoff=_seconds(f, "max_backoff_ms"),
        max_restarts=f.integer("max_restarts"),
        window=_seconds(f, "window_ms"),
        stop_signal=printable(f.text("stop_signal", 16)),
        stop_grace=_seconds(f, "stop_grace_ms"),
        depends_on=_names(f, "depends_on"),
        health=_health(Fields(f.raw("health"))) if f.has("health") else None,
    )


def _seconds(f: Fields, name: str) -> float:
    return f.integer(name, 0, _MS_MAX) / 1000


def _health(f: Fields) -> HealthCheck:
    http = None
    if f.has("http"):
        page = Fields(f.raw("http"))
        status = page.integer("status", 0, 599, default=0)
        http = HttpCheck(page.integer("port", 1, 65535), printable(page.text("path", 2048)), status or None)
    return HealthCheck(
        tcp_port=f.integer("tcp_port", 1, 65535) if f.has("tcp_port") else None,
        http=http,
        shell=f.opt_text("shell", _TEXT_MAX),
        argv=_argv(f),
        interval=_seconds(f, "interval_ms"),
        timeout=_seconds(f, "timeout_ms"),
        retries=f.integer("retries"),
        start_period=_seconds(f, "start_ms"),
        restarts=f.text("on_unhealthy", 16) == "restart",
    )
