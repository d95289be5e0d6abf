"""The one error family of the server and its catalogue.

Every failure a client can see is a `ClocheError` with a stable dotted `code` from `CATALOGUE`. The
message is one sentence for a person: what, why, what to do. It never contains text that came from a
guest. Data for programs goes into `details`. HTTP statuses live in `api/errors.py`, nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """What a code promises. `retryable`: the same request may be sent again, nothing has happened."""

    summary: str
    retryable: bool = False
    action: str = ""


CATALOGUE: Final[Mapping[str, ErrorSpec]] = {
    # authentication
    "auth.missing_token": ErrorSpec("no bearer token was sent", action="send `Authorization: Bearer <token>`"),
    "auth.invalid_token": ErrorSpec(
        "the bearer token is unknown or revoked", action="make one with `cloche-server token create`"
    ),
    "auth.token_expired": ErrorSpec(
        "the bearer token has expired", action="make another one with `cloche-server token create`"
    ),
    "auth.forbidden": ErrorSpec(
        "the bearer token does not allow this", action="use one with the scope that `details` names"
    ),
    "token.not_found": ErrorSpec("there is no such token"),
    "token.too_many": ErrorSpec("the workspace has as many tokens as it may", action="revoke some first"),
    # the request itself
    "request.invalid": ErrorSpec("a field of the request is missing or wrong"),
    "request.too_large": ErrorSpec("the request body is larger than the server accepts"),
    "request.headers_too_large": ErrorSpec("the request line and headers are larger than the server accepts"),
    "request.timeout": ErrorSpec("the request body did not come in time"),
    "request.rate_limited": ErrorSpec(
        "too many requests came too fast; this one was not carried out", retryable=True, action="wait for `Retry-After`"
    ),
    "request.host_refused": ErrorSpec(
        "the server does not answer under the name in the Host header",
        action="use its address, or add the name to the setting `allowed_hosts`",
    ),
    "request.not_found": ErrorSpec("there is no such route"),
    "request.method_not_allowed": ErrorSpec("the route does not know this method"),
    "request.idempotency_conflict": ErrorSpec(
        "the idempotency key was used before with another body", action="use a fresh key"
    ),
    "not_implemented": ErrorSpec("this server release does not have the feature yet"),
    # sandboxes
    "sandbox.not_found": ErrorSpec("there is no such sandbox"),
    "sandbox.invalid_state": ErrorSpec("the sandbox is in a state that does not allow the call"),
    "sandbox.failed": ErrorSpec("the sandbox has failed", action="delete it and create another"),
    "sandbox.boot_failed": ErrorSpec("the sandbox could not be started; nothing is left of it"),
    "sandbox.stop_timeout": ErrorSpec(
        "the guest has not shut down in time; nothing was killed", action="wait for it, or stop it with `force`"
    ),
    "sandbox.name_taken": ErrorSpec(
        "another living sandbox has this name", action="choose another one, or say `if_exists`"
    ),
    "sandbox.capture_failed": ErrorSpec("the sandbox could not be captured; it goes on as it was"),
    "run.not_found": ErrorSpec("there is no such run, or its result is not kept any more"),
    "run.unknown_language": ErrorSpec(
        "the language is not known", action="`GET /v1/run/languages` lists what there is"
    ),
    "run.queue_full": ErrorSpec(
        "too many runs wait already; this one was not begun", retryable=True, action="try again later"
    ),
    "run.lost": ErrorSpec("the server ended while the run was under way; it was not run again"),
    "snapshot.not_found": ErrorSpec("there is no such snapshot"),
    "snapshot.corrupt": ErrorSpec("a file of the snapshot is missing or damaged", action="delete it and take another"),
    "snapshot.import_disabled": ErrorSpec(
        "this server takes no archives", action="ask its operator for the setting `max_import_mb`"
    ),
    "snapshot.incompatible": ErrorSpec(
        "the snapshot was taken under another CPU model, VMM or template than this host runs",
        action="use it where it was taken, or take another",
    ),
    "sandbox.unreachable": ErrorSpec("the agent in the sandbox does not answer"),
    "sandbox.busy": ErrorSpec(
        "too many calls run in the sandbox at once",
        retryable=True,
        action="wait for some to end, or use more sandboxes",
    ),
    "sshkey.not_found": ErrorSpec("there is no such SSH key"),
    "sshkey.too_many": ErrorSpec("the workspace has as many SSH keys as it may", action="delete some first"),
    "webhook.not_found": ErrorSpec("there is no such webhook"),
    "webhook.too_many": ErrorSpec("the workspace has as many webhooks as it may", action="delete one first"),
    "secret.not_found": ErrorSpec("there is no such secret"),
    "secret.too_many": ErrorSpec("the workspace has as many secrets as it may", action="delete one first"),
    "secret.unavailable": ErrorSpec(
        "the key of the secrets is missing or another one", action="its operator has to put the key back"
    ),
    "budget.exceeded": ErrorSpec(
        "the budget of the sandbox is used up", action="raise the budget, then resume the sandbox"
    ),
    "budget.not_found": ErrorSpec("the sandbox has no budget"),
    "isolation.unavailable": ErrorSpec("this host cannot keep the boundary that was asked for"),
    # templates
    "template.not_found": ErrorSpec("there is no such template"),
    "template.corrupt": ErrorSpec("a file of the template is damaged or missing", action="bake it again"),
    "template.bake_failed": ErrorSpec("baking the template failed"),
    "template.name_taken": ErrorSpec(
        "the name is that of a template of all workspaces, or an alias of another one", action="choose another one"
    ),
    "template.in_use": ErrorSpec("the template is in use by a sandbox"),
    "template.invalid_recipe": ErrorSpec("the recipe of the template is not valid"),
    # exec
    "exec.not_found": ErrorSpec("there is no such exec"),
    "exec.conflict": ErrorSpec("an exec with this id exists already"),
    "exec.timeout": ErrorSpec("the command ran into its timeout and was killed"),
    "exec.sandbox_gone": ErrorSpec("the sandbox went away while the command ran"),
    "exec.suspended": ErrorSpec(
        "the sandbox was hibernated while the command ran; the command goes on when it wakes up",
        action="follow the command by its id",
    ),
    "exec.too_large": ErrorSpec("the command or its environment is over a limit of the kernel"),
    "exec.user_not_found": ErrorSpec("the user does not exist in the sandbox"),
    "exec.invalid_cwd": ErrorSpec("the working directory cannot be used"),
    "exec.cancelled": ErrorSpec("the command was cancelled"),
    # processes
    "process.not_found": ErrorSpec("there is no such process"),
    "process.ended": ErrorSpec("the process has ended"),
    "process.lost": ErrorSpec("the process was lost when its machine was stopped"),
    "process.no_input": ErrorSpec(
        "the process has no input that is open", action="start it with `stdin` `pipe`, or with a terminal"
    ),
    "process.no_terminal": ErrorSpec("the process has no terminal", action="start it with `pty`"),
    # services
    "service.not_found": ErrorSpec("there is no such service"),
    "service.conflict": ErrorSpec("another service depends on it, or it would depend on itself"),
    "service.too_many": ErrorSpec("the sandbox has as many services as it may", action="delete one first"),
    # code
    "code.not_available": ErrorSpec(
        "the sandbox has no code interpreter", action="create one from the template code-interpreter"
    ),
    "code.context_not_found": ErrorSpec("there is no such context"),
    "code.too_many_contexts": ErrorSpec("the sandbox has as many contexts as it may", action="delete one first"),
    "code.not_waiting": ErrorSpec("no code of the context waits for input"),
    "code.kernel_failed": ErrorSpec(
        "the kernel could not be started", action="give the sandbox more memory, or delete contexts"
    ),
    "code.lost": ErrorSpec("the code interpreter went away, or does not answer"),
    # files
    "file.not_found": ErrorSpec("there is no such file or directory"),
    "file.is_directory": ErrorSpec("the path is a directory"),
    "file.not_a_directory": ErrorSpec("a part of the path is not a directory"),
    "file.not_a_regular_file": ErrorSpec("the path is not a regular file"),
    "file.exists": ErrorSpec("the path exists already"),
    "file.not_empty": ErrorSpec("the directory is not empty"),
    "file.permission_denied": ErrorSpec("the user may not do this"),
    "file.name_too_long": ErrorSpec("a name is longer than the file system allows"),
    "file.busy": ErrorSpec("the file is in use", retryable=True),
    "file.no_space": ErrorSpec("the disk of the sandbox is full"),
    "file.changed": ErrorSpec(
        "the file is not as the condition of the request says; nothing was written", action="read it again"
    ),
    "file.range_not_satisfiable": ErrorSpec("the file has no such part"),
    "file.bad_archive": ErrorSpec("what was sent is not an archive of the format, or it is damaged"),
    "file.unsafe_archive": ErrorSpec("an entry of the archive would be outside of the directory"),
    "file.archive_too_large": ErrorSpec("the archive is larger than allowed"),
    "file.too_many_watches": ErrorSpec(
        "there are more directories than may be watched", action="watch fewer of them, or without `recursive`"
    ),
    "file.not_a_link": ErrorSpec("the path is not a symbolic link"),
    "file.link_invalid": ErrorSpec("the signed link is not good for this", action="ask whoever gave it for another"),
    # git
    "git.missing": ErrorSpec("there is no git in the sandbox", action="use a template that has it, or install it"),
    "git.not_a_repository": ErrorSpec("the directory is not a git repository"),
    "git.not_found": ErrorSpec("git does not know the branch, revision, remote or path"),
    "git.exists": ErrorSpec("the branch or the target directory exists already"),
    "git.auth_failed": ErrorSpec("the remote wants other credentials", action="name a `secret` that is granted"),
    "git.no_grant": ErrorSpec(
        "the sandbox has no grant of the secret for the host of the remote", action="grant it when it is created"
    ),
    "git.conflict": ErrorSpec("git has met a conflict, or changes that would be lost"),
    "git.rejected": ErrorSpec("the remote has refused the push", action="pull first"),
    "git.nothing_to_commit": ErrorSpec("there is nothing to commit"),
    "git.unreachable": ErrorSpec("the remote cannot be reached"),
    "git.failed": ErrorSpec("git has failed; its output is in the details"),
    # ports and previews
    "port.closed": ErrorSpec(
        "nothing listens on the port of the sandbox", action="start the server, or look which ports are listed"
    ),
    "port.timeout": ErrorSpec("the server on the port does not answer"),
    "port.in_use": ErrorSpec("something listens on the port, or at the path, already", action="take another one"),
    "port.bad_answer": ErrorSpec("the server on the port does not answer as HTTP/1.1 says"),
    "port.not_found": ErrorSpec("nothing was said about this port"),
    "port.domain_taken": ErrorSpec("the domain leads to another port", action="delete that port first"),
    "preview.unauthorized": ErrorSpec("the preview asks for a token or a password"),
    "preview.path_forbidden": ErrorSpec("the token is not for this path"),
    # guest and host
    "guest.exhausted": ErrorSpec("the sandbox has no process, memory or descriptor left"),
    "guest.protocol": ErrorSpec("the agent in the sandbox answered with nonsense"),
    "guest.error": ErrorSpec("an operation inside the sandbox failed"),
    # the network
    "network.unavailable": ErrorSpec(
        "the network of the sandbox cannot be made or changed now", retryable=True, action="try again"
    ),
    "network.off": ErrorSpec(
        "this server gives its sandboxes no network", action="the operator can start it with `--network on`"
    ),
    "capacity.unavailable": ErrorSpec(
        "the host has no room for another sandbox now", retryable=True, action="try again later"
    ),
    "host.disk_full": ErrorSpec("the disk of the host is full", retryable=True),
    "host.unsupported": ErrorSpec("this host cannot run sandboxes"),
    "server.shutting_down": ErrorSpec("the server is shutting down", retryable=True),
    "internal": ErrorSpec("an internal error; the log has more under the request id"),
}


class ClocheError(Exception):
    """A failure with a code of the catalogue.

    `details` is JSON-ready data. `retry_after` (seconds) is set where waiting helps and nothing was made.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        if code not in CATALOGUE:
            raise ValueError(f"error code {code!r} is not in the catalogue")
        super().__init__(message)
        self.code = code
        self.message = message
        self.details: dict[str, Any] = dict(details or {})
        self.retry_after = retry_after

    @property
    def retryable(self) -> bool:
        return CATALOGUE[self.code].retryable

    def __repr__(self) -> str:
        return f"ClocheError({self.code!r}, {self.message!r})"
