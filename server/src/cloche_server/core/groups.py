"""Groups of sandboxes: who is in one, by which names and addresses its members know each other. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Final

from cloche_server.core.errors import ClocheError
from cloche_server.core.names import canonical_name
from cloche_server.core.network import GROUP_NETWORK4

#: A label of a name, so that `<member>.<group>.internal` is one.
PATTERN: Final = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
#: No zone of the internet has this name, and none will.
DOMAIN: Final = "internal"
#: Of one group. All of them are told of every change.
MAX_MEMBERS: Final = 1000
_NETWORK: Final = IPv4Network(GROUP_NETWORK4)
_NAME: Final = re.compile(PATTERN)


@dataclass(frozen=True, slots=True)
class Member:
    """`sandbox`: its id. `name`: empty for one without. `address`: under which the others reach it. `status`: the state
    it is in."""

    sandbox: str
    name: str
    address: str
    status: str


@dataclass(frozen=True, slots=True)
class Group:
    """A group of one workspace; its members in the order in which they were made."""

    workspace: str
    name: str
    members: tuple[Member, ...]

    def named(self) -> dict[str, Member]:
        """Members by the names that resolve to them, canonical: id and name, alone and below `<group>.internal`. A name
        with a dot in it stands below only, so that it cannot take the place of a host of the internet. Ids come first,
        then the older of two whose names differ in upper and lower case only."""
        found: dict[str, Member] = {}
        for member in self.members:
            self._add(found, member.sandbox, member)
        for member in self.members:
            if member.name:
                self._add(found, member.name, member)
        return found

    def _add(self, found: dict[str, Member], label: str, member: Member) -> None:
        alone = canonical_name(label)
        if alone is not None and "." not in alone:
            found.setdefault(alone, member)
        below = canonical_name(f"{label}.{self.zone}")
        if below is not None:
            found.setdefault(below, member)

    @property
    def zone(self) -> str:
        """Names below it are those of the group, and of nobody else."""
        return f"{self.name}.{DOMAIN}"


def check_group(name: str) -> str:
    """The name itself. Raises `request.invalid`."""
    if not _NAME.fullmatch(name):
        raise ClocheError(
            "request.invalid",
            "network_group is a name of 1 to 63 lower-case letters, digits and inner hyphens, such as `team-a`: it "
            "becomes a part of the names of its members",
            details={"field": "network_group"},
        )
    return name


def choose_address(sandbox: str, taken: Collection[str]) -> str:
    """An address for a member that none of its group has: found by its id, so that a newcomer is unlikely to be given
    the one of a member that has just left. Raises `request.invalid` when the group is full."""
    if len(taken) >= MAX_MEMBERS:
        raise ClocheError(
            "request.invalid",
            f"a network group has room for {MAX_MEMBERS} members, and this one has as many",
            details={"field": "network_group", "maximum": MAX_MEMBERS},
        )
    size = _NETWORK.num_addresses - 2  # neither the first nor the last
    start = int.from_bytes(hashlib.sha256(sandbox.encode()).digest()[:8], "big")
    places = (str(_NETWORK[1 + (start + step) % size]) for step in range(size))
    return next(place for place in places if place not in taken)


def parse_member_address(text: str) -> IPv4Address:
    """Raises ValueError for what is no address of a member."""
    found = IPv4Address(text)
    if found not in _NETWORK:
        raise ValueError
    return found


def group_to_json(group: Group) -> dict[str, Any]:
    """The whole group; `group_from_json` turns it back."""
    return {"workspace": group.workspace, "name": group.name, "members": [asdict(one) for one in group.members]}


def group_from_json(data: Mapping[str, Any]) -> Group:
    """Raises KeyError, ValueError, TypeError for what `group_to_json` has not written."""
    members: Iterable[Member] = (Member(**one) for one in data["members"])
    group = Group(str(data["workspace"]), str(data["name"]), tuple(members))
    for member in group.members:
        parse_member_address(member.address)
    return group
