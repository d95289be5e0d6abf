"""The error tree against the catalogue of the server, and its fallbacks."""

from __future__ import annotations

import builtins
import pickle
import re
from pathlib import Path

import pytest

import cloche
from cloche import ClocheError, CommandTimeout, ExecResult, FileNotFound, Termination, _codes, _wire, errors

SOURCE = Path(__file__).parents[3] / "server/src/cloche_server/core/errors.py"


def test_every_code_of_the_catalogue_has_a_class() -> None:
    if not SOURCE.exists():
        pytest.skip("the server's source is not beside this checkout")
    text = SOURCE.read_text("utf-8").partition("CATALOGUE: Final")[2].partition("\nclass ")[0]
    catalogue = set(re.findall(r'^    "([a-z_.]+)": ErrorSpec', text, re.M))
    assert len(catalogue) > 30
    assert set(_codes.CODES) == catalogue


def test_codes_of_the_client_are_apart() -> None:
    every = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    own = {kind.default_code for kind in every if issubclass(kind, ClocheError)}
    assert all(code.startswith("client.") or code == "exec.timeout" for code in own)


def test_fallbacks_for_codes_that_are_not_known() -> None:
    for code, status, kind in (
        ("file.something_new", 400, cloche.FileError),
        ("capacity.quota", 429, cloche.CapacityError),
        ("template.something", 500, cloche.TemplateError),
        ("snapshot.something", 409, cloche.SnapshotError),
        ("rate.something", 429, cloche.RateLimitError),
        ("new.family", 404, cloche.NotFoundError),
        ("", 409, cloche.ConflictError),
        ("", 418, cloche.InvalidRequestError),
        ("", 599, cloche.ServerError),
        ("", 403, cloche.AuthError),
    ):
        assert _codes.class_for(code, status) is kind


def test_families() -> None:
    assert issubclass(CommandTimeout, builtins.TimeoutError)
    assert issubclass(CommandTimeout, cloche.CommandError)
    assert issubclass(FileNotFound, cloche.NotFoundError)
    assert issubclass(cloche.SnapshotNotFound, cloche.NotFoundError)
    assert issubclass(cloche.SnapshotIncompatible, cloche.ConflictError)
    assert issubclass(cloche.NameTaken, cloche.ConflictError)
    assert issubclass(cloche.RequestTimeout, cloche.ConnectionLost)


def test_every_error_can_be_made_shown_and_pickled() -> None:
    for kind in {kind for kind in vars(errors).values() if isinstance(kind, type)}:
        if not issubclass(kind, ClocheError):
            continue
        error = kind("it failed", status=400, request_id="r1", details={"a": 1})
        assert str(error) == f"it failed [{error.code}, request r1]"
        assert kind.__name__ in repr(error)
        assert kind.__doc__
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (str(again), again.details, again.status) == (str(error), {"a": 1}, 400)


def test_check_keeps_its_result_when_pickled() -> None:
    result = ExecResult("x", "", "", 137, termination=Termination("oom", "SIGKILL", 9))
    with pytest.raises(cloche.CommandFailed, match=r"out of memory \(SIGKILL\)") as caught:
        result.check()
    assert pickle.loads(pickle.dumps(caught.value)).result == result


def test_exit_code_0_of_a_killed_command_is_no_success() -> None:
    assert not ExecResult("x", b"", b"", 0, termination=Termination("timeout")).ok


def test_memory_that_ran_out_is_told_of_an_end_by_the_clock() -> None:
    told = {"reason": "timeout", "signal": "SIGKILL", "signal_number": 9, "oom_kills": 3}
    assert _wire.termination(told) == Termination("timeout", "SIGKILL", 9, oom_kills=3)
    assert str(_wire.termination(told)) == "timeout (SIGKILL), 3 processes killed before for want of memory"
    assert str(_wire.termination({"reason": "oom", "oom_kills": 1})) == "out of memory"


def test_the_tree_in_the_documentation_names_every_class() -> None:
    assert errors.__doc__
    text = errors.__doc__
    families = [kind for kind in vars(errors).values() if isinstance(kind, type) and ClocheError in kind.__bases__]
    assert [kind.__name__ for kind in families if kind.__name__ not in text] == []
