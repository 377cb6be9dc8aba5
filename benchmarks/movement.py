"""How many shards an incremental plan moves, against the fewest possible; and what dealing out by modulo would move.

The fewest is what must leave workers so that the rest is balanced, counted for itself in plain Python. Changes are
random: workers come, go, and hold anything. By modulo, shard `i` belongs to rank `i % workers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.harness import Figure, main
from forged.data import DataRedistributor
from forged.elastic import ClusterTopology, ElasticTrainingConfig, RedistributionType, WorkerId

CHANGES = 10_000
WORLD_MAX = 40
SHARDS_MAX = 400


@dataclass(frozen=True, slots=True)
class Change:
    """Who is there before and after, and which old rank holds each shard, -1 for nobody."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    held: tuple[int, ...]


def _change(seed: int) -> Change:
    """Half of the changes start from shards that are dealt out evenly, half from any holdings."""
    random = Random(seed)
    old = random.sample(range(2 * WORLD_MAX), random.randint(1, WORLD_MAX))
    staying = [worker for worker in old if random.random() < 0.8]
    joining = random.sample(range(2 * WORLD_MAX, 3 * WORLD_MAX), random.randint(0 if staying else 1, WORLD_MAX // 4))
    shards = range(random.randint(1, SHARDS_MAX))
    held = [shard % len(old) for shard in shards]
    if random.random() < 0.5:
        held = [random.randint(-1, len(old) - 1) for _ in shards]
    return Change(tuple(old), tuple(staying + joining), tuple(held))


def _topology(numbers: tuple[int, ...]) -> ClusterTopology:
    return ClusterTopology(tuple(WorkerId(f"w{number}", f"host{number % 7}", 7000) for number in numbers))


def _moved(change: Change) -> int:
    plans = DataRedistributor(ElasticTrainingConfig(redistribution_type=RedistributionType.INCREMENTAL))
    held, shards = np.array(change.held, np.int32), len(change.held)
    return plans.calculate_plan(_topology(change.old), _topology(change.new), shards, shards=shards, current=held).moved


def _fewest(change: Change) -> int:
    """All shards, less those that can stay: up to its share at each worker, and one more at as many as have a rest."""
    share, rest = divmod(len(change.held), len(change.new))
    counts = [change.held.count(rank) for rank, worker in enumerate(change.old) if worker in change.new]
    stay = sum(min(count, share) for count in counts) + min(rest, sum(count > share for count in counts))
    return len(change.held) - stay


def _by_modulo(change: Change) -> int:
    holders = [None if rank < 0 else change.old[rank] for rank in change.held]
    return sum(holder != change.new[shard % len(change.new)] for shard, holder in enumerate(holders))


def measure(quick: bool) -> list[Figure]:
    """Over many random changes."""
    changes = [_change(seed) for seed in range(200 if quick else CHANGES)]
    moved, by_modulo = sum(map(_moved, changes)), sum(map(_by_modulo, changes))
    fewest = sum(map(_fewest, changes))
    return [
        Figure("shards moved over random changes", "shards", moved, fewest, aim=1.0, higher_is_better=False),
        Figure("the same, dealt by modulo", "shards", by_modulo, fewest, higher_is_better=False),
    ]


if __name__ == "__main__":
    main("movement", measure)
