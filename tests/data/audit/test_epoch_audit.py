from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.audit import epoch_audit as module
from forged.data.audit.epoch_audit import CHUNK_BYTES_MAX, CONFLICTS_MAX, RANGES_MAX, EpochAudit, UsageLog
from forged.data.sampling.usage import WHOLE_MAX, Run, Use, runs_of
from forged.errors import PeerError, RequestRefused
from tests.data.topology_changes import UNTIMED

SAMPLES = 20


def log_of(*reports: tuple[int, list[Run]], samples: int = SAMPLES) -> UsageLog:
    log = UsageLog(samples)
    for generation, runs in reports:
        log.report(generation, runs)
    return log


def ranges(positions: Iterable[int]) -> list[range]:
    """Positions as the longest ranges, the naive way."""
    found = []
    for _, group in groupby(enumerate(sorted(positions)), key=lambda pair: pair[1] - pair[0]):
        members = [position for _, position in group]
        found.append(range(members[0], members[-1] + 1))
    return found


def naive(epoch: int, uses: Iterable[Use], samples: int = SAMPLES) -> EpochAudit:
    """The audit by counting each position."""
    times: Counter[int] = Counter()
    seen: dict[bool, set[int]] = {False: set(), True: set()}
    for use in uses:
        if use.epoch == epoch:
            times.update(range(use.start, use.end))
            seen[use.dropped].update(range(use.start, use.end))
    missing = set(range(samples)) - times.keys()
    repeated = {position for position, count in times.items() if count > 1}
    used, dropped = len(seen[False]), len(seen[True])
    return EpochAudit(
        epoch, samples, used, dropped, ranges(missing), len(missing), ranges(repeated), len(repeated), False
    )


def test_an_epoch_of_which_each_position_was_used_once_is_complete() -> None:
    audit = log_of((1, [Run(0, 0, 0, 5, 4)])).audit(0)
    assert audit.complete
    assert (audit.expected, audit.used, audit.dropped) == (20, 20, 0)
    assert (audit.missing, audit.repeated, audit.forgotten) == ([], [], False)


def test_conflicting_reporters_are_named_and_the_epoch_is_unproven() -> None:
    """One of two samplers leaves out the rest of each epoch."""
    log = UsageLog(SAMPLES)
    keeps = [(0, [Use(0, 0, 9)]), (1, [Use(0, 9, 18)]), (2, [Use(0, 18, 20)]), (3, [Use(1, 0, 9)])]
    drops = [(0, [Use(0, 0, 9)]), (1, [Use(0, 9, 18), Use(0, 18, 20, dropped=True)]), (2, [Use(1, 0, 9)])]
    log.report(1, runs_of(keeps), "a")
    log.report(1, runs_of(drops), "b")
    assert (log.audit(0).conflicts, log.audit(0).complete) == ([(1, "b"), (2, "b")], False)
    assert log.audit(1).conflicts == [(2, "b")]
    assert UsageLog.decode(log.encode()).audit(0) == log.audit(0)


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=8),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_equal_use_in_other_rows_is_no_conflict(sizes: list[list[int]], first: int, split: int) -> None:
    uses, at = [], 0
    for step, parts in enumerate(sizes):
        ends = [at + sum(parts[:number]) for number in range(len(parts) + 1)]
        uses.append((step, [Use(0, start, end) for start, end in pairwise(ends)]))
        at = ends[-1]
    log = UsageLog(at)
    log.report(1, runs_of(uses), "a")
    log.report(1, [Run(step, 0, use.start, use.end - use.start) for step, parts in uses[first:] for use in parts], "b")
    log.report(1, runs_of(uses[:split]) + runs_of(uses[split:]), "c")
    assert log.audit(0).conflicts == []
    assert log.audit(0).complete


def test_partial_report_of_a_step_is_a_conflict() -> None:
    log = log_of((1, [Run(0, 0, 0, 10, 2)]))
    log.report(1, [Run(1, 0, 10, 5)], "b")
    assert log.audit(0).conflicts == [(1, "b")]


