from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.model import DataShard
from forged.data.transfer.schedule import GIVEN_UP, Fault, Source, Start, TransferSchedule, Wanted
from forged.elastic.model import WorkerId
from forged.retry import RetryPolicy
from tests.data.topology_changes import at

A, B, C = at(0, 0), at(1, 1), at(2, 2)
RETRY = RetryPolicy(attempts=3, delay_s=1.0, exponential=True)


def shard(number: int) -> DataShard:
    return DataShard(number, number, number + 1)


def wanted(number: int, *sources: Source, priority: int | None = None) -> Wanted:
    return Wanted(shard(number), -number if priority is None else priority, sources)


def schedule(*shards: Wanted, concurrency: int = 4, retry: RetryPolicy = RETRY) -> TransferSchedule:
    return TransferSchedule(shards, concurrency, retry, Random(1).random)


def started(made: TransferSchedule, now: float = 0.0) -> list[tuple[int, Source]]:
    """All that can be started now."""
    found: list[Start] = []
    while (start := made.next(now)) is not None:
        found.append(start)
    return [(start.shard.shard_id, start.source) for start in found]


def reasons(made: TransferSchedule, number: int) -> list[tuple[Source, str]]:
    return [(failure.source, failure.reason) for failure in made.given_up[number]]


def test_highest_priority_starts_first() -> None:
    made = schedule(wanted(1, A, priority=5), wanted(2, A, priority=9), wanted(3, A, priority=7))
    assert [number for number, _ in started(made)] == [2, 3, 1]


def test_lower_shard_number_starts_first_at_equal_priority() -> None:
    made = schedule(wanted(2, A, priority=0), wanted(1, A, priority=0))
    assert [number for number, _ in started(made)] == [1, 2]


def test_concurrency_is_filled_and_each_end_starts_another_transfer() -> None:
    made = schedule(*(wanted(number, A) for number in range(5)), concurrency=2)
    assert started(made) == [(0, A), (1, A)]
    assert made.next_at() is None
    made.succeeded(1)
    assert started(made) == [(2, A)]
    made.failed(0, Fault.REFUSED, "no", 0.0)
    assert started(made) == [(3, A)]


@pytest.mark.parametrize(
    ("fault", "may_be_at_a_worker"), [(Fault.BROKEN, True), (Fault.REFUSED, False), (Fault.CORRUPT, False)]
)
def test_origin_start_says_whether_a_worker_may_hold_the_shard(fault: Fault, may_be_at_a_worker: bool) -> None:
    made = schedule(wanted(1, A, None), retry=RetryPolicy(attempts=1))
    assert made.next(0.0) == Start(shard(1), A)
    made.failed(1, fault, "why", 0.0)
    assert made.next(0.0) == Start(shard(1), None, may_be_at_a_worker)


def test_source_that_refuses_a_shard_is_replaced_at_once() -> None:
    made = schedule(wanted(1, A, B, None))
    for source in (A, B, None):
        assert started(made, 0.0) == [(1, source)]
        made.failed(1, Fault.REFUSED, f"not at {source}", 0.0)
    assert made.is_over
    assert reasons(made, 1) == [(source, f"not at {source}") for source in (A, B, None)]


def test_broken_source_is_retried_with_backoff_and_then_replaced() -> None:
    made = schedule(wanted(1, A, B))
    starts, now = [], 0.0
    for _ in range(3):
        assert started(made, now) == [(1, A)]
        starts.append(now)
        made.failed(1, Fault.BROKEN, "gone", now)
        assert made.next_at() == pytest.approx(now + 1.0 * 2 ** (len(starts) - 1)) or len(starts) == 3
        now = made.next_at() or now
    assert starts == [0.0, 1.0, 3.0]
    assert started(made, now) == [(1, B)]


def test_broken_source_pauses_for_all_shards_while_other_sources_continue() -> None:
    made = schedule(wanted(1, A), wanted(2, A), wanted(3, B), concurrency=1)
    assert started(made) == [(1, A)]
    made.failed(1, Fault.BROKEN, "gone", 0.0)
    assert started(made) == [(3, B)]
    made.succeeded(3)
    assert started(made, 0.5) == []
    assert made.next_at() == 1.0
    assert started(made, 1.0) == [(1, A)]


def test_one_outage_counts_once_for_all_transfers_in_progress() -> None:
    made = schedule(*(wanted(number, A) for number in range(4)))
    started(made, 0.0)
    for number in range(4):
        made.failed(number, Fault.BROKEN, "gone", 0.5)
    assert made.next_at() == 1.5
    assert len(started(made, 1.5)) == 4


def fail_source(made: TransferSchedule, gone: Source) -> list[tuple[int, Source]]:
    """One source breaks every transfer and the other ones succeed; returns what was started."""
    now, seen = 0.0, list[tuple[int, Source]]()
    while not made.is_over:
        for number, source in started(made, now):
            seen.append((number, source))
            if source == gone:
                made.failed(number, Fault.BROKEN, "gone", now)
            else:
                made.succeeded(number)
        now = made.next_at() or now
    return seen


