"""A simulated storage with the files of checkpoints, and the daemon's port to it.

Invariants:
- The storage outlives daemons and workers. Each file is written, renamed and deleted at once; what a killed process has
  not done yet is not done.
- A save writes its manifest last. A deletion renames the manifest to a tombstone, then deletes the files, then the
  tombstone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING
from zlib import crc32

import anyio

from forged.catalog.ports import FOLDER_MISSING, CheckpointLocation, FoundCheckpoint, Progress
from forged.catalog.records import folder_of
from forged.errors import RequestRefused, Unavailable

if TYPE_CHECKING:
    from tests.simulation.catalog.slots import StagedPart

MANIFEST = ".manifest"
TOMBSTONE = ".deleted"
UNREACHABLE_FOR_S = 1.0
"""How long a call waits for a storage that is gone."""


@dataclass(frozen=True, slots=True)
class SaveName:
    """What identifies a save in the storage."""

    path: str
    save_id: str


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a save; a manifest, and the tombstone that it becomes, names the other ones."""

    job: str
    save: SaveName
    size_bytes: int = 0
    parts: tuple[str, ...] = ()
    parent: SaveName | None = None
    part: StagedPart | None = None
    """The contents of a part that was saved from a slot."""
    compacted_from: SaveName | None = None
    """Of a manifest: what it built on before it was made full."""


class SimulatedStorage:
    """The files of all checkpoints, by name."""

    def __init__(self, random: Random) -> None:
        self.files: dict[str, StoredFile] = {}
        self.damaged: set[str] = set()
        """The names of files with wrong bytes."""
        self.harmed: set[SaveName] = set()
        """The saves of which a fault has damaged or deleted a file."""
        self.gone: set[str] = set()
        """The folders that cannot be reached now."""
        self.slow_s = 0.0
        self._random = random

    async def reach(self, path: str) -> None:
        """Take the time of one operation; raises `Unavailable` if the folder is gone."""
        await anyio.sleep(self._random.uniform(0.001, 0.05 + self.slow_s))
        if folder_of(path) in self.gone:
            await anyio.sleep(UNREACHABLE_FOR_S)
            raise Unavailable("checkpoint_storage_failed", f"{folder_of(path)} does not answer", "")

    def is_free(self, path: str) -> bool:
        """Whether no checkpoint, nor the tombstone of one, has this path."""
        return path + MANIFEST not in self.files and path + TOMBSTONE not in self.files

    def manifest(self, save: SaveName) -> StoredFile | None:
        found = self.files.get(save.path + MANIFEST)
        return found if found is not None and found.save == save else None

    def is_whole(self, save: SaveName) -> bool:
        """Whether all files of a save are there."""
        manifest = self.manifest(save)
        return manifest is not None and all(name in self.files for name in manifest.parts)

    def is_needed(self, save: SaveName) -> bool:
        """Whether a checkpoint that is there builds on the save: its files must not be deleted."""
        return any(name.endswith(MANIFEST) and file.parent == save for name, file in self.files.items())

    def of_save(self, save: SaveName) -> list[str]:
        """The names of all files of a save."""
        return [name for name, file in self.files.items() if file.save == save]

    def harm(self, name: str, *, is_deleted: bool) -> None:
        """Damage or delete a file, as a fault or a user does."""
        self.harmed.add(self.files[name].save)
        if is_deleted:
            del self.files[name]
        else:
            self.damaged.add(name)


Watch = Callable[[StoredFile], None]


