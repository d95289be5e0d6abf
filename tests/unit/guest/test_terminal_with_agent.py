"""Terminals over a real WebSocket, with the real agent in its developer mode behind them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from test_processes_with_agent import SB, Site, W

from cloche import AsyncProcesses, AsyncTerminal, NotFoundError
from cloche._async.client import transport_for
from cloche_server.api.app import build_app
from cloche_server.api.protocol import protocol_for
from cloche_server.app.calls import Calls, revoked
from cloche_server.app.processes import Processes
from cloche_server.app.terminal import Terminals
from cloche_server.core.records import TokenInfo
from cloche_server.core.scopes import Scope
from cloche_server.guest.client import GuestClient
from cloche_server.settings import Settings
from kit.sockets import Refused, Socket

pytestmark = pytest.mark.thorough

TOKEN = "pds_" + "0123456789abcdef" * 2
READER = "pds_" + "f" * 32


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class Front:
    def __init__(self, url: str, services: Any) -> None:
        self.url = url
        self.services = services

    async def open(self, rest: str, token: str | None = TOKEN, **options: Any) -> Socket:
        return await asyncio.to_thread(Socket, self.url, f"/v1/sandboxes/{SB}{rest}", token, **options)


@pytest.fixture
async def front(agent_client: GuestClient) -> AsyncIterator[Front]:
    site: Any = Site(agent_client)

    async def find(workspace: str, sandbox_id: str) -> Any:
        return site.entry

    site.find = find
    processes = Processes(site)

    async def token_of(text: str) -> TokenInfo | None:
        scope = {TOKEN: Scope.EXEC, READER: Scope.READ}.get(text)
        return None if scope is None else TokenInfo(text[:12], "t", W, 0.0, scope=scope)

    settings = Settings()
    services: Any = SimpleNamespace(
        settings=settings,
        access=site,
        processes=processes,
        terminals=Terminals(processes),
        tokens=SimpleNamespace(find=token_of, calls=Calls()),
        audit=None,
        stopping=asyncio.Event(),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        build_app(services), log_config=None, lifespan="off", http=protocol_for(settings), ws="wsproto"
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield Front(f"http://127.0.0.1:{listener.getsockname()[1]}", services)
    server.should_exit = True
    await serving


async def test_typed_shown_resized_and_ended(front: Front) -> None:
    with await front.open("/terminal?cols=100&rows=30") as one:
        one.type(b"stty size; echo over-$((40+1))\n")
        await asyncio.to_thread(one.until, b"over-41")
        assert b"30 100" in one.shown
        assert one.texts[0]["offset"] == 0
        one.tell({"resize": {"cols": 90, "rows": 20}})
        one.type(b"stty size; printf '\\303\\244'; exit 7\n")
        await asyncio.to_thread(one.end)
        assert b"20 90" in one.shown
        assert "ä".encode() in one.shown
        assert one.texts[-1] == {"exit": 7}
        assert one.code == 1000


async def test_a_client_who_comes_back(front: Front) -> None:
    with await front.open("/terminal?linger_seconds=60") as first:
        first.type(b"echo first-$((1+1))\n")
        await asyncio.to_thread(first.until, b"first-2")
        process, seen = first.texts[0]["process"], len(first.shown)
    with await front.open(f"/terminal?process={process}&from={seen}") as second:
        second.type(b"echo second-$((1+1))\n")
        await asyncio.to_thread(second.until, b"second-2")
        assert b"first-2" not in second.shown
        second.type(b"exit\n")
        await asyncio.to_thread(second.end)
        assert second.texts[-1] == {"exit": 0}
    with await front.open(f"/terminal?process={process}&from=0") as third:
        await asyncio.to_thread(third.end)
        assert b"first-2" in third.shown
        assert third.texts[-1] == {"exit": 0}


async def test_ssh_says_nothing_but_its_exit(front: Front) -> None:
    for path in ("/ssh?rows=24&cols=80", "/exec/pty"):
        with await front.open(path) as shell:
            shell.tell({"stdin": "exit 3\n"})
            await asyncio.to_thread(shell.end)
            assert shell.texts == [{"exit": 3}]


async def test_the_token_as_a_sub_protocol(front: Front) -> None:
    offered = ("cloche.terminal", f"bearer.{TOKEN}")
    with await front.open("/terminal?linger_seconds=1", None, protocols=offered) as one:
        assert one.protocol == "cloche.terminal"
    with await front.open("/ssh", None, protocols=(f"bearer.{TOKEN}",)) as one:
        assert one.protocol == f"bearer.{TOKEN}"
        one.type(b"exit\n")
        await asyncio.to_thread(one.end)


@pytest.mark.parametrize(
    ("rest", "token", "status", "code"),
    [
        ("/terminal", None, 401, b"auth.missing_token"),
        ("/terminal", "pds_" + "a" * 32, 401, b"auth.invalid_token"),
        ("/terminal", READER, 403, b"auth.forbidden"),
        ("/terminal?cols=0", TOKEN, 400, b"request.invalid"),
        ("/ssh?rows=65535", TOKEN, 400, b"request.invalid"),
        ("/terminal?process=nope", TOKEN, 404, b"process.not_found"),
    ],
)
async def test_refused_before_it_is_open(front: Front, rest: str, token: str | None, status: int, code: bytes) -> None:
    with pytest.raises(Refused) as caught:
        await front.open(rest, token)
    assert caught.value.status == status
    assert code in caught.value.body


async def test_what_is_no_websocket(front: Front) -> None:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as http:
        for path in ("terminal", "ssh"):
            answer = await http.get(f"{front.url}/v1/sandboxes/{SB}/{path}")
            assert answer.status_code == 400
            assert "WebSocket" in answer.json()["error"]
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
        assert (await http.get(f"{front.url}/openapi.json", headers=upgrade)).status_code == 200


async def test_nonsense_is_told_and_ends_nothing(front: Front) -> None:
    with await front.open("/terminal") as one:
        for nonsense in ({"resize": {"cols": 65535, "rows": 1}}, [], {"resize": 1}, "x"):
            one.tell(nonsense)
        one.type(b"exit 5\n")
        await asyncio.to_thread(one.end)
        assert sum("error" in text for text in one.texts) == 4
        assert one.texts[-1] == {"exit": 5}


async def test_it_ends_with_its_token(front: Front) -> None:
    with await front.open("/terminal?linger_seconds=1") as one:
        one.type(b"echo here-$((1+1))\n")
        await asyncio.to_thread(one.until, b"here-2")
        front.services.tokens.calls.end(TOKEN[:12], revoked())
        await asyncio.to_thread(one.end)
        assert "revoked" in one.texts[-1]["error"]
        assert one.code == 1011


async def test_a_client_who_does_not_read_holds_up_the_shell_and_nothing_else(front: Front) -> None:
    with await front.open("/terminal?linger_seconds=1") as one:
        one.type(b"head -c 60000000 /dev/zero | tr '\\0' x; echo; exit 4\n")
        await asyncio.sleep(1)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as http:
            listed = await http.get(f"{front.url}/v1/sandboxes/{SB}/processes")
        assert listed.status_code == 200
        await asyncio.to_thread(one.end)
        assert one.texts[-1] == {"exit": 4}
        missed = sum(text.get("gap", 0) for text in one.texts)
        assert len(one.shown) + missed > 60_000_000


async def test_the_terminal_of_the_sdk(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOCHE_API_URL", front.url)
    monkeypatch.setenv("CLOCHE_API_KEY", TOKEN)
    transport = transport_for(None, None, None, None)
    async with AsyncTerminal(transport, SB, {"cols": "70", "rows": "20"}) as far:
        await far.write("stty size; exit 6\n")
        shown = b"".join([data async for data in far])
        assert b"20 70" in shown
        assert far.exit_code == 6
        assert far.offset == len(shown)
    with pytest.raises(NotFoundError):
        await AsyncTerminal(transport, SB, {"process": "nope"}).open()
    processes = AsyncProcesses(transport, SB)
    one = await processes.start("cat; echo err >&2", stdin="pipe", name="cat", idempotency_key="k")
    assert (await processes.start("cat; echo err >&2", stdin="pipe", name="cat", idempotency_key="k")).pid == one.pid
    await one.write("é" * 100_000)
    await one.close_stdin()
    assert (await one.wait(30)).exit_code == 0
    assert await one.recorded("stdout") == "é".encode() * 100_000
    texts = [getattr(event, "data", "") async for event in one.output()]
    assert "".join(texts) == "é" * 100_000 + "err\n"
    assert [found.process_id for found in await processes.list()][-1] == one.process_id
    assert any(found.command for found in (await processes.table()).guest)
    await one.delete()
    with pytest.raises(NotFoundError):
        await processes.get(one.process_id)
