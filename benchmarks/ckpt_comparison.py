"""What the checkpoint benchmarks share: their scale, their rounds and their rows.

Medians are compared. The best rounds are a row of their own, because memory and disk of a shared machine are sometimes
slow for other reasons. A reference that is not installed has no figure, and the row says why.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.ckpt_process import torch_unavailable
from benchmarks.ckpt_workload import Workload, large
from benchmarks.harness import Figure, main, turns

MIB, COUNT, ROUNDS = 2048, 200, 7
QUICK_MIB, QUICK_COUNT, QUICK_ROUNDS = 8, 4, 1
SMALL, QUICK_SMALL = Workload(10_000, (256,)), Workload(100, (256,))
RATE, DURATION = "GiB/s", "s"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured, and how often."""

    large: Workload
    small: Workload
    rounds: int
    torch_missing: str
    """Why torch is not measured; empty if it is."""


def run(benchmark: str, measure: Callable[[Scale], Sequence[Figure]]) -> None:
    """Run a benchmark at the scale that the command line gives."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--mib", type=int, default=MIB, help="how large the state is")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    sizes, rest = parser.parse_known_args()
    normal = Scale(large(sizes.mib, COUNT), SMALL, sizes.rounds, torch_unavailable(quick=False))
    quick = Scale(large(QUICK_MIB, QUICK_COUNT), QUICK_SMALL, QUICK_ROUNDS, torch_unavailable(quick=True))
    main(benchmark, lambda is_quick: measure(quick if is_quick else normal), rest)


def measured_rounds(rounds: int, subjects: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The rounds after one warm-up round."""
    turns(1, subjects)
    found = turns(rounds, subjects)
    for name, seconds in found.items():
        sys.stderr.write(f"  {name}: {' '.join(f'{one:.4f}' for one in seconds)}\n")
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """Durations of forged, as rates or seconds, against a reference."""

    what: str
    ours: Sequence[float]
    gib: float | None = None
    """If given, rows show rates."""

    def against(
        self, reference: str, reference_seconds: Sequence[float] | None, aim: float | None = None
    ) -> list[Figure]:
        """A row of medians and a row of best rounds; only forged's median if the reference was not measured."""
        name = f"{self.what}, against {reference}"
        if not reference_seconds:
            return [self._figure(name, statistics.median(self.ours), None, None)]
        return [
            self._figure(name, statistics.median(self.ours), statistics.median(reference_seconds), aim),
            self._figure(f"{name}, best rounds", min(self.ours), min(reference_seconds), None),
        ]

    def _figure(self, name: str, ours: float, reference_seconds: float | None, aim: float | None) -> Figure:
        if self.gib is None:
            return Figure(name, DURATION, ours, reference_seconds, aim, higher_is_better=False)
        return Figure(name, RATE, self.gib / ours, self.gib / reference_seconds if reference_seconds else None, aim)


def best_of(found: Mapping[str, Sequence[float]], names: Mapping[str, str]) -> tuple[str, Sequence[float]]:
    """The reference with the smallest median, and its name."""
    name = min(names, key=lambda one: statistics.median(found[one]))
    return names[name], found[name]
