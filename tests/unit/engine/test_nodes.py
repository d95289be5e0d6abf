"""Names of layers inside QEMU, and which one a machine writes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloche_server.engine.qemu.nodes import active_node, node_of, rw_tag, write_fds

LAYER = "kvsxqyi6ipf03c6r1pcx"


def test_a_layer_is_told_by_its_node() -> None:
    node = node_of(Path(f"/data/layers/{LAYER}.qcow2"))
    answer = [{"device": "", "inserted": {"node-name": node, "file": "/dev/fdset/2"}}]
    assert active_node(answer) == (node, LAYER)


def test_of_a_machine_of_an_earlier_server_by_its_file() -> None:
    answer = [{"device": "d0", "inserted": {"node-name": "#block103", "file": f"/data/layers/{LAYER}.qcow2"}}]
    assert active_node(answer) == ("#block103", LAYER)


@pytest.mark.parametrize("name", [".staging-1-2-abc", "UPPER", "x" * 60, "with space"])
def test_every_file_has_a_name_that_qemu_takes(name: str) -> None:
    node = node_of(Path(f"/data/layers/{name}.qcow2"))
    assert node.isalnum()
    assert node[0].isalpha()
    assert len(node) <= 31


@pytest.mark.parametrize("answer", [[], [{}], [{"inserted": {}}], [{"inserted": {"node-name": "#b", "file": "json:"}}]])
def test_an_answer_that_tells_nothing_is_an_error(answer: list[dict[str, object]]) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        active_node(answer)


def test_descriptors_that_write_a_node_are_found() -> None:
    answer = [
        {"fdset-id": 1, "fds": [{"fd": 8}]},
        {"fdset-id": 2, "fds": [{"fd": 9, "opaque": rw_tag("la")}, {"fd": 10, "opaque": "reads"}]},
        {"fdset-id": 3, "fds": [{"fd": 11, "opaque": rw_tag("lb")}]},
    ]
    assert write_fds(answer, "la") == [(2, 9)]
    assert write_fds(answer, "lc") == []
