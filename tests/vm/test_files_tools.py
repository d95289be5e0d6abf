"""Searches, archives, watches, states, signed links and git in one real sandbox."""

from __future__ import annotations

import io
import tarfile
import threading
import time
from typing import Any

import httpx
import pytest

from kit.client import Box


@pytest.fixture(scope="module")
def home(shared: Box) -> Box:
    """A sandbox with a user `tess` and a small tree of theirs."""
    shared.sh("id tess 2>/dev/null || useradd -m -u 1777 -s /bin/bash tess")
    shared.put("/home/tess/t/src/a.py", b"one\nneedle = 1\n", user="tess")
    shared.put(b"/home/tess/t/bad\xff", b"needle", user="tess")
    shared.sh("ln -sf src/a.py /home/tess/t/link; chmod 750 /home/tess/t/src/a.py")
    return shared


def post(box: Box, verb: str, **body: Any) -> httpx.Response:
    return box.api.request("POST", f"{box.path}/{verb}", json=body)


def test_search_and_replace(home: Box) -> None:
    found = post(home, "fs/grep", path="/home/tess/t", pattern="needle").json()
    assert [one["path"] for one in found["matches"]] == ["/home/tess/t/bad\ufffd", "/home/tess/t/src/a.py"]
    assert "path_b64" in found["matches"][0]
    assert post(home, "fs/glob", path="/home/tess/t", pattern="**/*.py").json()["entries"][0]["name"] == "a.py"
    done = post(home, "fs/replace", paths=["/home/tess/t/src/a.py"], pattern="(\\d)", replacement="${1}0", user="tess")
    assert done.json() == {"files": [{"path": "/home/tess/t/src/a.py", "count": 1}], "count": 1}
    assert home.sh("stat -c '%U %a' /home/tess/t/src/a.py; cat /home/tess/t/src/a.py") == "tess 750\none\nneedle = 10\n"
    refused = post(home, "fs/grep", path="/proc", pattern="x")
    assert (refused.status_code, refused.json()["code"]) == (400, "request.invalid")


