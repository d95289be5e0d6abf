"""The lifecycle table: complete, reachable, and the only place that says what is legal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.lifecycle import (
    DEADLINES,
    HOLDING,
    LISTED,
    ON_RESTART,
    SERVING,
    SLEEPING,
    TRANSITIONS,
    Event,
    Status,
    allowed,
    step,
)

#: Where a sandbox may stay: somebody else has to move it on.
RESTING = {
    Status.RUNNING,
    Status.PAUSED,
    Status.HIBERNATED,
    Status.STOPPED,
    Status.FAILED,
    Status.DELETED,
}


def reachable(start: Status) -> set[Status]:
    seen, todo = set(), [start]
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo.extend(TRANSITIONS[state].values())
    return seen


def test_every_state_has_a_row_and_every_event_a_use() -> None:
    assert set(TRANSITIONS) == set(Status)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)


def test_only_deleted_is_final() -> None:
    assert [state for state, row in TRANSITIONS.items() if not row] == [Status.DELETED]


def test_every_state_is_reachable_and_can_reach_the_end() -> None:
    assert reachable(Status.CREATING) == set(Status)
    for state in Status:
        assert Status.DELETED in reachable(state)


def test_half_way_states_have_a_deadline_and_a_restart_rule() -> None:
    half_way = set(Status) - RESTING
    assert set(DEADLINES) == half_way
    assert set(ON_RESTART) == half_way
    for state, (seconds, event) in DEADLINES.items():
        assert seconds > 0
        assert event in TRANSITIONS[state]
    for state, event in ON_RESTART.items():
        assert event in TRANSITIONS[state]


def test_every_living_state_can_be_deleted() -> None:
    for state in set(Status) - {Status.DELETED}:
        assert step(state, Event.DELETE) is Status.DELETING


def test_half_way_moves_can_come_to_an_end_and_to_nothing() -> None:
    """Each ends in a state to rest in, whatever becomes of it, and never in the one it does not come from."""
    for state, finished, undone in (
        (Status.HIBERNATING, (Event.SAVED, Status.HIBERNATED), Status.RUNNING),
        (Status.WAKING, (Event.BOOTED, Status.RUNNING), Status.HIBERNATED),
    ):
        event, target = finished
        assert step(state, event) is target
        assert step(state, Event.UNDONE) is undone
        assert step(state, Event.CRASHED) is Status.FAILED


def test_what_sleeps_has_no_process_that_could_crash() -> None:
    assert step(Status.HIBERNATED, Event.CRASHED) is None
    assert step(Status.PAUSED, Event.CRASHED) is Status.FAILED
    assert not SLEEPING & SERVING
    assert Status.PAUSED not in SLEEPING, "a paused sandbox is not woken by a call"
    assert SLEEPING <= LISTED


def test_every_state_with_a_ttl_ends_with_it() -> None:
    for state in LISTED:
        assert step(state, Event.EXPIRED) is Status.DELETING


def test_what_serves_also_holds_and_is_listed() -> None:
    assert SERVING <= LISTED <= HOLDING
    assert Status.DELETED not in HOLDING


@given(st.lists(st.sampled_from(list(Event)), max_size=30))
def test_an_illegal_move_changes_nothing(events: list[Event]) -> None:
    state = Status.CREATING
    for event in events:
        target = step(state, event)
        assert (target is not None) == (event.value in allowed(state))
        if target is None:
            continue
        assert target in TRANSITIONS[state].values()
        state = target
    if state is Status.DELETED:
        assert all(step(state, event) is None for event in Event)
