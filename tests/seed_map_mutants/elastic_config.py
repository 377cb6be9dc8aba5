"""Mutants of the rows of elastic_config_models.md."""

from __future__ import annotations

from collections.abc import Mapping

from tests.seed_map_mutants.mutation import Constant, Edit, Mutation

CONFIG = "forged/elastic/config.py"
LEARNING_RATE = "forged/elastic/learning_rate.py"
MODEL = "forged/elastic/model.py"
SHARD = "forged/data/model.py"

MUTANTS: Mapping[str, Mutation | str] = {
    "enum AdaptationStrategy": Edit(
        MODEL, '    LINEAR = "linear"\n', '    NOTHING = "nothing"\n    LINEAR = "linear"\n'
    ),
    "AdaptationStrategy.Linear": Edit(
        LEARNING_RATE, "LINEAR: lambda growth: growth,", "LINEAR: lambda growth: growth * growth,"
    ),
    "AdaptationStrategy.SquareRoot": Edit(
        LEARNING_RATE, "SQUARE_ROOT: math.sqrt", "SQUARE_ROOT: lambda growth: growth"
    ),
    "AdaptationStrategy.None": Edit(LEARNING_RATE, "NONE: lambda growth: 1.0", "NONE: lambda growth: growth"),
    "enum RedistributionType": Edit(
        MODEL,
        "class RedistributionType(StrEnum):\n",
        'class RedistributionType(StrEnum):\n    NOTHING = "nothing"\n',
    ),
    "RedistributionType.FullReshuffle": Edit(MODEL, '"full_reshuffle"', '"full"'),
    "RedistributionType.Incremental": Edit(MODEL, '"incremental"', '"increment"'),
    "enum RescaleType": Edit(
        MODEL, "class RescaleType(StrEnum):\n", 'class RescaleType(StrEnum):\n    NOTHING = "nothing"\n'
    ),
    "RescaleType.ScaleUp": Edit(MODEL, "if new.world_size > old.world_size", "if new.world_size < old.world_size"),
    "RescaleType.ScaleDown": Edit(MODEL, "else RescaleType.SCALE_DOWN", "else RescaleType.REPLACE"),
    "RescaleType.Replace": Edit(MODEL, "return RescaleType.REPLACE", "return RescaleType.SCALE_UP"),
    "enum WorkerStatus": Edit(
        MODEL, "class WorkerStatus(StrEnum):\n", 'class WorkerStatus(StrEnum):\n    NOTHING = "nothing"\n'
    ),
    "WorkerStatus.Joining": Edit(MODEL, '"joining"', '"registering"'),
    "WorkerStatus.Active": Edit(MODEL, '"active"', '"training"'),
    "WorkerStatus.Rescaling": Edit(MODEL, '"rescaling"', '"rescale"'),
    "WorkerStatus.Leaving": Edit(MODEL, '"leaving"', '"draining"'),
    "WorkerStatus.Failed": Edit(MODEL, '"failed"', '"dead"'),
    "record WorkerId": Edit(
        MODEL,
        "WorkerId(msgspec.Struct, frozen=True, order=True, cache_hash=True)",
        "WorkerId(msgspec.Struct, eq=False)",
    ),
    "WorkerId.Id = string.Empty": Constant(MODEL, "WorkerId.id", '""'),
    "WorkerId.Hostname = string.Empty": Constant(MODEL, "WorkerId.hostname", '""'),
    "WorkerId.Port": Constant(MODEL, "WorkerId.port", "0"),
    "WorkerId.WorkerId(id, hostname, port)": Edit(
        MODEL, "    id: str\n    hostname: str\n", "    hostname: str\n    id: str\n"
    ),
    "WorkerId.ToString()": Edit(MODEL, "{self.id}@{self.hostname}:{self.port}", "{self.id}@{self.hostname}"),
    "class WorkerMetadata": Edit(
        MODEL, "class WorkerMetadata(msgspec.Struct, frozen=True)", "class WorkerMetadata(msgspec.Struct)"
    ),
    "WorkerMetadata.WorkerId = null!": Constant(MODEL, "WorkerMetadata.worker_id", "None"),
    "WorkerMetadata.Status": Constant(MODEL, "WorkerMetadata.status", "WorkerStatus.ACTIVE"),
    "WorkerMetadata.JoinTime": Constant(MODEL, "WorkerMetadata.join_time", "0.0"),
    "WorkerMetadata.LastHeartbeat": Constant(MODEL, "WorkerMetadata.last_heartbeat", "0.0"),
    "WorkerMetadata.Rank": Edit(MODEL, "rank: int = RANK_NONE", "rank: int = 0"),
    "WorkerMetadata.LocalWorldSize": Edit(MODEL, "local_world_size: int = 1", "local_world_size: int = 0"),
    "WorkerMetadata.CustomAttributes = new()": Constant(MODEL, "WorkerMetadata.custom_attributes", "globals()"),
    "WorkerMetadata.IsHealthy(timeout)": Edit(
        MODEL, "now - self.last_heartbeat < timeout_s", "now - self.last_heartbeat <= timeout_s"
    ),
    "class ClusterTopology": Edit(
        MODEL,
        "class ClusterTopology(msgspec.Struct, frozen=True,",
        "class ClusterTopology(msgspec.Struct, frozen=False,",
    ),
    "ClusterTopology.WorldSize": Edit(
        MODEL,
        "    def world_size(self) -> int:\n        return len(self.workers)",
        "    def world_size(self) -> int:\n        return len(self.workers) + 1",
    ),
    "ClusterTopology.Workers = new()": Edit(MODEL, "in enumerate(self.workers)}", "in enumerate(self.workers, 1)}"),
    "ClusterTopology.LastUpdated": Constant(MODEL, "ClusterTopology.last_updated", "0.0"),
    "ClusterTopology.Epoch": Constant(MODEL, "ClusterTopology.epoch", "0"),
    "ClusterTopology.ClusterTopology()": Edit(
        MODEL, "    last_updated: float = 0.0\n", "    last_updated: float = 1.0\n"
    ),
    "ClusterTopology.AddWorker(worker)": Edit(MODEL, "((*self.workers, worker)", "((worker, *self.workers)"),
    "ClusterTopology.RemoveWorker(worker)": Edit(
        MODEL,
        "self.workers[:rank] + self.workers[rank + 1 :]",
        "self.workers[rank + 1 :] + self.workers[:rank]",
    ),
    "class GlobalTrainingState": Edit(
        MODEL, "class GlobalTrainingState(msgspec.Struct, frozen=True)", "class GlobalTrainingState(msgspec.Struct)"
    ),
    "GlobalTrainingState.CurrentEpoch": Constant(MODEL, "GlobalTrainingState.current_epoch", "0"),
    "GlobalTrainingState.CurrentStep": Constant(MODEL, "GlobalTrainingState.current_step", "0"),
    "GlobalTrainingState.LearningRate": Constant(MODEL, "GlobalTrainingState.learning_rate", "0.0"),
    "GlobalTrainingState.GlobalBatchSize": Constant(MODEL, "GlobalTrainingState.global_batch_size", "0"),
    "GlobalTrainingState.ActiveWorkerCount": Constant(MODEL, "GlobalTrainingState.active_worker_count", "0"),
    "GlobalTrainingState.StateTimestamp": Constant(MODEL, "GlobalTrainingState.state_timestamp", "0.0"),
    "GlobalTrainingState.OptimizerState": Constant(MODEL, "GlobalTrainingState.optimizer_state", "None"),
    "GlobalTrainingState.GlobalTrainingState()": Edit(
        MODEL, "global_batch_size: int = 0", "global_batch_size: int = 1"
    ),
    "class RescalingEvent": Edit(
        MODEL, "class RescalingEvent(msgspec.Struct, frozen=True)", "class RescalingEvent(msgspec.Struct)"
    ),
    "RescalingEvent.Type": Constant(MODEL, "RescalingEvent.type", "RescaleType.SCALE_UP"),
    "RescalingEvent.OldTopology = null!": Edit(
        MODEL, "return cls(_rescale_type(old, new), old, new,", "return cls(_rescale_type(old, new), new, new,"
    ),
    "RescalingEvent.NewTopology = null!": Edit(
        MODEL, "return cls(_rescale_type(old, new), old, new,", "return cls(_rescale_type(old, new), old, old,"
    ),
    "RescalingEvent.AddedWorkers = new()": Edit(
        MODEL,
        "for worker in new.workers if worker not in old or worker in anew)",
        "for worker in new.workers if worker in anew)",
    ),
    "RescalingEvent.RemovedWorkers = new()": Edit(
        MODEL,
        "for worker in old.workers if worker not in new or worker in anew)",
        "for worker in old.workers if worker in anew)",
    ),
    "RescalingEvent.EventTime": Constant(MODEL, "RescalingEvent.event_time", "0.0"),
    "RescalingEvent.TriggerReason = string.Empty": Constant(MODEL, "RescalingEvent.trigger_reason", '""'),
    "RescalingEvent.RescalingEvent()": Edit(MODEL, 'trigger_reason: str = ""', 'trigger_reason: str = "rescaled"'),
    "record DataShard": Edit(SHARD, "start + size + (shard_id < larger)", "start + size + (shard_id <= larger)"),
    "DataShard.ShardId": Constant(SHARD, "DataShard.shard_id", "0"),
    "DataShard.StartIndex": Constant(SHARD, "DataShard.start_index", "0"),
    "DataShard.EndIndex": Constant(SHARD, "DataShard.end_index", "self.start_index"),
    "DataShard.Size": Edit(SHARD, "return self.end_index - self.start_index", "return self.end_index"),
    "DataShard.DataShard(shardId, startIndex, endIndex)": Edit(
        SHARD,
        "    shard_id: Natural\n    start_index: Natural\n",
        "    start_index: Natural\n    shard_id: Natural\n",
    ),
    "class ElasticTrainingConfig": Edit(
        CONFIG, "failure_tolerance_percentage: int = 20", "failure_tolerance_percentage: int = 21"
    ),
    "ElasticTrainingConfig.MinWorkers = 1": Edit(CONFIG, "min_workers: int = 1\n", "min_workers: int = 2\n"),
    "ElasticTrainingConfig.MaxWorkers = int.MaxValue": Edit(
        CONFIG, "max_workers: int = WORLD_SIZE_MAX", "max_workers: int = 1000"
    ),
    "ElasticTrainingConfig.RescaleTimeoutMs = 30000": Edit(
        CONFIG, "rescale_timeout_ms: int = 30_000", "rescale_timeout_ms: int = 3_000"
    ),
    "ElasticTrainingConfig.MaxConsecutiveFailures = 3": Edit(
        CONFIG, "max_consecutive_failures: int = 3", "max_consecutive_failures: int = 4"
    ),
    "ElasticTrainingConfig.LRAdaptationStrategy = AdaptationStrategy.Linear": Edit(
        CONFIG, "= AdaptationStrategy.LINEAR", "= AdaptationStrategy.NONE"
    ),
    "ElasticTrainingConfig.RedistributionType = RedistributionType.FullReshuffle": Edit(
        CONFIG, "= RedistributionType.FULL_RESHUFFLE", "= RedistributionType.INCREMENTAL"
    ),
    "ElasticTrainingConfig.UseSynchronousRescaling = true": Edit(
        CONFIG, "use_synchronous_rescaling: bool = True", "use_synchronous_rescaling: bool = False"
    ),
    "ElasticTrainingConfig.StabilityWindowMs = 30000": Edit(
        CONFIG, "stability_window_ms: int = 30_000", "stability_window_ms: int = 3_000"
    ),
    "ElasticTrainingConfig.WorkerHeartbeatTimeoutMs = 10000": Edit(
        CONFIG, "worker_heartbeat_timeout_ms: int = 10_000", "worker_heartbeat_timeout_ms: int = 1_000"
    ),
    "ElasticTrainingConfig.FailureTolerancePercentage = 20": Edit(
        CONFIG, "failure_tolerance_percentage: int = 20", "failure_tolerance_percentage: int = 10"
    ),
    "ElasticTrainingConfig.UseParallelDataTransfer = true": Edit(
        CONFIG, "use_parallel_data_transfer: bool = True", "use_parallel_data_transfer: bool = False"
    ),
    "ElasticTrainingConfig.Validate()": Edit(
        CONFIG, "problems = tuple(find_problems(values))", "problems = tuple(find_problems(values))[:1]"
    ),
    "MinWorkers must be at least 1": Edit(
        CONFIG, '"min_workers": _whole(1, WORLD_SIZE_MAX)', '"min_workers": _whole(0, WORLD_SIZE_MAX)'
    ),
    "MaxWorkers must be >= MinWorkers": Edit(CONFIG, "and most < least", "and most <= least"),
    "RescaleTimeoutMs cannot be negative": Edit(
        CONFIG, '"rescale_timeout_ms": _whole(0)', '"rescale_timeout_ms": _whole(-1)'
    ),
    "MaxConsecutiveFailures cannot be negative": Edit(
        CONFIG, '"max_consecutive_failures": _whole(0)', '"max_consecutive_failures": _whole(-1)'
    ),
    "StabilityWindowMs cannot be negative": Edit(
        CONFIG, '"stability_window_ms": _whole(0)', '"stability_window_ms": _whole(-1)'
    ),
    "WorkerHeartbeatTimeoutMs must be positive": Edit(
        CONFIG, '"worker_heartbeat_timeout_ms": _whole(1)', '"worker_heartbeat_timeout_ms": _whole(0)'
    ),
    "FailureTolerancePercentage must be between 0 and 100": Edit(
        CONFIG, '"failure_tolerance_percentage": _whole(0, 100)', '"failure_tolerance_percentage": _whole(0, 101)'
    ),
    "All classes should be placed in the appropriate namespaces under `src/MachineLearning/Distributed/`": Edit(
        SHARD,
        "class DataShard(msgspec.Struct, frozen=True, order=True):\n",
        "class DataShard(msgspec.Struct, frozen=True, order=True):\n    __module__ = WorkerId.__module__\n",
    ),
    "Use record types for immutable data structures (WorkerId, DataShard)": Edit(
        SHARD, "class DataShard(msgspec.Struct, frozen=True,", "class DataShard(msgspec.Struct, frozen=False,"
    ),
    "Include XML documentation comments for all public members": Edit(
        MODEL, '    """As few shards as possible move."""\n', ""
    ),
    "Implement validation logic in ElasticTrainingConfig.Validate()": Edit(
        CONFIG, "if not rule.accepts(value):", "if rule.accepts(value):"
    ),
    "Ensure thread-safety for ClusterTopology if concurrent access is expected": Edit(
        MODEL,
        "        if rank == RANK_NONE:\n            return self\n",
        "        if rank == RANK_NONE:\n            return self\n"
        '        msgspec.structs.force_setattr(self, "workers", self.workers[1:])\n',
    ),
    "All enums defined with appropriate values": Edit(MODEL, '"square_root"', '"sqrt"'),
    "All data models compile without errors": Edit(
        MODEL, "added_workers: tuple[WorkerId, ...]", "added_workers: tuple[Worker, ...]"
    ),
    "Configuration validation logic works correctly": Edit(CONFIG, "low <= value <= high", "low <= value < high"),
    "XML documentation is complete for all public members": Edit(
        CONFIG, '    """With fewer workers the job waits."""\n', ""
    ),
}
