"""The learning rate and the global batch for a world size.

Invariants:
- Where both follow the world size, they depend on it alone, not on the rescales before: growing and shrinking back
  changes nothing.
- A rate of 0 is a rate, as in a warm-up; None is no rate. From a base of 0 no rate follows for another world size, so
  the training keeps its own.
"""

from __future__ import annotations

from typing import NamedTuple

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.learning_rate import adapt_learning_rate


class ScalingBase(NamedTuple):
    """World size, rate and batch at the job's first commit; a world of 0 means that there was none yet."""

    world: int = 0
    learning_rate: float | None = None
    global_batch_size: int = 0


def scale(
    config: ElasticTrainingConfig, base: ScalingBase, rate: float | None, batch: int, world_size: int
) -> tuple[float | None, int]:
    """The learning rate and the global batch for a world of that size; `rate` and `batch` are those of the training."""
    if not config.scale_batch_with_world:
        return config.base_learning_rate if rate is None else rate, batch or config.global_batch_size or 0
    base_size = config.base_world_size or base.world or world_size
    base_rate = base.learning_rate if config.base_learning_rate is None else config.base_learning_rate
    base_batch = config.global_batch_size or base.global_batch_size or batch
    adapted = (
        adapt_learning_rate(base_rate, base_size, world_size, config.lr_adaptation_strategy) if base_rate else rate
    )
    return adapted, base_batch * world_size // base_size
