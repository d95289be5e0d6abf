"""Cells of the code interpreter that harm their kernel, end oddly or show pictures, and what has to come of each.

The bridge runs them on this machine, and sandboxes run them over HTTP: what comes is brought into one form.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from PIL import Image

#: In what refuses input.
NOBODY = "nobody can answer"
#: How a PNG begins in base64.
_PNG = "iVBOR"


@dataclass(frozen=True)
class Seen:
    """What came of a cell, by whichever road."""

    status: str
    lost: bool
    detail: str
    stdout: str
    stderr: str
    results: list[Mapping[str, Any]] = field(default_factory=list)
    error: Mapping[str, Any] | None = None

    @classmethod
    def answered(cls, answer: Mapping[str, Any]) -> Self:
        """Of the blocking form."""
        results = [one["data"] for one in answer["results"]]
        told = (answer["status"], answer["state_lost"], answer.get("detail", ""), answer["stdout"], answer["stderr"])
        return cls(*told, results, answer.get("error"))

    @classmethod
    def told(cls, events: Iterable[tuple[str, Mapping[str, Any]]]) -> Self:
        """Of events by their names. They come in order: the exception last, behind what was shown before it."""
        (first, _), *between, (last, end) = events
        assert (first, last) == ("started", "end")
        names = [name for name, _ in between if name != "alive"]
        assert set(names) <= {"stdout", "stderr", "result", "error"}
        assert "error" not in names[:-1]
        texts = ("".join(data["text"] for name, data in between if name == stream) for stream in ("stdout", "stderr"))
        results = [data["data"] for name, data in between if name == "result"]
        error = next((data for name, data in between if name == "error"), None)
        # The bridge leaves it to the host to make a sentence of it.
        detail = str(end.get("detail") or end.get("signal") or f"exit code {end.get('exit_code')}")
        return cls(end["status"], end["state_lost"], detail, *texts, results, error)

    @property
    def values(self) -> list[str]:
        return [str(one["text/plain"]) for one in self.results if "image/png" not in one]

    @property
    def pictures(self) -> list[str]:
        return [str(one["image/png"]) for one in self.results if "image/png" in one]


@dataclass(frozen=True)
class Cell:
    """Code, and what must come of it. `lost`: how its kernel ends by it. `message` is in the error, `trace` in its
    traceback, `stdout` is all of it unless `about`. `then`: the cell after it, with all that it prints. `spoils`: what
    it has closed stays closed."""

    code: str
    status: str = "ok"
    stdout: str = ""
    about: bool = False
    values: tuple[str, ...] = ()
    pictures: int = 0
    error: str = ""
    message: str = ""
    trace: str = ""
    lost: str = ""
    then: tuple[str, str] = ("print(6 * 7)", "42\n")
    spoils: bool = False

    def check(self, seen: Seen) -> None:
        assert (seen.status, seen.lost) == (self.status, bool(self.lost)), seen
        assert self.lost in seen.detail, seen
        assert seen.stdout == self.stdout or (self.about and self.stdout in seen.stdout), seen
        assert seen.stderr == "", seen
        assert tuple(seen.values) == self.values, seen
        assert len(seen.pictures) == self.pictures, seen
        for one in seen.pictures:
            with Image.open(io.BytesIO(base64.b64decode(one, validate=True))) as picture:
                picture.load()
                assert picture.format == "PNG"
        error = seen.error or {"name": "", "message": "", "traceback": ""}
        assert error["name"] == self.error, seen
        assert self.message in error["message"], seen
        assert self.trace in error["traceback"], seen
        texts = (seen.stdout, seen.stderr, *error.values(), *(str(one["text/plain"]) for one in seen.results))
        assert not any(_PNG in str(text) or "\x1b[" in str(text) for text in texts), "no picture and no colour in text"


def _killed(code: str, how: str) -> Cell:
    return Cell(code, status="killed", lost=how)


def _asks(code: str, **more: Any) -> Cell:
    return Cell(code, status="error", error="StdinNotImplementedError", message=NOBODY, **more)


_LATE = (
    "import threading\ngo = threading.Event()\nlate = threading.Thread(target=lambda: (go.wait(), print('LATE')))\n"
    "late.start()"
)
_FIGURE = "import matplotlib.pyplot as plt\nf = plt.figure(figsize=(1, 1)); _ = plt.plot([1, 2])\n"

CELLS: dict[str, Cell] = {
    "kills itself": _killed("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    "segfault": _killed("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "leaves": _killed("import os; os._exit(7)", "exit code 7"),
    "closes its output": Cell("import os\nos.closerange(1, 3)\nprint('said')", stdout="said\n", spoils=True),
    "forks and goes on in both": Cell("import os\nprint('said', flush=True)\n_ = os.fork()", stdout="said\n"),
    "forks and waits": Cell(
        "import os\npid = os.fork()\nif pid == 0: os._exit(0)\n_ = os.waitpid(pid, 0)\nprint('said')", stdout="said\n"
    ),
    "uses other processes": Cell(
        "from multiprocessing import Pool\nwith Pool(2) as pool: print(pool.map(abs, [-1])[0])", stdout="1\n"
    ),
    "a thread that prints": Cell(
        "import threading\nt = threading.Thread(target=print, args=('said',)); t.start(); t.join()", stdout="said\n"
    ),
    "a thread that prints after the end": Cell(_LATE, then=("go.set(); late.join(); print('mine')", "mine\n")),
    "a figure before an exception": Cell(
        f"{_FIGURE}print('before')\nraise ValueError('late')",
        status="error", stdout="before\n", pictures=1, error="ValueError", message="late", trace="raise ValueError",
    ),
    "two figures": Cell(f"{_FIGURE}{_FIGURE}", pictures=2),
    "shown twice": Cell(f"{_FIGURE}plt.show(); plt.show()", pictures=1),
    "only saved": Cell(
        f"{_FIGURE}import io; file = io.BytesIO(); f.savefig(file); print(file.getvalue()[1:4])",
        stdout="b'PNG'\n", pictures=1,
    ),
    "a picture of PIL": Cell("from PIL import Image\nImage.new('RGB', (3, 2))", pictures=1),
    "await": Cell("import asyncio\nawait asyncio.sleep(0.01)\n5", values=("5",)),
    "asyncio.run": Cell(
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 7\nasyncio.run(f())", values=("7",)
    ),
    "a program": Cell("!ls -d /etc /nowhere 2>&1 | sort", stdout="/etc\n", about=True),
    "a magic": Cell("%time 1 + 1", stdout="Wall time", about=True, values=("2",)),
    "sys.exit": Cell("import sys; sys.exit(3)", status="error", error="SystemExit", message="3"),
    "no syntax": Cell("def (", status="error", error="SyntaxError", message="invalid syntax", trace="def ("),
    "a group of exceptions": Cell(
        "raise ExceptionGroup('two', [ValueError(1), KeyError(2)])",
        status="error", error="ExceptionGroup", message="two (2 sub-exceptions)", trace="| KeyError: 2",
    ),
    "no repr": Cell(
        "class A:\n    def __repr__(self): raise ValueError('broken')\nA()",
        status="error", error="ValueError", message="broken", trace="__repr__",
    ),
    "input": _asks("print('hi'); input('name? ')", stdout="hi\n"),
    "getpass": _asks("import getpass\ngetpass.getpass('word? ')"),
    "pdb": _asks("import pdb\npdb.set_trace()\n1", stdout="pdb.set_trace()", about=True),
    "breakpoint": _asks("breakpoint()\n1", stdout="breakpoint()", about=True),
}  # fmt: skip
