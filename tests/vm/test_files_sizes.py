"""Files of any size, in bounded memory, at any pace, and never a short one."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator

import httpx
import pytest

from kit import procs
from kit.client import Api, Box
from kit.server import Server
from kit.until import Watch, until

MB = 1_000_000
#: The bound of the pass condition: memory grows by chunks, not by the size of the file.
GROWTH_MIB = 32


def pattern(size: int) -> Iterator[bytes]:
    """Content that is the same nowhere, without holding it."""
    block, sent = 0, 0
    while sent < size:
        piece = hashlib.sha256(str(block).encode()).digest() * 8192
        piece = piece[: size - sent]
        yield piece
        sent += len(piece)
        block += 1


def digest(size: int) -> str:
    found = hashlib.sha256()
    for piece in pattern(size):
        found.update(piece)
    return found.hexdigest()


@pytest.mark.parametrize("size", [0, 1, 4096, 65535, 65536, 65537, 120_000, 1 << 20, (1 << 20) + 1])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_exact_at_every_edge(shared: Box, size: int, framing: str) -> None:
    content = b"".join(pattern(size))
    answer = shared.put(
        "/tmp/edge", content if framing == "length" else iter([content[: size // 3], content[size // 3 :]])
    )
    assert answer["bytes"] == size
    assert shared.get("/tmp/edge") == content
    assert shared.stat("/tmp/edge")["size"] == size


@pytest.mark.slow
def test_100_mb_up_and_down_in_bounded_memory(shared: Box, server: Server) -> None:
    size, wanted = 100 * MB, digest(100 * MB)
    shared.put("/tmp/warm-up", b"".join(pattern(3 * MB)))
    shared.get("/tmp/warm-up")
    before = procs.rss_mib(server.pid)
    agent = int(shared.sh("awk '/VmRSS/ {print $2}' /proc/1/status"))
    procs.reset_peak(server.pid)
    watch = Watch()
    assert shared.put("/tmp/big", pattern(size))["bytes"] == size
    up = watch.seconds
    assert procs.peak_rss_mib(server.pid) - before <= GROWTH_MIB
    assert shared.sh("sha256sum < /tmp/big").split()[0] == wanted
    procs.reset_peak(server.pid)
    watch = Watch()
    assert shared.get_hash("/tmp/big") == (size, wanted)
    down = watch.seconds
    assert procs.peak_rss_mib(server.pid) - before <= GROWTH_MIB
    assert int(shared.sh("awk '/VmHWM/ {print $2}' /proc/1/status")) - agent <= GROWTH_MIB * 1024
    shared.rm("/tmp/big")
    print(f"100 MB: up {up:.1f} s, down {down:.1f} s")


@pytest.mark.slow
def test_a_slow_client_is_waited_for(shared: Box, server: Server) -> None:
    """1 MB/s for 3 GB would be an hour; here a pause of 12 s in both directions, longer than any heartbeat, with
    40 MB so that no buffer on the way can hold the rest. Others are served meanwhile."""
    size = 40 * MB

    def halting() -> Iterator[bytes]:
        for number, piece in enumerate(pattern(size)):
            if number == 20:
                time.sleep(12)
                assert shared.sh("echo served") == "served\n"
            yield piece

    assert shared.put("/tmp/slow", halting())["bytes"] == size
    found, got = hashlib.sha256(), 0
    before = procs.rss_mib(server.pid)
    procs.reset_peak(server.pid)
    with shared.api.http.stream("GET", f"{shared.path}/fs", params={"path": "/tmp/slow"}) as response:
        for chunk in response.iter_bytes():
            if got < MB <= got + len(chunk):
                time.sleep(12)
                assert shared.sh("echo served") == "served\n"
            found.update(chunk)
            got += len(chunk)
    assert (got, found.hexdigest()) == (size, digest(size))
    assert procs.peak_rss_mib(server.pid) - before <= GROWTH_MIB


def test_an_abandoned_download_frees_everything(shared: Box, server: Server) -> None:
    shared.sh("head -c 30000000 /dev/zero > /tmp/abandoned")
    qemu = server.qemu(shared.id).pid
    agent = int(shared.sh("ls /proc/1/fd | wc -l"))
    fds = procs.fd_count(server.pid), procs.fd_count(qemu)
    for _ in range(5):
        with shared.api.http.stream("GET", f"{shared.path}/fs", params={"path": "/tmp/abandoned"}) as response:
            next(response.iter_raw(1000))
    until(lambda: int(shared.sh("ls /proc/1/fd | wc -l")) <= agent + 1, 20)
    until(lambda: procs.fd_count(server.pid) <= fds[0] + 2 and procs.fd_count(qemu) <= fds[1] + 1, 20)
    assert shared.exec("ls -l /proc/1/fd | grep abandoned").code == 1


@pytest.mark.slow
async def test_ten_at_once(shared: Box, api: Api, server: Server) -> None:
    contents = [b"".join(pattern(4 * MB - n)) for n in range(10)]
    before = procs.rss_mib(server.pid)
    procs.reset_peak(server.pid)
    async with api.aio() as client:
        answers = await asyncio.gather(*(client.put(shared.id, f"/tmp/p{n}", c) for n, c in enumerate(contents)))
        assert [a["bytes"] for a in answers] == [len(c) for c in contents]
        found = await asyncio.gather(*(client.get(shared.id, f"/tmp/p{n}") for n in range(10)))
    assert found == contents
    assert procs.peak_rss_mib(server.pid) - before <= GROWTH_MIB + 16
    shared.sh("rm /tmp/p?")


class TestFilesThatChange:
    def test_a_growing_file_is_a_whole_prefix(self, shared: Box) -> None:
        exec_id = shared.start(
            "rm -f /tmp/grows; while :; do head -c 100000 /dev/zero | tr '\\0' g; sleep 0.02; done >> /tmp/grows"
        )
        until(lambda: shared.fs_raw("GET", "/stat", "/tmp/grows").is_success and shared.stat("/tmp/grows")["size"] > 0)
        for _ in range(8):
            response = shared.fs_raw("GET", "", "/tmp/grows")
            assert response.status_code == 200
            assert len(response.content) == int(response.headers["content-length"])
            assert set(response.content) == {ord("g")}
        shared.kill(exec_id)

    def test_a_shrinking_file_is_an_error(self, shared: Box) -> None:
        """A short body must never pass for the file."""
        shared.sh("head -c 60000000 /dev/zero > /tmp/shrinks")
        with pytest.raises(httpx.TransportError):
            with shared.api.http.stream("GET", f"{shared.path}/fs", params={"path": "/tmp/shrinks"}) as response:
                assert response.headers["content-length"] == "60000000"
                for number, _ in enumerate(response.iter_raw(65536)):
                    if number == 2:
                        shared.sh("truncate -s 1000000 /tmp/shrinks")
        assert shared.sh("echo next") == "next\n"

    def test_a_replaced_or_deleted_file_is_read_to_its_end(self, shared: Box) -> None:
        size = 20 * MB
        shared.put("/tmp/replaced", pattern(size))
        found, deleted = hashlib.sha256(), False
        with shared.api.http.stream("GET", f"{shared.path}/fs", params={"path": "/tmp/replaced"}) as response:
            for chunk in response.iter_bytes():
                if not deleted:
                    shared.put("/tmp/replaced", b"new")
                    shared.rm("/tmp/replaced")
                    deleted = True
                found.update(chunk)
        assert found.hexdigest() == digest(size)


def test_a_sparse_file_reads_as_zeros(shared: Box) -> None:
    shared.sh("rm -f /tmp/sparse; truncate -s 8000000 /tmp/sparse; printf end >> /tmp/sparse")
    assert shared.get("/tmp/sparse") == bytes(8_000_000) + b"end"
