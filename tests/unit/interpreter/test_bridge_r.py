"""R behind the bridge: Debian's kernel of R, with what the others have too."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kit.cells import NOBODY
from kit.code_bridge import BridgeClient, bridge

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        shutil.which("R") is None, reason="R is not installed here: apt-get install r-cran-irkernel (./test does it)"
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def code(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BridgeClient]:
    async with bridge(tmp_path_factory.mktemp("r")) as client:
        yield client


async def test_r(code: BridgeClient, tmp_path: Path) -> None:
    assert "r" in (await code.ask("languages"))["languages"]
    ran = await code.run("x <- 40; cat('out\\n'); message('err'); x + 2", language="r")
    assert (ran.status, ran.stdout, ran.text("stderr").strip()) == ("ok", "out\n", "err")
    assert ran.results[0]["text/plain"] == "[1] 42"
    ran = await code.run("stop('no ', x)", language="r")
    assert ran.status == "error"
    assert ran.error is not None
    assert "no 40" in ran.error["message"]
    drawn = await code.run("plot(1:3)", language="r")
    picture = next(one["image/png"] for one in drawn.results if "image/png" in one)
    assert base64.b64decode(picture)[:8] == b"\x89PNG\r\n\x1a\n"
    here = "cat(Sys.getenv('OF_THIS_RUN', 'none'), getwd(), '\\n')"
    before = (await code.run(here, language="r")).stdout
    ran = await code.run(here, language="r", env={"OF_THIS_RUN": 'a "ü" \\ $'}, cell_cwd=str(tmp_path))
    assert ran.stdout == f'a "ü" \\ $ {tmp_path} \n'
    assert (await code.run(here, language="r")).stdout == before
    count = ran.end["execution_count"]
    assert (await code.run("1", language="r", cell_cwd="/nowhere")).status == "error"
    assert (await code.run("1", language="r")).end["execution_count"] > count


async def test_r_is_interrupted_and_keeps_its_state(code: BridgeClient) -> None:
    assert (await code.run("kept <- 'yes'", language="r")).status == "ok"
    ran = await code.run("Sys.sleep(60)", language="r", timeout=1)
    assert (ran.status, ran.end["state_lost"]) == ("timeout", False)
    assert (await code.run("cat(kept)", language="r")).stdout == "yes"
    ran = await code.run("tools::pskill(Sys.getpid(), 9)", language="r")
    assert (ran.status, ran.end["state_lost"], ran.end.get("signal")) == ("killed", True, "SIGKILL")
    ran = await code.run("exists('kept')", language="r")
    assert ran.results[0]["text/plain"] == "[1] FALSE"


async def test_r_asks(code: BridgeClient) -> None:
    asked = asyncio.Event()

    async def answer() -> None:
        await asked.wait()
        assert (await code.ask("input", context="r", text="Ada"))["type"] == "reply"

    task = asyncio.create_task(answer())
    shown = ""
    async with asyncio.timeout(60):
        async for event in code.events(
            {"op": "run", "code": "cat('hi', readline('who? '))", "language": "r", "input": True, "timeout_ms": 30000}
        ):
            if event["type"] == "input":
                assert event["prompt"] == "who? "
                asked.set()
            shown += event.get("text", "")
    await task
    assert "hi Ada" in shown


async def test_r_is_refused_what_it_asks_for_when_nobody_can_answer(code: BridgeClient) -> None:
    assert (await code.run("kept <- 'yes'", language="r")).status == "ok"
    ran = await code.run("cat('before'); readline('who? ')", language="r")
    assert [event["type"] for event in ran.events] == ["started", "stdout", "error", "end"]
    assert NOBODY in (ran.error or {})["message"]
    ran = await code.run("tryCatch(readline('who? '), error = function(e) cat(kept, 'caught'))", language="r")
    assert (ran.status, ran.stdout) == ("ok", "yes caught")
