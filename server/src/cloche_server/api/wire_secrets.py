"""Request and answer types of secrets."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from cloche_server.api.wire import Wire
from cloche_server.core.secrets import MAX_VALUE

Description = Annotated[str, StringConstraints(strict=True, max_length=1000)]
#: Not written out where a request is shown.
Value = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=MAX_VALUE), Field(repr=False)]


class SecretBody(Wire):
    value: Value = Field(
        description="At most 64 KiB of UTF-8, without NUL and ends of lines. No answer ever holds it.",
        json_schema_extra={"writeOnly": True, "pattern": "^[^\\u0000\\r\\n]+$"},
        repr=False,
    )
    description: Description | None = Field(None, description="For people; one that is not given stays.")


class SecretAnswer(BaseModel):
    name: str
    description: str | None = None
    version: int = Field(description="1 at first; grows with each value that is written.")
    created_at: str
    updated_at: str = Field(description="When the present value was written.")


class SecretList(BaseModel):
    secrets: list[SecretAnswer] = Field(description="By name.")
