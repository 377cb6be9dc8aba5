"""Training data: who holds which shard, what must travel when the workers change, and which samples a step takes."""

from forged.data.audit import EpochAudit, UsageLog
from forged.data.directory import DirectoryShardStore
from forged.data.model import DataShard, DataTransfer, SourceKind, TransferPace
from forged.data.origin import DirectoryOrigin, FunctionOrigin, ShardOrigin
from forged.data.outcome import TransferReport
from forged.data.plan import DataRedistributionPlan
from forged.data.planner import DataRedistributor
from forged.data.sampler import ElasticSampler, SamplerState, SamplingMode
from forged.data.shards import Dataset
from forged.data.store import (
    ArrivingShard,
    Begun,
    OpenShard,
    ShardCorrupt,
    ShardStore,
    Stamp,
    StoreFailed,
    not_held,
)
from forged.data.training import TrainingData
from forged.data.transfers import DataTransferManager
from forged.data.usage import Run, Use, runs_of
from forged.data.validation import RedistributionReport

__all__ = [
    "ArrivingShard",
    "Begun",
    "DataRedistributionPlan",
    "DataRedistributor",
    "DataShard",
    "DataTransfer",
    "DataTransferManager",
    "Dataset",
    "DirectoryOrigin",
    "DirectoryShardStore",
    "ElasticSampler",
    "EpochAudit",
    "FunctionOrigin",
    "OpenShard",
    "RedistributionReport",
    "Run",
    "SamplerState",
    "SamplingMode",
    "ShardCorrupt",
    "ShardOrigin",
    "ShardStore",
    "SourceKind",
    "Stamp",
    "StoreFailed",
    "TrainingData",
    "TransferPace",
    "TransferReport",
    "UsageLog",
    "Use",
    "not_held",
    "runs_of",
]
