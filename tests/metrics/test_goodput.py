"""Tests of the accounts of a job's time."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.metrics.goodput import STALE_S, Account, advanced, difference, idled, view
from forged.metrics.messages import TimeSpent

seconds = st.floats(min_value=0.0, max_value=1e6, allow_nan=False)
spent = st.builds(TimeSpent, *[seconds] * len(TimeSpent.__struct_fields__))
signed = st.builds(TimeSpent, *[st.floats(min_value=-1e6, max_value=1e6)] * len(TimeSpent.__struct_fields__))


@dataclass(frozen=True)
class Event:
    after_s: float
    deltas: list[TimeSpent]
    idle_cause: str


events = st.builds(
    Event,
    seconds,
    st.lists(st.one_of(spent, signed), max_size=4),
    st.sampled_from(["", "rescale_s", "workers_s", "paused_s"]),
)


def account(until: float = 0.0, **more: object) -> Account:
    return msgspec.structs.replace(Account(began_at=0.0, until=until), **more)


@given(st.lists(events, max_size=12))
def test_causes_and_unknown_time_always_add_up_to_the_time_accounted_for(history: list[Event]) -> None:
    now, told = 0.0, account()
    for event in history:
        now += event.after_s
        told = advanced(told, now, event.deltas)
        told = msgspec.structs.replace(idled(told, now), idle_cause=event.idle_cause)
        assert min(msgspec.structs.astuple(told.spent)) >= 0.0
        assert told.until <= now
        assert told.spent.total_s + told.unknown_s == pytest.approx(told.until - told.began_at, rel=1e-6, abs=1e-3)


def test_steps_of_a_worker_alone_count_whole_with_their_collectives() -> None:
    told = advanced(account(), 10.0, [TimeSpent(step_s=6.0, waiting_s=2.0, checkpoint_s=2.0)])
    assert view(told).goodput == pytest.approx(0.8)
    assert told.spent.checkpoint_s == pytest.approx(2.0)


def test_waiting_beyond_that_of_the_slowest_rank_counts_as_a_loss() -> None:
    slow, fast = TimeSpent(step_s=9.0, waiting_s=1.0), TimeSpent(step_s=3.0, waiting_s=7.0)
    told = advanced(account(), 10.0, [slow, fast])
    assert told.spent.waiting_s == pytest.approx(3.0)
    assert told.spent.step_s == pytest.approx(7.0)


def test_time_that_is_not_reported_yet_is_left_for_the_next_report() -> None:
    told = advanced(account(), 10.0, [TimeSpent(step_s=9.0)])
    assert (told.until, told.unknown_s) == (9.0, 0.0)


def test_time_that_no_worker_reports_for_long_is_unknown() -> None:
    told = advanced(account(), 10.0 + 2 * STALE_S, [TimeSpent(step_s=9.0)])
    assert told.unknown_s == pytest.approx(1.0 + 2 * STALE_S)


def test_time_without_workers_has_the_cause_that_facts_name() -> None:
    told = idled(account(10.0, idle_cause="workers_s"), 70.0)
    assert (told.spent.workers_s, told.unknown_s, told.until) == (60.0, 0.0, 70.0)


def test_step_that_is_aborted_after_it_was_reported_moves_to_the_aborted_steps() -> None:
    before = TimeSpent(step_s=8.0)
    told = advanced(account(), 8.0, [before])
    told = advanced(told, 9.0, [difference(TimeSpent(step_s=2.0, aborted_s=7.0), before)])
    assert told.spent.step_s == pytest.approx(2.0)
    assert told.spent.aborted_s == pytest.approx(7.0)


def test_clock_that_is_set_back_changes_nothing() -> None:
    told = account(100.0)
    assert advanced(told, 50.0, [TimeSpent(step_s=5.0)]) == told
    assert idled(told, 50.0) == told
