from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.messages import NAMED_MAX, PAGE_SHARDS_MAX, DatasetSpec
from forged.data.model import Indices
from forged.data.ownership import pages, planning, suspect_copies
from forged.data.ownership.attempt import DataAttempt, Draft, FinishedTransfers, LostShards
from forged.data.ownership.ownership import ShardOwnership
from forged.data.placement.planner import DataRedistributor
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, RedistributionType, WorkerId
from forged.errors import RequestRefused

CONFIG = ElasticTrainingConfig(redistribution_type=RedistributionType.INCREMENTAL)
NOTHING = np.empty(0, np.int64)


def worker(name: str) -> WorkerId:
    return WorkerId(name, f"host-{name}", 7000)


def workers(names: str) -> tuple[WorkerId, ...]:
    return tuple(map(worker, names))


def ids(*numbers: int) -> Indices:
    return np.array(numbers, np.int64)


def ownership(
    shards: int = 10, *, samples: int | None = None, replication: int = 0, has_origin: bool = False
) -> ShardOwnership:
    return ShardOwnership("run", DatasetSpec(samples or 100 * shards, shards, replication, has_origin))


def settled(it: ShardOwnership, number: int, held: dict[str, Indices], *, draining: str = "") -> DataAttempt:
    """All workers offer, and a plan is made."""
    it.begin(number, workers("".join(name for name in held if name not in draining)), workers(draining), 0.0)
    was_last = [it.offer(worker(name), ids, False, 8 * ids.size, 0.0) for name, ids in held.items()]
    assert was_last == [False] * (len(held) - 1) + [True]
    attempt = it.attempt
    assert attempt is not None
    it.take(attempt, planning.draft(it, attempt, CONFIG))
    return attempt


def part(it: ShardOwnership, name: str, attempt: int) -> tuple[list[int], list[list[int]], list[int]]:
    """All pages of a member's part: shards to fetch, their sources, shards to keep."""
    shards: list[int] = []
    sources: list[list[int]] = []
    keep: list[int] = []
    after, more = 0, True
    while more:
        page = pages.transfer_page(it, name, attempt, after)
        shards += np.frombuffer(page.shards, "<i8").tolist()
        sources += np.frombuffer(page.sources, "<i4").reshape(-1, page.sources_per_shard).tolist()
        keep += np.frombuffer(page.keep, "<i8").tolist()
        after, more = after + PAGE_SHARDS_MAX, page.more
    return shards, sources, keep


def test_another_dataset_is_refused_by_its_numbers() -> None:
    it = ownership(10)
    it.require_same(DatasetSpec(1_000, 10))
    with pytest.raises(RequestRefused) as error:
        it.require_same(DatasetSpec(1_000, 1, 1, has_origin=True))
    here, there = "1000 samples in 10 shards, no replicas, without an origin", "1 shard, 1 replica, with an"
    assert here in error.value.message
    assert there in error.value.message
    assert error.value.code == "dataset_differs"


def crowded(held: dict[str, Indices], config: ElasticTrainingConfig = CONFIG) -> list[list[int]]:
    """The shards of each worker when the first one is full and the last one leaves."""
    it, everybody = ownership(12), workers("".join(held))
    it.begin(1, everybody[:-1], everybody[-1:], 0.0)
    for name, shards in held.items():
        it.offer(worker(name), shards, False, 0, 0.0)
    assert it.mark_full(everybody[0])
    assert not it.mark_full(everybody[0])
    assert it.attempt is not None
    owned = planning.draft(it, it.attempt, config).plan.worker_assignments
    return [owned.ids(one).tolist() for one in everybody[:-1]]


def test_full_worker_keeps_its_shards_and_gets_no_new_ones() -> None:
    held = {"a": ids(0, 1, 2, 3), "b": ids(4, 5, 6, 7), "c": ids(8, 9, 10, 11)}
    assert crowded(held) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]]


def test_full_worker_keeps_its_shards_beside_several_others() -> None:
    held = {"a": ids(0, 1, 2), "b": ids(3, 4, 5), "c": ids(6, 7, 8), "d": ids(9, 10, 11)}
    full, *others = crowded(held)
    assert full == [0, 1, 2]
    assert sorted(map(len, others)) == [4, 5]


def test_full_worker_gets_no_shards_in_a_full_reshuffle() -> None:
    held = {"a": ids(0, 1, 2, 3), "b": ids(4, 5, 6, 7), "c": ids(8, 9, 10, 11)}
    assert crowded(held, ElasticTrainingConfig()) == [[], list(range(12))]


