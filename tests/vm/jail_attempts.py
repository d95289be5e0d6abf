"""Runs inside a jail in place of QEMU and tries to get out: every line of its output is one attempt.

It is given JSON: places of the host and of another machine. `refused` is what each attempt has to come to. It imports
nothing of ours: there is nothing of ours in a jail.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
goal: dict[str, Any] = json.loads(sys.argv[1])
ATTEMPTS: dict[str, Callable[[], object]] = {}


def call(number: int, *arguments: int | bytes) -> int:
    words = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def connect(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(family, kind) as client:
        client.settimeout(2)
        client.connect(address)


for path in goal["files"]:
    ATTEMPTS[f"read {path}"] = lambda path=path: open(path, "rb").read(1)  # noqa: PTH123, SIM115
for path in goal["folders"]:
    ATTEMPTS[f"list {path}"] = lambda path=path: os.listdir(path)  # noqa: PTH208
for path in goal["sockets"]:
    ATTEMPTS[f"connect to {path}"] = lambda path=path: connect(socket.AF_UNIX, path)
for device in ("/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/kvm", "/dev/net/tun", "/dev/fuse", "/dev/tty", "/dev/ptmx"):
    ATTEMPTS[f"open {device}"] = lambda device=device: os.open(device, os.O_RDWR)

victim, token = goal["victim"], goal["abstract"]
ATTEMPTS |= {
    "connect to an abstract socket of the host": lambda: connect(socket.AF_UNIX, "\0" + token),
    "connect to the server": lambda: connect(socket.AF_INET, ("127.0.0.1", goal["port"])),
    "connect to the server over IPv6": lambda: connect(socket.AF_INET6, ("::1", goal["port"])),
    "send a datagram": lambda: connect(socket.AF_INET, ("192.0.2.1", 53), socket.SOCK_DGRAM),
    "open a raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "open a packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "open a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "open a vsock": lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM),
    "signal another machine": lambda: os.kill(victim, 0),
    "signal the server": lambda: os.kill(goal["server"], 0),
    "trace another machine": lambda: call(101, 16, victim, 0, 0),
    "read another machine's memory": lambda: call(310, victim, 0, 0, 0, 0, 0),
    "open another machine as a descriptor": lambda: call(434, victim, 0),
    "become root": lambda: os.setuid(0),
    "become another machine's user": lambda: os.setresuid(goal["uid"], goal["uid"], goal["uid"]),
    "become the group root": lambda: os.setgid(0),
    "take more groups": lambda: os.setgroups([0]),
    "change the root": lambda: os.chroot("/"),
    "mount a file system": lambda: call(165, b"x", b"/", b"tmpfs", 0, 0),
    "make the root writable": lambda: call(165, b"", b"/", b"", 32, 0),
    "unmount": lambda: call(166, b"/mem", 2),
    "make a user namespace": lambda: call(272, 0x10000000),
    "make a mount namespace": lambda: call(272, 0x00020000),
    "clone into a user namespace": lambda: call(56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": lambda: call(435, 0, 0),
    "join a namespace": lambda: call(308, 0, 0),
    "make a device": lambda: call(259, -100, b"/tmp-device", 0o60666, 0xFE00),
    "write to its root": lambda: open("/written", "w"),  # noqa: PTH123, SIM115
    "write where it works": lambda: open("written", "w"),  # noqa: PTH123, SIM115
    "write the memory that others share": lambda: os.open("/mem", os.O_RDWR),
    "cut the memory that others share": lambda: os.truncate("/mem", 0),
    "change who may read the memory": lambda: os.chmod("/mem", 0o666),  # noqa: PTH101
    "delete the memory": lambda: os.unlink("/mem"),  # noqa: PTH108
    "open a file by its handle": lambda: call(304, -100, b"\0" * 16, 0),
    "read the kernel's log": lambda: call(103, 3, b"\0" * 64, 64),
    "use the kernel's keys": lambda: call(250, 0, -3, 0, 0, 0),
    "load a program into the kernel": lambda: call(321, 5, b"\0" * 64, 64),
    "watch the processor": lambda: call(298, b"\0" * 128, 0, -1, -1, 0),
    "handle page faults": lambda: call(323, 0),
    "make a ring": lambda: call(425, 1, b"\0" * 128),
    "load a module": lambda: call(313, 0, b"", 0),
    "reboot": lambda: call(169, 0xFEE1DEAD, 672274793, 0, 0),
    "set the clock": lambda: call(227, 0, b"\0" * 16),
    "rename the host": lambda: call(170, b"x", 1),
    "find a shared segment of the host": lambda: call(29, goal["segment"], 0, 0),
    "lift its limit of files": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)),
    "lift its limit of cores": lambda: resource.setrlimit(resource.RLIMIT_CORE, (-1, -1)),
    "write a file that is too large": lambda: os.pwrite(3, b"x", goal["file_limit"]),
    "read the host's name": lambda: None if socket.gethostname() == goal["hostname"] else refuse(),
    "see other processes": lambda: None if os.getpid() != 1 else refuse(),
}


def refuse() -> None:
    raise PermissionError


def main() -> None:
    told = {}
    for name, attempt in ATTEMPTS.items():
        try:
            attempt()
        except (OSError, ValueError) as error:
            told[name] = f"refused: {error}"
        else:
            told[name] = "GOT THROUGH"
    os.write(1, json.dumps(told).encode())


main()
