"""What a job's settings say of elastic training, and what is wrong with them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.elastic.config import (
    CONCURRENT_TRANSFERS_MAX,
    DEFAULTS,
    LEARNING_RATE_MAX,
    RULES,
    WHOLE_NUMBER_MAX,
    ElasticTrainingConfig,
    find_slips,
    tolerated_failures,
)
from forged.elastic.model import AdaptationStrategy, LostDataPolicy, RedistributionType
from forged.errors import ConfigError
from forged.jobs.model import CreateJob, SettingValue
from tests.elastic.values import HUGE

WHOLE = {
    "min_workers": 1,
    "max_workers": 1,
    "rescale_timeout_ms": 0,
    "rescale_silence_ms": 0,
    "max_consecutive_failures": 0,
    "stability_window_ms": 0,
    "worker_heartbeat_timeout_ms": 1,
    "failure_tolerance_percentage": 0,
    "failure_window_ms": 0,
    "reconnect_grace_ms": 0,
    "leave_timeout_ms": 0,
    "min_workers_timeout_ms": 0,
    "stall_timeout_ms": 1,
    "max_concurrent_transfers": 1,
    "base_world_size": 1,
    "global_batch_size": 1,
}
"""The whole numbers, and the least that each may be."""
MOST = dict.fromkeys(WHOLE, WHOLE_NUMBER_MAX) | {"failure_tolerance_percentage": 100}
FLAGS = ["use_synchronous_rescaling", "use_parallel_data_transfer", "evict_stalled", "scale_batch_with_world"]
CHOICES = {
    "lr_adaptation_strategy": AdaptationStrategy,
    "redistribution_type": RedistributionType,
    "lost_data_policy": LostDataPolicy,
}
OPTIONAL = {"leave_timeout_ms", "min_workers_timeout_ms", "base_world_size", "base_learning_rate", "global_batch_size"}


def whole(key: str) -> st.SearchStrategy[Any]:
    numbers = st.integers(WHOLE[key], MOST[key])
    return st.none() | numbers if key in OPTIONAL else numbers


VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{key: whole(key) for key in WHOLE},
    **{key: st.booleans() for key in FLAGS},
    **{key: st.sampled_from(enum) for key, enum in CHOICES.items()},
    "base_learning_rate": st.none() | st.floats(0, LEARNING_RATE_MAX, exclude_min=True) | st.integers(1, 2**53),
}
CONFIGS = (
    st.fixed_dictionaries({}, optional=VALUES)
    .filter(lambda values: values.get("min_workers", 1) <= values.get("max_workers", WHOLE_NUMBER_MAX))
    .map(lambda values: ElasticTrainingConfig(**values))
)


def wrong(**values: Any) -> dict[str, str]:
    """The settings that are wrong, and what would be right."""
    with pytest.raises(ConfigError) as caught:
        ElasticTrainingConfig(**values).validate()
    assert caught.value.code == "elastic_config_invalid"
    return {problem.key: problem.wanted for problem in caught.value.problems}


# What is right.


def test_the_seeds_settings_have_its_defaults() -> None:
    config = ElasticTrainingConfig()
    assert (config.min_workers, config.max_workers) == (1, 2**31 - 1)
    assert (config.rescale_timeout_ms, config.max_consecutive_failures) == (30_000, 3)
    assert config.lr_adaptation_strategy is AdaptationStrategy.LINEAR
    assert config.redistribution_type is RedistributionType.FULL_RESHUFFLE
    assert config.use_synchronous_rescaling is True
    assert (config.stability_window_ms, config.worker_heartbeat_timeout_ms) == (30_000, 10_000)
    assert config.failure_tolerance_percentage == 20
    assert config.use_parallel_data_transfer is True


def test_our_settings_have_their_defaults() -> None:
    config = ElasticTrainingConfig()
    assert (config.failure_window_ms, config.reconnect_grace_ms) == (50, 15_000)
    assert (config.min_workers_timeout_ms, config.stall_timeout_ms, config.evict_stalled) == (600_000, 60_000, False)
    assert (config.max_concurrent_transfers, config.scale_batch_with_world) == (4, False)
    assert (config.base_world_size, config.base_learning_rate, config.global_batch_size) == (None, None, None)


@pytest.mark.parametrize(("count", "is_parallel", "at_once"), [(4, True, 4), (1_000, True, 64), (4, False, 1)])
def test_so_many_transfers_run_at_once(count: int, is_parallel: bool, at_once: int) -> None:
    config = ElasticTrainingConfig(max_concurrent_transfers=count, use_parallel_data_transfer=is_parallel)
    assert config.transfers_at_once == at_once <= CONCURRENT_TRANSFERS_MAX


def test_the_defaults_are_valid() -> None:
    ElasticTrainingConfig().validate()


def test_every_setting_has_a_rule_and_every_rule_is_tested_here() -> None:
    fields = set(ElasticTrainingConfig.__struct_fields__)
    assert fields == set(RULES) == set(DEFAULTS) == set(WHOLE) | set(FLAGS) | set(CHOICES) | {"base_learning_rate"}


@given(CONFIGS)
def test_config_within_the_rules_is_valid(config: ElasticTrainingConfig) -> None:
    config.validate()


def test_it_is_frozen_and_one_key_when_equal() -> None:
    config = ElasticTrainingConfig(min_workers=2)
    with pytest.raises(AttributeError):
        config.min_workers = 0  # type: ignore[misc]  # that it is frozen is the claim
    assert len({config, ElasticTrainingConfig(min_workers=2)}) == 1


# What is wrong: the seed's seven rules.


@pytest.mark.parametrize("value", [0, -1])
def test_min_workers_is_at_least_1(value: int) -> None:
    assert wrong(min_workers=value) == {"min_workers": "a whole number from 1 to 2147483647"}


def test_max_workers_is_at_least_min_workers() -> None:
    assert wrong(min_workers=4, max_workers=3) == {"max_workers": "at least min_workers, which is 4"}
    ElasticTrainingConfig(min_workers=4, max_workers=4).validate()


def test_rescale_timeout_is_not_negative() -> None:
    assert list(wrong(rescale_timeout_ms=-1)) == ["rescale_timeout_ms"]
    ElasticTrainingConfig(rescale_timeout_ms=0).validate()


def test_max_consecutive_failures_is_not_negative() -> None:
    assert list(wrong(max_consecutive_failures=-1)) == ["max_consecutive_failures"]
    ElasticTrainingConfig(max_consecutive_failures=0).validate()


def test_stability_window_is_not_negative() -> None:
    assert list(wrong(stability_window_ms=-1)) == ["stability_window_ms"]
    ElasticTrainingConfig(stability_window_ms=0).validate()


@pytest.mark.parametrize("value", [0, -1])
def test_worker_heartbeat_timeout_is_positive(value: int) -> None:
    assert list(wrong(worker_heartbeat_timeout_ms=value)) == ["worker_heartbeat_timeout_ms"]
    ElasticTrainingConfig(worker_heartbeat_timeout_ms=1).validate()


@pytest.mark.parametrize("value", [-1, 101])
def test_failure_tolerance_is_a_percentage(value: int) -> None:
    assert wrong(failure_tolerance_percentage=value) == {"failure_tolerance_percentage": "a whole number from 0 to 100"}
    for edge in (0, 100):
        ElasticTrainingConfig(failure_tolerance_percentage=edge).validate()


# What is wrong: all rules.


@pytest.mark.parametrize("key", WHOLE)
def test_range_of_a_setting_includes_its_bounds(key: str) -> None:
    room: dict[str, Any] = {} if key == "max_workers" else {"max_workers": WHOLE_NUMBER_MAX}
    for value in (WHOLE[key], MOST[key]):
        ElasticTrainingConfig(**room | {key: value}).validate()
    for value in (WHOLE[key] - 1, MOST[key] + 1, 10**6000):
        assert list(wrong(**{key: value})) == [key]


@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize("value", [True, False, 5.0, "5", math.nan, math.inf, []])
def test_non_integer_setting_is_invalid(key: str, value: Any) -> None:
    """A bool is none, though Python takes it for one."""
    assert list(wrong(**{key: value})) == [key]


@pytest.mark.parametrize("key", [*WHOLE, "base_learning_rate"])
def test_nothing_at_all_is_right_only_where_it_has_a_meaning(key: str) -> None:
    values: dict[str, Any] = {key: None}
    if key in OPTIONAL:
        ElasticTrainingConfig(**values).validate()
    else:
        assert list(wrong(**values)) == [key]


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None, 1.0])
def test_non_bool_setting_is_invalid(key: str, value: Any) -> None:
    assert wrong(**{key: value}) == {key: "true or false"}


@pytest.mark.parametrize("key", CHOICES)
@pytest.mark.parametrize("value", ["Linear", "", 0, None, True, []])
def test_unlisted_choice_is_invalid(key: str, value: Any) -> None:
    assert wrong(**{key: value}) == {key: f"one of {', '.join(CHOICES[key])}"}


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.1e100, math.nan, math.inf, True, "0.1", *HUGE, []])
def test_invalid_learning_rate_setting_is_invalid(value: Any) -> None:
    assert list(wrong(base_learning_rate=value)) == ["base_learning_rate"]


def test_all_invalid_settings_are_named_with_their_values() -> None:
    values: dict[str, Any] = dict.fromkeys(RULES, "x")
    with pytest.raises(ConfigError) as caught:
        ElasticTrainingConfig(**values).validate()
    assert [problem.key for problem in caught.value.problems] == list(RULES)
    for key, rule in RULES.items():
        assert key in caught.value.message
        assert f"{key} must be {rule.wanted}, got 'x'" in str(caught.value)


def test_one_wrong_bound_is_not_compared_with_the_other() -> None:
    assert list(wrong(min_workers=10**6000, max_workers=5)) == ["min_workers"]
    assert list(wrong(min_workers="x", max_workers=5)) == ["min_workers"]
    assert list(wrong(min_workers=5, max_workers="x")) == ["max_workers"]
    assert list(wrong(min_workers=0, max_workers=-1)) == ["min_workers", "max_workers"]


# A job's settings.


@given(CONFIGS)
def test_config_survives_conversion_to_settings(config: ElasticTrainingConfig) -> None:
    """Also after they were sent and stored with the job."""
    request = CreateJob("run", config.to_settings())
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=CreateJob)
    assert ElasticTrainingConfig.from_settings(arrived.settings) == config
    assert ElasticTrainingConfig.from_settings(arrived.settings).to_settings() == arrived.settings


@given(CONFIGS)
def test_read_config_has_the_field_types(config: ElasticTrainingConfig) -> None:
    read = ElasticTrainingConfig.from_settings(config.to_settings())
    assert type(read.lr_adaptation_strategy) is AdaptationStrategy
    assert type(read.redistribution_type) is RedistributionType
    assert type(read.base_learning_rate) in (float, type(None))


def test_only_values_that_differ_from_defaults_are_written() -> None:
    """So a job that an operator created with only the changed setting is the same job."""
    assert ElasticTrainingConfig().to_settings() == {}
    assert ElasticTrainingConfig(min_workers=2).to_settings() == {"min_workers": 2}
    assert ElasticTrainingConfig(min_workers_timeout_ms=None).to_settings() == {"min_workers_timeout_ms": None}


def test_settings_are_plain_scalars() -> None:
    config = ElasticTrainingConfig(lr_adaptation_strategy=AdaptationStrategy.NONE, base_learning_rate=1)
    settings = config.to_settings()
    assert settings == {"lr_adaptation_strategy": "none", "base_learning_rate": 1.0}
    assert [type(value) for value in settings.values()] == [str, float]


def test_a_job_may_have_settings_of_its_own() -> None:
    settings: dict[str, SettingValue] = {"min_workers": 2, "model": "resnet", "depth": -1}
    assert ElasticTrainingConfig.from_settings(settings) == ElasticTrainingConfig(min_workers=2)
    assert ElasticTrainingConfig.from_settings({}) == ElasticTrainingConfig()


def test_wrong_settings_of_a_job_are_named_at_once() -> None:
    settings: dict[str, SettingValue] = {
        "min_workers": True,
        "stall_timeout_ms": 0,
        "evict_stalled": "yes",
        "depth": -1,
    }
    with pytest.raises(ConfigError) as caught:
        ElasticTrainingConfig.from_settings(settings)
    assert [problem.key for problem in caught.value.problems] == ["min_workers", "stall_timeout_ms", "evict_stalled"]


def test_a_bound_is_compared_with_the_default_of_the_other() -> None:
    with pytest.raises(ConfigError) as caught:
        ElasticTrainingConfig.from_settings({"max_workers": 0})
    assert [problem.key for problem in caught.value.problems] == ["max_workers"]


def test_invalid_config_is_not_converted_to_settings() -> None:
    with pytest.raises(ConfigError):
        ElasticTrainingConfig(min_workers=0).to_settings()


# What follows from the settings.


def test_times_are_to_be_had_in_seconds() -> None:
    config = ElasticTrainingConfig(stall_timeout_ms=1)
    assert (config.rescale_timeout_s, config.stability_window_s, config.failure_window_s) == (30.0, 30.0, 0.05)
    assert (config.worker_heartbeat_timeout_s, config.reconnect_grace_s, config.stall_timeout_s) == (10.0, 15.0, 0.001)
    assert (config.min_workers_timeout_s, config.leave_timeout_s) == (600.0, 300.0)


def test_no_limit_is_infinite() -> None:
    assert ElasticTrainingConfig(min_workers_timeout_ms=None).min_workers_timeout_s == math.inf
    assert ElasticTrainingConfig(leave_timeout_ms=None).leave_timeout_s == math.inf


def test_a_heartbeat_comes_every_third_of_the_timeout() -> None:
    assert ElasticTrainingConfig(worker_heartbeat_timeout_ms=3_000).heartbeat_interval_s == 1.0


@pytest.mark.parametrize(
    ("world", "percentage", "failures"),
    [
        *((0, 20, 1), (1, 20, 1), (4, 20, 1), (9, 20, 1), (10, 20, 2), (14, 20, 2), (15, 20, 3), (1000, 20, 200)),
        *((1000, 0, 1), (4, 100, 4), (100, 29, 29), (10**18, 7, 7 * 10**16)),
    ],
)
def test_so_many_percent_may_fail_rounded_down_and_one_always(world: int, percentage: int, failures: int) -> None:
    assert tolerated_failures(world, percentage) == failures


@given(st.integers(1, 10**6), st.integers(0, 100))
def test_no_more_may_fail_than_the_percentage_says_unless_it_is_one(world: int, percentage: int) -> None:
    failures = tolerated_failures(world, percentage)
    assert failures == 1 or failures * 100 <= world * percentage < (failures + 1) * 100
    assert failures <= world


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("stall_timeout", "stall_timeout_ms"),
        ("stall_timeout_s", "stall_timeout_ms"),
        ("stall_timout_ms", "stall_timeout_ms"),
        ("satll_timeout_ms", "stall_timeout_ms"),
        ("min_worker", "min_workers"),
        ("min_workerss", "min_workers"),
        ("mim_workers", "min_workers"),
        ("MAX-WORKERS", "max_workers"),
        ("failure_tolerance", "failure_tolerance_percentage"),
    ],
)
def test_misspelt_setting_is_refused_with_the_nearest_name(key: str, meant: str) -> None:
    assert [f"{slip}" for slip in find_slips({key: 1})] == [f"unknown key `{key}`; did you mean `{meant}`?"]


@pytest.mark.parametrize(
    "key", ["", "_ms", "lr", "learning_rate", "batch_size", "world_size", "n_workers", "timeout_ms", "evict", "dataset"]
)
def test_other_keys_are_the_jobs_own(key: str) -> None:
    assert list(find_slips({key: 1})) == []


def test_no_setting_is_a_slip_of_another() -> None:
    assert list(find_slips(DEFAULTS)) == []
