"""How long a training stands still when a worker is killed: against torchrun and torchft, on the same loop.

Four processes train; one is killed with -9, and the time from there to the next committed step of the last of the
survivors is taken. They do little but collectives, so it dies inside one nearly every time. Then another takes its
place. The crews take turns, some kills each time, and a new cluster each time. torchrun is killed less often than the
others: a kill and the return to four take it ten seconds and more.
"""

from __future__ import annotations

import statistics
from random import Random

from benchmarks.crew import Crew
from benchmarks.harness import Figure, main
from benchmarks.torch_crews import Contest
from forged.elastic.config import ElasticTrainingConfig

ROUNDS = 5
KILLS_PER_ROUND = {"ours": 10, "torchft": 10, "torchrun": 2}
KILLS_QUICK = 2
P50_MAX_S = ElasticTrainingConfig().failure_window_s + 0.1
P99_MAX_S = 0.5
TORCHFT_AIM = 1.0
TORCHRUN_AIM = 20.0
WHAT = "kill to next step of all"


def _kill_some(crew: Crew, count: int, random: Random) -> list[float]:
    """The recovery from each of so many kills."""
    times = [crew.lose_one(random)]
    for _ in range(count - 1):
        crew.admit(crew.start())
        crew.settle()
        times.append(crew.lose_one(random))
    return times


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * len(times))]


def measure(quick: bool) -> list[Figure]:
    """Kill after kill."""
    random = Random(1)

    def turn(name: str, crew: Crew) -> list[float]:
        return _kill_some(crew, KILLS_QUICK if quick else KILLS_PER_ROUND[name], random)

    contest: Contest[float] = Contest()
    contest.hold(list(KILLS_PER_ROUND), 1 if quick else ROUNDS, turn, quick=quick)
    ours = contest.results["ours"]
    p50 = statistics.median
    return [
        Figure(
            f"{WHAT}, p50 of {len(ours)}, against the limit", "s", p50(ours), P50_MAX_S, 1.0, higher_is_better=False
        ),
        Figure(f"{WHAT}, p99, against the limit", "s", _p99(ours), P99_MAX_S, 1.0, higher_is_better=False),
        contest.against("torchft", f"{WHAT}, p50", "s", p50, TORCHFT_AIM),
        contest.against("torchft", f"{WHAT}, p99", "s", _p99, TORCHFT_AIM),
        contest.against("torchrun", f"{WHAT}, p50", "s", p50, TORCHRUN_AIM),
        contest.against("torchrun", f"{WHAT}, p99", "s", _p99, TORCHRUN_AIM),
    ]


if __name__ == "__main__":
    main("recovery", measure)
