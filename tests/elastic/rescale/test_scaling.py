from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import GlobalTrainingState
from forged.elastic.rescale.scaling import ScalingBase, scale

STATE = GlobalTrainingState(learning_rate=0.2, global_batch_size=64)


def test_what_the_training_has_stays_where_nothing_else_is_wanted() -> None:
    assert scale(ElasticTrainingConfig(), ScalingBase(4, 0.1, 32), STATE, 7) == (0.2, 64)


def test_what_the_settings_say_holds_until_the_training_has_its_own() -> None:
    config = ElasticTrainingConfig(base_learning_rate=0.5, global_batch_size=16)
    assert scale(config, ScalingBase(), GlobalTrainingState(), 7) == (0.5, 16)
    assert scale(ElasticTrainingConfig(), ScalingBase(), GlobalTrainingState(), 7) == (0.0, 0)


@given(worlds=st.lists(st.integers(1, 1_000), min_size=1, max_size=8))
def test_the_way_to_a_world_changes_nothing(worlds: list[int]) -> None:
    config = ElasticTrainingConfig(scale_batch_with_world=True)
    base, state = ScalingBase(4, 0.1, 32), GlobalTrainingState(learning_rate=0.1, global_batch_size=32)
    for world in worlds:
        rate, batch = scale(config, base, state, world)
        state = GlobalTrainingState(learning_rate=rate, global_batch_size=batch)
    assert (rate, batch) == scale(config, base, GlobalTrainingState(), worlds[-1])
