"""Which facts the journal drops: by a model that decides anew for each one."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from forged.kernel.retention import AGED_S, Retention


@dataclass(frozen=True)
class Kept:
    id: int
    job: str
    size: int
    at: float


def model_choices(kept: list[Kept], facts_max: int, bytes_max: int, now: float) -> set[str]:
    """The jobs that may lose their oldest fact next; empty if nothing has to be dropped."""
    facts, size = len(kept), sum(fact.size for fact in kept)
    if (facts <= facts_max and size <= bytes_max) or facts <= 1:
        return set()
    oldest = kept[0]
    if now - oldest.at > AGED_S:
        return {oldest.job}
    use = {
        fact.job: sum(1 if facts > facts_max else other.size for other in kept if other.job == fact.job)
        for fact in kept
    }
    largest = {job for job, amount in use.items() if amount == max(use.values())}
    return {job if sum(fact.job == job for fact in kept) > 1 else oldest.job for job in largest}


@given(
    facts_max=st.integers(1, 12),
    bytes_max=st.integers(1, 60),
    arrivals=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 20), st.floats(0, AGED_S / 3)), max_size=60),
    burst=st.integers(1, 30),
)
def test_each_dropped_fact_is_one_that_the_rules_name(
    facts_max: int, bytes_max: int, arrivals: list[tuple[str, int, float]], burst: int
) -> None:
    retention, kept, now = Retention(), list[Kept](), 0.0
    for fact_id, (job, size, pause_s) in enumerate(arrivals, 1):
        now += pause_s
        retention.keep(job, [(fact_id, size, now)])
        kept.append(Kept(fact_id, job, size, now))
        if fact_id % burst and fact_id < len(arrivals):
            continue
        while (chosen := retention.next_to_drop(facts_max, bytes_max, now)) is not None:
            for dropped in retention.drop(*chosen):
                assert chosen[0] in model_choices(kept, facts_max, bytes_max, now)
                first = next(fact for fact in kept if fact.job == chosen[0])
                assert dropped == first.id
                kept.remove(first)
        assert not model_choices(kept, facts_max, bytes_max, now)
        assert (retention.facts, retention.bytes) == (len(kept), sum(fact.size for fact in kept))
        assert {job for job in "abcd" if job in retention} == {fact.job for fact in kept}
        assert kept[-1].id == fact_id, "the newest fact is kept"


@given(
    quiet=st.integers(1, 40),
    noisy=st.integers(1, 2000),
    jobs=st.integers(1, 4),
)
def test_job_within_an_equal_share_loses_nothing_to_others(quiet: int, noisy: int, jobs: int) -> None:
    facts_max = 200
    retention = Retention()
    quiet = min(quiet, facts_max // (jobs + 1))
    dropped: list[str] = []
    for fact_id in range(1, quiet + 1):
        retention.keep("quiet", [(fact_id, 100, 0.0)])
    for fact_id in range(quiet + 1, quiet + noisy + 1):
        retention.keep(f"noisy {fact_id % jobs}", [(fact_id, 100, 0.0)])
        while (chosen := retention.next_to_drop(facts_max, 1 << 30, 0.0)) is not None:
            retention.drop(*chosen)
            dropped.append(chosen[0])
    assert "quiet" not in dropped


def test_job_with_large_facts_loses_them_to_a_job_with_many_small_ones() -> None:
    retention = Retention()
    for fact_id in range(1, 51):
        retention.keep("small", [(fact_id, 10, 0.0)])
    retention.keep("large", [(51, 800, 0.0)])
    retention.keep("large", [(52, 800, 0.0)])
    assert retention.next_to_drop(1000, 1500, 0.0) == ("large", 1)
    retention.drop("large", 1)
    assert retention.next_to_drop(1000, 1500, 0.0) is None


def test_largest_job_loses_several_facts_at_once() -> None:
    retention = Retention()
    for fact_id in range(1, 101):
        retention.keep("large" if fact_id <= 70 else "small", [(fact_id, 10, 0.0)])
    job, count = retention.next_to_drop(10, 1 << 30, 0.0) or ("", 0)
    assert job == "large"
    assert 1 < count <= 41, "at most until it has fewer facts than the small one"
    retention.drop(job, count)
    assert retention.next_to_drop(99 - count, 1 << 30, 0.0) == ("large", 1)


def test_ranks_of_jobs_that_come_and_go_use_bounded_memory() -> None:
    retention = Retention()
    for fact_id in range(1, 50_000):
        retention.keep(f"job {fact_id % 10_000}", [(fact_id, 10, 0.0)])
        while (chosen := retention.next_to_drop(20, 1 << 30, 0.0)) is not None:
            retention.drop(*chosen)
    assert all(len(ranking._heap) < 500 for ranking in (retention._by_facts, retention._by_bytes, retention._by_age))
