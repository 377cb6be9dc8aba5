"""How many shards an incremental plan moves, against the minimum, and against a placement by modulo.

The minimum is computed independently in plain Python: the shards that must leave their workers for a balanced result.
Changes are random: workers join and leave, and hold arbitrary shards. By modulo, shard `i` belongs to rank
`i % workers`.
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
    """The workers before and after, and the old rank that holds each shard, -1 for none."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    held: tuple[int, ...]


def _change(seed: int) -> Change:
    """A random change. Half start from an even placement, half from an arbitrary one."""
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
    """All shards but those that can stay: each worker's share, plus one at as many workers as the remainder allows."""
    share, rest = divmod(len(change.held), len(change.new))
    counts = [change.held.count(rank) for rank, worker in enumerate(change.old) if worker in change.new]
    stay = sum(min(count, share) for count in counts) + min(rest, sum(count > share for count in counts))
    return len(change.held) - stay


def _by_modulo(change: Change) -> int:
    holders = [None if rank < 0 else change.old[rank] for rank in change.held]
    return sum(holder != change.new[shard % len(change.new)] for shard, holder in enumerate(holders))


def measure(quick: bool) -> list[Figure]:
    """Measure many random changes."""
    changes = [_change(seed) for seed in range(200 if quick else CHANGES)]
    moved, by_modulo = sum(map(_moved, changes)), sum(map(_by_modulo, changes))
    fewest = sum(map(_fewest, changes))
    return [
        Figure("shards moved over random changes", "shards", moved, fewest, aim=1.0, higher_is_better=False),
        Figure("shards moved by modulo placement", "shards", by_modulo, fewest, higher_is_better=False),
    ]


if __name__ == "__main__":
    main("movement", measure)
