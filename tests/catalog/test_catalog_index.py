from __future__ import annotations

from math import inf

import pytest

from forged.catalog import (
    CheckpointInvalid,
    CheckpointType,
    CheckpointUnknown,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
    TransitionRefused,
    catalog_index,
)
from forged.catalog.catalog_index import CatalogIndex
from forged.catalog.model import HOLDERS_MAX, CheckpointState
from tests.catalog.records import COMPLETE, CORRUPTED, DELETED, INCREMENTAL, KEEP_ALL, chain, record, request


@pytest.fixture
def index() -> CatalogIndex:
    return CatalogIndex(KEEP_ALL)


def test_each_change_returns_the_record_that_its_owner_stores(index: CatalogIndex) -> None:
    created = index.create(request(), "a", 1.0)
    assert created == index.get("a")
    changes = [
        index.complete("a", 10, "path", verified_at=2.0),
        index.mark_verified("a", 3.0),
        index.pin("a"),
        index.unpin("a"),
        index.hold("a", "reader"),
        index.release("a", "reader"),
        index.mark_corrupted("a"),
        index.mark_repaired("a", 4.0),
        index.delete("a"),
    ]
    assert [(one.state, one.verified_at, one.pinned, one.holders) for one in changes] == [
        (COMPLETE, 2.0, False, ()),
        (COMPLETE, 3.0, False, ()),
        (COMPLETE, 3.0, True, ()),
        (COMPLETE, 3.0, False, ()),
        (COMPLETE, 3.0, False, ("reader",)),
        (COMPLETE, 3.0, False, ()),
        (CORRUPTED, 3.0, False, ()),
        (COMPLETE, 4.0, False, ()),
        (DELETED, 4.0, False, ()),
    ]


def test_tombstone_stays_until_its_files_are_gone(index: CatalogIndex) -> None:
    index.create(request(), "a", 1.0)
    tombstone = index.delete("a")
    assert index.tombstones == {"a": tombstone}
    assert index.get("a") == tombstone
    with pytest.raises(CheckpointInvalid, match="an id that no other checkpoint has"):
        index.create(request(), "a", 1.0)
    index.forget("a")
    index.forget("a")
    assert index.get("a") is None
    with pytest.raises(CheckpointUnknown):
        index.delete("a")


def test_loaded_records_replace_all_and_behave_as_before(index: CatalogIndex) -> None:
    index.create(request(run="old"), "old", 1.0)
    index.load([record("gone", state=DELETED), *reversed(chain("a", "b", "c"))])
    assert index.get("old") is None
    assert list(index.tombstones) == ["gone"]
    assert (index.total_count(), index.total_size()) == (3, 30)
    assert [one.checkpoint_id for one in index.restore_points(RestoreCriteria("run"))] == ["c", "b", "a"]
    assert index.create(request(900, INCREMENTAL), "d", 1.0).parent_id == "c"


def test_loaded_cycle_and_orphan_are_listed_but_never_offered(index: CatalogIndex) -> None:
    cyclic = [record("a", "b"), record("b", "a"), record("self", "self"), record("orphan", "missing")]
    index.load(cyclic)
    assert index.total_count() == 4
    assert index.find_restore_point(RestoreCriteria("run", require_complete=False)) is None
    index.mark_corrupted("a")
    index.mark_repaired("a", 1.0)
    assert index.find_restore_point(RestoreCriteria("run")) is None


def test_cycle_is_collected_when_it_is_too_old() -> None:
    index = CatalogIndex(GcPolicy(10, 60.0))
    cyclic = [record(id_, parent, step=50) for id_, parent in (("a", "b"), ("b", "a"), ("self", "self"))]
    index.load([*cyclic, record("new", created_at=100.0)])
    assert {one.checkpoint_id for one in index.gc(100.0)} == {"a", "b", "self"}


def test_parent_in_another_run_is_no_parent(index: CatalogIndex) -> None:
    index.load([record("a", training_run_id="other"), record("b", "a")])
    assert index.find_restore_point(RestoreCriteria("run")) is None


def test_only_changed_and_overdue_runs_are_looked_at() -> None:
    index = CatalogIndex(GcPolicy(10, 60.0))
    for number in range(3):
        index.create(request(run=f"run-{number}"), f"a{number}", float(number))
        index.complete(f"a{number}", 1, "path")
    assert index.runs_due(10.0) == ["run-0", "run-1", "run-2"]
    assert index.gc(10.0) == []
    assert index.runs_due(59.0) == []
    assert index.runs_due(60.5) == ["run-0"]
    assert index.runs_due(60.5) == ["run-0"], "a run stays due until it is collected"
    index.pin("a2")
    assert index.runs_due(60.5) == ["run-0", "run-2"]


def test_clock_that_went_back_is_looked_at_again_when_it_has_caught_up() -> None:
    index = CatalogIndex(GcPolicy(1, 0))
    for number in range(2):
        index.create(request(number), f"a{number}", 100.0 + number)
        index.complete(f"a{number}", 1, "path")
    assert index.gc(50.0) == []
    assert index.runs_due(100.5) == []
    assert [one.checkpoint_id for one in index.gc(101.0)] == ["a0"]


def test_times_of_collections_that_are_outdated_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_index, "OUTDATED_MAX", 5)
    index = CatalogIndex(GcPolicy(1, 1e6))
    for number in range(100):
        index.create(request(number), f"a{number:03d}", float(number))
        index.complete(f"a{number:03d}", 1, "path")
        index.gc(float(number))
        assert len(vars(index)["_due"]) <= 8
    assert index.runs_due(99.0 + 1e6) == ["run"]


