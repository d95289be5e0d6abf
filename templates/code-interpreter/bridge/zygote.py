"""Starts kernels by forking a process that has imported already what they need.

A kernel that is forked answers in a fraction of the time that its imports would take, and shares their memory. The
bridge writes one JSON line per kernel to file descriptor 3, and reads `{"pid": n}`, later `{"died": n, "status": n}`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

from accounts import account

CONTROL_FD = 3
#: The exit code of a kernel whose directory was asked for and cannot be entered.
NO_DIRECTORY = 201
PR_SET_PDEATHSIG = 1
#: What a kernel would load when it starts, or with its first cells.
MODULES = (
    "bash_kernel",
    "faulthandler",
    "ipykernel.debugger",
    "ipykernel.ipkernel",
    "ipykernel.kernelapp",
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "IPython.core.display_functions",
    "IPython.core.magics",
    "IPython.core.magics.ast_mod",
    "IPython.core.magics.execution",
    "IPython.core.oinspect",
    "IPython.core.pylabtools",
    "IPython.core.ultratb",
    "IPython.extensions.storemagic",
    "python_kernel",
    "tornado.platform.asyncio",
)


def warm() -> None:
    """Imports, and uses once, what cells use first. What is missing is left out."""
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    # The debugger of ipykernel is of no use here, and takes longer to load than all else.
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    for name in MODULES:
        importlib.import_module(name)
    del sys.modules["debugpy"]
    try:
        import numpy
        import pandas
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    import io

    import charts
    import matplotlib.pyplot  # noqa: F401
    import matplotlib_inline.backend_inline  # noqa: F401

    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([1, 2], [3, 4], label="a")
    axes.bar([1, 2], [3, 4])
    axes.legend()
    axes.set_title("a")
    figure.savefig(io.BytesIO(), format="png", bbox_inches="tight")
    charts.chart_of(figure)
    frame = pandas.DataFrame({"a": numpy.arange(3), "b": list("xyz")})
    frame._repr_html_()
    repr(frame.describe())
    pandas.read_csv(io.StringIO("a,b\n1,2\n"))


def become(request: dict[str, Any]) -> None:
    """In the child: the session, user, environment and directory of a kernel."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")
    except OSError:
        pass
    user = account(request.get("user"))
    if (user.uid, user.gid) != (os.getuid(), os.getgid()):
        os.setgroups(user.groups)
        os.setgid(user.gid)
        os.setuid(user.uid)
    # No kernel outlives the zygote, which nobody would know of any more.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    names = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": user.shell}
    os.environ.update(names)
    os.environ["IPYTHONDIR"] = os.path.join(request["folder"], "ipython")
    os.environ.update(request["env"])
    try:
        os.chdir(request["cwd"])
    except OSError:
        if request.get("strict"):
            raise SystemExit(NO_DIRECTORY) from None
        os.chdir("/")


def run_kernel(request: dict[str, Any]) -> None:
    """In the child; returns when the kernel ends."""
    become(request)
    kind = request["kind"]
    if kind == "python":
        import python_kernel

        python_kernel.run(request["connection"])
    elif kind == "bash":
        import bash_kernel

        bash_kernel.run(request["connection"])
    else:
        os.environ["NO_COLOR"] = "1"
        argv = request["argv"]
        os.execvp(argv[0], argv)


def fork(control: socket.socket, request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        control.close()
        run_kernel(request)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # No handlers of the zygote's, no flush of what it had buffered.
        os._exit(code & 0xFF)


def reap() -> list[dict[str, int]]:
    gone = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return gone
        if pid == 0:
            return gone
        gone.append({"died": pid, "status": os.waitstatus_to_exitcode(status)})


def main() -> None:
    control = socket.socket(fileno=CONTROL_FD)
    os.set_inheritable(CONTROL_FD, False)
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    warm()
    gc.collect()
    gc.freeze()

    def tell(data: dict[str, int]) -> None:
        control.sendall(json.dumps(data).encode() + b"\n")

    tell({"ready": os.getpid()})
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    pending = b""
    while True:
        for key, _ in selector.select():
            if key.fileobj is wake_read:
                wake_read.recv(4096)
                for gone in reap():
                    tell(gone)
                continue
            data = control.recv(1 << 16)
            if not data:
                return
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                tell({"pid": fork(control, json.loads(line))})


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()