def test_conflicts_about_void_steps_are_dropped() -> None:
    log = log_of((1, [Run(0, 0, 0, 5, 3)]))
    log.report(1, [Run(1, 0, 5, 4), Run(2, 0, 9, 6)], "b")
    assert log.audit(0).conflicts == [(1, "b"), (2, "b")]
    log.rewind(2, 1)
    assert log.audit(0).conflicts == []
    log.report(1, [Run(1, 0, 6, 5)], "c")
    assert log.audit(0).conflicts == []


def test_only_the_latest_repeated_steps_are_compared_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPARED_RANGES_MAX", 4)
    log = log_of((1, [Run(step, 0, 4 * step + part, 1) for step in range(5) for part in (0, 2)]))
    log.report(1, [Run(step, 0, 4 * step + part, 1) for step in range(5) for part in (0, 3)], "b")
    assert log.audit(0).conflicts == [(3, "b"), (4, "b")]


def test_of_few_rows_that_stand_for_many_steps_the_latest_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPARED_RANGES_MAX", 4)
    log = log_of((1, [Run(0, 0, 0, 1, 10), Run(0, 0, 10, 1, 10)]))
    log.report(1, [Run(0, 0, 1, 1, 10), Run(0, 0, 10, 1, 10)], "b")
    assert log.audit(0).conflicts == [(8, "b"), (9, "b")]


def test_of_a_step_that_has_used_more_all_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPARED_RANGES_MAX", 1)
    log = log_of((1, [Run(0, 0, start, 1) for start in (0, 2, 4)]))
    log.report(1, [Run(0, 0, start, 1) for start in (0, 2, 5)], "b")
    assert log.audit(0).conflicts == [(0, "b")]


def test_repeated_runs_beyond_the_integer_range_are_no_conflict() -> None:
    most = WHOLE_MAX - 1
    log = log_of((1, [Run(0, 0, 0, 1, most)] * 3), samples=WHOLE_MAX)
    log.report(1, [Run(0, 0, 0, 1, most)] * 3, "b")
    assert log.audit(0).conflicts == []


def test_epochs_of_which_workers_tell_differently_hide_none_of_the_later_ones() -> None:
    log = UsageLog(30)
    for epoch in range(50):
        log.report(1, [Run(30 * epoch, epoch, 0, 1, 30)])
        log.report(1, [Run(30 * epoch + step, epoch, 29 - step, 1) for step in range(30)], "b")
    assert not any(log.audit(epoch).complete for epoch in range(50))
    assert log.audit(49).conflicts == [(30 * 49 + step, "b") for step in range(CONFLICTS_MAX)]
    decoded = UsageLog.decode(log.encode())
    assert all(decoded.audit(epoch) == log.audit(epoch) for epoch in range(50))
    log.rewind(2, 30 * 49 + 5)
    assert log.audit(49).conflicts == [(30 * 49 + step, "b") for step in range(5)]


def test_equal_repeated_report_keeps_the_revision() -> None:
    log = log_of((1, [Run(0, 0, 0, 5, 3)]))
    before = log.revision
    log.report(1, [Run(0, 0, 0, 5, 3)], "b")
    assert log.revision == before
    log.report(1, [Run(3, 0, 15, 5)], "b")
    assert log.revision > before


def test_oldest_epoch_is_forgotten_first() -> None:
    log = log_of((1, [Run(0, 0, 0, 5, 4), Run(4, 1, 0, 5, 4)]))
    assert log.forget_oldest()
    assert (log.audit(0).missing_total, log.audit(0).forgotten, log.audit(1).complete) == (SAMPLES, True, True)
    assert log.forget_oldest()
    assert not log.forget_oldest()


def test_reports_of_settled_steps_are_not_compared() -> None:
    log = log_of((1, [Run(0, 0, 0, 5, 3)]))
    log.settle(2)
    log.report(1, [Run(0, 0, 0, 4, 2), Run(2, 0, 10, 5)], "b")
    assert log.audit(0).conflicts == []


