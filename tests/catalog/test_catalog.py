from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import forged.catalog
from forged.catalog import (
    CatalogRefused,
    CheckpointCatalog,
    CheckpointInvalid,
    CheckpointUnknown,
    GcPolicy,
    ParentMissing,
    RestoreCriteria,
    TransitionRefused,
    chain_length,
    restoration_chain,
    validate_checkpoint,
)
from forged.catalog import catalog as catalog_module
from tests.catalog.records import (
    COMPLETE,
    CORRUPTED,
    CREATING,
    DELETED,
    EMERGENCY,
    FULL,
    INCREMENTAL,
    KEEP_ALL,
    request,
    saved,
)
from tests.threads import THREADS, in_threads


@pytest.fixture
def catalog() -> CheckpointCatalog:
    return CheckpointCatalog(KEEP_ALL)


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in forged.catalog.__all__ if not hasattr(forged.catalog, name)] == []


def test_there_are_as_many_tests_as_the_seed_asks_for() -> None:
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    assert sum(source.count("\ndef test_") for source in sources) >= 25


# --- the life of a checkpoint -----------------------------------------------------------------------------------------


def test_created_checkpoint_is_what_was_asked_for(catalog: CheckpointCatalog) -> None:
    made = catalog.create(request(500, EMERGENCY, epoch=3, metrics={"loss": 0.5}), now=7)
    assert (made.training_run_id, made.epoch, made.step, made.checkpoint_type) == ("run", 3, 500, EMERGENCY)
    assert (made.state, made.size_bytes, made.created_at, made.parent_id) == (CREATING, 0, 7.0, None)
    assert (made.metrics, made.storage_path, made.verified_at) == ({"loss": 0.5}, "", None)
    assert catalog.get(made.checkpoint_id) == made


def test_each_checkpoint_has_an_id_of_its_own(catalog: CheckpointCatalog) -> None:
    ids = [catalog.create(request(run=run), now=0.0).checkpoint_id for run in ("run", "other", "run")]
    catalog.delete(ids[2])
    assert len({*ids, catalog.create(request(), now=0.0).checkpoint_id}) == 4


def test_refused_creation_uses_up_no_id(catalog: CheckpointCatalog) -> None:
    with pytest.raises(CheckpointInvalid):
        catalog.create(request(-1), now=0.0)
    assert catalog.create(request(), now=0.0).checkpoint_id == "ckpt-00000001"


def test_completed_checkpoint_has_its_size_and_path(catalog: CheckpointCatalog) -> None:
    made = catalog.create(request(), now=0.0)
    done = catalog.complete(made.checkpoint_id, 2**60, "run/step-100", verified_at=1.0)
    assert (done.state, done.size_bytes, done.storage_path) == (COMPLETE, 2**60, "run/step-100")
    assert done == replace(made, state=COMPLETE, size_bytes=2**60, storage_path="run/step-100", verified_at=1.0)
    assert catalog.get(made.checkpoint_id) == done


@pytest.mark.parametrize(
    ("size", "path", "verified_at", "text"),
    [
        (-1, "path", None, "size_bytes"),
        (1.5, "path", None, "size_bytes"),
        (1, "", None, "storage_path"),
        (1, "p" * 5000, None, "storage_path"),
        (1, "path", math.nan, "verified_at"),
    ],
)
def test_completion_with_an_impossible_value_is_refused_and_changes_nothing(
    catalog: CheckpointCatalog, size: Any, path: str, verified_at: float | None, text: str
) -> None:
    made = catalog.create(request(), now=0.0)
    with pytest.raises(CheckpointInvalid, match=text):
        catalog.complete(made.checkpoint_id, size, path, verified_at=verified_at)
    assert catalog.get(made.checkpoint_id) == made


