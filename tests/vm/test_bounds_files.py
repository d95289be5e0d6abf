"""Files beyond what is usual: very many, very large, hostile archives, writers and readers at odds.
After each test the sandbox and its neighbour answer.

The sizes are smaller than what `CLOCHE_TEST_ALL=1` tries, for emulated machines are slow, or than what was run by hand:
1 GiB.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from kit import procs
from kit.client import Api, Box, checked
from kit.server import Server
from kit.until import until

#: The larger number takes emulation a quarter of an hour.
MANY = 100_000 if os.environ.get("CLOCHE_TEST_ALL") else 5_000
GROWTH_MIB = 32


@pytest.fixture(scope="module")
def neighbour(api: Api) -> Iterator[Box]:
    box = api.create()
    yield box
    box.delete()


@pytest.fixture(autouse=True)
def both_answer(shared: Box, neighbour: Box) -> Iterator[None]:
    yield
    assert shared.sh("echo on") == "on\n"
    assert neighbour.sh("echo on") == "on\n"


def post(box: Box, verb: str, **body: Any) -> Any:
    return box.api.call("POST", f"{box.path}/fs/{verb}", json=body)


def agent_mib(box: Box, field: str) -> float:
    return int(box.sh(f"awk '/{field}/ {{print $2}}' /proc/1/status")) / 1024


def test_very_many_in_one_directory(shared: Box, server: Server) -> None:
    before, agent = procs.rss_mib(server.pid), agent_mib(shared, "VmRSS")
    procs.reset_peak(server.pid)
    seen: list[str] = []
    ready, go_on = threading.Event(), threading.Event()

    def watch() -> None:
        with shared.api.http.stream("GET", f"{shared.path}/fs/watch", params={"path": "/tmp/many"}) as response:
            for number, line in enumerate(response.iter_lines()):
                ready.set()
                if line.startswith("event: "):
                    seen.append(line)
                if number == 10:
                    go_on.wait(300)

    shared.mkdir("/tmp/many")
    watcher = threading.Thread(target=watch)
    watcher.start()
    assert ready.wait(30)
    made = shared.start(f"perl -e 'for (1..{MANY}) {{ open F, q(>), qq(/tmp/many/n$_) }}'")
    while shared.exec_info(made)["status"] == "running":
        assert shared.sh("echo meanwhile") == "meanwhile\n"
    names, after = [], None
    while True:
        page = shared.ls("/tmp/many", limit=2000, **({"after": after} if after else {}))
        names += [entry["name"] for entry in page["entries"]]
        after = page.get("next")
        if not after:
            break
    assert sorted(names) == sorted(f"n{number}" for number in range(1, MANY + 1))
    found = post(shared, "glob", path="/tmp/many", pattern="*7", max_results=MANY // 10)
    assert (len(found["entries"]), found["truncated"]) == (MANY // 10, False)
    assert post(shared, "glob", path="/tmp/many", pattern="*7", max_results=5)["truncated"]
    params = {"path": "/tmp/many", "format": "tar.gz"}
    with shared.api.http.stream("GET", f"{shared.path}/fs/archive", params=params) as response:
        packed = checked(response).read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert sum(one.isfile() for one in tar) == MANY
    go_on.set()
    shared.rm("/tmp/many", recursive=True)
    watcher.join(60)
    assert not watcher.is_alive()
    assert seen[0] == "event: ready"
    assert seen[-1] == "event: end"
    assert len(seen) > MANY or "event: overflow" in seen, "all of it, or that something is missing"
    assert procs.peak_rss_mib(server.pid) - before < 2 * GROWTH_MIB
    assert agent_mib(shared, "VmHWM") - agent < 2 * GROWTH_MIB


def tar_of(*entries: tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for one in entries:
            tar.addfile(one, io.BytesIO(bytes(one.size)) if one.isreg() else None)
    return made.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    one = tarfile.TarInfo(name)
    one.type, one.linkname, one.size = kind, link, size
    return one


def huge() -> bytes:
    """An archive whose only entry says that it has 8 TiB."""
    one = entry("huge")
    one.size = 8 << 40
    return one.tobuf(tarfile.GNU_FORMAT) + bytes(4096)


def zip_bomb() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("zeros", bytes(60_000_000))
    return made.getvalue()


@pytest.mark.parametrize(
    ("name", "make", "code"),
    [
        ("tar", lambda: tar_of(entry("../out")), "file.unsafe_archive"),
        ("tar", lambda: tar_of(entry("/tmp/out")), "file.unsafe_archive"),
        ("tar", lambda: tar_of(entry("d", tarfile.SYMTYPE, "/tmp"), entry("d/out")), "file.unsafe_archive"),
        ("tar", lambda: tar_of(entry("h", tarfile.LNKTYPE, "../../etc/shadow")), "file.unsafe_archive"),
        ("tar", lambda: tar_of(*(entry(f"n{n}") for n in range(60))), "file.archive_too_large"),
        ("tar", huge, "file.bad_archive"),
        ("tar.gz", lambda: gzip.compress(tar_of(entry("zeros", size=60_000_000))), "file.archive_too_large"),
        ("zip", zip_bomb, "file.archive_too_large"),
    ],
)
def test_hostile_archives(shared: Box, name: str, make: Callable[[], bytes], code: str) -> None:
    shared.sh("rm -rf /tmp/in /tmp/out")
    params: dict[str, Any] = {"path": "/tmp/in", "format": name, "max_bytes": 10_000_000, "max_entries": 50}
    answer = shared.api.request("PUT", f"{shared.path}/fs/archive", params=params, content=make())
    assert (answer.status_code // 100, answer.json()["code"]) == (4, code), answer.text
    assert answer.json()["error"]
    assert shared.exec("ls /tmp/out").code != 0
    assert int(shared.sh("du -sb /tmp/in | cut -f1")) < 11_000_000


def test_devices_are_left_out(shared: Box) -> None:
    made = tar_of(entry("dev", tarfile.BLKTYPE), entry("null", tarfile.CHRTYPE), entry("pipe", tarfile.FIFOTYPE))
    params = {"path": "/tmp/devices", "format": "tar"}
    told = shared.api.call("PUT", f"{shared.path}/fs/archive", params=params, content=made)
    assert (told["skipped"], [one["name"] for one in told["notices"]]) == (3, ["dev", "null", "pipe"])
    assert shared.sh("ls -A /tmp/devices") == ""


def test_who_hangs_up_leaves_nothing(shared: Box) -> None:
    """Neither a part of the file nor a temporary one, and the old content stays."""
    shared.put("/root/up/file", b"old")

    def half() -> Iterator[bytes]:
        yield bytes(3_000_000)
        until(lambda: shared.sh("ls -A /root/up | wc -l").strip() in "12", 20)
        raise ConnectionResetError

    for route, params in (("", {"path": "/root/up/file"}), ("/archive", {"path": "/root/up/tree", "format": "zip"})):
        with pytest.raises(ConnectionResetError):
            shared.api.request("PUT", f"{shared.path}/fs{route}", params=params, content=half())
    until(lambda: shared.sh("find /root/up -type f") == "/root/up/file\n", 20)
    assert shared.get("/root/up/file") == b"old"
    until(lambda: shared.exec("ls -l /proc/1/fd | grep -c /root/up").stdout == "0\n", 20)


def test_two_writers_with_the_same_state(shared: Box) -> None:
    shared.put("/tmp/state", b"begun")
    url, params = f"{shared.path}/fs", {"path": "/tmp/state"}
    for _ in range(5):
        tag = shared.api.request("HEAD", url, params=params).headers["etag"]
        found: dict[bytes, int] = {}

        def write(text: bytes, tag: str = tag, found: dict[bytes, int] = found) -> None:
            answer = shared.api.request("PUT", url, params=params, content=text * 50_000, headers={"If-Match": tag})
            found[text] = answer.status_code

        threads = [threading.Thread(target=write, args=(text,)) for text in (b"a", b"b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(found.values()) == [200, 412]
        winner = next(text for text, status in found.items() if status == 200)
        assert shared.get("/tmp/state") == winner * 50_000


def test_links_do_not_outlive_anything(api: Api, shared: Box) -> None:
    """Not their time, not a change of one character, not their sandbox."""
    shared.put("/tmp/linked", b"content")
    url = post(shared, "url", path="/tmp/linked", expires_seconds=2)["url"]
    made = time.monotonic()
    assert httpx.get(url).content == b"content"
    head, _, token = url.rpartition("/")
    for at in range(0, len(token), 7):
        other = "A" if token[at] != "A" else "B"
        assert httpx.get(f"{head}/{token[:at]}{other}{token[at + 1 :]}").status_code == 403
    time.sleep(max(0.0, 3.1 - (time.monotonic() - made)))
    assert httpx.get(url).json()["code"] == "file.link_invalid"
    short = api.create()
    short.put("/tmp/linked", b"content")
    url = post(short, "url", path="/tmp/linked")["url"]
    assert httpx.get(url).content == b"content"
    short.delete()
    assert httpx.get(url).status_code in {403, 404, 410}


def test_large_files_whole_in_flat_memory(shared: Box, server: Server) -> None:
    size, block = 150 << 20, hashlib.sha512(b"x").digest() * 16384
    before, agent = procs.rss_mib(server.pid), agent_mib(shared, "VmRSS")
    wanted = hashlib.sha256()

    def body() -> Iterator[bytes]:
        for number in range(size >> 20):
            piece = number.to_bytes(8, "big") + block[8:]
            wanted.update(piece)
            yield piece

    procs.reset_peak(server.pid)
    assert shared.put("/root/large", body())["bytes"] == size
    assert shared.get_hash("/root/large") == (size, wanted.hexdigest())
    assert procs.peak_rss_mib(server.pid) - before < GROWTH_MIB
    assert agent_mib(shared, "VmHWM") - agent < 2 * GROWTH_MIB
    shared.rm("/root/large")
