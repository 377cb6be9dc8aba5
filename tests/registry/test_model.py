from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest

from forged.registry import DeploymentState, ModelInvalid, ModelMetadata, ModelVersion, ValidationResult
from forged.registry.model import NUMBER_MAX, SIZE_MAX, TRANSITIONS, can_transition_state, checked_metadata
from forged.registry.model import checked_result as checked
from tests.registry.records import (
    ARCHIVED,
    CANARY,
    DEPRECATED,
    PRODUCTION,
    REGISTERED,
    STAGING,
    V1,
    VALIDATING,
    metadata,
    result,
)

# --- versions ---------------------------------------------------------------------------------------------------------


def test_version_is_three_numbers() -> None:
    version = ModelVersion(1, 2, 3)
    assert (version.major, version.minor, version.patch) == (1, 2, 3)
    assert version == ModelVersion(major=1, minor=2, patch=3)
    assert str(version) == "1.2.3"


@pytest.mark.parametrize("number", [-1, NUMBER_MAX + 1, 1.0, True, "1", None])
@pytest.mark.parametrize("name", ["major", "minor", "patch"])
def test_version_with_an_impossible_number_is_refused(name: str, number: Any) -> None:
    with pytest.raises(ModelInvalid, match=f"{name} must be an integer from 0 to 4294967295, got"):
        ModelVersion(**({"major": 1, "minor": 1, "patch": 1} | {name: number}))


def test_numbers_of_numpy_are_taken_as_plain_ones() -> None:
    version = ModelVersion(np.int64(1), np.uint32(NUMBER_MAX), np.int8(3))  # type: ignore[arg-type]
    assert version == ModelVersion(1, NUMBER_MAX, 3)
    assert {type(number) for number in msgspec.structs.astuple(version)} == {int}


def test_version_is_a_key_and_has_an_order() -> None:
    assert {ModelVersion(1, 2, 3): "here"}[ModelVersion(1, 2, 3)] == "here"
    assert max(ModelVersion(1, 2, 9), ModelVersion(1, 10, 0), ModelVersion(0, 99, 99)) == ModelVersion(1, 10, 0)


def test_version_is_an_array_of_three_numbers_on_the_wire() -> None:
    assert msgspec.json.encode(ModelVersion(1, 2, 3)) == b"[1,2,3]"


@pytest.mark.parametrize("text", ["[1,2]", "[1,2,3,4]", "[1,2,-1]", "[1,2,4294967296]", "[1,2,true]", '[1,2,"3"]'])
def test_impossible_version_is_refused_by_the_decoder(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=ModelVersion)


# --- states -----------------------------------------------------------------------------------------------------------

STATES = [REGISTERED, VALIDATING, STAGING, CANARY, PRODUCTION, DEPRECATED, ARCHIVED]
FOLLOWING = [
    (REGISTERED, VALIDATING),
    (VALIDATING, STAGING),
    (VALIDATING, REGISTERED),
    (STAGING, CANARY),
    (STAGING, REGISTERED),
    (CANARY, PRODUCTION),
    (CANARY, STAGING),
    (PRODUCTION, DEPRECATED),
    (DEPRECATED, ARCHIVED),
]


def test_states_have_the_values_of_the_seed_in_their_order() -> None:
    values = ["registered", "validating", "staging", "canary", "production", "deprecated", "archived"]
    assert list(DeploymentState) == values
    assert [state.name.lower() for state in DeploymentState] == values


@pytest.mark.parametrize(("before", "after"), list(product(STATES, STATES)))
def test_state_follows_another_only_as_the_seed_allows(before: DeploymentState, after: DeploymentState) -> None:
    assert can_transition_state(before, after) is ((before, after) in FOLLOWING)


def test_transitions_are_a_table_of_all_states() -> None:
    assert list(TRANSITIONS) == STATES
    assert {(before, after) for before, following in TRANSITIONS.items() for after in following} == set(FOLLOWING)


def test_unknown_state_follows_none_and_is_followed_by_none() -> None:
    assert not can_transition_state("unknown", VALIDATING)  # type: ignore[arg-type]
    assert not can_transition_state(REGISTERED, "unknown")  # type: ignore[arg-type]


# --- records ----------------------------------------------------------------------------------------------------------

FIELDS = [
    (ModelVersion, ("major", "minor", "patch")),
    (
        ModelMetadata,
        (
            *("model_id", "name", "version", "framework", "input_shape", "output_shape", "size_bytes", "checksum"),
            *("registered_at", "state", "tags"),
        ),
    ),
    (
        ValidationResult,
        ("model_id", "version", "passed", "latency_p50_ms", "latency_p99_ms", "accuracy_score", "errors"),
    ),
]


@pytest.mark.parametrize(("record_type", "names"), FIELDS)
def test_records_have_the_fields_of_the_seed_in_their_order(
    record_type: type[msgspec.Struct], names: Sequence[str]
) -> None:
    assert record_type.__struct_fields__ == names


