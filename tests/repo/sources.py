"""The source files, parsed once."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "server" / "src" / "cloche_server"
SDK = ROOT / "sdks" / "python" / "src"
TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Source:
    path: Path
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))


@cache
def parsed(root: Path) -> tuple[Source, ...]:
    found = []
    # A million nodes, which stay: the garbage collector would look through them again and again.
    gc.disable()
    for path in sorted(root.rglob("*.py")):
        text = path.read_text("utf-8")
        tree = ast.parse(text, str(path))
        found.append(Source(path, text, tree, tuple(ast.walk(tree))))
    gc.freeze()
    gc.enable()
    assert found, f"no Python below {root}"
    return tuple(found)


def called(call: ast.Call) -> str:
    """The name of what is called, without where it comes from."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def strings(source: Source) -> Iterator[ast.Constant]:
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node
