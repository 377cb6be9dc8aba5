from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from forged.catalog import CheckpointCatalog, CheckpointInUse, GcPolicy, RetentionRule, is_gc_eligible
from tests.catalog.records import (
    COMPLETE,
    CORRUPTED,
    CREATING,
    DELETED,
    EMERGENCY,
    FULL,
    INCREMENTAL,
    record,
    request,
    saved,
)

AGED = GcPolicy(max_checkpoints_per_run=1000, max_age_seconds=60.0, keep_best_n=0)
NEWEST_2 = GcPolicy(max_checkpoints_per_run=2, max_age_seconds=math.inf)


def steps_left(catalog: CheckpointCatalog, run: str = "run") -> list[int]:
    return sorted(one.step for one in catalog.list_for_run(run))


def filled(policy: GcPolicy, *steps: int, **changes: Any) -> CheckpointCatalog:
    """A catalogue with a full checkpoint of each of these steps, one second after the other."""
    catalog = CheckpointCatalog(policy)
    for second, step in enumerate(steps):
        saved(catalog, step, now=float(second), **changes)
    return catalog


# --- one checkpoint ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "now", "is_best", "expected"),
    [
        ({}, 60.0, False, False),
        ({}, 60.5, False, True),
        ({}, 1e9, True, False),
        ({"step": 200}, 1e9, False, False),
        ({"step": 201}, 1e9, False, False),
        ({"state": CREATING}, 1e9, False, False),
        ({"state": DELETED}, 1e9, False, False),
        ({"state": CORRUPTED}, 1e9, False, True),
        ({"state": CORRUPTED, "step": 200}, 1e9, False, True),
        ({"checkpoint_type": EMERGENCY}, 1e9, False, True),
        ({"pinned": True}, 1e9, False, False),
        ({"holders": ("reader",)}, 1e9, False, False),
        ({"abandoned": True, "step": 300}, 1e9, False, True),
        ({"created_at": 1e6}, 0.0, False, False),
    ],
)
def test_only_what_is_too_old_and_not_latest_best_or_in_use_is_eligible(
    changes: dict[str, Any], now: float, is_best: bool, expected: bool
) -> None:
    assert is_gc_eligible(record("a", **changes), AGED, latest_step=200, now=now, is_best=is_best) is expected


def test_without_an_age_limit_nothing_is_too_old() -> None:
    assert not is_gc_eligible(record("a"), NEWEST_2, latest_step=200, now=1e300, is_best=False)


# --- what goes --------------------------------------------------------------------------------------------------------


def test_empty_catalogue_collects_nothing() -> None:
    assert CheckpointCatalog(AGED).gc(0.0) == []
    assert CheckpointCatalog(AGED).verdicts("run", 0.0) == []


def test_the_newest_stay_and_the_surplus_goes_the_oldest_first() -> None:
    catalog = filled(NEWEST_2, 100, 200, 300, 400)
    assert catalog.gc(10.0) == ["ckpt-00000001", "ckpt-00000002"]
    assert steps_left(catalog) == [300, 400]


def test_second_collection_deletes_nothing() -> None:
    catalog = filled(replace(NEWEST_2, keep_best_n=1, keep_every_steps=300), *range(100, 1100, 100))
    assert catalog.gc(10.0) != []
    assert catalog.gc(10.0) == []
    assert catalog.gc(11.0) == []


def test_each_run_is_collected_by_itself() -> None:
    catalog = filled(NEWEST_2, 100, 200, 300)
    saved(catalog, 100, run="other")
    catalog.gc(10.0)
    assert (steps_left(catalog), steps_left(catalog, "other")) == ([200, 300], [100])


def test_what_is_older_than_the_limit_goes_although_there_are_few() -> None:
    catalog = filled(AGED, 100, 200, 300)
    assert catalog.gc(61.0) == ["ckpt-00000001"]
    assert catalog.gc(61.5) == ["ckpt-00000002"]


def test_unchanged_run_is_collected_again_when_a_checkpoint_becomes_too_old() -> None:
    catalog = filled(AGED, 100, 200, 300)
    assert [catalog.gc(now) for now in (2.0, 60.0, 60.5, 61.5, 1e6)] == [
        *([], [], ["ckpt-00000001"], ["ckpt-00000002"]),
        [],
    ]


@pytest.mark.parametrize(("epoch", "step"), [(0, 900), (0, 100), (1, 100)])
def test_age_limit_holds_for_every_checkpoint_but_the_newest(epoch: int, step: int) -> None:
    catalog = CheckpointCatalog(AGED)
    saved(catalog, step, epoch=epoch)
    saved(catalog, 100, now=1000.0, epoch=1)
    assert [verdict.rule for verdict in catalog.verdicts("run", 1000.0)] == [RetentionRule.NEWEST, RetentionRule.OLD]
    assert catalog.gc(1000.0) == ["ckpt-00000001"]


