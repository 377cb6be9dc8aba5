"""Which version is good enough, which is the best, and how urgent a rollback is.

Invariants:
- No metric that is NaN wins against a number, and none makes a result that is NaN or infinite.
- The best of several candidates does not depend on their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal

from forged.registry.errors import argument_invalid
from forged.registry.model import DeploymentState, ModelMetadata, ModelVersion, ValidationResult, checked_number

SERVING_STATES = frozenset({DeploymentState.PRODUCTION, DeploymentState.CANARY})
ERRORS_OF_A_CLEAR_DEGRADATION = 5
LATENCY_GROWTH_OF_A_CLEAR_DEGRADATION = 1.0
"""The p99 latency has doubled."""
ACCURACY_LOSS_OF_A_CLEAR_DEGRADATION = 0.05
"""A twentieth of the accuracy is gone."""
LATENCY_LEAST_MS = 1.0
"""A lower baseline counts as this one: no latency can be compared with zero."""
ACCURACY_LEAST = 0.1
"""A baseline nearer to zero counts as this far from it."""
FACTOR_MAX = 1e6


def percentile(samples: Iterable[float], p: float) -> float:
    """The least sample that at least `p` percent of the samples do not exceed (nearest rank)."""
    percent = checked_number("p", p)
    if not 0 <= percent <= 100:
        raise argument_invalid("p", p, "a number from 0 to 100")
    ordered = sorted(checked_number("samples", sample) for sample in samples)
    if not ordered or any(map(math.isnan, ordered)):
        raise argument_invalid("samples", ordered, "at least one number, and none of them NaN")
    # In decimals: 99.9 % of 1,000 samples are 999 of them, not 999.0000000000001.
    rank = math.ceil(Decimal(repr(percent)) * len(ordered) / 100)
    return ordered[max(rank, 1) - 1]


def meets_sla(result: ValidationResult, max_latency_ms: float, min_accuracy: float) -> bool:
    """Whether the p99 latency and the accuracy are within the limits; NaN is not."""
    return result.latency_p99_ms <= max_latency_ms and result.accuracy_score >= min_accuracy


def select_best_model(candidates: Iterable[tuple[ModelMetadata, ValidationResult]]) -> str | None:
    """The id of the model that `select_best_version` selects."""
    best = select_best_version(candidates)
    return None if best is None else best.model_id


def select_best_version(candidates: Iterable[tuple[ModelMetadata, ValidationResult]]) -> ModelMetadata | None:
    """The canary or production version with the highest accuracy; of equals the lowest p99 latency, then the highest
    version, then the first model id."""
    serving = [(metadata, result) for metadata, result in candidates if metadata.state in SERVING_STATES]
    if not serving:
        return None
    # Sorting is stable: of equally good ones the first by model id comes first.
    serving.sort(key=lambda candidate: candidate[0].model_id)
    return max(serving, key=lambda candidate: quality(*candidate))[0]


def quality(metadata: ModelMetadata, result: ValidationResult) -> tuple[bool, float, bool, float, ModelVersion]:
    """The greatest one is the best; of equal ones that of the first model id."""
    accuracy, latency = result.accuracy_score, result.latency_p99_ms
    has_accuracy, has_latency = not math.isnan(accuracy), not math.isnan(latency)
    return (
        has_accuracy,
        accuracy if has_accuracy else 0.0,
        has_latency,
        -latency if has_latency else 0.0,
        metadata.version,
    )


def rollback_priority(current: ValidationResult, baseline: ValidationResult) -> float:
    """How much worse the current version is than the baseline: 0.0 is no worse, from 1.0 on it is a clear degradation.

    It is the sum of three factors, each 1.0 for: 5 more errors, a doubled p99 latency, 5 % of the accuracy lost. A
    metric that is NaN in either result was not measured and adds nothing; what is better makes up for nothing.
    """
    errors = len(current.errors) - len(baseline.errors)
    latency = _growth(current.latency_p99_ms, baseline.latency_p99_ms, LATENCY_LEAST_MS)
    loss = _growth(-current.accuracy_score, -baseline.accuracy_score, ACCURACY_LEAST)
    factors = (
        errors / ERRORS_OF_A_CLEAR_DEGRADATION,
        latency / LATENCY_GROWTH_OF_A_CLEAR_DEGRADATION,
        loss / ACCURACY_LOSS_OF_A_CLEAR_DEGRADATION,
    )
    return sum(min(max(factor, 0.0), FACTOR_MAX) for factor in factors)


def _growth(current: float, baseline: float, least: float) -> float:
    """By which share of the baseline the current value exceeds it; 0.0 if one cannot be compared with the other."""
    if math.isnan(current) or not math.isfinite(baseline):
        return 0.0
    return (current - baseline) / max(abs(baseline), least)
