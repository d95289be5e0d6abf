"""Runs inside a jail in place of QEMU and tries to get out: every line of its output is one attempt.

It is given JSON: places of the host and of another machine. `refused` is what each attempt has to come to. It imports
nothing of ours: there is nothing of ours in a jail.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
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
    # What all machines of a template read is shared: a lock on it would stop the others.
    "lock the memory that others share": lambda: fcntl.flock(os.open("/mem", os.O_RDONLY), fcntl.LOCK_EX),
    "lock it as QEMU does": lambda: ofd_lock("/mem"),
    "lock it as old programs do": lambda: fcntl.lockf(os.open("/mem", os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB),
    "hold it by a lease": lambda: fcntl.fcntl(os.open("/mem", os.O_RDONLY), 1024, 0),
    "take room that its limit does not count": lambda: call(285, 3, 1, goal["file_limit"], 1 << 30),
    "take room by a hole": lambda: call(285, 3, 17, goal["file_limit"], 1 << 30),
    "take room beyond its limit": lambda: call(285, 3, 0, goal["file_limit"], 1 << 20),
    "make everybody wait for their disks": lambda: call(306, 3),
    "use up the host's asynchronous requests": lambda: call(206, 1024, b"\0" * 8),
    "enter a ring": lambda: call(426, 0, 1, 0, 0, 0),
    "open page faults by their device": lambda: os.open("/dev/userfaultfd", os.O_RDWR),
    "attach to the server": lambda: call(101, 16, goal["server"], 0, 0),
    "take a descriptor of another": lambda: call(438, 0, 0, 0),
    "write another machine's memory": lambda: call(311, victim, 0, 0, 0, 0, 0),
    "add a key": lambda: call(248, b"user", b"x", b"y", 1, -3),
    "open a tree": lambda: call(428, -100, b"/", 1),
    "make a file system": lambda: call(430, b"tmpfs", 0),
    "move a mount": lambda: call(429, -100, b"/", -100, b"/dev", 0),
    "change a mount": lambda: call(442, -100, b"/", 0, b"\0" * 32, 32),
    "pivot its root": lambda: call(155, b"/", b"/"),
    "make a network namespace": lambda: call(272, 0x40000000),
    "make a cgroup namespace": lambda: call(272, 0x02000000),
    "make a time namespace": lambda: call(272, 0x00000080),
    "watch files of everybody": lambda: call(300, 0, 0),
    "compare with another machine": lambda: call(312, 1, victim, 0, 0, 0),
    "get all capabilities": lambda: call(126, struct.pack("=Ii", 0x20080522, 0), b"\xff" * 24),
    "raise its priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
    "run before all others": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)),
    "read before all others": lambda: call(251, 1, 0, 1 << 13),
    "open more files than it may": lambda: [os.dup(1) for _ in range(5000)],
    "lift its limit of files that are open": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16)),
    "lift a limit of its own by another call": lambda: resource.prlimit(0, resource.RLIMIT_FSIZE, (-1, -1)),
    "use Bluetooth": lambda: socket.socket(31, socket.SOCK_RAW, 1),
    "use the kernel's ciphers": lambda: socket.socket(38, socket.SOCK_SEQPACKET, 0),
    "use XDP": lambda: socket.socket(44, socket.SOCK_RAW, 0),
    "see other processes": lambda: None if os.getpid() != 1 else refuse(),
}


def ofd_lock(path: str) -> None:
    """Of the byte by which QEMU says that nobody else may read."""
    fcntl.fcntl(os.open(path, os.O_RDONLY), 37, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 200, 1, 0))


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
