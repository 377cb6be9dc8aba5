"""The learning rate for a number of workers.

Law: the rate is always taken from the base, never from the rate before. So it depends on how many workers there are and
not on how they became so many, a thousand rescales do not drift, and with the base's number it is the base's exactly.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from numbers import Real

from forged.elastic.model import WORLD_SIZE_MAX, AdaptationStrategy
from forged.errors import Problem, RequestRefused

FACTORS: Mapping[str, Callable[[float], float]] = {
    AdaptationStrategy.LINEAR: lambda growth: growth,
    AdaptationStrategy.SQUARE_ROOT: math.sqrt,
    AdaptationStrategy.NONE: lambda growth: 1.0,
}
"""What the base is multiplied by, when there are `growth` times as many workers as it was chosen for."""


def adapt_learning_rate(base_lr: float, base_world: int, world: int, strategy: AdaptationStrategy) -> float:
    """The rate for `world` workers, where `base_lr` is right for `base_world`."""
    problems = tuple(_problems(base_lr, base_world, world, strategy))
    if problems:
        raise RequestRefused("learning_rate_invalid", "; ".join(map(str, problems)))
    rate = float(base_lr) * FACTORS[strategy](world / base_world)
    if math.isinf(rate):
        text = f"the rate for {world} workers is no finite number with {base_lr!r} for {base_world}"
        raise RequestRefused("learning_rate_invalid", text, "give a smaller base")
    return rate


def _problems(base_lr: float, base_world: int, world: int, strategy: AdaptationStrategy) -> Iterator[Problem]:
    # A numpy scalar is a `Real` as well; so is a bool, which is no rate.
    if isinstance(base_lr, bool) or not isinstance(base_lr, Real) or not 0.0 <= base_lr <= sys.float_info.max:
        yield Problem("base_lr", base_lr, "a finite number, 0 or more")
    for name, size in (("base_world", base_world), ("world", world)):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= WORLD_SIZE_MAX:
            yield Problem(name, size, f"a whole number from 1 to {WORLD_SIZE_MAX}")
    if not isinstance(strategy, str) or strategy not in FACTORS:
        yield Problem("strategy", strategy, f"one of {', '.join(FACTORS)}")
