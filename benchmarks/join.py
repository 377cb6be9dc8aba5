"""How long a worker takes to join a running training, and how long the other workers pause: against torchft.

Four processes train. A fifth is started, has its imports loaded and is connected. When it is told to join, measured are
the time to its first committed step in the new world, and the longest pause between two steps of the other workers.
Then it is killed, the cluster becomes whole again, and the next one joins. The stability window of forged is a setting
and longer than the rest, so it is subtracted. torchft waits for stragglers too, here for up to `--join_timeout_ms 100`;
nothing is subtracted.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from benchmarks.forged_worker import CONFIG
from benchmarks.harness import Figure, main
from benchmarks.torch_clusters import Comparison
from benchmarks.training_cluster import TrainingCluster

ROUNDS = 4
JOINS_PER_ROUND = 5
JOINS_QUICK = 2
JOIN_MAX_S = 0.3
PAUSE_MAX_S = 0.05
WINDOWS_S = {"ours": CONFIG.stability_window_s, "torchft": 0.0}


class Join(NamedTuple):
    """How long the join took, and how long the other workers paused."""

    join_s: float
    pause_s: float


def _join_some(cluster: TrainingCluster, count: int, window_s: float) -> list[Join]:
    joins: list[Join] = []
    for _ in range(count):
        generation, others = cluster.workers[0].generation, list(cluster.workers)
        joiner = cluster.start()
        went_at = cluster.start_training(joiner)
        first_at = joiner.first_step_in(generation)
        cluster.wait_until_whole()
        pause_s = max(worker.longest_pause_s(went_at, worker.steps[-1].at) for worker in others)
        joins.append(Join(first_at - went_at - window_s, pause_s))
        cluster.kill_member(joiner)
        cluster.wait_until_whole()
    return joins


def _join_p50(joins: list[Join]) -> float:
    return statistics.median(join.join_s for join in joins)


def _pause_p50(joins: list[Join]) -> float:
    return statistics.median(join.pause_s for join in joins)


def measure(quick: bool) -> list[Figure]:
    """Measure joins."""

    def turn(name: str, cluster: TrainingCluster) -> list[Join]:
        return _join_some(cluster, JOINS_QUICK if quick else JOINS_PER_ROUND, WINDOWS_S[name])

    comparison: Comparison[Join] = Comparison()
    comparison.run_rounds(list(WINDOWS_S), 1 if quick else ROUNDS, turn, quick=quick)
    ours = comparison.results["ours"]
    join, pause = "join to first step, stability window excluded, p50", "pause of the other workers, p50"
    return [
        Figure(
            f"{join} of {len(ours)}, against the limit", "s", _join_p50(ours), JOIN_MAX_S, 1.0, higher_is_better=False
        ),
        Figure(f"{pause}, against the limit", "s", _pause_p50(ours), PAUSE_MAX_S, 1.0, higher_is_better=False),
        comparison.against("torchft", join, "s", _join_p50, 1.0),
        comparison.against("torchft", pause, "s", _pause_p50, 1.0),
    ]


if __name__ == "__main__":
    main("join", measure)
