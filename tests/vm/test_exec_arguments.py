"""What reaches the program: long arguments, quoting, environment, directory, input."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

import pytest

from kit.client import Box
from kit.until import Watch, until

#: The kernel: one string is at most 32 pages, its NUL included.
LONGEST = 32 * 4096 - 1
#: As `core/command.py` states it: a quarter of the stack limit, less 16 KiB.
TOTAL = 2 * 1024 * 1024 - 16 * 1024
SOON = 15.0


class TestLongArguments:
    """It works, or a 4xx names the limit at once, and the next call works."""

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"cmd": ": " + "a" * 200_000 + "; echo ok"}, "cmd"),
            ({"argv": ["/bin/echo", "a" * 200_000]}, "argv[1]"),
            ({"argv": ["/bin/echo", "é" * 65_536]}, "argv[1]"),
            ({"cmd": "true", "env": {"BIG": "v" * 200_000}}, "env.BIG"),
            ({"cmd": "true", "env": {f"V{i}": "v" * 100_000 for i in range(30)}}, "arguments and environment together"),
            ({"argv": ["/bin/true", *["a" * 1000] * 3000]}, "arguments and environment together"),
        ],
        ids=["script", "argv", "wide-characters", "env-value", "env-total", "argv-total"],
    )
    def test_too_long_is_said_at_once(self, shared: Box, body: dict[str, Any], field: str) -> None:
        watch = Watch()
        error = shared.refused(**body)
        assert (error.status, error.code) == (413, "exec.too_large")
        assert error.details["field"] == field
        assert str(error.details["limit_bytes"]) in error.message
        assert watch.seconds < SOON
        assert shared.sh("echo next") == "next\n"

    def test_the_longest_argument_works(self, shared: Box) -> None:
        result = shared.exec(["/bin/echo", "-n", "a" * LONGEST])
        assert result.stdout == "a" * LONGEST
        assert shared.refused(["/bin/echo", "a" * (LONGEST + 1)]).code == "exec.too_large"

    def test_the_longest_script_works(self, shared: Box) -> None:
        script = ": " + "a" * (LONGEST - 2 - len("; echo ok")) + "; echo ok"
        assert len(script) == LONGEST
        assert shared.sh(script) == "ok\n"

    def test_the_largest_environment_works(self, shared: Box) -> None:
        """All that the stated total allows: then the kernel takes it too, what the agent adds included."""
        env, room = {}, TOTAL - 4000
        for number in range(100):
            size = min(100_000, room - 20)
            if size <= 0:
                break
            env[f"V{number:02}"] = "v" * size
            room -= size + len("V00=") + 1 + 8
        result = shared.exec(
            ["/usr/bin/python3", "-c", "import os; print(len(os.environ['V00']), len(os.environ))"], env=env
        )
        assert result.code == 0, result.body
        assert result.stdout.startswith("100000 ")

    @pytest.mark.parametrize("size", [96_000, 131_071, 131_072, 200_000, 5_000_000])
    def test_files_of_those_sizes_are_written(self, shared: Box, size: int) -> None:
        content = bytes(range(251)) * (size // 251 + 1)
        content = content[:size]
        assert shared.put("/tmp/sized", content)["bytes"] == size
        assert shared.sh("sha256sum < /tmp/sized").split()[0] == hashlib.sha256(content).hexdigest()


class TestQuoting:
    """Argv is argv, the shell gets its string unchanged, and nothing else is ever run."""

    def test_argv_reaches_the_program_unchanged(self, shared: Box) -> None:
        words = [
            "a b",
            "$HOME",
            "x'y",
            "",
            "*",
            "line1\nline2",
            '"',
            "\\",
            "`id`",
            "-n",
            "--",
            "é☕",
            "\t",
            "a\x01b",
            "!!",
        ]
        result = shared.exec(["python3", "-c", "import sys, json; print(json.dumps(sys.argv[1:]))", *words])
        assert json.loads(result.stdout) == words

    def test_cmd_may_be_a_list_too(self, shared: Box) -> None:
        body = {"cmd": ["printf", "%s|", "a b", "$X"]}
        assert shared.api.call("POST", f"{shared.path}/exec", json=body)["stdout"] == "a b|$X|"

    @pytest.mark.parametrize(
        ("command", "stdout"),
        [
            ("seq 2 | wc -l", "2\n"),
            ("echo hello | cat", "hello\n"),
            ("echo hi # note", "hi\n"),
            ("sleep 0.1 & echo on", "on\n"),
            ("echo a\necho b", "a\nb\n"),
            ("cat <<'X'\n$HOME `id`\nX", "$HOME `id`\n"),
            ("echo 'a\"b' \"c'd\" e\\ f", "a\"b c'd e f\n"),
            ("echo $((6*7)); echo ${#PWD}>/dev/null", "42\n"),
            ("  echo spaced  ", "spaced\n"),
            ("echo one;", "one\n"),
            ("(exit 3); echo $?", "3\n"),
            ("echo é☕ | wc -c", "6\n"),
            ("diff <(echo a) <(echo a) && echo same", "same\n"),
            ("printf '%s\\n' {1..3}", "1\n2\n3\n"),
        ],
    )
    def test_shell_forms(self, shared: Box, command: str, stdout: str) -> None:
        result = shared.exec(command)
        assert (result.code, result.stdout) == (0, stdout), result.body

    @pytest.mark.parametrize("command", ["echo hi \\", "echo 'open", "if true", "exit 7 #", "false\\"])
    def test_broken_scripts_end_and_harm_nothing(self, shared: Box, command: str) -> None:
        assert shared.exec(command).reason == "exited"
        assert shared.sh("echo next") == "next\n"

    @pytest.mark.parametrize(
        "name", ["A;touch /tmp/pwn;B", "", "A=B", "A\nB", "A B", "1A", "$(touch /tmp/pwn)", "é", "A\0B", "-x"]
    )
    @pytest.mark.parametrize("where", ["exec", "create"])
    def test_a_bad_variable_name_is_refused(self, shared: Box, name: str, where: str) -> None:
        body = {"env": {name: "1"}}
        if where == "exec":
            error = shared.refused("true", **body)
            assert (error.status, error.code) == (400, "request.invalid")
            assert error.details.get("field") == "env" or "env" in str(error.details)
        else:
            response = shared.api.request("POST", "/v1/sandboxes", json=body)
            assert response.status_code == 400, response.text
        assert shared.exec("ls /tmp/pwn*").code != 0

    def test_values_arrive_unchanged(self, shared: Box) -> None:
        value = "a'b\"c$(id)\nd\\ `x` é☕\t=%s"
        program = "import os, sys; sys.stdout.write(os.environ['ODD'])"
        assert shared.exec(["python3", "-c", program], env={"ODD": value}).stdout == value
        assert shared.exec('printf %s "$ODD"', env={"ODD": value}).stdout == value
        assert shared.exec('printf %s "${EMPTY-unset}"', env={"EMPTY": ""}).stdout == ""
        assert shared.exec("env", env={"A.B-c": "dotted"}).stdout.count("A.B-c=dotted\n") == 1

    @pytest.mark.parametrize("body", [{"env": {"A": "b\0c"}}, {"argv": ["echo", "a\0b"]}, {"cmd": "echo a\0b"}])
    def test_nul_is_refused(self, shared: Box, body: dict[str, Any]) -> None:
        body.setdefault("cmd", None)
        if body["cmd"] is None:
            body.pop("cmd")
        if "argv" not in body and "cmd" not in body:
            body["cmd"] = "true"
        assert shared.refused(**body).code == "request.invalid"

    @pytest.mark.parametrize("body", [{}, {"cmd": ""}, {"cmd": "  \n"}, {"argv": []}, {"argv": [""]}, {"cmd": []},
                                      {"cmd": "true", "argv": ["true"]}, {"cmd": 5}, {"argv": "true"},
                                      {"argv": ["true", None]}])  # fmt: skip
    def test_no_command_is_refused(self, shared: Box, body: dict[str, Any]) -> None:
        error = shared.refused(**body)
        assert (error.status, error.code) == (400, "request.invalid")

    def test_secrets_are_on_no_command_line(self, shared: Box) -> None:
        exec_id = shared.start("sleep 20", env={"TOKEN": "s3cr3t-value-77"})
        found = shared.exec("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c 's3cr3t-value-7[7]'")
        assert found.stdout == "0\n"
        pid = shared.exec_info(exec_id)["pid"]
        assert "TOKEN=s3cr3t-value-77" in shared.sh(f"tr '\\0' '\\n' < /proc/{pid}/environ")
        shared.kill(exec_id)

    def test_odd_directories(self, shared: Box) -> None:
        name = "/tmp/x y$(touch /tmp/pwn2)'\"é\n;z"
        shared.mkdir(name)
        assert shared.exec(["pwd"], cwd=name).stdout == name + "\n"
        assert shared.exec("pwd -P", cwd=name).stdout == name + "\n"
        assert shared.exec("ls /tmp/pwn*").code != 0

    @pytest.mark.parametrize(
        ("cwd", "user"),
        [
            ("/tmp/missing$(touch /tmp/pwn3)", None),
            ("/etc/passwd", None),
            ("/root", "nobody"),
            ("relative", None),
            ("", None),
            ("/tmp/" + "x" * 300, None),
        ],
        ids=["missing", "a-file", "no-permission", "relative", "empty", "too-long"],
    )
    def test_a_bad_directory_is_named(self, shared: Box, cwd: str, user: str | None) -> None:
        error = shared.refused("pwd", cwd=cwd, **({"user": user} if user else {}))
        assert error.status == 400, error
        assert "cwd" in str(error.details.get("field", "")) or "cwd" in str(error.details)
        assert shared.exec("ls /tmp/pwn*").code != 0

    @pytest.mark.parametrize(
        "user", ["nosuchuser", "root;id", "../root", "root:nosuchgroup", "-1", "99999999999", ":", "x" * 257]
    )
    def test_a_bad_user_is_named(self, shared: Box, user: str) -> None:
        error = shared.refused("id", user=user)
        assert error.status == 400, error
        assert error.code in {"exec.user_not_found", "request.invalid"}


def by(way: str, box: Box, cmd: str, **options: Any) -> tuple[int, bytes]:
    """Code and output of a command, by one of the ways to run it."""
    if way == "blocking":
        result = box.exec(cmd, **options)
        return result.code, result.stdout.encode()
    told = box.stream_all(cmd, **options) if way == "streamed" else box.follow_all(box.start(cmd, **options))
    return told.exit_code, told.stdout


@pytest.mark.parametrize("way", ["blocking", "streamed", "background"])
class TestInput:
    """Of calls with all their input at once."""

    def test_no_input_is_end_of_file_at_once(self, shared: Box, way: str) -> None:
        watch = Watch()
        assert by(way, shared, "cat; grep x; echo end-$?") == (0, b"end-1\n")
        assert watch.seconds < SOON
        assert by(way, shared, "cat; echo end", stdin="") == (0, b"end\n")

    def test_a_late_reader_gets_all(self, shared: Box, way: str) -> None:
        text = "0123456789abcdef" * 327_680
        told = by(way, shared, "sleep 1; sha256sum", stdin=text)
        assert told == (0, hashlib.sha256(text.encode()).hexdigest().encode() + b"  -\n")

    def test_nobody_reads(self, shared: Box, way: str) -> None:
        watch = Watch()
        assert by(way, shared, "exit 3", stdin="x" * 5_000_000) == (3, b"")
        assert by(way, shared, "head -c 1", stdin="x" * 5_000_000) == (0, b"x")
        assert watch.seconds < 2 * SOON


def test_input_as_base64(shared: Box) -> None:
    assert shared.exec("od -An -tx1", stdin="AP/+Cg==", stdin_base64=True).stdout == " 00 ff fe 0a\n"
    assert shared.refused("cat", stdin="a", stdin_base64=True).code == "request.invalid"


def test_exec_never_blocks_another(shared: Box) -> None:
    """Twenty calls hang; the twenty-first is served at once."""
    threads = [threading.Thread(target=shared.exec, args=("read x < /tmp/gate",)) for _ in range(20)]
    shared.sh("rm -f /tmp/gate; mkfifo /tmp/gate")
    for thread in threads:
        thread.start()
    until(lambda: sum(i["status"] == "running" for i in shared.execs()) >= 20)
    watch = Watch()
    assert shared.sh("echo through") == "through\n"
    assert watch.seconds < SOON
    shared.sh("for i in $(seq 25); do echo go > /tmp/gate & done; sleep 1; kill $(jobs -p) 2>/dev/null; true")
    for _ in range(30):
        if not any(thread.is_alive() for thread in threads):
            break
        shared.exec("timeout 1 sh -c 'echo go > /tmp/gate'")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
