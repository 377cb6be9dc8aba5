from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forged.kernel.journal import FLOORS_SLACK, STORY_FACTS_MAX, Journal
from forged.kernel.messages import Record
from forged.kernel.retention import AGED_S
from tests.kernel_fixture import Echoed, ids


def record(fact_id: int, cause: int = 0) -> Record:
    return Record.of(Echoed(cause), fact_id=fact_id, at=0.0, cause=cause)


def records(*fact_ids: int) -> list[Record]:
    return [record(fact_id) for fact_id in fact_ids]


def journal_of(causes: dict[int, int], facts_max: int = 1000) -> Journal:
    """A journal of facts with these ids, each with its cause."""
    journal = Journal(facts_max)
    journal.extend([record(fact_id, cause) for fact_id, cause in causes.items()])
    return journal


def test_a_new_journal_is_empty() -> None:
    journal = Journal()
    assert (len(journal), journal.last, journal.floor, journal.get(0), journal.story(0)) == (0, 0, 0, None, [])


def test_a_fact_is_found_by_its_id() -> None:
    journal = journal_of({1: 0, 5: 0, 9: 0})
    found = journal.get(5)
    assert found is not None
    assert found.id == 5


@pytest.mark.parametrize("fact_id", [-1, 0, 2, 4, 6, 10])
def test_unknown_id_is_not_found(fact_id: int) -> None:
    assert journal_of({1: 0, 5: 0, 9: 0}).get(fact_id) is None


@pytest.mark.parametrize(
    ("position", "found"), [(-1, [1, 5]), (0, [1, 5]), (1, [5, 9]), (4, [5, 9]), (9, []), (99, [])]
)
def test_after_a_position_come_the_next_facts_oldest_first(position: int, found: Sequence[int]) -> None:
    assert ids(journal_of({1: 0, 5: 0, 9: 0}).after(position, 2)) == found


@pytest.mark.parametrize(("position", "count"), [(-1, 3), (0, 3), (1, 2), (4, 2), (5, 1), (9, 0), (99, 0)])
def test_the_facts_after_a_position_are_counted(position: int, count: int) -> None:
    assert journal_of({1: 0, 5: 0, 9: 0}).count_after(position) == count


def test_facts_that_were_forgotten_are_not_counted() -> None:
    journal = journal_of(dict.fromkeys(range(1, 101), 0), facts_max=10)
    assert (journal.count_after(0), journal.count_after(95), Journal().count_after(0)) == (10, 5, 0)


def test_the_oldest_facts_are_forgotten_first_and_the_floor_says_up_to_which() -> None:
    journal = Journal(3)
    journal.extend(records(1, 2, 4, 8))
    journal.extend(records(16))
    assert ids(journal.after(0, 10)) == [4, 8, 16]
    assert journal.floor == 2
    assert journal.get(2) is None


def test_floor_of_0_means_nothing_was_dropped() -> None:
    journal = Journal(3)
    journal.extend(records(5, 6, 7))
    assert (journal.floor, len(journal)) == (0, 3)


def test_a_batch_larger_than_the_journal_leaves_its_end() -> None:
    journal = Journal(2)
    journal.extend(records(*range(1, 11)))
    assert (ids(journal.after(0, 10)), journal.floor) == ([9, 10], 8)


def test_facts_out_of_order_raise_an_error() -> None:
    journal = journal_of({5: 0})
    with pytest.raises(AssertionError):
        journal.extend(records(5))


def test_reset_loads_the_stored_facts_and_floor() -> None:
    journal = journal_of({1: 0, 2: 0, 3: 0})
    journal.reset(records(7, 8), 6)
    assert (ids(journal.after(0, 10)), journal.floor, journal.last) == ([7, 8], 6, 8)


def test_reset_keeps_no_more_than_the_journal_may_hold() -> None:
    journal = Journal(2)
    journal.reset(records(7, 8, 9, 10), 6)
    assert (ids(journal.after(0, 10)), journal.floor) == ([9, 10], 8)


# Stories.

FAMILY = {1: 0, 2: 1, 3: 1, 4: 2, 5: 0, 6: 4, 7: 3, 8: 5}
"""1 caused 2 and 3, which caused 4, 6 and 7; 5 caused 8."""


@pytest.mark.parametrize(
    ("fact_id", "story"),
    [
        (1, [1, 2, 3, 4, 6, 7]),
        (2, [1, 2, 4, 6]),
        (4, [1, 2, 4, 6]),
        (6, [1, 2, 4, 6]),
        (7, [1, 3, 7]),
        (5, [5, 8]),
        (99, []),
    ],
)
def test_a_story_has_the_causes_above_and_all_consequences_below(fact_id: int, story: Sequence[int]) -> None:
    assert ids(journal_of(FAMILY).story(fact_id)) == story


