"""The golden vectors that the agent's tests read as well (docs/agent-protocol.md §5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.guest.frames import HEADER, Exit, Frame, FrameDecoder, Gap, Heartbeat, Output, Started
from cloche_server.guest.sync import Resync

FOLDER = Path(__file__).resolve().parents[3] / "contracts" / "agent"


def vectors(name: str) -> list[Any]:
    path = FOLDER / name
    if not path.exists():
        # One test all the same: the absence has to be a failure and not a silence.
        return [pytest.param({}, id=f"{name} is missing")]
    return [pytest.param(item, id=item["name"]) for item in json.loads(path.read_text())]


def kind_of(frame: Frame) -> int:
    if isinstance(frame, Output):
        return frame.stream
    return {Started: 0, Gap: 3, Exit: 4, Heartbeat: 5}[type(frame)]


def headers_of(data: bytes) -> list[tuple[int, int, bytes]]:
    found, at = [], 0
    while at < len(data):
        kind, offset, length = HEADER.unpack_from(data, at)
        at += HEADER.size
        found.append((kind, offset, data[at : at + length]))
        at += length
    return found


@pytest.mark.parametrize("item", vectors("frames.json"))
def test_frames(item: dict[str, Any]) -> None:
    assert item, "contracts/agent/frames.json is missing"
    data = bytes.fromhex(item["hex"])
    decoder = FrameDecoder(attached=False)
    if item.get("bad"):
        with pytest.raises(ClocheError) as caught:
            decoder.feed(data)
            decoder.end()
        assert caught.value.code == "guest.protocol"
        return
    frames = decoder.feed(data)
    raw = headers_of(data)
    assert [kind_of(frame) for frame in frames] == [kind for kind, _, _ in raw]
    for frame, (_, offset, payload) in zip(frames, raw, strict=True):
        if isinstance(frame, Output):
            assert (frame.offset, frame.data) == (offset, payload)
        elif not isinstance(frame, Heartbeat):
            own = frame._asdict()
            for name, value in json.loads(payload).items():
                assert own.get(name, value) == value


@pytest.mark.parametrize("item", vectors("sync.json"))
def test_sync(item: dict[str, Any]) -> None:
    assert item, "contracts/agent/sync.json is missing"
    data = bytes.fromhex(item["hex"])
    if b"CLOCHE-SYNC-OK" not in data:
        if not item.get("bad") and "nonce" in item:
            sync = Resync(item["nonce"])
            lines = [sync.start(), *(sync.tick() for _ in range(int(item.get("n", 0))))]
            assert lines[-1].lstrip(b"\n") == data.lstrip(b"\n")
        return
    sync = Resync(item.get("nonce") or "0" * 32)
    sync.start()
    for _ in range(int(item.get("n", 0))):
        sync.tick()
    assert sync.feed(data) is not bool(item.get("bad"))
    if not item.get("bad") and "gen" in item:
        assert sync.generation == item["gen"]
