"""One-shot runs on real machines: each in a sandbox of its own, and nothing is left of it."""

from __future__ import annotations

import concurrent.futures
import http.server
import json
import os
import queue
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

pytestmark = pytest.mark.slow

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
        results = list(
            pool.map(lambda n: run(api, f"print({n})", expected_output=str(n), timeout_seconds=60), range(20))
        )
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


def test_a_callback_gets_what_came_of_it(api: Api) -> None:
    got: queue.Queue[dict[str, Any]] = queue.Queue()

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{receiver.server_port}/done"
        body = {"language": "python", "source": "print(6 * 7)", "wait": False, "callback_url": url}
        made = api.call("POST", "/v1/run", json=body)
        told = got.get(timeout=120)
        receiver.shutdown()
        thread.join()
    assert (told["id"], told["state"], told["result"]["stdout"]) == (made["id"], "done", "42\n")
    until(lambda: api.call("GET", f"/v1/run/{made['id']}")["callback"] == {"state": "delivered"})


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


#: Ends with exit code 3; never ends; takes all memory; cannot be compiled.
EXIT = {
    "python": "exit(3)",
    "bash": "exit 3",
    "perl": "exit 3;",
    "awk": "BEGIN { exit 3 }",
    "c": "int main(void) { return 3; }",
    "cpp": "int main() { return 3; }",
    "go": 'package main\nimport "os"\nfunc main() { os.Exit(3) }',
    "rust": "fn main() { std::process::exit(3) }",
    "java": "class Main { public static void main(String[] a) { System.exit(3); } }",
    "javascript": "process.exit(3)",
    "typescript": "declare const process: { exit(n: number): void }\nprocess.exit(3)",
    "ruby": "exit 3",
    "php": "<?php exit(3);",
    "lua": "os.exit(3)",
    "r": "quit(status = 3)",
}
SPIN = {
    "python": "while True: pass",
    "bash": "while :; do :; done",
    "perl": "1 while 1;",
    "awk": "BEGIN { while (1) ; }",
    "c": "int main(void) { for (;;) ; }",
    "cpp": "int main() { volatile int i = 0; for (;;) i = 1; }",
    "go": "package main\nfunc main() { for { } }",
    "rust": "fn main() { loop { std::hint::spin_loop() } }",
    "java": "class Main { public static void main(String[] a) { while (true) ; } }",
    "javascript": "while (true) ;",
    "typescript": "while (true) ;",
    "ruby": "loop { }",
    "php": "<?php while (true) ;",
    "lua": "while true do end",
    "r": "repeat { }",
    "sqlite": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c;",
}
HOG = {
    "python": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "c": "#include <stdlib.h>\n#include <string.h>\nint main(void) { for (;;) memset(malloc(1 << 24), 1, 1 << 24); }",
    "cpp": "#include <vector>\nint main() { for (;;) new std::vector<char>(1 << 24, 1); }",
    "go": "package main\nvar all [][]byte\nfunc main() { for { b := make([]byte, 1<<24); for i := range b "
    "{ b[i] = 1 }; all = append(all, b) } }",
    "rust": "fn main() { let mut all = Vec::new(); loop { all.push(vec![1u8; 1 << 24]); } }",
    "ruby": "x = []\nloop { x << 'x' * (1 << 24) }",
    "perl": "my @x; push @x, 'x' x (1 << 24) while 1;",
}
BROKEN = {
    "c": "int main( {",
    "cpp": "int main( {",
    "go": "package main\nfunc main() { x }",
    "rust": "fn main() { let x: i32 = true; }",
    "java": "class Main { int x = true; }",
    "typescript": "const n: number = 'text'",
}


@pytest.fixture(scope="module")
def polyglot(runserver: Server) -> Iterator[Server]:
    if POLYGLOT is None:
        pytest.skip("CLOCHE_TEST_POLYGLOT names no data directory with the templates base and polyglot")
    server = Server.make(Path(POLYGLOT), "polyglot", pool_launched=0, pool_warm=0, webhook_private=True)
    try:
        server.start()
        yield server
        truth.check(server)
    finally:
        server.close()


def batch(server: Server, sources: dict[str, str], **more: Any) -> dict[str, Any]:
    """What came of each, all in one call."""
    more = {"template": "polyglot", "memory_mb": 512, "timeout_seconds": 120, "compile_timeout_seconds": 300, **more}
    runs = [{"language": name, "source": source, **more} for name, source in sources.items()]
    told = server.api.call("POST", "/v1/run/batch", json={"runs": runs}, timeout=1200)["results"]
    for name, one in zip(sources, told, strict=True):
        print(name, one.get("failure") or (one["result"]["status"], one["result"]["timing_ms"]))
    return {name: one["result"] for name, one in zip(sources, told, strict=True)}


def test_every_language_of_polyglot_says_what_it_reads(polyglot: Server) -> None:
    listed = polyglot.api.call("GET", "/v1/run/languages")["languages"]
    assert {one["name"] for one in listed} == set(HELLO)
    assert all(one["available"] for one in listed)
    told = batch(polyglot, HELLO, stdin="hi\n", expected_output="hi")
    assert {name: one["verdict"] for name, one in told.items()} == dict.fromkeys(HELLO, "accepted"), told
    wrong = batch(polyglot, {name: HELLO[name] for name in ("rust", "r")}, stdin="ho\n", expected_output="hi")
    assert {one["verdict"] for one in wrong.values()} == {"wrong_answer"}


def test_every_language_of_polyglot_tells_its_ends(polyglot: Server) -> None:
    told = batch(polyglot, EXIT)
    ends = {name: (one["status"], one["exit_code"]) for name, one in told.items()}
    assert ends == dict.fromkeys(EXIT, ("runtime_error", 3)), told
    assert {n: one["status"] for n, one in batch(polyglot, SPIN, timeout_seconds=3).items()} == dict.fromkeys(
        SPIN, "timeout"
    )
    assert {n: one["status"] for n, one in batch(polyglot, HOG).items()} == dict.fromkeys(HOG, "out_of_memory")
    broken = batch(polyglot, BROKEN)
    assert {name: one["status"] for name, one in broken.items()} == dict.fromkeys(BROKEN, "compile_error")
    for name, one in broken.items():
        assert "main" in (one["compile"]["stdout"] + one["compile"]["stderr"]).lower(), (name, one)
