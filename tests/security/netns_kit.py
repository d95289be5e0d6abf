"""Namespaces for tests: run code in one, make them, join them, take them away."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def inside(name: str, work: Callable[[], T]) -> T:
    """The result of `work` on a thread in a network namespace; its sockets stay there."""
    results: list[T] = []
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
            try:
                if _LIBC.setns(fd, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(fd)
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors.append(error)

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(40)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"nothing came back from {name}")
    return results[0]


def start_inside(name: str, work: Callable[[], None]) -> threading.Thread:
    """A thread that lives in a namespace."""
    ready = threading.Event()

    def enter() -> None:
        fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
        _LIBC.setns(fd, _CLONE_NEWNET)
        os.close(fd)
        ready.set()
        work()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    ready.wait(5)
    return thread


def ip(script: str) -> None:
    """Lines of `ip`, all at once."""
    done = subprocess.run(["ip", "-batch", "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{script}"


def ip_in(name: str, script: str) -> None:
    done = subprocess.run(["ip", "-n", name, "-batch", "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{script}"


def nft_in(name: str, rules: str) -> None:
    done = subprocess.run(
        ["ip", "netns", "exec", name, "nft", "-f", "-"], input=rules, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def remove(*names: str) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
