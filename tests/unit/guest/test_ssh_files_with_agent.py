"""Files over SSH with the clients that people have: sftp, scp by both protocols, rsync; and odd names and offsets."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import asyncssh
import pytest
from ssh_site import SB, SshSite, run, ssh_site

from cloche_server.guest.client import GuestClient

pytestmark = pytest.mark.thorough

CONTENT = bytes(range(256)) * 9000 + b"end"


@pytest.fixture
async def site(agent_client: GuestClient, tmp_path: Path) -> AsyncIterator[SshSite]:
    async with ssh_site(agent_client, tmp_path) as made:
        yield made


def tree(root: Path) -> Path:
    """What is copied: depth, an empty file and directory, a mode, an odd name, a time."""
    (root / "deep" / "er").mkdir(parents=True)
    (root / "empty dir").mkdir()
    (root / "deep" / "er" / "big").write_bytes(CONTENT)
    (root / "none").touch()
    (root / "tool's name").write_text("#!/bin/sh\n")
    (root / "tool's name").chmod(0o750)
    os.utime(root / "none", (1_000_000_000, 1_100_000_000))
    return root


def told(root: Path) -> dict[str, tuple[object, ...]]:
    return {
        str(one.relative_to(root)): (
            stat.filemode(one.stat().st_mode),
            one.read_bytes() if one.is_file() else None,
            int(one.stat().st_mtime) if one.is_file() else None,
        )
        for one in sorted(root.rglob("*"))
    }


@pytest.mark.parametrize("mode", ["-O", "-s"])
async def test_scp_takes_trees_both_ways(site: SshSite, tmp_path: Path, mode: str) -> None:
    source, there, back = tree(tmp_path / "source"), tmp_path / "there", tmp_path / "back"
    scp = ["scp", mode, "-rpq", *site.options(), "-P", str(site.port)]
    done = await run([*scp, source, f"{SB}@127.0.0.1:{there}"])
    assert done.code == 0, done.err
    assert told(there) == told(source)
    done = await run([*scp, f"{SB}@127.0.0.1:{there}", back])
    assert done.code == 0, done.err
    assert told(back) == told(source)


@pytest.mark.parametrize("mode", ["-O", "-s"])
async def test_scp_says_what_is_wrong(site: SshSite, tmp_path: Path, mode: str) -> None:
    scp = ["scp", mode, *site.options(), "-P", str(site.port)]
    done = await run([*scp, f"{SB}@127.0.0.1:/nope/x", tmp_path / "x"])
    assert done.code == 1
    assert "o such file" in done.err
    (tmp_path / "y").write_text("y")
    done = await run([*scp, tmp_path / "y", f"{SB}@127.0.0.1:/nope/x/"])
    assert done.code == 1
    assert not (tmp_path / "x").exists()


async def test_the_shell_of_the_sandbox_reads_paths_of_the_old_scp(site: SshSite, tmp_path: Path) -> None:
    (tmp_path / "a1.txt").write_text("1")
    (tmp_path / "a2.txt").write_text("2")
    (tmp_path / "into").mkdir()
    scp = ["scp", "-O", *site.options(), "-P", str(site.port)]
    done = await run([*scp, f"{SB}@127.0.0.1:{tmp_path}/a?.txt", tmp_path / "into"])
    assert done.code == 0, done.err
    assert sorted(one.name for one in (tmp_path / "into").iterdir()) == ["a1.txt", "a2.txt"]


@pytest.mark.skipif(shutil.which("rsync") is None, reason="there is no rsync")
async def test_rsync(site: SshSite, tmp_path: Path) -> None:
    source, there = tree(tmp_path / "source"), tmp_path / "there"
    shell = " ".join(["ssh", *site.options(), "-p", str(site.port)])
    rsync = ["rsync", "-a", "--delete", "-e", shell, f"--rsync-path={shutil.which('rsync')}"]
    assert (await run([*rsync, f"{source}/", f"{SB}@127.0.0.1:{there}/"])).code == 0
    assert told(there) == told(source)
    (source / "none").unlink()
    (there / "deep" / "er" / "big").write_bytes(b"changed")
    assert (await run([*rsync, f"{source}/", f"{SB}@127.0.0.1:{there}/"])).code == 0
    assert told(there) == told(source)


async def test_a_batch_of_sftp(site: SshSite, tmp_path: Path) -> None:
    (tmp_path / "up").write_bytes(CONTENT)
    batch = f"mkdir {tmp_path}/d\nput {tmp_path}/up {tmp_path}/d/one\nrename {tmp_path}/d/one {tmp_path}/d/two\n"
    batch += f"ln -s two {tmp_path}/d/link\nchmod 600 {tmp_path}/d/two\nget {tmp_path}/d/link {tmp_path}/down\n"
    batch += f"ls -l {tmp_path}/d\ndf {tmp_path}\nrm {tmp_path}/d/link\nquit\n"
    command = ["sftp", *site.options(), "-P", str(site.port), "-b", "-", f"{SB}@127.0.0.1"]
    done = await run(command, batch.encode())
    assert done.code == 0, done.err
    assert (tmp_path / "down").read_bytes() == CONTENT
    assert stat.S_IMODE((tmp_path / "d" / "two").stat().st_mode) == 0o600
    assert not (tmp_path / "d" / "link").is_symlink()
    assert b"-rw-" in done.out


async def test_offsets_names_links_and_attributes(site: SshSite, tmp_path: Path) -> None:
    root = os.fsencode(tmp_path)
    async with await site.connect() as client, client.start_sftp_client(path_encoding=None) as sftp:
        odd = root + b"/\xff\xfe odd"
        async with sftp.open(odd, "wb") as file:
            await file.write(b"tail", 1_000_000)
            await file.write(b"head", 0)
            await file.write(b"TA", 1_000_000)
        data = Path(os.fsdecode(odd)).read_bytes()
        assert (len(data), data[:4], data[-4:]) == (1_000_004, b"head", b"TAil")
        async with sftp.open(odd, "rb") as file:
            assert await file.read(4, 1_000_000) == b"TAil"
            assert await file.read(4, 2_000_000) == b""
        names = {one.filename for one in await sftp.readdir(root)}
        assert b"\xff\xfe odd" in names
        await sftp.symlink(b"\xff\xfe odd", root + b"/link")
        assert await sftp.readlink(root + b"/link") == b"\xff\xfe odd"
        (tmp_path / "taken").write_text("kept")
        with pytest.raises(asyncssh.SFTPFailure):
            await sftp.rename(odd, root + b"/taken")
        assert (tmp_path / "taken").read_text() == "kept"
        await sftp.posix_rename(odd, root + b"/taken")
        assert (tmp_path / "taken").read_bytes() == data
        await sftp.setstat(root + b"/taken", asyncssh.SFTPAttrs(permissions=0o640, atime=5, mtime=7, size=3))
        found = (tmp_path / "taken").stat()
        assert (stat.S_IMODE(found.st_mode), found.st_mtime, found.st_size) == (0o640, 7, 3)
        async with sftp.open(root + b"/taken", "ab") as file:
            await file.write(b"more")
        assert (tmp_path / "taken").read_bytes() == b"heamore"
        for path in (b"/nope", root + b"/taken/x"):
            with pytest.raises(asyncssh.SFTPNoSuchFile):
                await sftp.stat(path)


async def test_a_client_of_sftp_that_speaks_nonsense(site: SshSite) -> None:
    async with await site.connect() as client:
        for junk in (b"\xff" * 64, b"\x00\x00\x00\x00", b"\x00\x00\x00\x05\x03\x00\x00\x00\x01"):
            stdin, stdout, _ = await client.open_session(subsystem="sftp", encoding=None)
            stdin.write(junk)
            stdin.write_eof()
            answer = await stdout.read()
            assert len(answer) < 100
        async with client.start_sftp_client() as sftp:
            assert await sftp.realpath("/tmp/..") == "/"
