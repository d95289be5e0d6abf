"""The file of a disk, from the name that QEMU gives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloche_server.engine.qemu.nodes import file_of

FILE = "/data/layers/abc.qcow2"


@pytest.mark.parametrize(
    "name",
    [
        FILE,
        "json:" + json.dumps({"driver": "qcow2", "file": {"driver": "file", "filename": FILE}}),
        "json:" + json.dumps({"file": {"filename": FILE}, "backing": {"file": {"filename": "/other"}}}),
        "json:" + json.dumps({"driver": "file", "filename": FILE}),
    ],
)
def test_it_is_found(name: str) -> None:
    assert file_of(name) == Path(FILE)


@pytest.mark.parametrize("name", ["json:", "json:{}", "json:[]", 'json:{"file": "name-of-a-node"}', "json:3", "json:{"])
def test_a_name_without_one_is_an_error(name: str) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        file_of(name)
