"""R in the code interpreter of a real sandbox. The template is not one that `./test` bakes."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit import data, interpreter
from kit.cells import NOBODY
from kit.client import Box
from kit.interpreter import stream
from kit.server import Server

TEMPLATE = "code-interpreter-r"
#: A data directory in which `cloche-server template bake code-interpreter-r` was run.
BAKED = os.environ.get("CLOCHE_TEST_POLYGLOT", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BAKED or not data.is_baked(Path(BAKED), TEMPLATE),
        reason=f"CLOCHE_TEST_POLYGLOT names no data directory with the templates base and {TEMPLATE}",
    ),
]


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    server = Server.make(Path(BAKED), TEMPLATE, pool_launched=0, pool_warm=0)
    try:
        server.start()
        yield server.api.create(template=TEMPLATE, cwd="/tmp", ttl_seconds=900)
    finally:
        server.close()


def run(box: Box, code: str, **fields: Any) -> dict[str, Any]:
    return interpreter.run(box, code, language="r", **{"timeout_seconds": 60, **fields})


def shown(ran: dict[str, Any]) -> list[str]:
    assert ran["status"] == "ok", ran
    return [one["data"]["text/plain"] for one in ran["results"]]


def test_values_errors_and_state(box: Box) -> None:
    assert shown(run(box, "x <- 40; x + 2")) == ["[1] 42"]
    ran = run(box, "cat('out\\n'); message('err'); x")
    assert (ran["stdout"], ran["stderr"].strip(), shown(ran)) == ("out\n", "err", ["[1] 40"])
    ran = run(box, "stop('no ', x)")
    assert (ran["status"], ran["state_lost"]) == ("error", False)
    assert "no 40" in ran["error"]["message"]
    assert "stop(" in ran["error"]["traceback"]
    (table,) = run(box, "data.frame(a = 1:2, b = c('x', 'ü'))")["results"]
    assert table["data"]["text/plain"] == "  a b\n1 1 x\n2 2 ü"
    assert "<table" in table["data"]["text/html"]


def test_a_plot_before_an_error_is_a_picture(box: Box) -> None:
    ran = run(box, "print('before'); plot(1:3); stop('late')")
    assert (ran["status"], ran["stdout"]) == ("error", '[1] "before"\n')
    assert "late" in ran["error"]["message"]
    (drawn,) = ran["results"]
    assert base64.b64decode(drawn["data"]["image/png"]).startswith(b"\x89PNG")
    assert "iVBOR" not in ran["stdout"] + ran["error"]["traceback"]


def test_input_is_refused_at_once_or_answered(box: Box) -> None:
    ran = run(box, "readline('who? ')")
    assert ran["status"] == "error", ran
    assert NOBODY in ran["error"]["message"]
    with stream(box, "cat('hi', readline('who? '))", language="r", input=True) as events:
        asked = next(event for event in events if event.name == "input_requested")
        assert asked.data == {"prompt": "who? ", "password": False}
        box.api.call("POST", f"{box.path}/code/contexts/r/input", json={"text": "Ada"})
        told, end = events
    assert (told.data["text"], end.data["status"]) == ("hi Ada", "ok")


def test_interrupt_and_timeout_keep_the_state_and_death_does_not(box: Box) -> None:
    with stream(box, "kept <- 'yes'; cat('in\\n'); Sys.sleep(300)", language="r") as events:
        assert [next(events).name for _ in range(2)] == ["started", "stdout"]
        assert box.api.call("POST", f"{box.path}/code/contexts/r/interrupt")["interrupted"]
        *_, end = events
    assert (end.data["status"], end.data["state_lost"]) == ("interrupted", False)
    ran = run(box, "Sys.sleep(300)", timeout_seconds=2)
    assert (ran["status"], ran["state_lost"]) == ("timeout", False)
    assert run(box, "cat(kept)")["stdout"] == "yes"
    ran = run(box, "tools::pskill(Sys.getpid(), 9)")
    assert (ran["status"], ran["state_lost"]) == ("killed", True)
    assert "SIGKILL" in ran["detail"]
    assert shown(run(box, "exists('kept')")) == ["[1] FALSE"]
