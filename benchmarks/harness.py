"""Figures, interleaved rounds and output, used by all benchmarks.

Invariants:
- Subject and reference are measured in turns in the same run, and their medians are compared.
- A larger ratio is always better: ours / reference for a rate, reference / ours for a duration. An aim of 0.9 means "at
  least nine tenths as good" for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, its reference, and the ratio to reach."""

    name: str
    unit: str
    ours: float
    reference: float | None = None
    aim: float | None = None
    higher_is_better: bool = True

    @property
    def ratio(self) -> float | None:
        """The result relative to the reference; larger is better for every unit."""
        if self.reference is None:
            return None
        return self.ours / self.reference if self.higher_is_better else self.reference / self.ours

    @property
    def met(self) -> bool | None:
        """Whether the aim was reached; None without a reference or an aim."""
        return None if self.ratio is None or self.aim is None else self.ratio >= self.aim

    def as_record(self) -> dict[str, object]:
        """The figure for JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "reference": self.reference,
            "ratio": self.ratio,
            "aim": self.aim,
            "met": self.met,
        }


def turns(rounds: int, subjects: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The results of each subject over `rounds` in which they take turns; every second round in reverse order."""
    results: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    for _ in range(rounds):
        for name in order:
            results[name].append(subjects[name]())
        order.reverse()
    return results


def interleaved(rounds: int, subjects: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each subject over `rounds` in which they take turns."""
    return {name: statistics.median(found) for name, found in turns(rounds, subjects).items()}


def main(benchmark: str, measure: Callable[[bool], Sequence[Figure]], arguments: Sequence[str] | None = None) -> None:
    """Run `measure(quick)` and print its figures, as a table or as one JSON object."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="less work: shows that it runs, not how fast it is")
    options = parser.parse_args(arguments)
    figures = measure(options.quick)
    if options.json:
        print(json.dumps({"benchmark": benchmark, "figures": [figure.as_record() for figure in figures]}))
    else:
        sys.stdout.writelines(f"{line}\n" for line in _table(figures))


def _table(figures: Sequence[Figure]) -> list[str]:
    width = max((len(figure.name) for figure in figures), default=0)
    return [_row(figure, width) for figure in figures]


def _row(figure: Figure, width: int) -> str:
    row = f"{figure.name:{width}}  {figure.ours:10.3f} {figure.unit}"
    if figure.reference is not None:
        row += f"  reference {figure.reference:10.3f}  ratio {figure.ratio:6.3f}"
    if figure.met is not None:
        row += f"  aim {figure.aim}: {'met' if figure.met else 'missed'}"
    return row
