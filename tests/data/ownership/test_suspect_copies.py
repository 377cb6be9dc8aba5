from __future__ import annotations

import numpy as np
import pytest

from forged.data.ownership import suspect_copies
from forged.data.ownership.suspect_copies import SuspectCopies
from forged.data.placement.planner import DataRedistributor
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, WorkerId

A, B, C = WorkerId("a", "h", 1), WorkerId("b", "h", 2), WorkerId("c", "h", 3)
INCREMENTAL = ElasticTrainingConfig.from_settings({"redistribution_type": "incremental"})


def ids(*shards: int) -> np.typing.NDArray[np.int64]:
    return np.array(shards, np.int64)


ALL = ids(*range(10))


def about(*copies: tuple[str, int]) -> SuspectCopies:
    made = SuspectCopies()
    for holder, shard in copies:
        made.add(holder, shard)
    return made


def test_a_copy_is_in_doubt_until_its_holder_has_looked_at_it() -> None:
    it = about(("a", 3), ("a", 1), ("a", 3), ("b", 2))
    assert it.held_by("a", ALL).tolist() == [1, 3]
    it.verified("a", ids(3, 9))
    assert it.held_by("a", ALL).tolist() == [1]
    it.verified("a", ids(1))
    it.verified("c", ids(1))
    assert it.held_by("a", ALL).tolist() == []
    assert it.held_by("b", ALL).tolist() == [2]


def test_a_copy_may_be_doubted_again() -> None:
    it = about(("a", 3))
    it.verified("a", ids(3))
    it.add("a", 3)
    assert it.held_by("a", ALL).tolist() == [3]


def test_only_held_suspects_are_kept_after_a_whole_offer() -> None:
    it = about(("a", 1), ("a", 3), ("b", 3))
    assert it.held_by("a", ids(0, 3)).tolist() == [3]
    assert it.held_by("a", ids(0, 1)).tolist() == [1]
    it.keep_held("a", ids(0, 3))
    assert it.held_by("a", ALL).tolist() == [3]
    it.keep_held("a", ids())
    assert it.held_by("a", ALL).tolist() == []
    assert it.held_by("b", ALL).tolist() == [3]


def test_joiner_verifies_suspects_of_absent_workers_once() -> None:
    it = about(("a", 1), ("a", 3), ("b", 2))
    assert it.for_newcomer(C, ids(), ids(1, 2, 3, 4), {"b", "c"}).tolist() == [1, 3]
    assert it.for_newcomer(C, ids(1), ids(1, 2, 3, 4), {"b", "c"}).tolist() == [3]
    assert it.for_newcomer(C, ids(3), ids(1, 2, 3, 4), {"b", "c"}).tolist() == []
    assert it.for_newcomer(C, ids(), ids(1, 2, 3, 4), {"b", "c"}).tolist() == []
    assert it.for_newcomer(WorkerId("c", "h", 4), ids(), ALL, {"b", "c"}).tolist() == [1, 3], "another life"
    assert it.take_changes().keys() == {("a", 1), ("a", 3), ("b", 2)}, "only a's copies stay suspect"


def test_changes_of_suspects_are_taken_once() -> None:
    it = about(("a", 1), ("a", 2), ("a", 1), ("b", 3))
    assert it.take_changes() == dict.fromkeys((("a", 1), ("a", 2), ("b", 3)), True)
    it.add("a", 1)
    assert it.take_changes() == {}
    it.verified("a", ids(2, 4))
    it.keep_held("b", ids(4))
    it.add("a", 5)
    assert it.take_changes() == {("a", 2): False, ("b", 3): False, ("a", 5): True}
    assert it.keep_holders(["b"]) == 2
    assert it.take_changes() == {("a", 1): False, ("a", 5): False}


def test_restored_suspects_are_known_and_no_change() -> None:
    it = SuspectCopies([("a", 1), ("b", 3), ("a", 2)])
    assert it.held_by("a", ALL).tolist() == [1, 2]
    assert it.take_changes() == {}


def test_suspects_used_by_a_plan_are_those_kept_by_their_holders() -> None:
    held = {A: [0, 1, 2, 3]}
    plan = DataRedistributor(INCREMENTAL, replication=0).calculate_plan(
        ClusterTopology((A,)), ClusterTopology((A, B)), 4, shards=4, current=held
    )
    kept = plan.worker_assignments.ids(A).tolist()
    everything = about(*(("a", shard) for shard in range(4)), ("gone", 0))
    assert list(everything.used_by(plan)) == [("a", shard) for shard in kept]
    twice = DataRedistributor(INCREMENTAL, replication=1).calculate_plan(
        ClusterTopology((A,)), ClusterTopology((A, B)), 4, shards=4, current=held
    )
    assert list(everything.used_by(twice)) == [("a", shard) for shard in range(4)]


def test_so_many_are_remembered_and_so_many_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspect_copies, "SUSPECTS_MAX", 3)
    monkeypatch.setattr(suspect_copies, "ASKED_MAX", 2)
    it = SuspectCopies()
    assert [it.add("a", shard) for shard in (0, 1, 2, 3, 2)] == [True, True, True, False, True]
    assert it.held_by("a", ALL).tolist() == [0, 1]
    it.verified("a", ids(0, 1))
    assert it.held_by("a", ALL).tolist() == [2]
    assert it.take_changes() == {("a", 0): False, ("a", 1): False, ("a", 2): True}
