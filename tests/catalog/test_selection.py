from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forged.catalog import CheckpointCatalog, CheckpointMeta, RestoreCriteria, selection_score
from forged.catalog.errors import TransitionRefused
from tests.catalog.naive_catalog import NaiveCatalog
from tests.catalog.records import (
    COMPLETE,
    CORRUPTED,
    CREATING,
    DELETED,
    EMERGENCY,
    FULL,
    INCREMENTAL,
    KEEP_ALL,
    record,
    request,
    saved,
)

ANY = RestoreCriteria("run", None, None, require_complete=True, prefer_full=False)


def steps_of(points: list[CheckpointMeta]) -> list[int]:
    return [one.step for one in points]


@pytest.fixture
def catalog() -> CheckpointCatalog:
    return CheckpointCatalog(KEEP_ALL)


def test_run_without_checkpoints_has_no_restore_point(catalog: CheckpointCatalog) -> None:
    saved(catalog, run="other")
    assert catalog.find_restore_point(ANY) is None
    assert catalog.get_latest("run") is None
    assert catalog.list_for_run("run") == []
    assert catalog.find_by_metric("run", "loss", 1.0, ascending=True) == []


def test_highest_step_is_restored_and_the_others_follow(catalog: CheckpointCatalog) -> None:
    for step in (100, 300, 200):
        saved(catalog, step)
    assert steps_of(catalog.restore_points(ANY)) == [300, 200, 100]
    assert catalog.find_restore_point(ANY) == catalog.restore_points(ANY)[0]


def test_steps_beyond_2_to_the_53_are_told_apart(catalog: CheckpointCatalog) -> None:
    for step in (2**53 + 1, 2**53, 2**64 - 1, 2**64 - 2):
        saved(catalog, step)
    assert steps_of(catalog.restore_points(ANY)) == [2**64 - 1, 2**64 - 2, 2**53 + 1, 2**53]
    assert steps_of(catalog.restore_points(replace(ANY, max_step=2**64 - 2)))[0] == 2**64 - 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_step": 250}, 200),
        ({"max_step": 200}, 200),
        ({"max_step": 99}, None),
        ({"max_epoch": 1}, 200),
        ({"max_epoch": 0}, 100),
        ({"max_epoch": 0, "max_step": 1000}, 100),
        ({"training_run_id": "other"}, None),
    ],
)
def test_restore_point_is_within_the_limits(catalog: CheckpointCatalog, changes: Any, expected: int | None) -> None:
    for epoch, step in ((0, 100), (1, 200), (2, 300)):
        saved(catalog, step, epoch=epoch)
    found = catalog.find_restore_point(replace(ANY, **changes))
    assert (None if found is None else found.step) == expected


def test_of_one_step_the_newest_is_restored_or_a_full_one_if_preferred(catalog: CheckpointCatalog) -> None:
    full = saved(catalog, 100, now=1.0)
    incremental = saved(catalog, 100, INCREMENTAL, now=2.0)
    emergency = saved(catalog, 100, EMERGENCY, now=1.5)
    assert catalog.restore_points(ANY) == [incremental, emergency, full]
    assert catalog.restore_points(replace(ANY, prefer_full=True)) == [emergency, full, incremental]
    later = saved(catalog, 101, INCREMENTAL, now=0.0)
    assert catalog.find_restore_point(replace(ANY, prefer_full=True)) == later


def test_equal_checkpoints_have_one_order(catalog: CheckpointCatalog) -> None:
    first, second = saved(catalog), saved(catalog)
    assert selection_score(first, ANY) == selection_score(second, ANY)
    assert catalog.restore_points(ANY) == [second, first]
    assert catalog.get_latest("run") == second


def test_unsound_checkpoints_come_after_all_sound_ones_and_only_on_request(catalog: CheckpointCatalog) -> None:
    sound = saved(catalog, 100)
    corrupted = catalog.mark_corrupted(saved(catalog, 200).checkpoint_id)
    creating = catalog.create(request(200), now=1.0)
    catalog.delete(saved(catalog, 300).checkpoint_id)
    assert catalog.restore_points(ANY) == [sound]
    assert catalog.restore_points(replace(ANY, require_complete=False)) == [sound, creating, corrupted]
    assert catalog.find_restore_point(replace(ANY, require_complete=False, max_step=99)) is None