OPERATIONS: dict[str, Callable[[CheckpointCatalog, str], Any]] = {
    "complete": lambda catalog, id_: catalog.complete(id_, 1, "path"),
    "mark_corrupted": lambda catalog, id_: catalog.mark_corrupted(id_),
    "mark_verified": lambda catalog, id_: catalog.mark_verified(id_, 1.0),
    "mark_repaired": lambda catalog, id_: catalog.mark_repaired(id_, 1.0),
    "pin": lambda catalog, id_: catalog.pin(id_),
    "unpin": lambda catalog, id_: catalog.unpin(id_),
    "hold": lambda catalog, id_: catalog.hold(id_, "reader"),
    "release": lambda catalog, id_: catalog.release(id_, "reader"),
    "abandon_beyond": lambda catalog, id_: catalog.abandon_beyond(id_),
    "delete": lambda catalog, id_: catalog.delete(id_),
}
each_operation = pytest.mark.parametrize("operation", OPERATIONS)
ALLOWED = {
    CREATING: OPERATIONS.keys() - {"mark_verified", "mark_repaired"},
    COMPLETE: OPERATIONS.keys() - {"complete", "mark_repaired"},
    CORRUPTED: OPERATIONS.keys() - {"complete", "mark_corrupted", "mark_verified"},
    DELETED: set(),
}


@each_operation
@pytest.mark.parametrize("state", ALLOWED)
def test_operation_is_refused_in_a_state_that_does_not_allow_it(
    catalog: CheckpointCatalog, operation: str, state: Any
) -> None:
    id_ = catalog.create(request(), now=0.0).checkpoint_id
    if state is not CREATING:
        catalog.complete(id_, 1, "path")
    if state is CORRUPTED:
        catalog.mark_corrupted(id_)
    if state is DELETED:
        catalog.delete(id_)
    before = catalog.get(id_)
    assert before is not None
    assert before.state is state
    if operation in ALLOWED[state]:
        OPERATIONS[operation](catalog, id_)
        return
    with pytest.raises(TransitionRefused, match=f"checkpoint {id_} is {state}; it cannot ") as refused:
        OPERATIONS[operation](catalog, id_)
    assert refused.value.checkpoint_id == id_
    assert catalog.get(id_) == before


@each_operation
def test_unknown_checkpoint_is_refused_by_its_name(catalog: CheckpointCatalog, operation: str) -> None:
    with pytest.raises(CheckpointUnknown, match="there is no checkpoint 'ckpt-9'") as refused:
        OPERATIONS[operation](catalog, "ckpt-9")
    assert (refused.value.code, refused.value.checkpoint_id) == ("checkpoint_unknown", "ckpt-9")
    assert refused.value.fix
    assert catalog.get("ckpt-9") is None


def test_writer_that_failed_leaves_a_corrupted_checkpoint_that_cannot_be_repaired(catalog: CheckpointCatalog) -> None:
    id_ = catalog.create(request(), now=0.0).checkpoint_id
    assert catalog.mark_corrupted(id_).state is CORRUPTED
    with pytest.raises(TransitionRefused):
        catalog.mark_repaired(id_, now=1.0)
    with pytest.raises(TransitionRefused):
        catalog.complete(id_, 1, "path")


def test_repaired_checkpoint_is_complete_and_verified(catalog: CheckpointCatalog) -> None:
    meta = saved(catalog)
    catalog.mark_corrupted(meta.checkpoint_id)
    assert catalog.mark_repaired(meta.checkpoint_id, now=5.0) == replace(meta, verified_at=5.0)


# --- incremental checkpoints ------------------------------------------------------------------------------------------


def test_incremental_builds_on_the_latest_restorable_checkpoint_of_its_run(catalog: CheckpointCatalog) -> None:
    saved(catalog, 900, run="other")
    saved(catalog, 100)
    latest = saved(catalog, 300)
    saved(catalog, 200)
    catalog.create(request(400), now=0.0)
    assert saved(catalog, 500, INCREMENTAL).parent_id == latest.checkpoint_id


@pytest.mark.parametrize("spoil", ["nothing there", "creating", "corrupted", "deleted", "only another run"])
def test_incremental_without_anything_to_build_on_is_refused(catalog: CheckpointCatalog, spoil: str) -> None:
    if spoil == "creating":
        catalog.create(request(), now=0.0)
    elif spoil == "only another run":
        saved(catalog, run="other")
    elif spoil != "nothing there":
        id_ = saved(catalog).checkpoint_id
        OPERATIONS["mark_corrupted" if spoil == "corrupted" else "delete"](catalog, id_)
    count = catalog.total_count()
    with pytest.raises(ParentMissing, match="run run has no restorable checkpoint") as refused:
        catalog.create(request(200, INCREMENTAL), now=0.0)
    assert refused.value.fix == "save a full checkpoint first"
    assert catalog.total_count() == count


