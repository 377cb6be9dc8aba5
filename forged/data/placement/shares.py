"""How many shards each worker should hold.

Law: each count is the worker's weighted share rounded down or up, exactly, and they add up to the total. Who has
the one more is free, so it is given to those who hold it already; then to those with the largest rest; then by rank.
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
"""The weight of each rank, all in the same unit; None: all have the same."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares rounded down; who has a rest, the largest first; and how many of them get one more."""

    least: Counts
    with_rest: Places
    remainder: int

    @classmethod
    def of(cls, total: int, world: int, weights: Weights = None) -> Shares:
        """The shares of so many things for so many workers."""
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
        """Counts that add up to the total: one more for those preferred, as far as that goes, then for the others."""
        turn = self.with_rest
        if preferred is not None:
            turn = turn[np.argsort(~preferred[turn], kind="stable")]
        counts = self.least.copy()
        counts[turn[: self.remainder]] += 1
        return counts


def read_weights(weights: Mapping[WorkerId, float] | None, workers: Sequence[WorkerId]) -> Weights:
    """The weights of these workers as whole numbers, exactly; who is not named has 1, others' weights say nothing."""
    if weights is None:
        return None
    ratios = [_checked(worker, weights.get(worker, 1)).as_integer_ratio() for worker in workers]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    whole = tuple(numerator * (unit // denominator) for numerator, denominator in ratios)
    if workers and not any(whole):
        raise RequestRefused("weights_invalid", "every worker's weight is 0", "give one of them more than 0")
    return None if len(set(whole)) <= 1 else whole


def check_weight(weight: object) -> None:
    """Refuse what cannot be a worker's own weight: 0 cannot, because all of them could say so."""
    if not _is_weight(weight) or not weight:
        raise RequestRefused("weight_invalid", str(Problem("weight", weight, "a finite number above 0")))


def _is_weight(weight: object) -> bool:
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    return is_number and 0 <= cast("float", weight) <= sys.float_info.max


def _checked(worker: WorkerId, weight: float) -> float:
    if not _is_weight(weight):
        raise RequestRefused(
            "weights_invalid", f"the weight of {worker} is no weight", "give a finite number that is not less than 0"
        )
    return weight
