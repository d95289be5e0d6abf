"""Files that a recipe names: they lie beside it, and nothing outside of its folder is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

#: Bytes of all files that one entry of a recipe puts in.
MAX_BYTES: Final = 16 * 1024 * 1024
_MAX_FILES: Final = 500
_PINNED: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9.!+_-]+( *;.*)?")
_HASH: Final = re.compile(r"--hash=sha256:[0-9a-f]{64}")


class RecipeFileError(Exception):
    """What is wrong with it, as the end of a sentence that begins with the field."""


@dataclass(frozen=True, slots=True)
class PutFile:
    """A file of the root file system: owned by root, at an absolute place."""

    place: str
    mode: int
    content: bytes


def collect(folder: Path | None, name: str, place: str, mode: int) -> tuple[PutFile, ...]:
    """The file `name`, or all files below the directory `name`, by place. Hidden ones and caches are left out."""
    start = _inside(folder, name)
    if start.is_file():
        return (PutFile(place, mode, _content(start)),)
    if not start.is_dir():
        raise RecipeFileError(f"names {name!r}, which is not there")
    found = []
    total = 0
    for path in sorted(start.rglob("*")):
        relative = path.relative_to(start)
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts) or path.is_dir():
            continue
        if path.is_symlink():
            raise RecipeFileError(f"names {name!r}, in which {relative} is a link")
        found.append(PutFile(f"{place}/{relative.as_posix()}", mode, _content(path)))
        total += len(found[-1].content)
        if len(found) > _MAX_FILES or total > MAX_BYTES:
            raise RecipeFileError(f"names {name!r}, which holds too much: {_MAX_FILES} files, {MAX_BYTES} bytes")
    if not found:
        raise RecipeFileError(f"names {name!r}, which holds no file")
    return tuple(found)


def read_requirements(folder: Path | None, name: str) -> str:
    """A requirements file: nothing but exact versions with digests, so that what is installed is what was meant."""
    try:
        text = _content(_inside(folder, name)).decode("utf-8")
    except UnicodeDecodeError:
        raise RecipeFileError(f"names {name!r}, which is not UTF-8") from None
    for line in text.replace("\\\n", " ").splitlines():
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        requirement, *options = re.split(r" +(?=--)", bare)
        if not _PINNED.fullmatch(requirement.strip()) or not options:
            raise RecipeFileError(f"must be made of lines `name==version --hash=sha256:…`, and {bare[:60]!r} is none")
        if not all(_HASH.fullmatch(option.strip()) for option in options):
            raise RecipeFileError(f"has an option that is no digest in {bare[:60]!r}")
    return text


def _inside(folder: Path | None, name: str) -> Path:
    parts = PurePosixPath(name).parts
    if folder is None or not parts or name.startswith("/") or ".." in parts:
        raise RecipeFileError(f"may not be {name!r}: it is a path below the folder of the recipe")
    path = folder.joinpath(*parts)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RecipeFileError(f"names {name!r}, which leads out of the folder of the recipe")
    return path


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeFileError(f"names {path.name!r}, which cannot be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise RecipeFileError(f"names {path.name!r}, which is larger than {MAX_BYTES} bytes")
    return content