def test_complete_checkpoint_with_a_broken_chain_is_no_parent(catalog: CheckpointCatalog) -> None:
    full = saved(catalog, 100)
    broken = saved(catalog, 200, INCREMENTAL)
    assert saved(catalog, 300, INCREMENTAL).parent_id == broken.checkpoint_id
    catalog.mark_corrupted(broken.checkpoint_id)
    assert saved(catalog, 400, INCREMENTAL).parent_id == full.checkpoint_id


def test_full_and_emergency_checkpoints_have_no_parent(catalog: CheckpointCatalog) -> None:
    saved(catalog)
    assert saved(catalog, 200, FULL).parent_id is None
    assert saved(catalog, 300, EMERGENCY).parent_id is None


def test_chains_of_the_catalogue_are_whole_and_valid(catalog: CheckpointCatalog) -> None:
    ids = [saved(catalog, step, INCREMENTAL if step % 400 else FULL).checkpoint_id for step in range(0, 1000, 100)]
    listed = catalog.list_for_run("run")
    assert [one.checkpoint_id for one in listed] == ids
    assert [chain_length(listed, id_) for id_ in ids] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert restoration_chain(listed, ids[7]) == ids[4:8]
    for one in listed:
        validate_checkpoint(one, listed)


def test_incremental_whose_parent_is_damaged_while_it_is_written_is_not_offered(catalog: CheckpointCatalog) -> None:
    parent = saved(catalog, 100)
    child = catalog.create(request(200, INCREMENTAL), now=0.0)
    catalog.mark_corrupted(parent.checkpoint_id)
    assert catalog.complete(child.checkpoint_id, 1, "path").state is COMPLETE
    assert catalog.find_restore_point(RestoreCriteria("run")) is None


# --- counts and listings ----------------------------------------------------------------------------------------------


def test_deleted_checkpoints_are_in_no_count_size_or_listing(catalog: CheckpointCatalog) -> None:
    kept, deleted = saved(catalog, 100), saved(catalog, 200)
    catalog.create(request(300), now=0.0)
    assert (catalog.total_count(), catalog.total_size()) == (3, 20)
    catalog.delete(deleted.checkpoint_id)
    assert (catalog.total_count(), catalog.total_size()) == (2, 10)
    assert deleted.checkpoint_id not in [one.checkpoint_id for one in catalog.list_for_run("run")]
    assert catalog.get_latest("run") == kept
    assert catalog.get(deleted.checkpoint_id) == replace(deleted, state=DELETED)


def test_sizes_beyond_2_to_the_53_are_added_exactly(catalog: CheckpointCatalog) -> None:
    for size in (2**63, 2**53 + 1, 1):
        catalog.complete(catalog.create(request(), now=0.0).checkpoint_id, size, "path")
    assert catalog.total_size() == 2**63 + 2**53 + 2


def test_what_the_caller_does_with_a_record_changes_nothing(catalog: CheckpointCatalog) -> None:
    metrics = {"loss": 0.5}
    made = saved(catalog, metrics=metrics)
    metrics["loss"] = 0.0
    for one in (
        made,
        catalog.get(made.checkpoint_id),
        catalog.get_latest("run"),
        catalog.find_restore_point(RestoreCriteria("run")),
        *catalog.list_for_run("run"),
        *catalog.find_by_metric("run", "loss", 1.0, ascending=True),
        *catalog.restore_points(RestoreCriteria("run")),
    ):
        assert one is not None
        assert one.metrics == {"loss": 0.5}
        one.metrics["loss"] = 9.0  # type: ignore[index]
    assert catalog.find_by_metric("run", "loss", 0.6, ascending=True) != []


def test_remembered_tombstones_are_limited(catalog: CheckpointCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "TOMBSTONES_MAX", 2)
    ids = [saved(catalog).checkpoint_id for _ in range(3)]
    for id_ in ids:
        catalog.delete(id_)
    assert [catalog.get(id_) is None for id_ in ids] == [True, False, False]


def test_collection_remembers_the_last_tombstones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "TOMBSTONES_MAX", 2)
    catalog = CheckpointCatalog(GcPolicy(1, math.inf))
    for step in range(6):
        saved(catalog, step)
    collected = catalog.gc(0.0)
    assert [catalog.get(id_) is None for id_ in collected] == [True, True, True, False, False]


