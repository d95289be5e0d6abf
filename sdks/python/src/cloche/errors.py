"""Every failure of the client is a `ClocheError`.

    ClocheError
      ConfigError                 address or key missing or malformed
      TransportError
        ConnectFailed             no connection; nothing was sent
        ConnectionLost            the connection ended before the answer did
          RequestTimeout          … because the server was silent for too long (also a TimeoutError)
      AuthError                   TokenExpired, Forbidden
      NotFoundError               SandboxNotFound, TemplateNotFound, ExecNotFound, FileNotFound
      InvalidRequestError
      ConflictError               InvalidStateError, NameTaken, FileExists, …
      BudgetExceeded              the sandbox has used up its budget and is paused
      CapacityError               no room now; nothing was made
      RateLimitError              too many requests; this one was not carried out
      UnsupportedError            this server, or this host, cannot do it
      SandboxGone                 the sandbox died or has failed
      CommandError                CommandFailed, CommandTimeout, CommandCancelled
      TimeoutError                CommandTimeout, RequestTimeout, WaitTimeout (also the builtin TimeoutError)
      FileError                   FileNotFound, IsADirectory, PermissionDenied, …
      NetworkError                the network, its policy or its secrets cannot be had as asked for
      GitError                    git has failed in the sandbox; its code says why
      PortError                   nothing listens on a port, or what does cannot be used
      TemplateError
      SnapshotError               SnapshotNotFound, SnapshotCorrupt, SnapshotIncompatible
      ServerError                 GuestError, CaptureFailed, ProtocolError, …

`_codes` maps each code of the server's catalogue to its class. Codes of failures that the client itself
finds begin with `client.` and never come from a server.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import ExecResult


class ClocheError(Exception):
    """A failure. `code` is stable and meant for programs, `message` for people.

    `status` is the HTTP status (0 where there was no answer). `retryable` says that the same request
    may be sent again because nothing has happened. `retry_after` is in seconds, where the server told it.
    """

    default_code: str = "client.error"

    def __init__(
        self,
        message: str,
        code: str = "",
        status: int = 0,
        retryable: bool = False,
        request_id: str = "",
        details: Mapping[str, Any] | None = None,
        *,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.status = status
        self.retryable = retryable
        self.request_id = request_id
        self.details: dict[str, Any] = dict(details or {})
        self.retry_after = retry_after

    def __str__(self) -> str:
        suffix = f" [{self.code}]" if not self.request_id else f" [{self.code}, request {self.request_id}]"
        return self.message + suffix

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, code={self.code!r}, status={self.status})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(kind: type[ClocheError], message: str, state: dict[str, Any]) -> ClocheError:
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(state)
    return error


class ConfigError(ClocheError):
    """The address or the key of the server is missing or malformed."""

    default_code = "client.config"


# --- the connection


class TransportError(ClocheError):
    """The server could not be reached, or the connection to it broke."""

    default_code = "client.transport"
    exec_id: str = ""


class ConnectFailed(TransportError):
    """There was no connection; not a byte of the request was sent."""

    default_code = "client.connect_failed"


class ConnectionLost(TransportError):
    """The connection ended before the answer did; the request may or may not have had its effect.

    `exec_id` names the command that was running. What was started with `detach=True` (or by `start`)
    goes on, and `sandbox.attach(error.exec_id)` finds it again.
    """

    default_code = "client.connection_lost"


class TimeoutError(ClocheError, builtins.TimeoutError):
    """Something took longer than it may."""

    default_code = "client.timeout"


class RequestTimeout(TimeoutError, ConnectionLost):
    """The server was silent for longer than the client waits."""

    default_code = "client.request_timeout"


class WaitTimeout(TimeoutError):
    """The wait is over, what was waited for is not: a command goes on running, a state may still come."""

    default_code = "client.wait_timeout"


# --- the request


class AuthError(ClocheError):
    """The key is missing, unknown or revoked, or does not allow the call."""


class TokenExpired(AuthError):
    """The key has expired; make another one."""


class Forbidden(AuthError):
    """The key is good, but not for this: its scope is too small, or it is for one sandbox."""

    @property
    def scope(self) -> str:
        """The scope that the call needs."""
        return str(self.details.get("scope") or "")


class InvalidRequestError(ClocheError):
    """The server refuses a field of the request, or the request as a whole."""


class NotFoundError(ClocheError):
    """What the request names does not exist."""


class SandboxNotFound(NotFoundError):
    """There is no such sandbox (any more)."""


class TemplateNotFound(NotFoundError):
    """There is no such template."""


class ExecNotFound(NotFoundError):
    """There is no such command, or its record is no longer kept."""


class ConflictError(ClocheError):
    """The request contradicts what is there."""


class InvalidStateError(ConflictError):
    """The sandbox is in a state that does not allow the call."""


class NameTaken(ConflictError):
    """Another living sandbox has this name; see `if_exists` of create."""

    @property
    def sandbox_id(self) -> str:
        """The sandbox that has it."""
        return str(self.details.get("id") or "")


class BudgetExceeded(ClocheError):
    """The budget of the sandbox is used up: it is paused, and deleted soon unless `set_budget` raises it."""

    @property
    def limit(self) -> str:
        """The limit that was reached, such as `cpu_seconds`."""
        return str(self.details.get("limit") or "")


class CapacityError(ClocheError):
    """The server has no room now; nothing was made. `retry_after` says when to try again."""


class NetworkError(ClocheError):
    """The network of a sandbox, its policy or its secrets cannot be had as asked for."""


class RateLimitError(ClocheError):
    """Too many requests came too fast, and this one was not carried out. `retry_after` says when to send it again."""


class UnsupportedError(ClocheError):
    """This server release or this host does not have the feature."""


class IsolationUnavailable(UnsupportedError):
    """The host cannot keep the isolation boundary that was asked for."""


class TemplateError(ClocheError):
    """The template is not ready, is damaged, or its recipe is wrong."""


class SnapshotError(ClocheError):
    """A snapshot cannot be used."""


class SnapshotNotFound(SnapshotError, NotFoundError):
    """There is no such snapshot (any more)."""


class SnapshotCorrupt(SnapshotError):
    """A file of the snapshot is missing or damaged; nothing was started from it."""


class SnapshotIncompatible(SnapshotError, ConflictError):
    """The snapshot was taken under another CPU model, VMM or template; nothing was started from it."""


class SandboxGone(ClocheError):
    """The sandbox went away or has failed; make another one."""


# --- commands


class CommandError(ClocheError):
    """A command did not end well. `result` is what it yielded: output, exit code, cause."""

    result: ExecResult[str] | ExecResult[bytes] | None = None

    @property
    def stdout(self) -> str | bytes:
        """The output until the end."""
        return self.result.stdout if self.result is not None else ""

    @property
    def stderr(self) -> str | bytes:
        """The error output until the end."""
        return self.result.stderr if self.result is not None else ""

    @property
    def exit_code(self) -> int | None:
        """The exit code, where there is one."""
        return self.result.exit_code if self.result is not None else None


class CommandFailed(CommandError):
    """Raised by `ExecResult.check()`: the exit code is not 0, or the command was killed."""

    default_code = "client.command_failed"


class CommandTimeout(CommandError, TimeoutError):
    """The command ran into its timeout and was killed, its children too; `result` has the output so far."""

    default_code = "exec.timeout"

    @property
    def timeout_seconds(self) -> float | None:
        """The limit that was hit."""
        value = self.details.get("timeout_seconds")
        return float(value) if isinstance(value, int | float) else None


class CommandCancelled(CommandError):
    """The command was cancelled."""


# --- files


class FileError(ClocheError):
    """A file operation in the sandbox failed."""


class FileNotFound(FileError, NotFoundError):
    """There is no such file or directory in the sandbox."""


class IsADirectory(FileError):
    """The path is a directory."""


class NotADirectory(FileError):
    """A part of the path is not a directory."""


class NotARegularFile(FileError):
    """The path is a device, a socket or a pipe."""


class FileExists(FileError, ConflictError):
    """The path exists already."""


class DirectoryNotEmpty(FileError, ConflictError):
    """The directory is not empty."""


class PermissionDenied(FileError):
    """The user in the sandbox may not do this."""


class NameTooLong(FileError):
    """A name is longer than the file system allows."""


class FileBusy(FileError):
    """The file is in use."""


class NoSpace(FileError):
    """The disk of the sandbox is full."""


# --- ports


class FileChanged(FileError, ConflictError):
    """The file is not as a condition of the write said; nothing was written."""


class ArchiveError(FileError):
    """An archive was refused. `details["done"]` counts what had been unpacked before."""


class GitError(ClocheError):
    """git has failed in the sandbox; `code` says why, `details["output"]` what it said."""


class PortError(ClocheError):
    """Nothing listens on a port of the sandbox, or what does cannot be used."""


# --- the server


class ServerError(ClocheError):
    """The server, or something behind it, failed."""


class BootFailed(ServerError):
    """The sandbox could not be started; nothing is left of it."""


class CaptureFailed(ServerError):
    """The sandbox could not be captured for a fork, a snapshot or hibernation; it goes on as it was."""


class SandboxUnreachable(ServerError):
    """The agent in the sandbox does not answer."""


class GuestError(ServerError):
    """An operation inside the sandbox failed."""


class ServerUnavailable(ServerError):
    """The server is shutting down."""


class ProtocolError(ServerError):
    """The answer is not what this API promises; is the address that of a Cloche server?"""

    default_code = "client.protocol"
