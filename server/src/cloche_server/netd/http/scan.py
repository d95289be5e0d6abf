"""Finding texts in bytes that come in pieces, without keeping more of them than could be the beginning of a text."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

#: How much of a text has to be there before its beginning is looked for by `find`; less is tried place by place.
_KEY: Final = 8
#: Escapes of a character that a placeholder may have, in percent-encoding and in JSON.
_UNRESERVED: Final = rb"(?:2[dDeE]|3[0-9]|[46][1-9a-fA-F]|5[0-9aAfF]|7[0-9aAeE])"
_ESCAPE: Final = re.compile(rb"(?:%|\\u00)" + _UNRESERVED)
#: An escape that is cut by the end of the data.
_CUT: Final = rb"%[0-9a-fA-F]?\Z|\\(?:u(?:0(?:0[0-9a-fA-F]?)?)?)?\Z"


class Spelling(Enum):
    """How a placeholder was written."""

    PLAIN = "plain"
    PERCENT = "percent"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Hit:
    """The text with this index stands in `data[start:end]`."""

    start: int
    end: int
    index: int
    spelling: Spelling = Spelling.PLAIN


def _hex(value: int) -> bytes:
    """A pattern of two hexadecimal digits of any case."""
    return "".join(digit if digit.isdigit() else f"[{digit}{digit.upper()}]" for digit in f"{value:02x}").encode()


def _forms(byte: int) -> bytes:
    digits = _hex(byte)
    return b"(?:" + re.escape(bytes([byte])) + b"|%" + digits + rb"|\\u00" + digits + b")"


def _forms_of(byte: int) -> tuple[bytes, ...]:
    digits = f"{byte:02x}".encode()
    return bytes([byte]), b"%" + digits, b"\\u00" + digits


class Placeholders:
    """Placeholders (ASCII without white space, none a part of another), each character plain, percent-encoded or as the
    `\\u00xx` of JSON."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = [text.encode("ascii") for text in texts]
        self._pattern = re.compile(b"|".join(b"(" + b"".join(map(_forms, text)) + b")" for text in self.texts))
        self._longest = max((len(text) for text in self.texts), default=0)
        self._forms = [[_forms_of(byte) for byte in text] for text in self.texts]
        firsts = sorted({text[0] for text in self.texts})
        self._first = re.compile(b"(?=" + b"|".join([*map(_forms, firsts), _CUT]) + b")")
        # An escape is six bytes at most.
        self._reach = 6 * self._longest

    def find(self, data: bytes, start: int = 0) -> Hit | None:
        """The first one at or after `start`."""
        if not self.texts:
            return None
        plain = self._find_plain(data, start)
        for low, high in self._escaped(data, start, len(data) if plain is None else plain.start):
            found = self._pattern.search(data, low, high)
            if found is not None and found.lastindex is not None:
                index = found.lastindex - 1
                text = found.group()
                if plain is not None and plain.start <= found.start():
                    return plain
                return Hit(found.start(), found.end(), index, Spelling.JSON if b"\\" in text else Spelling.PERCENT)
        return plain

    def _escaped(self, data: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of `data` in which a placeholder with escapes may stand that begins before `end`. Only they are
        looked through character by character, each once: that is slow, and hardly anybody escapes a letter."""
        low, high = start, -1
        for escape in _ESCAPE.finditer(data, start):
            begin = max(start, escape.start() - self._reach)
            if begin >= end:
                break
            if begin > high:
                if high >= 0:
                    yield low, high
                low = begin
            high = min(len(data), escape.end() + self._reach)
        if high >= 0:
            yield low, high

    def _find_plain(self, data: bytes, start: int) -> Hit | None:
        found = [(data.find(text, start), index) for index, text in enumerate(self.texts)]
        at, index = min(((at, index) for at, index in found if at >= 0), default=(-1, -1))
        return None if at < 0 else Hit(at, at + len(self.texts[index]), index)

    def held(self, data: bytes, start: int = 0) -> int:
        """Where the end of `data` begins that may be the beginning of a placeholder; `len(data)`: nowhere."""
        tail = data[max(start, len(data) - self._reach) :]
        for first in self._first.finditer(tail):
            rest = tail[first.start() :]
            lower = rest.lower()
            if any(_begins(forms, text, rest, lower) for forms, text in zip(self._forms, self.texts, strict=True)):
                return len(data) - len(rest)
        return len(data)


def _begins(forms: Sequence[tuple[bytes, ...]], text: bytes, data: bytes, lower: bytes) -> bool:
    """Whether `data` ends before the text does, and is its beginning so far. `lower`: the same for what is in hex."""
    at = 0
    for byte, (plain, percent, json) in zip(text, forms, strict=True):
        if at >= len(data):
            return True
        if data[at] == byte:
            at += len(plain)
            continue
        for escape in (percent, json):
            part = lower[at : at + len(escape)]
            # `\u` itself has no case.
            if part == escape[: len(part)] and not data.startswith(b"\\U", at):
                if len(part) < len(escape):
                    return True
                at += len(escape)
                break
        else:
            return False
    return False  # whole: `find` has had it


@functools.lru_cache(maxsize=1024)
def placeholders(texts: tuple[str, ...]) -> Placeholders:
    """Made once for all requests of a sandbox."""
    return Placeholders(texts)


class Literals:
    """Exact byte strings of any length; of those that begin at one place the longest counts."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = list(texts)
        self._longest = max((len(text) for text in self.texts), default=0)

    def find(self, data: bytes, start: int = 0) -> Hit | None:
        best: Hit | None = None
        for index, text in enumerate(self.texts):
            at = data.find(text, start)
            if at < 0:
                continue
            if best is None or at < best.start or (at == best.start and len(text) > best.end - best.start):
                best = Hit(at, at + len(text), index)
        return best

    def held(self, data: bytes, start: int = 0) -> int:
        """As in `Placeholders`."""
        least = len(data)
        for text in self.texts:
            at = max(start, len(data) - len(text) + 1)
            while at < least:
                # What is longer than the key can be looked for; the last few bytes are tried one after another.
                if len(data) - at >= _KEY:
                    at = data.find(text[:_KEY], at)
                    if at < 0:
                        at = max(start, len(data) - _KEY + 1)
                        continue
                if data.endswith(text[: len(data) - at]):
                    least = min(least, at)
                    break
                at += 1
        return least
