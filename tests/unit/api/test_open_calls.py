"""How many requests may be open at once."""

from __future__ import annotations

import contextlib

import pytest

from cloche_server.api.open_calls import OpenCalls
from cloche_server.core.errors import ClocheError


def refused(calls: OpenCalls, workspace: str, path: str, method: str = "GET") -> str | None:
    """Of what there are too many."""
    try:
        with calls.enter(workspace, method, path):
            return None
    except ClocheError as error:
        return (
            str(error.details["of"]) if (error.code, error.retry_after) == ("request.rate_limited", 1) else error.code
        )


def test_of_a_sandbox_and_of_its_workspace() -> None:
    calls = OpenCalls(3, 2)
    with contextlib.ExitStack() as open_:
        for _ in range(2):
            open_.enter_context(calls.enter("w", "POST", "/v1/sandboxes/a/exec/stream"))
        assert refused(calls, "w", "/v1/sandboxes/a/fs") == "sandbox"
        assert refused(calls, "other", "/v1/sandboxes/a/fs") is None, "the id alone says nothing"
        assert refused(calls, "w", "/v1/sandboxes/a/exec/1", "DELETE") is None, "what ends something makes room"
        with calls.enter("w", "GET", "/v1/events"):
            assert refused(calls, "w", "/v1/sandboxes/b/fs") == "workspace"
            assert refused(calls, "w", "/v1/templates") == "workspace"
            assert refused(calls, "w", "/v1/sandboxes/b", "DELETE") is None
        assert refused(calls, "w", "/v1/sandboxes/b/fs") is None
    assert refused(calls, "w", "/v1/sandboxes/a/fs") is None
    assert not calls._open, "what has ended leaves nothing"


def test_no_bound() -> None:
    calls = OpenCalls(0, 0)
    with contextlib.ExitStack() as open_:
        for _ in range(50):
            open_.enter_context(calls.enter("w", "GET", "/v1/sandboxes/a/fs"))


def test_one_that_fails_is_not_open() -> None:
    calls = OpenCalls(1, 1)
    with pytest.raises(ValueError, match="broke"), calls.enter("w", "GET", "/v1/sandboxes/a/fs"):
        raise ValueError("broke")
    assert refused(calls, "w", "/v1/sandboxes/a/fs") is None