def test_a_log_from_before_tellings_were_compared_is_read() -> None:
    log = log_of((1, [Run(0, 0, 0, 5, 4)]))
    head, parts = msgspec.msgpack.decode(log.encode()[0])
    assert UsageLog.decode([msgspec.msgpack.encode((head[:6], parts))]).audit(0) == log.audit(0)


def test_dropped_samples_are_not_missing() -> None:
    audit = log_of((1, runs_of([(0, [Use(0, 0, 9)]), (1, [Use(0, 9, 18), Use(0, 18, 20, dropped=True)])]))).audit(0)
    assert audit.complete
    assert (audit.used, audit.dropped) == (18, 2)


def test_samples_dropped_and_used_are_repeated() -> None:
    audit = log_of((1, [Run(0, 0, 0, 20), Run(0, 0, 19, 1, 1, dropped=True)])).audit(0)
    assert not audit.complete
    assert audit.repeated == [range(19, 20)]


def test_missing_and_repeated_samples_are_named() -> None:
    audit = log_of((1, [Run(0, 0, 2, 3), Run(1, 0, 4, 6), Run(2, 0, 12, 8)])).audit(0)
    assert not audit.complete
    assert (audit.missing, audit.missing_total) == ([range(2), range(10, 12)], 4)
    assert (audit.repeated, audit.repeated_total) == ([range(4, 5)], 1)
    assert audit.used == 16


def test_all_samples_of_an_unused_epoch_are_missing() -> None:
    assert UsageLog(SAMPLES).audit(3).missing == [range(20)]
    assert UsageLog(SAMPLES).epochs == []


def test_an_epoch_without_samples_is_complete() -> None:
    assert UsageLog(0).audit(0).complete


def test_repeated_report_is_not_counted_again() -> None:
    log = log_of((1, [Run(0, 0, 0, 2, 4)]), (1, [Run(0, 0, 0, 2, 4)]), (1, [Run(2, 0, 4, 2, 8)]))
    assert log.audit(0).complete
    assert log.told(1) == 10
    assert log.told(2) == 0
    log.report(1, [])
    assert log.told(1) == 10


def test_samples_of_two_generations_without_rewind_are_repeated() -> None:
    log = log_of((1, [Run(0, 0, 0, 2, 4)]), (2, [Run(3, 0, 6, 2, 7)]))
    assert log.audit(0).repeated == [range(6, 8)]


def test_usage_after_the_rewound_step_is_void() -> None:
    log = log_of((1, [Run(0, 0, 0, 2, 9)]))
    log.rewind(2, 4)
    assert log.audit(0).missing == [range(8, 20)]
    log.report(2, [Run(4, 0, 8, 3, 4)])
    assert log.audit(0).complete


def test_a_late_report_of_a_void_step_is_void() -> None:
    log = log_of((1, [Run(0, 0, 0, 2, 3)]))
    log.rewind(3, 5)
    log.report(3, [Run(5, 0, 10, 10)])
    log.report(1, [Run(3, 0, 6, 2, 7)])
    log.report(2, [Run(5, 0, 10, 2)])
    assert log.audit(0).complete


def test_late_report_of_void_steps_changes_nothing() -> None:
    """Other members reported steps that are void since the training went back to before them."""
    log = log_of((1, [Run(0, 0, 0, 1, 8)]))
    log.rewind(2, 3)
    before = log.encode()
    log.report(1, [Run(0, 0, 0, 1, 12)])
    assert log.encode() == before
    assert UsageLog.decode(before).audit(0).used == 3


def test_older_generations_lose_all_steps_beyond_the_lowest_rewind() -> None:
    log = UsageLog(SAMPLES)
    log.rewind(3, 5)
    log.rewind(5, 2)
    log.report(1, [Run(0, 0, 0, 1, 9)])
    log.report(4, [Run(0, 0, 2, 1, 9)])
    assert log.audit(0).used == 4
    log.report(5, [Run(2, 0, 4, 16)])
    assert log.audit(0).complete


def test_to_say_again_that_the_training_went_back_changes_nothing() -> None:
    log = log_of((1, [Run(0, 0, 0, 2, 4)]))
    log.rewind(2, 3)
    log.rewind(4, 2)
    log.report(4, [Run(2, 0, 4, 16)])
    before = log.encode()
    log.rewind(4, 2)
    log.rewind(2, 3)
    assert log.encode() == before