def test_newest_restorable_checkpoint_stays_at_any_age() -> None:
    catalog = filled(GcPolicy(0, 0), 100, 200)
    catalog.mark_corrupted(saved(catalog, 300, now=2.0).checkpoint_id)
    catalog.gc(1e9)
    assert steps_left(catalog) == [200]


def test_checkpoint_that_is_being_written_is_never_collected() -> None:
    catalog = filled(GcPolicy(0, 0), 100)
    catalog.create(request(50), now=0.0)
    assert catalog.gc(1e9) == []
    assert catalog.verdicts("run", 1e9)[1].rule is RetentionRule.WRITING


def test_unrestorable_checkpoints_do_not_count_among_the_newest() -> None:
    catalog = filled(NEWEST_2, 100, 200, 300, 400, 500)
    for number in (2, 4, 5):
        catalog.mark_corrupted(f"ckpt-{number:08d}")
    assert catalog.gc(10.0) == []
    saved(catalog, 600, now=9.0)
    assert catalog.gc(10.0) == ["ckpt-00000001", "ckpt-00000002"]


def test_saves_that_fail_again_and_again_leave_only_the_newest_failures() -> None:
    catalog = filled(NEWEST_2, 100)
    for step in (200, 300, 400, 500):
        catalog.mark_corrupted(catalog.create(request(step), now=1.0).checkpoint_id)
    assert [tuple(verdict)[1:4] for verdict in catalog.verdicts("run", 10.0)][2:] == [
        (False, "surplus", "2 newer ones exist, and its save failed"),
        (False, "surplus", "2 newer ones exist, and its save failed"),
        (True, "newest", "the newest restorable checkpoint"),
    ]
    assert catalog.gc(10.0) == ["ckpt-00000002", "ckpt-00000003"]
    assert steps_left(catalog) == [100, 400, 500]


def test_failed_saves_displace_no_damaged_checkpoint_that_may_be_repaired() -> None:
    catalog = filled(NEWEST_2, 100)
    catalog.mark_corrupted("ckpt-00000001")
    for step in (200, 300):
        catalog.mark_corrupted(catalog.create(request(step), now=1.0).checkpoint_id)
    assert catalog.gc(10.0) == []
    assert catalog.mark_repaired("ckpt-00000001", 11.0).state is COMPLETE


def test_last_verified_checkpoint_stays() -> None:
    catalog = filled(NEWEST_2, 100, 200, 300, 400, 500)
    catalog.mark_verified("ckpt-00000001", 20.0)
    catalog.mark_verified("ckpt-00000002", 10.0)
    catalog.gc(30.0)
    assert steps_left(catalog) == [100, 400, 500]
    catalog.mark_verified("ckpt-00000004", 30.0)
    assert catalog.gc(30.0) == ["ckpt-00000001"]


def test_verification_by_the_writer_counts() -> None:
    catalog = CheckpointCatalog(GcPolicy(1, math.inf))
    saved(catalog, 100, verified_at=1.0)
    saved(catalog, 200)
    assert catalog.gc(10.0) == []


def test_verified_checkpoint_that_was_damaged_later_is_not_the_last_verified_one() -> None:
    catalog = filled(GcPolicy(1, math.inf), 100, 200, 300)
    catalog.mark_verified("ckpt-00000001", 1.0)
    catalog.mark_verified("ckpt-00000002", 2.0)
    catalog.mark_corrupted("ckpt-00000002")
    assert catalog.gc(10.0) == ["ckpt-00000002"]


@pytest.mark.parametrize(("is_ascending", "best"), [(True, [200, 400]), (False, [100, 300])])
def test_the_best_stay_regardless_of_number_and_age(is_ascending: bool, best: list[int]) -> None:
    policy = GcPolicy(1, 5.0, 2, "loss", is_ascending)
    catalog = CheckpointCatalog(policy)
    for step, loss in ((100, 0.9), (200, 0.1), (300, 0.8), (400, 0.2), (500, 0.5)):
        saved(catalog, step, metrics={"loss": loss})
    catalog.gc(1e6)
    assert steps_left(catalog) == [*best, 500]


def test_missing_and_nan_metrics_and_damaged_checkpoints_are_never_best() -> None:
    catalog = CheckpointCatalog(GcPolicy(1, math.inf, 1, "loss", metric_ascending=True))
    for step, metrics in ((100, {"loss": math.nan}), (200, {"accuracy": 0.0}), (300, {"loss": 9.0}), (400, {})):
        saved(catalog, step, metrics=metrics)
    catalog.mark_corrupted(saved(catalog, 250, metrics={"loss": 0.0}).checkpoint_id)
    catalog.gc(10.0)
    assert steps_left(catalog) == [300, 400]


