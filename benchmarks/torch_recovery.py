"""How long the training of a transformer stops for kills, drains and joins: against torchft and torchrun.

Four processes train with DistributedDataParallel over gloo. One is killed with -9, or the process of rank 0 is, or one
gets SIGTERM; each time a process that has its imports loaded takes its place. Measured is the longest step of the other
processes until all train together again, minus their median step. The systems take turns, with a new cluster and some
events of each kind. torchrun gets fewer events, because each takes it ten seconds and more; its joiner cannot wait with
its imports loaded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple

from benchmarks.harness import Figure, main
from benchmarks.torch_clusters import Comparison
from benchmarks.torch_training import CLUSTERS
from benchmarks.training_cluster import TrainingCluster, TrainingProcess

ROUNDS = 4
CYCLES_PER_ROUND = {"ours": 5, "torchft": 5, "torchrun": 1}
"""Each cycle has one event of each kind, and three joins."""
STEPS_BETWEEN = 20
"""Steps of all processes before each event, of which the median step is computed."""
STEPS_AFTER = 5
"""Steps of all processes in the new world that belong to an event: the first ones set up what torch needs."""
KILL, KILL_RANK_0, TERM, JOIN = "kill -9 of a worker", "kill -9 of rank 0", "SIGTERM", "join"
P50_MAX_S, WORST_MAX_S = 0.15, 0.5
TORCHFT_AIM, TORCHRUN_AIM = 3.0, 30.0


class Pause(NamedTuple):
    """How much longer than a median step training stopped at an event."""

    kind: str
    seconds: float


def _pause_of(cluster: TrainingCluster, kind: str, act: Callable[[], float]) -> Pause:
    """The pause of the processes that train before and after `act`, which returns when it begins."""
    _all_step(cluster, STEPS_BETWEEN)
    before = list(cluster.workers)
    began_at = act()
    cluster.wait_until_whole()
    _all_step(cluster, STEPS_AFTER)
    others = [worker for worker in before if worker in cluster.workers]
    pauses = [worker.longest_step_s(began_at) - worker.median_step_s(began_at, STEPS_BETWEEN) for worker in others]
    return Pause(kind, max(pauses))


def _all_step(cluster: TrainingCluster, count: int) -> None:
    for worker, seen in [(worker, len(worker.steps)) for worker in cluster.workers]:
        worker.wait_for_steps(seen + count)


def _kill(cluster: TrainingCluster, victim: TrainingProcess) -> float:
    cluster.workers.remove(victim)
    return victim.kill()


def _terminate(cluster: TrainingCluster, victim: TrainingProcess) -> float:
    cluster.workers.remove(victim)
    return victim.terminate()


def _join(cluster: TrainingCluster) -> float:
    started_at = time.monotonic()
    told_at = cluster.start_training(cluster.start())
    return told_at if cluster.joins_when_told else started_at


def _rank_0(cluster: TrainingCluster) -> TrainingProcess:
    return next(worker for worker in cluster.workers if worker.rank == 0)


def _cycle(cluster: TrainingCluster, random: Random) -> list[Pause]:
    """One event of each kind, each followed by a join."""
    pauses = []
    for kind in (KILL, KILL_RANK_0, TERM):
        is_rank_0 = kind == KILL_RANK_0
        rest = [worker for worker in cluster.workers if worker.rank != 0]
        victim = _rank_0(cluster) if is_rank_0 else random.choice(rest)
        end = _terminate if kind == TERM else _kill
        for what, act in ((kind, partial(end, cluster, victim)), (JOIN, partial(_join, cluster))):
            pauses.append(_pause_of(cluster, what, act))
            sys.stderr.write(f"  {type(cluster).__name__}: {what}: {pauses[-1].seconds:.3f} s\n")
    return pauses


def measure(quick: bool, rounds: int, cycles: int | None) -> list[Figure]:
    """Measure all events."""
    random = Random(1)

    def turn(name: str, cluster: TrainingCluster) -> list[Pause]:
        count = 1 if quick else cycles or CYCLES_PER_ROUND[name]
        return [pause for _ in range(count) for pause in _cycle(cluster, random)]

    comparison: Comparison[Pause] = Comparison(CLUSTERS)
    comparison.run_rounds(list(CYCLES_PER_ROUND), 1 if quick else rounds, turn, quick=quick)
    return [figure for kind in (KILL, KILL_RANK_0, TERM, JOIN) for figure in _figures(comparison, kind)]


def _figures(comparison: Comparison[Pause], kind: str) -> list[Figure]:
    def p50(pauses: list[Pause]) -> float:
        return statistics.median(_of_kind(pauses, kind))

    def worst(pauses: list[Pause]) -> float:
        return max(_of_kind(pauses, kind))

    ours = comparison.results["ours"]
    count = len(_of_kind(ours, kind))
    what = f"{kind}: longest step minus median"
    limits = ((f"p50 of {count}", p50, P50_MAX_S), ("worst", worst, WORST_MAX_S))
    figures = [
        Figure(f"{what}, {name}, against the limit", "s", summary(ours), limit, 1.0, higher_is_better=False)
        for name, summary, limit in limits
    ]
    for peer, aim in (("torchft", TORCHFT_AIM), ("torchrun", TORCHRUN_AIM)):
        figures.append(comparison.against(peer, f"{what}, p50", "s", p50, aim))
    return figures


def _of_kind(pauses: list[Pause], kind: str) -> list[float]:
    return [pause.seconds for pause in pauses if pause.kind == kind]


def run() -> None:
    """Run the benchmark with as many rounds as the command line says."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cycles", type=int, help="cycles of each system in each round")
    options, rest = parser.parse_known_args()
    main("torch_recovery", lambda quick: measure(quick, options.rounds, options.cycles), rest)


if __name__ == "__main__":
    run()
