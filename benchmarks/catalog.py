"""The checkpoint catalogue with 100,000 checkpoints in 1,000 runs, against limits and a dict with sorted lists.

The reference has no states, chains, locks or rules: it adds a record, finds the newest or the last up to a step by
bisection, and collects by sorting each run and cutting it off. In a tick each run has a new checkpoint since the last
one; a quiet tick follows it, in which there is nothing new.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import Protocol, TypeVar

from benchmarks.harness import Figure, interleaved, main, turns
from forged.catalog import CheckpointCatalog, CheckpointType, CreateCheckpointRequest, GcPolicy, RestoreCriteria

RUNS = 1_000
KEPT = 100
QUESTIONS = 20_000
ROUNDS = 5
QUERY_LIMIT_MS = 1.0
TICK_LIMIT_S = 0.3
STEPS = 100
"""Between two checkpoints of a run."""
FULL_EVERY = 10

Question = TypeVar("Question")


class Subject(Protocol):
    """What is measured of both."""

    def save(self, run: str, number: int, loss: float) -> None: ...
    def latest(self, run: str) -> object: ...
    def restore_point(self, asked: tuple[str, int]) -> object: ...
    def gc(self) -> None: ...


class Ours:
    """The catalogue that is safe from several threads."""

    def __init__(self) -> None:
        self._catalog = CheckpointCatalog(GcPolicy(KEPT, inf, 3, "loss", metric_ascending=True))
        self.latest = self._catalog.get_latest

    def save(self, run: str, number: int, loss: float) -> None:
        kind = CheckpointType.INCREMENTAL if number % FULL_EVERY else CheckpointType.FULL
        request = CreateCheckpointRequest(run, 0, number * STEPS, kind, {"loss": loss})
        made = self._catalog.create(request, float(number))
        self._catalog.complete(made.checkpoint_id, 1 << 30, "s3://bucket/prefix")

    def restore_point(self, asked: tuple[str, int]) -> object:
        run, max_step = asked
        return self._catalog.find_restore_point(RestoreCriteria(run, max_step=max_step, prefer_full=True))

    def gc(self) -> None:
        self._catalog.gc(1e6)


class Plain:
    """A dict of records, and a sorted list for each run."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[str, int, float]] = {}
        self._runs: dict[str, list[tuple[int, str]]] = {}

    def save(self, run: str, number: int, loss: float) -> None:
        checkpoint_id = f"{run}-{number:08d}"
        self._records[checkpoint_id] = run, number * STEPS, loss
        insort(self._runs.setdefault(run, []), (number * STEPS, checkpoint_id))

    def latest(self, run: str) -> object:
        return self._records[self._runs[run][-1][1]]

    def restore_point(self, asked: tuple[str, int]) -> object:
        run, max_step = asked
        of_run = self._runs[run]
        return self._records[of_run[bisect_right(of_run, (max_step, "~")) - 1][1]]

    def gc(self) -> None:
        for run, of_run in self._runs.items():
            self._runs[run] = sorted(of_run)[-KEPT:]


class Workload:
    """The same checkpoints and questions for each subject."""

    def __init__(self, subject: Subject, runs: int) -> None:
        self._subject = subject
        self._runs = [f"run-{number}" for number in range(runs)]
        self._random = random.Random(7)
        self._saved = 0
        """How many checkpoints each run has had."""

    def saves_per_s(self) -> float:
        """Save one checkpoint of each run."""
        losses = [self._random.random() for _ in self._runs]
        began = perf_counter()
        for run, loss in zip(self._runs, losses, strict=True):
            self._subject.save(run, self._saved, loss)
        self._saved += 1
        return len(self._runs) / (perf_counter() - began)

    def tick_s(self) -> float:
        self.saves_per_s()
        return self.quiet_tick_s()

    def quiet_tick_s(self) -> float:
        began = perf_counter()
        self._subject.gc()
        return perf_counter() - began

    def latest_ms(self, questions: int) -> float:
        return _p99_ms(self._subject.latest, self._random.choices(self._runs, k=questions))

    def restore_ms(self, questions: int) -> float:
        runs = self._random.choices(self._runs, k=questions)
        oldest = self._saved - KEPT // 2
        asked = [(run, self._random.randrange(oldest, self._saved) * STEPS) for run in runs]
        return _p99_ms(self._subject.restore_point, asked)


def _p99_ms(ask: Callable[[Question], object], questions: Sequence[Question]) -> float:
    times = []
    for question in questions:
        began = perf_counter()
        ask(question)
        times.append(perf_counter() - began)
    return sorted(times)[len(times) * 99 // 100] * 1e3


def measure(quick: bool) -> list[Figure]:
    """Fill both in turns, then ask and collect in turns."""
    runs, questions, rounds = (20, 100, 1) if quick else (RUNS, QUESTIONS, ROUNDS)
    ours, plain = Workload(Ours(), runs), Workload(Plain(), runs)
    size = f"{runs * KEPT:,} checkpoints in {runs:,} runs"
    saves = turns(KEPT, {"ours": ours.saves_per_s, "plain": plain.saves_per_s})
    rates = {name: statistics.median(found) for name, found in saves.items()}
    figures = [Figure(f"create and complete, up to {size}", "1/s", rates["ours"], rates["plain"])]
    for name in ("latest_ms", "restore_ms"):
        asking = {
            "ours": partial(getattr(ours, name), questions),
            "plain": partial(getattr(plain, name), questions),
        }
        found = interleaved(rounds, asking)
        question = {"latest_ms": "get_latest", "restore_ms": "find_restore_point"}[name]
        figures += _against_both(f"{question}, p99", "ms", found["ours"], QUERY_LIMIT_MS, found["plain"])
    for name in ("tick_s", "quiet_tick_s"):
        found = interleaved(rounds, {"ours": getattr(ours, name), "plain": getattr(plain, name)})
        tick = {"tick_s": "GC tick, a new checkpoint in each run", "quiet_tick_s": "GC tick, nothing new"}[name]
        figures += _against_both(tick, "s", found["ours"], TICK_LIMIT_S, found["plain"])
    return figures


def _against_both(name: str, unit: str, ours: float, limit: float, plain: float) -> list[Figure]:
    return [
        Figure(f"{name}, against the limit", unit, ours, limit, aim=1.0, higher_is_better=False),
        Figure(f"{name}, against a dict and sorted lists", unit, ours, plain, higher_is_better=False),
    ]


if __name__ == "__main__":
    main("catalog", measure)
