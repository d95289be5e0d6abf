"""What one-shot runs are asked for and what is said of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.command import CommandEnd
from cloche_server.core.languages import LANGUAGES, command, file_name, find_language
from cloche_server.core.runs import (
    Compare,
    RunResult,
    RunStep,
    agrees,
    relative_path,
    result_from_json,
    result_to_json,
    status_of,
    verdict_of,
)


def test_languages_are_found_by_name_and_alias_and_none_has_two():
    names = [name for one in LANGUAGES.values() for name in (one.name, *one.aliases)]
    assert len(names) == len(set(names))
    for one in LANGUAGES.values():
        assert find_language(one.name) is one
        assert find_language(f" {one.name.upper()} ") is one
    assert find_language("C++") is LANGUAGES["cpp"]
    assert find_language("brainfuck") is None


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("public class Solution { }", "Solution.java"),
        ("import java.util.*;\n  public final class A1 {}", "A1.java"),
        ("class Hidden {}", "Main.java"),
        ("// public class Not\nclass Main {}", "Main.java"),
        ("", "Main.java"),
    ],
)
def test_java_is_called_like_its_public_class(source: str, file: str):
    assert file_name(LANGUAGES["java"], source) == file


def test_a_command_has_its_placeholders_filled_and_flags_where_they_go():
    assert command(LANGUAGES["c"].compile, "main.c", ("-Wall", "{file}")) == (
        "gcc", "-O2", "-pipe", "-Wall", "{file}", "-o", "main", "main.c", "-lm",
    )  # fmt: skip
    assert command(LANGUAGES["java"].run, "Solution.java")[-1] == "Solution"


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (CommandEnd(0, "exited", 1), "ok"),
        (CommandEnd(3, "exited", 1), "runtime_error"),
        (CommandEnd(139, "signaled", 1, "SIGSEGV", 11), "runtime_error"),
        (CommandEnd(137, "timeout", 1), "timeout"),
        (CommandEnd(137, "oom", 1), "out_of_memory"),
        (CommandEnd(1, "oom", 1), "out_of_memory"),
        (CommandEnd(137, "output_limit", 1), "output_limit"),
    ],
)
def test_a_status_says_how_it_ended(end: CommandEnd, status: str):
    assert status_of(end) == status


@pytest.mark.parametrize(
    ("output", "expected", "exact", "trim", "tokens"),
    [
        ("1 2\n", "1 2\n", True, True, True),
        ("1 2\n", "1 2", False, True, True),
        ("1 2  \r\n\n", "1 2\n", False, True, True),
        ("1\n2\n", "1 2", False, False, True),
        (" 1", "1", False, False, True),
        ("12", "1 2", False, False, False),
        ("", "", True, True, True),
        ("a\n\nb", "a\nb", False, False, True),
    ],
)
def test_output_is_compared_in_three_ways(output: str, expected: str, exact: bool, trim: bool, tokens: bool):
    assert agrees(output, expected, Compare.EXACT) is exact
    assert agrees(output, expected, Compare.TRIM) is trim
    assert agrees(output, expected, Compare.TOKENS) is tokens


def test_a_verdict_is_given_only_where_output_was_expected():
    assert verdict_of("ok", "x", None, Compare.TRIM) is None
    assert verdict_of("ok", "x\n", "x", Compare.TRIM) == "accepted"
    assert verdict_of("ok", "y\n", "x", Compare.TRIM) == "wrong_answer"
    assert verdict_of("timeout", "x\n", "x", Compare.TRIM) == "timeout"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "..", "../x", "a/../../x", ".", "a\0b", "x" * 1025])
def test_a_path_that_leaves_the_directory_is_refused(path: str):
    with pytest.raises(ValueError, match="path of a file"):
        relative_path(path)


@given(st.lists(st.sampled_from(["a", "..", ".", "b c", "ü", ""]), min_size=1, max_size=8))
def test_a_path_that_is_taken_stays_below(parts: list[str]):
    try:
        path = relative_path("/".join(parts))
    except ValueError:
        return
    assert not path.startswith(("/", ".."))
    assert ".." not in path.split("/")


def test_a_result_survives_its_json():
    step = RunStep(1, "exited", "o", "e", 0, 2, 1.5, 1.0, 0.5, 900, None, "why")
    for result in (
        RunResult("ok", "c", "polyglot", step, step, "accepted", {"total": 1.0}),
        RunResult("compile_error", "c", "polyglot", None, step),
    ):
        assert result_from_json(result_to_json(result)) == result
