from __future__ import annotations

import math
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.registry import (
    DeploymentState,
    ModelInvalid,
    ModelMetadata,
    ModelVersion,
    ValidationResult,
    meets_sla,
    percentile,
    rollback_priority,
    select_best_model,
    select_best_version,
)
from forged.registry.book.state import ALL
from forged.registry.messages import ImportedVersion, ImportModels
from tests.registry.records import CANARY, PRODUCTION, V1, V2, metadata, result
from tests.registry.stored_registry import StoredRegistry

NAN, INF = math.nan, math.inf
ANY_NUMBER = st.floats() | st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 5e-324, -1e308, 1e308])
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ERRORS = st.lists(st.just("slow"), max_size=5)
RESULTS = st.builds(result, ANY_NUMBER, ANY_NUMBER, errors=ERRORS)
VERSIONS = st.builds(ModelVersion, st.integers(0, 2), st.integers(0, 2), st.just(0))
FEW = st.sampled_from([NAN, -INF, -1.0, 0.0, 0.5, INF])

# --- percentiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "p", "value"),
    [
        ([4, 1, 9, 7], 50, 4),
        ([4, 1, 9, 7], 51, 7),
        ([4, 1, 9, 7], 0, 1),
        ([4, 1, 9, 7], 25, 1),
        ([4, 1, 9, 7], 99, 9),
        ([4, 1, 9, 7], 100, 9),
        ([3], 0, 3),
        ([3], 99.9, 3),
        ([-1, INF, -INF], 50, -1),
        (range(1, 101), 99, 99),
        (range(1, 1001), 99.9, 999),
        (range(1, 1001), 0.1, 1),
        (range(1, 100_001), 99.999, 99_999),
        (np.arange(1, 11, dtype=np.float32), np.float64(90.0), 9),
    ],
)
def test_percentile_is_the_sample_of_the_nearest_rank(samples: list[float], p: float, value: float) -> None:
    assert percentile(samples, p) == value


@given(st.lists(st.floats(allow_nan=False), min_size=1), st.integers(0, 100))
def test_percentile_is_the_least_sample_that_so_many_do_not_exceed(samples: list[float], p: int) -> None:
    found = percentile(samples, p)
    assert found in samples
    assert sum(one <= found for one in samples) * 100 >= p * len(samples)
    assert found == min(samples) or sum(one < found for one in samples) * 100 < p * len(samples)


@pytest.mark.parametrize("p", [-0.1, 100.1, NAN, INF])
def test_percentage_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(ModelInvalid, match="p must be a number from 0 to 100"):
        percentile([1.0], p)


@pytest.mark.parametrize("samples", [[], [NAN], [1.0, NAN, 2.0], ["fast"]])
def test_samples_without_a_percentile_are_refused(samples: list[float]) -> None:
    with pytest.raises(ModelInvalid, match="samples must be"):
        percentile(samples, 50)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracy", "p99", "is_met"),
    [
        (0.9, 10.0, True),
        (0.95, 9.0, True),
        (0.9, 10.000001, False),
        (0.899999, 10.0, False),
        (NAN, 1.0, False),
        (1.0, NAN, False),
        (-0.9, 1.0, False),
    ],
)
def test_limits_are_met_up_to_their_values(accuracy: float, p99: float, is_met: bool) -> None:
    assert meets_sla(result(accuracy, p99), max_latency_ms=10.0, min_accuracy=0.9) is is_met


def test_limits_are_about_metrics_alone() -> None:
    assert meets_sla(result(0.9, 10.0, passed=False, errors=["wrong"], latency_p50_ms=99.0), 10.0, 0.9)


# --- the best version -------------------------------------------------------------------------------------------------


def candidate(
    model_id: str, accuracy: float, p99: float = 10.0, version: ModelVersion = V1, state: DeploymentState = PRODUCTION
) -> tuple[ModelMetadata, ValidationResult]:
    return metadata(model_id, version, state=state), result(accuracy, p99, model_id=model_id, version=version)


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        ([candidate("a", 0.8), candidate("b", 0.9), candidate("c", 0.85)], "b"),
        ([candidate("a", 0.8, state=CANARY), candidate("b", 0.7)], "a"),
        ([candidate("a", 0.9, 20.0), candidate("b", 0.9, 10.0)], "b"),
        ([candidate("a", 0.9, 20.0), candidate("b", 0.8, 10.0)], "a"),
        ([candidate("a", 0.9, version=V1), candidate("b", 0.9, version=V2)], "b"),
        ([candidate("b", 0.9), candidate("a", 0.9)], "a"),
        ([candidate("a", NAN), candidate("b", -5.0)], "b"),
        ([candidate("a", NAN), candidate("b", -INF)], "b"),
        ([candidate("a", -2.0), candidate("b", -1.0)], "b"),
        ([candidate("a", 0.9, NAN), candidate("b", 0.9, INF)], "b"),
        ([candidate("a", NAN, NAN)], "a"),
        ([], None),
    ],
)
def test_best_model_has_the_highest_accuracy_then_the_lowest_latency_then_the_highest_version(
    candidates: list[tuple[ModelMetadata, ValidationResult]], best: str | None
) -> None:
    assert [select_best_model(order) for order in permutations(candidates)] == [best] * math.factorial(len(candidates))


