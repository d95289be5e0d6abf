"""Trees of files against the real agent in its developer mode: searches, archives, watches, states."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche_server.core.errors import ClocheError
from cloche_server.core.trees import Found, Match, ReadWish, SearchEnd, WatchEvent
from cloche_server.guest.client import GuestClient


@pytest.fixture
def client(agent_client: GuestClient) -> GuestClient:
    return agent_client


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "src/deep").mkdir(parents=True)
    (root / "src/a.py").write_text("one\nneedle here\nthree\n")
    (root / "src/deep/b.txt").write_text("a needle\n")
    (root / "link").symlink_to("src/a.py")
    Path(os.fsdecode(bytes(root) + b"/bad\xff")).write_text("needle")
    return root


async def chunks(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def code(error: pytest.ExceptionInfo[ClocheError]) -> str:
    return error.value.code


async def test_searches(client: GuestClient, tree: Path) -> None:
    found = [item async for item in client.grep(str(tree), {"pattern": "needle", "context": 1}, user=None)]
    lines = [item for item in found if isinstance(item, Match)]
    assert [item.raw_path for item in lines] == [
        bytes(tree) + b"/bad\xff",
        bytes(tree) + b"/src/a.py",
        bytes(tree) + b"/src/deep/b.txt",
    ]
    assert (lines[1].line, lines[1].column, lines[1].before, lines[1].after) == (2, 1, ["one"], ["three"])
    assert found[-1] == SearchEnd(False, 3, 0, 0)
    names = [item async for item in client.glob(str(tree), {"pattern": "**/*.py"}, user=None)]
    assert [item.entry.path for item in names if isinstance(item, Found)] == [f"{tree}/src/a.py"]
    with pytest.raises(ClocheError) as caught:
        [item async for item in client.grep(str(tree), {"pattern": "("}, user=None)]
    assert code(caught) == "request.invalid"
    done = await client.replace(
        {"paths": [f"{tree}/src/a.py", f"{tree}/no"], "pattern": "(t)hree", "replacement": "${1}wo"}, user=None
    )
    assert [(one.count, one.error) for one in done] == [(1, None), (0, "not_found")]
    assert (tree / "src/a.py").read_text() == "one\nneedle here\ntwo\n"


async def test_states_and_parts(client: GuestClient, tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    first = await client.write_file(path, b"0123456789", if_absent=True)
    body = await client.read_file(path, wish=ReadWish(first=2, count=3))
    assert (body.head.part, body.head.tag, await body.read(99)) == ((2, 3, 10), first.tag, b"234")
    assert first.tag is not None
    body = await client.read_file(path, wish=ReadWish(unless=(first.tag,)))
    assert (body.head.unchanged, await body.read(99)) == (True, b"")
    body = await client.read_file(path, wish=ReadWish(last=4, if_range="0-0-0-0-0"))
    assert (body.head.part, await body.read(99)) == (None, b"0123456789")
    body = await client.read_file(path, wish=ReadWish(head=True))
    assert body.size == 10
    await body.aclose()
    with pytest.raises(ClocheError) as caught:
        await client.read_file(path, wish=ReadWish(first=10))
    assert code(caught) == "file.range_not_satisfiable"
    assert caught.value.details["done"] == {"size": 10}
    answers = await asyncio.gather(
        *(client.write_file(path, b"%d" % n, if_match=[first.tag]) for n in range(8)), return_exceptions=True
    )
    refused = [one for one in answers if isinstance(one, ClocheError)]
    assert len(refused) == 7
    assert {one.code for one in refused} == {"file.changed"}


async def test_archives(client: GuestClient, tree: Path, tmp_path: Path) -> None:
    for fmt in ("tar", "tar.gz", "zip"):
        body = await client.pack(str(tree), fmt, skip_unreadable=False, include=(), exclude=(), user=None)
        assert body.entries == 6
        data = b"".join([chunk async for chunk in body])
        to = tmp_path / f"to-{fmt}"
        done = await client.extract(str(to), fmt, chunks(data), options={"max_bytes": None}, user=None)
        assert (done.files, done.links, done.skipped) == (3, 1, 0)
        assert (to / "src/deep/b.txt").read_text() == "a needle\n"
        assert os.fsencode(next(p for p in to.iterdir() if p.name.startswith("bad"))).endswith(b"bad\xff")
    with pytest.raises(ClocheError) as caught:
        await client.extract(str(tmp_path), "tar", chunks(b"junk" * 300), options={}, user=None)
    assert code(caught) == "file.bad_archive"


async def test_an_archive_that_leads_out_is_refused_and_says_how_far_it_came(
    client: GuestClient, tmp_path: Path
) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("good", "../bad"):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(ClocheError) as caught:
        await client.extract(str(tmp_path / "in"), "tar", chunks(made.getvalue()), options={}, user=None)
    assert code(caught) == "file.unsafe_archive"
    assert caught.value.details["done"]["files"] == 1
    assert not (tmp_path / "bad").exists()


async def test_a_watch(client: GuestClient, tmp_path: Path) -> None:
    events = client.watch(str(tmp_path), recursive=True, user=None)
    assert (await anext(events)).kind == "ready"
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/f").write_text("x")
    seen: list[WatchEvent] = []
    async with asyncio.timeout(10):
        async for event in events:
            seen.append(event)
            if event.kind == "created" and event.path == bytes(tmp_path / "d/e/f"):
                break
    assert [(e.path, e.is_dir) for e in seen][:2] == [(bytes(tmp_path / "d"), True), (bytes(tmp_path / "d/e"), True)]
    await events.aclose()
    with pytest.raises(ClocheError) as caught:
        await anext(client.watch(str(tmp_path / "no"), recursive=True, user=None))
    assert code(caught) == "file.not_found"


async def test_copies_links_attributes_and_use(client: GuestClient, tree: Path) -> None:
    entry = await client.copy(str(tree), f"{tree}2", overwrite=False, recursive=True, user=None)
    assert (entry.type, (tree.parent / "tree2/link").is_symlink()) == ("dir", True)
    with pytest.raises(ClocheError) as caught:
        await client.copy(str(tree), f"{tree}/src/x", overwrite=False, recursive=True, user=None)
    assert code(caught) == "request.invalid"
    await client.link(f"{tree}/l", b"../\xff", hard=False, overwrite=False, user=None)
    assert await client.readlink(f"{tree}/l", user=None) == b"../\xff"
    with pytest.raises(ClocheError) as caught:
        await client.readlink(str(tree), user=None)
    assert code(caught) == "file.not_a_link"
    count, entry = await client.set_attributes(
        f"{tree}/src", mode=0o700, owner="0", group=None, mtime_ns=10**9, recursive=True, user=None
    )
    assert (count, entry.mode, entry.mtime_ns) == (4, 0o700, 10**9)
    use = await client.tree_use(str(tree), depth=1, user=None)
    assert [part.path for part in use.parts] == [f"{tree}/src"]
    assert use.whole.entries == 8
    assert (await client.disk_use("/", user=None)).bytes > 0
    assert (await client.touch(f"{tree}/new", mtime_ns=None, user=None)).size == 0
