"""The code interpreter in a real sandbox: kernels that live in the snapshot, their state, what is told of their end."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandastack
import pytest
from jupyter_client import BlockingKernelClient
from PIL import Image

from kit import schedule
from kit.client import ApiError, Box
from kit.data import CHECKOUT
from kit.interpreter import CHART, TEMPLATE, context, run, stream, value
from kit.server import Server, environment
from kit.until import until

pytestmark = pytest.mark.slow

#: Side by side, and in one cell. A kernel takes emulation a second or two to start.
CONTEXTS = 20 if schedule.is_whole() else 8
PLOTS = 12


@pytest.fixture(scope="module")
def interpreter(baked: Path) -> Iterator[Server]:
    """A server with the template, which `./test` bakes."""
    server = Server.make(baked, TEMPLATE, pool_launched=0, pool_warm=0)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def box(interpreter: Server) -> Box:
    return interpreter.api.create(template=TEMPLATE, env={"FROM_SANDBOX": "yes"}, cwd="/tmp", ttl_seconds=900)


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
        "df = pd.read_csv('data.csv')\ndf.plot.bar(x='city', y='people', figsize=(3, 2))\n"
        "plt.gcf().set_layout_engine('none')\nplt.show()\ndf",
    )
    drawn, table = ran["results"]
    picture = Image.open(io.BytesIO(base64.b64decode(drawn["data"]["image/png"])))
    picture.load()
    assert picture.format == "PNG"
    assert 150 < picture.width < 500
    assert 100 < picture.height < 400
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 10, "something is drawn"
    chart = drawn["data"][CHART]["charts"][0]
    assert [(e["label"], e["value"]) for e in chart["elements"]] == [("Paris", 2.1), ("Rome", 2.8)]
    assert table["main"]
    assert "<table" in table["data"]["text/html"]


BUNDLES = r"""
from IPython.display import HTML, JSON, SVG, Latex, Markdown, display
for one in (HTML("<b>b</b>"), JSON({"a": [1, None]}), Latex("$x^2$"), Markdown("# m"),
            SVG('<svg xmlns="http://www.w3.org/2000/svg"/>')):
    display(one)
