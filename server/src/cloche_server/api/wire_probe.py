"""Answers of self-tests."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ProbeAnswer(BaseModel):
    name: str = Field(description="What was tried: `vmm.…` from the host, `guest.…` inside.")
    held: bool = Field(description="Whether the wall held. False as well when it could not be tried.")
    detail: str = Field(description="What was seen, or why it could not be tried.")


class SelfTestAnswer(BaseModel):
    probes: list[ProbeAnswer]
