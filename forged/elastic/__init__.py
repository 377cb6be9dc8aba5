"""Elastic training: who trains together, what a job's settings say of it, and the learning rate that follows."""

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
    "TopologyDelta",
    "WorkerId",
    "WorkerMetadata",
    "WorkerStatus",
    "adapt_learning_rate",
    "tolerated_failures",
]
