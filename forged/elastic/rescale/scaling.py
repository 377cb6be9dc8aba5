"""The learning rate and the global batch for a world size.

Invariants:
- Both depend on the world size alone, not on the rescales before: growing and shrinking back changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.learning_rate import adapt_learning_rate
from forged.elastic.model import GlobalTrainingState


class ScalingBase(NamedTuple):
    """World size, rate and batch at the job's first commit; a world of 0 means that there was none yet."""

    world: int = 0
    learning_rate: float = 0.0
    global_batch_size: int = 0


def scale(
    config: ElasticTrainingConfig, base: ScalingBase, state: GlobalTrainingState, world_size: int
) -> tuple[float, int]:
    """The learning rate and the global batch for a world of that size."""
    if not config.scale_batch_with_world:
        return state.learning_rate or config.base_learning_rate or 0.0, (
            state.global_batch_size or config.global_batch_size or 0
        )
    base_size = config.base_world_size or base.world or world_size
    rate = config.base_learning_rate or base.learning_rate or state.learning_rate
    batch = config.global_batch_size or base.global_batch_size or state.global_batch_size
    adapted = adapt_learning_rate(rate, base_size, world_size, config.lr_adaptation_strategy)
    return adapted, batch * world_size // base_size
