"""The filter of system calls that a jailed program starts with, for x86-64.

QEMU has a filter of its own, against what its own parts never need. This one is there before QEMU is, and takes away
what makes a way out of a jail: namespaces, mounts, other processes, kernel keys, and every network but Unix sockets.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from typing import Final

_INSTRUCTION: Final = struct.Struct("=HBBI")
_Step = tuple[int, int, int, int]
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # where they are in struct seccomp_data
_X86_64: Final = 0xC000003E
_X32: Final = 0x40000000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES: Final = 0x7E020000
_AF_UNIX: Final = 1
_CLONE, _CLONE3, _SOCKET, _FCNTL, _FALLOCATE = 56, 435, 41, 72, 285
#: Locks and leases, of every kind, as if the kernel had none: a lock on what many machines read would keep the others
#: from starting. Programs that would like to lock go on without; whose file is whose is the server's to know.
_LOCKS: Final = (5, 6, 7, 36, 37, 38, 1024)
#: Growing a file, punching holes, writing zeros. All others can take room that no limit of a file's size counts.
_FALLOCATE_MODES: Final = (0, 3, 16)

#: Number and name of what is refused with EPERM.
REFUSED: Final[Mapping[int, str]] = {
    29: "shmget",
    64: "semget",
    68: "msgget",
    101: "ptrace",
    73: "flock",
    103: "syslog",
    133: "mknod",
    135: "personality",
    153: "vhangup",
    154: "modify_ldt",
    155: "pivot_root",
    159: "adjtimex",
    161: "chroot",
    162: "sync",  # of all disks: everybody waits for it
    163: "acct",
    164: "settimeofday",
    165: "mount",
    166: "umount2",
    167: "swapon",
    168: "swapoff",
    169: "reboot",
    170: "sethostname",
    171: "setdomainname",
    172: "iopl",
    173: "ioperm",
    175: "init_module",
    176: "delete_module",
    179: "quotactl",
    212: "lookup_dcookie",
    227: "clock_settime",
    240: "mq_open",
    246: "kexec_load",
    248: "add_key",
    249: "request_key",
    250: "keyctl",
    259: "mknodat",
    272: "unshare",
    279: "move_pages",
    298: "perf_event_open",
    300: "fanotify_init",
    303: "name_to_handle_at",
    304: "open_by_handle_at",
    305: "clock_adjtime",
    306: "syncfs",
    308: "setns",
    310: "process_vm_readv",
    311: "process_vm_writev",
    312: "kcmp",
    313: "finit_module",
    320: "kexec_file_load",
    321: "bpf",
    323: "userfaultfd",
    428: "open_tree",
    429: "move_mount",
    430: "fsopen",
    431: "fsconfig",
    432: "fsmount",
    433: "fspick",
    434: "pidfd_open",
    438: "pidfd_getfd",
    440: "process_madvise",
    442: "mount_setattr",
    448: "process_mrelease",
}
#: As if the kernel did not have them, so that programs take another way.
ABSENT: Final[Mapping[int, str]] = {
    206: "io_setup",  # of which a host has a number for all
    425: "io_uring_setup",
    426: "io_uring_enter",
    427: "io_uring_register",
}


def _only(number: int, argument: int, values: tuple[int, ...], listed: int, others: int) -> list[_Step]:
    """What becomes of a call by the low half of an argument, which is all of it that the kernel looks at."""
    body = [(_LOAD, 0, 0, argument)]
    body += [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    body += [(_RETURN, 0, 0, others), (_RETURN, 0, 0, listed)]
    return [(_EQUAL, 0, len(body), number), *body]


def jail_filter() -> bytes:
    """The filter as the kernel takes it: instructions of 8 bytes."""
    refuse, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, absent),
    ]
    for number in sorted(REFUSED):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    # clone3 hides its flags from a filter; programs take clone without it.
    for number in sorted((*ABSENT, _CLONE3)):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, absent)]
    code += [
        (_EQUAL, 0, 4, _CLONE),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
        *_only(_FALLOCATE, _SECOND_ARGUMENT, _FALLOCATE_MODES, _ALLOW, _ERRNO | errno.EOPNOTSUPP),
        *_only(_FCNTL, _SECOND_ARGUMENT, _LOCKS, _ERRNO | errno.EINVAL, _ALLOW),
        (_EQUAL, 0, 3, _SOCKET),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, _AF_UNIX),
        (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)