def test_a_chain_that_leads_to_a_forgotten_fact_ends_there() -> None:
    journal = journal_of({1: 0, 2: 1, 3: 2, 4: 3}, facts_max=2)
    assert ids(journal.story(4)) == [3, 4]


def test_a_story_is_bounded_upwards() -> None:
    count = STORY_FACTS_MAX + 100
    journal = journal_of({fact_id: fact_id - 1 for fact_id in range(1, count + 1)}, facts_max=count)
    story = ids(journal.story(count))
    assert (len(story), story[-1]) == (STORY_FACTS_MAX, count)


def test_a_story_is_bounded_downwards() -> None:
    count = STORY_FACTS_MAX + 100
    journal = journal_of({1: 0} | dict.fromkeys(range(2, count + 1), 1), facts_max=count)
    assert len(journal.story(1)) == STORY_FACTS_MAX


@given(data=st.data(), count=st.integers(1, 60), facts_max=st.integers(1, 60))
def test_story_equals_following_the_causes_one_by_one(data: st.DataObject, count: int, facts_max: int) -> None:
    causes = {fact_id: data.draw(st.integers(0, fact_id - 1)) for fact_id in range(1, count + 1)}
    journal = journal_of(causes, facts_max)
    kept = range(max(1, count - facts_max + 1), count + 1)
    fact_id = data.draw(st.sampled_from(kept))

    def ancestors(one: int) -> set[int]:
        return set() if one not in kept else {one} | ancestors(causes[one])

    family = ancestors(fact_id) | {one for one in kept if fact_id in ancestors(one)}
    assert ids(journal.story(fact_id)) == sorted(family)


