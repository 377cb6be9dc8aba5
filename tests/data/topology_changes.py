"""Topologies, holdings and plans for tests, made up or drawn by Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st

from forged.data import DataRedistributionPlan, DataRedistributor
from forged.data.columns import NOBODY
from forged.elastic import ClusterTopology, ElasticTrainingConfig, RedistributionType, WorkerId

HOSTS = 3
UNTIMED = settings(deadline=None)
"""For tests with examples that may take long on a busy machine."""


def at(number: int, host: int) -> WorkerId:
    """The worker with this number, on this host."""
    return WorkerId(f"w{number}", f"host{host}", 7000 + number)


def spread(*numbers: int) -> ClusterTopology:
    """Workers with one host each."""
    return ClusterTopology(tuple(at(number, number) for number in numbers))


def crowded(*numbers: int) -> ClusterTopology:
    """Workers that share `HOSTS` hosts."""
    return ClusterTopology(tuple(at(number, number % HOSTS) for number in numbers))


def redistributor(
    strategy: RedistributionType = RedistributionType.INCREMENTAL, replication: int = 0, **settings: Any
) -> DataRedistributor:
    config = ElasticTrainingConfig(redistribution_type=strategy, **settings)
    return DataRedistributor(config, replication=replication)


@dataclass(frozen=True)
class Change:
    """What a plan is made from."""

    strategy: RedistributionType
    replication: int
    old: ClusterTopology
    new: ClusterTopology
    samples: int
    shards: int
    current: npt.NDArray[np.int32] | None
    replicas: npt.NDArray[np.int32] | None
    weights: dict[WorkerId, float] | None
    draining: tuple[WorkerId, ...]

    def redistributor(self) -> DataRedistributor:
        return redistributor(self.strategy, self.replication)

    def plan(self) -> DataRedistributionPlan:
        return self.redistributor().calculate_plan(
            self.old,
            self.new,
            self.samples,
            shards=self.shards,
            current=self.current,
            replicas=self.replicas,
            weights=self.weights,
            draining=self.draining,
        )


@st.composite
def changes(draw: st.DrawFn, strategy: RedistributionType | None = None) -> Change:
    """Any change: workers come and go, hold anything and copies of anything, and some who go still serve."""
    numbers = st.lists(st.integers(0, 9), unique=True, max_size=8)
    old = crowded(*draw(numbers))
    new = crowded(*draw(numbers.filter(bool)))
    shards = draw(st.integers(0, 40))
    rank = st.integers(NOBODY, old.world_size - 1)
    columns = st.lists(rank, min_size=shards, max_size=shards)
    current = draw(st.none() | columns)
    replicas = draw(st.none() | st.lists(columns, max_size=3))
    weight = st.sampled_from([0, 0.1, 1, 1.5, 3])
    weights = draw(st.none() | st.dictionaries(st.sampled_from(new.workers), weight))
    if weights is not None and not any(weights.get(worker, 1) for worker in new.workers):
        weights = None
    return Change(
        strategy or draw(st.sampled_from(RedistributionType)),
        draw(st.integers(0, 3)),
        old,
        new,
        shards + draw(st.integers(0, 60)) if shards else 0,
        shards,
        None if current is None else np.array(current, np.int32),
        None if replicas is None else np.array(replicas, np.int32).reshape(len(replicas), shards),
        weights,
        tuple(draw(st.sets(st.sampled_from(old.workers)))) if old.workers else (),
    )


def held_before(change: Change) -> list[list[WorkerId | None]]:
    """Who is said to hold each shard: its owner or None, then further copies; in plain Python."""
    old, current = change.old.workers, change.current
    ranks = [shard % len(old) if old else NOBODY for shard in range(change.shards)]
    rows = [
        ranks if current is None else current.tolist(),
        *([] if change.replicas is None else change.replicas.tolist()),
    ]
    return [[None if row[shard] == NOBODY else old[row[shard]] for row in rows] for shard in range(change.shards)]
