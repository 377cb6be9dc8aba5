"""Elastic training: its settings, its values, and the learning rate for a number of workers."""

from forged.elastic.config import ElasticTrainingConfig, tolerated_failures
from forged.elastic.learning_rate import adapt_learning_rate
from forged.elastic.model import (
    AdaptationStrategy,
    ClusterTopology,
    GlobalTrainingState,
    LostDataPolicy,
    RedistributionType,
    RescaleType,
    RescalingEvent,
    Standstill,
    TopologyDelta,
    WorkerId,
    WorkerMetadata,
    WorkerStatus,
)

__all__ = [
    "AdaptationStrategy",
    "ClusterTopology",
    "ElasticTrainingConfig",
    "GlobalTrainingState",
    "LostDataPolicy",
    "RedistributionType",
    "RescaleType",
    "RescalingEvent",
    "Standstill",
    "TopologyDelta",
    "WorkerId",
    "WorkerMetadata",
    "WorkerStatus",
    "adapt_learning_rate",
    "tolerated_failures",
]
