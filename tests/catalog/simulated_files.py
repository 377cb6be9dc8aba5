"""Files of checkpoints in memory, whose storages can be slow, fail, or be gone, and which record what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from forged.catalog.ports import FOLDER_MISSING, STORAGE_HANGS, CheckpointLocation, FoundCheckpoint, Progress
from forged.catalog.records import folder_of
from forged.errors import RequestRefused, Unavailable


@dataclass
class SimulatedCheckpoint:
    """The files at one path: a whole checkpoint, or what an unfinished save has left."""

    save_id: str
    job: str
    size_bytes: int = 100
    parent_path: str = ""
    is_whole: bool = True
    is_damaged: bool = False
    has_copy: bool = False
    """Whether its damage can be repaired."""


@dataclass
class SimulatedFiles:
    """A `ports.CheckpointFiles`."""

    stored: dict[str, SimulatedCheckpoint] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    """Folders whose storage fails."""
    missing: set[str] = field(default_factory=set)
    """Folders that do not exist."""
    hanging: set[str] = field(default_factory=set)
    """Storages that do not answer: a call to them is given up."""
    delay_s: float = 0.0
    calls: list[tuple[str, str]] = field(default_factory=list)
    """What was done, and where."""
    before_delete: Callable[[CheckpointLocation], None] = lambda location: None
    deleted: anyio.Event = field(default_factory=anyio.Event)

    def storage_of(self, path: str) -> str:
        return "/" + path.split("/")[1]

    async def find(self, location: CheckpointLocation) -> FoundCheckpoint | None:
        await self._reach("find", location)
        found = self._meant(location)
        return FoundCheckpoint(found.size_bytes, found.parent_path) if found is not None and found.is_whole else None

    async def delete(self, location: CheckpointLocation) -> None:
        self.before_delete(location)
        await self._reach("delete", location)
        if self._meant(location) is not None:
            del self.stored[location.path]
        self.deleted.set()

    async def verify(self, location: CheckpointLocation, bytes_per_s: int, progress: Progress) -> str:
        await self._reach("verify", location)
        found = self._meant(location)
        if found is None:
            return "its manifest is missing"
        progress(0, found.size_bytes)
        await anyio.sleep(found.size_bytes / bytes_per_s)
        progress(found.size_bytes, found.size_bytes)
        return "bad bytes" if found.is_damaged else ""

    async def repair(self, location: CheckpointLocation) -> bool:
        await self._reach("repair", location)
        found = self._meant(location)
        if found is None or not found.has_copy:
            raise RequestRefused("checkpoint_chunk_corrupt", "there is no healthy copy", "")
        found.is_damaged = False
        return True

    async def compact(self, location: CheckpointLocation, progress: Progress) -> int:
        await self._reach("compact", location)
        found = self._meant(location)
        if found is None or found.is_damaged:
            raise RequestRefused("checkpoint_missing", "a parent is damaged", "")
        progress(0, 1000)
        await anyio.sleep(1.0)
        found.size_bytes = 1000
        return found.size_bytes

    def _meant(self, location: CheckpointLocation) -> SimulatedCheckpoint | None:
        found = self.stored.get(location.path)
        if found is None or found.save_id != location.save_id or location.job not in (None, found.job):
            return None
        return found

    async def _reach(self, operation: str, location: CheckpointLocation) -> None:
        self.calls.append((operation, location.path))
        await anyio.sleep(self.delay_s)
        if self.storage_of(location.path) in self.hanging:
            raise Unavailable(STORAGE_HANGS, "it does not answer")
        if folder_of(location.path) in self.missing:
            raise Unavailable(FOLDER_MISSING, "it is missing")
        if folder_of(location.path) in self.failing:
            raise Unavailable("checkpoint_storage_failed", "it fails")
