"""Reading JSON that a guest has sent: types checked, numbers bounded, strings cut, the rest ignored."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from .errors import protocol_error

MAX_INTEGER: Final = 2**63 - 1


def parse_json(data: bytes) -> Any:
    """Decode JSON. Raises `guest.protocol` on anything that is not JSON, absurdly deep nesting included."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise protocol_error("a body that is not JSON") from None


def parse_object(data: bytes) -> dict[str, Any]:
    """Decode JSON that has to be an object. Raises `guest.protocol`."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise protocol_error("a JSON value that is not an object")
    return value


def clean_text(value: str, limit: int) -> str:
    """At most `limit` characters, with lone surrogates (legal in JSON, not in UTF-8) replaced."""
    value = value[:limit]
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


class Fields:
    """Typed access to one JSON object. Every method raises `guest.protocol` on a wrong type or range."""

    __slots__ = ("_values",)

    def __init__(self, values: object) -> None:
        if not isinstance(values, dict):
            raise protocol_error("a JSON value that is not an object")
        self._values: Mapping[str, Any] = values

    @property
    def values(self) -> Mapping[str, Any]:
        """The object as it came."""
        return self._values

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it came, None if absent."""
        return self._values.get(name)

    def opt_integer(self, name: str, low: int = 0, high: int = MAX_INTEGER) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        # bool is an int in Python, but `true` is no number in JSON
        if type(value) is not int or not low <= value <= high:
            raise protocol_error(f"the field {name!r} is not a number in its range")
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_INTEGER, *, default: int | None = None) -> int:
        value = self.opt_integer(name, low, high)
        if value is None:
            value = default
        if value is None:
            raise protocol_error(f"the field {name!r} is missing")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        value = self._values.get(name, default)
        if type(value) is int and 0 <= value <= MAX_INTEGER:
            return float(value)
        if type(value) is float and math.isfinite(value) and value >= 0:
            return value
        raise protocol_error(f"the field {name!r} is not a number in its range")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise protocol_error(f"the field {name!r} is not true or false")
        return value

    def opt_text(self, name: str, limit: int) -> str | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise protocol_error(f"the field {name!r} is not a string")
        return clean_text(value, limit)

    def text(self, name: str, limit: int, default: str | None = None) -> str:
        value = self.opt_text(name, limit)
        if value is None:
            value = default
        if value is None:
            raise protocol_error(f"the field {name!r} is missing")
        return value

    def opt_base64url(self, name: str, limit: int) -> bytes | None:
        """Bytes in base64url, with or without padding; at most `limit` bytes."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > limit * 2 + 4:
            raise protocol_error(f"the field {name!r} is not base64url")
        value = value.rstrip("=")
        try:
            data = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            raise protocol_error(f"the field {name!r} is not base64url") from None
        if len(data) > limit:
            raise protocol_error(f"the field {name!r} is too long")
        return data

    def items(self, name: str, limit: int) -> list[Any]:
        """A list of at most `limit` items."""
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) > limit:
            raise protocol_error(f"the field {name!r} is not a list in its bounds")
        return value