def test_single_full_worker_still_owns_all_shards() -> None:
    assert crowded({"a": ids(0, 1, 2, 3), "b": ids(*range(4, 12))}) == [list(range(12))]


def test_worker_without_only_copies_is_not_marked_full() -> None:
    it = ownership(4)
    it.begin(1, workers("ab"), (), 0.0)
    for name, shards in {"a": ids(0, 1, 2, 3), "b": ids(0, 1)}.items():
        it.offer(worker(name), shards, False, 0, 0.0)
    assert not it.mark_full(worker("b"))
    assert it.mark_full(worker("a"))


def test_unheld_shards_come_from_the_origin() -> None:
    it = ownership(4, has_origin=True)
    attempt = settled(it, 1, {"a": NOTHING, "b": NOTHING})
    assert (attempt.totals.from_origin, attempt.lost) == (4, LostShards())
    shards, sources, keep = part(it, "a", 1)
    assert shards == keep
    assert all(source[-1] == -1 for source in sources)


def test_lost_shards_without_origin_are_named_up_to_the_limit() -> None:
    it = ownership(100)
    attempt = settled(it, 1, {"a": ids(*range(50)), "b": NOTHING})
    assert attempt.lost == LostShards(50, tuple(range(50, 50 + NAMED_MAX)))


def test_current_offer_replaces_earlier_holdings() -> None:
    it = ownership(4)
    first = settled(it, 1, {"a": ids(0, 1, 2, 3), "b": NOTHING})
    assert first.plan is not None
    it.assignment = type(it.assignment)(1, first.target, first.plan.owners, first.plan.replicas)
    assert settled(it, 2, {"a": ids(0, 1), "b": ids(2)}).lost == LostShards(1, (3,))


def test_owner_stays_owner_when_replicas_exist() -> None:
    it = ownership(4)
    first = settled(it, 1, {"a": ids(0, 1, 2, 3), "b": ids(2, 3)})
    assert first.plan is not None
    it.assignment = type(it.assignment)(1, first.target, first.plan.owners, first.plan.replicas)
    again = settled(it, 2, {"b": ids(0, 1, 2, 3), "a": ids(0, 1, 2, 3)})
    assert again.totals.transfers == 0
    assert again.totals.shards == 0


def test_draining_worker_serves_and_gets_no_shards() -> None:
    it = ownership(6)
    attempt = settled(it, 1, {"a": ids(0, 1), "b": NOTHING, "z": ids(2, 3, 4, 5)}, draining="z")
    assert attempt.totals.from_owners == 4
    assert attempt.lost == LostShards()
    assert part(it, "z", 1)[::2] == ([], [])


def test_other_holders_are_named_for_when_the_first_fails() -> None:
    it = ownership(2, has_origin=True)
    settled(it, 1, {"a": ids(0, 1), "b": ids(0, 1), "c": NOTHING, "d": NOTHING})
    place = {"a": 0, "b": 1}
    for name in "cd":
        shards, sources, _ = part(it, name, 1)
        for source in sources:
            assert {source[0], source[1]} == set(place.values())
            assert source[-1] == -1
        assert len(shards) <= 1


@given(
    shards=st.integers(0, 60),
    replication=st.integers(0, 2),
    holders=st.lists(st.sets(st.integers(0, 59)), min_size=1, max_size=6),
)
def test_worker_that_fetches_its_transfers_holds_its_assignment(
    shards: int, replication: int, holders: list[set[int]]
) -> None:
    it = ownership(shards, replication=replication, has_origin=True)
    held = {name: ids(*sorted(n for n in has if n < shards)) for name, has in zip("abcdef", holders, strict=False)}
    attempt = settled(it, 1, held)
    assert attempt.plan is not None
    assert DataRedistributor(CONFIG, replication=replication).validate_redistribution(
        ClusterTopology(attempt.target), attempt.plan
    )
    copies = np.zeros(shards, int)
    for name, has in held.items():
        fetched, sources, keep = part(it, name, 1)
        assert set(keep) <= {*has.tolist(), *fetched}
        assert not {*has.tolist()} & {*fetched}
        for shard, source in zip(fetched, sources, strict=True):
            assert all(n < 0 or shard in held["abcdef"[n]] for n in source)
        copies[keep] += 1
    assert (copies == 1 + min(replication, len(held) - 1)).all()


def test_parts_come_in_pages() -> None:
    it = ownership(2 * PAGE_SHARDS_MAX + 10, has_origin=True)
    settled(it, 1, {"a": NOTHING})
    assert pages.transfer_page(it, "a", 1, 0).more
    shards, _, keep = part(it, "a", 1)
    assert shards == keep == list(range(2 * PAGE_SHARDS_MAX + 10))


