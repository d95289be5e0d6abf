"""Kernels: processes that the zygote forks, and the Jupyter sockets that lead to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from accounts import account
from jupyter_client.session import Session

HERE = Path(__file__).resolve().parent
#: A kernel has so many seconds for its first answer: it may have to be loaded in an emulated machine.
START_SECONDS = 120.0
#: Between the reply to a cell and the word that the kernel is idle, behind which there is no more output (seconds).
IDLE_SECONDS = 10.0
_ANY = "*"
LANGUAGES = {"python": "python", "bash": "bash", "javascript": "deno", "typescript": "deno"}
_ARGV = {"deno": ["deno", "jupyter", "--kernel", "--conn"]}
Handler = Callable[[str, dict[str, Any]], None]


class Died(Exception):
    """The kernel has ended; `status` is its exit code, or minus the number of a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the kernel ended with {status}")
        self.status = status


def languages() -> list[str]:
    have_deno = shutil.which("deno") is not None
    return [name for name, kind in LANGUAGES.items() if kind != "deno" or have_deno]


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

    def __init__(self, zygote: Zygote, context: zmq.asyncio.Context, root: Path, kind: str) -> None:
        self.kind = kind
        self.pid = 0
        self.count = 0
        self._zygote = zygote
        self._context = context
        self._folder = Path(tempfile.mkdtemp(prefix="k", dir=root))
        self._session = Session(key=os.urandom(16).hex().encode(), username="cloche")
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._death: asyncio.Future[int] | None = None
        self._current = ""
        self._handler: Handler | None = None
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._idle: asyncio.Future[None] | None = None
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
            "cwd": cwd or who.home, "strict": strict, "argv": [*_ARGV.get(self.kind, []), str(connection)],
        }  # fmt: skip
        self.pid, self._death = await self._zygote.fork(request)
        for name, kind in (("shell", zmq.DEALER), ("control", zmq.DEALER), ("stdin", zmq.DEALER), ("iopub", zmq.SUB)):
            made = self._context.socket(kind)
            made.linger = 0
            made.setsockopt(zmq.RCVHWM, 0)
            if name == "iopub":
                made.subscribe(b"")
            else:
                made.identity = self._session.bsession
            host, port = info["ip"], info[f"{name}_port"]
            made.connect(f"tcp://{host}:{port}" if info["transport"] == "tcp" else f"ipc://{host}-{port}")
            self._sockets[name] = made
        self._tasks = [asyncio.create_task(self._listen(name)) for name in self._sockets]
        try:
            await asyncio.wait_for(self._greet(), START_SECONDS)
        except BaseException:
            await self.aclose()
            raise

    def _addresses(self) -> dict[str, Any]:
        names = [f"{name}_port" for name in ("shell", "iopub", "stdin", "control", "hb")]
        base = {"key": self._session.key.decode(), "signature_scheme": "hmac-sha256", "kernel_name": self.kind}
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
        self._begin(None)
        self._current = _ANY
        assert self._reply is not None
        await self._send("shell", "kernel_info_request", {})
        await self.alive(asyncio.shield(self._reply))
        pause = 0.02
        while not self._heard:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
            await self._send("shell", "kernel_info_request", {})

    async def alive(self, work: Any) -> Any:
        """The result of `work`, unless the kernel ends before. Raises `Died`."""
        assert self._death is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Died(self._death.result())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task

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
            await self._send("control", "interrupt_request", {})
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self._sockets.values():
            one.close(0)
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
        if self.kind == "deno":
            await self._surround(extra)
        self._begin(handler)
        assert self._reply is not None
        assert self._idle is not None
        content = {
            "code": code, "silent": silent, "store_history": stored and not silent, "user_expressions": {},
            "allow_stdin": stdin, "stop_on_error": False,
        }  # fmt: skip
        try:
            self._current = await self._send("shell", "execute_request", content, {"cloche": extra})
            reply: dict[str, Any] = await self.alive(self._reply)
            with contextlib.suppress(TimeoutError):
                await self.alive(asyncio.wait_for(asyncio.shield(self._idle), IDLE_SECONDS))
            self.count = max(self.count, reply.get("execution_count") or 0)
            return reply
        finally:
            self._current, self._handler, self._asked = "", None, None

    async def _surround(self, extra: dict[str, Any]) -> None:
        """Deno has no way to be told beside code."""
        if extra.get("env") or extra.get("cwd"):
            env, cwd = json.dumps(extra.get("env") or {}), json.dumps(extra.get("cwd"))
            code = f"for (const [k, v] of Object.entries({env})) Deno.env.set(k, v); if ({cwd}) Deno.chdir({cwd});"
            await self.execute(code, lambda *_: None, extra={}, stdin=False, silent=True)

    async def answer(self, text: str) -> bool:
        """Whether somebody has waited for it."""
        asked, self._asked = self._asked, None
        if asked is None:
            return False
        await self._send("stdin", "input_reply", {"value": text}, parent=asked)
        return True

    def _begin(self, handler: Handler | None) -> None:
        loop = asyncio.get_running_loop()
        self._handler, self._reply, self._idle = handler, loop.create_future(), loop.create_future()

    async def _send(
        self, name: str, kind: str, content: dict[str, Any], metadata: Any = None, parent: Any = None
    ) -> str:
        message = self._session.msg(kind, content, parent=parent, metadata=metadata)
        message["header"]["msg_id"] = message["msg_id"] = uuid.uuid4().hex
        await self._sockets[name].send_multipart(self._session.serialize(message))
        return message["msg_id"]

    async def _listen(self, name: str) -> None:
        """Reads always, whatever is done with it: a kernel that cannot send would drop what it has to say."""
        while True:
            parts = await self._sockets[name].recv_multipart()
            try:
                _, parts = self._session.feed_identities(parts)
                message = self._session.deserialize(parts)
            except (ValueError, TypeError, KeyError):
                continue
            self._heard = self._heard or name == "iopub"
            if self._current and self._current in {_ANY, message["parent_header"].get("msg_id")}:
                self._take(name, message)

    def _take(self, name: str, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if name == "shell":
            if self._reply is not None and not self._reply.done():
                self._reply.set_result(content)
        elif name == "stdin" and kind == "input_request":
            self._asked = message
            self._tell("input_request", content)
        elif name == "iopub" and kind == "status":
            if content.get("execution_state") == "idle" and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
        elif name == "iopub":
            self._tell(kind, content)

    def _tell(self, kind: str, content: dict[str, Any]) -> None:
        if self._handler is not None:
            self._handler(kind, content)


def oom_kills() -> int:
    """How many processes of this service were killed for want of memory."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().split("::", 1)[1].lstrip("/")
        text = Path("/sys/fs/cgroup", group, "memory.events").read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def clock() -> float:
    return time.monotonic()