@pytest.mark.parametrize("state", DeploymentState)
def test_only_canary_and_production_versions_are_selected(state: DeploymentState) -> None:
    best = select_best_model([candidate("best", 1.0, state=state), candidate("other", 0.5)])
    assert best == ("best" if state in (CANARY, PRODUCTION) else "other")


def test_best_version_is_the_metadata_of_the_best_model() -> None:
    better, worse = candidate("a", 0.9, version=V2), candidate("a", 0.8, version=V1)
    assert select_best_version([worse, better]) == better[0]
    assert select_best_version(iter([better, worse])) == better[0]
    assert select_best_version([]) is None


def test_failed_validation_does_not_exclude_a_version() -> None:
    failed = metadata("a", state=PRODUCTION), result(0.99, passed=False, errors=["wrong"])
    assert select_best_model([candidate("b", 0.9), failed]) == "a"


CANDIDATES = st.builds(candidate, st.sampled_from("abc"), FEW, FEW, VERSIONS)


@given(st.permutations(range(6)), st.lists(CANDIDATES, max_size=6))
def test_best_version_does_not_depend_on_the_order(
    order: list[int], candidates: list[tuple[ModelMetadata, ValidationResult]]
) -> None:
    shuffled = [candidates[place] for place in order if place < len(candidates)]
    best = select_best_version(candidates)
    assert best == select_best_version(shuffled)
    assert (best is None) is (not candidates)


# --- rollback ---------------------------------------------------------------------------------------------------------

BASELINE = result(0.9, 10.0)


@pytest.mark.parametrize(
    ("current", "priority"),
    [
        (BASELINE, 0.0),
        (result(0.95, 5.0), 0.0),
        (result(0.9, 20.0), 1.0),
        (result(0.9, 15.0), 0.5),
        (result(0.855, 10.0), 1.0),
        (result(0.9, 10.0, errors=["slow"] * 5), 1.0),
        (result(0.855, 20.0, errors=["slow"] * 5), 3.0),
        (result(0.99, 20.0), 1.0),
        (result(NAN, NAN), 0.0),
        (result(-INF, INF), 2e6),
    ],
)
def test_priority_is_one_at_each_clear_degradation(current: ValidationResult, priority: float) -> None:
    assert rollback_priority(current, BASELINE) == pytest.approx(priority)


@pytest.mark.parametrize(
    ("current", "baseline", "priority"),
    [
        (result(0.9, 10.0), result(NAN, NAN), 0.0),
        (result(0.9, 10.0), result(INF, INF), 0.0),
        (result(0.0, 0.0), result(0.0, 0.0), 0.0),
        (result(0.0, 3.0), result(0.0, 0.0), 3.0),
        (result(-0.005, 0.0), result(0.0, 0.0), 1.0),
        (result(-1.05, 1.0), result(-1.0, 1.0), 1.0),
        (result(-1.0, 1.0), result(-1.05, 1.0), 0.0),
        (result(0.9, 0.3), result(0.9, 0.1), 0.2),
        (result(0.9, 10.0, errors=["slow"] * 3), result(0.9, 10.0, errors=["wrong"] * 3), 0.0),
    ],
)
def test_priority_is_relative_to_the_baseline(
    current: ValidationResult, baseline: ValidationResult, priority: float
) -> None:
    assert rollback_priority(current, baseline) == pytest.approx(priority)


@given(RESULTS, RESULTS)
def test_priority_is_finite_and_not_negative(current: ValidationResult, baseline: ValidationResult) -> None:
    assert 0.0 <= rollback_priority(current, baseline) < INF


PAIRS = st.tuples(FINITE, FINITE)


@given(RESULTS, PAIRS, PAIRS, st.tuples(ERRORS, ERRORS))
def test_priority_grows_with_errors_latency_and_accuracy_loss(
    baseline: ValidationResult,
    latencies: tuple[float, float],
    accuracies: tuple[float, float],
    errors: tuple[list[str], list[str]],
) -> None:
    (faster, slower), (worse, better), (fewer, more) = sorted(latencies), sorted(accuracies), sorted(errors, key=len)
    base = rollback_priority(result(better, faster, errors=fewer), baseline)
    assert rollback_priority(result(better, slower, errors=fewer), baseline) >= base
    assert rollback_priority(result(worse, faster, errors=fewer), baseline) >= base
    assert rollback_priority(result(better, faster, errors=more), baseline) >= base


def test_daemon_ranks_versions_as_they_are_selected() -> None:
    registry = StoredRegistry()
    measures = product((math.nan, -1.0, 0.0, 1.0, math.inf), (math.nan, 0.0, 5.0, math.inf))
    versions = [
        ImportedVersion(
            metadata(model_id, ModelVersion(0, number, 0), state=PRODUCTION),
            validation=result(accuracy, p99, model_id=model_id, version=ModelVersion(0, number, 0)),
        )
        for number, (accuracy, p99) in enumerate(measures)
        for model_id in "ab"
    ]
    registry.do(registry.registration.import_models, ImportModels(versions, "x"))
    left = {(one.metadata.model_id, one.metadata.version): (one.metadata, one.validation) for one in versions}
    expected = []
    while best := select_best_version([(one, validation) for one, validation in left.values() if validation]):
        expected.append((best.model_id, best.version))
        del left[best.model_id, best.version]
    assert [rank[-2:] for rank in registry.state.ranking_of(ALL)] == expected
