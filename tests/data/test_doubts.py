from __future__ import annotations

import numpy as np
import pytest

from forged.data import doubts
from forged.data.doubts import Doubts
from forged.data.planner import DataRedistributor
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import ClusterTopology, WorkerId

A, B = WorkerId("a", "h", 1), WorkerId("b", "h", 2)
INCREMENTAL = ElasticTrainingConfig.from_settings({"redistribution_type": "incremental"})


def ids(*shards: int) -> np.typing.NDArray[np.int64]:
    return np.array(shards, np.int64)


def about(*copies: tuple[str, int]) -> Doubts:
    made = Doubts()
    for holder, shard in copies:
        made.add(holder, shard)
    return made


def test_a_copy_is_in_doubt_until_its_holder_has_looked_at_it() -> None:
    it = about(("a", 3), ("a", 1), ("a", 3), ("b", 2))
    assert it.of("a").tolist() == [1, 3]
    it.looked_at("a", ids(3, 9))
    assert it.of("a").tolist() == [1]
    it.looked_at("a", ids(1))
    assert it.of("a").tolist() == []
    assert it.of("b").tolist() == [2]


def test_a_copy_may_be_doubted_again() -> None:
    it = about(("a", 3))
    it.looked_at("a", ids(3))
    it.add("a", 3)
    assert it.of("a").tolist() == [3]


def test_those_count_that_stay_with_who_has_them_as_their_owner_or_not() -> None:
    held = {A: [0, 1, 2, 3]}
    plan = DataRedistributor(INCREMENTAL, replication=0).calculate_plan(
        ClusterTopology((A,)), ClusterTopology((A, B)), 4, shards=4, current=held
    )
    kept = plan.worker_assignments.ids(A).tolist()
    everything = about(*(("a", shard) for shard in range(4)), ("gone", 0))
    assert list(everything.counted_on(plan)) == [("a", shard) for shard in kept]
    twice = DataRedistributor(INCREMENTAL, replication=1).calculate_plan(
        ClusterTopology((A,)), ClusterTopology((A, B)), 4, shards=4, current=held
    )
    assert list(everything.counted_on(twice)) == [("a", shard) for shard in range(4)]


def test_so_many_are_remembered_and_so_many_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "DOUBTED_MAX", 3)
    monkeypatch.setattr(doubts, "ASKED_MAX", 2)
    it = about(*(("a", shard) for shard in range(5)))
    assert it.of("a").tolist() == [0, 1]
    it.looked_at("a", it.of("a"))
    assert it.of("a").tolist() == [2]
