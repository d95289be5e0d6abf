"""The Python kernel: ipykernel with the environment of each run, fresh random numbers in each copy, and charts."""

from __future__ import annotations

import array
import asyncio
import codecs
import contextlib
import contextvars
import fcntl
import functools
import os
import select
import sys
import termios
import threading
import time
import traceback
import warnings
from typing import Any

import zmq
from iopub import Iopub
from ipykernel import ipkernel
from ipykernel.iostream import OutStream
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import _accepts_parameters
from IPython.core.error import StdinNotImplementedError
from languages import NO_INPUT
from traitlets.config import Config

#: A file that is another one in each sandbox and in each copy of one.
IDENTITY = "/etc/machine-id"
CHART = "application/vnd.cloche.chart+json"
#: What a program has written to a pipe is read by a thread; it is waited for at most so long (seconds).
DRAIN = 1.0


class Kernel(IPythonKernel):
    """One kernel. `cell_meta["cloche"]`: `base` (variables of the sandbox), `env` and `cwd` (of this run only)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen = identity()
        self._loop: Any = None
        self._once = TransformOnce(self.shell)
        self._iopub = Iopub(self)
        reseed()

    async def do_execute(  # type: ignore[no-untyped-def]
        self,
        code,
        silent,
        store_history=True,
        user_expressions=None,
        allow_stdin=False,
        *,
        cell_meta=None,
        cell_id=None,
    ):
        wanted = (cell_meta or {}).get("cloche") or {}
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            os.register_at_fork(after_in_child=self._copied)
        now = identity()
        if now != self._seen:
            # This is a copy: what user-space generators would give next, the other copies would give as well.
            self._seen = now
            reseed()
        os.environ.update(wanted.get("base") or {})
        self._once.forget()
        ours = "cloche" in (cell_meta or {})
        self._iopub.begin(ours)
        try:
            if wanted.get("home"):
                os.chdir(wanted["home"])
            surroundings = Surroundings(wanted.get("env") or {}, wanted.get("cwd"))
        except (OSError, ValueError) as error:
            name = type(error).__name__
            return {"status": "error", "execution_count": 0, "ename": name, "evalue": str(error), "traceback": []}
        with surroundings:
            reply = await super().do_execute(
                code, silent, store_history, user_expressions, allow_stdin, cell_id=cell_id
            )
        drain(sys.stdout)
        drain(sys.stderr)
        return {**reply, "cloche": self._iopub.end()} if ours else reply

    def _copied(self) -> None:
        """A cell that forks goes on in both processes. The copy ends where the cell does: the loop, and the sockets
        behind it, are those of the kernel."""
        self._loop._run_once = leave

    @property
    def _supports_kernel_subshells(self) -> bool:
        return False

    # Who runs a cell by the bridge knows that the kernel is busy, and with what; other clients of Jupyter are told.

    def _publish_status(self, status: str, channel: str, parent: Any = None) -> None:
        known = is_ours(parent or self.get_parent(channel)) and (status == "busy" or self._iopub.is_told())
        if not known:
            super()._publish_status(status, channel, parent)

    def _publish_execute_input(self, code: str, parent: Any, execution_count: int) -> None:
        if not is_ours(parent):
            super()._publish_execute_input(code, parent, execution_count)

    def raw_input(self, prompt: str = "") -> str:
        if not self._allow_stdin:
            raise StdinNotImplementedError(NO_INPUT)
        return super().raw_input(prompt)

    def getpass(self, prompt: str = "", stream: Any = None, **options: Any) -> str:
        if not self._allow_stdin:
            raise StdinNotImplementedError(NO_INPUT)
        return super().getpass(prompt)


def is_ours(parent: Any) -> bool:
    """Whether a request is the bridge's."""
    return "cloche" in (parent.get("metadata") or ())


class TransformOnce:
    """ipykernel puts a cell into Python to see whether it is to be awaited, and IPython then does the same again."""

    def __init__(self, shell: Any) -> None:
        self._transform = shell.transform_cell
        self._done: tuple[str, str] | None = None
        shell.transform_cell = self

    def __call__(self, code: str) -> str:
        if self._done is None or self._done[0] != code:
            self._done = code, self._transform(code)
        return self._done[1]

    def forget(self) -> None:
        """A cell may change what the next ones are put into."""
        self._done = None


class Surroundings:
    """Variables and a directory for one run. What the run itself changes stays changed."""

    def __init__(self, env: dict[str, str], cwd: str | None) -> None:
        self._env = env
        self._cwd = cwd
        self._home = ""
        if cwd is not None:
            self._home = os.getcwd()
            os.chdir(cwd)
        self._before = {name: os.environ.get(name) for name in env}
        os.environ.update(env)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if os.environ.get(name) != self._env[name]:
                continue
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if self._home and os.path.realpath(os.getcwd()) == os.path.realpath(self._cwd or ""):
            os.chdir(self._home)


class App(IPKernelApp):
    """No message is dropped for want of room: whoever reads has the kernel stopped when it is too fast."""

    def init_iopub(self, context: zmq.Context) -> None:
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)

    def init_control(self, context: zmq.Context) -> None:
        super().init_control(context)
        self.shell_channel_thread.io_loop.close(all_fds=True)
        self.shell_channel_thread = NoThread()


class NoThread:
    """In place of the thread that hands requests to subshells: a cell would wait for it twice, and nobody has any."""

    def __init__(self) -> None:
        self.parent_thread = threading.current_thread()

    def __bool__(self) -> bool:
        return False


