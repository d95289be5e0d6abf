"""The code interpreter in a real sandbox: kernels that live in the snapshot, their state, what is told of their end."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.client import ApiError, Box
from kit.data import CHECKOUT, SHARED
from kit.server import Server, environment

pytestmark = pytest.mark.skipif(
    not os.environ.get("CLOCHE_TEST_TEMPLATES"),
    reason="baking code-interpreter takes minutes: run it with CLOCHE_TEST_TEMPLATES=1",
)


def _base_with_code(baked: Path) -> Path:
    """A base directory of its own beside that of the others, who go on with the template they know. It is kept."""
    base = Path(f"{baked}-code")
    base.mkdir(mode=0o700, exist_ok=True)
    with (base / "test.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for part in SHARED:
            (base / part).mkdir(mode=0o700, exist_ok=True)
            for path in (baked / part).iterdir():
                if not path.name.startswith(".") and not (base / part / path.name).exists():
                    shutil.copytree(path, base / part / path.name, copy_function=os.link, symlinks=True)
        program = "from cloche_server.cli.main import main; main()"
        bake = [sys.executable, "-c", program, "template", "bake", "code-interpreter"]
        subprocess.run(bake, env={**environment(), "CLOCHE_DATA": str(base)}, check=True, timeout=1500)
    return base


@pytest.fixture(scope="module")
def interpreter(baked: Path) -> Iterator[Server]:
    """A server with the template, which is baked when it is not there as it should be."""
    server = Server.make(_base_with_code(baked), pool_launched=0, pool_warm=0)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def box(interpreter: Server) -> Box:
    return interpreter.api.create(template="code-interpreter", env={"FROM_SANDBOX": "yes"}, cwd="/tmp", ttl_seconds=900)


def run(box: Box, code: str, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = box.api.call(
        "POST", f"/v1/sandboxes/{box.id}/code", json={"code": code, **fields}, timeout=200
    )
    return answer


def value(box: Box, code: str, **fields: Any) -> str:
    ran = run(box, code, **fields)
    assert ran["status"] == "ok", ran
    return str(ran["results"][-1]["data"]["text/plain"])


def test_the_kernel_is_there_and_has_the_sandbox_around_it(box: Box) -> None:
    assert box.refresh()["memory_mb"] == 1024
    assert value(box, "1 + 1") == "2"
    ran = run(
        box, "import os\nprint(os.environ['FROM_SANDBOX'], os.environ['A'], os.getcwd(), os.getuid())", env={"A": "a"}
    )
    assert ran["stdout"] == "yes a /tmp 0\n"
    assert value(box, "x = 40\nx + 2") == "42"
    assert value(box, "x") == "40"


def test_data_and_a_chart(box: Box) -> None:
    box.put("/tmp/data.csv", b"city,people\nParis,2.1\nRome,2.8\n")
    ran = run(
        box,
        "import pandas as pd, matplotlib.pyplot as plt\n"
        "df = pd.read_csv('data.csv')\ndf.plot.bar(x='city', y='people')\nplt.show()\ndf",
    )
    chart, table = ran["results"]
    assert base64.b64decode(chart["data"]["image/png"]).startswith(b"\x89PNG\r\n")
    drawn = chart["data"]["application/vnd.cloche.chart+json"]["charts"][0]
    assert [(e["label"], e["value"]) for e in drawn["elements"]] == [("Paris", 2.1), ("Rome", 2.8)]
    assert table["main"]
    assert "<table" in table["data"]["text/html"]


def test_other_languages(box: Box) -> None:
    assert run(box, "A=5; pwd", language="bash")["stdout"] == "/tmp\n"
    assert run(box, "echo $A$FROM_SANDBOX", language="bash")["stdout"] == "5yes\n"
    assert value(box, "const n: number = await Promise.resolve(20); n + 1", language="ts") == "21"
    with pytest.raises(ApiError) as refused:
        run(box, "1", language="cobol")
    assert refused.value.code == "request.invalid"


def test_events_come_as_the_code_runs(box: Box) -> None:
    body = {"code": "import sys\nprint('a')\nprint('b', file=sys.stderr)\n1/0", "stream": True}
    with box.api.http.stream("POST", f"/v1/sandboxes/{box.id}/code", json=body, timeout=100) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith(("event", "data"))]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    assert names[0] == "started"
    assert names[-2:] == ["error", "end"]
    end = json.loads(lines[-1].removeprefix("data: "))
    assert (end["status"], end["state_lost"]) == ("error", False)


def test_the_example(interpreter: Server, box: Box, tmp_path: Path) -> None:
    """In a sandbox of its own, which is made and deleted by it."""
    env = {**environment(), "CLOCHE_API_URL": interpreter.url, "CLOCHE_API_KEY": interpreter.token}
    command = [sys.executable, str(CHECKOUT / "examples" / "data_analysis.py"), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "Feb north: 140" in done.stdout
    assert (tmp_path / "sales.png").read_bytes().startswith(b"\x89PNG")


def test_ends_are_told(box: Box) -> None:
    ran = run(box, "import time; time.sleep(60)", timeout_seconds=1)
    assert (ran["status"], ran["state_lost"]) == ("timeout", False)
    assert value(box, "x") == "40"
    ran = run(box, "import os; os._exit(1)")
    assert (ran["status"], ran["state_lost"]) == ("killed", True)
    assert "exit code 1" in ran["detail"]
    ran = run(box, "b = []\nwhile True: b.append(bytearray(32 << 20)); b[-1][::4096] = b'x' * (8192)")
    assert (ran["status"], ran["state_lost"]) == ("oom", True)
    assert value(box, "1 + 1") == "2"


def test_forks_have_the_state_and_their_own_random_numbers(box: Box) -> None:
    value(box, "import random, numpy\nkept = 'yes'\n0")
    made = box.api.call("POST", f"/v1/sandboxes/{box.id}/fork", json={"count": 1}, timeout=120)
    children = [box.api.keep(child) for child in made["children"]]
    drawn = [value(one, "(kept, random.random(), numpy.random.rand())") for one in (box, *children)]
    assert all(text.startswith("('yes', ") for text in drawn)
    assert len(set(drawn)) == 2
    assert len({text.split()[2] for text in drawn}) == 2
    for child in children:
        child.delete()


def test_state_outlives_hibernation(box: Box) -> None:
    value(box, "slept = 1\nslept")
    box.api.call("POST", f"/v1/sandboxes/{box.id}/hibernate", timeout=120)
    assert value(box, "slept") == "1"


def test_who_hangs_up_interrupts(box: Box) -> None:
    body = {"code": "import time\ntime.sleep(300)", "stream": True}
    with box.api.http.stream("POST", f"/v1/sandboxes/{box.id}/code", json=body, timeout=100) as answer:
        next(answer.iter_lines())
    began = time.monotonic()
    assert value(box, "3") == "3"
    assert time.monotonic() - began < 60


def test_other_sandboxes_say_which_template_has_it(interpreter: Server) -> None:
    other = interpreter.api.create(template="base", ttl_seconds=300)
    with pytest.raises(ApiError) as refused:
        run(other, "1")
    assert refused.value.code == "code.not_available"
    assert "code-interpreter" in str(refused.value)
