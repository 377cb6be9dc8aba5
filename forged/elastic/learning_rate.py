"""The learning rate for a number of workers.

Invariants:
- The rate is computed from the base, never from the previous rate: it depends on the number of workers alone, does not
  drift over rescales, and equals the base rate at the base world size.
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
"""The factor on the base rate if there are `growth` times as many workers as at the base."""


def adapt_learning_rate(base_lr: float, base_world: int, world: int, strategy: AdaptationStrategy) -> float:
    """The rate for `world` workers if `base_lr` is right for `base_world`."""
    problems = tuple(_problems(base_lr, base_world, world, strategy))
    if problems:
        raise RequestRefused("learning_rate_invalid", "; ".join(map(str, problems)))
    rate = float(base_lr) * FACTORS[strategy](world / base_world)
    if math.isinf(rate):
        text = f"learning rate for {world} workers must be finite, got {rate} from {base_lr!r} for {base_world}"
        raise RequestRefused("learning_rate_invalid", text, "use a smaller base_lr")
    return rate


def _problems(base_lr: float, base_world: int, world: int, strategy: AdaptationStrategy) -> Iterator[Problem]:
    # `Real` admits numpy scalars, but bool too.
    if isinstance(base_lr, bool) or not isinstance(base_lr, Real) or not 0.0 <= base_lr <= sys.float_info.max:
        yield Problem("base_lr", base_lr, "finite and >= 0")
    for name, size in (("base_world", base_world), ("world", world)):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= WORLD_SIZE_MAX:
            yield Problem(name, size, f"a whole number from 1 to {WORLD_SIZE_MAX}")
    if not isinstance(strategy, str) or strategy not in FACTORS:
        yield Problem("strategy", strategy, f"one of {', '.join(FACTORS)}")
