"""Where the server that tests of ACME need cannot be had, that is a sentence, in time."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kit import pebble

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("refuses", [True, False])
def test_a_module_proxy_that_is_not_there_is_told(tmp_path: Path, refuses: bool) -> None:
    """One that refuses, and one that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if refuses:
            silent.close()
        environment = {**os.environ, "GOPROXY": where, "GOMODCACHE": str(tmp_path / "modules"), "GONOSUMDB": "*"}
        with pytest.raises(
            pebble.BuildError, match=r"(?s)cannot be fetched from the module proxy .* see `go env GOPROXY`"
        ):
            pebble.build(tmp_path, environment, seconds=3)
    assert not (tmp_path / "pebble").exists()
