"""How many ranks a rescale changes, against the minimum.

The minimum is found by exhaustive search: of all worlds with dense ranks in which the survivors keep their order, the
one in which most survivors keep their rank. Histories are random, and the same for both.
"""

from __future__ import annotations

from itertools import combinations
from random import Random

from benchmarks.harness import Figure, main
from forged.elastic.rescale.ranks import assign_ranks, moves

HISTORIES = 400
CHANGES = 12
WORLD_MAX = 9


def _fewest(old: tuple[int, ...], staying: list[int], size: int) -> int:
    """The fewest moves over all ways to place the survivors, in their order, in a world of `size`."""
    return min(
        sum(1 for worker, rank in zip(staying, places, strict=True) if old.index(worker) != rank)
        for places in combinations(range(size), len(staying))
    )


def _changes(histories: int) -> tuple[int, int]:
    """The moves over all histories: by `assign_ranks`, and the minimum."""
    ours = fewest = 0
    for seed in range(histories):
        random = Random(seed)
        world: tuple[int, ...] = tuple(range(random.randint(1, WORLD_MAX)))
        following = len(world)
        for _ in range(CHANGES):
            staying = [worker for worker in world if random.random() < 0.75]
            joining = list(range(following, following + random.randint(0, WORLD_MAX - len(staying))))
            following += len(joining)
            if not staying and not joining:
                continue
            new = assign_ranks(world, set(staying), joining)
            ours += moves(world, new)
            fewest += _fewest(world, staying, len(new))
            world = new
    return ours, fewest


def measure(quick: bool) -> list[Figure]:
    """Measure many random histories."""
    ours, fewest = _changes(40 if quick else HISTORIES)
    return [Figure("ranks changed over random histories", "ranks", ours, fewest, aim=1.0, higher_is_better=False)]


if __name__ == "__main__":
    main("rank_stability", measure)
