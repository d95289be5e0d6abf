"""Cells that harm their kernel, end oddly or show too much, and many of them: over HTTP, in one sandbox."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit import schedule
from kit.cells import CELLS, Seen
from kit.client import Box
from kit.interpreter import TEMPLATE, run, stream, value
from kit.server import Server

pytestmark = pytest.mark.slow

#: Cells in one kernel, by connections that are kept; and lines. Emulation makes a minute of what is instant elsewhere.
SHORT, PRINTS = (300, 50_000) if schedule.is_whole() else (120, 20_000)
LINE = 5_000_000
#: With what base64 adds they are more than a blocking answer holds. So many are drawn, too.
PLOTS = 30
DRAWN = PLOTS if schedule.is_whole() else 8
NOISE = 900_000


@pytest.fixture(scope="module")
def box(baked: Path) -> Iterator[Box]:
    server = Server.make(baked, TEMPLATE, pool_launched=0, pool_warm=0)
    try:
        server.start()
        yield server.api.create(template=TEMPLATE, cwd="/tmp", ttl_seconds=1800)
    finally:
        server.close()


@pytest.mark.parametrize("what", schedule.some(list(CELLS)))
def test_an_odd_cell_ends_as_it_should_and_the_next_one_works(box: Box, what: str) -> None:
    cell = CELLS[what]

    def next_one() -> None:
        ran = run(box, cell.then[0], timeout_seconds=60)
        assert (ran["status"], ran["stdout"], ran["stderr"], ran["results"]) == ("ok", cell.then[1], "", [])

    def heal() -> None:
        if cell.spoils:
            box.api.call("POST", f"{box.path}/code/contexts/python/restart")

    with stream(box, cell.code, timeout_seconds=60) as events:
        cell.check(Seen.told([(event.name, event.data) for event in events]))
    next_one()
    heal()  # the number that a closed file had is another one's by now
    cell.check(Seen.answered(run(box, cell.code, timeout_seconds=60)))
    next_one()
    heal()


def test_the_last_of_many_short_cells_is_as_fast_as_the_first(box: Box) -> None:
    value(box, "count = 0\ncount")
    took = []
    for number in range(1, SHORT + 1):
        began = time.monotonic()
        assert value(box, "count += 1\ncount") == str(number)
        took.append(time.monotonic() - began)
    first, last = sorted(took[:30]), sorted(took[-30:])
    assert last[15] < 3 * first[15], (first, last)


def test_many_small_prints_and_a_long_line(box: Box) -> None:
    with stream(box, f"for i in range({PRINTS}): print(i)", timeout_seconds=120) as events:
        *shown, end = [event for event in events if event.name != "started"]
    assert end.data["status"] == "ok", end
    assert "".join(event.data["text"] for event in shown).split("\n") == [*map(str, range(PRINTS)), ""]
    line = f"print('x' * {LINE})\n'end'"
    with stream(box, line) as events:
        _, *shown, result, end = events
    assert "".join(event.data["text"] for event in shown) == "x" * LINE + "\n"
    assert (result.data["data"], end.data["status"]) == ({"text/plain": "'end'"}, "ok")
    ran = run(box, line)
    assert (ran["stdout"][:3], ran["stdout"][-3:]) == ("xxx", "xx\n")
    kept = LINE + 1 - ran["stdout_dropped_bytes"]
    assert 0.9 * 2**20 < kept <= 2**20
    assert 0 < len(ran["stdout"]) - kept < 200, "a line says what is missing"


#: Noise cannot be made smaller. It is not even tried, which emulation would take seconds for.
NOISY = (
    "import matplotlib.pyplot as plt, numpy\n"
    "%config InlineBackend.print_figure_kwargs = {{'bbox_inches': None, 'pil_kwargs': {{'compress_level': 0}}}}\n"
    "for i in range({count}):\n"
    "    noise = numpy.frombuffer(numpy.random.bytes({size} * {size} * 3), 'u1').reshape({size}, {size}, 3)\n"
    "    f = plt.figure(figsize=({size} / 100, {size} / 100)); f.add_axes((0, 0, 0.01, 0.01)).set_axis_off()\n"
    "    f.figimage(noise); plt.show()\n"
    "print('behind')"
)


def test_a_real_figure_of_twenty_megabytes_is_told_as_dropped(box: Box) -> None:
    ran = run(box, NOISY.format(count=1, size=2240) + "\n3", timeout_seconds=120)
    assert (ran["status"], ran["stdout"], ran["results_dropped"]) == ("ok", "behind\n", 0), ran
    figure, result = ran["results"]
    assert figure["data"] == {"text/plain": "<Figure size 2240x2240 with 1 Axes>"}
    assert figure["dropped"].keys() == {"image/png"}
    assert figure["dropped"]["image/png"] > 20_000_000
    assert (result["data"], result["dropped"]) == ({"text/plain": "3"}, {})


def test_many_noisy_plots_are_streamed_whole_and_a_blocking_answer_tells_what_it_left_out(box: Box) -> None:
    with stream(box, NOISY.format(count=DRAWN, size=500), timeout_seconds=170) as events:
        _, *shown, behind, end = events
    assert [event.name for event in shown] == ["result"] * DRAWN
    assert min(len(picture(event.data)) for event in shown) > NOISE
    assert len({event.data["data"]["image/png"][-4000:] for event in shown}) == DRAWN, "each is its own"
    assert (behind.data["text"], end.data["status"]) == ("behind\n", "ok")
    again = (
        "import io\nfrom IPython.display import Image, display\n"
        "file = io.BytesIO(); f.savefig(file, pil_kwargs={'compress_level': 0})\n"
        f"for i in range({PLOTS}): display(Image(file.getvalue()))"
    )
    ran = run(box, again, timeout_seconds=170)
    assert ran["status"] == "ok", ran
    assert len(ran["results"]) + ran["results_dropped"] == PLOTS
    assert 0 < ran["results_dropped"] < PLOTS / 2
    assert all(len(picture(one)) > NOISE for one in ran["results"])


def picture(result: dict[str, Any]) -> bytes:
    data = base64.b64decode(result["data"]["image/png"], validate=True)
    assert data.startswith(b"\x89PNG")
    assert data.endswith(b"IEND\xaeB`\x82"), "it is whole"
    return data
