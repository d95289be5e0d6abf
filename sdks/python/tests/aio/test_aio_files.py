"""Files of the sandbox."""

from __future__ import annotations

import hashlib
import io
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from cloche_fake import FakeCloche, faults

from cloche import (
    AsyncSandbox,
    ConnectionLost,
    DirectoryNotEmpty,
    FileError,
    FileExists,
    FileNotFound,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    SandboxNotFound,
)

BIG = 48 * 1024 * 1024
FLAT = 6 * 1024 * 1024

NAMES = [
    "a b", "🤣.txt", "é", "e\u0301", "50%2Foff", "q?x=1&y#z", "a+b", "'\"", "-rf", "..x", "line\nbreak", "tab\t",
    "back\\slash", "$(touch pwn)", "x" * 255, b"bad\xff\xfename", "%", "a;b", "&", "=", "~", "[1]", "\u2028",
]  # fmt: skip


async def test_every_name_goes_there_and_back(fake: FakeCloche) -> None:
    files = (await AsyncSandbox.create()).files
    for name in NAMES:
        path = b"/tmp/" + name if isinstance(name, bytes) else f"/tmp/{name}"
        content = repr(name).encode()
        assert (await files.write(path, content)).created
        assert await files.read(path) == content
    entries = await files.list("/tmp")
    assert len(entries) == len(NAMES)
    for entry in entries:
        assert await files.exists(entry.path)
        assert (await files.stat(entry.path)).path == entry.path
        if "\udcff" in entry.path:
            with pytest.raises(ValueError, match="not UTF-8"):
                await files.move(entry.path, "/tmp/x")
            continue
        await files.move(entry.path, entry.path.replace("/tmp/", "/srv/"))
        assert await files.read(entry.path.replace("/tmp/", "/srv/"))
    with pytest.raises(NameTooLong):
        await files.write("/tmp/" + "x" * 256, "")
    for wrong in ("", "a\0b", b"a\0"):
        with pytest.raises(ValueError, match="path"):
            await files.read(wrong)


async def test_every_kind_of_source(fake: FakeCloche, tmp_path: Path) -> None:
    files = (await AsyncSandbox.create()).files
    local = tmp_path / "local"
    local.write_bytes(b"x\r\n\xff" * 100_000)

    async def pieces() -> AsyncIterator[bytes | str]:
        for index in range(5):
            yield b"ab"
            yield f"é{index}"

    sources: list[tuple[Any, bytes]] = [
        ("grüße\r\n", "grüße\r\n".encode()),
        (b"", b""),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abc"), b"abc"),
        (local, local.read_bytes()),
        (io.BytesIO(b"abc" * 100_000), b"abc" * 100_000),
        (io.StringIO("é" * 200_000), "é".encode() * 200_000),
        ([b"a", "b", bytearray(b"c")], b"abc"),
        ([], b""),
        (pieces(), "".join(f"abé{i}" for i in range(5)).encode()),
    ]
    for source, expected in sources:
        result = await files.write("/tmp/target", source)
        assert result.bytes == len(expected)
        assert await files.read("/tmp/target") == expected
    for wrong in (5, None, [1]):
        with pytest.raises(TypeError):
            await files.write("/tmp/target", wrong)  # type: ignore[arg-type]
    assert await files.read("/tmp/target") == sources[-1][1]


async def test_write_options(fake: FakeCloche) -> None:
    files = (await AsyncSandbox.create()).files
    await files.write(PurePosixPath("/tmp/x"), "a", mode=0o755, user="me", mtime=5)
    assert fake.requests[-1].query == {"path": "/tmp/x", "mode": "0755", "user": "me", "mtime": "5"}
    assert (await files.stat("/tmp/x")).mode == 0o755
    await files.write("/tmp/x", "b", mode="600", append=True)
    assert (await files.stat("/tmp/x")).mode == 0o600
    assert await files.read_text("/tmp/x") == "ab"
    with pytest.raises(ValueError, match="mode"):
        await files.write("/tmp/x", "", mode=0o10000)