VALUES: list[Any] = [V1, metadata(), result(errors=("slow",))]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_is_frozen(value: Any) -> None:
    with pytest.raises(AttributeError):
        setattr(value, type(value).__struct_fields__[0], 7)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_is_the_same_after_a_journey(value: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
    assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
    assert pickle.loads(pickle.dumps(value)) == value


def test_metadata_is_what_was_given() -> None:
    made = ModelMetadata("id", "name", V1, "onnx", [1, 3], [], 7, "sum", 2.0, CANARY, {"a": "b"})
    assert (made.model_id, made.name, made.version, made.framework) == ("id", "name", V1, "onnx")
    assert (made.input_shape, made.output_shape, made.size_bytes, made.checksum) == ((1, 3), (), 7, "sum")
    assert (made.registered_at, made.state, made.tags) == (2.0, CANARY, {"a": "b"})


def test_metadata_needs_no_time_state_or_tags() -> None:
    made = ModelMetadata("id", "name", V1, "onnx", [1, 3], [10], 7, "sum")
    assert (made.registered_at, made.state, made.tags) == (0.0, REGISTERED, {})


def test_result_is_what_was_given() -> None:
    made = ValidationResult("id", V1, True, 1.0, 2.0, 0.5, ["slow"])
    assert (made.model_id, made.version, made.passed) == ("id", V1, True)
    assert (made.latency_p50_ms, made.latency_p99_ms, made.accuracy_score) == (1.0, 2.0, 0.5)
    assert made.errors == ("slow",)
    assert ValidationResult("id", V1, False, 1.0, 2.0, 0.5).errors == ()


def test_values_copy_their_mutable_arguments() -> None:
    shape, tags, errors = [1, 2], {"a": "b"}, ["slow"]
    made, measured = metadata(input_shape=shape, output_shape=shape, tags=tags), result(errors=errors)
    shape.append(3)
    tags["a"] = "c"
    errors.append("wrong")
    assert (made.input_shape, made.output_shape, made.tags) == ((1, 2), (1, 2), {"a": "b"})
    assert measured.errors == ("slow",)


BAD_METADATA: list[tuple[dict[str, Any], str]] = [
    ({"model_id": 7}, "model_id must be a text, got 7"),
    ({"name": None}, "name must be a text"),
    ({"version": "1.0.0"}, "version must be a ModelVersion, got '1.0.0'"),
    ({"framework": b"onnx"}, "framework"),
    ({"input_shape": [1, -1]}, "input_shape must be an integer from 0 to 18446744073709551615, got -1"),
    ({"output_shape": "10"}, "output_shape"),
    ({"size_bytes": -1}, "size_bytes"),
    ({"size_bytes": SIZE_MAX + 1}, "size_bytes"),
    ({"size_bytes": True}, "size_bytes"),
    ({"checksum": 0}, "checksum"),
    ({"registered_at": math.nan}, "registered_at must be finite seconds, got nan"),
    ({"registered_at": "soon"}, "registered_at"),
    ({"state": "lost"}, "state must be one of registered, validating,"),
    ({"tags": {"a": 1}}, "tags['a'] must be a text, got 1"),
    ({"tags": {1: "a"}}, "tags must be a text, got 1"),
]


@pytest.mark.parametrize(("changes", "text"), BAD_METADATA)
def test_metadata_with_an_impossible_value_is_refused_by_field(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelInvalid) as refused:
        checked_metadata(metadata(**changes))
    assert text in refused.value.message
    assert refused.value.fix


def test_metadata_has_plain_values_after_its_check() -> None:
    made = checked_metadata(
        metadata(input_shape=np.array([1, 3]), size_bytes=np.int64(7), registered_at=5, state="canary")
    )
    assert made == metadata(input_shape=(1, 3), size_bytes=7, registered_at=5.0, state=CANARY)
    assert {type(size) for size in made.input_shape} == {int}
    assert (type(made.size_bytes), type(made.registered_at), type(made.state)) == (int, float, DeploymentState)


BAD_RESULTS: list[tuple[dict[str, Any], str]] = [
    ({"model_id": None}, "model_id"),
    ({"version": (1, 0, 0)}, "version"),
    ({"passed": "yes"}, "passed must be True or False, got 'yes'"),
    ({"latency_p50_ms": None}, "latency_p50_ms must be a number"),
    ({"p99": "fast"}, "latency_p99_ms"),
    ({"accuracy": 10**400}, "accuracy_score"),
]


@pytest.mark.parametrize(("changes", "text"), BAD_RESULTS)
def test_result_with_an_impossible_value_is_refused_by_field(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelInvalid, match=text):
        checked(result(**changes))


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf, -0.5])
def test_metric_of_a_result_may_be_any_number(metric: float) -> None:
    found = checked(result(metric, metric, latency_p50_ms=metric))
    assert str([found.accuracy_score, found.latency_p99_ms, found.latency_p50_ms]) == str([metric] * 3)


@pytest.mark.parametrize("errors", ["slow", [1]])
def test_errors_that_are_no_list_of_texts_are_refused(errors: Any) -> None:
    with pytest.raises(ModelInvalid, match="errors must be a list of texts"):
        result(errors=errors)


@pytest.mark.parametrize("value", [None, "model", V1])
def test_other_values_are_no_records(value: Any) -> None:
    with pytest.raises(ModelInvalid, match="metadata must be a ModelMetadata"):
        checked_metadata(value)
    with pytest.raises(ModelInvalid, match="result must be a ValidationResult"):
        checked(value)
