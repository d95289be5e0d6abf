"""Steps with undo: order, deadlines, cancellation, undo that fails."""

from __future__ import annotations

import asyncio
import errno

import pytest

from cloche_server.app import steps as steps_module
from cloche_server.app.steps import Step, run_steps, to_the_end
from cloche_server.core.errors import ClocheError


class Made:
    """Makes and unmakes things, and remembers the order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def step(self, name: str, fails: BaseException | None = None, undo_fails: BaseException | None = None) -> Step:
        async def do() -> None:
            self.log.append(f"+{name}")
            await asyncio.sleep(0)
            if fails is not None:
                raise fails

        async def undo() -> None:
            await asyncio.sleep(0)
            self.log.append(f"-{name}")
            if undo_fails is not None:
                raise undo_fails

        return Step(name, do, undo)


async def test_all_steps_in_order() -> None:
    made = Made()
    took = await run_steps("x", [made.step("a"), made.step("b")])
    assert made.log == ["+a", "+b"]
    assert list(took) == ["a", "b"]


@pytest.mark.parametrize("error", [ClocheError("internal", "x"), ValueError(), RuntimeError()])
async def test_a_failure_undoes_what_had_begun_last_first(error: BaseException) -> None:
    made = Made()
    steps = [made.step("a"), made.step("b"), made.step("c", fails=error), made.step("d")]
    work = asyncio.ensure_future(_caught(run_steps("x", steps)))
    assert await work is error
    assert made.log == ["+a", "+b", "+c", "-c", "-b", "-a"]


async def _caught(work: object) -> BaseException | None:
    try:
        await work  # type: ignore[misc]
    except BaseException as error:  # noqa: BLE001 - what is asked for
        return error
    return None


@pytest.mark.parametrize("error", [ClocheError("internal", "x"), OSError(), RuntimeError("closed"), ValueError()])
async def test_an_undo_that_fails_does_not_stop_the_others(error: Exception) -> None:
    made = Made()
    steps = [made.step("a"), made.step("b", undo_fails=error), made.step("c", fails=ClocheError("internal", "first"))]
    with pytest.raises(ClocheError, match="first"):
        await run_steps("x", steps)
    assert made.log[-3:] == ["-c", "-b", "-a"]


async def test_a_deadline_is_told_and_undone() -> None:
    made = Made()

    async def for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ClocheError, match=r"slow took longer than 0\.01 s") as told:
        await run_steps("create", [made.step("a"), Step("slow", for_ever, deadline=0.01)])
    assert told.value.code == "sandbox.boot_failed"
    assert made.log == ["+a", "-a"]


async def test_an_undo_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "UNDO_TIMEOUT", 0.01)
    made = Made()

    async def nothing() -> None:
        return None

    async def for_ever() -> None:
        await asyncio.Event().wait()

    steps = [made.step("a"), Step("hangs", nothing, for_ever), made.step("c", fails=ClocheError("internal", "x"))]
    with pytest.raises(ClocheError):
        await run_steps("x", steps)
    assert made.log[-1] == "-a"


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_cancelling_again_and_again_does_not_stop_the_undo(times: int) -> None:
    made = Made()
    reached = asyncio.Event()

    async def for_ever() -> None:
        reached.set()
        await asyncio.Event().wait()

    steps = [made.step("a"), made.step("b"), Step("wait", for_ever)]
    task = asyncio.ensure_future(run_steps("x", steps))
    await reached.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({task})
    assert task.cancelled()
    assert made.log == ["+a", "+b", "-b", "-a"]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "host.disk_full"),
        (errno.EMFILE, "capacity.unavailable"),
        (errno.ENFILE, "capacity.unavailable"),
        (errno.ENOMEM, "capacity.unavailable"),
        (errno.EIO, "internal"),
    ],
)
async def test_errors_of_the_system_become_sentences(number: int, code: str) -> None:
    made = Made()
    with pytest.raises(ClocheError) as told:
        await run_steps("create", [made.step("a"), made.step("b", fails=OSError(number, "words of the system"))])
    assert told.value.code == code
    assert (told.value.retry_after is not None) == (code == "capacity.unavailable")
    assert made.log[-1] == "-a"


async def test_to_the_end_tells_failures() -> None:
    async def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await to_the_end(fail())
