"""Streamed commands: exact bytes, heartbeats, slow and lost clients."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from kit import procs, sse
from kit.client import TIMEOUT, Api, Box
from kit.server import Server
from kit.until import Watch, until
from kit.wire import nginx, wire

#: Heartbeats come every 10 s by design and are promised within 15; a busy machine may add some.
HEARTBEAT = 15.0
SLACK = 5.0


def other(api: Api, url: str) -> Api:
    """The same API by another road."""
    return Api(url, api.token, api.made)


class TestShape:
    def test_events_end_with_exactly_one_exit(self, shared: Box) -> None:
        outcome = shared.stream_all("echo out; echo err >&2; exit 3")
        assert (outcome.stdout, outcome.stderr, outcome.exit_code) == (b"out\n", b"err\n", 3)
        assert outcome.end.data["termination"] == {"reason": "exited"}
        assert outcome.end.data["duration_ms"] >= 0
        offsets = [int(e.id) for e in outcome.events if e.is_output and e.id is not None]
        assert offsets == sorted(offsets)
        assert offsets[-1] == 8

    def test_no_output_at_all(self, shared: Box) -> None:
        outcome = shared.stream_all("exit 0")
        assert [e.name for e in outcome.events] == ["exit"]

    def test_output_comes_while_the_command_runs(self, shared: Box) -> None:
        with shared.stream("echo now; sleep 3; echo later") as events:
            first = next(events)
            assert first.raw == b"now\n"
            rest = sse.Outcome(list(events))
        assert rest.stdout == b"later\n"
        assert rest.end.at - first.at > 2

    def test_a_timeout_is_the_terminal_event(self, shared: Box) -> None:
        outcome = shared.stream_all("echo begun; sleep 60", timeout_seconds=2)
        assert outcome.stdout == b"begun\n"
        assert outcome.end.name == "error"
        assert outcome.end.data["code"] == "exec.timeout"
        assert outcome.end.data["details"]["termination"]["reason"] == "timeout"
        assert outcome.end.data["error"]

    def test_a_signal_is_named(self, shared: Box) -> None:
        end = shared.stream_all("kill -9 $$").end
        assert end.data["exit_code"] == 137
        assert end.data["termination"]["signal"] == "SIGKILL"

    def test_what_cannot_start_is_an_error_answer_or_127(self, shared: Box) -> None:
        assert shared.stream_all(["/no/such/program"]).exit_code == 127
        response = shared.api.request("POST", f"{shared.path}/exec/stream", json={"cmd": "true", "cwd": "/missing"})
        assert (response.status_code, response.json()["code"]) == (400, "exec.invalid_cwd")

    def test_a_background_child_does_not_hold_the_stream(self, shared: Box) -> None:
        watch = Watch()
        outcome = shared.stream_all("echo first; sleep 63.5 &")
        assert (outcome.stdout, outcome.exit_code) == (b"first\n", 0)
        assert watch.seconds < 20


class TestCharacters:
    @pytest.mark.parametrize("stream", [1, 2])
    def test_one_byte_at_a_time(self, shared: Box, stream: int) -> None:
        text = "日本é😀\u2028e\u0301"
        program = f"import os, time\nfor b in {text.encode()!r}:\n os.write({stream}, bytes([b])); time.sleep(0.05)"
        outcome = shared.stream_all(["python3", "-c", program])
        assert (outcome.stdout, outcome.stderr) == ((text.encode(), b"") if stream == 1 else (b"", text.encode()))
        chunks = [e.data["chunk"] for e in outcome.events if e.is_output]
        assert len(chunks) > 1, "it must not be gathered until the end"
        assert not any("\ufffd" in chunk for chunk in chunks)

    def test_both_streams_cut_in_mid_character_at_once(self, shared: Box) -> None:
        program = (
            "import os, time\n"
            "for b in '日本語'.encode():\n os.write(1, bytes([b])); os.write(2, bytes([b])); time.sleep(0.02)"
        )
        outcome = shared.stream_all(["python3", "-c", program])
        assert outcome.stdout == outcome.stderr == "日本語".encode()

    def test_a_cut_at_every_buffer_size(self, shared: Box) -> None:
        outcome = shared.stream_all(["python3", "-c", "import sys; sys.stdout.write('a' + '☕' * 100_000)"])
        assert outcome.stdout == ("a" + "☕" * 100_000).encode()

    def test_a_character_that_never_ends_is_shown_at_the_end(self, shared: Box) -> None:
        outcome = shared.stream_all(["printf", "ok\\342\\230"])
        assert outcome.stdout.decode() == "ok\ufffd"
        assert outcome.exit_code == 0

    def test_base64_is_exact(self, shared: Box) -> None:
        program = "import os, time\nfor i in range(8):\n os.write(1, bytes(range(256)) * 40); time.sleep(0.02)"
        outcome = shared.stream_all(["python3", "-c", program], encoding="base64")
        assert outcome.stdout == bytes(range(256)) * 320

    def test_text_that_looks_like_the_protocol(self, shared: Box) -> None:
        text = "data: x\n\nevent: exit\ndata: {}\n\n\r\n: ping\n\nid: 9\n\x00"
        outcome = shared.stream_all(["printf", "%b", text.replace("\x00", "\\0000")])
        assert outcome.stdout == text.encode()
        assert outcome.exit_code == 0


class TestSlowReaders:
    """A consumer that stops reading stalls nobody else."""

    @pytest.mark.slow
    def test_one_4_mib_write_to_a_slow_client(self, shared: Box) -> None:
        """512 kB/s instead of the 64 kB/s of the report, which would take over a minute."""
        program = (
            "import os, hashlib\nb = os.urandom(1 << 22)\nos.write(2, hashlib.sha256(b).hexdigest().encode())\n"
            "w = os.write(1, b)\nos.write(2, b' %d' % w)"
        )
        body = {"argv": ["python3", "-c", program], "encoding": "base64"}
        parser, events = sse.Parser(), []
        with shared.api.http.stream("POST", f"{shared.path}/exec/stream", json=body) as response:
            for chunk in response.iter_raw(65536):
                events += parser.feed(chunk)
                time.sleep(0.125)
        parser.finish()
        outcome = sse.Outcome(events)
        digest, written = outcome.stderr.decode().split()
        assert int(written) == 1 << 22
        assert hashlib.sha256(outcome.stdout).hexdigest() == digest
        assert outcome.exit_code == 0

    @pytest.mark.slow
    def test_a_reader_that_stops_stalls_nobody(self, shared: Box, server: Server) -> None:
        """An endless stream that nobody reads: memory stays flat, other calls of the same sandbox go on, and
        hanging up ends the command."""
        with shared.stream("exec yes stalled-reader") as events:
            next(events)
            before = procs.rss_mib(server.pid)
            procs.reset_peak(server.pid)
            watch = Watch()
            for number in range(5):
                assert shared.sh(f"echo {number}") == f"{number}\n"
                assert shared.stream_all("echo x").stdout == b"x\n"
                shared.put("/tmp/beside", b"b" * 300_000)
                assert len(shared.get("/tmp/beside")) == 300_000
            assert watch.seconds < 60
            time.sleep(max(0.0, 6 - watch.seconds))
            assert procs.peak_rss_mib(server.pid) - before < 24
            assert shared.exec("pgrep -f stalled-reader").code == 0, "it waits for its reader"
        until(lambda: shared.exec("pgrep -f 'yes stalled-reade[r]'").code == 1, 20)

    def test_two_readers_of_one_command_have_their_own_pace(self, shared: Box) -> None:
        exec_id = shared.start("for i in $(seq 200); do echo line $i; done; sleep 1; exit 5")
        with shared.follow(exec_id) as slow:
            next(slow)
            quick = shared.follow_all(exec_id)
            rest = sse.Outcome(list(slow))
        assert quick.stdout.decode() == "".join(f"line {i}\n" for i in range(1, 201))
        assert quick.exit_code == rest.exit_code == 5
        assert quick.stdout.endswith(rest.stdout)


class TestQuietStreams:
    """Silence is no reason to lose a stream, and a lost stream no reason to lose the command."""

    @pytest.mark.slow
    def test_through_nginx(self, shared: Box, api: Api) -> None:
        """Nginx cuts after 60 s of silence by default and the report is silent for 200 s. Here it cuts after 20 s
        and the command is silent for 45, which takes three heartbeats just the same."""
        with nginx(api.url, idle=20) as url, other(api, url) as proxied:
            box = Box(proxied, shared.info)
            watch = Watch()
            blocking: list[float] = []

            def run() -> None:
                assert box.sh("sleep 32; echo kept", keepalive=True) == "kept\n"
                blocking.append(watch.seconds)

            thread = threading.Thread(target=run)
            thread.start()
            outcome = box.stream_all("echo begin; sleep 45; echo done; exit 7")
            thread.join(60)
        assert (outcome.stdout, outcome.exit_code) == (b"begin\ndone\n", 7)
        seen = [0.0] + [e.at for e in outcome.events]
        seen[0] = outcome.events[0].at
        assert max(b - a for a, b in itertools.pairwise(seen)) < HEARTBEAT + SLACK
        assert len(outcome.comments) >= 3
        assert blocking, "white space must keep a blocking call alive in the same way"

    @pytest.mark.slow
    def test_a_dead_wire_is_noticed_and_nothing_is_lost(self, shared: Box, api: Api) -> None:
        """Packets vanish from one moment on, as with a firewall rule. The promised heartbeats let a client notice
        within its read timeout; a detached command goes on, and what was missed can be had afterwards."""
        lines = "for i in $(seq 40); do echo $i; sleep 0.5; done; exit 6"
        seen: list[sse.Event] = []

        def read(events: Iterator[sse.Event], freeze_at: int) -> None:
            for event in events:
                seen.append(event)
                if len(seen) == freeze_at:
                    road.freeze()

        with wire(api.url) as road, other(api, road.url) as lossy:
            lossy.http.timeout = httpx.Timeout(HEARTBEAT + SLACK)
            box = Box(lossy, shared.info)
            watch = Watch()
            with pytest.raises(httpx.ReadTimeout), box.stream(lines, detach=True, exec_id="dead-wire-1") as events:
                read(events, freeze_at=4)
            assert watch.seconds < 60
        rest = shared.follow_all("dead-wire-1", last_event_id=seen[-1].id)
        numbers = (sse.Outcome(seen).stdout + rest.stdout).decode().split()
        assert numbers == [str(i) for i in range(1, 41)]
        assert rest.exit_code == 6
        assert shared.exec_info("dead-wire-1")["exit_code"] == 6

    def test_a_cut_connection_never_looks_like_success(self, shared: Box, api: Api) -> None:
        with wire(api.url) as road, other(api, road.url) as lossy:
            box = Box(lossy, shared.info)
            with pytest.raises(httpx.TransportError), box.stream("echo one; sleep 30; echo two") as events:
                assert next(events).raw == b"one\n"
                road.close()
                list(events)


class TestHangUp:
    """A client that goes away takes its command with it, unless it is detached."""

    @pytest.mark.parametrize("road", ["stream", "blocking"])
    def test_it_cancels_the_whole_tree(self, shared: Box, road: str) -> None:
        mark = f"70.{len(road)}5"
        command = f"setsid sleep {mark} & sleep {mark}; true"
        if road == "stream":
            with shared.stream(f"echo on; {command}") as events:
                assert next(events).raw == b"on\n"
        else:
            with pytest.raises(httpx.ReadTimeout):
                shared.exec(command, http_timeout=httpx.Timeout(TIMEOUT.connect, read=4))
        until(lambda: shared.exec(f"pgrep -f '^sleep {mark}'").code == 1, 20)
        counted = [name for name in shared.api.metrics() if "http_requests" in name and 'status="500"' in name]
        assert not counted, "a client that goes away is no failure of the server"

    def test_a_detached_stream_goes_on(self, shared: Box) -> None:
        with shared.stream("echo on; sleep 4; echo off; exit 3", detach=True, exec_id="goes-on") as events:
            assert next(events).raw == b"on\n"
        assert shared.exec_info("goes-on")["status"] == "running"
        outcome = shared.follow_all("goes-on")
        assert (outcome.stdout, outcome.exit_code) == (b"on\noff\n", 3)

    def test_a_detached_blocking_call_goes_on(self, shared: Box) -> None:
        with pytest.raises(httpx.ReadTimeout):
            shared.exec(
                "sleep 5; echo made; exit 2",
                detach=True,
                exec_id="blocked-on",
                http_timeout=httpx.Timeout(TIMEOUT.connect, read=2),
            )
        info = until(lambda: _ended(shared, "blocked-on"), 30)
        assert (info["exit_code"], info["stdout"]) == (2, "made\n")


def _ended(box: Box, exec_id: str) -> dict[str, object]:
    info = box.exec_info(exec_id)
    return info if info["status"] == "exited" else {}