def test_abandoned_source_is_asked_for_no_other_shard() -> None:
    made = schedule(wanted(1, A), wanted(2, A, B), wanted(3, A), concurrency=2)
    assert fail_source(made, A) == [(1, A), (2, A)] * 3 + [(2, B)]
    assert reasons(made, 1) == [(A, "gone")] * 3
    assert reasons(made, 3) == [(A, GIVEN_UP)]


def test_sequential_schedule_abandons_a_source_after_two_shards_fail() -> None:
    made = schedule(*(wanted(number, A) for number in range(9)), concurrency=1)
    assert fail_source(made, A) == [(0, A)] * 3 + [(1, A)] * 3
    assert set(made.given_up) == set(range(9))


def test_success_resets_the_attempts_of_a_source() -> None:
    made = schedule(wanted(1, A), wanted(2, A), concurrency=1)
    for now in (0.0, 1.0):
        started(made, now)
        made.failed(1, Fault.BROKEN, "gone", now)
    assert started(made, 3.0) == [(1, A)]
    made.succeeded(1)
    assert started(made, 3.0) == [(2, A)]
    made.failed(2, Fault.BROKEN, "gone", 3.0)
    assert made.next_at() == 4.0


def test_attempts_that_progress_do_not_count() -> None:
    made = schedule(wanted(1, A))
    now = 0.0
    for _ in range(50):
        assert started(made, now) == [(1, A)]
        made.failed(1, Fault.BROKEN, "gone", now, progressed=True)
        assert made.next_at() == now + 1.0
        now += 1.0


def test_shard_that_breaks_every_connection_is_abandoned_alone() -> None:
    made = schedule(wanted(0, A), *(wanted(number, A) for number in range(1, 20)), concurrency=1)
    now, tries = 0.0, 0
    while not made.is_over:
        for number, _ in started(made, now):
            if number == 0:
                tries += 1
                made.failed(0, Fault.BROKEN, "gone", now)
            else:
                made.succeeded(number)
        now = made.next_at() or now
    assert tries == 3
    assert set(made.given_up) == {0}


def test_corrupt_copy_is_retried_once_after_all_other_sources() -> None:
    made = schedule(wanted(1, A, B))
    for source in (A, B, A, B):
        assert started(made) == [(1, source)]
        made.failed(1, Fault.CORRUPT, "wrong", 0.0)
    assert made.is_over
    assert len(made.given_up[1]) == 4


def test_copy_corrupt_after_a_resume_is_retried_a_limited_number_of_times() -> None:
    made = schedule(wanted(1, A))
    tries = 0
    while started(made):
        made.failed(1, Fault.CORRUPT_MIXED, "wrong", 0.0)
        tries += 1
    assert made.is_over
    assert tries == 3


def test_own_fault_is_retried_with_the_same_source_and_then_abandoned() -> None:
    made = schedule(wanted(1, A, B), wanted(2, B))
    now, tries = 0.0, 0
    while 1 not in made.given_up:
        for number, source in started(made, now):
            if number == 1:
                assert source == A
                tries += 1
                made.failed(1, Fault.OWN, "disk full", now)
        now = made.next_at() or now
    assert tries == 3
    assert not made.is_over
    made.succeeded(2)
    assert made.is_over


def test_hanging_source_is_not_asked_for_the_same_shard_again() -> None:
    made = schedule(wanted(1, None), wanted(2, A, None))
    assert started(made) == [(1, None), (2, A)]
    made.failed(1, Fault.SILENT, "nothing came", 600.0)
    assert reasons(made, 1) == [(None, "nothing came")]
    made.failed(2, Fault.REFUSED, "no", 600.0)
    assert started(made, 600.0) == [(2, None)]


def test_source_on_which_two_shards_hang_is_abandoned_for_all_shards() -> None:
    made = schedule(*(wanted(number, None) for number in range(5)), concurrency=2)
    assert started(made) == [(0, None), (1, None)]
    made.failed(0, Fault.SILENT, "nothing came", 600.0)
    assert started(made, 600.0) == [(2, None)]
    made.failed(1, Fault.SILENT, "nothing came", 600.0)
    assert started(made, 600.0) == []
    assert set(made.given_up) == {0, 1, 3, 4}
    made.succeeded(2)
    assert made.is_over


def test_source_that_delivers_other_shards_is_not_abandoned_for_hanging_ones() -> None:
    made = schedule(*(wanted(number, None) for number in range(6)), concurrency=3)
    assert started(made) == [(0, None), (1, None), (2, None)]
    made.succeeded(2)
    made.failed(0, Fault.SILENT, "nothing came", 600.0)
    made.failed(1, Fault.SILENT, "nothing came", 600.0)
    assert started(made, 600.0) == [(3, None), (4, None), (5, None)]


