"""Kernels: processes that the zygote forks, and the Jupyter sockets that lead to them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from accounts import account
from languages import ARGV, surroundings
from messages import Channel, Message, Signer

HERE = Path(__file__).resolve().parent
#: A kernel has so many seconds for its first answer: it may have to be loaded in an emulated machine.
START_SECONDS = 120.0
#: Between the reply to a cell and the word that the kernel is idle, behind which there is no more output (seconds).
IDLE_SECONDS = 10.0
_ANY = "*"
Handler = Callable[[str, dict[str, Any]], None]


class Died(Exception):
    """The kernel has ended; `status` is its exit code, or minus the number of a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the kernel ended with {status}")
        self.status = status


class Zygote:
    """The process that forks kernels."""

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._pids: asyncio.Queue[int] = asyncio.Queue()
        self._lock = asyncio.Lock()
        self._deaths: dict[int, asyncio.Future[int]] = {}
        self._early: dict[int, int] = {}
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()

        def prepare() -> None:
            os.dup2(theirs.fileno(), 3)

        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-s",
            str(HERE / "zygote.py"),
            preexec_fn=prepare,
            pass_fds=(3,),
            stdin=asyncio.subprocess.DEVNULL,
        )
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        first = json.loads(await asyncio.wait_for(reader.readline(), START_SECONDS))
        assert "ready" in first
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            data = json.loads(line)
            if "pid" in data:
                self._pids.put_nowait(data["pid"])
            elif (death := self._deaths.pop(data["died"], None)) is not None:
                death.set_result(data["status"])
            else:
                self._early[data["died"]] = data["status"]
        # Without it no kernel can be started, and none be known to have ended: whoever calls next starts all anew.
        os._exit(1)

    async def fork(self, request: dict[str, Any]) -> tuple[int, asyncio.Future[int]]:
        assert self._writer is not None
        async with self._lock:
            self._writer.write(json.dumps(request).encode() + b"\n")
            await self._writer.drain()
            pid = await self._pids.get()
        death: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if pid in self._early:
            death.set_result(self._early.pop(pid))
        else:
            self._deaths[pid] = death
        return pid, death

    async def aclose(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Kernel:
    """One kernel. It is stopped and continued as its reader wishes."""

    def __init__(self, zygote: Zygote, context: zmq.Context[Any], root: Path, kind: str) -> None:
        self.kind = kind
        self.pid = 0
        self.count = 0
        self._zygote = zygote
        self._context = context
        self._folder = Path(tempfile.mkdtemp(prefix="k", dir=root))
        self._signer = Signer()
        self._channels: dict[str, Channel] = {}
        self._death: asyncio.Future[int] | None = None
        self._current = ""
        self._handler: Handler | None = None
        self._reply: dict[str, Any] | None = None
        self._is_idle = False
        #: The reply, once all output is there.
        self._done: asyncio.Future[dict[str, Any]] | None = None
        self._late: asyncio.Handle | None = None
        self._asked: dict[str, Any] | None = None
        #: Something has come by `iopub`, so that nothing is lost there from now on.
        self._heard = False

    # ------------------------------------------------------------ life

    async def start(self, *, user: str | None, env: dict[str, str], cwd: str | None, strict: bool = False) -> None:
        """Raises `Died`, `TimeoutError`, `KeyError` for a user that does not exist. A directory that cannot be entered
        is the root's, or with `strict` the end of the kernel with `NO_DIRECTORY`."""
        who = account(user)
        info = self._addresses()
        connection = self._folder / "connection.json"
        connection.write_text(json.dumps(info))
        for path in (self._folder, connection):
            if who.uid != os.getuid():
                os.chown(path, who.uid, who.gid)
        connection.chmod(0o600)
        request = {
            "kind": self.kind, "connection": str(connection), "folder": str(self._folder), "user": user, "env": env,
            "cwd": cwd or who.home, "strict": strict, "argv": [*ARGV.get(self.kind, []), str(connection)],
        }  # fmt: skip
        self.pid, self._death = await self._zygote.fork(request)
        self._death.add_done_callback(self._has_died)
        for name, kind in (("shell", zmq.DEALER), ("control", zmq.DEALER), ("stdin", zmq.DEALER), ("iopub", zmq.SUB)):
            host, port = info["ip"], info[f"{name}_port"]
            address = f"tcp://{host}:{port}" if info["transport"] == "tcp" else f"ipc://{host}-{port}"
            identity = self._signer.session.encode()
            self._channels[name] = Channel(self._context, kind, address, identity, partial(self._heard_on, name))
        try:
            await asyncio.wait_for(self._greet(), START_SECONDS)
        except BaseException:
            await self.aclose()
            raise

    def _addresses(self) -> dict[str, Any]:
        names = [f"{name}_port" for name in ("shell", "iopub", "stdin", "control", "hb")]
        base = {"key": self._signer.key.decode(), "signature_scheme": "hmac-sha256", "kernel_name": self.kind}
        if self.kind != "deno":
            return {
                **base,
                "transport": "ipc",
                "ip": str(self._folder / "s"),
                **{n: i + 1 for i, n in enumerate(names)},
            }
        # It knows no other way. The ports are free now, and nobody else is likely to take them before it does.
        held = [socket.create_server(("127.0.0.1", 0)) for _ in names]
        ports = dict(zip(names, [one.getsockname()[1] for one in held], strict=True))
        for one in held:
            one.close()
        return {**base, "transport": "tcp", "ip": "127.0.0.1", **ports}

    async def _greet(self) -> None:
        """Until it has answered, and its output comes through as well: a subscription takes a moment."""
        done = self._begin(None)
        self._current, self._is_idle = _ANY, True
        self._send("shell", "kernel_info_request", {})
        await done
        pause = 0.02
        while not self._heard:
            await asyncio.sleep(pause)
            if self._death is not None and self._death.done():
                raise Died(self._death.result())
            pause = min(2 * pause, 1.0)
            self._send("shell", "kernel_info_request", {})

    @property
    def dead(self) -> bool:
        return self._death is None or self._death.done()

    def signal(self, number: int) -> None:
        """To the kernel and to the programs it waits for."""
        if not self.dead:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def pause(self, stop: bool) -> None:
        if not self.dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGSTOP if stop else signal.SIGCONT)

    async def interrupt(self) -> None:
        self.pause(False)
        if self.kind == "deno":
            self._send("control", "interrupt_request", {})
        elif self.kind == "bash":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)
        else:
            self.signal(signal.SIGINT)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._death is not None:
            await asyncio.wait({self._death}, timeout=10)

    async def aclose(self) -> None:
        await self.kill()
        for one in self._channels.values():
            one.close()
        self._channels.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ cells

    async def execute(
        self,
        code: str,
        handler: Handler,
        *,
        extra: dict[str, Any],
        stdin: bool,
        silent: bool = False,
        stored: bool = True,
    ) -> dict[str, Any]:
        """The reply, once all output of the cell has gone to `handler`. Raises `Died`. `stored`: it is in the history,
        and counts."""
        env, cwd = extra.get("env") or {}, extra.get("cwd")
        if self.kind not in ARGV or not (env or cwd):
            return await self._cell(code, handler, extra=extra, stdin=stdin, silent=silent, stored=stored)
        before, after = surroundings(self.kind, env, cwd)
        try:
            reply = await self._quietly(before)
            if reply.get("status") != "ok":
                return reply
            return await self._cell(code, handler, extra={}, stdin=stdin, silent=silent, stored=stored)
        finally:
            with contextlib.suppress(Died):
                await self._quietly(after)

    async def _quietly(self, code: str) -> dict[str, Any]:
        # R's kernel says of a silent cell that all was well, whatever came of it.
        return await self._cell(code, lambda *_: None, extra={}, stdin=False, silent=self.kind != "r", stored=False)

    async def _cell(
        self, code: str, handler: Handler, *, extra: dict[str, Any], stdin: bool, silent: bool, stored: bool
    ) -> dict[str, Any]:
        done = self._begin(handler)
        content = {
            "code": code, "silent": silent, "store_history": stored and not silent, "user_expressions": {},
            "allow_stdin": stdin, "stop_on_error": False,
        }  # fmt: skip
        try:
            self._current = self._send("shell", "execute_request", content, {"cloche": extra})
            reply = await done
            self.count = max(self.count, reply.get("execution_count") or 0)
            return reply
        finally:
            self._current, self._handler, self._asked = "", None, None
            if self._late is not None:
                self._late.cancel()
                self._late = None

    async def answer(self, text: str) -> bool:
        """Whether somebody has waited for it."""
        asked, self._asked = self._asked, None
        if asked is None:
            return False
        self._send("stdin", "input_reply", {"value": text}, parent=asked)
        return True

    def _begin(self, handler: Handler | None) -> asyncio.Future[dict[str, Any]]:
        """What comes from now on goes to `handler`. The reply is the result; `Died` when the kernel ends before."""
        self._handler, self._reply, self._is_idle = handler, None, False
        self._done = asyncio.get_running_loop().create_future()
        if self._death is not None and self._death.done():
            self._has_died(self._death)
        return self._done

    def _has_died(self, death: asyncio.Future[int]) -> None:
        if self._done is not None and not self._done.done() and not death.cancelled():
            self._done.set_exception(Died(death.result()))

    def _end(self) -> None:
        if self._done is not None and not self._done.done() and self._reply is not None:
            self._done.set_result(self._reply)

    def _send(self, name: str, kind: str, content: dict[str, Any], metadata: Any = None, parent: Any = None) -> str:
        message_id, parts = self._signer.encode(kind, content, metadata, parent)
        if name in self._channels:  # else it has been closed, and whoever waits is told by the end of the kernel
            self._channels[name].send(parts)
        return message_id

    def _heard_on(self, name: str, parts: list[bytes]) -> None:
        message = self._signer.decode(parts)
        if message is None:
            return
        self._heard = self._heard or name == "iopub"
        if self._current and self._current in {_ANY, message.parent_id}:
            self._take(name, message)

    def _take(self, name: str, message: Message) -> None:
        kind, content = message.kind, message.content
        if name == "shell":
            self._replied(content)
        elif name == "stdin" and kind == "input_request":
            self._asked = message.header
            self._tell("input_request", content)
        elif name == "iopub" and kind == "status":
            if content.get("execution_state") == "idle":
                self._is_idle = True
                self._end()
        elif name == "iopub":
            self._tell(kind, content)

    def _replied(self, content: dict[str, Any]) -> None:
        if self._reply is not None:
            return
        self._reply = content
        told = content.get("cloche")
        if self._is_idle or (isinstance(told, dict) and told.get("said") is False):
            self._end()
        else:
            self._late = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end)

    def _tell(self, kind: str, content: dict[str, Any]) -> None:
        if self._handler is not None:
            self._handler(kind, content)


@functools.cache
def _memory_events() -> int:
    """A descriptor of the events of the memory of this service, which always are those of one control group."""
    group = Path("/proc/self/cgroup").read_text().strip().split("::", 1)[1].lstrip("/")
    return os.open(Path("/sys/fs/cgroup", group, "memory.events"), os.O_RDONLY | os.O_CLOEXEC)


def oom_kills() -> int:
    """How many processes of this service were killed for want of memory."""
    try:
        return int(os.pread(_memory_events(), 4096, 0).split(b"oom_kill ", 1)[1].split(None, 1)[0])
    except (OSError, ValueError, IndexError):
        return 0


def clock() -> float:
    return time.monotonic()
