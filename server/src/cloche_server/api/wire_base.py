"""What all request types have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False, strict=True)]


class Wire(BaseModel):
    """Unknown fields are ignored: older and newer clients send more than this server knows."""

    model_config = ConfigDict(extra="ignore")
