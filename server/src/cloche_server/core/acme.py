"""When certificates are asked for, how often at most, and under which names they are kept. Pure.

Times are Unix seconds, durations seconds.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

DAY: Final = 86400.0
#: Orders in all, those of one workspace, and those for one name. What authorities allow is more.
WINDOW: Final = 3 * 3600.0
MAX_ORDERS: Final = 100
MAX_OF_TENANTS: Final = 90  # the rest is for the names of the operator
MAX_OF_WORKSPACE: Final = 20
MAX_OF_NAME: Final = 6  # in a day
#: Orders under way at once: in all, and those of one workspace.
PARALLEL: Final = 4
PARALLEL_OF_WORKSPACE: Final = 2
#: After the first failure of a name, the second, and so on; and after failures that are not about a name.
_BACK_OFF: Final = (300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, DAY)
_PAUSE: Final = (60.0, 120.0, 300.0, 900.0, 3600.0, 6 * 3600.0)
#: An order whose server died in the middle is begun again after so long.
UNFINISHED: Final = 60.0
#: How long trouble with a name that nobody wants any more is remembered.
FORGET: Final = 7 * DAY
#: The operator's own names have no workspace.
OPERATOR: Final = ""
#: HTTP-01: where an authority asks.
PREFIX: Final = b"/.well-known/acme-challenge/"
_TOKEN: Final = re.compile(rb"[A-Za-z0-9_-]{1,200}")
_LONGEST_STEM: Final = 180


@dataclass(frozen=True, slots=True)
class Wanted:
    """A name that is to have a certificate. `dns`: it is proven by a record (DNS-01), else over HTTP-01."""

    name: str
    workspace: str = OPERATOR
    dns: bool = False


@dataclass(frozen=True, slots=True)
class Life:
    """How long a certificate is good. `spread` from 0 to 1 is its own, so that not all are renewed at once."""

    begins: float
    ends: float
    spread: float

    @property
    def renew_at(self) -> float:
        """At two thirds of its life, or up to a thirtieth of it later."""
        whole = self.ends - self.begins
        return self.begins + whole * (2 / 3 + self.spread / 30)


@dataclass(frozen=True, slots=True)
class Order:
    """An order that was begun."""

    name: str
    workspace: str
    at: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """Failures in a row; nothing is tried before `next_at`. `sentence` tells of the last one."""

    failures: int
    next_at: float
    at: float
    sentence: str


@dataclass(slots=True)
class Ledger:
    """What was ordered and what failed: kept on disk, so that a restart asks no more often than one long run."""

    orders: list[Order] = field(default_factory=list)
    troubles: dict[str, Trouble] = field(default_factory=dict)
    #: About the authority or the account, and so about all names.
    pause: Trouble | None = None

    def begin(self, wanted: Wanted, now: float) -> None:
        """Counts an order before it is placed."""
        self.orders = [order for order in self.orders if now - DAY < order.at <= now]
        self.orders.append(Order(wanted.name, wanted.workspace, now))
        before = self.troubles.get(wanted.name)
        sentence = before.sentence if before is not None else "the server ended while an order was under way"
        failures = before.failures if before is not None else 0
        self.troubles[wanted.name] = Trouble(failures, now + UNFINISHED, now, sentence)

    def succeeded(self, name: str) -> None:
        self.troubles.pop(name, None)
        self.pause = None

    def failed(self, name: str, sentence: str, now: float, roll: float) -> None:
        """It is about this name."""
        self.pause = None
        self.troubles[name] = _worse(self.troubles.get(name), _BACK_OFF, sentence, now, roll)

    def stopped(self, name: str, sentence: str, now: float, roll: float) -> None:
        """It is about the authority or the account: no name is tried for a while, and this one not blamed."""
        began = max((order.at for order in self.orders if order.name == name), default=now)
        if self.pause is None or self.pause.at < began:  # several that were under way fail once
            self.pause = _worse(self.pause, _PAUSE, sentence, now, roll)
        self.orders = [order for order in self.orders if (order.name, order.at) != (name, began)]
        self.undone(name)

    def undone(self, name: str) -> None:
        """The order was given up for no fault of the name."""
        before = self.troubles.get(name)
        if before is not None and before.failures == 0:
            del self.troubles[name]

    def forget(self, wanted: Collection[str], now: float) -> None:
        """What nobody needs to know any more."""
        for name, trouble in list(self.troubles.items()):
            if name not in wanted and trouble.at < now - FORGET:
                del self.troubles[name]

    def free_at(self, wanted: Wanted, now: float) -> float:
        """When the next order for this name may begin; `now` or earlier: at once."""
        times = [0.0]
        if self.pause is not None:
            times.append(self.pause.next_at)
        if (trouble := self.troubles.get(wanted.name)) is not None:
            times.append(trouble.next_at)
        # A clock that was set back must not close the door for years.
        orders = [order for order in self.orders if order.at <= now]
        tenants = wanted.workspace != OPERATOR
        for most, window, counted in (
            (MAX_OF_NAME, DAY, [o for o in orders if o.name == wanted.name]),
            (MAX_ORDERS, WINDOW, orders),
            (MAX_OF_TENANTS, WINDOW, [o for o in orders if o.workspace != OPERATOR] if tenants else []),
            (MAX_OF_WORKSPACE, WINDOW, [o for o in orders if o.workspace == wanted.workspace] if tenants else []),
        ):
            times.append(_room_at([order.at for order in counted], most, window))
        return max(times)


def _room_at(times: list[float], most: int, window: float) -> float:
    """When less than `most` of `times` lie within the last `window` seconds."""
    return sorted(times)[-most] + window if len(times) >= most else 0.0


def _worse(before: Trouble | None, steps: tuple[float, ...], sentence: str, now: float, roll: float) -> Trouble:
    failures = (before.failures if before is not None else 0) + 1
    wait = steps[min(failures, len(steps)) - 1]
    return Trouble(failures, now + wait * (0.8 + 0.4 * roll), now, sentence)


def choose(
    wanted: Iterable[Wanted], lives: Mapping[str, Life], ledger: Ledger, running: Collection[Wanted], now: float
) -> list[Wanted]:
    """For which names orders begin now: one at a time for each, those of the operator first, then what ends first."""
    names = {one.name for one in running}
    due = [
        one for one in wanted if one.name not in names and (one.name not in lives or lives[one.name].renew_at <= now)
    ]
    due.sort(key=lambda one: (one.workspace != OPERATOR, lives[one.name].ends if one.name in lives else 0.0))
    busy = Counter(one.workspace for one in running)
    chosen: list[Wanted] = []
    for one in due:
        # The operator's names may share one DNS record, so they are ordered one after the other.
        most = 1 if one.workspace == OPERATOR else PARALLEL_OF_WORKSPACE
        if len(running) + len(chosen) >= PARALLEL:
            break
        if busy[one.workspace] < most and ledger.free_at(one, now) <= now:
            busy[one.workspace] += 1
            chosen.append(one)
    return chosen


def stem(name: str) -> str:
    """The name of its file without an ending: as it is read by people, unless it is very long."""
    safe = "_" + name[1:] if name.startswith("*") else name
    if len(safe) <= _LONGEST_STEM:
        return safe
    return f"{safe[: _LONGEST_STEM - 33]}_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def place(directory: str) -> str:
    """The folder for all that one authority knows of: certificates of a trial authority are never taken for real."""
    return hashlib.sha256(directory.encode()).hexdigest()[:16]


def challenge_token(target: bytes) -> str | None:
    """What an authority asks for, when the target of a request is of that kind."""
    rest = target.removeprefix(PREFIX)
    if rest == target or not _TOKEN.fullmatch(rest):
        return None
    return rest.decode("ascii")


class Said(Protocol):
    """What the settings say."""

    @property
    def preview_acme(self) -> str: ...
    @property
    def preview_acme_email(self) -> str: ...
    @property
    def preview_acme_agree(self) -> bool: ...
    @property
    def preview_acme_hook(self) -> str: ...
    @property
    def preview_port(self) -> int: ...


def obstacle(said: Said) -> str | None:
    """What is wrong with the settings, as a sentence; None: nothing."""
    directory, email, hook = said.preview_acme, said.preview_acme_email, said.preview_acme_hook
    if not directory:
        if said.preview_acme_agree or email or hook:
            return "the settings preview_acme_… need preview_acme, the address of the authority's directory"
        return None
    if not directory.startswith("https://"):
        return f"preview_acme = {directory}: the address of an ACME directory begins with https://"
    if said.preview_port < 0:
        return "preview_acme is for previews, and preview_port = -1 switches those off; take one of them away"
    if not said.preview_acme_agree:
        return (
            "preview_acme needs preview_acme_agree = true, with which you agree to the terms of service of the "
            f"authority; {directory} names them as termsOfService"
        )
    if email and re.fullmatch(r"[^@\s,]+@[^@\s,]+", email) is None:
        return f"preview_acme_email = {email!r}: that is no single address of mail"
    try:
        words = shlex.split(hook)
    except ValueError as error:
        return f"preview_acme_hook = {hook!r}: that is no command ({error})"
    if words and not words[0].startswith("/"):
        return f"preview_acme_hook = {hook!r}: it begins with the whole path of a program"
    return None
