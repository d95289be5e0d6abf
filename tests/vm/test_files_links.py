"""Links lead nowhere they must not: never to the host, and in the guest only where the user may go."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.client import Box
from kit.server import Server


@pytest.fixture(scope="module")
def home(shared: Box) -> Box:
    """A sandbox with a user `app` and things of root that app must not touch."""
    shared.sh(
        "useradd -m -u 1234 -s /bin/bash app; mkdir -p /root/dir; "
        "echo root-secret > /root/file; echo kept > /root/dir/kept"
    )
    shared.sh(
        "ln -s /etc/shadow l; ln -s / d; ln -s /root/new dangling; ln -s /root/file f; "
        "ln -s ../../../../../../etc/shadow up; "
        "ln -s d/root/file deep; ln -s /root/dir rootdir",
        user="app",
        cwd="/home/app",
    )
    return shared


@pytest.fixture
def marker(server: Server) -> Iterator[Path]:
    """A file of the host that every test here would find if anything led out."""
    path = server.data / f"marker-{secrets.token_hex(6)}"
    path.write_text("host secret")
    yield path
    assert path.read_text() == "host secret"
    path.unlink()


LINKS = ["l", "f", "up", "deep", "d/etc/shadow", "d/root/file", "rootdir/kept"]


class TestRightsOfTheUser:
    @pytest.mark.parametrize("link", LINKS)
    def test_reading(self, home: Box, link: str) -> None:
        response = home.fs_raw("GET", "", f"/home/app/{link}", user="app")
        assert (response.status_code, response.json()["code"]) == (403, "file.permission_denied")

    @pytest.mark.parametrize("link", [*LINKS, "dangling", "rootdir/new", "d/root/new", "d/etc/new"])
    def test_writing(self, home: Box, link: str) -> None:
        before = home.sh("sha256sum /etc/shadow /root/file /root/dir/kept; ls -A /root /root/dir /etc")
        for append in ("0", "1"):
            response = home.fs_raw("PUT", "", f"/home/app/{link}", b"evil", user="app", append=append)
            assert response.status_code == 403, response.text
        assert home.sh("sha256sum /etc/shadow /root/file /root/dir/kept; ls -A /root /root/dir /etc") == before

    def test_moving_listing_deleting_and_making(self, home: Box) -> None:
        before = home.sh("ls -laR /root /etc/shadow")
        move = f"{home.path}/fs/move"
        for source, to in (
            ("/home/app/d/root/file", "/home/app/x"),
            ("/home/app/l", "/root/x"),
            ("/root/file", "/tmp/x"),
        ):
            response = home.api.request("POST", move, json={"from": source, "to": to, "user": "app"})
            assert response.status_code == 403, (source, to, response.text)
        assert home.fs_raw("GET", "/dir", "/home/app/rootdir", user="app").status_code == 403
        assert home.fs_raw("DELETE", "", "/home/app/d/root/file", user="app").status_code == 403
        response = home.api.request(
            "POST", f"{home.path}/fs/mkdir", json={"path": "/home/app/rootdir/x", "user": "app"}
        )
        assert response.status_code == 403
        assert home.sh("ls -laR /root /etc/shadow") == before

    def test_a_link_is_moved_and_deleted_itself(self, home: Box) -> None:
        home.sh("cd ~; ln -sfn /root/dir gone", user="app", cwd="/home/app")
        assert home.move("/home/app/gone", "/home/app/gone2", user="app")["type"] == "symlink"
        home.rm("/home/app/gone2", user="app")
        assert home.sh("ls /root/dir") == "kept\n"

    def test_deleting_a_tree_never_follows_links(self, home: Box) -> None:
        home.sh(
            "mkdir -p /tmp/tree/a; ln -s /root/dir /tmp/tree/a/l; ln -s / /tmp/tree/a/slash; ln -s .. /tmp/tree/a/up"
        )
        home.rm("/tmp/tree")
        assert home.sh("ls /root/dir; ls /tmp/tree 2>&1 | grep -c 'No such'") == "kept\n1\n"

    @pytest.mark.slow
    def test_a_link_swapped_during_writes(self, home: Box) -> None:
        """The last component, and a parent, change between the user's own and root's as fast as the guest can."""
        program = (
            "import os\nos.chdir('/home/app')\nos.makedirs('own', exist_ok=True)\nopen('own/victim', 'w').close()\n"
            "n = 0\nwhile True:\n n += 1\n"
            " os.symlink('/home/app/own/victim', 's1'); os.rename('s1', 'last')\n"
            " os.symlink('/root/dir/victim', 's1'); os.rename('s1', 'last')\n"
            " os.symlink('/home/app/own', 's2'); os.rename('s2', 'parent')\n"
            " os.symlink('/root/dir', 's2'); os.rename('s2', 'parent')\n"
        )
        home.sh("echo victim > /root/dir/victim; chmod 755 /root /root/dir")
        exec_id = home.start(["python3", "-c", program], user="app", cwd="/home/app")
        codes = set()
        try:
            for number in range(60):
                path = ("/home/app/last", "/home/app/parent/victim")[number % 2]
                codes.add(home.fs_raw("PUT", "", path, b"evil", user="app").status_code)
                if number % 3 == 0:
                    codes.add(home.fs_raw("DELETE", "", "/home/app/parent/victim", user="app").status_code)
        finally:
            home.kill(exec_id)
        assert codes <= {200, 204, 403, 404}, codes
        assert home.sh("cat /root/dir/victim; ls -A /root/dir") == "victim\nkept\nvictim\n"
        home.sh("rm /root/dir/victim; chmod 700 /root")


class TestHost:
    def test_nothing_of_the_host_can_be_read_or_written(self, home: Box, marker: Path) -> None:
        up = "/.." * 20
        home.sh(
            f"ln -sfn {marker} /tmp/to-host; ln -sfn {'../' * 30}{marker} /tmp/to-host2; "
            f"ln -sfn {marker.parent} /tmp/to-dir"
        )
        for path in (
            "/tmp/to-host",
            "/tmp/to-host2",
            str(marker),
            up + str(marker),
            f"/proc/1/root{marker}",
            f"/tmp/to-dir/{marker.name}",
        ):
            response = home.fs_raw("GET", "", path)
            assert response.status_code == 404, (path, response.text)
        for path in ("/tmp/to-host", f"/proc/1/root{marker}", f"/tmp/to-dir/{marker.name}"):
            home.fs_raw("PUT", "", path, b"evil")
            home.fs_raw("DELETE", "", path)
        assert marker.read_text() == "host secret"
        assert home.fs_raw("GET", "/dir", str(marker.parent) + "/templates").status_code == 404
        home.sh(f"rm -rf {marker.parent}")

    def test_the_guest_has_no_way_to_the_host(self, home: Box) -> None:
        """No shared folders and no disk of anybody else: one disk, which is the sandbox's own."""
        kinds = set(home.sh("awk '{print $3}' /proc/mounts").split())
        assert not kinds & {"9p", "virtiofs", "fuse", "nfs", "vboxsf"}
        assert home.sh("ls /sys/block").split() == ["vda"]

    def test_root_of_the_guest_is_root_there(self, home: Box) -> None:
        """The caller without a named user is root of the sandbox, by links too."""
        assert home.get("/home/app/l").startswith(b"root:")
        home.put("/home/app/dangling", b"made")
        assert home.sh("cat /root/new; readlink /home/app/dangling") == "made/root/new\n"
        home.rm("/root/new")