def test_offer_may_be_sent_in_parts() -> None:
    it = ownership(4)
    it.begin(1, workers("a"), (), 0.0)
    assert not it.offer(worker("a"), ids(0, 1), True, 0, 0.0)
    assert it.offer(worker("a"), ids(1, 2, 3), False, 400, 0.0)
    assert it.attempt is not None
    assert it.attempt.offers[worker("a")].ids.tolist() == [0, 1, 2, 3]


def test_invalid_shard_ids_and_non_members_are_refused() -> None:
    it = ownership(4)
    it.begin(2, workers("a"), (), 0.0)
    for member, held, code in (("a", ids(4), "holdings_invalid"), ("a", ids(-1), "holdings_invalid")):
        with pytest.raises(RequestRefused) as error:
            it.offer(worker(member), held, False, 0, 0.0)
        assert error.value.code == code
    with pytest.raises(RequestRefused) as error:
        it.offer(worker("b"), NOTHING, False, 0, 0.0)
    assert error.value.code == "not_a_member"
    with pytest.raises(RequestRefused) as error:
        it.begin(1, workers("a"), (), 0.0)
    assert error.value.code == "attempt_over"


def test_a_newer_attempt_begins_anew() -> None:
    it = ownership(4, has_origin=True)
    settled(it, 1, {"a": NOTHING})
    it.begin(2, workers("ab"), (), 0.0)
    assert it.attempt is not None
    assert it.attempt.waiting_for == list(workers("ab"))
    for attempt, code in ((1, "attempt_over"), (2, "plan_pending")):
        with pytest.raises(RequestRefused) as error:
            pages.transfer_page(it, "a", attempt, 0)
        assert error.value.code == code


def test_an_attempt_is_given_up_once_whether_anything_is_planned_or_not() -> None:
    it = ownership(4)
    it.begin(2, workers("ab"), (), 0.0)
    with pytest.raises(RequestRefused) as error:
        it.abandon(1)
    assert error.value.code == "attempt_over"
    assert [it.abandon(2), it.abandon(2)] == [True, False]
    settled(it, 3, {"a": ids(0, 1), "b": ids(2, 3)})
    assert [it.abandon(3), it.abandon(3)] == [True, False]


def test_suspects_of_absent_workers_are_dropped_first_at_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspect_copies, "SUSPECTS_MAX", 3)
    it = ownership(4)
    settled(it, 1, {"a": ids(0, 1), "b": ids(2, 3)})
    assert [it.suspect(*copy) for copy in (("a", 0), ("gone", 0), ("gone", 1))] == [0, 0, 0]
    assert it.suspect("b", 2) == 2
    assert it.suspect("b", 3) == 0
    assert it.suspect("b", 0) == 1
    assert [it.suspects.held_by(name, ids(0, 1, 2, 3)).tolist() for name in ("a", "b", "gone")] == [[0], [2, 3], []]


def test_all_have_finished_once() -> None:
    it = ownership(4, has_origin=True)
    settled(it, 1, {"a": NOTHING, "b": NOTHING})
    done = FinishedTransfers(2, 20)
    assert [it.finish("a", 1, done), it.finish("a", 1, done), it.finish("b", 1, done)] == [False, False, True]
    assert not it.finish("b", 1, done)


def test_the_first_transfers_show_how_large_and_how_fast_they_are() -> None:
    """The workers had nothing to measure when they said what they hold."""
    it = ownership(8, samples=800, has_origin=True)
    attempt = settled(it, 1, {"a": NOTHING, "b": NOTHING})
    assert attempt.plan is not None
    it.assignment = type(it.assignment)(1, attempt.target, attempt.plan.owners, attempt.plan.replicas)
    assert planning.preview(it, ["a"], CONFIG).estimated_s is None
    it.finish("a", 1, FinishedTransfers(4, 40_000, 2.0))
    it.finish("b", 1, FinishedTransfers(4, 40_000, 2.0))
    totals = planning.preview(it, ["a"], CONFIG)
    # Four transfers in as many lanes, of 5,000 bytes per second each.
    assert (totals.transfers, totals.bytes) == (4, 40_000)
    assert totals.estimated_s == pytest.approx(2.0)


@pytest.mark.parametrize("took_s", [0.0, float("inf"), float("nan")])
def test_a_time_that_is_none_shows_nothing(took_s: float) -> None:
    it = ownership(2, has_origin=True)
    settled(it, 1, {"a": NOTHING})
    assert it.finish("a", 1, FinishedTransfers(2, 20, took_s))
    assert planning.preview(it, ["a", "b"], CONFIG).estimated_s is None


