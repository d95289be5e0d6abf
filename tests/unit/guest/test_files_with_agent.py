"""File calls against the real agent in its developer mode."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient

pytestmark = pytest.mark.thorough


@pytest.fixture
def client(agent_client: GuestClient) -> GuestClient:
    return agent_client


NAMES = ["a b", "🤣.txt", "é", "e\u0301", "50%2Foff", "q?x=1&y#z", "a+b", "\"'", "-rf", ".dot", "new\nline"]
NAMES += ["tab\t", "back\\slash", "$(touch pwn)", "x" * 255]


def names(folder: str | bytes | Path) -> list[bytes]:
    """Raw names in a directory of the host, which is that of the agent here."""
    path = Path(os.fsdecode(folder))
    return sorted(os.fsencode(entry.name) for entry in path.iterdir())


async def chunks(data: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def test_names_and_bytes_round_trip(client: GuestClient, tmp_path: Path) -> None:
    raw = [name.encode() for name in NAMES] + [b"bad\xff\xfename"]
    base = bytes(tmp_path) + b"/new/parents"
    for name in raw:
        assert (await client.write_file(base + b"/" + name, name)).created
        body = await client.read_file(base + b"/" + name)
        assert body.size == len(name)
        assert await body.read(1000) == name
    listing = await client.list_dir(base)
    assert [e.raw_name for e in listing.entries] == sorted(raw)
    assert names(base) == sorted(raw)
    for name in raw:
        await client.move(base + b"/" + name, base + b"/moved")
        assert (await client.stat(base + b"/moved")).size == len(name)
        await client.move(base + b"/moved", base + b"/" + name)
    part = await client.list_dir(base, limit=3)
    assert part.truncated
    rest = await client.list_dir(base, after=part.next)
    assert [e.raw_name for e in [*part.entries, *rest.entries]] == sorted(raw)
    for name in raw:
        await client.delete(base + b"/" + name)
    assert not (await client.list_dir(base)).entries
    with pytest.raises(ClocheError) as caught:
        await client.write_file(base + b"/" + b"x" * 256, b"")
    assert caught.value.code == "file.name_too_long"


@pytest.mark.parametrize("size", [0, 1, 120_000, 20_000_000])
async def test_sizes(client: GuestClient, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    path = f"{tmp_path}/f"
    for content_length in (None, size):
        result = await client.write_file(path, chunks(data), content_length=content_length)
        assert result.bytes == size
    assert Path(path).read_bytes() == data
    body = await client.read_file(path)
    assert body.size == size
    assert b"".join([chunk async for chunk in body]) == data


async def test_mode_time_append_and_owner(client: GuestClient, tmp_path: Path) -> None:
    path = tmp_path / "s.sh"
    tmp_path.chmod(0o777)
    await client.write_file(str(path), b"one", mode=0o4755, mtime_ns=1_000_000_007)
    entry = await client.stat(str(path))
    assert (entry.mode, entry.mtime_ns, entry.type, entry.size) == (0o4755, 1_000_000_007, "file", 3)
    result = await client.write_file(str(path), b"two", append=True)
    assert not result.created
    assert path.read_bytes() == b"onetwo"
    made = await client.mkdir(str(tmp_path / "d" / "e"), parents=True, mode=0o750)
    assert (made.type, made.mode) == ("dir", 0o750)
    body = await client.read_file("/proc/version")
    version = await body.read(10_000)
    assert b"Linux" in version
    assert body.size in (None, len(version))


async def test_an_upload_that_is_cut_short_leaves_nothing(client: GuestClient, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100_000
        raise OSError("the client is gone")

    async def slow() -> AsyncIterator[bytes]:
        yield b"y" * 300_000
        await asyncio.sleep(60)

    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="gone"):
        await client.write_file(str(path), broken())
    task = asyncio.ensure_future(client.write_file(str(path), slow()))
    await asyncio.sleep(0.2)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    with pytest.raises(ClocheError):
        await client.write_file(str(path), chunks(b"short"), content_length=10)
    deadline = time.monotonic() + 5
    while len(names(tmp_path)) != 1 and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert names(tmp_path) == [b"f"]
    assert path.read_bytes() == b"old"


async def test_file_errors(client: GuestClient, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    base = str(tmp_path)
    cases = [
        (client.read_file(f"{base}/none"), "file.not_found"),
        (client.read_file(f"{base}/d"), "file.is_directory"),
        (client.read_file(f"{base}/fifo"), "file.not_a_regular_file"),
        (client.read_file(f"{base}/d/f/g"), "file.not_a_directory"),
        (client.list_dir(f"{base}/none"), "file.not_found"),
        (client.list_dir(f"{base}/d/f"), "file.not_a_directory"),
        (client.delete(f"{base}/none"), "file.not_found"),
        (client.delete(f"{base}/d"), "file.not_empty"),
        (client.mkdir(f"{base}/d"), "file.exists"),
        (client.move(f"{base}/d/f", f"{base}/fifo"), "file.exists"),
        (client.stat(f"{base}/none"), "file.not_found"),
        (client.stat(base, user="nobody-of-this-name"), "exec.user_not_found"),
        (client.read_file("/etc/shadow", user="nobody"), "file.permission_denied"),
        (client.write_file(f"{base}/none/f", b"", parents=False), "file.not_found"),
        (client.write_file("/dev/full", b"x" * 10), "file.not_a_regular_file"),
    ]
    for call, code in cases:
        with pytest.raises(ClocheError) as caught:
            await call
        assert caught.value.code == code, caught.value
    await client.delete(f"{base}/d", recursive=True)
    assert names(base) == [b"fifo"]


async def test_transfers_in_parallel_with_small_calls(client: GuestClient, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)

    async def there_and_back(n: int) -> bool:
        await client.write_file(f"{tmp_path}/{n}", chunks(data))
        return await (await client.read_file(f"{tmp_path}/{n}")).read(len(data)) == data

    transfers = [asyncio.ensure_future(there_and_back(n)) for n in range(20)]
    slowest = 0.0
    while not all(t.done() for t in transfers):
        began = time.monotonic()
        await client.info()
        slowest = max(slowest, time.monotonic() - began)
    assert all(t.result() for t in transfers)
    assert slowest < 2
