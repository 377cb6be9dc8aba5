"""The catalogue against its definition, after every operation of random histories."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forged.catalog import (
    CheckpointCatalog,
    CheckpointMeta,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
    restoration_chain,
)
from forged.catalog.catalog_index import CatalogIndex
from forged.errors import RequestRefused
from tests.catalog.naive_catalog import NaiveCatalog, rank
from tests.catalog.records import COMPLETE, CREATING, DELETED, record

RUNS = ["run", "other"]
STEPS = st.sampled_from([0, 1, 2, 7, 8, 9, 10, 20, 2**53, 2**53 + 1, 2**64 - 1])
METRICS = st.dictionaries(
    st.sampled_from(["loss", "accuracy"]), st.sampled_from([math.nan, -math.inf, math.inf, 0.1, 0.2, 0.2, 3.0])
)
policies = st.builds(
    GcPolicy,
    st.integers(0, 4),
    st.sampled_from([0, 3, 10, math.inf]),
    st.integers(0, 2),
    st.just("loss"),
    st.booleans(),
    st.sampled_from([None, 1, 8]),
    st.sampled_from([None, 4.0]),
)
criteria = st.builds(
    RestoreCriteria,
    st.sampled_from(RUNS),
    st.none() | st.integers(0, 2),
    st.none() | STEPS,
    st.booleans(),
    st.booleans(),
)
numbers = st.integers(1, 40)
CHANGES = ["mark_corrupted", "abandon_beyond", "reinstate", "pin", "unpin", "delete"]


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the code of its refusal."""
    try:
        return call()
    except RequestRefused as refused:
        return refused.code


class Histories(RuleBasedStateMachine):
    """The same operations on the index and on its definition."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.created = 0

    @initialize(policy=policies)
    def start(self, policy: GcPolicy) -> None:
        self.index = CatalogIndex(policy)
        self.naive = NaiveCatalog(policy)

    def both(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of both; compares refusals and returns what the index says."""
        ours = outcome(lambda: getattr(self.index, name)(*arguments, **named))
        theirs = outcome(lambda: getattr(self.naive, name)(*arguments, **named))
        if isinstance(ours, str) or isinstance(theirs, str):
            assert ours == theirs
        return ours

    def an_id(self, number: int) -> str:
        """Mostly that of a checkpoint there was."""
        return f"c{1 + number % (self.created + 1):03d}"

    @rule(passed=st.sampled_from([0.0, 0.5, 1.0, 5.0, -2.0]))
    def pass_time(self, passed: float) -> None:
        self.now += passed

    @rule(
        run=st.sampled_from(RUNS),
        epoch=st.integers(0, 2),
        step=STEPS,
        kind=st.sampled_from(CheckpointType),
        metrics=METRICS,
        is_completed=st.booleans(),
    )
    def create(
        self, run: str, epoch: int, step: int, kind: CheckpointType, metrics: dict[str, float], is_completed: bool
    ) -> None:
        id_ = f"c{self.created + 1:03d}"
        made = self.both("create", CreateCheckpointRequest(run, epoch, step, kind, metrics), id_, self.now)
        if isinstance(made, CheckpointMeta):
            self.created += 1
            if is_completed:
                self.both("complete", id_, 7, f"{run}/{id_}")

    @rule(number=numbers, verified=st.booleans())
    def complete(self, number: int, verified: bool) -> None:
        self.both("complete", self.an_id(number), 10, "path", verified_at=self.now if verified else None)

    @rule(number=numbers, name=st.sampled_from(CHANGES))
    def change(self, number: int, name: str) -> None:
        self.both(name, self.an_id(number))

    @rule(number=numbers, name=st.sampled_from(["mark_verified", "mark_repaired"]))
    def verify(self, number: int, name: str) -> None:
        self.both(name, self.an_id(number), self.now)

    @rule(number=numbers, name=st.sampled_from(["hold", "release"]))
    def hold(self, number: int, name: str) -> None:
        self.both(name, self.an_id(number), "reader")

    @rule(back=st.sampled_from([0.0, 0.0, 1.0]))
    def collect(self, back: float) -> None:
        now = self.now - back
        told = {
            verdict.checkpoint_id for run in RUNS for verdict in self.index.verdicts(run, now) if not verdict.is_kept
        }
        collected = [one.checkpoint_id for one in self.index.gc(now)]
        assert set(collected) == self.naive.gc(now) == told
        for place, id_ in enumerate(collected):
            assert self.naive.records[id_].parent_id not in collected[:place], "a parent goes after its children"
        assert self.index.gc(now) == []

    @rule()
    def reload(self) -> None:
        """The daemon restarts."""
        records = [*self.index.tombstones.values(), *(one for run in RUNS for one in self.index.list_for_run(run))]
        self.index.load(reversed(records))

    @rule(asked=criteria)
    def restore(self, asked: RestoreCriteria) -> None:
        points = self.naive.restore_points(asked)
        assert list(self.index.restore_points(asked)) == points
        assert self.index.find_restore_point(asked) == (points[0] if points else None)

    @rule(run=st.sampled_from(RUNS), key=st.sampled_from(["loss", "accuracy"]), is_ascending=st.booleans())
    def ask_for_metric(self, run: str, key: str, is_ascending: bool) -> None:
        found = self.index.find_by_metric(run, key, 0.2, is_ascending)
        assert {one.checkpoint_id for one in found} == self.naive.find_by_metric(run, key, 0.2, is_ascending)
        values = [one.metrics[key] for one in found]
        assert values == sorted(values, reverse=not is_ascending)

    @precondition(lambda self: hasattr(self, "index"))
    @invariant()
    def holds_the_same(self) -> None:
        live = self.naive.live()
        assert self.index.total_count() == len(live)
        assert self.index.total_size() == sum(one.size_bytes for one in live)
        for run in RUNS:
            listed = {one.checkpoint_id: one for one in self.index.list_for_run(run)}
            assert listed.keys() == {one.checkpoint_id for one in self.naive.live(run)}
            assert all(str(one) == str(self.naive.records[id_]) for id_, one in listed.items())
            assert ident(self.index.get_latest(run)) == ident(self.naive.get_latest(run))
            for one in self.naive.restorable(run):
                assert restoration_chain(listed.values(), one.checkpoint_id)[-1] == one.checkpoint_id

    @precondition(lambda self: hasattr(self, "index"))
    @invariant()
    def nothing_needed_is_deleted(self) -> None:
        for one in self.naive.live():
            if one.parent_id is not None:
                assert self.naive.records[one.parent_id].state is not DELETED