@pytest.mark.parametrize("speed", [0.0, float("inf"), float("nan")])
def test_a_speed_that_is_none_shows_nothing(speed: float) -> None:
    it = ownership(4, has_origin=True)
    it.begin(1, workers("ab"), (), 0.0)
    it.offer(worker("a"), ids(0, 1), False, 100, speed)
    it.offer(worker("b"), NOTHING, False, 0, speed)
    assert it.attempt is not None
    assert planning.draft(it, it.attempt, CONFIG).pace is None


def test_preview_refuses_a_worker_named_twice() -> None:
    with pytest.raises(RequestRefused, match="twice") as error:
        planning.preview(ownership(4), ["a", "a"], CONFIG)
    assert error.value.code == "workers_invalid"


def test_estimates_use_measured_rates() -> None:
    it = ownership(10, samples=1_000)
    it.begin(1, workers("ab"), (), 0.0)
    it.offer(worker("a"), ids(*range(10)), False, 1_000_000, 250_000.0)
    it.offer(worker("b"), NOTHING, False, 0, 0.0)
    attempt = it.attempt
    assert attempt is not None
    it.take(attempt, planning.draft(it, attempt, CONFIG))
    assert (attempt.totals.transfers, attempt.totals.bytes) == (5, 500_000)
    # Five transfers in four lanes.
    assert attempt.totals.estimated_s == pytest.approx(2 * 100_000 / 250_000)


def test_preview_changes_nothing() -> None:
    it = ownership(12)
    first = settled(it, 1, {"a": ids(*range(6)), "b": ids(*range(6, 12))})
    assert first.plan is not None
    it.assignment = type(it.assignment)(1, first.target, first.plan.owners, first.plan.replicas)
    totals = planning.preview(it, ["a", "b", "new-1"], CONFIG)
    assert (totals.shards, totals.transfers, totals.from_owners) == (4, 4, 4)
    assert it.attempt is first


def test_preview_takes_shards_of_gone_workers_from_the_origin() -> None:
    it = ownership(12, has_origin=True)
    first = settled(it, 1, {"a": ids(*range(6)), "b": ids(*range(6, 12))})
    assert first.plan is not None
    it.assignment = type(it.assignment)(1, first.target, first.plan.owners, first.plan.replicas)
    totals = planning.preview(it, ["a"], CONFIG)
    assert (totals.from_owners, totals.from_origin) == (6, 0), "b goes, and gives what it has"
    totals = planning.preview(it, ["a"], CONFIG, gone=["b"])
    assert (totals.from_owners, totals.from_origin) == (0, 6)


def test_preview_places_new_workers_on_hosts_of_their_own() -> None:
    """On one host they would have fewer of the further copies than they will."""
    it = ownership(12, replication=1)
    first = settled(it, 1, {"a": ids(*range(12))})
    assert first.plan is not None
    it.assignment = type(it.assignment)(1, first.target, first.plan.owners, first.plan.replicas)
    # Each of them owns four, and has further copies of four.
    assert planning.preview(it, ["a", "new-1", "new-2"], CONFIG).transfers == 16


def test_samples_are_counted_by_owner() -> None:
    it = ownership(3, samples=10)
    first = settled(it, 1, {"a": ids(0, 2), "b": ids(1)})
    assert first.plan is not None
    it.assignment = type(it.assignment)(1, first.target, first.plan.owners, first.plan.replicas)
    assert [(one.worker_id, one.owned, one.samples) for one in pages.data_view(it).workers] == [
        ("a", 2, 7),
        ("b", 1, 3),
    ]


def test_empty_dataset_needs_no_transfers() -> None:
    it = ownership(0, samples=0)
    attempt = settled(it, 1, {"a": NOTHING, "b": NOTHING})
    assert attempt.totals.transfers == 0
    assert part(it, "a", 1) == ([], [], [])


def test_shards_lost_at_the_origin_are_reported_once_until_fetched() -> None:
    it = ownership(4, has_origin=True)
    attempt = settled(it, 1, {"a": NOTHING, "b": NOTHING})
    lost = LostShards(2, (0, 2), "a: it is not there")
    assert it.report_lost(attempt, "a", lost)
    assert not it.report_lost(attempt, "a", lost._replace(reason="a: the bucket is away"))
    assert it.report_lost(attempt, "a", LostShards(1, (2,), "a: it is not there"))
    assert (attempt.lost.number, attempt.lacks_shards) == (1, True)
    it.finish("a", 1, FinishedTransfers(2, 200))
    assert (attempt.lost, attempt.lacks_shards) == (LostShards(), False)


