"""Which learning rate and which batch go with a world of a size.

Law: they depend on the size of the world alone, and not on the way there: growing and shrinking back changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.learning_rate import adapt_learning_rate
from forged.elastic.model import GlobalTrainingState


class ScalingBase(NamedTuple):
    """The world for which this rate and this batch are right: that of the first commit. A world of 0 is none yet."""

    world: int = 0
    learning_rate: float = 0.0
    global_batch_size: int = 0


def paces(
    config: ElasticTrainingConfig, base: ScalingBase, state: GlobalTrainingState, world: int
) -> tuple[float, int]:
    """The learning rate and the global batch for a world of that size."""
    if not config.scale_batch_with_world:
        return state.learning_rate or config.base_learning_rate or 0.0, (
            state.global_batch_size or config.global_batch_size or 0
        )
    size = config.base_world_size or base.world or world
    rate = config.base_learning_rate or base.learning_rate or state.learning_rate
    batch = config.global_batch_size or base.global_batch_size or state.global_batch_size
    return adapt_learning_rate(rate, size, world, config.lr_adaptation_strategy), batch * world // size
