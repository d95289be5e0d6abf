"""Ports for servers that have to be told theirs."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
