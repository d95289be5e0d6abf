"""What a cell says by `iopub`, and what its reply says instead.

Each message by `iopub` goes from the cell to a thread, and from that to one of ZeroMQ's. Most cells say nothing but
what their last expression is, so that goes with the reply; and where nothing was said, nobody need be told that all is
said.
"""

from __future__ import annotations

import dis
import sys
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell

#: What shows the value of an expression: until Python 3.11, and since 3.12.
_SHOWS = {dis.opmap[name] for name in ("PRINT_EXPR", "CALL_INTRINSIC_1") if name in dis.opmap}
#: Whose functions are called behind each cell.
_OURS = ("IPython.", "ipykernel.", "matplotlib_inline.")
_HOOK, _RUN = DisplayHook.__call__.__code__, InteractiveShell.run_code.__code__


class Iopub:
    """Of a kernel; made in the thread that runs its cells."""

    def __init__(self, kernel: Any) -> None:
        self._session, self._shell, self._socket = kernel.session, kernel.shell, kernel.iopub_socket
        self._send = kernel.iopub_thread.send_multipart
        kernel.iopub_thread.send_multipart = self._say
        self._hooks = kernel.shell.displayhook._hooks
        kernel.shell.displayhook.register_hook(self._hold)
        #: The message with the value of the last expression. It is taken out by whoever sends it.
        self._held: list[dict[str, Any]] = []
        self._holds = False
        self._said = False
        self._is_told = False

    def begin(self, ours: bool) -> None:
        """A cell; `ours`: the bridge reads the reply."""
        self._held.clear()
        self._holds, self._said, self._is_told = ours, False, False

    def end(self) -> dict[str, Any]:
        """For the reply, when the cell and all its output are done: `result`, a MIME bundle, and `said`, whether a
        message of the cell may have gone by `iopub`."""
        self._holds = False
        told: dict[str, Any] = {}
        if (message := self._taken()) is not None:
            told["result"] = message["content"]["data"]
        told["said"] = self._said
        self._is_told = not self._said
        return told

    def is_told(self) -> bool:
        """Once, whether the reply has told that there is nothing by `iopub`."""
        told, self._is_told = self._is_told, False
        return told

    def _hold(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if not self._holds or len(self._hooks) > 1 or not is_last(self._shell) or has_more(self._shell):
            return message
        self._held.append(message)
        return None

    def _taken(self) -> dict[str, Any] | None:
        try:
            return self._held.pop()
        except IndexError:
            return None

    def _say(self, *args: Any, **options: Any) -> None:
        """In any thread. What was said before goes before: a figure is shown after the last expression."""
        if (message := self._taken()) is not None:
            self._session.send(self._socket, message, ident=self._shell.displayhook.topic)
        self._said = True
        self._send(*args, **options)


def is_last(shell: Any) -> bool:
    """Whether what is being shown is the value of the last expression of a cell, behind which no code of it runs."""
    if shell.ast_node_interactivity not in {"last_expr", "last_expr_or_assign"}:
        return False
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _HOOK:
        frame = frame.f_back  # type: ignore[assignment]
    cell = frame and frame.f_back
    above = cell and cell.f_back
    if not cell or not above or above.f_code is not _RUN or cell.f_code.co_code[cell.f_lasti] not in _SHOWS:
        return False
    # A cell may run another one.
    while (above := above.f_back) is not None:
        if above.f_code is _RUN:
            return False
    return True


def has_more(shell: Any) -> bool:
    """Whether something is done when the cell has ended that may take long, or end the kernel: figures are drawn, or
    something is called that a program wants to be."""
    figures = sys.modules.get("matplotlib._pylab_helpers")
    if figures is not None and figures.Gcf.figs:
        return True
    called = (one for event in ("post_execute", "post_run_cell") for one in shell.events.callbacks[event])
    return not all(getattr(one, "__module__", "").startswith(_OURS) for one in called)