"""


def test_bundles_of_other_kinds(box: Box) -> None:
    shown: dict[str, Any] = {}
    for one in run(box, BUNDLES)["results"]:
        shown.update(one["data"])
    assert shown["text/html"] == "<b>b</b>"
    assert shown["application/json"] == {"a": [1, None]}
    assert shown["text/latex"] == "$x^2$"
    assert shown["text/markdown"] == "# m"
    assert shown["image/svg+xml"].startswith("<svg")
    fonts = "from PIL import ImageFont\nImageFont.truetype('DejaVuSans.ttf', 12).getname()"
    assert value(box, fonts) == "('DejaVu Sans', 'Book')"


def test_many_plots_in_one_cell(box: Box) -> None:
    one = "plt.figure(figsize=(1, 1)); plt.plot([0, i]); plt.title(str(i)); plt.show()"
    code = f"import matplotlib.pyplot as plt\nfor i in range({PLOTS}):\n    {one}"
    charts = [one["data"][CHART]["charts"][0] for one in run(box, code, timeout_seconds=120)["results"]]
    assert [(one["title"], one["elements"][0]["points"][1]) for one in charts] == [
        (str(i), [1, i]) for i in range(PLOTS)
    ]


def test_other_languages(box: Box) -> None:
    assert run(box, "A=5; pwd", language="bash")["stdout"] == "/tmp\n"
    assert run(box, "echo $A$FROM_SANDBOX", language="bash")["stdout"] == "5yes\n"
    assert value(box, "const n: number = await Promise.resolve(20); n + 1", language="ts") == "21"
    here = "`${Deno.env.get('OF_THIS_RUN')} ${Deno.cwd()}`"
    assert value(box, here, language="ts", env={"OF_THIS_RUN": 'a "ü"'}, cwd="/usr") == "'a \"ü\" /usr'"
    assert value(box, here, language="ts") == '"undefined /tmp"'
    assert run(box, "1", language="ts", cwd="/nowhere")["error"]["name"] == "NotFound"
    failed = run(box, "throw new TypeError('no ' + n)", language="typescript")
    assert (failed["status"], failed["error"]["name"], failed["error"]["message"]) == ("error", "TypeError", "no 20")
    promises = {
        "await Promise.resolve(4)": "4",
        "Promise.resolve(4)": "Promise { 4 }",
        "new Promise(() => 0)": "Promise { <pending> }",
        "Promise.reject(new Error('no')); 5": "5",
        "await Promise.reject(new Error('no')).catch(() => 6)": "6",
    }
    assert {one: value(box, one, language="js") for one in promises} == promises
    failed = run(box, "console.log('a'); await Promise.reject(new RangeError('no'))", language="js")
    assert (failed["status"], failed["stdout"], failed["error"]["name"]) == ("error", "a\n", "RangeError")
    assert run(box, "setTimeout(() => { throw new Error('late') }, 0)", language="js")["status"] == "ok"
    assert value(box, "[1, 2].map(x => x * 2).length", language="js") == "2"
    assert {one["id"] for one in box.api.call("GET", f"{box.path}/code/contexts")["contexts"]} == {
        "python", "bash", "javascript", "typescript",
    }  # fmt: skip
    for language in ("javascript", "typescript"):
        box.api.call("DELETE", f"{box.path}/code/contexts/{language}")


@pytest.mark.parametrize("language", ["r", "cobol"])
def test_a_language_without_a_kernel_is_refused_with_a_sentence(box: Box, language: str) -> None:
    with pytest.raises(ApiError) as refused:
        run(box, "1", language=language)
    assert (refused.value.status, refused.value.code) == (400, "request.invalid")
    assert "python" in refused.value.message, "it says what there is"


def test_events_come_as_the_code_runs(box: Box) -> None:
    code = "import sys, os, time\nprint('a', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.05)\n"
    with stream(box, code + "print('b', file=sys.stderr)\n1/0") as events:
        assert next(events).data == {"context_id": "python", "language": "python"}
        assert (first := next(events)).name == "stdout"
        assert first.data == {"text": "a\n"}
        box.put("/tmp/go", b"")
        told, error, end = list(events)
    assert (told.name, told.data) == ("stderr", {"text": "b\n"})
    assert (error.data["name"], error.data["message"]) == ("ZeroDivisionError", "division by zero")
    assert "1/0" in error.data["traceback"]
    assert (end.name, end.data["status"], end.data["state_lost"]) == ("end", "error", False)


def test_a_flood_of_output_is_kept_at_both_ends_or_read_as_a_whole(box: Box) -> None:
    code = "for i in range(60): print(str(i).zfill(5) + 'x' * 65530)"
    ran = run(box, code)
    assert ran["status"] == "ok"
    assert ran["stdout"].startswith("00000x")
    assert ran["stdout"].endswith("00059" + "x" * 65530 + "\n")
    kept = 60 * 65536 - ran["stdout_dropped_bytes"]
    assert 0.9 * 2**20 < kept <= 2**20
    assert 0 < len(ran["stdout"]) - kept < 200, "a line says what is missing"
    with stream(box, code) as events:
        text = "".join(event.data["text"] for event in events if event.name == "stdout")
    assert [line[:5] for line in text.splitlines()] == [str(i).zfill(5) for i in range(60)]


def test_input_is_refused_at_once_or_answered(box: Box) -> None:
    ran = run(box, "input('name? ')")
    assert ran["error"]["name"] == "StdinNotImplementedError"
    assert "`input`" in ran["error"]["message"]
    with stream(box, "n = input('name? ')\nn * 2", input=True) as events:
        asked = next(event for event in events if event.name == "input_requested")
        assert asked.data == {"prompt": "name? ", "password": False}
        box.api.call("POST", f"{box.path}/code/contexts/python/input", json={"text": "Ada"})
        assert next(event for event in events if event.name == "result").data["data"]["text/plain"] == "'AdaAda'"
    with pytest.raises(ApiError) as refused:
        box.api.call("POST", f"{box.path}/code/contexts/python/input", json={"text": "?"})
    assert refused.value.code == "code.not_waiting"


def test_many_contexts_are_apart_and_run_side_by_side(box: Box) -> None:
    run(box, "x = 40")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: context(box), range(CONTEXTS)))
    with concurrent.futures.ThreadPoolExecutor(CONTEXTS) as pool:
        code = "import random\nme = {}\n(me, x if 'x' in globals() else None, random.random())"
        told = list(pool.map(lambda n: value(box, code.format(n), context=made[n]), range(CONTEXTS)))
        assert [text.startswith(f"({n}, None, ") for n, text in enumerate(told)] == [True] * CONTEXTS
        assert len({text.split()[-1] for text in told}) == CONTEXTS
        assert list(pool.map(lambda one: value(box, "me", context=one), made)) == [str(n) for n in range(CONTEXTS)]
    for one in made:
        box.api.call("DELETE", f"{box.path}/code/contexts/{one}")
    with pytest.raises(ApiError) as gone:
        run(box, "me", context=made[0])
    assert gone.value.code == "code.context_not_found"
    assert value(box, "x") == "40"


def test_interrupt_keeps_the_state_and_restart_does_not(box: Box) -> None:
    one = context(box)
    with stream(box, "y = 1\nprint('in')\nimport time; time.sleep(300)", context=one) as events:
        assert [next(events).name for _ in range(2)] == ["started", "stdout"]
        assert box.api.call("POST", f"{box.path}/code/contexts/{one}/interrupt")["interrupted"]
        *_, error, end = events
    assert (error.data["name"], end.data["status"]) == ("KeyboardInterrupt", "interrupted")
    assert value(box, "y", context=one) == "1"
    box.api.call("POST", f"{box.path}/code/contexts/{one}/restart")
    assert run(box, "y", context=one)["error"]["name"] == "NameError"
    box.api.call("DELETE", f"{box.path}/code/contexts/{one}")


def test_ends_are_told(box: Box) -> None:
    run(box, "x = 40")
    ran = run(box, "import time; time.sleep(60)", timeout_seconds=1)
    assert (ran["status"], ran["state_lost"]) == ("timeout", False)
    assert value(box, "x") == "40"
    ran = run(box, "import os; os._exit(1)")
    assert (ran["status"], ran["state_lost"]) == ("killed", True)
    assert "exit code 1" in ran["detail"]
    ran = run(box, "b = []\nwhile True: b.append(bytearray(32 << 20)); b[-1][::4096] = b'x' * (8192)")
    assert (ran["status"], ran["state_lost"]) == ("oom", True)
    assert "memory" in ran["detail"]
    assert value(box, "1 + 1") == "2"


PORTS = {
    name: 40001 + n for n, name in enumerate(("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port"))
}


@contextlib.contextmanager
def tunnels(server: Server, box: Box, ports: dict[str, int]) -> Iterator[dict[str, int]]:
    """`cloche tunnel` for each; where they are reached."""
    env = {**environment(), "CLOCHE_API_URL": server.url, "CLOCHE_API_KEY": server.token, "PYTHONUNBUFFERED": "1"}
    program = "import sys; from cloche.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "tunnel", box.id]
    with contextlib.ExitStack() as stack:
        local = {}
        for name, port in ports.items():
            process = stack.enter_context(
                subprocess.Popen([*command, str(port)], env=env, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            local[name] = process
        yield {name: int(one.stdout.readline().split()[0].partition(":")[2]) for name, one in local.items()}  # type: ignore[union-attr]


def _ready(client: BlockingKernelClient) -> bool:
    try:
        client.wait_for_ready(timeout=60)
    except RuntimeError:  # no heartbeat for once: it gives up at the first
        return False
    return True


def test_a_jupyter_client_works_through_tunnels(interpreter: Server, box: Box, tmp_path: Path) -> None:
    """The client of Jupyter itself, on this machine, with a kernel of its own in the sandbox."""
    connection = {
        "transport": "tcp", "ip": "127.0.0.1", "key": "a-key-of-the-test", "signature_scheme": "hmac-sha256",
        "kernel_name": "python3", **PORTS,
    }  # fmt: skip
    box.put("/tmp/kernel.json", json.dumps(connection).encode())
    started = box.start("exec python3 -m ipykernel_launcher -f /tmp/kernel.json")
    with tunnels(interpreter, box, PORTS) as local:
        file = tmp_path / "kernel.json"
        file.write_text(json.dumps({**connection, **local}))
        client = BlockingKernelClient(connection_file=str(file))
        client.load_connection_file()
        # An emulated kernel that is still importing misses a heartbeat of a second.
        client.hb_channel.time_to_dead = 5.0
        client.start_channels()
        try:
            until(lambda: _ready(client), 120)
            told: list[dict[str, Any]] = []
            code = "import os, platform\nprint(platform.node(), input('who? '))\n6 * 7"
            client.allow_stdin = True
            reply = client.execute_interactive(
                code, timeout=60, output_hook=told.append, stdin_hook=lambda _: client.input("Ada")
            )
            assert reply["content"]["status"] == "ok"
            texts = [one["content"]["text"] for one in told if one["msg_type"] == "stream"]
            assert "".join(texts) == f"{box.sh('hostname').strip()} Ada\n"
            results = [one["content"]["data"] for one in told if one["msg_type"] == "execute_result"]
            assert results == [{"text/plain": "42"}]
            failed = client.execute_interactive("1/0", timeout=60, output_hook=told.append)
            assert failed["content"]["ename"] == "ZeroDivisionError"
            assert client.hb_channel.is_beating()
            client.shutdown(timeout=60, reply=True)
        finally:
            client.stop_channels()
    until(lambda: box.exec_info(started)["status"] != "running")


def test_forks_go_on_apart_with_the_state_they_had(box: Box) -> None:
    value(box, "import random, numpy\nkept = ['yes']\n0")
    made = box.api.call("POST", f"{box.path}/fork", json={"count": 2}, timeout=200)
    children = [box.api.keep(child) for child in made["children"]]
    drawn = [value(one, "(kept[0], random.random(), numpy.random.rand())") for one in (box, *children)]
    assert all(text.startswith("('yes', ") for text in drawn)
    assert len({text.split()[1] for text in drawn}) == 3
    assert len({text.split()[2] for text in drawn}) == 3
    for name, child in zip("ab", children, strict=True):
        value(child, f"kept.append('{name}')\nkept")
    assert [value(one, "kept") for one in (box, *children)] == ["['yes']", "['yes', 'a']", "['yes', 'b']"]
    for child in children:
        child.delete()


def test_state_outlives_hibernation(box: Box) -> None:
    value(box, "slept = 1\nslept")
    box.api.call("POST", f"{box.path}/hibernate", timeout=120)
    assert value(box, "slept") == "1"


def test_who_hangs_up_interrupts(box: Box) -> None:
    code = "import os, time\nopen('/tmp/in', 'w').close()\ntry: time.sleep(300)\nexcept KeyboardInterrupt: how = '{}'\n"
    with stream(box, code.format("stream")) as events:
        assert next(events).name == "started"
        until(lambda: "in" in box.names("/tmp"))
    began = time.monotonic()
    assert value(box, "os.remove('/tmp/in'); how") == "'stream'"
    assert time.monotonic() - began < 60
    url = box.api.http.base_url
    call = http.client.HTTPConnection(url.host, url.port)
    headers = {"Authorization": f"Bearer {box.api.token}", "Content-Type": "application/json"}
    call.request("POST", f"{box.path}/code", json.dumps({"code": code.format("blocking")}), headers)
    until(lambda: "in" in box.names("/tmp"))
    call.close()
    began = time.monotonic()
    assert value(box, "how") == "'blocking'"
    assert time.monotonic() - began < 60


def test_a_pause_in_mid_cell_stops_it_and_it_goes_on(box: Box) -> None:
    """The code has four seconds for less than two, and the pause is longer than what is left."""
    code = "import time\nfor i in range(3):\n    print(i, flush=True); time.sleep(0.5)\n'whole'"
    with stream(box, code, timeout_seconds=4) as events:
        assert [next(events).name for _ in range(2)] == ["started", "stdout"]
        box.api.call("POST", f"{box.path}/pause")
        time.sleep(5)
        box.api.call("POST", f"{box.path}/resume")
        *shown, result, end = events
    assert "".join(event.data["text"] for event in shown) == "1\n2\n"
    assert result.data["data"]["text/plain"] == "'whole'"
    assert (end.name, end.data["status"]) == ("end", "ok")


def test_a_hibernation_in_mid_cell_is_told_and_the_state_is_kept(box: Box) -> None:
    with stream(box, "import time\nduring = 1\nprint('in', flush=True)\ntime.sleep(300)") as events:
        assert [next(events).name for _ in range(2)] == ["started", "stdout"]
        box.api.call("POST", f"{box.path}/hibernate", timeout=120)
        (failed,) = events
    assert (failed.name, failed.data["code"]) == ("failed", "code.lost")
    assert "hibernated" in failed.data["error"]
    assert value(box, "during") == "1"


#: What a process is and may do, in Python and in a shell.
WHO = (
    "import os, resource\n"
    "print(os.getuid(), os.getgid(), os.getgroups(), os.getcwd(), os.nice(0), oct(os.umask(0o22)))\n"
    "print([os.environ.get(n) for n in ('HOME', 'USER', 'LOGNAME', 'SHELL', 'PATH', 'LANG', 'TZ', 'KIND')])\n"
    "print([resource.getrlimit(getattr(resource, n)) for n in sorted(dir(resource)) if n.startswith('RLIMIT')])\n"
    "print([line for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNewPrivs', 'Seccomp:'))])"
)
SHELL = "id; umask; ulimit -a; echo $HOME $USER $LOGNAME $SHELL $PATH $LANG $KIND"


@pytest.mark.parametrize(
    ("user", "known"), [("4242:daemon", "['/', '4242', '4242', "), ("nobody", "['/nonexistent', 'nobody', 'nobody', ")]
)
def test_kernels_run_as_commands_do(interpreter: Server, user: str, known: str) -> None:
    """As a user without an entry in the files of the system, in a group with one; and as one with a name."""
    env = {"KIND": "of the sandbox"}
    other = interpreter.api.create(template=TEMPLATE, user=user, cwd="/tmp", env=env, ttl_seconds=300)

    def same() -> None:
        ran = run(other, WHO)
        assert ran["stdout"] == other.exec(["python3", "-c", WHO]).stdout, ran
        assert known in ran["stdout"]
        assert run(other, SHELL, language="bash")["stdout"] == other.exec(["bash", "-c", SHELL]).stdout

    same()
    mine = {"KIND": "of a run", "HOME": "/tmp/elsewhere", "USER": "somebody"}
    told = "of a run /tmp/elsewhere somebody /tmp/elsewhere\n"
    ran = run(
        other, "import os\nprint(*map(os.environ.get, ('KIND', 'HOME', 'USER')), os.path.expanduser('~'))", env=mine
    )
    assert ran["stdout"] == told
    assert run(other, "echo $KIND $HOME $USER ~", language="bash", env=mine)["stdout"] == told
    same()
    other.api.call("POST", f"{other.path}/pause")
    other.api.call("POST", f"{other.path}/resume")
    same()
    with pytest.raises(ApiError) as refused:
        other.api.call("POST", f"{other.path}/code/contexts", json={"cwd": "/root/secret"})
    assert (refused.value.status, refused.value.code) == (400, "exec.invalid_cwd")
    other.delete()


def test_the_sessions_of_the_client_of_pandastack(interpreter: Server) -> None:
    """The unmodified client, with a context of its own."""
    client = pandastack.Client(api_url=interpreter.url, api_key=interpreter.token)
    client.session.trust_env = False
    with client.sandboxes.create(template=TEMPLATE, ttl_seconds=300) as far, far.create_code_context() as context:
        assert context.run_code("x = 41").error is None
        ran = context.run_code("print('out')\nx + 1")
        assert (ran.text, ran.stdout, ran.exit_code) == ("42", "out\n", 0)
        drawn = context.run_code("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
        assert base64.b64decode(drawn.png or "")[:4] == b"\x89PNG"
        assert "ZeroDivisionError" in (context.run_code("1/0").error or "")
        with pytest.raises(pandastack.SandboxTimeout):
            context.run_code("import time; time.sleep(60)", timeout_seconds=1)
        assert context.run_code("x").text == "41"


def test_the_example(interpreter: Server, box: Box, tmp_path: Path) -> None:
    """In a sandbox of its own, which is made and deleted by it."""
    env = {**environment(), "CLOCHE_API_URL": interpreter.url, "CLOCHE_API_KEY": interpreter.token}
    command = [sys.executable, str(CHECKOUT / "examples" / "data_analysis.py"), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "Feb north: 140" in done.stdout
    picture = Image.open(tmp_path / "sales.png")
    picture.load()
    assert picture.format == "PNG"
    assert [one["id"] for one in interpreter.api.list()] == [box.id]


def test_other_sandboxes_say_which_template_has_it(interpreter: Server) -> None:
    other = interpreter.api.create(template="base", ttl_seconds=300)
    with pytest.raises(ApiError) as refused:
        run(other, "1")
    assert refused.value.code == "code.not_available"
    assert TEMPLATE in str(refused.value)
    other.delete()