def test_of_equally_good_ones_the_latest_stays() -> None:
    catalog = filled(GcPolicy(1, math.inf, 1, "loss", metric_ascending=True), 100, 200, metrics={"loss": 0.5})
    saved(catalog, 300, now=2.0)
    catalog.gc(10.0)
    assert steps_left(catalog) == [200, 300]


def test_pinned_and_held_checkpoints_stay_until_they_are_let_go() -> None:
    catalog = filled(NEWEST_2, 100, 200, 300, 400)
    catalog.pin("ckpt-00000001")
    for holder in ("reader", "model 1.0.0", "reader"):
        catalog.hold("ckpt-00000002", holder)
    assert catalog.gc(10.0) == []
    catalog.release("ckpt-00000002", "reader")
    assert catalog.gc(10.0) == []
    catalog.release("ckpt-00000002", "model 1.0.0")
    catalog.unpin("ckpt-00000001")
    assert catalog.gc(10.0) == ["ckpt-00000001", "ckpt-00000002"]


def test_parent_of_a_kept_checkpoint_stays_with_all_of_its_chain() -> None:
    catalog = CheckpointCatalog(GcPolicy(1, 1.0))
    for step, kind in ((100, FULL), (200, INCREMENTAL), (300, INCREMENTAL)):
        saved(catalog, step, kind)
    assert catalog.gc(1e6) == []
    catalog.create(request(400, INCREMENTAL), now=0.0)
    saved(catalog, 500)
    assert catalog.gc(1e6) == [], "the one that is being written needs all of them"


def test_chain_that_is_no_longer_needed_goes_children_first() -> None:
    catalog = filled(GcPolicy(1, math.inf), 100)
    for step in (200, 300):
        saved(catalog, step, INCREMENTAL)
    saved(catalog, 400)
    assert catalog.gc(10.0) == ["ckpt-00000003", "ckpt-00000002", "ckpt-00000001"]


def test_first_checkpoint_of_each_interval_of_steps_stays() -> None:
    catalog = filled(GcPolicy(1, 1.0, keep_every_steps=1000), *range(0, 4000, 300))
    catalog.gc(1e6)
    assert steps_left(catalog) == [1200, 2100, 3000, 3900]


def test_first_checkpoint_of_each_interval_of_seconds_stays() -> None:
    catalog = filled(GcPolicy(1, 1.0, keep_every_seconds=4.0), *range(100, 1100, 100))
    catalog.gc(1e6)
    assert steps_left(catalog) == [100, 500, 900, 1000]


def test_damaged_checkpoint_leaves_its_interval_to_the_next_one() -> None:
    catalog = filled(GcPolicy(1, math.inf, keep_every_steps=1000), 1000, 1300, 1600, 2000)
    catalog.mark_corrupted("ckpt-00000001")
    catalog.gc(10.0)
    assert steps_left(catalog) == [1300, 2000]


def test_damaged_checkpoint_leaves_its_interval_of_seconds_to_the_next_one() -> None:
    catalog = filled(GcPolicy(1, math.inf, keep_every_seconds=4.0), *range(100, 700, 100))
    catalog.mark_corrupted("ckpt-00000001")
    catalog.gc(10.0)
    assert steps_left(catalog) == [200, 500, 600]


def test_abandoned_checkpoints_are_the_first_to_go() -> None:
    catalog = filled(NEWEST_2, 100, 200, 300)
    catalog.abandon_beyond("ckpt-00000001")
    assert catalog.gc(10.0) == ["ckpt-00000002"]
    saved(catalog, 150, now=5.0)
    assert catalog.gc(10.0) == ["ckpt-00000003"]
    assert steps_left(catalog) == [100, 150]


@pytest.mark.parametrize("now", [-1e9, 0.0, 2.5])
def test_clock_that_went_back_deletes_nothing(now: float) -> None:
    catalog = filled(GcPolicy(1, 0), 100, 200, 300, 400)
    assert catalog.gc(now) == []
    assert {verdict.rule for verdict in catalog.verdicts("run", now)} == {RetentionRule.CLOCK}
    assert len(catalog.gc(3.0)) == 3


def test_wrong_time_of_an_earlier_checkpoint_does_not_stop_collection() -> None:
    catalog = CheckpointCatalog(NEWEST_2)
    saved(catalog, 100, now=1e9)
    for step in (200, 300):
        saved(catalog, step, now=float(step))
    assert catalog.gc(400.0) == ["ckpt-00000001"]


