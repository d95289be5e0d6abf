"""The kernel for bash: one shell that keeps its variables, functions and directory; its output in two streams."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import signal
import subprocess
import termios
import threading
from typing import Any, ClassVar

import zmq
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

#: Cells come NUL-terminated on descriptor 9, the codes they end with go out on 8. A signal ends the command and not
#: the shell.
LOOP = r"""
trap : INT
while IFS= read -r -d '' -u 9 __cloche_cell; do
  eval "$__cloche_cell" 8>&- 9<&-
  printf '%d\n' "$?" >&8
done
"""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Shell:
    """The process and its pipes."""

    def __init__(self) -> None:
        cell_read, self.cells = os.pipe()
        self.codes, code_write = os.pipe()

        def prepare() -> None:
            os.dup2(cell_read, 9)
            os.dup2(code_write, 8)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.process = subprocess.Popen(
            ["/bin/bash", "--noprofile", "--norc", "-c", LOOP, "bash"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=prepare,
            pass_fds=(8, 9),
            start_new_session=True,
        )
        os.close(cell_read)
        os.close(code_write)

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def close(self) -> int:
        for fd in (self.cells, self.codes):
            os.close(fd)
        return self.process.wait()


class BashKernel(Kernel):
    implementation = "cloche-bash"
    implementation_version = "1"
    banner = "bash"
    language_info: ClassVar[dict[str, str]] = {"name": "bash", "mimetype": "text/x-sh", "file_extension": ".sh"}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._shell = Shell()
        self._decoders: dict[str, Any] = {}

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
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        self._take(silent=True)  # what a job in the background has written since the last cell is nobody's
        text = exports(wanted.get("base") or {}) + with_env(code, wanted.get("env") or {}, wanted.get("cwd"))
        try:
            write_all(self._shell.cells, text.replace("\0", "").encode("utf-8", "replace") + b"\0")
            status = self._wait(silent)
        except BrokenPipeError:
            status = None
        if status is None:
            return self._ended()
        if status == 0:
            return {"status": "ok", "execution_count": self.execution_count, "payload": [], "user_expressions": {}}
        return self._error("ExitStatus", f"the cell ended with {status}", status)

    def _wait(self, silent: bool) -> int | None:
        """The exit code of the cell; None when the shell has ended."""
        found = b""
        while b"\n" not in found:
            try:
                ready = self._take(silent, extra=self._shell.codes)
            except KeyboardInterrupt:
                self._shell.interrupt()
                continue
            if ready:
                data = os.read(self._shell.codes, 64)
                if not data:
                    return None
                found += data
        while self._pending():
            self._take(silent)
        return int(found.split(b"\n")[0])

    def _pipes(self) -> dict[int, str]:
        process = self._shell.process
        assert process.stdout is not None
        assert process.stderr is not None
        return {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr"}

    def _pending(self) -> int:
        return sum(waiting(fd) for fd in self._pipes())

    def _take(self, silent: bool, extra: int | None = None) -> bool:
        """Sends on what is there now; with `extra` waits for something, and tells whether that is ready."""
        pipes = self._pipes()
        watched = [*pipes, extra] if extra is not None else list(pipes)
        ready, _, _ = select.select(watched, [], [], None if extra is not None else 0)
        open_ = False
        for fd, name in pipes.items():
            if fd in ready and (data := os.read(fd, 1 << 16)):
                open_ = True
                text = self._decoders[name].decode(data)
                if text and not silent:
                    self.send_response(self.iopub_socket, "stream", {"name": name, "text": text})
        return extra is not None and extra in ready and not open_

    def _ended(self) -> dict[str, Any]:
        while self._pending():
            self._take(False)
        code = self._shell.close()
        self._shell = Shell()
        return self._error("ShellEnded", f"the shell ended with {code}; a new one was started, its state is lost", code)

    def _error(self, name: str, value: str, code: int) -> dict[str, Any]:
        content = {"ename": name, "evalue": value, "traceback": []}
        self.send_response(self.iopub_socket, "error", content)
        return {"status": "error", "execution_count": self.execution_count, "exit_code": code, **content}

    def do_shutdown(self, restart: bool) -> dict[str, Any]:
        self._shell.process.kill()
        return {"status": "ok", "restart": restart}


def waiting(fd: int) -> int:
    size = bytearray(4)
    fcntl.ioctl(fd, termios.FIONREAD, size)
    return int.from_bytes(size, "little")


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def exports(env: dict[str, str]) -> str:
    return "".join(f"export {name}={quoted(value)}\n" for name, value in env.items() if NAME.fullmatch(name))


def with_env(code: str, env: dict[str, str], cwd: str | None) -> str:
    """The cell with variables and a directory of its own, which are as before afterwards."""
    names = [name for name in env if NAME.fullmatch(name)]
    before = "".join(f"__cloche_{n}_set=${{{n}+x}} __cloche_{n}=${{{n}-}}\n" for n in names) + exports(env)
    after = "".join(
        f'if [ -n "$__cloche_{n}_set" ]; then export {n}="$__cloche_{n}"; else unset {n}; fi\n' for n in names
    )
    if cwd is not None:
        before += f"__cloche_dir=$PWD\ncd -- {quoted(cwd)} || false\n"
        after += 'cd -- "$__cloche_dir"\n'
    if not before:
        return code
    return f"{before}eval {quoted(code)}\n__cloche_code=$?\n{after}(exit $__cloche_code)"


class App(IPKernelApp):
    def init_iopub(self, context: zmq.Context) -> None:
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)


def run(connection: str) -> None:
    assert threading.current_thread() is threading.main_thread()
    app = App.instance(connection_file=connection, kernel_class=BashKernel, log_level=50)
    app.initialize([])
    app.start()
