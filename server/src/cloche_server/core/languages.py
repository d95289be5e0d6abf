"""Languages of one-shot runs: how the source is named, compiled and run. Data, without any I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

#: The template that has all of them, and the one that is always there.
POLYGLOT: Final = "polyglot"
BASE: Final = "base"


@dataclass(frozen=True, slots=True)
class Language:
    """In `compile` and `run`, `{file}` is the source, `{stem}` its name without the ending, `{flags}` stands where the
    caller's compiler options go. `memory_mb`: what its compiler or runtime needs; None: what any sandbox has."""

    name: str
    title: str
    file: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    template: str = POLYGLOT
    memory_mb: int | None = None

    @property
    def is_compiled(self) -> bool:
        return bool(self.compile)


_JVM: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Xss16m")

_ALL: Final = (
    Language("python", "Python 3", "main.py", ("python3", "{file}"), aliases=("python3", "py"), template=BASE),
    Language("bash", "Bash", "main.sh", ("bash", "{file}"), aliases=("sh", "shell"), template=BASE),
    Language("perl", "Perl 5", "main.pl", ("perl", "{file}"), aliases=("pl",), template=BASE),
    Language("awk", "AWK (gawk)", "main.awk", ("gawk", "-f", "{file}"), aliases=("gawk",), template=BASE),
    Language(
        "c", "C (gcc)", "main.c", ("./{stem}",), ("gcc", "-O2", "-pipe", "{flags}", "-o", "{stem}", "{file}", "-lm")
    ),
    Language(
        "cpp",
        "C++ (g++)",
        "main.cpp",
        ("./{stem}",),
        ("g++", "-O2", "-pipe", "{flags}", "-o", "{stem}", "{file}"),
        aliases=("c++", "cc", "cxx"),
        memory_mb=512,
    ),
    Language(
        "go",
        "Go",
        "main.go",
        ("./{stem}",),
        ("go", "build", "{flags}", "-o", "{stem}", "{file}"),
        aliases=("golang",),
        memory_mb=512,
    ),
    Language(
        "rust",
        "Rust",
        "main.rs",
        ("./{stem}",),
        ("rustc", "-C", "opt-level=1", "{flags}", "-o", "{stem}", "{file}"),
        aliases=("rs",),
        memory_mb=512,
    ),
    Language(
        "java",
        "Java",
        "Main.java",
        ("java", *_JVM, "-cp", ".", "{stem}"),
        ("javac", "-J-XX:+UseSerialGC", "-J-XX:TieredStopAtLevel=1", "{flags}", "-d", ".", "{file}"),
        memory_mb=512,
    ),
    Language("javascript", "JavaScript (Node.js)", "main.js", ("node", "{file}"), aliases=("js", "node")),
    Language(
        "typescript",
        "TypeScript (tsc, Node.js)",
        "main.ts",
        ("node", "{stem}.js"),
        ("tsc", "--target", "es2022", "--module", "commonjs", "--skipLibCheck", "{flags}", "{file}"),
        aliases=("ts",),
        memory_mb=512,
    ),
    Language("ruby", "Ruby", "main.rb", ("ruby", "{file}"), aliases=("rb",)),
    Language("php", "PHP", "main.php", ("php", "{file}")),
    Language("lua", "Lua 5.4", "main.lua", ("lua5.4", "{file}")),
    Language("r", "R", "main.R", ("Rscript", "{file}"), aliases=("rscript",)),
    Language("sqlite", "SQLite", "main.sql", ("sqlite3", "-batch", ":memory:", ".read {file}"), aliases=("sql",)),
)

LANGUAGES: Final = {language.name: language for language in _ALL}
_BY_NAME: Final = {name: one for one in _ALL for name in (one.name, *one.aliases)}
_PUBLIC_CLASS: Final = re.compile(r"^\s*public\s+(?:(?:final|abstract|strictfp)\s+)*class\s+([A-Za-z_$][\w$]*)", re.M)


def find_language(name: str) -> Language | None:
    """By name or alias, in any case."""
    return _BY_NAME.get(name.strip().lower())


def file_name(language: Language, source: str) -> str:
    """What the source is called: as the language has it, but Java wants the name of the public class."""
    if language.name == "java" and (found := _PUBLIC_CLASS.search(source)) is not None:
        return found[1] + ".java"
    return language.file


def command(words: tuple[str, ...], file: str, flags: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The argv: placeholders filled in, and `{flags}` replaced by all of them."""
    stem = file.rpartition(".")[0]
    argv: list[str] = []
    for word in words:
        if word == "{flags}":
            argv += flags
        else:
            argv.append(word.replace("{file}", file).replace("{stem}", stem))
    return tuple(argv)