@pytest.mark.parametrize(("generation", "step"), [(4, 1), (3, 2), (1, 0)])
def test_rewind_after_reports_of_its_generation_is_refused(generation: int, step: int) -> None:
    log = log_of((4, [Run(0, 0, 0, 2, 4)]))
    before = log.encode()
    with pytest.raises(RequestRefused, match=f"generation {generation} or"):
        log.rewind(generation, step)
    assert log.encode() == before


def test_going_back_over_whole_epochs_leaves_nothing_of_them() -> None:
    log = log_of((1, [Run(0, 0, 0, 10, 2), Run(2, 1, 0, 10, 2), Run(4, 2, 0, 10)]))
    log.settle(5)
    log.rewind(2, 2)
    assert log.epochs == [0]
    log.report(2, [Run(2, 1, 0, 20)])
    assert [log.audit(epoch).complete for epoch in (0, 1, 2)] == [True, True, False]


def test_complete_settled_epoch_is_one_row() -> None:
    order = [7, 3, 18, 0, *[at for at in range(20) if at not in (7, 3, 18, 0)]]
    log = log_of((1, runs_of((step, [Use(0, at, at + 1)]) for step, at in enumerate(order))))
    assert log.rows > 4
    log.settle(20)
    assert log.rows == 1
    assert log.audit(0).complete


def test_repeated_samples_stay_repeated_after_settling() -> None:
    log = log_of((1, [Run(0, 0, 0, 10, 2), Run(2, 0, 3, 4)]))
    before = log.audit(0)
    log.settle(3)
    assert log.audit(0) == before
    assert before.repeated == [range(3, 7)]


def test_going_back_behind_a_settled_step_into_an_epoch_forgets_its_beginning() -> None:
    """The rest can be used again, and nothing of the epoch is proven by what is not known."""
    log = log_of((1, [Run(0, 0, 0, 5, 4)]))
    log.settle(4)
    log.rewind(2, 2)
    log.report(2, [Run(2, 0, 10, 5, 2)])
    audit = log.audit(0)
    assert audit.forgotten
    assert not audit.complete
    assert audit.missing == [range(10)]
    assert UsageLog.decode(log.encode()).audit(0) == audit


def test_a_forgotten_beginning_is_made_up_for_by_going_back_before_it() -> None:
    log = log_of((1, [Run(0, 0, 0, 10, 2), Run(2, 1, 0, 5, 4)]))
    log.settle(6)
    log.rewind(2, 4)
    assert log.audit(1).forgotten
    log.rewind(3, 2)
    assert log.epochs == [0]
    log.report(3, [Run(2, 1, 0, 20)])
    assert log.audit(1).complete


def test_a_step_that_settles_is_none_that_was_settled() -> None:
    log = log_of((1, [Run(0, 0, 0, 5, 4)]))
    log.settle(2)
    log.settle(1)
    log.rewind(2, 3)
    assert log.audit(0).missing == [range(15, 20)]
    assert not log.audit(0).forgotten


def test_more_ranges_than_are_listed_are_counted() -> None:
    count = RANGES_MAX + 5
    log = log_of(
        (1, [Run(step, 0, step * 3, 1) for step in range(count)]),
        (2, [Run(step, 0, step * 3, 1) for step in range(count)]),
        samples=count * 3,
    )
    audit = log.audit(0)
    assert (len(audit.missing), audit.missing_total) == (RANGES_MAX, 2 * count)
    assert (len(audit.repeated), audit.repeated_total) == (RANGES_MAX, count)


def test_a_million_steps_in_a_thousand_reports_are_a_row() -> None:
    log = UsageLog(8_000_000)
    for report in range(1_000):
        first = report * 1_000
        log.report(
            report // 100, runs_of((step, [Use(0, step * 8, step * 8 + 8)]) for step in range(first, first + 1_000))
        )
    assert log.rows == 1
    assert log.audit(0).complete


