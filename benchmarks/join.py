"""How long it takes a worker to come into a training, and how long the others stand still for it: against torchft.

Four processes train. A fifth has been started, has imported what it needs and is connected. It is told to go, and the
time from there to its first committed step in the new world is taken, and the longest pause between two steps of the
others. Then it is killed, and when the others are whole again, the next one comes. The window in which ours waits for
more to join is longer than the rest, and a setting; so it is taken off. torchft waits for stragglers too, here for up
to `--join_timeout_ms 100`, and nothing is taken off.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from benchmarks.crew import Crew
from benchmarks.harness import Figure, main
from benchmarks.torch_crews import Contest
from benchmarks.trainee import CONFIG

ROUNDS = 4
JOINS_PER_ROUND = 5
JOINS_QUICK = 2
JOIN_MAX_S = 0.3
PAUSE_MAX_S = 0.05
WINDOWS_S = {"ours": CONFIG.stability_window_s, "torchft": 0.0}


class Join(NamedTuple):
    """How long it took the newcomer, and how long the others stood still."""

    join_s: float
    pause_s: float


def _join_some(crew: Crew, count: int, window_s: float) -> list[Join]:
    joins: list[Join] = []
    for _ in range(count):
        generation, others = crew.workers[0].generation, list(crew.workers)
        newcomer = crew.start()
        went_at = crew.admit(newcomer)
        first_at = newcomer.first_step_in(generation)
        crew.settle()
        pause_s = max(worker.longest_pause_s(went_at, worker.steps[-1].at) for worker in others)
        joins.append(Join(first_at - went_at - window_s, pause_s))
        crew.lose(newcomer)
        crew.settle()
    return joins


def _join_p50(joins: list[Join]) -> float:
    return statistics.median(join.join_s for join in joins)


def _pause_p50(joins: list[Join]) -> float:
    return statistics.median(join.pause_s for join in joins)


def measure(quick: bool) -> list[Figure]:
    """Join after join."""

    def turn(name: str, crew: Crew) -> list[Join]:
        return _join_some(crew, JOINS_QUICK if quick else JOINS_PER_ROUND, WINDOWS_S[name])

    contest: Contest[Join] = Contest()
    contest.hold(list(WINDOWS_S), 1 if quick else ROUNDS, turn, quick=quick)
    ours = contest.results["ours"]
    join, pause = "go to first step, window excluded, p50", "others stand still, p50"
    return [
        Figure(
            f"{join} of {len(ours)}, against the limit", "s", _join_p50(ours), JOIN_MAX_S, 1.0, higher_is_better=False
        ),
        Figure(f"{pause}, against the limit", "s", _pause_p50(ours), PAUSE_MAX_S, 1.0, higher_is_better=False),
        contest.against("torchft", join, "s", _join_p50, 1.0),
        contest.against("torchft", pause, "s", _pause_p50, 1.0),
    ]


if __name__ == "__main__":
    main("join", measure)
