"""What is asked of a checkpoint, as values."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, fields, replace
from enum import StrEnum
from inspect import signature
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest

from forged.checkpoint import (
    CheckpointException,
    CheckpointFormat,
    CompressionLevel,
    ExceptionType,
    LoadOptions,
    ReshardingStrategy,
    SaveOptions,
    ShardedArray,
    WhenBusy,
)
from forged.checkpoint.format.boxes import Box

VALUES = {
    CheckpointFormat: {"single_file", "multi_shard", "consolidated"},
    CompressionLevel: {"none", "fast", "balanced", "maximum"},
    ReshardingStrategy: {"parallel", "simple"},
    ExceptionType: {
        "unknown",
        "save_failed",
        "load_failed",
        "validation_failed",
        "corrupted_checkpoint",
        "incompatible_version",
        "timeout",
        "storage_error",
    },
}


@pytest.mark.parametrize(("kind", "values"), VALUES.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_the_enums_have_the_values_of_the_seed(kind: type[StrEnum], values: set[str]) -> None:
    assert {member.value for member in kind} == values
    assert all(member.name == member.value.upper() for member in kind)


def test_options_have_the_defaults_of_the_seed() -> None:
    save, load = SaveOptions(), LoadOptions()
    assert (save.checkpoint_prefix, save.format, save.timeout) == (None, CheckpointFormat.MULTI_SHARD, None)
    assert save.compression_level is CompressionLevel.NONE
    assert save.include_optimizer
    assert save.include_rng_state
    assert dict(save.custom_metadata) == {}
    assert (load.checkpoint_prefix, load.timeout) == (None, None)
    assert load.resharding_strategy is ReshardingStrategy.PARALLEL
    assert load.load_optimizer
    assert load.load_rng_state
    assert load.strict_mode
    assert not load.skip_validation


def test_choices_may_be_given_by_their_names_and_are_the_choices_inside() -> None:
    save = SaveOptions("a", format="single_file", compression_level="fast", when_busy="refuse")
    assert_type(save.format, CheckpointFormat)
    assert_type(save.compression_level, CompressionLevel)
    assert_type(save.when_busy, WhenBusy)
    assert (save.format, save.compression_level) == (CheckpointFormat.SINGLE_FILE, CompressionLevel.FAST)
    assert save.when_busy is WhenBusy.REFUSE
    assert save == SaveOptions("a", CheckpointFormat.SINGLE_FILE, CompressionLevel.FAST, when_busy=WhenBusy.REFUSE)
    load = LoadOptions("a", resharding_strategy="simple")
    assert_type(load.resharding_strategy, ReshardingStrategy)
    assert load.resharding_strategy is ReshardingStrategy.SIMPLE


@pytest.mark.parametrize("only", ["model/w", ["model/w"], ("model/w",), iter(["model/w"])])
def test_names_to_load_may_be_one_or_several(only: str | Iterable[str]) -> None:
    load = LoadOptions("a", only=only)
    assert_type(load.only, tuple[str, ...])
    assert load.only == ("model/w",)


@pytest.mark.parametrize("name", ["format", "compression_level", "when_busy"])
@pytest.mark.parametrize("value", ["zip", "", None, 1, []])
def test_unknown_enum_value_is_refused_with_the_known_ones(name: str, value: Any) -> None:
    with pytest.raises(CheckpointException, match=f"^{name} must be one of ") as caught:
        SaveOptions(**{name: value})
    assert caught.value.code == "checkpoint_argument_invalid"


@pytest.mark.parametrize("kind", [SaveOptions, LoadOptions])
def test_options_cannot_be_changed_but_copied_with_a_change(kind: type[SaveOptions | LoadOptions]) -> None:
    options = kind("a", timeout=3.0)
    with pytest.raises(FrozenInstanceError):
        options.timeout = 4.0  # type: ignore[misc]
    assert replace(options, checkpoint_prefix="b") == kind("b", timeout=3.0)
    assert pickle.loads(pickle.dumps(options)) == options
    assert [one.name for one in fields(kind)] == list(signature(kind).parameters), "repr and replace go by the fields"


@pytest.mark.parametrize(
    ("name", "value"),
    [("checkpoint_prefix", 100), ("checkpoint_prefix", Path("a")), ("timeout", "1"), ("timeout", -1), ("copies", "1")],
)
def test_an_option_that_is_no_such_thing_is_named(name: str, value: Any) -> None:
    with pytest.raises(CheckpointException, match=name):
        SaveOptions(**{name: value})


def test_a_part_says_where_it_lies() -> None:
    part = ShardedArray(np.zeros((2, 3)), [10, 3], (4, 0))  # type: ignore[arg-type]
    assert (part.global_shape, part.box) == ((10, 3), Box((4, 0), (2, 3)))


@pytest.mark.parametrize(
    ("shape", "offset"),
    [((3, 3), (2, 0)), ((10, 2), (0, 0)), ((10,), (0,)), ((10, 3), (0,)), ((10, 3), (-1, 0)), ((0, 3), (0, 0))],
)
def test_a_part_that_lies_outside_its_array_is_refused(shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointException) as raised:
        ShardedArray(np.zeros((2, 3)), shape, offset)
    assert raised.value.code == "checkpoint_box_invalid"


def test_an_array_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(CheckpointException, match="has more than"):
        ShardedArray(np.zeros((0, 0, 0)), (0, 1 << 40, 1 << 40), (0, 0, 0))