def run(connection: str) -> None:
    """Returns when the kernel is shut down."""
    config = Config()
    config.InteractiveShell.colors = "NoColor"
    config.HistoryManager.enabled = False
    config.Completer.use_jedi = False
    OutStream._watch_pipe_fd = watch_pipe
    OutStream.flush = flush_what_there_is
    app = App.instance(connection_file=connection, kernel_class=Kernel, config=config, log_level=50)
    app.initialize([])
    # Else every message is put into words for a log that nobody keeps.
    app.log.setLevel(50)
    # What comes by the other sockets is waited for by its reader, so a reply need not wait for it.
    app.kernel._execute_sleep = 0
    ipkernel._accepts_parameters = accepts
    shell = app.kernel.shell
    # Nobody looks at the title of a terminal, and colours are for those who can see them.
    os.environ.update(TERM="dumb", CLICOLOR="0")
    os.environ.pop("FORCE_COLOR", None)
    if "matplotlib" in sys.modules:
        shell.enable_matplotlib("inline")
    add_charts(shell)
    show_groups(shell)
    # Not by a terminal, which would make other line ends and one stream of two.
    shell.system = shell.system_raw
    warnings.filterwarnings("ignore", message="To exit: use")
    asyncio.run = run_anywhere
    threading.Thread.start = start_in_context
    app.start()


def add_charts(shell: Any) -> None:
    """A figure is also shown as the data that it is drawn from."""
    import charts
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    class ChartFormatter(BaseFormatter):
        format_type = Unicode(CHART)
        print_method = ObjectName("_repr_cloche_chart_")
        _return_type = dict

        def __call__(self, obj: Any) -> dict[str, Any] | None:
            # Not by `for_type`: whoever chooses the formats of figures takes all formatters of figures away.
            figure = sys.modules.get("matplotlib.figure")
            return charts.chart_of(obj) if figure is not None and isinstance(obj, figure.Figure) else None

    formatter = ChartFormatter(parent=shell.display_formatter)
    shell.display_formatter.formatters[CHART] = formatter


@functools.lru_cache(16)
def _accepted(method: Any, names: tuple[str, ...]) -> dict[str, bool]:
    return _accepts_parameters(method, names)


def accepts(method: Any, names: list[str]) -> dict[str, bool]:
    """What ipykernel asks of the same method with every cell."""
    return _accepted(method, tuple(names))


def show_groups(shell: Any) -> None:
    """IPython prints the traceback of a group of exceptions, and then the error has none."""
    show = shell.showtraceback

    def showtraceback(exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        kind, value, trace = exc_tuple or sys.exc_info()
        if options.get("exception_only") or not has_group(value):
            show(exc_tuple, *args, **options)
            return
        # The first frame is that of IPython.
        text = "".join(traceback.format_exception(kind, value, trace and trace.tb_next))
        shell._showtraceback(kind, value, text.rstrip("\n").split("\n"))

    shell.showtraceback = showtraceback


def has_group(error: BaseException | None) -> bool:
    """As IPython finds it: in the exception, or in one that it was raised on account of."""
    while error is not None and not isinstance(error, BaseExceptionGroup):
        error = error.__context__
    return error is not None


def leave() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def identity() -> bytes:
    try:
        file = os.open(IDENTITY, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, 64)
    finally:
        os.close(file)


def reseed() -> None:
    """The generators that are shared by a whole process; one that a program has made itself is its own affair."""
    import random

    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


_thread_start = threading.Thread.start


def start_in_context(self: threading.Thread) -> None:
    """What a thread prints belongs to the cell that has started it, also when that has ended."""
    context, work = contextvars.copy_context(), self.run
    self.run = lambda: context.run(work)  # type: ignore[method-assign]
    _thread_start(self)


_asyncio_run = asyncio.run


def run_anywhere(main: Any, **options: Any) -> Any:
    """`asyncio.run` as in a program: within a cell, where a loop runs already, it has one in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _asyncio_run(main, **options)
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(_asyncio_run(main, **options))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="asyncio.run", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failure:
        raise failure[0]
    return result[0]


def watch_pipe(self: Any) -> None:
    """In a thread: what programs have written to the file descriptor of a stream, in place of the method of ipykernel.
    `moving` is held from before something leaves the pipe until it is in the stream, so that `drain` misses nothing
    between the two. Characters are not cut."""
    if self._fid is None:
        return
    self.moving = threading.Lock()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    poll = select.poll()
    poll.register(self._fid, select.POLLIN)
    try:
        while self._should_watch:
            poll.poll()
            with self.moving:
                data = os.read(self._fid, 65536)
                if not data or not self._should_watch:
                    return
                self.write(decoder.decode(data))
                os.write(self._original_stdstream_copy, data)
    except Exception:
        self._exc = sys.exc_info()


_flush = OutStream.flush


def flush_what_there_is(self: Any) -> None:
    """Each of the many flushes of a cell wakes a thread, and waits for it. Where nothing is written, what was before
    is with that thread already, and before all that comes after."""
    with self._buffer_lock:
        empty = not self._buffers
    if not empty:
        _flush(self)


def drain(stream: Any) -> None:
    """Waits until what programs have written to the file descriptor has been read and sent on."""
    moving = getattr(stream, "moving", None)
    if moving is None:
        return
    waiting = array.array("i", [0])
    until = time.monotonic() + DRAIN
    while (left := until - time.monotonic()) > 0:
        if not moving.acquire(timeout=left):
            break
        try:
            fcntl.ioctl(stream._fid, termios.FIONREAD, waiting)
        except (OSError, TypeError):
            return
        finally:
            moving.release()
        if not waiting[0]:
            break
        time.sleep(0.002)
    with contextlib.suppress(ValueError):
        stream.flush()