class Journals(RuleBasedStateMachine):
    """A journal and a list as its model."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal(5)
        self.model: list[int] = []
        self.floor = 0

    @rule(steps=st.lists(st.integers(1, 3), max_size=12))
    def extend(self, steps: list[int]) -> None:
        fresh: list[int] = []
        for step in steps:
            fresh.append((fresh or self.model or [self.floor])[-1] + step)
        self.journal.extend(records(*fresh))
        self.keep(self.model + fresh)

    @rule(count=st.integers(0, 8))
    def reset(self, count: int) -> None:
        kept = self.model[-count:] if count else []
        self.floor = max([self.floor, *self.model[: len(self.model) - len(kept)]])
        self.journal.reset(records(*kept), self.floor)
        self.keep(kept)

    @rule(position=st.integers(-1, 300), limit=st.integers(0, 8))
    def after(self, position: int, limit: int) -> None:
        expected = [fact_id for fact_id in self.model if fact_id > position][:limit]
        assert ids(self.journal.after(position, limit)) == expected
        assert self.journal.count_after(position) == sum(fact_id > position for fact_id in self.model)

    @rule(fact_id=st.integers(-1, 300))
    def get(self, fact_id: int) -> None:
        found = self.journal.get(fact_id)
        assert (found.id if found else None) == (fact_id if fact_id in self.model else None)

    @invariant()
    def both_hold_the_same(self) -> None:
        assert ids(self.journal.after(0, len(self.model) + 1)) == self.model
        assert (len(self.journal), self.journal.floor) == (len(self.model), self.floor)
        assert self.journal.last == (self.model[-1] if self.model else 0)

    def keep(self, fact_ids: list[int]) -> None:
        forgotten, self.model = fact_ids[:-5], fact_ids[-5:]
        self.floor = forgotten[-1] if forgotten else self.floor


TestJournals = Journals.TestCase


def test_journal_stays_within_its_bound() -> None:
    journal = Journal(100)
    for first in range(1, 10_001, 50):
        journal.extend(records(*range(first, first + 50)))
        assert len(journal) <= 100
    assert ids(journal.after(0, 1000)) == list(range(9901, 10_001))
    assert journal.floor == 9900


# Jobs.


def of_job(fact_id: int, job: str) -> Record:
    return Record.of(Echoed(fact_id), fact_id=fact_id, at=0.0, job=job)


def flooded(journal: Journal, quiet: int = 5, noisy: int = 1000) -> Journal:
    """Facts of the job `quiet`, between the first ones of the job `noisy`, which then goes on."""
    names = ["quiet", "noisy"] * quiet + ["noisy"] * (noisy - quiet)
    for fact_id, job in enumerate(names, 1):
        journal.extend([of_job(fact_id, job)])
    return journal


def test_job_that_floods_the_journal_displaces_only_its_own_facts() -> None:
    journal = flooded(Journal(100))
    assert len(journal) == 100
    assert ids(journal.after(0, 6)) == [1, 3, 5, 7, 9, 911]


def test_floor_is_kept_by_job() -> None:
    journal = flooded(Journal(100))
    assert (journal.floor, journal.floor_of(None), journal.floor_of(["noisy"])) == (910, 910, 910)
    assert (journal.floor_of(["quiet"]), journal.floor_of(["quiet", "noisy"]), journal.floor_of([])) == (0, 910, 0)


def test_kept_fact_knows_the_newest_dropped_one_before_it() -> None:
    journal = flooded(Journal(100))
    assert [journal.dropped_before(one) for one in (1, 3, 5, 9, 911, 912)] == [0, 2, 4, 8, 910, 0]


def test_bytes_are_shared_like_facts() -> None:
    size = len(of_job(1, "quiet").data)
    journal = flooded(Journal(facts_max=10_000, bytes_max=100 * size))
    assert journal.bytes <= 100 * size
    assert ids(journal.after(0, 5)) == [1, 3, 5, 7, 9]


def test_facts_older_than_a_week_are_dropped_before_the_facts_of_the_largest_job() -> None:
    journal = Journal(10)
    aged = [Record.of(Echoed(1), fact_id=one, at=0.0, job="aged") for one in (1, 2)]
    journal.extend([*aged, *[Record.of(Echoed(1), fact_id=one, at=AGED_S, job="now") for one in range(3, 11)]])
    journal.extend([Record.of(Echoed(1), fact_id=11, at=AGED_S + 1, job="now")])
    assert ids(journal.after(0, 20)) == list(range(2, 12))


def test_floors_of_jobs_without_facts_are_joined() -> None:
    journal = Journal(10)
    for fact_id in range(1, 3 * FLOORS_SLACK):
        journal.extend([of_job(fact_id, f"job {fact_id}")])
    assert len(journal._floors) <= FLOORS_SLACK + 2 * 10
    gone = journal.floor_of(["job 1"])
    assert 1 <= gone <= journal.floor
    journal.extend([of_job(3 * FLOORS_SLACK, "job 1")])
    assert journal.floor_of(["job 1"]) == gone, "its former facts are still known to be dropped"


class JobJournals(RuleBasedStateMachine):
    """A journal of several jobs, and all facts that it ever got."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal(12)
        self.ever: dict[int, str] = {}
        self.stored: dict[int, Record] = {}
        self.floors: dict[str, int] = {}
        self.floor_of_others = 0

    @rule(jobs=st.lists(st.sampled_from("aaabbc"), max_size=9))
    def extend(self, jobs: list[str]) -> None:
        new = [of_job(fact_id, job) for fact_id, job in enumerate(jobs, max(self.ever, default=0) + 1)]
        self.ever |= {record.id: record.job for record in new}
        before = max(self.stored, default=0)
        self.journal.plan(new)
        self.store(before)
        self.stored |= {record.id: record for record in new}
        self.journal.extend(new)

    def store(self, newest_id: int) -> None:
        dropped = self.journal.take_dropped(3, 100, newest_id)
        for fact_id in dropped.ids:
            del self.stored[fact_id]
        for job, floor in dropped.floors.items():
            if floor is None:
                self.floors.pop(job, None)
                self.floor_of_others = dropped.floor_of_others
            else:
                self.floors[job] = floor

    @rule()
    def restart(self) -> None:
        self.journal.reset(list(self.stored.values()), self.floor_of_others, self.floors)

    @invariant()
    def every_dropped_fact_is_told(self) -> None:
        kept = [record.id for record in self.journal.after(0, 1000)]
        assert len(kept) == len(self.journal) <= 12
        assert set(kept) <= set(self.stored) <= set(self.ever)
        for fact_id, job in self.ever.items():
            following = next((one for one in kept if one > fact_id), None)
            if fact_id not in kept:
                assert fact_id <= self.journal.floor_of([job]) <= self.journal.floor
                assert following is not None
                assert fact_id <= self.journal.dropped_before(following) < following
            elif following is not None:
                assert self.journal.floor_of([job]) < fact_id

    @invariant()
    def job_within_its_share_loses_nothing(self) -> None:
        kept = [self.ever[record.id] for record in self.journal.after(0, 1000)]
        for job in "abc":
            count = list(self.ever.values()).count(job)
            assert count > 4 or kept.count(job) == count


TestJobJournals = JobJournals.TestCase
