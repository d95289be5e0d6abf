"""The launcher of jailed programs: a small process beside the server, run as a file of its own.

It imports nothing of ours, so that it stays small and a clone of it costs little. The server sends it one request
after the other over a socket, with descriptors. For each it clones a child that is the *server's* child, in namespaces
of its own; the child builds its root, gives away every privilege and becomes the program. When the server ends, the
socket ends, and so does the launcher; the programs run on.

A request is JSON: see `host/jail.py`, which writes it. The answer is `{"pid": N}` or `{"error": "…"}`. What goes wrong
in the child after that it writes to the descriptor `status`, which the program's start closes.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

CLONE_PARENT = 0x00008000
NAMESPACES = {
    "mnt": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "cgroup": 0x02000000,
}
_SYS_CLONE, _SYS_PIVOT_ROOT, _SYS_MOVE_MOUNT, _SYS_CAPSET, _SYS_CLOSE_RANGE = 56, 155, 429, 126, 436
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
_MOVE_MOUNT_F_EMPTY_PATH = 4
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 38, 47
_PR_SET_SECUREBITS, _PR_SET_SECCOMP, _PR_SET_PDEATHSIG = 28, 22, 1
#: No privilege comes with uid 0, or stays over a change of uid, and none of this can be changed any more.
_SECUREBITS = 0b11101111
_CAPABILITY_V3 = 0x20080522
_FIRST_PARKED = 600
PACKET = 200_000
FDS_AT_ONCE = 200


class _Filter(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


#: Does not give up the interpreter's lock, which a clone could not take again.
_libc = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(what: str, number: int, *arguments: int | bytes | None) -> int:
    converted = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a or 0) for a in arguments]
    return _check(int(_libc.syscall(ctypes.c_long(number), *converted)), what)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount of {target}")


# ------------------------------------------------------------------ the child


def _become(request: dict[str, Any], fds: list[int], status: list[int]) -> None:
    """Turns this process into the program; `status` holds the descriptor for what goes wrong. Raises OSError; never
    returns."""
    os.setsid()
    for index in request["groups"]:
        os.write(fds[index], b"0")
    jail = request["jail"]
    if jail is not None:
        if jail["oom_score"] is not None:
            with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - pathlib is not worth its memory here
                file.write(str(jail["oom_score"]))
        _build_root(jail, fds)
        if "uts" in jail["namespaces"]:
            socket.sethostname(jail["hostname"])
    elif request["cwd"]:
        os.chdir(request["cwd"])
    _place(request, fds, status)
    for name, value in request["limits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    if jail is not None:
        _give_up_privileges(jail)
    if request["ends_with_us"]:  # after the change of user, which takes it back
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "death signal")
    # SIGXFSZ stays ignored: what is too large for its limit is an error to whoever writes it, not its end.
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    argv = request["argv"]
    os.execve(argv[0], argv, request["env"])  # noqa: S606 - that is what it is for


def _build_root(jail: dict[str, Any], fds: list[int]) -> None:
    base = jail["base"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    bare = MS_NOSUID | MS_NODEV | MS_NOEXEC
    inodes = 64 + 4 * len(jail["trees"])  # a name and the directories above it
    mount("jail", base, "tmpfs", bare, f"size=64k,nr_inodes={inodes},mode=755")
    for target, where in jail["links"]:
        os.makedirs(os.path.dirname(base + target), exist_ok=True)  # noqa: PTH103, PTH120
        os.symlink(where, base + target)  # noqa: PTH211
    for source, target, options in jail["binds"]:
        _point(base + target, os.path.isdir(source))  # noqa: PTH112
        mount(source, base + target, None, MS_BIND)
        flags = MS_NOSUID | MS_RDONLY
        flags |= 0 if "exec" in options else MS_NOEXEC
        flags |= 0 if "dev" in options else MS_NODEV
        mount(None, base + target, None, MS_REMOUNT | MS_BIND | flags)
    for index, target in jail["trees"]:
        _point(base + target, False)
        path = os.fsencode(base + target)
        _syscall(f"mount of {target}", _SYS_MOVE_MOUNT, fds[index], b"", -100, path, _MOVE_MOUNT_F_EMPTY_PATH)
    os.makedirs(base + jail["cwd"], exist_ok=True)  # noqa: PTH103
    mount(None, base, None, MS_REMOUNT | MS_BIND | MS_RDONLY | bare)
    os.chdir(base)
    _syscall("pivot_root", _SYS_PIVOT_ROOT, b".", b".")
    _check(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir(jail["cwd"])


def _point(path: str, directory: bool) -> None:
    os.makedirs(path if directory else os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    if not directory:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))


def _place(request: dict[str, Any], fds: list[int], status: list[int]) -> None:
    """Gives each descriptor its number and closes all others. `status` moves behind the last."""
    wanted: dict[str, int] = request["fds"]
    parked = {int(number): fcntl.fcntl(fds[index], fcntl.F_DUPFD, _FIRST_PARKED) for number, index in wanted.items()}
    apart = fcntl.fcntl(status[0], fcntl.F_DUPFD, _FIRST_PARKED)
    last = max(parked)
    for number in range(last + 1):
        if number in parked:
            os.dup2(parked[number], number)
        else:
            os.closerange(number, number + 1)  # of ours, whether or not it is open
    os.dup2(apart, last + 1, inheritable=False)
    status[0] = last + 1
    _syscall("close_range", _SYS_CLOSE_RANGE, last + 2, 0x7FFFFFFF, 0)


def _give_up_privileges(jail: dict[str, Any]) -> None:
    uid = jail["uid"]
    _check(_libc.prctl(_PR_SET_SECUREBITS, _SECUREBITS, 0, 0, 0), "securebits")
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the last one that this kernel knows
    os.setgroups(jail["groups"])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _check(_libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0), "ambient capabilities")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_V3, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(_libc.syscall(ctypes.c_long(_SYS_CAPSET), header, none), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    code = ctypes.create_string_buffer(bytes.fromhex(jail["filter"]))
    program = _Filter((len(code) - 1) // 8, ctypes.addressof(code))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


# ------------------------------------------------------------------ the launcher


def start(request: dict[str, Any], fds: list[int]) -> int:
    """The pid of the new process, a child of our parent. Raises OSError."""
    flags = CLONE_PARENT | signal.SIGCHLD
    if request["jail"] is not None:
        for name in request["jail"]["namespaces"]:
            flags |= NAMESPACES[name]
    pid = _syscall("clone", _SYS_CLONE, flags, 0, 0, 0, 0)
    if pid:
        return pid
    status = [fds[request["status"]]]
    try:
        _become(request, fds, status)
    except BaseException as error:  # noqa: BLE001 - whatever it is, this process must not go on
        os.write(status[0], f"{error}".encode()[:500] or b"?")
    finally:
        os._exit(126)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request with its descriptors; None when the server has ended."""
    request: dict[str, Any] | None = None
    fds: list[int] = []
    while request is None or len(fds) < request["count"]:
        room = socket.CMSG_SPACE(FDS_AT_ONCE * 4)
        data, ancillary, _, _ = sock.recvmsg(PACKET, room)
        if not data:
            return None
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                got = array.array("i")
                got.frombytes(raw[: len(raw) - len(raw) % got.itemsize])
                fds += got
        if request is None:
            request = json.loads(data)
    return request, fds


def serve(sock: socket.socket) -> None:
    while (message := receive(sock)) is not None:
        request, fds = message
        try:
            answer: dict[str, Any] = {"pid": start(request, fds)}
        except OSError as error:
            answer = {"error": str(error), "errno": error.errno or 0}
        for fd in fds:
            os.close(fd)
        sock.send(json.dumps(answer).encode())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's end is ours, by its socket
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.chdir("/")
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