@pytest.mark.parametrize("is_complete_required", [True, False])
def test_complete_checkpoint_on_a_broken_chain_is_never_offered(
    catalog: CheckpointCatalog, is_complete_required: bool
) -> None:
    root = saved(catalog, 100)
    middle = saved(catalog, 200, INCREMENTAL)
    top = saved(catalog, 300, INCREMENTAL)
    assert (middle.parent_id, top.parent_id) == (root.checkpoint_id, middle.checkpoint_id)
    damaged = catalog.mark_corrupted(middle.checkpoint_id)
    points = catalog.restore_points(replace(ANY, require_complete=is_complete_required))
    assert points == ([root] if is_complete_required else [root, damaged])
    assert catalog.get_latest("run") == top
    catalog.mark_repaired(middle.checkpoint_id, now=9.0)
    assert steps_of(catalog.restore_points(ANY)) == [300, 200, 100]


def test_latest_goes_by_epoch_and_step_and_not_by_time(catalog: CheckpointCatalog) -> None:
    saved(catalog, 500, epoch=0, now=9.0)
    latest = saved(catalog, 100, epoch=1, now=1.0)
    catalog.create(request(900, epoch=2), now=1.0)
    catalog.mark_corrupted(saved(catalog, 800, epoch=2).checkpoint_id)
    assert catalog.get_latest("run") == latest
    assert steps_of(catalog.restore_points(ANY)) == [500, 100]


# --- going back -------------------------------------------------------------------------------------------------------


def test_what_was_saved_beyond_the_point_gone_back_to_is_no_longer_offered(catalog: CheckpointCatalog) -> None:
    old, point, *beyond = (saved(catalog, step) for step in (100, 200, 300, 400))
    writing = catalog.create(request(500), now=0.0)
    changed = catalog.abandon_beyond(point.checkpoint_id)
    assert {one.checkpoint_id for one in changed} == {one.checkpoint_id for one in [*beyond, writing]}
    assert all(one.abandoned for one in changed)
    assert catalog.get_latest("run") == point
    assert catalog.restore_points(replace(ANY, require_complete=False)) == [point, old]
    assert saved(catalog, 250, INCREMENTAL).parent_id == point.checkpoint_id


def test_reinstated_checkpoint_is_offered_again_and_no_other_one(catalog: CheckpointCatalog) -> None:
    old, left, latest = (saved(catalog, step) for step in (100, 200, 300))
    catalog.abandon_beyond(old.checkpoint_id)
    assert catalog.reinstate(left.checkpoint_id) == left
    assert catalog.restore_points(ANY) == [left, old]
    with pytest.raises(TransitionRefused, match=f"checkpoint {left.checkpoint_id} is not abandoned"):
        catalog.reinstate(left.checkpoint_id)
    catalog.delete(latest.checkpoint_id)
    with pytest.raises(TransitionRefused, match="is deleted"):
        catalog.reinstate(latest.checkpoint_id)


def test_point_that_was_abandoned_is_offered_again_when_training_goes_there(catalog: CheckpointCatalog) -> None:
    old, left = saved(catalog, 100), saved(catalog, 200)
    catalog.abandon_beyond(old.checkpoint_id)
    assert catalog.abandon_beyond(left.checkpoint_id) == [left]
    assert catalog.get_latest("run") == left


def test_incremental_is_refused_where_all_that_is_left_is_abandoned(catalog: CheckpointCatalog) -> None:
    point, left = saved(catalog, 100), saved(catalog, 200)
    catalog.abandon_beyond(point.checkpoint_id)
    catalog.mark_corrupted(point.checkpoint_id)
    assert catalog.find_restore_point(ANY) is None
    with pytest.raises(Exception, match="no restorable checkpoint"):
        catalog.create(request(150, INCREMENTAL), now=0.0)
    assert catalog.get(left.checkpoint_id) is not None


# --- by metric --------------------------------------------------------------------------------------------------------


def test_checkpoints_better_than_a_threshold_come_best_first(catalog: CheckpointCatalog) -> None:
    for step, loss in ((100, 0.5), (200, 0.3), (300, 0.4), (400, 0.3)):
        saved(catalog, step, metrics={"loss": loss})
    better = catalog.find_by_metric("run", "loss", 0.5, ascending=True)
    assert [(one.step, one.metrics["loss"]) for one in better] == [(400, 0.3), (200, 0.3), (300, 0.4)]
    assert steps_of(catalog.find_by_metric("run", "loss", 0.3, ascending=False)) == [100, 300]