def test_one_hanging_and_one_broken_shard_do_not_abandon_the_source() -> None:
    made = schedule(*(wanted(number, None) for number in range(6)))
    assert len(started(made)) == 4
    made.failed(0, Fault.BROKEN, "gone", 1.0)
    assert started(made, 2.0) == [(0, None)]
    made.failed(1, Fault.SILENT, "nothing came", 600.0)
    assert started(made, 600.0) == [(4, None)]
    made.succeeded(2)
    assert started(made, 600.0) == [(5, None)]
    assert set(made.given_up) == {1}


def test_success_clears_earlier_hangs_of_a_source() -> None:
    made = schedule(*(wanted(number, None) for number in range(5)), concurrency=2)
    started(made)
    made.failed(0, Fault.SILENT, "nothing came", 600.0)
    assert started(made, 600.0) == [(2, None)]
    made.succeeded(1)
    assert started(made, 601.0) == [(3, None)]
    made.failed(3, Fault.SILENT, "nothing came", 1201.0)
    assert started(made, 1201.0) == [(4, None)]


def test_source_abandoned_for_hanging_is_used_again_after_a_success() -> None:
    made = schedule(wanted(0, None), wanted(1, None), wanted(2, None), wanted(3, A, None), wanted(4, A, None))
    assert len(started(made)) == 4
    made.failed(0, Fault.SILENT, "nothing came", 600.0)
    made.failed(1, Fault.SILENT, "nothing came", 600.0)
    made.failed(3, Fault.REFUSED, "no", 600.0)
    assert started(made, 600.0) == [(4, A)]
    assert reasons(made, 3) == [(A, "no"), (None, GIVEN_UP)]
    made.succeeded(2)
    made.failed(4, Fault.REFUSED, "no", 601.0)
    assert started(made, 601.0) == [(4, None)]


def test_source_abandoned_for_broken_connections_stays_abandoned_after_a_success() -> None:
    made = schedule(*(wanted(number, A) for number in range(3)), wanted(3, B, A), retry=RetryPolicy(attempts=1))
    assert len(started(made)) == 4
    made.failed(0, Fault.BROKEN, "gone", 1.0)
    made.failed(1, Fault.BROKEN, "gone", 1.0)
    made.succeeded(2)
    made.failed(3, Fault.REFUSED, "no", 2.0)
    assert started(made, 2.0) == []
    assert reasons(made, 3) == [(B, "no"), (A, GIVEN_UP)]


def test_stuck_shards_do_not_count_against_their_source() -> None:
    made = schedule(*(wanted(number, None) for number in range(4)), concurrency=3)
    assert len(started(made)) == 3
    for number in range(3):
        made.failed(number, Fault.STUCK, "three calls have not come back", 0.0)
    assert set(made.given_up) == {0, 1, 2}
    assert started(made) == [(3, None)]


def test_shard_without_sources_is_abandoned_at_once() -> None:
    made = schedule(wanted(1))
    assert made.is_over
    assert made.given_up == {1: ()}


def test_empty_schedule_is_over_at_once() -> None:
    assert schedule().is_over
    assert schedule().next(0.0) is None


def test_shard_listed_twice_is_moved_once() -> None:
    made = schedule(wanted(1, A), wanted(1, B))
    assert started(made) == [(1, A)]
    made.succeeded(1)
    assert made.is_over


def test_source_listed_twice_is_tried_once() -> None:
    made = schedule(wanted(1, A, A))
    started(made)
    made.failed(1, Fault.REFUSED, "no", 0.0)
    assert made.is_over


@given(
    st.lists(st.lists(st.sampled_from([A, B, C, None]), max_size=4), max_size=12),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_every_shard_is_moved_or_abandoned_under_any_failures(
    sources: Iterable[list[WorkerId | None]], concurrency: int, source: Random
) -> None:
    shards = [wanted(number, *its_sources) for number, its_sources in enumerate(sources)]
    made = TransferSchedule(shards, concurrency, RETRY, source.random)
    now, under_way, moved = 0.0, list[Start](), list[int]()
    for _ in range(5000):
        while (start := made.next(now)) is not None:
            assert start.shard.shard_id not in [one.shard.shard_id for one in under_way]
            under_way.append(start)
            assert len(under_way) <= concurrency
        if made.is_over:
            break
        if under_way and source.random() < 0.7:
            ended = under_way.pop(source.randrange(len(under_way)))
            number = ended.shard.shard_id
            if source.random() < 0.2:
                made.succeeded(number)
                moved.append(number)
            else:
                made.failed(number, source.choice(list(Fault)), "why", now, progressed=source.random() < 0.1)
        else:
            due = made.next_at()
            assert due is not None or under_way
            now = max(now, due or now) + source.random() * 0.1
    assert made.is_over
    assert sorted([*moved, *made.given_up]) == list(range(len(shards)))
