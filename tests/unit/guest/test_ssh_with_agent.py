"""SSH with OpenSSH's own clients, over the real agent in its developer mode."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ssh_site import SB, SshSite, ssh_site

from cloche_server.core.errors import ClocheError
from cloche_server.guest.client import GuestClient

pytestmark = pytest.mark.thorough


@pytest.fixture
async def site(agent_client: GuestClient, tmp_path: Path) -> AsyncIterator[SshSite]:
    async with ssh_site(agent_client, tmp_path) as made:
        yield made


async def test_a_command_its_streams_and_its_end(site: SshSite) -> None:
    done = await site.ssh("echo out; echo err >&2; exit 7")
    assert (done.code, done.out, done.err) == (7, b"out\n", "err\n")
    assert (await site.ssh("echo by name", user="box")).out == b"by name\n"
    assert (await site.ssh("true", user="nobody")).code == 255


async def test_input_is_whole_and_ends(site: SshSite) -> None:
    data = bytes(range(256)) * 40_000
    done = await site.ssh("sha256sum; echo end", given=data)
    assert done.out.decode().split()[0] == hashlib.sha256(data).hexdigest()
    assert done.out.endswith(b"end\n")
    done = await site.ssh("cat", given=data)
    assert done.out == data


async def test_a_program_that_reads_no_more(site: SshSite) -> None:
    done = await site.ssh("head -c 3", given=b"abcdef" * 500_000)
    assert (done.code, done.out) == (0, b"abc")


async def test_a_terminal(site: SshSite) -> None:
    done = await site.ssh("tty; echo $TERM; exit 3", flags=["-tt"])
    assert done.code == 3
    assert b"/dev/pts/" in done.out
    done = await site.ssh(flags=["-tt"], given=b"echo shell-$((40+2)); exit 4\n")
    assert done.code == 4
    assert b"shell-42" in done.out


async def test_a_shell_that_reads_a_pipe(site: SshSite) -> None:
    done = await site.ssh(given=b"echo $((6*7))\nexit 5\n")
    assert (done.code, done.out) == (5, b"42\n")


async def test_sizes_signals_and_variables(site: SshSite) -> None:
    async with await site.connect() as client:
        process = await client.create_process(
            "stty size; read x; stty size; sleep 100",
            term_type="vt220", term_size=(100, 30), encoding=None, env={"LC_X": "y", "LD_PRELOAD": "/evil"},
        )  # fmt: skip
        assert await process.stdout.readline() == b"30 100\r\n"
        process.change_terminal_size(90, 20)
        await asyncio.sleep(0)
        process.stdin.write(b"\n")
        shown = b""
        while b"20 90" not in shown:
            piece = await process.stdout.read(1000)
            assert piece
            shown += piece
        process.send_signal("HUP")
        done = await process.wait()
        assert done.exit_signal is not None
        assert done.exit_signal[0] == "HUP"
        told = await client.run('echo "$LC_X $LD_PRELOAD"', env={"LC_X": "y", "LD_PRELOAD": "/evil"})
        assert told.stdout == "y \n"


async def test_a_refusal_is_a_sentence(site: SshSite) -> None:
    site.access.refusal = ClocheError("sandbox.invalid_state", "sandbox x is paused and cannot take calls now")
    done = await site.ssh("true")
    assert done.code == 255
    assert "is paused" in done.err


async def test_a_client_that_goes_is_a_hang_up(site: SshSite, tmp_path: Path) -> None:
    mark, survivor = tmp_path / "mark", tmp_path / "survivor"
    script = (
        f"trap 'echo hup > {mark}; exit' HUP; (trap '' HUP; sleep 1; echo on > {survivor}) & echo up; sleep 60 & wait"
    )
    client = await site.connect()
    process = await client.create_process(script, encoding=None)
    assert await process.stdout.readline() == b"up\n"
    assert site.access.busy_now == 1
    client.abort()
    async with asyncio.timeout(10):
        while not (survivor.exists() and survivor.read_text()):
            await asyncio.sleep(0.05)
    assert mark.read_text() == "hup\n"
    assert site.access.busy_now == 0


async def test_whoever_does_not_read_stops_the_command_and_nothing_grows(site: SshSite) -> None:
    client = await site.connect()
    await client.create_process("yes", encoding=None, window=64 * 1024)
    traffic, before = site.access.entries[SB].traffic, -1
    async with asyncio.timeout(30):
        while not 0 < traffic.bytes_out == before:
            before = traffic.bytes_out
            await asyncio.sleep(0.5)
    assert traffic.bytes_out < 8 * 1024 * 1024
    client.abort()
