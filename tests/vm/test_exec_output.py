"""Output of blocking commands: complete, exact, bounded."""

from __future__ import annotations

import pytest

from kit import procs
from kit.client import ApiError, Box
from kit.server import Server
from kit.until import Watch, until

MIB = 1 << 20
LIMIT = 10 * MIB
#: "At once", on a machine that emulates guests and does other things besides.
SOON = 20.0


class TestBackgroundChildren:
    """A child that keeps stdout open holds up nothing and costs no bytes."""

    def test_it_does_not_hold_the_call_nor_the_next_one(self, shared: Box) -> None:
        watch = Watch()
        first = shared.exec("echo first; (sleep 61.5; echo late) &")
        second = shared.exec("echo second")
        assert (first.code, first.stdout) == (0, "first\n")
        assert (second.code, second.stdout) == (0, "second\n")
        assert watch.seconds < SOON
        assert shared.exec("pgrep -f '^sleep 61.5'").code == 0, "the child must live on"

    def test_trailing_bytes_are_complete(self, shared: Box) -> None:
        watch = Watch()
        result = shared.exec("head -c 3000000 /dev/zero | tr '\\0' y; sleep 62.5 &")
        assert result.code == 0
        assert result.stdout == "y" * 3_000_000
        assert watch.seconds < 2 * SOON
        assert shared.exec("pgrep -f '^sleep 62.5'").code == 0

    def test_a_chatty_child_neither_blocks_nor_dies(self, shared: Box) -> None:
        """It goes on writing to the pipe of a call that has ended; nobody reads there, yet it must get on."""
        program = "import os\nfor _ in range(400): os.write(1, b'x' * 4000)\nopen('/tmp/chatty', 'w').write('all')"
        shared.sh(f'rm -f /tmp/chatty; (sleep 1; exec python3 -c "{program}") & exit 0')
        until(lambda: shared.exec("cat /tmp/chatty 2>/dev/null").stdout == "all", 60, every=0.5)

    @pytest.mark.parametrize("close", ["exec >&- 2>&-", "exec >/dev/null 2>&1"])
    def test_a_command_that_closes_its_output_is_waited_for(self, shared: Box, close: str) -> None:
        result = shared.exec(f"echo before; {close}; sleep 1.5; exit 4")
        assert (result.code, result.stdout) == (4, "before\n")
        assert result.body["duration_ms"] >= 1400


class TestVolume:
    """Nothing is lost below the limit; above it head and tail stay, and the loss is stated."""

    def test_10_mib_on_stderr_without_newline(self, shared: Box) -> None:
        result = shared.exec("head -c 10485760 /dev/zero | tr '\\0' x >&2; exit 3")
        assert result.code == 3
        assert result.stdout == ""
        assert result.stderr == "x" * LIMIT
        assert result.body["truncated"] is False

    def test_10_mib_on_both_streams_at_once(self, shared: Box) -> None:
        result = shared.exec(
            "head -c 10485760 /dev/zero | tr '\\0' e >&2 & head -c 10485760 /dev/zero | tr '\\0' o; wait; exit 4"
        )
        assert result.code == 4
        assert result.stdout == "o" * LIMIT
        assert result.stderr == "e" * LIMIT

    def test_one_byte_too_many_is_truncated_and_said(self, shared: Box) -> None:
        result = shared.exec("printf HEAD; head -c 10485753 /dev/zero | tr '\\0' x; printf TAIL")
        body = result.body
        assert body["truncated"] is True
        assert body["stdout_dropped_bytes"] >= 1
        assert body["stderr_dropped_bytes"] == 0
        head, seam, tail = result.stdout.partition(
            f"\n[cloche: truncated, {body['stdout_dropped_bytes']} bytes dropped]\n"
        )
        assert seam, "the seam must name the loss"
        assert head.startswith("HEADx")
        assert tail.endswith("xTAIL")
        assert len(head) + len(tail) + body["stdout_dropped_bytes"] == LIMIT + 1
        assert len(head) + len(tail) >= LIMIT - 65536, "nearly all of what may be kept is kept"

    def test_head_and_tail_are_exact(self, shared: Box) -> None:
        """Numbered lines: what is kept must be a true prefix and a true suffix."""
        full = "".join(f"{n}\n" for n in range(1, 60001))
        result = shared.exec("seq 60000", max_output_bytes=8192)
        dropped = result.body["stdout_dropped_bytes"]
        head, _, tail = result.stdout.partition(f"\n[cloche: truncated, {dropped} bytes dropped]\n")
        assert full.startswith(head)
        assert full.endswith(tail)
        assert len(head) >= 4000
        assert len(tail) >= 4000
        assert len(head) + len(tail) + dropped == len(full)

    def test_base64_tells_the_seam(self, shared: Box) -> None:
        full = "".join(f"{n}\n" for n in range(1, 60001)).encode()
        result = shared.exec("seq 60000 >&2", max_output_bytes=8192, encoding="base64")
        raw, seam = result.raw_stderr, int(result.body["stderr_head_bytes"])
        assert full.startswith(raw[:seam])
        assert full.endswith(raw[seam:])
        assert len(raw) + result.body["stderr_dropped_bytes"] == len(full)
        assert len(raw) <= 8192

    @pytest.mark.slow
    def test_a_flood_leaves_the_server_flat(self, shared: Box, server: Server) -> None:
        """The 1 GiB of the report is 128 MiB here: the middle is dropped in the guest, so more proves nothing more."""
        shared.exec("true")
        before = procs.rss_mib(server.pid)
        procs.reset_peak(server.pid)
        program = "import os\nfor _ in range(2048): os.write(1, b'x' * 65536)\nraise SystemExit(9)"
        result = shared.exec(["python3", "-c", program])
        assert result.code == 9
        assert result.body["stdout_dropped_bytes"] == 118 * MIB
        assert result.stdout.replace("x", "") == f"\n[cloche: truncated, {118 * MIB} bytes dropped]\n".replace("x", "")
        # The answer itself is 10 MiB, as bytes, as text and as JSON.
        assert procs.peak_rss_mib(server.pid) - before < 80

    def test_kill_on_output_limit(self, shared: Box) -> None:
        watch = Watch()
        result = shared.exec("yes 0123456789; echo never", max_output_bytes=100_000, on_output_limit="kill")
        assert result.reason == "output_limit"
        assert result.code == 137
        assert watch.seconds < SOON
        assert result.stdout.startswith("0123456789\n0123456789\n")
        assert "never" not in result.stdout
        assert shared.exec("pgrep -x yes").code == 1, "the whole tree is killed"

    def test_a_limit_that_is_just_met_kills_nothing(self, shared: Box) -> None:
        result = shared.exec("head -c 4096 /dev/zero | tr '\\0' x", max_output_bytes=4096, on_output_limit="kill")
        assert (result.reason, result.code, result.stdout) == ("exited", 0, "x" * 4096)

    @pytest.mark.parametrize("limit", [0, 1023, LIMIT + 1, -5])
    def test_a_silly_limit_is_refused(self, shared: Box, limit: int) -> None:
        error = shared.refused("true", max_output_bytes=limit)
        assert (error.status, error.code) == (400, "request.invalid")


