"""Recipes: what a template is made of, as a TOML file. Checked in full before anything is built."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from cloche_server.core.errors import ClocheError
from cloche_server.storage.recipe_files import PutFile, RecipeFileError, collect, read_requirements

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
MIN_DISK_MB: Final = 1024
MAX_DISK_MB: Final = 262_144
_PACKAGE: Final = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_USER: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_MAX_TEXT: Final = 4096
_MAX_MEMORY_MB: Final = 65_536
_MAX_WARM: Final = 16
_ARGUMENT: Final = re.compile(r"[^\0]{1,4096}")
_PLACE: Final = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9._+-]*)+")
_MODE: Final = re.compile(r"0[0-7]{3}")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a command gets in a sandbox of this template when the caller does not say."""

    user: str = "root"
    workdir: str | None = None  # the home of whoever the command runs as
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Service:
    """A program that is started before the snapshot and lives on in every sandbox of the template. It is ready when
    something listens on `port` of the guest."""

    argv: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """A template before it is baked. The packages are those of the guest's distribution, and among them are those of
    the recipe `below`, whose root file system this one's is begun with."""

    name: str
    packages: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    description: str = ""
    disk_mb: int = 4096
    defaults: Defaults = field(default_factory=Defaults)
    #: Memory of a sandbox whose caller names none, and the least that it may have; 0: as the server does it.
    memory_mb: int = 0
    min_memory_mb: int = 0
    #: The text of a requirements file in which every wheel has a digest.
    python: str = ""
    files: tuple[PutFile, ...] = ()
    #: Commands that are run before the snapshot, after the service is ready.
    warm: tuple[tuple[str, ...], ...] = ()
    service: Service | None = None
    below: Recipe | None = None

    @property
    def digest(self) -> str:
        """Of all that decides what the root file system holds. A new description needs no new build."""
        content: dict[str, Any] = {"packages": sorted(set(self.packages)), "defaults": asdict(self.defaults)}
        if self.python:
            content["python"] = self.python
        if self.files:
            content["files"] = [[f.place, f.mode, hashlib.sha256(f.content).hexdigest()] for f in self.files]
        if self.below:
            content["below"] = self.below.digest
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(path.name, f"the file cannot be read ({error})") from None
    return parse_recipe(text, path.name, path.parent)


def parse_recipe(text: str, source: str = "recipe", folder: Path | None = None) -> Recipe:
    """Check the text of a recipe, and read the files of `folder` that it names. `source` is named in the errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _invalid(source, f"it is not TOML: {error}") from None
    table = _Table(data, source, "")
    name = table.text("name", pattern=NAME, required=True)
    aliases = table.texts("aliases", NAME)
    if name in aliases:
        raise _invalid(source, f"`aliases` repeats the name {name!r}")
    below = _below(table.text("packages_of", pattern=NAME), folder, table)
    own = table.texts("packages", _PACKAGE)
    recipe = Recipe(
        name=name,
        packages=own if below is None else tuple(dict.fromkeys((*below.packages, *own))),
        aliases=aliases,
        description=table.text("description"),
        disk_mb=table.number("disk_mb", 4096, MIN_DISK_MB, MAX_DISK_MB),
        defaults=_defaults(table.table("defaults")),
        memory_mb=table.number("memory_mb", 0, 128, _MAX_MEMORY_MB),
        min_memory_mb=table.number("min_memory_mb", 0, 128, _MAX_MEMORY_MB),
        python=_python(table.table("python"), folder),
        files=_files(table.tables("files"), folder),
        warm=table.commands("warm"),
        service=_service(table.table("service")),
        below=below,
    )
    table.nothing_else()
    if recipe.memory_mb < recipe.min_memory_mb:
        raise _invalid(source, "`memory_mb` must be at least `min_memory_mb`")
    if recipe.python and not {"python3", "python3-minimal"} & set(recipe.packages):
        raise _invalid(source, "`python` needs the package python3")
    return recipe


def _below(name: str, folder: Path | None, table: _Table) -> Recipe | None:
    if not name:
        return None
    path = None if folder is None else folder / f"{name}.toml"
    if path is None or not path.is_file():
        raise _invalid(table.source, f"`packages_of` names the recipe {name!r}, which is not beside this one")
    if "packages_of" in (data := _read(path)) or "python" in data or "files" in data:
        raise _invalid(
            table.source,
            f"`packages_of` names the recipe {name!r}; it may name only one that has "
            "`packages`, and neither `packages_of` nor `python` nor `files`",
        )
    return load_recipe(path)


def _read(path: Path) -> dict[str, Any]:
    """What a recipe file says, unchecked."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _invalid(path.name, f"the file cannot be read ({error})") from None


def _python(table: _Table, folder: Path | None) -> str:
    if not table.data:
        return ""
    name = table.text("requirements", required=True)
    table.nothing_else()
    try:
        return read_requirements(folder, name)
    except RecipeFileError as error:
        raise _invalid(table.source, f"`{table.prefix}requirements` {error}") from None


