"""The shape of the source: sizes, docstrings, and doors that are used by those who may."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from sources import ROOT, SDK, SERVER, TESTS, Source, functions, parsed

from cloche_server.core.lifecycle import Status

FILE_LINES = 420
TEST_FILE_LINES = 450
FUNCTION_LINES = 60
ROOTS = (SERVER, SDK, TESTS)
_EXCEPTIONS = tomllib.loads((Path(__file__).parent / "exceptions.toml").read_text("utf-8"))


def _judge(rule: str, broken: dict[str, object]) -> None:
    """Everything that breaks a rule is a listed exception, and every listed exception breaks it."""
    allowed = _EXCEPTIONS[rule]
    unknown = {name: value for name, value in broken.items() if name not in allowed}
    assert not unknown, f"{rule}: {unknown}; change it, or give the reason in tests/repo/exceptions.toml"
    unused = set(allowed) - set(broken)
    assert not unused, f"{rule}: the exceptions {unused} are not needed any more"


def _all() -> list[Source]:
    return [source for root in ROOTS for source in parsed(root)]


def _limit(name: str) -> int:
    return TEST_FILE_LINES if name.startswith("tests/") else FILE_LINES


def test_files_are_short() -> None:
    lines = {source.name: source.text.count("\n") for source in _all()}
    _judge("file_lines", {name: count for name, count in lines.items() if count > _limit(name)})


def test_functions_are_short() -> None:
    broken: dict[str, object] = {}
    for source in _all():
        for function in functions(source):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > FUNCTION_LINES:
                broken[f"{source.name}:{function.name}"] = length
    _judge("function_lines", broken)


def test_modules_say_what_they_are() -> None:
    silent = [s.name for s in _all() if s.text.strip() and ast.get_docstring(s.tree) is None]
    assert not silent, f"no docstring at the top of {silent}"


def _imports(source: Source) -> set[str]:
    found = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_the_environment_is_read_in_few_places() -> None:
    def reads(source: Source) -> bool:
        return any(
            isinstance(node, ast.Attribute)
            and node.attr in {"environ", "environb", "getenv"}
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            for node in source.nodes
        )

    _judge("environment", {source.name: "os.environ" for source in parsed(SERVER) if reads(source)})


def test_processes_are_started_in_one_place() -> None:
    def starts(source: Source) -> bool:
        called = {node.attr for node in source.nodes if isinstance(node, ast.Attribute)}
        return "subprocess" in _imports(source) or bool(
            called & {"create_subprocess_exec", "create_subprocess_shell", "posix_spawn", "fork", "forkpty", "system"}
        )

    _judge("subprocess", {source.name: "subprocess" for source in parsed(SERVER) if starts(source)})


def test_the_clock_has_one_door() -> None:
    """`time.time` and `datetime.now` only where the clock is made; everything else is given one."""
    broken = []
    for source in parsed(SERVER):
        if source.name.endswith("host/clock.py"):
            continue
        for node in source.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                text = ast.unparse(node.func)
                if text in {"time.time", "datetime.now", "datetime.utcnow"}:
                    broken.append(f"{source.name}:{node.lineno} {text}")
    assert not broken, broken


def test_states_are_compared_by_name_only_in_core() -> None:
    """A literal that is compared with a status escapes the lifecycle table."""
    names = {status.value for status in Status}
    broken = []
    for source in parsed(SERVER):
        if source.path.is_relative_to(SERVER / "core") or source.path.is_relative_to(SERVER / "engine"):
            continue  # an engine speaks of the states of its VMM
        for node in source.nodes:
            if not isinstance(node, ast.Compare) or "status" not in ast.unparse(node).lower():
                continue
            for side in ast.walk(node):
                if isinstance(side, ast.Constant) and side.value in names:
                    broken.append(f"{source.name}:{node.lineno} {ast.unparse(node)}")
    assert not broken, broken


def test_sql_stands_in_files() -> None:
    begins = ("select ", "insert ", "update ", "delete from", "create table")
    broken = [
        f"{source.name}:{node.lineno}"
        for source in parsed(SERVER)
        for node in source.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.lower().startswith(begins)
        and source.path.is_relative_to(SERVER / "store")
    ]
    assert not broken, broken


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX", "HACK"])
def test_nothing_is_left_for_later(word: str) -> None:
    found = [
        source.name
        for source in (*parsed(SERVER), *parsed(SDK))
        if f"{word}:" in source.text or f"# {word}" in source.text
    ]
    assert not found, f"{word} in {found}"


def test_every_script_is_executable() -> None:
    for name in ("quickstart", "test", ".ci/run", "scripts/docs", "scripts/lock"):
        assert (ROOT / name).stat().st_mode & 0o111, f"{name} is not executable"


def test_no_two_test_files_have_one_name() -> None:
    """Without packages around them pytest takes them for one module, and refuses both."""
    names = [source.path.name for source in parsed(TESTS) if source.path.name != "conftest.py"]
    assert sorted(set(names)) == sorted(names), [name for name in names if names.count(name) > 1]
