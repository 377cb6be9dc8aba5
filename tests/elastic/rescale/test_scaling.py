from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.rescale.scaling import ScalingBase, scale

SCALED = ElasticTrainingConfig(scale_batch_with_world=True)


def test_rate_and_batch_of_the_training_stay_if_nothing_scales() -> None:
    assert scale(ElasticTrainingConfig(), ScalingBase(4, 0.1, 32), 0.2, 64, 7) == (0.2, 64)


def test_rate_and_batch_of_the_settings_hold_until_the_training_has_its_own() -> None:
    config = ElasticTrainingConfig(base_learning_rate=0.5, global_batch_size=16)
    assert scale(config, ScalingBase(), None, 0, 7) == (0.5, 16)
    assert scale(ElasticTrainingConfig(), ScalingBase(), None, 0, 7) == (None, 0)


def test_rate_of_zero_is_a_rate() -> None:
    config = ElasticTrainingConfig(base_learning_rate=0.5)
    assert scale(config, ScalingBase(4, 0.1, 32), 0.0, 32, 7) == (0.0, 32)


def test_base_rate_of_zero_in_the_settings_is_kept_at_every_world_size() -> None:
    config = ElasticTrainingConfig(base_learning_rate=0.0, scale_batch_with_world=True)
    assert scale(config, ScalingBase(1, 0.1, 8), 0.0, 8, 4) == (0.0, 32)


def test_job_that_began_with_a_rate_of_zero_keeps_the_rate_of_its_training() -> None:
    assert scale(SCALED, ScalingBase(1, 0.0, 8), 0.05, 8, 4) == (0.05, 32)
    assert scale(SCALED, ScalingBase(1, None, 8), None, 8, 4) == (None, 32)


def test_first_world_of_a_job_is_its_base() -> None:
    assert scale(SCALED, ScalingBase(), 0.1, 32, 4) == (0.1, 32)


@given(worlds=st.lists(st.integers(1, 1_000), min_size=1, max_size=8))
def test_earlier_worlds_do_not_change_rate_and_batch(worlds: list[int]) -> None:
    base = ScalingBase(4, 0.1, 32)
    rate, batch = 0.1, 32
    for world in worlds:
        found, batch = scale(SCALED, base, rate, batch, world)
        assert found is not None
        rate = found
    assert (rate, batch) == scale(SCALED, base, None, 0, worlds[-1])
