"""A small server that answers as the API design says, and misbehaves on demand. For the tests only."""

from . import faults
from .api import KEY, FakeCloche

__all__ = ["KEY", "FakeCloche", "faults"]
