"""The bridge of the code interpreter with real kernels."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kit.code_bridge import BridgeClient, bridge

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def code(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BridgeClient]:
    async with bridge(tmp_path_factory.mktemp("b")) as client:
        yield client


async def test_practice_leaves_no_trace(code: BridgeClient) -> None:
    """It comes first here: a kernel that somebody has used is left alone."""
    names = "sorted(n for n in globals() if not n.startswith('__'))"
    assert await code.ask("practise") == {"type": "reply"}
    assert (await code.ask("list"))["contexts"][0]["cells"] == 0
    ran = await code.run(f"before = {names}\n'_' in globals() and _, len(Out), In[-1][:6]")
    assert ran.results == [{"text/plain": "('', 0, 'before')"}]
    assert ran.end["execution_count"] == 1
    count = (await code.run("get_ipython().execution_count")).results
    assert await code.ask("practise") == {"type": "reply"}
    assert (await code.run("get_ipython().execution_count - 1")).results == count


async def test_state_output_and_value(code: BridgeClient) -> None:
    await code.run("x = 20")
    ran = await code.run("import os, sys\nprint('out'); print('err', file=sys.stderr); os.system('echo deep')\nx + 1")
    assert ran.status == "ok"
    assert sorted(ran.stdout.split()) == ["deep", "out"]
    assert ran.text("stderr") == "err\n"
    assert ran.results == [{"text/plain": "21"}]
    assert next(e for e in ran.events if e["type"] == "result")["main"]


async def test_input_is_answered(code: BridgeClient) -> None:
    seen = []
    async for event in code.events(
        {"op": "run", "code": "print('hi', input('name? '))", "timeout_ms": 20000, "input": True}
    ):
        seen.append(event)
        if event["type"] == "input":
            assert event["prompt"] == "name? "
            assert await code.ask("input", context="python", text="Ada") == {"type": "reply"}
    assert "".join(e["text"] for e in seen if e["type"] == "stdout") == "hi Ada\n"
    assert (await code.ask("input", context="python", text="x"))["reason"] == "not_waiting"


async def test_every_figure_once_also_before_an_exception(code: BridgeClient) -> None:
    ran = await code.run(
        "import matplotlib.pyplot as plt\nprint('before')\n"
        "fig, ax = plt.subplots()\nax.bar(['a', 'ü'], [1, 2], label='g')\n"
        "ax.set_title('T')\nplt.show()\nplt.show()\nplt.figure(); plt.plot([1, 2], [3, 4])\nraise ValueError('late')"
    )
    assert ran.stdout == "before\n", ran.events
    assert [base64.b64decode(one["image/png"])[:4] for one in ran.results] == [b"\x89PNG"] * 2
    assert ran.error is not None
    assert [e["type"] for e in ran.events[-2:]] == ["error", "end"]
    assert "iVBOR" not in ran.stdout + ran.error["traceback"]
    first, second = (json.loads(one["application/vnd.cloche.chart+json"])["charts"][0] for one in ran.results)
    assert (first["type"], first["title"]) == ("bar", "T")
    assert first["elements"] == [
        {"label": "a", "group": "g", "value": 1},
        {"label": "ü", "group": "g", "value": 2},
    ]
    assert second["type"] == "line"
    assert second["elements"] == [{"label": "", "points": [[1, 3], [2, 4]]}]


async def test_bars_of_groups_have_the_name_they_stand_around(code: BridgeClient) -> None:
    text = (
        "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\n"
        "ax.bar([-0.2, 0.8], [1, 2], 0.4, label='n')\nax.bar([0.2, 1.2], [3, 4], 0.4, label='s')\n"
        "_ = ax.set_xticks([0, 1], ['Jan', 'Feb'])"
    )
    ran = await code.run(text)
    found = json.loads(ran.results[0]["application/vnd.cloche.chart+json"])["charts"][0]["elements"]
    assert [(e["label"], e["group"], e["value"]) for e in found] == [
        ("Jan", "n", 1), ("Feb", "n", 2), ("Jan", "s", 3), ("Feb", "s", 4),
    ]  # fmt: skip
    ran = await code.run("plt.bar([1, 2.5], [1, 2])\nplt.show()")
    found = json.loads(ran.results[0]["application/vnd.cloche.chart+json"])["charts"][0]["elements"]
    assert [e["label"] for e in found] == ["1.0", "2.5"]


async def test_charts_of_other_kinds(code: BridgeClient) -> None:
    drawn = {
        "pie": "plt.pie([1, 3], labels=['a', 'b'])",
        "scatter": "plt.scatter([1, 2], [3, 4], label='s')",
        "box": "plt.boxplot([[1, 2, 3, 4, 50], [2, 3, 4]])",
        "unknown": "plt.imshow([[1, 2], [3, 4]])",
    }
    for kind, text in drawn.items():
        ran = await code.run(f"import matplotlib.pyplot as plt\n_ = {text}")
        assert len(ran.results) == 1, kind
        chart = json.loads(ran.results[0]["application/vnd.cloche.chart+json"])["charts"][0]
        assert chart["type"] == kind
        if kind == "pie":
            assert [(e["label"], round(e["fraction"], 3)) for e in chart["elements"]] == [("a", 0.25), ("b", 0.75)]
        if kind == "box":
            assert chart["elements"][0]["median"] == 3
            assert chart["elements"][0]["outliers"] == [50]


async def test_the_state_is_lost_with_its_kernel(code: BridgeClient) -> None:
    await code.run("kept = 1")
    ran = await code.run("import os; os._exit(7)")
    assert (ran.status, ran.end["state_lost"], ran.end["exit_code"]) == ("killed", True, 7)
    assert (await code.run("'kept' in dir()")).results == [{"text/plain": "False"}]


async def test_timeout_interrupts_and_then_kills(code: BridgeClient) -> None:
    await code.run("kept = 1")
    ran = await code.run("import time\ntime.sleep(60)", timeout=0.5)
    assert (ran.status, ran.end["state_lost"]) == ("timeout", False)
    assert (await code.run("kept")).results == [{"text/plain": "1"}]
    stubborn = "import time\nwhile True:\n    try:\n        time.sleep(1)\n    except KeyboardInterrupt:\n        pass"
    ran = await code.run(stubborn, timeout=0.5)
    assert (ran.status, ran.end["state_lost"]) == ("timeout", True)
    assert (await code.run("1")).results == [{"text/plain": "1"}]


async def test_a_reader_that_goes_away_interrupts(code: BridgeClient) -> None:
    reader, writer = await code.open({"op": "run", "code": "import time\ntime.sleep(600)", "timeout_ms": 600_000})
    assert (await code.read(reader) or {})["type"] == "started"
    writer.close()
    ran = await code.run("2", timeout=20)
    assert ran.results == [{"text/plain": "2"}]


async def test_interrupt_restart_and_delete_while_it_runs(code: BridgeClient) -> None:
    for op, status, lost in (("interrupt", "interrupted", False), ("restart", "killed", True)):
        running = asyncio.create_task(code.run("import time\nprint('on', flush=True)\ntime.sleep(60)"))
        while (await code.ask("list"))["contexts"][0]["state"] != "busy":
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        assert (await code.ask(op, context="python"))["type"] == "reply"
        ran = await running
        assert (ran.status, ran.end["state_lost"]) == (status, lost)
    assert (await code.ask("delete", context="nothing"))["reason"] == "no_context"


async def test_large_output_is_whole_and_in_order(code: BridgeClient) -> None:
    ran = await code.run("for i in range(20000): print(i)")
    assert ran.stdout.split() == [str(i) for i in range(20000)]
    ran = await code.run("print('x' * 5_000_000)\nprint('y' * 1000)\n'end'")
    assert len(ran.stdout) == 5_001_002
    assert ran.results == [{"text/plain": "'end'"}]
    assert max(len(e["text"]) for e in ran.events if e["type"] == "stdout") <= 32768


async def test_a_slow_reader_stops_the_kernel_and_loses_nothing(code: BridgeClient) -> None:
    text = "for i in range(2000): print(str(i) * 2000, flush=True)"
    reader, writer = await code.open({"op": "run", "code": text, "timeout_ms": 60_000})
    await asyncio.sleep(1.5)
    total = 0
    async for event in code.rest(reader):
        assert event["type"] in {"started", "stdout", "alive", "end"}
        total += len(event.get("text", ""))
    writer.close()
    assert total == sum(len(str(i)) * 2000 + 1 for i in range(2000))


async def test_output_belongs_to_its_own_cell(code: BridgeClient) -> None:
    await code.run(
        "import threading, time\ndef late():\n    time.sleep(0.2)\n    print('LATE', flush=True)\n"
        "threading.Thread(target=late).start()"
    )
    ran = await code.run("time.sleep(0.5)\nprint('mine')")
    assert ran.stdout == "mine\n"


async def test_environment_and_directory_of_a_run(code: BridgeClient) -> None:
    show = "import os\nprint(os.environ.get('A'), os.environ.get('B'), os.getcwd())"
    ran = await code.run(show, env={"A": "1"}, base={"B": "2"}, cell_cwd="/tmp")
    assert ran.stdout == "1 2 /tmp\n"
    ran = await code.run(show)
    assert ran.stdout.startswith("None 2 ")
    assert not ran.stdout.endswith(" /tmp\n")
    ran = await code.run("1", cell_cwd="/nowhere")
    assert (ran.status, ran.error and ran.error["name"]) == ("error", "FileNotFoundError")


async def test_bash_keeps_its_state(code: BridgeClient) -> None:
    ran = await code.run("cd /tmp; X=5; echo out; echo err >&2; false", language="bash")
    assert (ran.stdout, ran.text("stderr"), ran.status) == ("out\n", "err\n", "error")
    ran = await code.run("echo $X $PWD $Q", language="bash", env={"Q": "q"})
    assert ran.stdout == "5 /tmp q\n"
    assert (await code.run("echo [$Q]; read y; echo [$y]", language="bash")).stdout == "[]\n[]\n"
    ran = await code.run("sleep 60", language="bash", timeout=0.5)
    assert (ran.status, ran.end["state_lost"]) == ("timeout", False)
    ran = await code.run("echo $X; exit 4", language="bash")
    assert ran.stdout == "5\n"
    assert ran.error is not None
    assert ran.error["name"] == "ShellEnded"
    assert (await code.run("echo [$X]", language="bash")).stdout == "[]\n"


async def test_contexts_are_apart_and_bounded(code: BridgeClient) -> None:
    made = []
    while True:
        answer = await code.ask("create", language="python")
        if answer["type"] == "refused":
            assert answer["reason"] == "too_many"
            break
        made.append(answer["context"]["id"])
    assert len((await code.ask("list"))["contexts"]) == 24
    ran = await asyncio.gather(
        *(code.run(f"n = {i}\nimport time; time.sleep(0.2)\nn", context=c) for i, c in enumerate(made))
    )
    assert [one.results for one in ran] == [[{"text/plain": str(i)}] for i in range(len(made))]
    values = await asyncio.gather(*(code.run("import random\nrandom.random()", context=c) for c in made))
    assert len({one.results[0]["text/plain"] for one in values}) == len(made)
    for one in made:
        await code.ask("delete", context=one)
    assert (await code.run("1", context=made[0])).end["reason"] == "no_context"


async def test_many_short_cells(code: BridgeClient) -> None:
    for i in range(200):
        ran = await code.run(f"{i}")
        assert ran.results == [{"text/plain": str(i)}]


async def test_a_connection_has_one_request_after_the_other(code: BridgeClient) -> None:
    reader, writer = await code.open({"op": "run", "code": "kept = 1", "timeout_ms": 30000})

    async def rest() -> list[str]:
        kinds: list[str] = []
        while not kinds or kinds[-1] not in {"end", "refused", "reply"}:
            event = await code.read(reader)
            assert event is not None
            kinds.append(event["type"])
        return kinds

    async def send(**request: Any) -> None:
        body = json.dumps(request).encode()
        writer.write(len(body).to_bytes(4, "big") + body)
        await writer.drain()

    async with asyncio.timeout(60):
        assert await rest() == ["started", "end"]
        await send(op="list")
        assert await rest() == ["reply"]
        await send(op="run", code="1", language="cobol", timeout_ms=1000)
        assert await rest() == ["refused"]
        for _ in range(3):
            await send(op="run", code="kept += 1; kept", timeout_ms=30000)
            assert await rest() == ["started", "result", "end"]
        # Two at once: the second one waits for the first.
        await send(op="run", code="import time; time.sleep(0.3); kept += 1", timeout_ms=30000)
        await send(op="run", code="kept", timeout_ms=30000)
        assert await rest() == ["started", "end"]
        assert await rest() == ["started", "result", "end"]
        await send(op="run", code="import time; time.sleep(60)", timeout_ms=90000)
        assert (await code.read(reader) or {})["type"] == "started"
        writer.close()
        assert (await code.run("kept")).results == [{"text/plain": "5"}], "whose end interrupts"


async def test_nonsense_is_hung_up_on(code: BridgeClient) -> None:
    for raw in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x01{"):
        reader, writer = await asyncio.open_connection("127.0.0.1", code.port)
        writer.write(raw)
        assert await reader.read() == b""
        writer.close()
    assert (await code.ask("dance"))["reason"] == "bad"
    assert (await code.run("1", language="cobol")).end["reason"] == "no_language"
