"""The parts that do no I/O: settings, events, paths, translation, exports."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cloche
from cloche import ConfigError, ProtocolError, _config, _output, _paths, _sse

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("given_url", "expected"),
    [
        ("http://h:1", "http://h:1"),
        ("https://h/", "https://h"),
        (" http://h/v1/ ", "http://h"),
        ("http://h/prefix/v1", "http://h/prefix"),
        ("http://[::1]:8080/", "http://[::1]:8080"),
    ],
)
def test_addresses(given_url: str, expected: str) -> None:
    assert _config.normalise_url(given_url) == expected


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "http://u:p@h", "http://h?x=1", "http://h:port", "x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError):
        _config.resolve(url, "key")


def test_arguments_go_before_the_environment() -> None:
    env = {"CLOCHE_API_URL": "http://env", "CLOCHE_API_KEY": "envkey"}
    assert _config.resolve(environ=env).api_url == "http://env"
    settings = _config.resolve("http://arg", "argkey", environ=env)
    assert (settings.api_url, settings.api_key) == ("http://arg", "argkey")
    assert "argkey" not in repr(settings)
    with pytest.raises(ConfigError, match=r"set CLOCHE_API_KEY \(api_key=…\) \["):
        _config.resolve(environ={"CLOCHE_API_URL": "http://env"})
    for key in ("a b", "é", "a\nb"):
        with pytest.raises(ConfigError):
            _config.resolve("http://h", key, environ={})
    with pytest.raises(ConfigError):
        _config.resolve(timeout=0, environ=env)


@given(
    st.lists(st.tuples(st.sampled_from(["stdout", "exit"]), st.text(max_size=20)), max_size=5),
    st.integers(1, 9),
    st.booleans(),
)
def test_events_do_not_depend_on_how_the_network_cuts(sent: list[tuple[str, str]], size: int, crlf: bool) -> None:
    wire = "".join(f": note\nevent: {name}\nid: 7\ndata: {json.dumps(text)}\n\n" for name, text in sent)
    raw = (wire.replace("\n", "\r\n") if crlf else wire).encode()
    parser = _sse.Parser()
    got = [message for at in range(0, len(raw), size) for message in parser.feed(raw[at : at + size])]
    assert [(message.event, json.loads(message.data)) for message in got] == sent
    assert all(message.id == "7" for message in got)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_event_parser(raw: bytes) -> None:
    for message in _sse.Parser().feed(raw):
        assert isinstance(message.data, str)


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sse, "MAX_MESSAGE", 1000)
    parser = _sse.Parser()
    with pytest.raises(ProtocolError):
        list(parser.feed(b"data: " + b"x" * 2000))


@given(st.binary(min_size=1, max_size=40).filter(lambda raw: b"\0" not in raw))
def test_every_path_has_exactly_one_form_on_the_wire(raw: bytes) -> None:
    field = _paths.field(raw)
    assert len(field) == 1
    assert _paths.field(_paths.text(raw)) == field


@given(st.lists(st.text(max_size=30), max_size=12), st.integers(2, 60))
def test_gathered_output_keeps_head_and_tail(pieces: list[str], limit: int) -> None:
    collector = _output.Collector(limit)
    for piece in pieces:
        collector.add(piece)
    raw = "".join(pieces).encode("utf-8", "replace")
    assert collector.dropped == max(0, len(raw) - limit)
    if len(raw) <= limit:
        assert collector.text().encode() == raw
    else:
        head, tail = raw[: limit // 2], raw[len(raw) - (limit - limit // 2) :]
        middle = f"\n[cloche: truncated, {len(raw) - limit} bytes dropped]\n"
        assert collector.text() == head.decode("utf-8", "replace") + middle + tail.decode("utf-8", "replace")


def test_gathering_without_end_takes_bounded_memory() -> None:
    collector = _output.Collector(1000)
    for _ in range(100):
        collector.add("x" * 100_000)
    assert len(collector._head) + len(collector._tail) < 2_000_000
    assert collector.dropped == 10_000_000 - 1000


def test_modes_are_octal() -> None:
    assert _paths.mode_text(0o755) == _paths.mode_text("755") == _paths.mode_text("0755") == "0755"
    assert _paths.mode_text(0o4755) == "4755"
    assert _paths.mode_text(None) is None
    for wrong in (-1, 0o10000, "9", "rwx"):
        with pytest.raises(ValueError, match=r"mode|invalid literal"):
            _paths.mode_text(wrong)


def test_exports_are_what_is_public() -> None:
    names = {name for name, value in vars(cloche).items() if not name.startswith("_") and not _is_module(value)}
    assert names | {"__version__"} == set(cloche.__all__) | {"annotations"}
    assert cloche.__all__ == sorted(cloche.__all__)


def _is_module(value: object) -> bool:
    return isinstance(value, type(sys))


def test_one_version() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert cloche.__version__ == declared
    try:
        installed = importlib.metadata.version("cloche")
    except importlib.metadata.PackageNotFoundError:
        return
    assert installed == declared


def test_blocking_and_asynchronous_surface_are_the_same() -> None:
    renamed = {"aclose": "close", "__anext__": "__next__", "__aiter__": "__iter__"}
    renamed |= {"__aenter__": "__enter__", "__aexit__": "__exit__"}
    for name in ("Client", "Sandbox", "Snapshot", "Exec", "ExecStream", "Files", "FileStream"):
        left, right = _members(getattr(cloche, f"Async{name}")), _members(getattr(cloche, name))
        assert {renamed.get(attribute, attribute) for attribute in left} == set(right)
        for attribute, value in left.items():
            if callable(value) and not attribute.startswith("_"):
                assert value.__doc__, f"{name}.{attribute} has no docstring"


def _members(kind: type) -> dict[str, object]:
    """Of the class and of the bases that are ours."""
    own = [base for base in reversed(kind.__mro__) if base.__module__.startswith("cloche.")]
    return {name: value for base in own for name, value in vars(base).items()}


def test_the_blocking_client_is_up_to_date() -> None:
    script = ROOT / "scripts/unasync.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_translator_notices_stale_output_and_rules_without_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import unasync

    (tmp_path / "aio").mkdir()
    (tmp_path / "aio/x.py").write_text(
        'async def f():\n    """Use `await f()`."""\n    await g(  # await it\n        1)\n'
    )
    monkeypatch.setattr(unasync, "ROOT", tmp_path)
    monkeypatch.setattr(unasync, "TREES", [(tmp_path / "aio", tmp_path / "out", "", "")])
    monkeypatch.setattr(unasync, "RULES", {})
    assert unasync.main(["--check"]) == 1
    assert "out/x.py is stale" in capsys.readouterr().err
    assert unasync.main([]) == 0
    text = (tmp_path / "out/x.py").read_text()
    assert text.endswith('def f():\n    """Use `f()`."""\n    g(  # it\n        1)\n')
    assert unasync.main(["--check"]) == 0
    (tmp_path / "out/old.py").write_text("")
    monkeypatch.setattr(unasync, "RULES", {"AsyncThing": "Thing"})
    assert unasync.main(["--check"]) == 1
    report = capsys.readouterr().err
    assert "rule 'AsyncThing' is not used" in report
    assert "old.py has no source" in report


def test_files_and_functions_are_small() -> None:
    import ast

    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        text = path.read_text("utf-8")
        assert len(text.splitlines()) < 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"
