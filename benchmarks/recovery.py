"""How long training stops when a worker is killed: against torchrun and torchft, with the same training loop.

Four processes train. One is killed with -9; measured is the time until every survivor has committed another step. The
processes do little but collectives, so the victim nearly always dies inside one. Then another process takes its place.
The systems take turns with a new cluster and some kills each. torchrun gets fewer kills: one kill and the return to
four processes take it ten seconds and more.
"""

from __future__ import annotations

import statistics
from random import Random

from benchmarks.harness import Figure, main
from benchmarks.torch_clusters import Comparison
from benchmarks.training_cluster import TrainingCluster
from forged.elastic.config import ElasticTrainingConfig

ROUNDS = 5
KILLS_PER_ROUND = {"ours": 10, "torchft": 10, "torchrun": 2}
KILLS_QUICK = 2
P50_MAX_S = ElasticTrainingConfig().failure_window_s + 0.1
P99_MAX_S = 0.5
TORCHFT_AIM = 1.0
TORCHRUN_AIM = 20.0
WHAT = "kill to next step of all"


def _kill_some(cluster: TrainingCluster, count: int, random: Random) -> list[float]:
    """The recovery time of each of `count` kills."""
    times = [cluster.kill_one(random)]
    for _ in range(count - 1):
        cluster.start_training(cluster.start())
        cluster.wait_until_whole()
        times.append(cluster.kill_one(random))
    return times


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * len(times))]


def measure(quick: bool) -> list[Figure]:
    """Measure the recovery from kills."""
    random = Random(1)

    def turn(name: str, cluster: TrainingCluster) -> list[float]:
        return _kill_some(cluster, KILLS_QUICK if quick else KILLS_PER_ROUND[name], random)

    comparison: Comparison[float] = Comparison()
    comparison.run_rounds(list(KILLS_PER_ROUND), 1 if quick else ROUNDS, turn, quick=quick)
    ours = comparison.results["ours"]
    p50 = statistics.median
    return [
        Figure(
            f"{WHAT}, p50 of {len(ours)}, against the limit", "s", p50(ours), P50_MAX_S, 1.0, higher_is_better=False
        ),
        Figure(f"{WHAT}, p99, against the limit", "s", _p99(ours), P99_MAX_S, 1.0, higher_is_better=False),
        comparison.against("torchft", f"{WHAT}, p50", "s", p50, TORCHFT_AIM),
        comparison.against("torchft", f"{WHAT}, p99", "s", _p99, TORCHFT_AIM),
        comparison.against("torchrun", f"{WHAT}, p50", "s", p50, TORCHRUN_AIM),
        comparison.against("torchrun", f"{WHAT}, p99", "s", _p99, TORCHRUN_AIM),
    ]


if __name__ == "__main__":
    main("recovery", measure)
