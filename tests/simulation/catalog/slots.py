"""The memory of a simulated host, with its slots, and the daemon's port to it.

Invariants:
- The memory outlives workers and daemons. What a killed process was copying stays half done.
- A slot holds a part, or nothing while its writer copies. Slots that the host reads are not overwritten.
- A save from slots writes all parts, looks whether the slots have changed, and publishes the manifest last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import anyio

from forged.errors import RequestRefused, Unavailable
from forged.host.agent import NoHost
from forged.host.model import SavedSlots, SlotContents, StagedCheckpoint
from tests.simulation.catalog.storage import MANIFEST, SaveName, SimulatedStorage, StoredFile

PART_S = 0.3
"""Writing a part takes at most so long besides the operations of the storage."""
SIZE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StagedPart:
    """The part of one rank of one save."""

    job: str
    save: SaveName
    rank: int
    world_size: int
    step: int
    generation: int
    sequence: int
    writer: tuple[str, str, bytes]
    """Job, worker and incarnation of the rank."""

    @property
    def age(self) -> tuple[int, int, int]:
        """Orders the saves of a job."""
        return self.generation, self.step, self.sequence


@dataclass(eq=False, slots=True)
class Slot:
    """One slot, as its writer has it mapped."""

    slot_id: str
    part: StagedPart | None = None
    """None while nothing whole is in it."""
    is_written: bool = False
    readers: int = 0

    def begin(self) -> bool:
        """From now on the slot holds nothing; false if the host reads it."""
        if self.readers or self.is_written:
            return False
        self.part, self.is_written = None, True
        return True

    def end(self, part: StagedPart | None) -> None:
        """The copy is whole, or its writer has died."""
        self.part, self.is_written = part, False


@dataclass(slots=True)
class HostMemory:
    """The slots of a host, by id."""

    slots: dict[str, Slot] = field(default_factory=dict)

    def whole_saves(self, job: str) -> list[list[StagedPart]]:
        """The saves of a job of which the parts of all ranks are there, the newest first."""
        parts: dict[SaveName, dict[int, StagedPart]] = {}
        for slot in self.slots.values():
            if slot.part is not None and slot.part.job == job:
                parts.setdefault(slot.part.save, {})[slot.part.rank] = slot.part
        whole = [list(ranks.values()) for ranks in parts.values() if len(ranks) == ranks[min(ranks)].world_size]
        return sorted(whole, key=lambda save: max(part.age for part in save), reverse=True)

    def lose(self) -> None:
        """The host has lost its power."""
        self.slots.clear()


@dataclass(slots=True)
class HostWatch:
    """What the oracle is told of a host."""

    freed: Callable[[Sequence[str]], None]
    """Slots are about to be deleted."""
    published: Callable[[SaveName, Sequence[StagedPart]], None]
    """A checkpoint was saved from slots with these contents."""
    failed: Callable[[SaveName], None]
    began: Callable[[SaveName], None]
    ended: Callable[[SaveName], None]


class SimulatedHost:
    """The agent of one daemon; a `forged.host.agent.HostAgent`."""

    def __init__(self, memory: HostMemory, storage: SimulatedStorage, random: Random, watch: HostWatch) -> None:
        self.is_dead = False
        """Whether its daemon was killed."""
        self.saving = 0
        """How many saves from slots have begun and not ended."""
        self.memory = memory
        self.storage = storage
        self.random = random
        self.watch = watch

    async def begin(self, history: str) -> Mapping[str, int]:
        # A daemon that fails to start tries again.
        self.is_dead = False
        await self._work()
        return dict.fromkeys(self.memory.slots, SIZE_BYTES)

    def end(self) -> None:
        """The slots stay."""

    async def make(self, slot_ids: Sequence[str], size_bytes: int) -> list[str]:
        await self._work()
        self.memory.slots.update((slot_id, Slot(slot_id)) for slot_id in slot_ids)
        return list(slot_ids)

    async def delete(self, slot_ids: Sequence[str]) -> None:
        await self._work()
        if not self.is_dead:
            self.watch.freed(slot_ids)
            for slot_id in slot_ids:
                self.memory.slots.pop(slot_id, None)

    async def paths(self, slot_ids: Sequence[str]) -> list[str]:
        return list(slot_ids)

    async def descriptors(self, slot_ids: Sequence[str]) -> list[int]:
        return []

    async def read(self, slot_ids: Sequence[str]) -> list[SlotContents]:
        """One slot after the other: their writers go on meanwhile."""
        found = []
        for number, slot_id in enumerate(slot_ids):
            if number % 2 == 0:
                await self._work()
            slot = self.memory.slots.get(slot_id)
            if slot is not None and slot.part is not None:
                found.append(_contents(slot_id, slot.part))
        return found

    async def hold(self, staged: StagedCheckpoint, *, is_trusted: bool) -> SimulatedHeldSlots | None:
        await self._work()
        slots = [slot for slot_id in staged.slot_ids if (slot := self.memory.slots.get(slot_id)) is not None]
        parts = [slot.part for slot in slots if slot.part is not None and not slot.is_written]
        is_same = [part.save.save_id == staged.save_id and part.rank == rank for rank, part in enumerate(parts)]
        if len(parts) < len(staged.slot_ids) or not all(is_same):
            return None
        return SimulatedHeldSlots(self, slots, parts)

    async def _work(self) -> None:
        await anyio.sleep(self.random.uniform(0.001, 0.02))


class RivalHost(NoHost):
    """The agent of a second daemon with the same history: the first one has the slots."""

    async def begin(self, history: str) -> Mapping[str, int]:
        raise RequestRefused("slots_in_use", "another daemon uses the slots", "")


class SimulatedHeldSlots:
    """Slots that the host reads."""

    def __init__(self, host: SimulatedHost, slots: Sequence[Slot], parts: Sequence[StagedPart]) -> None:
        self._host = host
        self._slots = list(slots)
        self._parts = list(parts)
        self._is_held = True
        for slot in slots:
            slot.readers += 1

    @property
    def _save(self) -> SaveName:
        return self._parts[0].save

    @property
    def prefix(self) -> str:
        return self._save.path.rpartition("/")[2]

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            for slot in self._slots:
                slot.readers -= 1

    async def save(self, storage_path: str, *, is_damaged: bool) -> SavedSlots:
        self._host.saving += 1
        self._host.watch.began(self._save)
        try:
            return await self._save_all(is_damaged=is_damaged)
        except (Unavailable, RequestRefused):
            self._host.watch.failed(self._save)
            raise
        finally:
            self._host.watch.ended(self._save)
            self._host.saving -= 1

    async def _save_all(self, *, is_damaged: bool) -> SavedSlots:
        storage, save = self._host.storage, self._save
        await storage.reach(save.path)
        known = storage.manifest(save)
        if known is not None and is_damaged:
            storage.files.pop(save.path + MANIFEST)
        elif known is not None:
            return SavedSlots(known.size_bytes, is_new=False)
        if not storage.is_free(save.path):
            raise RequestRefused("checkpoint_exists", f"{save.path} is taken", "")
        files = [f"{save.path}/{save.save_id}.host-{part.rank}" for part in self._parts]
        await self._delete(files)
        try:
            for file, slot in zip(files, self._slots, strict=True):
                await anyio.sleep(self._host.random.uniform(0.0, PART_S))
                await storage.reach(save.path)
                if slot.part is None:
                    raise RequestRefused("slots_unreadable", f"slot {slot.slot_id} has changed", "")
                storage.files[file] = StoredFile(slot.part.job, save, part=slot.part)
            await storage.reach(save.path)
            self._publish(files)
            await storage.reach(save.path)
            if any(file not in storage.files for file in files):
                # They were deleted as those of a failed save.
                storage.files.pop(save.path + MANIFEST, None)
                raise Unavailable("checkpoint_file_missing", f"files of {save.path} are gone", "")
        except (Unavailable, RequestRefused):
            await self._delete(files)
            raise
        return SavedSlots(SIZE_BYTES, is_new=True)

    def _publish(self, files: Sequence[str]) -> None:
        storage, save = self._host.storage, self._save
        if not storage.is_free(save.path):
            raise RequestRefused("checkpoint_exists", f"{save.path} is taken", "")
        written = [file.part for name in files if (file := storage.files.get(name)) is not None]
        self._host.watch.published(save, [part for part in written if part is not None])
        storage.files[save.path + MANIFEST] = StoredFile(self._parts[0].job, save, SIZE_BYTES, tuple(files))

    async def _delete(self, files: Iterable[str]) -> None:
        for file in files:
            await self._host.storage.reach(self._save.path)
            self._host.storage.files.pop(file, None)


def _contents(slot_id: str, part: StagedPart) -> SlotContents:
    return SlotContents(
        slot_id, part.sequence, part.save.save_id, part.rank, part.world_size, part.step, 0, part.generation
    )