def test_no_policy_keeps_less_than_one_restorable_checkpoint() -> None:
    catalog = filled(GcPolicy(0, 0), 100, 200)
    assert catalog.gc(10.0) == ["ckpt-00000001"]
    assert catalog.gc(1e9) == []


# --- why --------------------------------------------------------------------------------------------------------------


def test_every_checkpoint_has_a_verdict_with_its_reason() -> None:
    policy = GcPolicy(2, 100.0, 1, "loss", metric_ascending=True, keep_every_steps=1000, keep_every_seconds=1000.0)
    catalog = CheckpointCatalog(policy)
    saved(catalog, 100, now=0.0)
    saved(catalog, 200, now=1.0)
    saved(catalog, 300, now=2.0, metrics={"loss": 0.1})
    saved(catalog, 400, now=3.0)
    saved(catalog, 1000, now=4.0)
    saved(catalog, 1100, now=5.0, verified_at=5.0)
    saved(catalog, 1200, INCREMENTAL, now=6.0)
    saved(catalog, 1300, INCREMENTAL, now=7.0)
    saved(catalog, 1400, now=8.0)
    catalog.pin("ckpt-00000002")
    catalog.hold("ckpt-00000004", "reader")
    catalog.mark_corrupted(saved(catalog, 1500, now=9.0).checkpoint_id)
    catalog.create(request(1600), now=10.0)
    for step, now in ((1700, 11.0), (1800, 105.0)):
        saved(catalog, step, now=now)
    before = catalog.verdicts("run", 108.5)
    assert [(verdict.is_kept, verdict.rule, verdict.reason) for verdict in before] == [
        (True, "newest", "the newest restorable checkpoint"),
        (True, "recent", "not too old, and fewer than 2 newer ones are restorable"),
        (True, "writing", "being written"),
        (False, "surplus", "2 newer ones are restorable"),
        (False, "surplus", "2 newer ones are restorable"),
        (False, "surplus", "2 newer ones are restorable"),
        (False, "surplus", "2 newer ones are restorable"),
        (True, "verified", "the last verified checkpoint"),
        (True, "steps", "the first of an interval of 1000 steps"),
        (True, "held", "used by reader"),
        (True, "best", "one of the 1 with the lowest loss"),
        (True, "pinned", "pinned"),
        (True, "seconds", "the first of an interval of 1000.0 s"),
    ]
    going = {verdict.checkpoint_id for verdict in before if not verdict.is_kept}
    assert set(catalog.gc(108.5)) == going
    assert sum(verdict.size_bytes for verdict in before if not verdict.is_kept) == 40


def test_verdict_names_the_children_that_need_a_parent_and_the_age() -> None:
    catalog = CheckpointCatalog(GcPolicy(2, 60.0))
    saved(catalog, 100)
    saved(catalog, 200, INCREMENTAL)
    saved(catalog, 300, INCREMENTAL, now=100.0)
    saved(catalog, 400, now=100.0)
    catalog.mark_corrupted(saved(catalog, 350).checkpoint_id)
    assert [tuple(verdict)[:4] for verdict in catalog.verdicts("run", 100.0)] == [
        ("ckpt-00000004", True, "newest", "the newest restorable checkpoint"),
        ("ckpt-00000005", False, "old", "older than 60.0 s"),
        ("ckpt-00000003", True, "recent", "not too old, and fewer than 2 newer ones are restorable"),
        ("ckpt-00000002", True, "parent", "needed by ckpt-00000003"),
        ("ckpt-00000001", True, "parent", "needed by ckpt-00000002"),
    ]


def test_deleted_by_hand_is_only_what_nothing_needs() -> None:
    catalog = filled(NEWEST_2, 100)
    child = saved(catalog, 200, INCREMENTAL)
    with pytest.raises(CheckpointInUse, match="ckpt-00000001 is needed by ckpt-00000002") as refused:
        catalog.delete("ckpt-00000001")
    assert refused.value.children == (child.checkpoint_id,)
    catalog.pin(child.checkpoint_id)
    with pytest.raises(CheckpointInUse, match="ckpt-00000002 is pinned"):
        catalog.delete(child.checkpoint_id)
    catalog.unpin(child.checkpoint_id)
    catalog.hold(child.checkpoint_id, "reader")
    with pytest.raises(CheckpointInUse, match="ckpt-00000002 is used by reader"):
        catalog.delete(child.checkpoint_id)
    catalog.release(child.checkpoint_id, "reader")
    catalog.delete(child.checkpoint_id)
    catalog.delete("ckpt-00000001")
    assert catalog.total_count() == 0
    assert {one.state for one in map(catalog.get, ("ckpt-00000001", child.checkpoint_id)) if one} == {DELETED}
