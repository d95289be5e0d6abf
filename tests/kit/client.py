"""A thin HTTP client for tests: says what went over the wire, hides nothing, retries nothing."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx

from kit import sse
from kit.lineage import Lineage

Content = bytes | Iterable[bytes]
#: Emulated guests on a busy machine are slow; what really matters has its own bound in its test.
TIMEOUT = httpx.Timeout(300.0, connect=20.0)
LIMITS = httpx.Limits(max_connections=1000, max_keepalive_connections=100)


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self.body: dict[str, Any] = response.json()
        self.code = str(self.body["code"])
        self.message = str(self.body["error"])
        self.details: dict[str, Any] = self.body["details"]
        super().__init__(f"{self.status} {self.code}: {self.message} {str(self.details)[:500]}")


def checked(response: httpx.Response) -> httpx.Response:
    if not response.is_success:
        raise ApiError(response)
    return response


@dataclass(frozen=True)
class Result:
    """The answer of a blocking exec."""

    body: dict[str, Any]

    @property
    def code(self) -> int:
        return int(self.body["exit_code"])

    @property
    def stdout(self) -> str:
        return str(self.body["stdout"])

    @property
    def stderr(self) -> str:
        return str(self.body["stderr"])

    @property
    def raw_stdout(self) -> bytes:
        return _raw(self.body, "stdout")

    @property
    def raw_stderr(self) -> bytes:
        return _raw(self.body, "stderr")

    @property
    def reason(self) -> str:
        return str(self.body["termination"]["reason"])

    @property
    def signal(self) -> str | None:
        name = self.body["termination"].get("signal")
        return None if name is None else str(name)

    @property
    def exec_id(self) -> str:
        return str(self.body["exec_id"])


def _raw(body: dict[str, Any], name: str) -> bytes:
    text = str(body[name])
    return base64.b64decode(text) if body["encoding"] == "base64" else text.encode()


def exec_body(cmd: str | list[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    body = dict(options)
    if isinstance(cmd, list):
        body["argv"] = cmd
    elif cmd is not None:
        body["cmd"] = cmd
    return body


def path_params(path: str | bytes, more: Mapping[str, Any]) -> dict[str, Any]:
    """Query parameters for a path; bytes go as base64url."""
    if isinstance(path, bytes):
        return {"path_b64": base64.urlsafe_b64encode(path).rstrip(b"=").decode(), **more}
    return {"path": path, **more}


class Api:
    """The API of one server, with one token."""

    def __init__(self, url: str, token: str, made: dict[str, Box] | None = None) -> None:
        self.url = url
        self.token = token
        self.http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT, limits=LIMITS, trust_env=False
        )
        #: Handles of the sandboxes made here and not yet deleted, for clean-up and for reports.
        self.made: dict[str, Box] = {} if made is None else made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The bare answer, whatever its status."""
        return self.http.request(method, path, **options)

    def call(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of a 2xx answer (None when it is empty); raises `ApiError`."""
        response = checked(self.http.request(method, path, **options))
        return response.json() if response.content else None

    # ------------------------------------------------------------ sandboxes

    def create(self, **body: Any) -> Box:
        return self.keep(self.call("POST", "/v1/sandboxes", json=body))

    def keep(self, info: dict[str, Any]) -> Box:
        """A handle for what was made just now."""
        box = Box(self, info)
        self.made[box.id] = box
        return box

    def attach(self, sandbox_id: str) -> Box:
        """A handle for a sandbox that exists."""
        return Box(self, self.get(sandbox_id))

    def get(self, sandbox_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/sandboxes/{sandbox_id}"))

    def list(self, **params: Any) -> list[dict[str, Any]]:
        return list(self.call("GET", "/v1/sandboxes", params=params))

    def delete(self, sandbox_id: str) -> None:
        self.call("DELETE", f"/v1/sandboxes/{sandbox_id}")
        self.made.pop(sandbox_id, None)

    def delete_made(self) -> None:
        """Deletes all that was made here and is still there."""
        for sandbox_id in list(self.made):
            response = self.request("DELETE", f"/v1/sandboxes/{sandbox_id}")
            assert response.status_code in {204, 404}, response.text
            self.made.pop(sandbox_id, None)

    def snapshots(self, **params: Any) -> list[dict[str, Any]]:
        return list(self.call("GET", "/v1/snapshots", params=params)["snapshots"])

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels, as written there."""
        lines = checked(self.request("GET", "/metrics")).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def aio(self) -> AsyncApi:
        """The same for `async` tests; use it as a context manager."""
        return AsyncApi(self.url, self.token)


class Box(Lineage):
    """One sandbox."""

    def __init__(self, api: Api, info: dict[str, Any]) -> None:
        self.api = api
        self.info = info
        self.id = str(info["id"])
        self.path = f"/v1/sandboxes/{self.id}"

    def __repr__(self) -> str:
        return f"<Box {self.id}>"

    def refresh(self) -> dict[str, Any]:
        self.info = self.api.get(self.id)
        return self.info

    def delete(self) -> None:
        self.api.delete(self.id)

    # ------------------------------------------------------------ exec

    def exec(self, cmd: str | list[str] | None = None, **options: Any) -> Result:
        """Runs a command to its end: a string for the shell, a list as argv. Raises `ApiError`."""
        http = {"timeout": options.pop("http_timeout")} if "http_timeout" in options else {}
        return Result(self.api.call("POST", f"{self.path}/exec", json=exec_body(cmd, options), **http))

    def sh(self, cmd: str, **options: Any) -> str:
        """Stdout of a shell command that must succeed."""
        result = self.exec(cmd, **options)
        assert result.code == 0, f"{cmd[:200]!r} gave {result.body}"
        return result.stdout

    def refused(self, cmd: str | list[str] | None = None, **options: Any) -> ApiError:
        """The error of a command that must not run."""
        response = self.api.request("POST", f"{self.path}/exec", json=exec_body(cmd, options))
        assert not response.is_success, response.text[:500]
        return ApiError(response)

    def start(self, cmd: str | list[str], **options: Any) -> str:
        """Starts a command in the background; its exec id."""
        body = exec_body(cmd, {**options, "background": True})
        response = checked(self.api.request("POST", f"{self.path}/exec", json=body))
        assert response.status_code == 202
        assert response.json()["status"] == "running"
        return str(response.json()["exec_id"])

    def exec_info(self, exec_id: str, **params: Any) -> dict[str, Any]:
        return dict(self.api.call("GET", f"{self.path}/exec/{exec_id}", params=params))

    def execs(self) -> list[dict[str, Any]]:
        return list(self.api.call("GET", f"{self.path}/exec")["execs"])

    def kill(self, exec_id: str) -> None:
        self.api.call("DELETE", f"{self.path}/exec/{exec_id}")

    @contextlib.contextmanager
    def stream(self, cmd: str | list[str], **options: Any) -> Iterator[Iterator[sse.Event]]:
        """Events as they come. Leaving the block early hangs up."""
        body = exec_body(cmd, options)
        with self.api.http.stream("POST", f"{self.path}/exec/stream", json=body) as response:
            with _events(response) as events:
                yield events

    def stream_all(self, cmd: str | list[str], **options: Any) -> sse.Outcome:
        with self.stream(cmd, **options) as events:
            return sse.Outcome(list(events))

    @contextlib.contextmanager
    def follow(self, exec_id: str, offset: int | None = None, **options: Any) -> Iterator[Iterator[sse.Event]]:
        """Attaches to a command; `last_event_id` goes as a header."""
        last = options.pop("last_event_id", None)
        headers = {} if last is None else {"Last-Event-ID": last}
        params = options if offset is None else {"from": offset, **options}
        path = f"{self.path}/exec/{exec_id}/stream"
        with self.api.http.stream("GET", path, params=params, headers=headers) as response:
            with _events(response) as events:
                yield events

    def follow_all(self, exec_id: str, offset: int | None = None, **options: Any) -> sse.Outcome:
        with self.follow(exec_id, offset, **options) as events:
            return sse.Outcome(list(events))

    # ------------------------------------------------------------ files

    def fs(self, method: str, route: str, path: str | bytes, content: Content | None = None, **params: Any) -> Any:
        """One call of the file API, checked; JSON or None."""
        query = path_params(path, params)
        return self.api.call(method, f"{self.path}/fs{route}", params=query, content=content)

    def fs_raw(
        self, method: str, route: str, path: str | bytes, content: Content | None = None, **params: Any
    ) -> httpx.Response:
        query = path_params(path, params)
        return self.api.request(method, f"{self.path}/fs{route}", params=query, content=content)

    def put(self, path: str | bytes, content: Content, **params: Any) -> dict[str, Any]:
        return dict(self.fs("PUT", "", path, content, **params))

    def get(self, path: str | bytes, **params: Any) -> bytes:
        return checked(self.fs_raw("GET", "", path, **params)).content

    def get_hash(self, path: str | bytes) -> tuple[int, str]:
        """Size and SHA-256 of a file that is read in pieces."""
        digest, size = hashlib.sha256(), 0
        with self.api.http.stream("GET", f"{self.path}/fs", params=path_params(path, {})) as response:
            if not response.is_success:
                response.read()
                raise ApiError(response)
            for chunk in response.iter_bytes():
                digest.update(chunk)
                size += len(chunk)
        return size, digest.hexdigest()

    def stat(self, path: str | bytes, **params: Any) -> dict[str, Any]:
        return dict(self.fs("GET", "/stat", path, **params))

    def ls(self, path: str | bytes, **params: Any) -> dict[str, Any]:
        return dict(self.fs("GET", "/dir", path, **params))

    def names(self, path: str | bytes, **params: Any) -> list[str]:
        return [str(entry["name"]) for entry in self.ls(path, **params)["entries"]]

    def rm(self, path: str | bytes, **params: Any) -> None:
        self.fs("DELETE", "", path, **params)

    def mkdir(self, path: str, **body: Any) -> dict[str, Any]:
        return dict(self.api.call("POST", f"{self.path}/fs/mkdir", json={"path": path, **body}))

    def move(self, source: str, to: str, **body: Any) -> dict[str, Any]:
        return dict(self.api.call("POST", f"{self.path}/fs/move", json={"from": source, "to": to, **body}))


@contextlib.contextmanager
def _events(response: httpx.Response) -> Iterator[Iterator[sse.Event]]:
    if response.status_code != 200:
        response.read()
        raise ApiError(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    yield sse.parse(response.iter_raw())


class AsyncApi:
    """The part of `Api` that tests with many calls at once need."""

    def __init__(self, url: str, token: str) -> None:
        self.http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT, limits=LIMITS, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return await self.http.request(method, path, **options)

    async def call(self, method: str, path: str, **options: Any) -> Any:
        response = checked(await self.http.request(method, path, **options))
        return response.json() if response.content else None

    async def create(self, **body: Any) -> dict[str, Any]:
        return dict(await self.call("POST", "/v1/sandboxes", json=body))

    async def delete(self, sandbox_id: str) -> None:
        await self.call("DELETE", f"/v1/sandboxes/{sandbox_id}")

    async def exec(self, sandbox_id: str, cmd: str | list[str], **options: Any) -> Result:
        body = exec_body(cmd, options)
        return Result(await self.call("POST", f"/v1/sandboxes/{sandbox_id}/exec", json=body))

    @contextlib.asynccontextmanager
    async def stream(
        self, sandbox_id: str, cmd: str | list[str], **options: Any
    ) -> AsyncIterator[AsyncIterator[sse.Event]]:
        path = f"/v1/sandboxes/{sandbox_id}/exec/stream"
        async with self.http.stream("POST", path, json=exec_body(cmd, options)) as response:
            if response.status_code != 200:
                await response.aread()
                raise ApiError(response)
            yield _parse_async(response)

    async def put(
        self, sandbox_id: str, path: str | bytes, content: bytes | AsyncIterable[bytes], **params: Any
    ) -> dict[str, Any]:
        query = path_params(path, params)
        return dict(await self.call("PUT", f"/v1/sandboxes/{sandbox_id}/fs", params=query, content=content))

    async def get(self, sandbox_id: str, path: str | bytes, **params: Any) -> bytes:
        query = path_params(path, params)
        return checked(await self.request("GET", f"/v1/sandboxes/{sandbox_id}/fs", params=query)).content


async def _parse_async(response: httpx.Response) -> AsyncIterator[sse.Event]:
    parser = sse.Parser()
    async for chunk in response.aiter_raw():
        for event in parser.feed(chunk):
            yield event
    parser.finish()
