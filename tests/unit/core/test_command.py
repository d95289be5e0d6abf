"""Commands are measured against the kernel's limits before anything reaches a guest."""

from __future__ import annotations

import pytest

from cloche_server.core.command import MAX_STRING, Command, CommandEnd, check_size, timeout_told, with_defaults
from cloche_server.core.errors import ClocheError
from cloche_server.core.records import ExecDefaults


def refused(**kwargs: object) -> ClocheError:
    arguments: dict[str, object] = {"argv": None, "shell": None, "env": {}, **kwargs}
    with pytest.raises(ClocheError) as caught:
        check_size(**arguments)  # type: ignore[arg-type]
    return caught.value


def test_the_longest_argument_is_allowed_and_one_more_is_not() -> None:
    check_size(["x" * MAX_STRING], None, {})
    error = refused(argv=["echo", "x" * (MAX_STRING + 1)])
    assert error.code == "exec.too_large"
    assert error.details["field"] == "argv[1]"
    assert error.details["limit_bytes"] == MAX_STRING
    assert refused(shell="é" * (MAX_STRING // 2 + 1)).details["field"] == "cmd"


def test_a_timeout_tells_that_memory_ran_out_before() -> None:
    assert timeout_told(2.5, CommandEnd(137, "timeout", 2500.0)).endswith("timeout of 2.5 s and was killed")
    told = timeout_told(2.5, CommandEnd(137, "timeout", 2500.0, oom_kills=3))
    assert told.endswith("; 3 of its processes had been killed before, because there was no memory left")


def test_all_together_have_a_limit_too() -> None:
    assert refused(argv=["x" * 100_000] * 30).code == "exec.too_large"
    assert refused(shell="true", env={f"V{i}": "x" * 100_000 for i in range(30)}).code == "exec.too_large"


@pytest.mark.parametrize("name", ["", "A=B", "A;touch /tmp/pwn;B", "A B", "1A", "A\0", "é", "A\n", "$(id)"])
def test_names_that_are_no_names(name: str) -> None:
    error = refused(shell="true", env={name: "x"})
    assert error.code == "request.invalid"
    assert error.details["field"] == "env"


@pytest.mark.parametrize("name", ["A", "_", "a.b", "A-B", "PATH", "x1"])
def test_names_that_are(name: str) -> None:
    check_size(None, "true", {name: "a'b\"c$(id)\nd"})


def test_nul_is_refused_everywhere() -> None:
    assert refused(shell="a\0b").code == "request.invalid"
    assert refused(argv=["a", "b\0"]).details["field"] == "argv[1]"
    assert refused(shell="true", env={"A": "\0"}).code == "request.invalid"


def test_the_caller_wins_over_the_sandbox() -> None:
    defaults = ExecDefaults({"A": "1", "B": "2"}, "/work", "user")
    merged = with_defaults(Command("x", shell="true", env={"B": "3"}, cwd="/"), defaults)
    assert merged == {"env": {"A": "1", "B": "3"}, "cwd": "/", "user": "user"}
