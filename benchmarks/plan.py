"""How long an incremental plan takes, against one copy-and-sort of the same column of owners; and how it grows.

Growth compares the time for N shards with a hundred times the time for N/100 shards. A fixed cost per plan makes the
ratio better than 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Figure, interleaved, main
from forged.data import DataRedistributor
from forged.elastic import ClusterTopology, ElasticTrainingConfig, RedistributionType, WorkerId

SHARDS = 10_000_000
SHARDS_QUICK = 100_000
GROWTH = 100
ROUNDS = 9
WORLD = 1_000
NEW_WORLDS = (1_001, 999, 500)
AIM = 0.2
"""Five times the reference."""


def _topology(world: int) -> ClusterTopology:
    return ClusterTopology(tuple(WorkerId(f"w{number}", f"host{number}", 7000) for number in range(world)))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _planning(owners: npt.NDArray[np.int32], world: int) -> Callable[[], float]:
    plans = DataRedistributor(ElasticTrainingConfig(redistribution_type=RedistributionType.INCREMENTAL))
    old, new, shards = _topology(WORLD), _topology(world), owners.size
    return lambda: _seconds(lambda: plans.calculate_plan(old, new, shards, shards=shards, current=owners))


def _sorting(owners: npt.NDArray[np.int32]) -> Callable[[], float]:
    return lambda: _seconds(lambda: np.sort(owners.copy()))


def measure(quick: bool) -> list[Figure]:
    """Measure one more worker, one fewer, and half of the workers."""
    shards, rounds = (SHARDS_QUICK, 1) if quick else (SHARDS, ROUNDS)
    owners = np.resize(np.arange(WORLD, dtype=np.int32), shards)
    figures = []
    for world in NEW_WORLDS:
        way = f"{shards:,} shards, {WORLD:,} to {world:,} workers"
        many, few = _planning(owners, world), _planning(owners[: shards // GROWTH], world)
        found = interleaved(rounds, {"plan": many, "sort": _sorting(owners), "few": few})
        plan_ms, sort_ms, linear_ms = found["plan"] * 1e3, found["sort"] * 1e3, found["few"] * GROWTH * 1e3
        figures += [
            Figure(f"plan, {way}", "ms", plan_ms, sort_ms, aim=AIM, higher_is_better=False),
            Figure(f"growth from a hundredth, {way}", "ms", plan_ms, linear_ms, aim=1.0, higher_is_better=False),
        ]
    return figures


if __name__ == "__main__":
    main("plan", measure)
