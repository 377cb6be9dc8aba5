"""Mutants of slots: deliberate bugs in how the daemon saves from slots, and frees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from forged.host import slot_saves
from forged.host.messages import SaveSlots, SlotSave
from forged.host.model import SlotContents, SlotRecord, StagedCheckpoint
from forged.host.slot_saves import SlotSaves
from forged.host.slot_table import SlotTable
from tests.simulation.catalog.oracle import Promise
from tests.simulation.catalog.slots import RivalHost


@contextmanager
def trust_half_staged_saves() -> Iterator[None]:
    """The newest slot of each rank is taken, whichever save it is of."""

    def generous(contents: Sequence[SlotContents]) -> list[StagedCheckpoint]:
        newest = {one.rank: one for one in sorted(contents, key=lambda one: one.age)}
        if not newest or len(newest) < newest[max(newest)].world_size:
            return []
        one = newest[0]
        return [
            StagedCheckpoint(one.save_id, one.step, one.epoch, tuple(newest[rank].slot_id for rank in sorted(newest)))
        ]

    with patch.object(slot_saves, "staged_checkpoints", generous):
        yield


@contextmanager
def save_the_same_slots_at_once() -> Iterator[None]:
    """Each request for a save begins another one."""
    save = SlotSaves.save

    async def eager(self: SlotSaves, request: SaveSlots, own: Sequence[SlotRecord]) -> SlotSave:
        self._saves.pop((request.job, request.save_id), None)
        return await save(self, request, own)

    with patch.object(SlotSaves, "save", eager):
        yield


@contextmanager
def acknowledge_a_save_that_runs() -> Iterator[None]:
    """A worker is told that its save is durable when it has begun."""
    save = SlotSaves.save

    async def hasty(self: SlotSaves, request: SaveSlots, own: Sequence[SlotRecord]) -> SlotSave:
        await save(self, request, own)
        return SlotSave(is_saved=True)

    with patch.object(SlotSaves, "save", hasty):
        yield


@contextmanager
def free_slots_whose_save_has_failed() -> Iterator[None]:
    """An emergency checkpoint that could not be saved is not tried again."""
    rescue = SlotSaves.rescue

    async def easy(self: SlotSaves, job: str, failed: SlotRecord) -> bool:
        await rescue(self, job, failed)
        return True

    with patch.object(SlotSaves, "rescue", easy), patch.object(SlotTable, "_kept", lambda *_: set()):
        yield


@contextmanager
def free_what_has_just_left() -> Iterator[None]:
    """The last save of workers that have left is freed at once."""
    with patch.object(SlotTable, "_kept", lambda *_: set()):
        yield


@contextmanager
def free_slots_of_present_workers() -> Iterator[None]:
    """Only the slots of the newest save are kept."""
    superseded = SlotTable.superseded

    def greedy(
        self: SlotTable, job: str, contents: Sequence[SlotContents], durable_step: int | None, now: float
    ) -> Iterator[SlotRecord]:
        with patch.object(self, "newest_of", lambda *_: []):
            yield from list(superseded(self, job, contents, durable_step, now))

    with patch.object(SlotTable, "superseded", greedy):
        yield


@contextmanager
def save_no_emergency_checkpoint() -> Iterator[None]:
    """The failure of a worker has no consequence."""

    async def lazy(self: SlotSaves, job: str, failed: SlotRecord) -> bool:
        return False

    with patch.object(SlotSaves, "rescue", lazy):
        yield


@contextmanager
def look_for_slots_in_another_directory() -> Iterator[None]:
    """A second daemon on the same store does not see the slots of the first one, and forgets them."""

    async def blind(self: RivalHost, history: str) -> Mapping[str, int]:
        return {}

    with patch.object(RivalHost, "begin", blind):
        yield


SLOT_MUTANTS: tuple[tuple[Callable[[], Any], Promise], ...] = (
    (trust_half_staged_saves, Promise.STAGED),
    (save_the_same_slots_at_once, Promise.ONE_SAVE),
    (acknowledge_a_save_that_runs, Promise.STAGED),
    (free_slots_whose_save_has_failed, Promise.STAGED),
    (free_what_has_just_left, Promise.STAGED),
    (free_slots_of_present_workers, Promise.STAGED),
    (save_no_emergency_checkpoint, Promise.ENDS),
    (look_for_slots_in_another_directory, Promise.STAGED),
)
"""With the promise that each of them breaks."""
