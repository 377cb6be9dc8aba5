"""Checkpoints: fast, atomic, verified, and readable by other tools.

import forged.checkpoint

forged.checkpoint.save("checkpoints/step-100", {"model": weights, "step": 100})
state = forged.checkpoint.load("checkpoints/step-100")
"""

from forged.checkpoint.blocking import BlockingCheckpoint, Checkpoints, load, save
from forged.checkpoint.checkpoint import (
    CheckpointLoadResult,
    CheckpointOptions,
    DistributedCheckpoint,
    create_checkpoint,
)
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.export.conversion import ConversionOptions, Converted, convert
from forged.checkpoint.format.manifest import Manifest as CheckpointMetadata
from forged.checkpoint.loading.lazy_view import CheckpointView, view
from forged.checkpoint.model import (
    CheckpointFormat,
    CheckpointInfo,
    CompressionLevel,
    LoadOptions,
    PerRank,
    RepairedChunk,
    ReshardingStrategy,
    SaveOptions,
    ShardedArray,
    Stateful,
    StorageOptions,
    WhenBusy,
)
from forged.checkpoint.ports import Coordinator as DistributedCoordinator
from forged.checkpoint.ports import Storage as CheckpointStorage
from forged.checkpoint.run.restorable import latest_restorable as latest
from forged.checkpoint.run_checkpoints import AsyncCheckpoints
from forged.checkpoint.saving.background import SaveHandle
from forged.checkpoint.saving.compaction import compact
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.locations import create_storage
from forged.checkpoint.verification.validator import (
    CheckpointValidator,
    CompatibilityChecker,
    Finding,
    IntegrityChecker,
    ValidationResult,
    verify,
)
from forged.leaf_types import LeafType
from forged.retry import RetryPolicy

__all__ = [
    "AsyncCheckpoints",
    "BlockingCheckpoint",
    "CheckpointException",
    "CheckpointFormat",
    "CheckpointInfo",
    "CheckpointLoadResult",
    "CheckpointMetadata",
    "CheckpointOptions",
    "CheckpointStorage",
    "CheckpointValidator",
    "CheckpointView",
    "Checkpoints",
    "CompatibilityChecker",
    "CompressionLevel",
    "ConversionOptions",
    "Converted",
    "DistributedCheckpoint",
    "DistributedCoordinator",
    "ExceptionType",
    "FaultToleranceHandler",
    "Finding",
    "IntegrityChecker",
    "LeafType",
    "LoadOptions",
    "PerRank",
    "RepairedChunk",
    "ReshardingStrategy",
    "RetryPolicy",
    "SaveHandle",
    "SaveOptions",
    "ShardedArray",
    "Stateful",
    "StorageOptions",
    "ValidationResult",
    "WhenBusy",
    "compact",
    "convert",
    "create_checkpoint",
    "create_storage",
    "latest",
    "load",
    "save",
    "verify",
    "view",
]
