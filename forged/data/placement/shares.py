"""How many shards each worker should hold.

Invariants:
- Each count is the worker's exact weighted share rounded down or up, and the counts add up to the total.
- The extra shards go to workers that hold them already, then to the largest remainder, then to the lowest rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from forged.data.columns import Counts, Mask, Places
from forged.elastic.model import WorkerId
from forged.errors import Problem, RequestRefused

Weights = tuple[int, ...] | None
"""The weight of each rank in one common unit; None if all are equal."""


@dataclass(frozen=True, slots=True)
class WorkerShares:
    """The shares rounded down, the ranks with a remainder, largest first, and how many of them get one more."""

    least: Counts
    with_rest: Places
    remainder: int

    @classmethod
    def of(cls, total: int, world: int, weights: Weights = None) -> WorkerShares:
        """The shares of `total` things for so many workers."""
        if weights is None:
            each, rest = divmod(total, world)
            return cls(np.full(world, each, np.int64), np.arange(world if rest else 0), rest)
        unit = sum(weights)
        parts = [divmod(total * weight, unit) for weight in weights]
        ranked = sorted((rank for rank in range(world) if parts[rank][1]), key=lambda rank: -parts[rank][1])
        least = np.array([part for part, _ in parts], np.int64)
        return cls(least, np.array(ranked, np.intp), total - int(least.sum()))

    @property
    def most(self) -> Counts:
        """The shares rounded up."""
        rounded = self.least.copy()
        rounded[self.with_rest] += 1
        return rounded

    def settled(self, preferred: Mask | None = None) -> Counts:
        """Counts that add up to the total; the extra ones go to the preferred ranks first."""
        turn = self.with_rest
        if preferred is not None:
            turn = turn[np.argsort(~preferred[turn], kind="stable")]
        counts = self.least.copy()
        counts[turn[: self.remainder]] += 1
        return counts


def read_weights(weights: Mapping[WorkerId, float] | None, workers: Sequence[WorkerId]) -> Weights:
    """The exact weights of these workers as whole numbers; 1 for a worker that is not named."""
    if weights is None:
        return None
    ratios = [_checked(worker, weights.get(worker, 1)).as_integer_ratio() for worker in workers]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    whole = tuple(numerator * (unit // denominator) for numerator, denominator in ratios)
    if workers and not any(whole):
        raise RequestRefused("weights_invalid", "the weight of every worker is 0", "give one worker a weight above 0")
    return None if len(set(whole)) <= 1 else whole


def check_weight(weight: object) -> None:
    """Refuse an invalid weight of a worker; 0 is invalid, because all workers could have it."""
    if not _is_weight(weight) or not weight:
        raise RequestRefused("weight_invalid", str(Problem("weight", weight, "a finite number above 0")))


def _is_weight(weight: object) -> bool:
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    return is_number and 0 <= cast("float", weight) <= sys.float_info.max


def _checked(worker: WorkerId, weight: float) -> float:
    if not _is_weight(weight):
        raise RequestRefused(
            "weights_invalid",
            f"the weight of {worker} must be finite and >= 0, got {weight!r:.100}",
            "change the weight",
        )
    return weight