def test_the_largest_dataset_and_the_last_epoch_fit() -> None:
    last = 2**63 - 1
    log = log_of((last, [Run(0, last, 0, last), Run(1, last, last - 1, 1, 1, dropped=True)]), samples=last)
    assert log.audit(last).repeated == [range(last - 1, last)]
    log.settle(2**63 - 2)
    assert UsageLog.decode(log.encode()).audit(last).used == last


def test_generations_that_are_too_old_are_forgotten_and_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GENERATIONS_MAX", 3)
    log = UsageLog(SAMPLES)
    for generation in range(1, 8):
        log.rewind(generation * 10, generation)
        log.report(generation * 10, [Run(generation, 0, generation, 1)])
    before = log.audit(0)
    log.report(40, [Run(0, 0, 0, 1)])
    assert log.audit(0) == before
    assert log.told(40) == 0
    log.report(50, [Run(8, 0, 12, 1)])
    assert log.audit(0) == before, "what came behind a way back is void still"
    log.report(70, [Run(8, 0, 12, 1)])
    assert log.audit(0).used == before.used + 1


steps = st.lists(
    st.lists(
        st.builds(
            lambda epoch, start, size, dropped: Use(epoch, start, min(SAMPLES, start + size), dropped),
            st.integers(0, 1),
            st.integers(0, SAMPLES - 1),
            st.integers(0, 6),
            st.booleans(),
        ),
        max_size=3,
    ),
    max_size=8,
)