class TestCharacters:
    """A character that is cut between reads arrives whole."""

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    def test_300000_bytes_of_three_byte_characters(self, shared: Box, stream: str) -> None:
        result = shared.exec(["python3", "-c", f"import sys; sys.{stream}.write('☕' * 100_000)"])
        assert getattr(result, stream) == "☕" * 100_000

    def test_bytes_that_were_never_text(self, shared: Box) -> None:
        text = shared.exec(["printf", "\\377\\376ok"])
        assert (text.code, text.stdout) == (0, "\ufffd\ufffdok")
        raw = shared.exec(["printf", "\\377\\376ok"], encoding="base64")
        assert raw.raw_stdout == b"\xff\xfeok"

    def test_every_byte_value_survives_base64(self, shared: Box) -> None:
        program = "import os; os.write(1, bytes(range(256)) * 300); os.write(2, bytes(range(255, -1, -1)))"
        result = shared.exec(["python3", "-c", program], encoding="base64")
        assert result.raw_stdout == bytes(range(256)) * 300
        assert result.raw_stderr == bytes(range(255, -1, -1))

    def test_separators_controls_and_nul_survive(self, shared: Box) -> None:
        text = "a\u2028b\u2029c\x85d\x0be\x1bf\x00g\r\nh\ufeffi\u202e\U0001f9d1\u200d\U0001f680"
        result = shared.exec(["python3", "-c", f"import sys; sys.stdout.buffer.write({text.encode()!r})"])
        assert result.stdout == text

    @pytest.mark.parametrize("limit", [1024, 1025, 1026, 1027])
    def test_truncation_never_cuts_a_character(self, shared: Box, limit: int) -> None:
        result = shared.exec(["python3", "-c", "print('é☕😀' * 2000, end='')"], max_output_bytes=limit)
        dropped = result.body["stdout_dropped_bytes"]
        head, _, tail = result.stdout.partition(f"\n[cloche: truncated, {dropped} bytes dropped]\n")
        assert "\ufffd" not in result.stdout
        assert ("é☕😀" * 2000).startswith(head)
        assert ("é☕😀" * 2000).endswith(tail)
        assert len(head.encode()) + len(tail.encode()) + dropped == 9 * 2000


class TestTimeout:
    def test_the_partial_output_is_in_the_details(self, shared: Box) -> None:
        with pytest.raises(ApiError) as caught:
            shared.exec("echo out; echo err >&2; sleep 60", timeout_seconds=2)
        error = caught.value
        assert (error.status, error.code) == (504, "exec.timeout")
        assert error.body["timeout_seconds"] == 2
        assert error.details["stdout"] == "out\n"
        assert error.details["stderr"] == "err\n"
        assert error.details["termination"]["reason"] == "timeout"
        assert error.details["exit_code"] == 137
        assert 1800 <= error.details["duration_ms"] < 15_000

    def test_a_fraction_of_a_second(self, shared: Box) -> None:
        with pytest.raises(ApiError) as caught:
            shared.exec("sleep 60", timeout_seconds=0.25)
        assert caught.value.body["timeout_seconds"] == 0.25

    def test_large_partial_output_is_truncated_like_any_other(self, shared: Box) -> None:
        with pytest.raises(ApiError) as caught:
            shared.exec("yes", timeout_seconds=3, max_output_bytes=4096)
        details = caught.value.details
        assert details["truncated"] is True
        assert details["stdout"].startswith("y\ny\n")
        assert "[cloche: truncated, " in details["stdout"]

    def test_zero_means_the_servers_default(self, shared: Box) -> None:
        assert shared.exec("sleep 1; echo ok", timeout_seconds=0).stdout == "ok\n"

    @pytest.mark.parametrize("seconds", [-1, 1e9, "5", True])
    def test_a_silly_timeout_is_refused(self, shared: Box, seconds: object) -> None:
        assert shared.refused("true", timeout_seconds=seconds).code == "request.invalid"
