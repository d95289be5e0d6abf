"""Which tokens of the API open a port."""

from __future__ import annotations

from typing import Any

import pytest

from cloche_server.app.callers import ApiCallers, Owner
from cloche_server.core.errors import ClocheError
from cloche_server.core.scopes import Scope
from kit.tokens import AnyToken

TOKEN = "pds_" + "0" * 32


async def _owner(token: str = TOKEN, **fields: Any) -> Owner | None:
    tokens: Any = AnyToken(**fields)
    return await ApiCallers(tokens).owner(token, "a" * 20)


async def test_a_token_that_uses_sandboxes_opens_ports() -> None:
    for owner in (await _owner(), await _owner(scope=Scope.EXEC, sandbox_id="a" * 20)):
        assert owner is not None
        assert owner.workspace == "w"
    assert await _owner("pds_no_token") is None


async def test_one_of_another_sandbox_finds_nothing() -> None:
    with pytest.raises(ClocheError) as told:
        await _owner(sandbox_id="b" * 20)
    assert told.value.code == "sandbox.not_found"


async def test_one_that_reads_opens_none() -> None:
    with pytest.raises(ClocheError) as told:
        await _owner(scope=Scope.READ)
    assert (told.value.code, told.value.details) == ("auth.forbidden", {"scope": "exec", "has": "read"})