@UNTIMED
@given(st.lists(st.tuples(steps, st.integers(0, 10), st.integers(0, 30), st.booleans(), st.booleans()), max_size=5))
def test_audit_equals_a_count_of_each_position(
    story: list[tuple[list[list[Use]], int, int, bool, bool]],
) -> None:
    """Reports that overlap, come again and are late, ways back, settled steps, and a log that was stored in between."""
    log, settled = UsageLog(SAMPLES), 0
    done: list[list[Use]] = []
    for number, (more, back, settle, again, stored) in enumerate(story):
        generation = number * 2 + 1
        if back < len(done) and back >= settled:
            log.rewind(generation, back)
            del done[back:]
        first = len(done)
        done += more
        told = list(enumerate(more, first))
        half = len(told) // 2
        log.report(generation, runs_of(told[:half]))
        log.report(generation, runs_of(told[half // 2 :]))
        if again:
            log.report(generation, runs_of(told))
            log.report(generation - 1, [])
        if settle <= len(done):
            settled = max(settled, settle)
            log.settle(settle)
        if stored:
            log = UsageLog.decode(log.encode())
    uses = [use for step in done for use in step]
    for epoch in (0, 1):
        assert log.audit(epoch) == naive(epoch, uses)


def large_log() -> UsageLog:
    log = UsageLog(10**9)
    for epoch in range(3):
        log.report(1, [Run(epoch * 50_000 + step, epoch, step * 7, 3) for step in range(20_000)])
    log.settle(60_000)
    log.rewind(2, 110_000)
    return log


def test_a_log_comes_back_from_its_chunks() -> None:
    log = large_log()
    chunks = log.encode()
    assert len(chunks) > 3
    assert max(map(len, chunks)) <= CHUNK_BYTES_MAX
    back = UsageLog.decode(chunks)
    assert back.encode() == chunks
    assert [back.audit(epoch) for epoch in range(4)] == [log.audit(epoch) for epoch in range(4)]
    back.report(1, [Run(0, 0, 0, 3)])
    assert back.audit(0) == log.audit(0)


def test_a_log_comes_back_however_little_there_is_in_it() -> None:
    assert UsageLog.decode(UsageLog(7).encode()).samples == 7


def test_the_first_chunk_has_room_for_all_generations() -> None:
    log = UsageLog(10)
    for number in range(module.GENERATIONS_MAX + 10):
        generation, step = 2**60 + number, 2**60 + number
        log.rewind(generation, step)
        log.report(generation, [Run(step, 2**61, 0, 1)])
    chunks = log.encode()
    assert max(map(len, chunks)) <= CHUNK_BYTES_MAX
    assert UsageLog.decode(chunks).encode() == chunks


def test_many_epochs_are_many_chunks() -> None:
    log = UsageLog(10)
    log.report(1, [Run(step, step, 0, 10) for step in range(10_000)])
    chunks = log.encode()
    assert len(chunks) > 1
    assert max(map(len, chunks)) <= CHUNK_BYTES_MAX
    assert UsageLog.decode(chunks).audit(9_999).complete


def damaged(chunks: list[bytes]) -> list[list[bytes]]:
    first, second, *rest = chunks
    return [
        [],
        [b""],
        chunks[1:],
        chunks[:-1],
        [second, first, *rest],
        [first, rest[0], second, *rest[1:]],
        [first, second, second, *rest[1:]],
        [*chunks, chunks[-1]],
        [first[:-1], second, *rest],
        [first, second[: len(second) // 2], *rest],
        [first + b"\0", second, *rest],
        [b"\xc1" * 100, second, *rest],
    ]


@pytest.fixture(scope="module")
def chunks() -> list[bytes]:
    return large_log().encode()


@pytest.mark.parametrize("number", range(12))
def test_chunks_that_are_not_those_of_a_log_are_refused(chunks: list[bytes], number: int) -> None:
    with pytest.raises(PeerError, match="cannot be decoded") as caught:
        UsageLog.decode(damaged(chunks)[number])
    assert caught.value.code == "usage_invalid"


@pytest.mark.parametrize(
    "row",
    [
        (-2, 0, 1, 1, 0),
        (0, -1, 1, 1, 0),
        (0, 0, 0, 1, 0),
        (0, 0, 1, 0, 0),
        (0, 0, 11, 1, 0),
        (0, 5, 2, 3, 0),
        (0, 0, 1, 1, 2),
        (0, 11, 1, 1, 0),
        (0, 0, 2**62, 2**62, 0),
    ],
)
def test_rows_that_no_log_can_have_are_refused(row: tuple[int, ...]) -> None:
    head, parts = msgspec.msgpack.decode(log_of((1, [Run(0, 0, 0, 1)]), samples=10).encode()[0])
    parts[0][4] = b"".join(value.to_bytes(8, "little", signed=True) for value in row)
    with pytest.raises(PeerError):
        UsageLog.decode([msgspec.msgpack.encode((head, parts))])
    parts[0][4] = parts[0][4][:-1]
    with pytest.raises(PeerError):
        UsageLog.decode([msgspec.msgpack.encode((head, parts))])


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (Run(0, 0, 0, 21), "got 0 to 21"),
        (Run(0, 0, 5, 4, 4), "got 5 to 21"),
        (Run(0, 0, 20, 1), "got 20 to 21"),
        (Run(-1, 0, 0, 1), "step"),
        (Run(0, -1, 0, 1), "epoch"),
        (Run(0, 0, -1, 1), "start"),
        (Run(0, 0, 0, 0), "size"),
        (Run(0, 0, 0, 1, 0), "count"),
        (Run(2**63 - 1, 0, 0, 1), "steps"),
    ],
)
def test_a_run_that_is_no_part_of_an_epoch_is_refused_and_changes_nothing(run: Run, name: str) -> None:
    log = log_of((1, [Run(0, 0, 0, 2)]))
    before = log.encode()
    with pytest.raises(RequestRefused, match=name):
        log.report(1, [Run(1, 0, 2, 2), run])
    assert log.encode() == before


@pytest.mark.parametrize("number", [-1, 1.0, None, True, 2**63])
def test_invalid_numbers_are_refused_by_name(number: Any) -> None:
    log = UsageLog(SAMPLES)
    with pytest.raises(RequestRefused, match="samples"):
        UsageLog(number)
    with pytest.raises(RequestRefused, match="generation"):
        log.report(number, [])
    with pytest.raises(RequestRefused, match="generation"):
        log.rewind(number, 0)
    with pytest.raises(RequestRefused, match="step"):
        log.rewind(1, number)
    with pytest.raises(RequestRefused, match="step"):
        log.settle(number)
    with pytest.raises(RequestRefused, match="epoch"):
        log.audit(number)
