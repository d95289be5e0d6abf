"""When certificates are asked for: renewal, order, limits that outlive a restart, back-off, and safe names of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.acme import (
    DAY,
    MAX_OF_NAME,
    MAX_OF_TENANTS,
    MAX_OF_WORKSPACE,
    MAX_ORDERS,
    PARALLEL,
    UNFINISHED,
    WINDOW,
    Ledger,
    Life,
    Order,
    Wanted,
    challenge_token,
    choose,
    obstacle,
    stem,
)
from cloche_server.settings import Settings, SettingsError, load

NOW = 1_000_000_000.0
ONE = Wanted("one.example.test", "w")
BASE = Wanted("base.example.test")


def names(chosen: list[Wanted]) -> list[str]:
    return [one.name for one in chosen]


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_renewal_is_at_two_thirds_of_the_life(spread: float) -> None:
    life = Life(NOW, NOW + 90 * DAY, spread)
    assert NOW + 60 * DAY <= life.renew_at <= NOW + 63 * DAY
    assert choose([ONE], {ONE.name: life}, Ledger(), [], life.renew_at - 1) == []
    assert choose([ONE], {ONE.name: life}, Ledger(), [], life.renew_at) == [ONE]


def test_one_order_for_each_name_and_few_at_once() -> None:
    many = [Wanted(f"n{n}.example.test", f"w{n}") for n in range(10)]
    assert choose([ONE], {}, Ledger(), [ONE], NOW) == []
    assert len(choose(many, {}, Ledger(), [], NOW)) == PARALLEL
    assert len(choose(many, {}, Ledger(), many[:3], NOW)) == PARALLEL - 3
    of_one = [replace(one, workspace="w") for one in many]
    assert len(choose(of_one, {}, Ledger(), [], NOW)) == 2, "one workspace does not take all places"
    own = [BASE, Wanted("*.base.example.test", dns=True)]
    assert names(choose([*many, *own], {}, Ledger(), [], NOW))[0] == BASE.name
    assert [one for one in choose([*many, *own], {}, Ledger(), [], NOW) if not one.workspace] == [BASE]


def test_what_ends_first_is_renewed_first() -> None:
    lives = {f"n{n}.test": Life(NOW - 100 * DAY, NOW + n * DAY, 0.0) for n in range(5)}
    wanted = [Wanted(name, name) for name in reversed(list(lives))]
    assert names(choose(wanted, lives, Ledger(), [], NOW)) == ["n0.test", "n1.test", "n2.test", "n3.test"]


def test_failures_of_a_name_back_off_and_end_with_a_success() -> None:
    ledger, waits, now = Ledger(), [], NOW
    for _ in range(8):
        ledger.begin(ONE, now)
        ledger.failed(ONE.name, "no", now, 0.5)
        waits.append(ledger.troubles[ONE.name].next_at - now)
        assert ledger.free_at(ONE, now) >= ledger.troubles[ONE.name].next_at
        assert ledger.free_at(BASE, now) <= now, "others are not held up"
        now += 2 * DAY
    assert waits == [300.0, 900.0, 3600.0, 14400.0, 43200.0, DAY, DAY, DAY]
    ledger.succeeded(ONE.name)
    assert ONE.name not in ledger.troubles


def test_jitter_spreads_and_stays_near() -> None:
    waits = []
    for roll in (0.0, 1.0):
        ledger = Ledger()
        ledger.failed(ONE.name, "no", NOW, roll)
        waits.append(ledger.troubles[ONE.name].next_at - NOW)
    assert waits == [pytest.approx(240), pytest.approx(360)]


def test_an_authority_that_is_down_stops_all_names_and_blames_none() -> None:
    ledger = Ledger()
    both = [ONE, Wanted("two.example.test", "v")]
    for one in both:
        ledger.begin(one, NOW)
    for one in both:
        ledger.stopped(one.name, "down", NOW + 5, 0.5)
    assert ledger.pause is not None
    assert ledger.pause.failures == 1, "orders that were under way together are one failure"
    assert ledger.troubles == {}
    assert ledger.orders == [], "what was not placed does not count"
    assert ledger.free_at(BASE, NOW) == ledger.pause.next_at == NOW + 65
    ledger.begin(ONE, NOW + 70)
    ledger.stopped(ONE.name, "down", NOW + 71, 0.5)
    assert (ledger.pause.failures, ledger.pause.next_at) == (2, NOW + 71 + 120)
    ledger.begin(ONE, NOW + 300)
    ledger.failed(ONE.name, "no", NOW + 300, 0.5)
    assert ledger.pause is None, "it answers again"


def test_an_order_that_never_ended_is_begun_again_after_a_moment() -> None:
    ledger = Ledger()
    ledger.begin(ONE, NOW)
    assert ledger.free_at(ONE, NOW) == NOW + UNFINISHED


def test_limits_hold_for_names_workspaces_and_all() -> None:
    of_name = Ledger([Order(ONE.name, "w", NOW - n) for n in range(MAX_OF_NAME)])
    assert of_name.free_at(ONE, NOW) == NOW - MAX_OF_NAME + 1 + DAY
    of_workspace = Ledger([Order(f"x{n}", "w", NOW - n) for n in range(MAX_OF_WORKSPACE)])
    assert of_workspace.free_at(ONE, NOW) > NOW
    assert of_workspace.free_at(replace(ONE, workspace="v"), NOW) <= NOW
    tenants = Ledger([Order(f"x{n}", f"w{n}", NOW - n) for n in range(MAX_OF_TENANTS)])
    assert tenants.free_at(ONE, NOW) == NOW - MAX_OF_TENANTS + 1 + WINDOW
    assert tenants.free_at(BASE, NOW) <= NOW, "some are left for the operator"
    everybody = Ledger([Order(f"x{n}", "", NOW - n) for n in range(MAX_ORDERS)])
    assert everybody.free_at(BASE, NOW) > NOW
    future = Ledger([Order(ONE.name, "w", NOW + 100 * DAY) for _ in range(MAX_ORDERS)])
    assert future.free_at(ONE, NOW) <= NOW, "a clock that was set back closes nothing"


def test_old_trouble_with_names_nobody_wants_is_forgotten() -> None:
    ledger = Ledger()
    ledger.failed("gone.test", "no", NOW, 0.5)
    ledger.failed(ONE.name, "no", NOW, 0.5)
    ledger.forget({ONE.name}, NOW + 6 * DAY)
    assert set(ledger.troubles) == {"gone.test", ONE.name}
    ledger.forget({ONE.name}, NOW + 8 * DAY)
    assert set(ledger.troubles) == {ONE.name}


LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)


@given(st.lists(LABEL, min_size=2, max_size=5), st.booleans())
def test_names_of_files_are_safe_and_each_its_own(labels: list[str], wild: bool) -> None:
    name = ("*." if wild else "") + ".".join(labels)
    made = stem(name)
    assert PurePosixPath(made).name == made
    assert not made.startswith(".")
    assert "*" not in made
    assert len(made) <= 180
    assert made != stem("x" + name)
    assert stem("*." + "a" * 200) != stem("*." + "a" * 199 + "b")


def test_only_whole_tokens_are_asked_for() -> None:
    assert challenge_token(b"/.well-known/acme-challenge/abc_-9") == "abc_-9"
    for other in (b"", b"a/b", b"a?b", b"%41", b"..", b"a" * 201):
        assert challenge_token(b"/.well-known/acme-challenge/" + other) is None
    assert challenge_token(b"/x/.well-known/acme-challenge/abc") is None


GOOD = {"CLOCHE_PREVIEW_ACME": "https://ca.example.test/dir", "CLOCHE_PREVIEW_ACME_AGREE": "true"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"CLOCHE_PREVIEW_ACME_AGREE": "false"}, "agree to the terms of service"),
        ({"CLOCHE_PREVIEW_ACME": "http://ca.example.test/dir"}, "begins with https://"),
        ({"CLOCHE_PREVIEW_ACME": ""}, "need preview_acme"),
        ({"CLOCHE_PREVIEW_PORT": "-1"}, "switches those off"),
        ({"CLOCHE_PREVIEW_ACME_EMAIL": "a@b, c@d"}, "no single address"),
        ({"CLOCHE_PREVIEW_ACME_HOOK": "/bin/x 'y"}, "that is no command"),
        ({"CLOCHE_PREVIEW_ACME_HOOK": "hook set"}, "whole path"),
    ],
)
def test_settings_that_cannot_work_are_told(change: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load({}, GOOD | change)


def test_settings_that_can_work() -> None:
    assert obstacle(Settings()) is None
    assert load({}, GOOD | {"CLOCHE_PREVIEW_ACME_HOOK": "/bin/hook --zone 'a b'"}).preview_acme_agree
