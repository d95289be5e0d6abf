"""Snapshots as templates and as archives."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from cloche_fake import FakeCloche, faults

from cloche import (
    AsyncClient,
    AsyncSandbox,
    AsyncSnapshot,
    ConflictError,
    ConnectionLost,
    InvalidRequestError,
    SnapshotIncompatible,
    TemplateNotFound,
)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_promote(fake: FakeCloche) -> None:
    snapshot = await (await AsyncSandbox.create()).snapshot()
    made = await snapshot.promote("mine", aliases=["m"], description="what it is")
    assert fake.bodies[-1] == {"name": "mine", "aliases": ["m"], "description": "what it is"}
    assert (made.name, made.aliases, made.is_global, made.from_snapshot) == ("mine", ("m",), False, snapshot.id)
    async with AsyncClient() as client:
        assert [(one.name, one.is_global) for one in await client.templates()] == [("base", True), ("mine", False)]
        await client.delete_template("mine")
        with pytest.raises(TemplateNotFound):
            await client.delete_template("mine")
    fake.on("POST", "/promote", faults.error(409, "template.name_taken", "the name is taken"))
    with pytest.raises(ConflictError):
        await snapshot.promote("base")


async def test_export_to_a_path_and_to_a_file(fake: FakeCloche, tmp_path: Path) -> None:
    snapshot = await (await AsyncSandbox.create()).snapshot()
    target = tmp_path / "a.tar.zst"
    target.write_bytes(b"old")
    size = await snapshot.export(target)
    assert size == target.stat().st_size == 3 * 40001
    assert target.read_bytes().endswith(b"archive 1")
    with io.BytesIO() as file:
        assert await snapshot.export(file, template=False) == size
        assert file.getvalue().endswith(b"archive 0")
    assert names(tmp_path) == ["a.tar.zst"]


async def test_an_export_that_is_cut_leaves_the_file_as_it_was(fake: FakeCloche, tmp_path: Path) -> None:
    snapshot = await (await AsyncSandbox.create()).snapshot()
    target = tmp_path / "a.tar.zst"
    target.write_bytes(b"old")
    fake.on("GET", "/export", faults.pieces([b"some of it"], "application/zstd", cut=True))
    with pytest.raises(ConnectionLost):
        await snapshot.export(target)
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["a.tar.zst"]


async def test_import_of_a_path_and_of_a_file(fake: FakeCloche, tmp_path: Path) -> None:
    first = await (await AsyncSandbox.create()).snapshot()
    source = tmp_path / "a.tar.zst"
    content = bytes(range(256)) * 3000
    source.write_bytes(content)
    async with AsyncClient() as client:
        made = await client.import_snapshot(source)
        assert isinstance(made, AsyncSnapshot)
        assert (made.id != first.id, made.name) == (True, "as it was")
        assert (await client.import_snapshot(str(source), name="new")).name == "new"
        with source.open("rb") as file:
            await client.import_snapshot(file)
        assert fake.lineage.imported == [content] * 3
        with pytest.raises(FileNotFoundError):
            await client.import_snapshot(tmp_path / "none")
        for code, status, kind in (
            ("snapshot.incompatible", 409, SnapshotIncompatible),
            ("request.invalid", 400, InvalidRequestError),
        ):
            fake.on("POST", "/import", faults.error(status, code))
            with pytest.raises(kind):
                await client.import_snapshot(source)
