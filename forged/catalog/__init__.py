"""The checkpoint catalogue: which checkpoints a run has, what they build on, which to restore and which to keep."""

from forged.catalog.cadence import (
    CadenceChoice,
    CadencePolicy,
    Measured,
    SinceLastSave,
    choose_cadence,
    mean_time_between_failures_s,
    should_checkpoint,
    young_daly_interval_s,
)
from forged.catalog.catalog import CheckpointCatalog
from forged.catalog.chains import (
    chain_length,
    chain_size,
    estimate_restore_time,
    find_chain_root,
    restoration_chain,
    validate_checkpoint,
)
from forged.catalog.errors import (
    CatalogRefused,
    ChainBroken,
    ChainCyclic,
    CheckpointInUse,
    CheckpointInvalid,
    CheckpointUnknown,
    ParentMissing,
    TransitionRefused,
)
from forged.catalog.model import (
    CheckpointMeta,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
)
from forged.catalog.retention import RetentionRule, Verdict, is_gc_eligible
from forged.catalog.selection import selection_score

__all__ = [
    "CadenceChoice",
    "CadencePolicy",
    "CatalogRefused",
    "ChainBroken",
    "ChainCyclic",
    "CheckpointCatalog",
    "CheckpointInUse",
    "CheckpointInvalid",
    "CheckpointMeta",
    "CheckpointState",
    "CheckpointType",
    "CheckpointUnknown",
    "CreateCheckpointRequest",
    "GcPolicy",
    "Measured",
    "ParentMissing",
    "RestoreCriteria",
    "RetentionRule",
    "SinceLastSave",
    "TransitionRefused",
    "Verdict",
    "chain_length",
    "chain_size",
    "choose_cadence",
    "estimate_restore_time",
    "find_chain_root",
    "is_gc_eligible",
    "mean_time_between_failures_s",
    "restoration_chain",
    "selection_score",
    "should_checkpoint",
    "validate_checkpoint",
    "young_daly_interval_s",
]
