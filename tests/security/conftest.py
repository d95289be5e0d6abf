"""One world, one netd, one guest for the whole suite; every test sets the policy it needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import netns_kit
import pytest
import world_kit as world_of
from netd_kit import Netd
from slot_kit import Slot, make_slot
from town_kit import Town, prefix
from world_kit import World

from cloche_server.core.netctl import policy_to_json
from cloche_server.core.policy_input import parse_policy

pytest.register_assert_rewrite("cases_names", "cases_dns", "cases_ways", "cases_http", "cases_groups", "cases_udp")


class Site:
    """Everything that a case needs."""

    def __init__(self, world: World, netd: Netd, slot: Slot) -> None:
        self.world, self.netd, self.slot = world, netd, slot
        self._town: Town | None = None

    @property
    def town(self) -> Town:
        """More sandboxes, made when the first case needs them."""
        if self._town is None:
            self._town = Town(self.netd, self.slot, prefix(), attach)
            self._town.open()
        return self._town

    def close(self) -> None:
        if self._town is not None:
            self._town.close()

    def policy(self, **body: Any) -> int:
        """Sets the policy of the guest and forgets what has been seen; returns how many connections were cut."""
        policy = policy_to_json(parse_policy(body))
        cut = self.netd.call("policy", sandbox="box", policy=policy, grants=[])["cut"]
        for log in (self.world.a, self.world.b, self.world.zone, self.world.other):
            log.clear()
        return int(cut)

    def renew(self, **body: Any) -> None:
        """The sandbox is attached anew: nothing is resolved, counted or open."""
        attach(self.netd, self.slot, body)
        for log in (self.world.a, self.world.b, self.world.zone, self.world.other):
            log.clear()

    def host(self, work: Callable[[], Any]) -> Any:
        """What `work` makes where netd runs."""
        return netns_kit.inside(self.netd.namespace, work)

    def guest(self, work: Callable[[], Any]) -> Any:
        return netns_kit.inside(self.slot.guest, work)

    def log(self) -> list[Mapping[str, Any]]:
        return list(self.netd.call("log", sandbox="box", after=0, limit=1000, wait=0)["entries"])


def attach(netd: Netd, slot: Slot, body: Mapping[str, Any], sandbox: str = "box", workspace: str = "w") -> None:
    policy = policy_to_json(parse_policy(body))
    fds = [sock.fileno() for sock in slot.sockets]
    netd.call("attach", sandbox=sandbox, workspace=workspace, policy=policy, grants=[], fds=fds)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.geteuid() != 0 or shutil.which("nft") is None:
        pytest.skip("needs root and nftables")
    where = tmp_path_factory.mktemp("world")
    with _site(where, f"ct{os.getpid()}") as site:
        yield site


class _site:
    """Made in order and taken away in the other one, however far it came."""

    def __init__(self, where: Path, prefix: str) -> None:
        self._where, self._prefix = where, prefix
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Site:
        try:
            return self._make()
        except BaseException:
            self.__exit__()
            raise

    def _make(self) -> Site:
        world_ns, host_ns = f"{self._prefix}w", f"{self._prefix}d"
        guest_ns, slot_ns = f"{self._prefix}g", f"{self._prefix}s"
        self._undo.append(lambda: netns_kit.remove(guest_ns, slot_ns, host_ns, world_ns))
        make_hosts(world_ns, host_ns)
        world = World(world_ns, self._where)
        self._undo.append(world.close)
        slot = make_slot(guest_ns, slot_ns)
        self._undo.append(slot.close)
        netd = Netd(host_ns, self._where)
        self._undo.append(netd.close)
        netd.call("configure", resolvers=[world_of.DNS4])
        authority = {"certificate": world.ca.read_text(), "key": world.ca.with_name("ca.key").read_text()}
        netd.call("secrets", workspace="w", values={}, ca=authority)
        attach(netd, slot, {"mode": "none"})
        site = Site(world, netd, slot)
        self._undo.append(site.close)
        return site

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()


def make_hosts(world_ns: str, host_ns: str) -> None:
    """The host of netd and the rest of the world, joined by one link."""
    w = world_of
    netns_kit.ip(
        f"netns add {world_ns}\nnetns add {host_ns}\n"
        f"link add up0 netns {host_ns} type veth peer name down0 netns {world_ns}\n"
    )
    addresses = [f"{a}/32" for a in (w.A4, w.B4, w.DNS4, w.PRIVATE4, w.METADATA4)]
    addresses6 = [f"{a}/128" for a in (w.A6, w.B6)]
    netns_kit.ip_in(
        world_ns,
        "link set lo up\n"
        + "".join(f"addr add {a} dev lo\n" for a in addresses)
        + "".join(f"addr add {a} dev lo nodad\n" for a in addresses6)
        + f"addr add {w.GW4}/24 dev down0\naddr add {w.WORLD6}/64 dev down0 nodad\nlink set down0 up\n",
    )
    netns_kit.ip_in(
        host_ns,
        f"link set lo up\naddr add {w.NETD4}/24 dev up0\naddr add {w.NETD6}/64 dev up0 nodad\nlink set up0 up\n"
        f"route add default via {w.GW4}\nroute add ::/0 via {w.WORLD6}\n",
    )
