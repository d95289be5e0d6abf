"""The value of a cell goes with the reply, in its place, and is not kept from anybody by a cell that goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kit.code_bridge import BridgeClient, bridge

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]

PLOT = "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\n"
THREAD = "import threading, sys\nthread = threading.Thread(target=print, args=('t',))\n"
#: What a cell shows, in order: a stream's text, the text of a result, or `figure`.
SHOWN = {
    "value": ("1 + 1", ["2"]),
    "text first": ("print('a')\n2", ["a\n", "2"]),
    "text of a program first": ("!echo deep\n2", ["deep\n", "2"]),
    "figure last": (PLOT + "2", ["2", "figure"]),
    "figure that is shown": (PLOT + "plt.show()\n2", ["figure", "2"]),
    "two values": ("get_ipython().run_cell('1')\n2", ["1", "2"]),
    "value of a cell in a cell": ("get_ipython().run_cell('1').success", ["1", "True"]),
    "awaited": ("import asyncio\nawait asyncio.sleep(0.01, 5)", ["5"]),
    "text behind a value": ("class A:\n  def __repr__(self): print('a'); return 'A'\nA()", ["a\n", "A"]),
    "thread that has ended": (THREAD + "thread.start(); thread.join()\n2", ["t\n", "2"]),
    "assignments": ("%config InteractiveShell.ast_node_interactivity='last_expr_or_assign'\n", []),
    "assigned": ("x = 4", ["4"]),
    "each": ("%config InteractiveShell.ast_node_interactivity='all'\n", []),
    "two": ("1\n2", ["1", "2"]),
    "usual": ("%config InteractiveShell.ast_node_interactivity='last_expr'\n", []),
    "only the last": ("1\n2", ["2"]),
    "hidden": ("1;", []),
    "none": ("None", []),
    "magic": ("%%capture seen\nprint('a')\n1", []),
    "captured": ("seen.stdout, len(seen.outputs)", ["('a\\n', 1)"]),
    "page": ("len?", ["page"]),
}
WAITS = "\nimport time; time.sleep(20)"
INNER = "def f():\n  get_ipython().run_cell('7'); import time; time.sleep(20)\nf()"
AT_ONCE = {
    "a cell in the cell": "get_ipython().run_cell('7')" + WAITS,
    "shown by the program": "import sys; sys.displayhook(7)" + WAITS,
    "shown by what is run": "exec(compile('7', 'c', 'single'))" + WAITS,
    "a cell in the last expression": INNER,
    "a display": "display(7)" + WAITS,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def code(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BridgeClient]:
    async with bridge(tmp_path_factory.mktemp("b")) as client:
        yield client


def shown(events: list[dict[str, Any]]) -> list[str]:
    found = []
    for event in events:
        if event["type"] in {"stdout", "stderr"}:
            found.append(event["text"])
        elif event["type"] == "result":
            data = event["data"]
            text = data["text/plain"]
            found.append("figure" if "image/png" in data else "page" if "Docstring" in text else text)
    return found


async def test_what_is_shown_comes_in_its_place(code: BridgeClient) -> None:
    for what, (cell, wanted) in SHOWN.items():
        ran = await code.run(cell)
        assert (ran.status, shown(ran.events)) == ("ok", wanted), (what, ran.events)
        assert [event["type"] for event in ran.events][:: len(ran.events) - 1] == ["started", "end"]


async def test_the_value_is_the_main_result(code: BridgeClient) -> None:
    ran = await code.run("display(1)\n2")
    assert [(e["main"], e["data"]["text/plain"]) for e in ran.events if e["type"] == "result"] == [
        (False, "1"),
        (True, "2"),
    ]


@pytest.mark.parametrize("what", AT_ONCE)
async def test_what_a_cell_shows_while_it_goes_on_is_there_at_once(code: BridgeClient, what: str) -> None:
    seen = []
    async with asyncio.timeout(60):
        async for event in code.events({"op": "run", "code": AT_ONCE[what], "timeout_ms": 60_000}):
            seen.append(event)
            if event["type"] == "result":
                assert await code.ask("interrupt", context="python") == {"type": "reply", "interrupted": True}
    assert shown(seen) == ["7"], seen
    assert seen[-1]["status"] == "interrupted"


async def test_that_a_cell_has_started_is_told_while_it_says_nothing(code: BridgeClient) -> None:
    types = []
    async with asyncio.timeout(60):
        async for event in code.events({"op": "run", "code": "import time; time.sleep(20)", "timeout_ms": 60_000}):
            types.append(event["type"])
            if event["type"] == "started":
                assert (await code.ask("interrupt", context="python"))["interrupted"]
    assert [types[0], types[-1]] == ["started", "end"]


async def test_what_is_called_behind_a_cell_may_fail_or_end_the_kernel(code: BridgeClient) -> None:
    register = "get_ipython().events.register('post_run_cell', behind)"
    await code.run("def behind(_): raise ValueError('behind')\n" + register)
    ran = await code.run("11")
    assert ran.results == [{"text/plain": "11"}]
    assert ran.error is not None
    assert ran.error["message"] == "behind"
    await code.run("get_ipython().events.unregister('post_run_cell', behind)")
    await code.run("def behind(ran):\n  import os, time\n  if ran.result == 12: time.sleep(1); os._exit(3)")
    await code.run(register)
    ran = await code.run("12")
    assert (ran.status, ran.end["state_lost"], shown(ran.events)) == ("killed", True, ["12"])
    assert shown((await code.run("13")).events) == ["13"]


async def test_hooks_of_a_program_see_its_values(code: BridgeClient) -> None:
    await code.run("def hook(message):\n  seen.append(message['content']['data']); return message\nseen = []")
    await code.run("get_ipython().displayhook.register_hook(hook)")
    assert shown((await code.run("13")).events) == ["13"]
    ran = await code.run("get_ipython().displayhook.unregister_hook(hook)\nseen")
    assert shown(ran.events) == ["[{'text/plain': '13'}]"]
