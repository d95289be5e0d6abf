"""One-shot runs on real machines: each in a sandbox of its own, and nothing is left of it."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit import truth
from kit.client import Api, ApiError
from kit.server import Server
from kit.until import until

#: A data directory in which `cloche-server template bake polyglot --memory-mb 512` was run.
POLYGLOT = os.environ.get("CLOCHE_TEST_POLYGLOT")


@pytest.fixture(scope="module")
def runserver() -> Iterator[Server]:
    server = Server.make(webhook_private=True)
    try:
        server.start()
        yield server
        truth.check(server)
    finally:
        server.close()


@pytest.fixture
def api(runserver: Server) -> Iterator[Api]:
    yield runserver.api
    truth.check(runserver)
    assert runserver.api.list() == []


def run(api: Api, source: str, language: str = "python", **more: Any) -> Any:
    return api.call("POST", "/v1/run", json={"language": language, "source": source, **more})


def test_a_program_its_input_files_and_measures(api: Api) -> None:
    source = """
import os, sys, pathlib, socket
print(sys.stdin.read(), *sys.argv[1:], pathlib.Path('data/in.txt').read_text(), os.environ['A'])
try:
    socket.getaddrinfo('example.com', 80)
except OSError as error:
    print(type(error).__name__, file=sys.stderr)
