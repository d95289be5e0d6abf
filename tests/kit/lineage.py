"""Calls on a sandbox as a whole, mixed into `Box`: forks, snapshots, pause and hibernation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.client import Api, Box, Result


class Lineage:
    """What only needs an `api` and the `path` of the sandbox."""

    api: Api
    path: str

    def fork(self, **body: Any) -> Box:
        """The only child, or the first of several."""
        return self.api.keep(self.api.call("POST", f"{self.path}/fork", json=body))

    def forks(self, count: int, **body: Any) -> list[Box]:
        """All children of one moment; none may be missing."""
        answer = self.api.call("POST", f"{self.path}/fork-tree", json={"count": count, **body})
        made = [self.api.keep(child) for child in answer["children"]]
        assert "errors" not in answer, answer["errors"]
        assert len(made) == count
        return made

    def promote(self, **body: Any) -> dict[str, Any]:
        answer = self.api.call("POST", f"{self.path}/promote", json=body)
        for deleted in answer["deleted"]:
            self.api.made.pop(deleted, None)
        return dict(answer)

    def snapshot(self, name: str | None = None, **body: Any) -> str:
        """Takes one; its id."""
        named = {} if name is None else {"name": name}
        return str(self.api.call("POST", f"{self.path}/snapshots", json={**named, **body})["id"])

    def restore(self, snapshot: str | None = None) -> dict[str, Any]:
        """Back to a snapshot, or to the last one; what the sandbox is afterwards."""
        body = {} if snapshot is None else {"snapshot_id": snapshot}
        answer: dict[str, Any] = self.api.call("POST", f"{self.path}/restore", json=body)
        return answer

    def pause(self) -> None:
        self.api.call("POST", f"{self.path}/pause")

    def resume(self) -> None:
        self.api.call("POST", f"{self.path}/resume")

    def hibernate(self) -> None:
        assert self.api.call("POST", f"{self.path}/hibernate") == {"status": "hibernated"}

    def wake(self) -> None:
        assert self.api.call("POST", f"{self.path}/wake") == {"status": "running"}

    def status(self) -> str:
        return str(self.api.call("GET", self.path)["status"])

    def verb(self, name: str) -> tuple[int, str]:
        """Status and error code of a move that may be refused."""
        response = self.api.request("POST", f"{self.path}/{name}", json={} if name == "fork" else None)
        return response.status_code, "" if response.is_success else str(response.json()["code"])


def skew(box: Box) -> float:
    """Seconds by which the clock of a sandbox is off, asked with one command."""
    before = time.time()
    result: Result = box.exec(["date", "+%s.%N"])
    told = float(result.stdout)
    return max(before - told, told - time.time(), 0.0)


def no_disk_errors(*boxes: Box) -> None:
    """The kernel of the guest has seen no error of its disk or of the file system on it."""
    for box in boxes:
        found = box.sh("dmesg | grep -iE 'ext4.*(error|warn|corrupt)|I/O error|jbd2.*err' || true")
        assert found == "", f"{box}: {found}"
