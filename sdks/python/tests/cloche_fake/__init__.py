"""A small server that answers as the API design says, and misbehaves on demand. For the tests only."""

from .api import KEY, FakeCloche
from .http import Reply, Request

__all__ = ["KEY", "FakeCloche", "Reply", "Request"]