"""
    result = run(
        api, source, stdin="in", args=["x", "y z"], files=[{"path": "data/in.txt", "content": "file"}], env={"A": "b"},
        expected_output="in x y z file b",
    )  # fmt: skip
    assert (result["status"], result["verdict"]) == ("ok", "accepted"), result
    assert result["stderr"], "no network, and it is told so"
    assert result["memory_kb"] > 1000
    assert 0 < result["cpu_ms"] <= result["timing_ms"]["total"]
    shell = run(api, "echo $0; exit 3", "bash", expected_output="x")
    assert (shell["status"], shell["verdict"], shell["exit_code"]) == ("runtime_error", "runtime_error", 3)
    assert run(api, "print(2)", expected_output="3")["verdict"] == "wrong_answer"


def test_every_bad_end_is_told_apart(api: Api) -> None:
    def end(source: str, **more: Any) -> str:
        return str(run(api, source, **more)["status"])

    assert end("import time\nprint(1, flush=True)\ntime.sleep(60)", timeout_seconds=1.5) == "timeout"
    assert end("x = []\nwhile True: x.append(bytearray(1 << 20))", timeout_seconds=60) == "out_of_memory"
    assert end("while True: print('x' * 9999)", max_output_bytes=20000) == "output_limit"
    assert end("import os; os.kill(os.getpid(), 11)") == "runtime_error"
    assert end("def (") == "runtime_error"


def test_what_cannot_be_asked_for_is_refused_with_a_sentence(api: Api) -> None:
    for body, code in (
        ({"language": "brainfuck", "source": "+"}, "run.unknown_language"),
        ({"language": "rust", "source": "fn main() {}"}, "template.not_found"),
        ({"language": "python", "source": "", "files": [{"path": "../x"}]}, "request.invalid"),
        ({"language": "python", "source": "", "callback_url": "https://a.test/"}, "request.invalid"),
        ({"language": "python", "source": "", "args": ["x\0"]}, "request.invalid"),
        ({"language": "python", "source": "", "stdin": "%", "stdin_base64": True}, "request.invalid"),
        ({"language": "python"}, "request.invalid"),
    ):
        with pytest.raises(ApiError) as caught:
            api.call("POST", "/v1/run", json=body)
        assert (caught.value.code, len(caught.value.message) > 20) == (code, True), body
    listed = api.call("GET", "/v1/run/languages")["languages"]
    assert {one["name"]: one["available"] for one in listed}.items() >= {"python": True, "rust": False}.items()


def test_twenty_at_once_and_a_batch_none_fails(api: Api) -> None:
    """More than there is room for at once: they wait."""
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        results = list(pool.map(lambda n: run(api, f"print({n})", expected_output=str(n)), range(20)))
    assert [one["verdict"] for one in results] == ["accepted"] * 20
    runs = [{"language": "python", "source": f"print({n})"} for n in range(3)] + [{"language": "no", "source": ""}]
    told = api.call("POST", "/v1/run/batch", json={"runs": runs})["results"]
    assert [one["result"]["stdout"] for one in told[:3]] == ["0\n", "1\n", "2\n"]
    assert told[3]["failure"]["code"] == "run.unknown_language"


def test_who_hangs_up_ends_the_run(api: Api, runserver: Server) -> None:
    headers = {"Authorization": f"Bearer {runserver.token}"}
    body = {"language": "python", "source": "import time; time.sleep(60)", "timeout_seconds": 60}
    gone = threading.Event()

    def hang_up() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{runserver.url}/v1/run", json=body, headers=headers, timeout=httpx.Timeout(5, read=4))
        gone.set()

    thread = threading.Thread(target=hang_up)
    thread.start()
    until(lambda: [item["status"] for item in api.list()] == ["running"])
    thread.join()
    assert gone.is_set()
    until(lambda: api.list() == [])


def test_a_killed_server_calls_its_runs_lost_and_their_sandboxes_end(api: Api, runserver: Server) -> None:
    waiting = {"language": "python", "source": "print(1)", "wait": False}
    made = api.call("POST", "/v1/run", json=waiting)
    until(lambda: api.call("GET", f"/v1/run/{made['id']}")["state"] == "done")
    assert api.call("GET", f"/v1/run/{made['id']}")["result"]["stdout"] == "1\n"
    long = {**waiting, "source": "import time; time.sleep(60)", "timeout_seconds": 60}
    lost = api.call("POST", "/v1/run", json=long)
    until(lambda: api.call("GET", f"/v1/run/{lost['id']}")["state"] == "running" and len(api.list()) == 1)
    runserver.kill()
    runserver.start()
    told = runserver.api.call("GET", f"/v1/run/{lost['id']}")
    assert (told["state"], told["failure"]["code"]) == ("lost", "run.lost")
    until(lambda: runserver.api.list() == [])
    runserver.api.call("DELETE", f"/v1/run/{lost['id']}")
    with pytest.raises(ApiError, match="no such run"):
        runserver.api.call("GET", f"/v1/run/{lost['id']}")


HELLO = {
    "python": "print(input())",
    "bash": "cat",
    "perl": "print <STDIN>;",
    "awk": "{ print }",
    "c": '#include <stdio.h>\nint main(void) { char b[99]; scanf("%98s", b); puts(b); }',
    "cpp": "#include <iostream>\nint main() { std::string s; std::cin >> s; std::cout << s << std::endl; }",
    "go": 'package main\nimport "fmt"\nfunc main() { var s string; fmt.Scan(&s); fmt.Println(s) }',
    "rust": 'fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap(); print!("{}", s); }',
    "java": "import java.util.*;\npublic class Echo { public static void main(String[] a) "
    "{ System.out.println(new Scanner(System.in).next()); } }",
    "javascript": "process.stdin.pipe(process.stdout)",
    "typescript": "const n: number = 6 * 7; console.log(n === 42 ? 'hi' : 'no')",
    "ruby": "puts gets",
    "php": "<?php echo fgets(STDIN);",
    "lua": "print(io.read())",
    "r": 'cat(readLines(file("stdin")), "\\n")',
    "sqlite": "SELECT 'hi';",
}


@pytest.mark.skipif(POLYGLOT is None, reason="CLOCHE_TEST_POLYGLOT names no data directory with the template polyglot")
def test_every_language_of_polyglot() -> None:
    server = Server.make(Path(str(POLYGLOT)), pool_template="")
    try:
        server.start()
        listed = server.api.call("GET", "/v1/run/languages")["languages"]
        assert {one["name"] for one in listed} == set(HELLO)
        for one in listed:
            more = {"template": "polyglot", "memory_mb": 512, "timeout_seconds": 120, "compile_timeout_seconds": 300}
            result = run(server.api, HELLO[one["name"]], one["name"], stdin="hi\n", expected_output="hi", **more)
            print(one["name"], result["timing_ms"], result.get("memory_kb"))
            assert result.get("verdict") == "accepted", (one["name"], result)
        broken = run(server.api, "int main( {", "c", memory_mb=512)
        assert broken["status"] == "compile_error"
        assert "error" in broken["compile"]["stderr"]
        truth.check(server)
    finally:
        server.close()