class SimulatedFiles:
    """The daemon's port to the storage; a `ports.CheckpointFiles`."""

    def __init__(self, storage: SimulatedStorage, watch: Watch) -> None:
        """`watch` is called before the daemon deletes a file."""
        self.deleting = 0
        """How many deletions have begun and not ended."""
        self._storage = storage
        self._watch = watch

    def storage_of(self, path: str) -> str:
        return folder_of(path)

    async def find(self, location: CheckpointLocation) -> FoundCheckpoint | None:
        await self._storage.reach(location.path)
        manifest = self._meant(location, MANIFEST)
        if manifest is None or location.path + TOMBSTONE in self._storage.files:
            return None
        for name in manifest.parts:
            await self._storage.reach(location.path)
            if name not in self._storage.files:
                return None
        return FoundCheckpoint(manifest.size_bytes, "" if manifest.parent is None else manifest.parent.path)

    async def delete(self, location: CheckpointLocation) -> None:
        await self._storage.reach(location.path)
        self.deleting += 1
        try:
            await self._delete_all(location)
        finally:
            self.deleting -= 1

    async def repair(self, location: CheckpointLocation) -> bool:
        """There are healthy copies of some of the damaged files."""
        await self._storage.reach(location.path)
        manifest = self._meant(location, MANIFEST)
        damaged = [one for one in (manifest.parts if manifest else ()) if one in self._storage.damaged]
        repaired = [one for one in damaged if crc32(one.encode()) % 2]
        self._storage.damaged.difference_update(repaired)
        return bool(repaired)

    async def compact(self, location: CheckpointLocation, progress: Progress) -> int:
        """Copy the parts of the parents, then replace the manifest."""
        await self._storage.reach(location.path)
        manifest = self._meant(location, MANIFEST)
        if manifest is None:
            raise RequestRefused("checkpoint_missing", f"{location.path} is not there", "")
        if manifest.parent is None:
            return manifest.size_bytes
        progress(0, manifest.size_bytes)
        copied = [await self._copy(manifest, name) for name in await self._parts_of_parents(manifest)]
        await self._storage.reach(location.path)
        if self._meant(location, MANIFEST) is not manifest:
            self._undo(copied)
            raise Unavailable("checkpoint_replaced", f"{location.path} was changed during its compaction", "")
        # A deletion may come between the look and the replacement.
        await self._storage.reach(location.path)
        full = replace(manifest, parts=(*manifest.parts, *copied), parent=None, compacted_from=manifest.parent)
        self._storage.files[location.path + MANIFEST] = full
        await self._storage.reach(location.path)
        if any(name not in self._storage.files for name in full.parts):
            self._storage.files.pop(location.path + MANIFEST, None)
            self._undo(copied)
            raise RequestRefused("checkpoint_missing", f"{location.path} was deleted during its compaction", "")
        progress(manifest.size_bytes, manifest.size_bytes)
        return full.size_bytes

    async def _parts_of_parents(self, manifest: StoredFile) -> list[str]:
        """Read the manifests of all parents."""
        parts: list[str] = []
        parent = manifest.parent
        while parent is not None:
            await self._storage.reach(parent.path)
            found = self._storage.manifest(parent)
            if found is None:
                raise RequestRefused("checkpoint_missing", f"{parent.path} is not there", "")
            parts += found.parts
            parent = found.parent
        return parts

    async def _copy(self, manifest: StoredFile, name: str) -> str:
        """Copy a part of a parent; returns its new name."""
        await self._storage.reach(manifest.save.path)
        if name not in self._storage.files or name in self._storage.damaged:
            raise RequestRefused("checkpoint_corrupted", f"{name} is missing or damaged", "")
        copied = f"{manifest.save.path}/{manifest.save.save_id}.{name.rpartition('/')[2]}"
        self._storage.files[copied] = StoredFile(manifest.job, manifest.save)
        return copied

    def _undo(self, copied: list[str]) -> None:
        for name in copied:
            self._storage.files.pop(name, None)

    async def _delete_all(self, location: CheckpointLocation) -> None:
        if self._storage.is_needed(SaveName(location.path, location.save_id)):
            raise Unavailable("checkpoint_needed", f"another checkpoint builds on {location.path}", "")
        manifest = self._meant(location, MANIFEST)
        if manifest is not None:
            self._watch(manifest)
            self._storage.files[location.path + TOMBSTONE] = self._storage.files.pop(location.path + MANIFEST)
        save = SaveName(location.path, location.save_id)
        for name in [one for one in self._storage.of_save(save) if not one.endswith(TOMBSTONE)]:
            file = self._storage.files.get(name)
            if file is not None and location.job in (None, file.job):
                await self._delete(location, name)
        if self._meant(location, TOMBSTONE) is not None:
            await self._delete(location, location.path + TOMBSTONE)
        if self._meant(location, MANIFEST) is not None:
            # It was published meanwhile, and names these files.
            await self._delete_all(location)

    async def _delete(self, location: CheckpointLocation, name: str) -> None:
        await self._storage.reach(location.path)
        if name in self._storage.files:
            self._watch(self._storage.files[name])
            del self._storage.files[name]
            self._storage.damaged.discard(name)

    async def verify(self, location: CheckpointLocation, bytes_per_s: int, progress: Progress) -> str:
        await self._storage.reach(location.path)
        manifest = self._meant(location, MANIFEST)
        if manifest is None:
            folder = folder_of(location.path)
            if not any(folder_of(one.save.path) == folder for one in self._storage.files.values()):
                raise Unavailable(FOLDER_MISSING, f"{folder} is empty", "")
            return "its manifest is missing"
        progress(0, manifest.size_bytes)
        for name in manifest.parts:
            await self._storage.reach(location.path)
            if name not in self._storage.files or name in self._storage.damaged:
                return f"{name} is missing or damaged"
        progress(manifest.size_bytes, manifest.size_bytes)
        return ""

    def _meant(self, location: CheckpointLocation, suffix: str) -> StoredFile | None:
        """The manifest or tombstone there, if it is of this save and job."""
        found = self._storage.files.get(location.path + suffix)
        is_meant = found is not None and found.save.save_id == location.save_id
        return found if found is not None and is_meant and location.job in (None, found.job) else None
