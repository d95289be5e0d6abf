"""What git is asked by its arguments, and what it answers for programs. Pure: nothing is run here.

Its output comes from a guest: whatever does not have the form that git documents is refused, never guessed at.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from cloche_server.core.errors import ClocheError

MAX_LOG: Final = 1000
_REMOTE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")
#: git-check-ref-format(1)
_NOT_IN_REF: Final = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|^[./-]|[./]$|^@$")
_NOT_IN_REVISION: Final = re.compile(r"[\x00-\x1f\x7f]|^-")
_SCHEMES: Final = frozenset({"https", "http", "ssh", "git", "file"})
_HASH: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """`index` and `worktree`: one letter each, as git-status(1) has them, `.` for no change. `kind`: changed, renamed,
    unmerged or untracked."""

    path: bytes
    kind: str
    index: str
    worktree: str
    old_path: bytes | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """`branch` None: detached. `head` None: nothing was committed yet."""

    branch: str | None
    head: str | None
    upstream: str | None
    ahead: int
    behind: int
    files: Sequence[ChangedFile] = ()
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """Times are Unix seconds."""

    hash: str
    parents: Sequence[str]
    author: str
    author_email: str
    authored_at: int
    committer: str
    committer_email: str
    committed_at: int
    message: str


@dataclass(frozen=True, slots=True)
class Branch:
    name: str
    head: str
    upstream: str | None
    current: bool
    remote: bool


@dataclass(frozen=True, slots=True)
class DiffFile:
    """`added`, `removed` lines; None for a binary file."""

    path: bytes
    added: int | None
    removed: int | None
    old_path: bytes | None = None


@dataclass(frozen=True, slots=True)
class PushedRef:
    """`status`: up_to_date, new, fast_forward, forced, deleted or rejected."""

    source: str
    target: str
    status: str


@dataclass(frozen=True, slots=True)
class Author:
    name: str
    email: str


@dataclass(frozen=True, slots=True)
class Access:
    """With which secret a remote is spoken to: it is put in on the host. `username` as the remote wants it."""

    secret: str
    username: str = field(default="x-access-token")


def _invalid(name: str, sentence: str) -> ClocheError:
    return ClocheError("request.invalid", sentence, details={"field": name})


def check_branch(name: str, where: str = "branch") -> str:
    """Raises `request.invalid`."""
    if not 1 <= len(name) <= 244 or _NOT_IN_REF.search(name):
        raise _invalid(where, f"{where} is not a name that git allows for a branch")
    return name


def check_revision(text: str, where: str = "ref") -> str:
    """Anything that git may know, but an option. Raises `request.invalid`."""
    if not 1 <= len(text) <= 1024 or _NOT_IN_REVISION.search(text):
        raise _invalid(where, f"{where} is the name of a commit, and begins with no dash")
    return text


def check_remote(name: str) -> str:
    """Raises `request.invalid`."""
    if not _REMOTE.fullmatch(name) or ".." in name:
        raise _invalid("remote", "remote is the name of a remote of the repository, as `origin`")
    return name


def check_url(url: str) -> str:
    """Raises `request.invalid`; its sentence does not repeat what may hold a password."""
    if len(url) > 2048 or not url.isprintable() or url.startswith("-"):
        raise _invalid("url", "url is the address of a repository")
    if url.startswith("/"):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _invalid("url", "url is the address of a repository") from None
    if parts.scheme not in _SCHEMES:
        raise _invalid("url", f"url begins with {', '.join(sorted(_SCHEMES))}, or is an absolute path in the sandbox")
    if parts.password is not None or (parts.username is not None and parts.scheme in {"http", "https"}):
        raise _invalid("url", "a url holds no credentials: they would stay in the sandbox; name a `secret` instead")
    return url


def host_of(url: str) -> str | None:
    """The host that HTTPS goes to; None for any other way."""
    try:
        parts = urlsplit(url)
        return parts.hostname if parts.scheme == "https" and parts.port in (None, 443) else None
    except ValueError:
        return None


def auth_env(host: str, username: str, placeholder: str) -> dict[str, str]:
    """The environment that makes git send credentials to one host. It holds the placeholder, and no file ever does."""
    pair = base64.b64encode(f"{username}:{placeholder}".encode()).decode("ascii")
    return {
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": f"http.https://{host}/.extraHeader",
        "GIT_CONFIG_VALUE_0": f"Authorization: Basic {pair}",
        "GIT_CONFIG_KEY_1": "credential.helper",
        "GIT_CONFIG_VALUE_1": "",
    }


# ------------------------------------------------------------------ output


def nonsense(what: str) -> ClocheError:
    return ClocheError("guest.protocol", f"git in the sandbox has answered with nonsense: {what}")


def _text(raw: bytes, limit: int = 4096) -> str:
    return raw[:limit].decode("utf-8", "replace")


def one_hash(raw: bytes) -> str:
    text = _text(raw).strip()
    if not _HASH.fullmatch(text):
        raise nonsense("what is not the name of a commit")
    return text


def _count(raw: bytes) -> int:
    if not raw.isdigit() or len(raw) > 15:
        raise nonsense("what is not a number")
    return int(raw)


def parse_status(raw: bytes, *, cut: bool) -> Status:
    """Of `git status --porcelain=v2 --branch -z`. `cut`: the end is missing."""
    head: dict[bytes, bytes] = {}
    files: list[ChangedFile] = []
    records = raw.split(b"\0")
    if cut:
        records.pop()  # half a record
    items = iter(records)
    for record in items:
        if record.startswith(b"# "):
            key, _, value = record[2:].partition(b" ")
            head[key] = value
        elif record:
            files.append(_changed(record, items, cut))
    ab = re.fullmatch(rb"\+([0-9]{1,15}) -([0-9]{1,15})", head.get(b"branch.ab", b"+0 -0"))
    if b"branch.oid" not in head or ab is None:
        raise nonsense("a status without its head")
    branch = head.get(b"branch.head", b"(detached)")
    oid = head[b"branch.oid"]
    upstream = head.get(b"branch.upstream")
    return Status(
        branch=None if branch == b"(detached)" else _text(branch),
        head=None if oid == b"(initial)" else one_hash(oid),
        upstream=None if upstream is None else _text(upstream),
        ahead=int(ab[1]),
        behind=int(ab[2]),
        files=files,
        truncated=cut,
    )


def _changed(record: bytes, items: object, cut: bool) -> ChangedFile:
    kind = record[:1]
    if kind == b"?":
        return ChangedFile(record[2:], "untracked", "?", "?")
    columns = {b"1": 8, b"2": 9, b"u": 10}.get(kind)
    parts = record.split(b" ", columns) if columns else []
    if columns is None or len(parts) != columns + 1 or len(parts[1]) != 2:
        raise nonsense("a line of a status")
    index, worktree = (chr(c) for c in parts[1])
    old = None
    if kind == b"2":
        old = next(items, None)  # type: ignore[call-overload]
        if old is None and not cut:
            raise nonsense("a renaming without its old name")
    name = {b"1": "changed", b"2": "renamed", b"u": "unmerged"}[kind]
    return ChangedFile(parts[-1], name, index, worktree, old)


LOG_FORMAT: Final = "--format=%H%x00%P%x00%an%x00%ae%x00%at%x00%cn%x00%ce%x00%ct%x00%B"
_LOG_FIELDS: Final = 9


def parse_log(raw: bytes, *, cut: bool) -> list[Commit]:
    """Of `git log -z` with LOG_FORMAT."""
    fields = raw.split(b"\0")
    if fields and fields[-1] == b"" and len(fields) % _LOG_FIELDS == 1:
        fields.pop()
    if cut:
        del fields[len(fields) - 1 - (len(fields) - 1) % _LOG_FIELDS :]
    if len(fields) % _LOG_FIELDS:
        raise nonsense("a log")
    found = []
    for at in range(0, len(fields), _LOG_FIELDS):
        name, parents, author, mail, when, committer, cmail, cwhen, message = fields[at : at + _LOG_FIELDS]
        found.append(
            Commit(
                hash=one_hash(name),
                parents=[one_hash(parent) for parent in parents.split()],
                author=_text(author),
                author_email=_text(mail),
                authored_at=_count(when),
                committer=_text(committer),
                committer_email=_text(cmail),
                committed_at=_count(cwhen),
                message=_text(message, 65536).rstrip("\n"),
            )
        )
    return found


BRANCH_FORMAT: Final = "--format=%(refname)%00%(objectname)%00%(upstream:short)%00%(HEAD)"


def parse_branches(raw: bytes) -> list[Branch]:
    """Of `git for-each-ref` with BRANCH_FORMAT."""
    found = []
    for line in raw.split(b"\n"):
        if not line:
            continue
        parts = line.split(b"\0")
        if len(parts) != 4:
            raise nonsense("a list of branches")
        ref, head, upstream, mark = parts
        remote = ref.startswith(b"refs/remotes/")
        name = _text(ref.removeprefix(b"refs/heads/").removeprefix(b"refs/remotes/"))
        if remote and name.endswith("/HEAD"):
            continue
        found.append(Branch(name, one_hash(head), _text(upstream) or None, mark == b"*", remote))
    return found


def parse_numstat(raw: bytes) -> list[DiffFile]:
    """Of `git diff --numstat -z`."""
    found = []
    items = iter(raw.split(b"\0"))
    for record in items:
        if not record:
            continue
        parts = record.split(b"\t", 2)
        if len(parts) != 3:
            raise nonsense("a list of differences")
        added, removed = (None if n == b"-" else _count(n) for n in parts[:2])
        path, old = parts[2], None
        if not path:
            old, path = next(items, b""), next(items, b"")
        found.append(DiffFile(path, added, removed, old))
    return found


_PUSHED: Final = {
    "=": "up_to_date",
    "*": "new",
    " ": "fast_forward",
    "+": "forced",
    "-": "deleted",
    "!": "rejected",
}


def parse_push(raw: bytes) -> list[PushedRef]:
    """Of `git push --porcelain`."""
    found = []
    for line in _text(raw, 1024 * 1024).split("\n"):
        parts = line.split("\t")
        if len(parts) >= 2 and parts[0] in _PUSHED and ":" in parts[1]:
            source, _, target = parts[1].partition(":")
            found.append(PushedRef(source, target, _PUSHED[parts[0]]))
    return found


# ------------------------------------------------------------------ errors

#: What stands in the messages of git (in the C locale), and what that means. The first that is found counts.
_MEANING: Final[Sequence[tuple[str, str, str]]] = (
    ("not a git repository", "git.not_a_repository", "the directory is not in a git repository"),
    ("dubious ownership", "git.failed", "the repository belongs to another user of the sandbox; name that `user`"),
    ("Authentication failed", "git.auth_failed", "the remote did not accept the credentials"),
    ("could not read Username", "git.auth_failed", "the remote wants credentials; name a `secret` that is granted"),
    ("could not read Password", "git.auth_failed", "the remote wants credentials; name a `secret` that is granted"),
    ("The requested URL returned error: 401", "git.auth_failed", "the remote did not accept the credentials"),
    ("The requested URL returned error: 403", "git.auth_failed", "the remote does not allow this"),
    ("Permission denied (publickey", "git.auth_failed", "the remote did not accept a key of the sandbox"),
    ("already exists and is not an empty directory", "git.exists", "the target directory exists and is not empty"),
    ("already exists", "git.exists", "it exists already"),
    ("CONFLICT (", "git.conflict", "there are conflicts; the unmerged files are in the status"),
    ("would be overwritten", "git.conflict", "changes in the work tree would be lost; commit them first"),
    ("unmerged files", "git.conflict", "there are unmerged files; resolve them first"),
    ("Not possible to fast-forward", "git.conflict", "the branches have diverged; say how to join them with `mode`"),
    ("divergent branches", "git.conflict", "the branches have diverged; say how to join them with `mode`"),
    ("not fully merged", "git.conflict", "the branch is not merged; say `force`"),
    ("[rejected]", "git.rejected", "the remote has commits that this repository has not; pull first"),
    ("[remote rejected]", "git.rejected", "the remote has refused the push"),
    ("nothing to commit", "git.nothing_to_commit", "nothing has changed"),
    ("nothing added to commit", "git.nothing_to_commit", "nothing that changed was added; name `files`, or say `all`"),
    ("no changes added to commit", "git.nothing_to_commit", "no change was added; name `files`, or say `all`"),
    ("Please tell me who you are", "git.failed", "git does not know who commits; name an `author`"),
    ("empty ident name", "git.failed", "git does not know who commits; name an `author`"),
    ("No such remote", "git.not_found", "the repository has no such remote"),
    ("does not appear to be a git repository", "git.not_found", "the remote is not a repository"),
    ("Could not resolve host", "git.unreachable", "the name of the remote cannot be resolved from the sandbox"),
    ("Failed to connect", "git.unreachable", "the remote cannot be reached from the sandbox; see its network policy"),
    ("Connection refused", "git.unreachable", "the remote refused the connection"),
    ("unable to access", "git.unreachable", "the remote cannot be reached from the sandbox; see its network policy"),
    ("not found", "git.not_found", "git does not find it"),
    ("unknown revision", "git.not_found", "there is no such commit"),
    ("bad revision", "git.not_found", "there is no such commit"),
    ("did not match any", "git.not_found", "git knows nothing of this name"),
    ("does not have any commits yet", "git.not_found", "nothing was committed yet"),
    ("not a valid", "git.not_found", "there is no such commit or branch"),
    ("invalid reference", "git.not_found", "there is no such commit or branch"),
    ("couldn't find remote ref", "git.not_found", "the remote has no such branch"),
    ("src refspec", "git.not_found", "there is no such branch"),
    ("cannot change to", "git.not_found", "there is no such directory in the sandbox"),
    ("does not exist", "git.not_found", "it does not exist"),
)


def failure(verb: str, exit_code: int, stdout: bytes, stderr: bytes) -> ClocheError:
    """What a git that has failed means. Its text is in the details, never in the sentence."""
    said = stderr[-65536:].decode("utf-8", "replace") + "\n" + stdout[-65536:].decode("utf-8", "replace")
    details = {"exit_code": exit_code, "output": said.strip()[-2000:]}
    for text, code, meaning in _MEANING:
        if text in said:
            return ClocheError(code, f"git {verb} has failed: {meaning}", details=details)
    return ClocheError("git.failed", f"git {verb} has failed with exit code {exit_code}", details=details)
