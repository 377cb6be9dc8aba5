from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import pytest

from forged.catalog import (
    CheckpointInvalid,
    CheckpointMeta,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
)
from forged.catalog.model import STEP_MAX, TRANSITIONS, checked_request, checked_time
from forged.errors import ConfigError
from tests.catalog.records import record, request


@pytest.mark.parametrize(
    ("enum", "values"),
    [
        (CheckpointState, ["creating", "complete", "corrupted", "deleted"]),
        (CheckpointType, ["full", "incremental", "emergency"]),
    ],
)
def test_enums_have_the_values_of_the_seed_in_their_order(enum: type[StrEnum], values: list[str]) -> None:
    assert list(enum) == values
    assert [member.name.lower() for member in enum] == values


FIELDS = [
    (
        CheckpointMeta,
        (
            *("checkpoint_id", "training_run_id", "epoch", "step", "checkpoint_type", "state", "size_bytes"),
            *("created_at", "parent_id", "metrics", "storage_path"),
        ),
    ),
    (CreateCheckpointRequest, ("training_run_id", "epoch", "step", "checkpoint_type", "metrics")),
    (RestoreCriteria, ("training_run_id", "max_epoch", "max_step", "require_complete", "prefer_full")),
    (
        GcPolicy,
        ("max_checkpoints_per_run", "max_age_seconds", "keep_best_n", "metric_key", "metric_ascending"),
    ),
]


@pytest.mark.parametrize(("record_type", "names"), FIELDS)
def test_records_begin_with_the_fields_of_the_seed_in_their_order(
    record_type: type[msgspec.Struct], names: Sequence[str]
) -> None:
    assert record_type.__struct_fields__[: len(names)] == tuple(names)


VALUES: list[Any] = [record("a"), request(), RestoreCriteria("run"), GcPolicy(3, 60.0)]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_is_frozen(value: Any) -> None:
    with pytest.raises(AttributeError):
        setattr(value, type(value).__struct_fields__[0], "other")


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_is_the_same_after_a_journey(value: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
    assert pickle.loads(pickle.dumps(value)) == value


def test_values_copy_their_mutable_arguments() -> None:
    metrics = {"loss": 1.0}
    made = record("a", metrics=metrics), request(metrics=metrics)
    metrics["loss"] = 2.0
    assert [one.metrics["loss"] for one in made] == [1.0, 1.0]


def test_state_of_a_deleted_checkpoint_never_changes_and_only_a_corrupted_one_becomes_complete_again() -> None:
    assert TRANSITIONS.keys() == set(CheckpointState)
    assert TRANSITIONS[CheckpointState.DELETED] == frozenset()
    assert [state for state, after in TRANSITIONS.items() if CheckpointState.COMPLETE in after] == [
        "creating",
        "corrupted",
    ]
    assert all(CheckpointState.CREATING not in after and state not in after for state, after in TRANSITIONS.items())


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"run": ""}, "training_run_id"),
    ({"epoch": -1}, "epoch must be an integer from 0 to 4294967295, got -1"),
    ({"epoch": 2**32}, "epoch"),
    ({"step": -1}, "step"),
    ({"step": STEP_MAX + 1}, "step"),
    ({"step": 1.5}, "step must be an integer from 0 to 18446744073709551615, got 1.5"),
    ({"step": True}, "step"),
    ({"kind": "partial"}, "checkpoint_type must be one of full, incremental, emergency, got 'partial'"),
    ({"metrics": {"loss": "low"}}, "metrics['loss'] must be a number, got 'low'"),
    ({"metrics": {"loss": 10**400}}, "metrics['loss']"),
    ({"metrics": dict.fromkeys(map(str, range(1001)), 0.0)}, "metrics must be at most 1000 entries"),
]


@pytest.mark.parametrize(("changes", "text"), BAD_REQUESTS)
def test_request_with_an_impossible_value_is_refused_by_field(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointInvalid) as refused:
        checked_request(request(**changes))
    assert text in refused.value.message
    assert refused.value.code == "checkpoint_argument_invalid"
    assert refused.value.fix


def test_numbers_of_numpy_are_taken_as_plain_ones() -> None:
    made = checked_request(request(np.int64(7), metrics={"loss": np.float32(0.5)}))  # type: ignore[arg-type]
    assert (made.step, made.metrics) == (7, {"loss": 0.5})
    assert type(made.step) is int
    assert type(made.metrics["loss"]) is float


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf, None, "soon", 10**400])
def test_time_that_has_no_place_in_an_order_is_refused(now: Any) -> None:
    with pytest.raises(CheckpointInvalid, match="now must be finite seconds"):
        checked_time("now", now)


BAD_POLICIES: list[tuple[dict[str, Any], set[str]]] = [
    ({"max_checkpoints_per_run": -1}, {"max_checkpoints_per_run"}),
    ({"max_age_seconds": math.nan}, {"max_age_seconds"}),
    ({"max_age_seconds": -1, "keep_best_n": 1.5}, {"max_age_seconds", "keep_best_n"}),
    ({"keep_every_steps": 0}, {"keep_every_steps"}),
    ({"keep_every_seconds": 0.0}, {"keep_every_seconds"}),
    ({"keep_every_seconds": math.inf}, {"keep_every_seconds"}),
    ({"max_age_seconds": 10**400}, {"max_age_seconds"}),
]


@pytest.mark.parametrize(("changes", "keys"), BAD_POLICIES)
def test_invalid_policy_names_every_wrong_field(changes: dict[str, Any], keys: set[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        GcPolicy(**({"max_checkpoints_per_run": 3, "max_age_seconds": 60.0} | changes))
    assert {problem.key for problem in refused.value.problems} == keys


@pytest.mark.parametrize("age", [0, 2**64 - 1, math.inf])
def test_policy_without_an_age_limit_is_valid(age: float) -> None:
    assert GcPolicy(0, age).max_age_seconds == age