def ident(meta: CheckpointMeta | None) -> str | None:
    return None if meta is None else meta.checkpoint_id


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


IDS = [str(number) for number in range(8)]
loaded = st.lists(
    st.builds(
        lambda id_, parent, run, step, state, created_at, pinned: record(
            id_, parent, training_run_id=run, step=step, state=state, created_at=created_at, pinned=pinned
        ),
        st.sampled_from(IDS),
        st.none() | st.sampled_from(IDS),
        st.sampled_from(RUNS),
        st.integers(0, 9),
        st.sampled_from([COMPLETE, COMPLETE, COMPLETE, CREATING, DELETED]),
        st.sampled_from([0.0, 5.0, 9.0]),
        st.booleans(),
    ),
    unique_by=lambda one: one.checkpoint_id,
)


@given(loaded, policies)
@settings(deadline=None)
def test_any_records_are_loaded_also_with_cycles_and_missing_parents(
    records: list[CheckpointMeta], policy: GcPolicy
) -> None:
    index, naive = CatalogIndex(policy), NaiveCatalog(policy)
    index.load(records)
    naive.records = {one.checkpoint_id: one for one in records}
    for run in RUNS:
        asked = RestoreCriteria(run)
        assert list(index.restore_points(asked)) == naive.restore_points(asked)
        assert index.get_latest(run) == naive.get_latest(run)
    assert {one.checkpoint_id for one in index.gc(9.0)} == naive.gc(9.0)
    assert index.gc(9.0) == []


@pytest.mark.parametrize("is_best_lowest", [True, False])
def test_collected_catalogue_keeps_what_the_definition_keeps(is_best_lowest: bool) -> None:
    policy = GcPolicy(3, 50, 2, "loss", is_best_lowest, keep_every_steps=400)
    catalog, naive = CheckpointCatalog(policy), NaiveCatalog(policy)
    for step in range(100, 3100, 100):
        kind = CheckpointType.INCREMENTAL if step % 500 else CheckpointType.FULL
        wanted = CreateCheckpointRequest("run", step // 1000, step, kind, {"loss": float(step * 7919 % 100)})
        if step == 100:
            wanted = CreateCheckpointRequest("run", 0, step, CheckpointType.FULL, {"loss": 1.0})
        made = catalog.create(wanted, step / 100)
        naive.create(wanted, made.checkpoint_id, step / 100)
        for one in (catalog, naive):
            one.complete(made.checkpoint_id, 10, "path")
        assert set(catalog.gc(step / 100)) == naive.gc(step / 100)
    kept = sorted(catalog.list_for_run("run"), key=rank)
    assert [one.checkpoint_id for one in kept] == [one.checkpoint_id for one in sorted(naive.live(), key=rank)]
    assert len(kept) < 30
