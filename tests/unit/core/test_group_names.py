"""Names and addresses of the members of a network group."""

from __future__ import annotations

import pytest

from cloche_server.core.addresses import AddressClass, classify, parse_address
from cloche_server.core.errors import ClocheError
from cloche_server.core.groups import (
    MAX_MEMBERS,
    Group,
    Member,
    check_group,
    choose_address,
    group_from_json,
    group_to_json,
)
from cloche_server.core.network import NetworkMode, RuleAction
from cloche_server.core.policy import Policy
from cloche_server.core.policy_input import parse_policy

ID = "0190aaaa-bbbb-7ccc-8ddd-eeeeffff0001"
OTHER = "0190aaaa-bbbb-7ccc-8ddd-eeeeffff0002"


def group(*members: Member) -> Group:
    return Group("w", "team", members)


def test_members_have_their_names_and_ids_alone_and_in_the_zone() -> None:
    member = Member(ID, "DB", "198.19.0.1", "running")
    names = group(member).named()
    assert set(names) == {"db", "db.team.internal", ID, f"{ID}.team.internal"}
    assert set(names.values()) == {member}


def test_without_a_name_there_is_the_id() -> None:
    assert set(group(Member(ID, "", "198.19.0.1", "running")).named()) == {ID, f"{ID}.team.internal"}


def test_a_name_with_a_dot_stands_in_the_zone_only() -> None:
    names = group(Member(ID, "github.com", "198.19.0.1", "running")).named()
    assert "github.com" not in names
    assert "github.com.team.internal" in names


@pytest.mark.parametrize("name", ["-db-", "a" * 64, "10", "a..b"])
def test_what_is_no_name_of_a_host_resolves_to_nobody(name: str) -> None:
    assert name not in group(Member(ID, name, "198.19.0.1", "running")).named()


def test_the_older_has_the_name_and_an_id_is_nobody_elses() -> None:
    first = Member(ID, "db", "198.19.0.1", "running")
    second = Member(OTHER, "DB", "198.19.0.2", "running")
    thief = Member("other", ID, "198.19.0.3", "running")
    names = group(first, second, thief).named()
    assert (names["db"], names[OTHER], names[ID]) == (first, second, first)


@pytest.mark.parametrize("name", ["a", "team-a", "0", "a" * 63])
def test_names_of_groups(name: str) -> None:
    assert check_group(name) == name


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a.b", "a_b", "a" * 64, "ä", "a\n", "a b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ClocheError) as told:
        check_group(name)
    assert (told.value.code, told.value.details["field"]) == ("request.invalid", "network_group")


def test_addresses_are_stable_and_nobodys_twice() -> None:
    taken: set[str] = set()
    for number in range(300):
        taken.add(choose_address(f"sandbox-{number}", taken))
    assert len(taken) == 300
    assert all(classify(parse_address(one)) is AddressClass.GROUP for one in taken)
    assert choose_address(ID, set()) == choose_address(ID, set())
    assert choose_address(ID, {choose_address(ID, set())}) != choose_address(ID, set())


def test_a_full_group_says_so() -> None:
    with pytest.raises(ClocheError) as told:
        choose_address(ID, {str(number) for number in range(MAX_MEMBERS)})
    assert told.value.code == "request.invalid"


def test_a_group_comes_back_from_json_whole() -> None:
    one = group(Member(ID, "db", "198.19.0.1", "paused"), Member(OTHER, "", "198.19.0.2", "running"))
    assert group_from_json(group_to_json(one)) == one


@pytest.mark.parametrize("address", ["10.0.0.1", "198.18.0.1", "::1", "", "192.168.127.1"])
def test_a_member_is_nowhere_else(address: str) -> None:
    with pytest.raises(ValueError):
        group_from_json(group_to_json(group(Member(ID, "db", address, "running"))))


def test_no_rule_opens_the_addresses_of_members() -> None:
    for cidr in ("198.19.0.1/32", "198.19.0.0/16", "0.0.0.0/0"):
        policy = Policy(parse_policy({"mode": "open", "rules": [{"action": "allow", "cidr": cidr}]}))
        found = policy.decide_address(parse_address("198.19.0.1"), 80)
        assert (found.allowed, found.rule) == (False, "group"), cidr
        assert not policy.permits_answer("a.test", parse_address("198.19.0.1"))


def test_group_is_a_word_of_ours() -> None:
    with pytest.raises(ClocheError):
        parse_policy({"mode": NetworkMode.OPEN.value, "rules": [{"id": "group", "action": RuleAction.ALLOW.value}]})
