"""What the benchmarks of checkpoints have in common: how large they are, who takes part, and what is told of it.

Law: medians are compared; the best rounds stand below them, because memory and disk of a shared machine are now and
then slow for reasons of their own. A peer that is not there has no figure, and the row says why.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.ckpt_peer import why_no_torch
from benchmarks.ckpt_scene import Load, large
from benchmarks.harness import Figure, main, turns

MIB, COUNT, ROUNDS = 2048, 200, 7
QUICK_MIB, QUICK_COUNT, QUICK_ROUNDS = 8, 4, 1
SMALL, QUICK_SMALL = Load(10_000, (256,)), Load(100, (256,))
RATE, DURATION = "GiB/s", "s"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured, and how often."""

    large: Load
    small: Load
    rounds: int
    no_torch: str
    """Why torch takes no part; empty if it does."""


def run(benchmark: str, measure: Callable[[Scale], Sequence[Figure]]) -> None:
    """Run it as large as the command line says."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--mib", type=int, default=MIB, help="how large the state is")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    sizes, rest = parser.parse_known_args()
    normal = Scale(large(sizes.mib, COUNT), SMALL, sizes.rounds, why_no_torch(quick=False))
    quick = Scale(large(QUICK_MIB, QUICK_COUNT), QUICK_SMALL, QUICK_ROUNDS, why_no_torch(quick=True))
    main(benchmark, lambda is_quick: measure(quick if is_quick else normal), rest)


def after_warming(rounds: int, subjects: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The rounds behind a first one that does not count."""
    turns(1, subjects)
    found = turns(rounds, subjects)
    for name, seconds in found.items():
        sys.stderr.write(f"  {name}: {' '.join(f'{one:.4f}' for one in seconds)}\n")
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """Durations of ours, in rates or as they are, against those of others."""

    what: str
    ours: Sequence[float]
    gib: float | None = None
    """With it, rates are told."""

    def against(self, whom: str, theirs: Sequence[float] | None, aim: float | None = None) -> list[Figure]:
        """A row of medians and one of best rounds; of ours alone where there are none of theirs."""
        name = f"{self.what}, against {whom}"
        if not theirs:
            return [self._figure(name, statistics.median(self.ours), None, None)]
        return [
            self._figure(name, statistics.median(self.ours), statistics.median(theirs), aim),
            self._figure(f"{name}, best rounds", min(self.ours), min(theirs), None),
        ]

    def _figure(self, name: str, ours: float, theirs: float | None, aim: float | None) -> Figure:
        if self.gib is None:
            return Figure(name, DURATION, ours, theirs, aim, higher_is_better=False)
        return Figure(name, RATE, self.gib / ours, self.gib / theirs if theirs else None, aim)


def best_of(found: Mapping[str, Sequence[float]], names: Mapping[str, str]) -> tuple[str, Sequence[float]]:
    """The fastest of several references, by its median, and what it is called."""
    name = min(names, key=lambda one: statistics.median(found[one]))
    return names[name], found[name]
