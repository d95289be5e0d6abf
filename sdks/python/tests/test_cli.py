"""The command `cloche`: arguments and exit codes."""

from __future__ import annotations

import asyncio
import shlex

import pytest
from cloche_fake import FakeCloche, faults

from cloche import cli


def run(*words: str) -> int:
    try:
        return cli.main(words)
    except SystemExit as error:
        return int(error.code or 0)


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "127 there is no such sandbox" in capsys.readouterr().out
    for words in (
        (),
        ("tunnel",),
        ("tunnel", "x", "0"),
        ("tunnel", "x", "70000"),
        ("tunnel", "x", "1", "--local", "y"),
    ):
        assert run(*words) == 2
    capsys.readouterr()


def test_failures_of_the_platform(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CLOCHE_API_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("CLOCHE_API_KEY", "pds_" + "0" * 32)
    assert run("tunnel", "abcdefgh12", "80") == cli.UNREACHABLE
    monkeypatch.delenv("CLOCHE_API_KEY")
    assert run("tunnel", "abcdefgh12", "80") == cli.FAILED
    assert "CLOCHE_API_KEY" in capsys.readouterr().err


async def test_a_sandbox_that_is_not_there(fake: FakeCloche) -> None:
    assert await asyncio.to_thread(run, "tunnel", "abcdefgh12", "80") == cli.NOT_FOUND


async def test_ssh_is_called_with_what_the_server_says(
    fake: FakeCloche, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.on("GET", "/ssh", faults.says(200, {"enabled": False}))
    assert await asyncio.to_thread(run, "ssh", "box") == cli.FAILED
    assert "offers no SSH" in capfd.readouterr().err
    told = {"enabled": True, "port": 2222, "host_key": "ssh-ed25519 AAAA", "fingerprint": "SHA256:x"}
    fake.on("GET", "/ssh", faults.says(200, told))
    assert await asyncio.to_thread(run, "ssh", "--print", "box", "uname", "-a") == 0
    shown = shlex.split(capfd.readouterr().out)
    assert shown[:3] == ["ssh", "-p", "2222"]
    assert shown[-4:] == ["--", "box@127.0.0.1", "uname", "-a"]
    assert "KnownHostsCommand=/bin/echo [127.0.0.1]:2222 ssh-ed25519 AAAA" in shown
