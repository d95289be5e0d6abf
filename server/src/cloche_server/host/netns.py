"""Network namespaces that outlive us: each is held by a bind mount on a file of ours. Everything here blocks.

A namespace belongs to a thread, so whatever is done inside one is done on a thread of its own, which then ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from cloche_server.host.process import feed

_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 0x1000
_MNT_DETACH: Final = 2
_TUNSETIFF: Final = 0x400454CA
_TUNSETPERSIST: Final = 0x400454CB
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
#: Packets carry what checksum and segmentation is still to be done, so that neither side does it for nothing.
_IFF_VNET_HDR: Final = 0x4000
_IP_BIND_ADDRESS_NO_PORT: Final = 24

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _on_own_thread(work: Callable[[], T]) -> T:
    """Runs `work` on a thread that ends with it: what it did to its namespace harms nobody."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            failed.append(error)

    thread = threading.Thread(target=run, name="netns")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def inside(path: Path, work: Callable[[], T]) -> T:
    """The result of `work`, run in the namespace that `path` holds. Raises OSError."""

    def enter() -> T:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(fd, _CLONE_NEWNET), "setns")
        finally:
            os.close(fd)
        return work()

    return _on_own_thread(enter)


def create(path: Path, work: Callable[[], None]) -> None:
    """Makes a namespace, runs `work` in it and holds it at `path`. Leaves nothing when it raises."""

    def make() -> None:
        _check(_libc.unshare(_CLONE_NEWNET), "unshare")
        work()
        path.touch(mode=0o600)
        try:
            own = f"/proc/self/task/{threading.get_native_id()}/ns/net".encode()
            _check(_libc.mount(own, os.fsencode(path), None, _MS_BIND, None), "mount")
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    _on_own_thread(make)


def rename(path: Path, target: Path) -> None:
    """Holds the namespace at `target` instead. Raises OSError; then it is held at `path` as before."""
    target.touch(mode=0o600)
    try:
        _check(_libc.mount(os.fsencode(path), os.fsencode(target), None, _MS_BIND, None), "mount")
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    remove(path)


def remove(path: Path) -> None:
    """Lets go of a namespace; with its last process and socket it is gone. Fine when there is none. Raises OSError."""
    while _libc.umount2(os.fsencode(path), _MNT_DETACH) == 0:
        pass
    path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether `path` holds a namespace: after a reboot of the host only its file is left."""
    try:
        return path.stat().st_dev != path.parent.stat().st_dev
    except OSError:
        return False


def open_tap(name: str, *, make: bool = False) -> int:
    """A descriptor of the tap device `name` of this thread's namespace. One process at a time can have it. `make`: it
    stays when its descriptor is closed. Raises OSError."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
        if make:
            fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    except BaseException:
        os.close(fd)
        raise
    return fd


def configure(commands: str, rules: str, sysctls: Sequence[tuple[str, str]] = ()) -> None:
    """Addresses and links as lines for `ip -batch`, a rule set for `nft -f`, and values below `/proc/sys/net`, for this
    thread's namespace. Raises `host.unsupported`, `internal`."""
    for name, value in sysctls:
        with contextlib.suppress(FileNotFoundError):  # a host without IPv6
            (Path("/proc/sys/net") / name).write_text(value)
    feed(["ip", "-batch", "-"], commands)
    feed(["nft", "-f", "-"], rules)


def bound(kind: socket.SocketKind, family: socket.AddressFamily, port: int, backlog: int = 512) -> socket.socket:
    """A socket on every address of this thread's namespace; a stream socket listens. Raises OSError."""
    made = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(("::" if family is socket.AF_INET6 else "0.0.0.0", port))  # noqa: S104 - the whole namespace is ours
        if kind is socket.SOCK_STREAM:
            made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made


def unbound() -> socket.socket:
    """A TCP socket of IPv4 that is connected to nothing, and can only reach what this thread's namespace does. Whoever
    binds it to an address takes a port only when it is connected. Raises OSError."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
    except BaseException:
        made.close()
        raise
    return made


def outgoing(device: str) -> socket.socket:
    """A stream socket of this thread's namespace that is not connected; what it sends leaves by `device` or not at all.
    Raises OSError."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        made.close()
        raise
    return made
