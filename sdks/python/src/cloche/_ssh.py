"""The command that opens a sandbox with the machine's own `ssh`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

from .errors import ClocheError
from .ssh import SshServer


def command(api_url: str, server: SshServer, sandbox: str, rest: Sequence[str]) -> list[str]:
    """How `ssh` is called. The key of the server is the one that its API has told, so nobody has to be asked."""
    if not server.enabled:
        raise ClocheError("this server offers no SSH; its operator switches it on with `ssh_port`", "client.no_ssh")
    host = urlsplit(api_url).hostname or "localhost"
    known = f"/bin/echo [{host}]:{server.port} {server.host_key}"
    options = {
        "KnownHostsCommand": known,
        "UserKnownHostsFile": "/dev/null",
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    # A name that begins with a dash is still a name.
    return ["ssh", "-p", str(server.port), *flags, "--", f"{sandbox}@{host}", *rest]


def run(words: list[str], *, show: bool) -> int:
    """Becomes that command, or prints it."""
    if show:
        print(shlex.join(words))
        return 0
    try:
        os.execvp(words[0], words)  # noqa: S606 - no shell is meant
    except FileNotFoundError as error:
        raise ClocheError("there is no program `ssh` on this machine", "client.no_ssh") from error