async def test_directories(fake: FakeCloche) -> None:
    files = (await AsyncSandbox.create()).files
    assert (await files.mkdir("/tmp/d")).is_dir
    for name in "abcdefgh":
        await files.write(f"/tmp/d/{name}", name)
    assert [entry.name for entry in await files.list("/tmp/d")] == list("abcdefgh")
    assert fake.count("GET", "/fs/dir") == 3
    assert [entry.path async for entry in files.iter_dir("/tmp/d", page_size=5)][-1] == "/tmp/d/h"
    await files.move("/tmp/d/a", "/tmp/d/z")
    with pytest.raises(FileExists):
        await files.move("/tmp/d/z", "/tmp/d/b")
    assert (await files.move("/tmp/d/z", "/tmp/d/b", overwrite=True)).name == "b"
    with pytest.raises(DirectoryNotEmpty):
        await files.remove("/tmp/d")
    await files.remove("/tmp/d", recursive=True)
    assert not await files.exists("/tmp/d")


async def test_failures_differ_from_empty(fake: FakeCloche) -> None:
    sandbox = await AsyncSandbox.create()
    files = sandbox.files
    await files.write("/tmp/f", "x")
    with pytest.raises(FileNotFound) as caught:
        await files.list("/nope")
    assert isinstance(caught.value, FileError)
    with pytest.raises(NotADirectory):
        await files.list("/tmp/f")
    with pytest.raises(IsADirectory):
        await files.read("/tmp")
    with pytest.raises(FileNotFound):
        await files.remove("/nope")
    await files.remove("/nope", missing_ok=True)
    assert await files.exists("/nope") is False
    await sandbox.kill()
    with pytest.raises(SandboxNotFound):
        await files.exists("/tmp/f")


async def test_a_short_body_is_an_error_not_a_short_file(fake: FakeCloche, tmp_path: Path) -> None:
    short = faults.pieces([b"x" * 50_000], length=100_000, cut=True)
    chunked = faults.pieces([b"x" * 50_000], cut=True)
    files = (await AsyncSandbox.create()).files
    local = tmp_path / "local"
    local.write_bytes(b"old")
    for handler in (short, chunked):
        fake.on("GET", "/fs", handler, times=2)
        with pytest.raises(ConnectionLost):
            await files.read("/tmp/x")
        with pytest.raises(ConnectionLost):
            await files.download("/tmp/x", local)
    assert local.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [local.name]  # noqa: PTH208


async def test_an_upload_that_breaks_leaves_nothing(fake: FakeCloche) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * 500_000
        raise ZeroDivisionError

    files = (await AsyncSandbox.create()).files
    await files.write("/tmp/x", "old")
    with pytest.raises(ZeroDivisionError):
        await files.write("/tmp/x", broken())
    assert await files.read_text("/tmp/x") == "old"
    with pytest.raises(FileNotFoundError):
        await files.upload("/no/such/local/file", "/tmp/x")
    assert await files.read_text("/tmp/x") == "old"


async def test_large_files_in_flat_memory(fake: FakeCloche, tmp_path: Path) -> None:
    files = (await AsyncSandbox.create()).files
    local = tmp_path / "zeros"
    tracemalloc.start()
    try:
        assert await files.download(f"/zeros/{BIG}", local) == BIG
        assert local.stat().st_size == BIG
        assert (await files.upload(local, "/sink/path")).bytes == BIG
        with local.open("rb") as file:
            assert (await files.write("/sink/file", file)).bytes == BIG
        assert (await files.write("/sink/list", (b"\0" * 65536 for _ in range(BIG // 65536)))).bytes == BIG
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    digest = hashlib.sha256(b"\0" * BIG).hexdigest()
    assert set(fake.files.received.values()) == {(digest, BIG)}
    assert peak < FLAT


async def test_download_to_an_open_file_and_piece_by_piece(fake: FakeCloche) -> None:
    files = (await AsyncSandbox.create()).files
    await files.write("/tmp/x", b"abc" * 1000)
    target = io.BytesIO()
    assert await files.download("/tmp/x", target) == 3000
    assert target.getvalue() == b"abc" * 1000
    pieces = [piece async for piece in files.iter_bytes("/tmp/x", chunk_size=1024)]
    assert [len(piece) for piece in pieces] == [1024, 1024, 952]