def _files(tables: list[_Table], folder: Path | None) -> tuple[PutFile, ...]:
    found: dict[str, PutFile] = {}
    for table in tables:
        name = table.text("from", required=True)
        place = table.text("to", pattern=_PLACE, required=True)
        mode = int(table.text("mode", default="0644", pattern=_MODE), 8)
        table.nothing_else()
        try:
            put = collect(folder, name, place, mode)
        except RecipeFileError as error:
            raise _invalid(table.source, f"`{table.prefix}from` {error}") from None
        for file in put:
            if file.place in found:
                raise _invalid(table.source, f"`{table.prefix}to` puts two files at {file.place}")
            found[file.place] = file
    return tuple(found[place] for place in sorted(found))


def _service(table: _Table) -> Service | None:
    if not table.data:
        return None
    argv = table.texts("argv", _ARGUMENT, unique=False)
    if not argv:
        raise _invalid(table.source, f"`{table.prefix}argv` is missing")
    port = table.number("port", 0, 1, 65535)
    if not port:
        raise _invalid(table.source, f"`{table.prefix}port` is missing")
    table.nothing_else()
    return Service(argv, port)


def _defaults(table: _Table) -> Defaults:
    workdir = table.text("workdir") if "workdir" in table.data else None
    if workdir is not None and not workdir.startswith("/"):
        raise _invalid(table.source, f"`{table.prefix}workdir` must be an absolute path")
    user = table.text("user", default="root", pattern=_USER)
    values = table.table("env")
    env = {}
    for key in list(values.data):
        if not _ENV_NAME.fullmatch(key):
            raise _invalid(table.source, f"`{values.prefix}{key}` is not a name for a variable")
        env[key] = values.text(key)
    values.nothing_else()
    table.nothing_else()
    return Defaults(user, workdir, env)


def _invalid(source: str, problem: str) -> ClocheError:
    return ClocheError("template.invalid_recipe", f"{source}: {problem}", details={"recipe": source})


class _Table:
    """A table of the file; what is asked for is checked and removed, so that what is left is unknown."""

    def __init__(self, data: dict[str, Any], source: str, prefix: str) -> None:
        self.data = dict(data)
        self.source = source
        self.prefix = prefix

    def _error(self, key: str, problem: str) -> ClocheError:
        return _invalid(self.source, f"`{self.prefix}{key}` {problem}")

    def text(
        self, key: str, *, default: str = "", pattern: re.Pattern[str] | None = None, required: bool = False
    ) -> str:
        if key not in self.data:
            if required:
                raise self._error(key, "is missing")
            return default
        value = self.data.pop(key)
        if not isinstance(value, str):
            raise self._error(key, "must be text")
        if len(value) > _MAX_TEXT or "\0" in value:
            raise self._error(key, "is too long or holds a NUL")
        if pattern is not None and not pattern.fullmatch(value):
            raise self._error(key, f"may not be {value!r}")
        return value

    def texts(self, key: str, pattern: re.Pattern[str], *, unique: bool = True) -> tuple[str, ...]:
        value = self.data.pop(key, [])
        if not isinstance(value, list):
            raise self._error(key, "must be a list of texts")
        for item in value:
            if not isinstance(item, str) or not pattern.fullmatch(item):
                raise self._error(key, f"may not hold {item!r}")
        if unique and len(set(value)) != len(value):
            raise self._error(key, "names something twice")
        return tuple(value)

    def commands(self, key: str) -> tuple[tuple[str, ...], ...]:
        """A list of commands, each a list of a program and its arguments."""
        value = self.data.pop(key, [])
        if not isinstance(value, list) or len(value) > _MAX_WARM:
            raise self._error(key, f"must be a list of at most {_MAX_WARM} commands")
        for argv in value:
            whole = isinstance(argv, list) and argv
            if not whole or not all(isinstance(part, str) and _ARGUMENT.fullmatch(part) for part in argv):
                raise self._error(key, "must hold commands, each a list of a program and its arguments")
        return tuple(tuple(argv) for argv in value)

    def tables(self, key: str) -> list[_Table]:
        value = self.data.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._error(key, "must be a list of tables")
        return [_Table(item, self.source, f"{self.prefix}{key}[{number}].") for number, item in enumerate(value)]

    def number(self, key: str, default: int, low: int, high: int) -> int:
        if key not in self.data:
            return default
        value = self.data.pop(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(key, "must be a whole number")
        if not low <= value <= high:
            raise self._error(key, f"must be between {low} and {high}")
        return value

    def table(self, key: str) -> _Table:
        value = self.data.pop(key, {})
        if not isinstance(value, dict):
            raise self._error(key, "must be a table")
        return _Table(value, self.source, f"{self.prefix}{key}.")

    def nothing_else(self) -> None:
        for key in self.data:
            raise self._error(key, "is not known")