def test_shard_fetched_from_the_origin_has_arrived_for_its_replicas() -> None:
    it = ownership(4, replication=1, has_origin=True)
    attempt = settled(it, 1, {"a": NOTHING, "b": NOTHING, "c": NOTHING})
    of_a = part(it, "a", 1)[2]
    assert not it.has_arrived(attempt, range(4))
    it.finish("a", 1, FinishedTransfers(len(of_a), 100))
    assert [shard for shard in range(4) if it.has_arrived(attempt, [shard])] == sorted(of_a)
    attempt.plan = None
    assert not it.has_arrived(attempt, range(4))


@pytest.mark.parametrize(
    "lost", [LostShards(0), LostShards(5, (0,)), LostShards(1, (4,)), LostShards(1, tuple(range(NAMED_MAX + 1)))]
)
def test_lost_report_of_invalid_shards_is_refused(lost: LostShards) -> None:
    it = ownership(4, has_origin=True)
    attempt = settled(it, 1, {"a": NOTHING})
    with pytest.raises(RequestRefused) as error:
        it.report_lost(attempt, "a", lost)
    assert error.value.code == "shard_invalid"
    assert not attempt.lost_at_origin


def weighed(
    it: ShardOwnership, attempt: int, weights: Mapping[str, float], config: ElasticTrainingConfig = CONFIG
) -> Draft:
    """What follows when they hold nothing, and each says how much it should."""
    it.begin(attempt, workers("".join(weights)), (), 0.0)
    for name, weight in weights.items():
        it.offer(worker(name), NOTHING, False, 0, 0.0, weight)
    assert it.attempt is not None
    return planning.draft(it, it.attempt, config)


def owned(draft: Draft) -> dict[str, int]:
    return {worker.id: len(shards) for worker, shards in draft.plan.worker_assignments.items()}


@pytest.mark.parametrize("strategy", RedistributionType)
def test_each_gets_its_share_by_the_weights_that_were_said(strategy: RedistributionType) -> None:
    config = ElasticTrainingConfig(redistribution_type=strategy)
    draft = weighed(ownership(12, has_origin=True), 1, {"a": 1.0, "b": 3.0}, config)
    assert owned(draft) == {"a": 3, "b": 9}
    assert draft.assignment.weights == {worker("b"): 3.0}


def test_plan_uses_the_weights_of_its_attempt() -> None:
    it = ownership(12, has_origin=True)
    assert owned(weighed(it, 1, {"a": 1.0, "b": 3.0})) == {"a": 3, "b": 9}
    assert owned(weighed(it, 2, {"a": 2.0, "b": 1.0})) == {"a": 8, "b": 4}


@pytest.mark.parametrize(
    ("light", "heavy", "counts"),
    [(1e-300, 1.0, (0, 12)), (1.0, 1e300, (0, 12)), (5e-324, 1.7e308, (0, 12)), (1e300, 1e300, (6, 6))],
)
def test_weights_of_any_size_are_ratios(light: float, heavy: float, counts: tuple[int, int]) -> None:
    draft = weighed(ownership(12, has_origin=True), 1, {"a": light, "b": heavy})
    assert tuple(owned(draft).values()) == counts


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), True, "3"])
def test_offer_with_an_invalid_weight_is_refused_as_a_whole(weight: Any) -> None:
    it = ownership(4)
    it.begin(1, workers("a"), (), 0.0)
    with pytest.raises(RequestRefused, match="weight") as error:
        it.offer(worker("a"), ids(0, 1), False, 200, 0.0, weight)
    assert error.value.code == "weight_invalid"
    assert it.attempt is not None
    assert (it.attempt.offers, it.attempt.partial_offers) == ({}, {})


def test_preview_uses_known_weights_and_1_for_new_workers() -> None:
    it = ownership(12, has_origin=True)
    draft = weighed(it, 1, {"a": 1.0, "b": 3.0})
    it.assignment = replace(draft.assignment, generation=1)
    assert planning.preview(it, ["a", "b"], CONFIG).transfers == 0
    # Of 12 shards a and c get a fifth each: 2 or 3, and 7 or 8 are left to b.
    assert planning.preview(it, ["a", "b", "c"], CONFIG).shards == 2
    assert [(one.worker_id, one.owned, one.weight) for one in pages.data_view(it).workers] == [
        ("a", 3, 1.0),
        ("b", 9, 3.0),
    ]
