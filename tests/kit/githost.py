"""A host of private git repositories over HTTPS: git's own HTTP backend behind a check of the password."""

from __future__ import annotations

import base64
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit


@dataclass
class GitHost:
    """Repositories below `root`, for whoever has the password. `refused` counts those who have not, `sent` holds what
    came as credentials."""

    root: Path
    password: str
    refused: int = 0
    sent: list[str] = field(default_factory=list)

    def make(self, name: str, files: dict[str, str]) -> Path:
        """A repository with one commit on `main`."""
        bare, work = self.root / name, self.root / (name + ".work")
        self.git("init", "-q", "--bare", "-b", "main", bare)
        self.git("clone", "-q", bare, work)
        self.git("-C", work, "checkout", "-q", "-B", "main")
        for path, text in files.items():
            (work / path).write_text(text)
        self.git("-C", work, "add", "--all")
        self.git("-C", work, "-c", "user.name=T", "-c", "user.email=t@t", "commit", "-q", "-m", "begun")
        self.git("-C", work, "push", "-q", "origin", "main")
        return bare

    def git(self, *words: str | Path) -> str:
        env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        return subprocess.run(["git", *words], check=True, capture_output=True, text=True, env=env).stdout

    def answer(self, lines: list[bytes], body: IO[bytes]) -> bytes:
        """The answer to one request: its head in lines, and where its body comes from."""
        method, target, _ = lines[0].decode("latin-1").split(" ", 2)
        headers = {k.strip().lower(): v.strip() for k, _, v in (one.decode("latin-1").partition(":") for one in lines)}
        data = _body(headers, body)
        sent = headers.get("authorization", "")
        self.sent.append(sent)
        if sent.partition(" ")[2] != base64.b64encode(f"x-access-token:{self.password}".encode()).decode():
            self.refused += 1
            told = b'HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm="git"\r\n'
            return told + b"Content-Length: 0\r\nConnection: close\r\n\r\n"
        parts = urlsplit(target)
        env = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "PATH_INFO": parts.path,
            "QUERY_STRING": parts.query,
            "REQUEST_METHOD": method,
            "CONTENT_TYPE": headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(data)),
            "HTTP_CONTENT_ENCODING": headers.get("content-encoding", ""),
            "GIT_PROTOCOL": headers.get("git-protocol", ""),
            "REMOTE_USER": "tester",
        }
        done = subprocess.run(["git", "http-backend"], input=data, env=env, capture_output=True, check=True)
        head, _, rest = done.stdout.partition(b"\r\n\r\n")
        status, others = b"200 OK", []
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"status:"):
                status = line.partition(b":")[2].strip()
            else:
                others.append(line)
        others += [b"Content-Length: %d" % len(rest), b"Connection: close"]
        return b"HTTP/1.1 " + status + b"\r\n" + b"\r\n".join(others) + b"\r\n\r\n" + rest


def _body(headers: dict[str, str], source: IO[bytes]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return source.read(int(headers.get("content-length") or 0))
    parts = []
    while size := int(source.readline().split(b";")[0], 16):
        parts.append(source.read(size))
        source.readline()
    while source.readline().strip():
        pass
    return b"".join(parts)
