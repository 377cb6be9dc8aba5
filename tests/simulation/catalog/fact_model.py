"""The catalogue as its facts alone tell it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forged.catalog.book.checkpoint_table import DELETING
from forged.catalog.messages import (
    CheckpointCollected,
    CheckpointCompacted,
    CheckpointCompleted,
    CheckpointCorrupted,
    CheckpointFailed,
    CheckpointOperationFailed,
    CheckpointParentFound,
    CheckpointRepaired,
    CheckpointStarted,
)
from forged.catalog.model import CheckpointState
from forged.catalog.records import CheckpointRecord
from forged.kernel.messages import Record

ChangeOfState = CheckpointCompleted | CheckpointFailed | CheckpointCorrupted | CheckpointRepaired | CheckpointCollected


@dataclass(slots=True)
class ToldCheckpoint:
    """What facts have told of one checkpoint."""

    job: str
    epoch: int
    step: int
    path: str
    parent_id: str | None
    state: CheckpointState = CheckpointState.CREATING
    size_bytes: int = 0
    was_complete: bool = False

    @classmethod
    def of(cls, record: CheckpointRecord) -> ToldCheckpoint:
        """An adopted checkpoint, which facts only count."""
        meta = record.meta
        told = cls(meta.training_run_id, meta.epoch, meta.step, record.path, meta.parent_id, meta.state)
        told.size_bytes, told.was_complete = meta.size_bytes, True
        return told

    def agrees(self, record: CheckpointRecord) -> bool:
        """Whether the stored record says the same."""
        meta = record.meta
        return (self.job, self.epoch, self.step, self.path, self.parent_id, self.state, self.size_bytes) == (
            meta.training_run_id,
            meta.epoch,
            meta.step,
            record.path,
            meta.parent_id,
            meta.state,
            meta.size_bytes,
        )


class FactModel:
    """All checkpoints, by id; deleted ones until they are forgotten."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self.checkpoints: dict[str, ToldCheckpoint] = {}
        self._violated = violated

    def hear(self, record: Record) -> None:
        """Take in a fact."""
        fact = record.fact
        if isinstance(fact, CheckpointStarted):
            if fact.checkpoint_id in self.checkpoints:
                self._violated(f"{fact.checkpoint_id} has started twice")
            self.checkpoints[fact.checkpoint_id] = ToldCheckpoint(
                record.job, fact.epoch, fact.step, fact.storage_path, fact.parent_id
            )
        elif isinstance(fact, CheckpointCompacted):
            compacted = self.checkpoints[fact.checkpoint_id]
            compacted.parent_id, compacted.size_bytes = None, fact.size_bytes
        elif isinstance(fact, CheckpointParentFound):
            self.checkpoints[fact.checkpoint_id].parent_id = fact.parent_id
        elif isinstance(fact, CheckpointOperationFailed) and fact.operation == DELETING:
            kept = self.checkpoints[fact.checkpoint_id]
            if kept.state is not CheckpointState.DELETED:
                self._violated(f"{fact} follows the state {kept.state}")
            kept.state, kept.was_complete = CheckpointState.COMPLETE, True
        elif isinstance(fact, ChangeOfState):
            told = self.checkpoints.get(fact.checkpoint_id)
            if told is None:
                self._violated(f"{fact} is about a checkpoint that is not known")
            elif not self._change(told, fact):
                self._violated(f"{fact} follows the state {told.state}")

    def _change(self, told: ToldCheckpoint, fact: ChangeOfState) -> bool:
        """Change the state; returns whether the present state allows it."""
        before, was_complete = told.state, told.was_complete
        is_failed = before is CheckpointState.CORRUPTED and not was_complete
        match fact:
            case CheckpointCompleted():
                told.state, told.was_complete = CheckpointState.COMPLETE, True
                told.size_bytes, told.parent_id = fact.size_bytes, fact.parent_id
                return before is CheckpointState.CREATING or is_failed
            case CheckpointFailed():
                told.state = CheckpointState.CORRUPTED
                return before is CheckpointState.CREATING
            case CheckpointCorrupted():
                told.state = CheckpointState.CORRUPTED
                return before is CheckpointState.COMPLETE
            case CheckpointRepaired():
                told.state = CheckpointState.COMPLETE
                return before is CheckpointState.CORRUPTED and was_complete
            case _:
                told.state = CheckpointState.DELETED
                return before is not CheckpointState.DELETED