def test_run_without_checkpoints_is_forgotten(index: CatalogIndex) -> None:
    for number in range(3):
        index.create(request(run=f"run-{number}"), "a", 1.0)
        index.delete("a")
        index.forget("a")
    assert index.gc(1.0) == []
    assert index.runs_due(1e9) == []
    assert vars(index)["_runs"] == {}


@pytest.mark.parametrize("holder", ["", "one too many"])
def test_holders_have_names_and_a_limit(index: CatalogIndex, holder: str) -> None:
    index.create(request(), "a", 1.0)
    for number in range(HOLDERS_MAX if holder else 0):
        index.hold("a", str(number))
    with pytest.raises(CheckpointInvalid, match="holder"):
        index.hold("a", holder)


def test_chain_of_10_000_is_broken_and_repaired_without_recursion(index: CatalogIndex) -> None:
    long = chain(*(f"{number:05d}" for number in range(10_000)))
    index.load(long)
    assert index.find_restore_point(RestoreCriteria("run")) == long[-1]
    index.mark_corrupted("00001")
    assert index.find_restore_point(RestoreCriteria("run")) == long[0]
    assert index.get_latest("run") == long[-1]
    index.mark_repaired("00001", 1.0)
    assert index.find_restore_point(RestoreCriteria("run")) == long[-1]


def test_checkpoints_are_counted_by_state(index: CatalogIndex) -> None:
    index.load([record("a"), record("b", state=CORRUPTED), record("c", state=DELETED)])
    counts = [dict(+index.states)]
    index.create(request(), "d", 1.0)
    counts.append(dict(+index.states))
    index.complete("d", 10, "path")
    index.mark_repaired("b", 2.0)
    index.delete("a")
    counts.append(dict(+index.states))
    index.forget("a")
    index.forget("c")
    index.forget("unknown")
    index.drop("b")
    counts.append(dict(+index.states))
    assert counts == [
        {COMPLETE: 1, CORRUPTED: 1, DELETED: 1},
        {COMPLETE: 1, CORRUPTED: 1, DELETED: 1, CheckpointState.CREATING: 1},
        {COMPLETE: 2, DELETED: 2},
        {COMPLETE: 1},
    ]


def test_newest_complete_checkpoint_of_each_run_is_found(index: CatalogIndex) -> None:
    index.load([record("a", step=1), record("b", step=2), record("c", step=3, state=CORRUPTED)])
    assert [meta.checkpoint_id for meta in index.newest_complete()] == ["b"]


def test_policy_of_a_run_replaces_that_of_all_and_its_metric() -> None:
    index = CatalogIndex(GcPolicy(1, inf))
    for run in ("a", "b"):
        for step, (loss, acc) in enumerate([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (4.0, 0.0)]):
            wanted = CreateCheckpointRequest(run, 0, step, metrics={"loss": loss, "acc": acc})
            index.create(wanted, f"{run}{step}", float(step))
            index.complete(f"{run}{step}", 1, f"/{run}{step}")
    index.set_policy("a", GcPolicy(2, inf, keep_best_n=1, metric_key="acc", metric_ascending=False))
    assert [meta.checkpoint_id for meta in index.gc(10.0)] == ["a0", "b0", "b1", "b2"]
    index.set_policy("a", None)
    assert [meta.checkpoint_id for meta in index.gc(11.0)] == ["a1", "a2"]


def test_failed_save_is_completed_late_and_another_one_is_not() -> None:
    index = CatalogIndex(GcPolicy(1, inf))
    for name in ("a", "b"):
        index.create(CreateCheckpointRequest("run", 0, 1), name, 0.0)
    index.mark_corrupted("a")
    assert index.complete_late("a", 5, "/a").state is CheckpointState.COMPLETE
    assert (index.total_size(), index.find_restore_point(RestoreCriteria("run"))) == (5, index.get("a"))
    for name in ("a", "b"):
        with pytest.raises(TransitionRefused):
            index.complete_late(name, 5, "/a")


def test_checkpoint_that_became_full_needs_no_parent() -> None:
    index = CatalogIndex(GcPolicy(1, inf))
    index.create(CreateCheckpointRequest("run", 0, 1), "parent", 1.0)
    index.complete("parent", 10, "/parent")
    index.create(CreateCheckpointRequest("run", 0, 2, CheckpointType.INCREMENTAL), "child", 2.0)
    with pytest.raises(TransitionRefused):
        index.make_full("child", 20)
    index.complete("child", 1, "/child")
    assert index.make_full("child", 20).parent_id is None
    assert index.total_size() == 30
    index.mark_corrupted("parent")
    assert index.find_restore_point(RestoreCriteria("run")) == index.get("child")
    index.delete("parent")
    loaded = CatalogIndex(GcPolicy(1, inf))
    loaded.load(index.list_for_run("run"))
    assert loaded.find_restore_point(RestoreCriteria("run")) == index.get("child")


def test_what_was_saved_beyond_a_step_is_abandoned_and_what_was_saved_later_is_not() -> None:
    index = CatalogIndex(GcPolicy(1, inf))
    for step in (1, 2, 3, 4):
        index.create(CreateCheckpointRequest("run", 0, step), str(step), float(step))
        index.complete(str(step), 1, f"/{step}")
    assert [meta.checkpoint_id for meta in index.abandon_after("run", 1, lambda one: one == "3")] == ["2", "4"]
    assert [meta.step for meta in index.restore_points(RestoreCriteria("run"))] == [3, 1]
    assert [meta.checkpoint_id for meta in index.abandon_after("run", 1)] == ["3"]
    assert index.abandon_after("run", 1) == []