# --- threads ----------------------------------------------------------------------------------------------------------

ROUNDS = 60


class Guarded:
    """The index behind its lock: it may be used only by the thread that holds the lock."""

    def __init__(self, catalog: CheckpointCatalog) -> None:
        self._inner, self._lock = catalog._index, catalog._lock

    def __getattr__(self, name: str) -> Any:
        assert self._lock.locked(), f"{name} is used without the lock"
        return getattr(self._inner, name)


def test_every_call_holds_the_lock(catalog: CheckpointCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_index", Guarded(catalog))
    calls: dict[str, tuple[Any, ...]] = {
        "create": (request(), 0.0),
        "get": ("ckpt-00000001",),
        "find_restore_point": (RestoreCriteria("run"),),
        "restore_points": (RestoreCriteria("run"),),
        "list_for_run": ("run",),
        "get_latest": ("run",),
        "gc": (0.0,),
        "verdicts": ("run", 0.0),
        "total_count": (),
        "total_size": (),
        "find_by_metric": ("run", "loss", 1.0, True),
    }
    public = {name for name in dir(CheckpointCatalog) if not name.startswith("_")}
    operations = OPERATIONS | {"reinstate": lambda catalog, id_: catalog.reinstate(id_)}
    assert public == calls.keys() | operations.keys()
    for name, arguments in calls.items():
        getattr(catalog, name)(*arguments)
    for operation in operations.values():
        try:
            operation(catalog, "ckpt-00000001")
        except TransitionRefused:
            continue


def test_threads_that_create_at_once_get_different_ids(catalog: CheckpointCatalog) -> None:
    ids = in_threads(lambda number: [saved(catalog, number).checkpoint_id for _ in range(ROUNDS)])
    assert len({id_ for of_thread in ids for id_ in of_thread}) == THREADS * ROUNDS
    assert (catalog.total_count(), catalog.total_size()) == (THREADS * ROUNDS, 10 * THREADS * ROUNDS)


def test_of_threads_that_complete_one_checkpoint_one_succeeds(catalog: CheckpointCatalog) -> None:
    for _ in range(ROUNDS):
        id_ = catalog.create(request(), now=0.0).checkpoint_id

        def complete(number: int, id_: str = id_) -> bool:
            try:
                catalog.complete(id_, number, "path")
            except TransitionRefused:
                return False
            return True

        assert sum(in_threads(complete)) == 1


def test_threads_that_save_delete_and_collect_at_once_break_no_chain() -> None:
    catalog = CheckpointCatalog(GcPolicy(3, 20.0, 1, "loss", metric_ascending=True, keep_every_steps=10))
    for run in "ab":
        saved(catalog, 0, run=run)

    def work(number: int) -> set[str]:
        """Refusals are expected, other errors are not; each collected id is returned once."""
        generator = random.Random(number)
        collected: set[str] = set()
        for step in range(ROUNDS):
            run = generator.choice("ab")
            try:
                kind = generator.choice([FULL, INCREMENTAL, INCREMENTAL])
                made = saved(catalog, step, kind, float(step), run=run, metrics={"loss": generator.random()})
                chosen = generator.choice(catalog.list_for_run(run)).checkpoint_id
                generator.choice(list(OPERATIONS.values()))(catalog, chosen)
                catalog.find_restore_point(RestoreCriteria(run, prefer_full=True))
                validate_checkpoint(made, [made])
            except CatalogRefused:
                pass
            collected |= set(catalog.gc(float(step)))
        return collected

    gone = in_threads(work)
    assert sum(map(len, gone)) == len(set().union(*gone))
    left = [one for run in "ab" for one in catalog.list_for_run(run)]
    assert (catalog.total_count(), catalog.total_size()) == (len(left), sum(one.size_bytes for one in left))
    ids = {one.checkpoint_id for one in left}
    assert ids.isdisjoint(set().union(*gone))
    assert {one.parent_id for one in left if one.parent_id is not None} <= ids
    catalog.gc(1e6)
    assert catalog.gc(1e6) == []
    for run in "ab":
        found = catalog.find_restore_point(RestoreCriteria(run))
        if found is not None:
            assert restoration_chain(catalog.list_for_run(run), found.checkpoint_id)[-1] == found.checkpoint_id
