"""Training data: shards and their placement, transfers between workers, sampling and the audit."""

from forged.data.audit.epoch_audit import EpochAudit, UsageLog
from forged.data.model import Dataset, DataShard, DataTransfer, SourceKind, TransferPace
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.placement.planner import DataRedistributor
from forged.data.placement.validation import RedistributionReport
from forged.data.sampling.sampler import ElasticSampler, SamplerState, SamplingMode
from forged.data.sampling.usage import Run, Use, runs_of
from forged.data.store.directory import DirectoryShardStore
from forged.data.store.errors import ShardCorrupt, StoreFailed, not_held
from forged.data.store.origin import DirectoryOrigin, FunctionOrigin, ShardOrigin
from forged.data.store.port import ArrivingShard, OpenShard, PartialShard, ShardStore, Stamp
from forged.data.training import TrainingData
from forged.data.transfer.manager import DataTransferManager
from forged.data.transfer.outcome import TransferReport

__all__ = [
    "ArrivingShard",
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
    "PartialShard",
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