def test_missing_and_nan_metrics_are_better_than_no_threshold(catalog: CheckpointCatalog) -> None:
    for metrics in ({}, {"loss": math.nan}, {"accuracy": 0.0}):
        saved(catalog, metrics=metrics)
    infinite = saved(catalog, metrics={"loss": -math.inf})
    for is_ascending in (True, False):
        found = catalog.find_by_metric("run", "loss", math.inf if is_ascending else -math.inf, is_ascending)
        assert found == ([infinite] if is_ascending else [])
        assert catalog.find_by_metric("run", "loss", math.nan, is_ascending) == []


def test_deleted_checkpoint_is_found_by_no_metric(catalog: CheckpointCatalog) -> None:
    meta = saved(catalog, metrics={"loss": 0.1})
    catalog.delete(meta.checkpoint_id)
    assert catalog.find_by_metric("run", "loss", 1.0, ascending=True) == []


# --- the score --------------------------------------------------------------------------------------------------------

SCORES = [
    (record("a", step=100), ANY, record("b", step=99), ANY),
    (record("a", created_at=2.0), ANY, record("b", created_at=1.0), ANY),
    (record("a", created_at=1.7e9 + 1), ANY, record("b", created_at=1.7e9), ANY),
    (record("a", step=0), ANY, record("b", step=10**9, state=CREATING), replace(ANY, require_complete=False)),
    (record("a"), replace(ANY, prefer_full=True), record("b", "a", created_at=1e9), replace(ANY, prefer_full=True)),
    (record("a", "b", created_at=1.0), ANY, record("b"), ANY),
    (record("a", "b", step=101), replace(ANY, prefer_full=True), record("b"), replace(ANY, prefer_full=True)),
    (record("a", state=CORRUPTED), replace(ANY, require_complete=False), record("b", state=CORRUPTED), ANY),
]


@pytest.mark.parametrize(("better", "its", "worse", "other"), SCORES)
def test_better_checkpoint_has_a_higher_score(
    better: CheckpointMeta, its: RestoreCriteria, worse: CheckpointMeta, other: RestoreCriteria
) -> None:
    assert selection_score(better, its) > selection_score(worse, other)


@pytest.mark.parametrize(
    ("changes", "criteria"),
    [
        ({"training_run_id": "other"}, ANY),
        ({"step": 101}, replace(ANY, max_step=100)),
        ({"epoch": 1}, replace(ANY, max_epoch=0)),
        ({"state": CREATING}, ANY),
        ({"state": CORRUPTED}, ANY),
        ({"state": DELETED}, replace(ANY, require_complete=False)),
        ({"abandoned": True}, ANY),
    ],
)
def test_checkpoint_that_does_not_match_has_no_score(changes: Any, criteria: RestoreCriteria) -> None:
    assert selection_score(record("a", **changes), criteria) == 0.0


full_or_incremental = st.sampled_from([FULL, INCREMENTAL, EMERGENCY])
any_record = st.builds(
    lambda id_, step, kind, state, created_at: record(
        id_, step=step, checkpoint_type=kind, state=state, created_at=created_at
    ),
    st.sampled_from("ab"),
    st.integers(0, 2**64 - 1) | st.integers(0, 3),
    full_or_incremental,
    st.sampled_from([CREATING, COMPLETE, CORRUPTED]),
    st.floats(0, 1e12) | st.integers(0, 3).map(float),
)


@given(st.lists(any_record, min_size=2, max_size=2), st.booleans())
def test_score_is_the_order_of_restore_points(records: list[CheckpointMeta], is_full_preferred: bool) -> None:
    naive = NaiveCatalog(KEEP_ALL)
    naive.records = {str(place): replace(one, checkpoint_id=str(place)) for place, one in enumerate(records)}
    criteria = RestoreCriteria("run", require_complete=False, prefer_full=is_full_preferred)
    better, worse = naive.restore_points(criteria)
    assert selection_score(better, criteria) >= selection_score(worse, criteria) > 0.0