def test_states_and_parts(home: Box) -> None:
    home.put("/tmp/state", b"0123456789")
    first = home.fs_raw("GET", "", "/tmp/state")
    tag = first.headers["etag"]
    url, params = f"{home.path}/fs", {"path": "/tmp/state"}
    part = home.api.request("GET", url, params=params, headers={"Range": "bytes=2-4", "If-Range": tag})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    beyond = home.api.request("GET", url, params=params, headers={"Range": "bytes=10-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, "bytes */10")
    assert home.api.request("GET", url, params=params, headers={"If-None-Match": tag}).status_code == 304
    assert home.api.request("HEAD", url, params=params).headers["content-length"] == "10"
    home.sh("echo more >> /tmp/state")
    stale = home.api.request("PUT", url, params=params, content=b"x", headers={"If-Match": tag})
    assert (stale.status_code, stale.json()["code"]) == (412, "file.changed")
    there = home.api.request("PUT", url, params=params, content=b"x", headers={"If-None-Match": "*"})
    assert there.status_code == 412
    now = home.api.request("HEAD", url, params=params).headers["etag"]
    assert home.api.request("PUT", url, params=params, content=b"x", headers={"If-Match": now}).status_code == 200


@pytest.mark.parametrize("fmt", ["tar.gz", "zip"])
def test_archives(home: Box, fmt: str) -> None:
    url = f"{home.path}/fs/archive"
    down = home.api.request("GET", url, params={"path": "/home/tess/t", "format": fmt})
    assert down.status_code == 200
    to = f"/home/tess/{fmt}"
    up = home.api.request("PUT", url, params={"path": to, "format": fmt, "user": "tess"}, content=down.content)
    assert (up.json()["files"], up.json()["links"]) == (2, 1)
    assert home.sh(f"stat -c '%U %a' {to}/src/a.py; readlink {to}/link") == "tess 750\nsrc/a.py\n"


def test_an_archive_cannot_write_elsewhere(home: Box) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        link = tarfile.TarInfo("d")
        link.type, link.linkname = tarfile.SYMTYPE, "/home/tess"
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("d/evil"))
    params = {"path": "/tmp/into", "format": "tar"}
    answer = home.api.request("PUT", f"{home.path}/fs/archive", params=params, content=made.getvalue())
    assert (answer.status_code, answer.json()["code"]) == (400, "file.unsafe_archive")
    assert answer.json()["details"]["done"]["links"] == 1
    assert home.exec("ls /home/tess/evil").code != 0


def test_a_watch(home: Box) -> None:
    home.sh("mkdir -p /tmp/watched")
    seen: list[str] = []
    ready = threading.Event()

    def follow() -> None:
        params = {"path": "/tmp/watched", "recursive": "1"}
        with home.api.http.stream("GET", f"{home.path}/fs/watch", params=params, timeout=60) as response:
            for line in response.iter_lines():
                seen.append(line)
                ready.set()
                if line == "event: end":
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    assert ready.wait(20)
    home.sh("mkdir -p /tmp/watched/a/b && echo x > /tmp/watched/a/b/f && sleep 0.2 && rm -r /tmp/watched")
    thread.join(30)
    assert not thread.is_alive()
    events = [line for line in seen if line.startswith(("event: ", "data: "))]
    assert events[0] == "event: ready"
    assert any('"/tmp/watched/a/b/f"' in line for line in events)
    assert events[-1] == "event: end"


def test_a_link_needs_no_token_and_opens_one_file(home: Box) -> None:
    home.put("/tmp/linked", b"content")
    made = post(home, "fs/url", path="/tmp/linked", expires_seconds=60).json()
    got = httpx.get(made["url"], headers={"Origin": "https://page.example"})
    assert (got.content, got.headers["access-control-allow-origin"]) == (b"content", "*")
    assert httpx.put(made["url"], content=b"x").json()["code"] == "file.link_invalid"
    assert httpx.get(made["url"][:-1] + "A").status_code == 403
    up = post(home, "fs/url", path="/tmp/up", method="PUT", max_bytes=5, user="tess").json()["url"]
    assert httpx.put(up, content=b"123456").status_code == 413
    assert httpx.put(up, content=iter([b"123", b"456"])).status_code == 413
    assert httpx.put(up, content=b"12345").json()["created"] is True
    assert home.sh("stat -c '%U %s' /tmp/up") == "tess 5\n"
    short = post(home, "fs/url", path="/tmp/linked", expires_seconds=1).json()["url"]
    time.sleep(2.1)
    assert httpx.get(short).status_code == 403


def test_trees(home: Box) -> None:
    copied = post(home, "fs/copy", **{"from": "/home/tess/t", "to": "/home/tess/t2", "user": "tess"})
    assert copied.json()["type"] == "dir"
    assert (
        post(home, "fs/attributes", path="/home/tess/t2", mode="0700", owner="root", recursive=True).json()["changed"]
        == 5
    )
    assert post(home, "fs/link", path="/tmp/l", target="x").status_code == 201
    use = home.api.call("GET", f"{home.path}/fs/du", params={"path": "/home/tess", "depth": 1})
    assert "/home/tess/t" in [part["path"] for part in use["parts"]]
    assert home.api.call("GET", f"{home.path}/fs/df")["available_bytes"] > 0


def test_many_names_in_one_directory(home: Box) -> None:
    home.sh("mkdir -p /tmp/many && cd /tmp/many && seq 20000 | xargs touch")
    found = post(home, "fs/glob", path="/tmp/many", pattern="1999*").json()
    assert len(found["entries"]) == 11
    assert home.api.call("GET", f"{home.path}/fs/du", params={"path": "/tmp/many"})["entries"] == 20001
    home.sh("rm -r /tmp/many")


def test_git(home: Box) -> None:
    home.sh("git init -q --bare -b main /tmp/bare.git")
    author = {"name": "Ann", "email": "ann@example.com"}
    cloned = post(home, "git/clone", url="/tmp/bare.git", path="/tmp/work")
    assert cloned.status_code == 201, cloned.text
    home.put("/tmp/work/f", b"x")
    status = post(home, "git/status", path="/tmp/work").json()
    assert [(one["path"], one["kind"]) for one in status["files"]] == [("f", "untracked")]
    made = post(home, "git/commit", path="/tmp/work", message="first", all=True, author=author)
    assert made.json()["message"] == "first"
    pushed = post(home, "git/push", path="/tmp/work").json()
    assert [one["status"] for one in pushed["refs"]] == ["new"]
    assert post(home, "git/log", path="/tmp/work").json()["commits"][0]["hash"] == made.json()["hash"]
    refused = post(home, "git/clone", url="https://example.com/x", path="/tmp/y", secret="NONE")
    assert (refused.status_code, refused.json()["code"]) == (409, "git.no_grant")
