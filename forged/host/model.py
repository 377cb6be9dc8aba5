"""The values of slots as the daemon knows them: their owners and contents."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from forged.shares import Holder


class SlotOwner(StrEnum):
    """What has become of the worker that a slot belongs to."""

    PRESENT = "present"
    FAILED = "failed"
    LEFT = "left"
    """It has left in good order, or its job is complete."""


class SlotRecord(msgspec.Struct, frozen=True, array_like=True):
    """A slot, as it is stored."""

    slot_id: str
    job: str
    worker_id: str
    incarnation: bytes
    size_bytes: int
    storage_path: str
    """The directory that the saves in it are for."""
    is_trusted: bool
    """Whether the daemon may write to any directory for the principal that has opened it."""
    holder: Holder
    """The principal that the memory is charged to."""
    opened_at: float
    owner: SlotOwner = SlotOwner.PRESENT
    ended_at: float = 0.0
    """When its owner failed or left."""
    cause: int = 0
    """The fact that says so."""
    opened_after: int = 0
    """The revision at which it was opened: later facts about the end of its job concern it."""


class SlotContents(msgspec.Struct, frozen=True):
    """What a whole slot holds, by its own word: the part of one rank of one save."""

    slot_id: str
    sequence: int
    save_id: str
    rank: int
    world_size: int
    step: int
    epoch: int
    generation: int

    @property
    def age(self) -> tuple[int, int, int]:
        """Orders the saves of a job. Within a generation steps only increase; a later one may have gone back."""
        return self.generation, self.step, self.sequence


class SavedSlots(msgspec.Struct, frozen=True):
    """A checkpoint that was saved from slots."""

    size_bytes: int
    is_new: bool
    """Whether it was not there before."""
    parent_path: str = ""
    """The path of the checkpoint whose files it uses; empty if it uses none. What the ranks have saved may use some."""


class StagedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint of which the slots of all ranks are whole."""

    save_id: str
    step: int
    epoch: int
    slot_ids: tuple[str, ...]
    """By rank."""
