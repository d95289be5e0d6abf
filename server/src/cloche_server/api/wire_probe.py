"""Answers of self-tests."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ProbeAnswer(BaseModel):
    name: str = Field(
        description="What was tried: `vmm.…` from the host, `guest.…` inside, `network.…` from inside, watched here."
    )
    held: bool = Field(description="Whether the wall held. False as well when it could not be tried.")
    detail: str = Field(description="What was seen, or why it could not be tried.")


class SkippedAnswer(BaseModel):
    name: str = Field(description="What was not tried.")
    reason: str = Field(description="Why: no tool in the guest, or nothing here that it could be tried on.")


class SelfTestAnswer(BaseModel):
    probes: list[ProbeAnswer] = Field(description="What was tried.")
    skipped: list[SkippedAnswer] = Field(description="What was not tried. Nothing is claimed about it.")
