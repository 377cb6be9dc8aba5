"""The agent of the daemon's own host.

Invariants:
- The contents of a slot never end the daemon: every error with them is a refusal.
- A checkpoint is saved in the directory that its slots are for: no symbolic link is followed on the way.
- Files are touched in threads only. At most `SAVES_MAX` checkpoints are saved at the same time.
- A save whose thread does nothing for `SAVE_IDLE_S` is given up, and its thread left alone with its slots; of one file
  system at most `HUNG_MAX`.
- `forged.checkpoint` is imported when the first slots are made, not when the daemon starts.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from forged.errors import ForgedError, RequestRefused, Unavailable, describe
from forged.file_sync import Mounts
from forged.host.model import SavedSlots, SlotContents, StagedCheckpoint
from forged.host.slot_directory import SlotDirectory

if TYPE_CHECKING:
    from forged.checkpoint.ports import CancelToken
    from forged.checkpoint.storage.slot_files import SlotFile, SlotSet

SAVES_MAX = HUNG_MAX = 2
SAVE_IDLE_S = 300.0
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a directory of the user in it, which is checked
HISTORY_BYTES = 8


class LocalHostAgent:
    """Slots in shared memory, saved to directories of this host."""

    def __init__(self, directory: str, data_dir: str) -> None:
        """`data_dir` is the daemon's. Its slots are in a directory of `directory`, by default one in /dev/shm."""
        self._root = Path(directory or f"{SHARED_MEMORY}/forged-{os.geteuid()}")
        self._data_dir = data_dir
        self._slots = SlotDirectory(self._root / "none", data_dir)
        self._saves: SaveThreads | None = None

    async def begin(self, history: str) -> Mapping[str, int]:
        # Several daemons of one user have a directory each.
        name = hashlib.blake2b(history.encode(), digest_size=HISTORY_BYTES).hexdigest()
        self.end()
        self._slots = SlotDirectory(self._root / name, self._data_dir)
        self._saves = SaveThreads()
        await to_thread.run_sync(self._slots.sweep)
        return await to_thread.run_sync(self._slots.find)

    def end(self) -> None:
        self._slots.close()

    async def make(self, slot_ids: Sequence[str], size_bytes: int) -> list[str]:
        return await to_thread.run_sync(self._make, slot_ids, size_bytes)

    def _make(self, slot_ids: Sequence[str], size_bytes: int) -> list[str]:
        paths = self._slots.make(slot_ids, size_bytes)
        # Now, so that the emergency checkpoint of a worker does not wait for it.
        _import_checkpoints()
        return paths

    async def delete(self, slot_ids: Sequence[str]) -> None:
        await to_thread.run_sync(self._slots.delete, slot_ids)

    async def paths(self, slot_ids: Sequence[str]) -> list[str]:
        return [self._slots.path_of(slot_id) for slot_id in slot_ids]

    async def descriptors(self, slot_ids: Sequence[str]) -> list[int]:
        return await to_thread.run_sync(self._descriptors, slot_ids)

    def _descriptors(self, slot_ids: Sequence[str]) -> list[int]:
        with ExitStack() as stack:
            opened = []
            for slot_id in slot_ids:
                opened.append(self._slots.open_slot(slot_id, os.O_RDWR))
                stack.callback(os.close, opened[-1])
            stack.pop_all()
        return opened

    async def read(self, slot_ids: Sequence[str]) -> list[SlotContents]:
        return await to_thread.run_sync(self._read, slot_ids)

    def _read(self, slot_ids: Sequence[str]) -> list[SlotContents]:
        from forged.checkpoint.format.slot import SlotHeader

        found = []
        for slot_id in slot_ids:
            with ExitStack() as stack:
                try:
                    header = self._opened(slot_id, stack).header()
                except (OSError, RequestRefused):
                    continue
                if isinstance(header, SlotHeader):
                    found.append(
                        SlotContents(
                            slot_id,
                            header.sequence,
                            header.save_id,
                            header.rank,
                            header.world_size,
                            header.step or 0,
                            header.epoch or 0,
                            header.generation,
                        )
                    )
        return found

    def _opened(self, slot_id: str, stack: ExitStack, *, is_mapped: bool = False) -> SlotFile:
        from forged.checkpoint.storage.slot_files import SlotFile

        file = SlotFile(self._slots.open_slot(slot_id, os.O_RDONLY), is_mapped=is_mapped)
        stack.callback(file.close)
        return file

    async def hold(self, staged: StagedCheckpoint, *, is_trusted: bool) -> LocalHeldSlots | None:
        assert self._saves is not None
        stack = await to_thread.run_sync(self._hold, staged, is_trusted)
        return None if stack is None else LocalHeldSlots(*stack, self._saves)

    def _hold(self, staged: StagedCheckpoint, is_trusted: bool) -> tuple[SlotSet, ExitStack] | None:
        _import_checkpoints()
        from forged.checkpoint.storage.slot_files import SlotSet

        with ExitStack() as stack:
            try:
                files = [self._opened(slot_id, stack, is_mapped=is_trusted) for slot_id in staged.slot_ids]
                if not all(file.lock() for file in files):
                    return None
                slots = SlotSet(files)
            except Exception:  # noqa: BLE001 - they were freed or overwritten, or their writer is hostile
                return None
            return (slots, stack.pop_all()) if slots.manifest.save_id == staged.save_id else None
        return None


class SaveThreads:
    """The saves that run, and those that were given up and whose threads have not returned."""

    def __init__(self) -> None:
        self._running = anyio.CapacityLimiter(SAVES_MAX)
        self._hung: list[LocalHeldSlots] = []
        self._mounts = Mounts()

    async def save(self, held: LocalHeldSlots, storage_path: str, *, is_damaged: bool) -> SavedSlots:
        from forged.checkpoint.thread_calls import StorageUnresponsive, run_in_thread
        from forged.checkpoint.watched_token import WatchedToken

        async with self._running:
            self._require_answers(held, storage_path)
            token = WatchedToken(SAVE_IDLE_S)
            try:
                return await run_in_thread(partial(held.save_now, storage_path, token, is_damaged=is_damaged), token)
            except StorageUnresponsive:
                self._hung.append(held)
                raise

    def _require_answers(self, held: LocalHeldSlots, storage_path: str) -> None:
        """Refuse to wait for a file system that has not answered earlier saves, or an earlier try of this one.

        A try that ends after all deletes its files, which have the names of those of the next try.
        """
        self._hung = [one for one in self._hung if one.saves_in]
        mount = self._mounts.of(storage_path)
        is_tried = any(one.save_id == held.save_id for one in self._hung)
        if is_tried or sum(self._mounts.of(one.saves_in) == mount for one in self._hung) >= HUNG_MAX:
            raise Unavailable(
                "slots_storage_hangs", f"the file system of {storage_path} has not answered yet", f"check {mount}"
            )


class LocalHeldSlots:
    """Slots of this host that are locked."""

    def __init__(self, slots: SlotSet, opened: ExitStack, saves: SaveThreads) -> None:
        self.saves_in = ""
        """The directory to which a thread saves; empty while none does."""
        self._slots = slots
        self._opened = opened
        self._saves = saves
        self._is_released = False
        self._lock = threading.Lock()

    @property
    def prefix(self) -> str:
        return self._slots.manifest.prefix

    @property
    def save_id(self) -> str:
        return self._slots.manifest.save_id

    async def save(self, storage_path: str, *, is_damaged: bool) -> SavedSlots:
        return await self._saves.save(self, storage_path, is_damaged=is_damaged)

    def save_now(self, storage_path: str, token: CancelToken, *, is_damaged: bool) -> SavedSlots:
        """Save in this thread."""
        with self._lock:
            if self._is_released:
                # The save was given up before its thread has begun.
                raise Unavailable("slots_interrupted", "the save was interrupted", "try again")
            self.saves_in = storage_path
        try:
            return self._save(storage_path, token, is_damaged=is_damaged)
        finally:
            with self._lock:
                self.saves_in = ""
                if self._is_released:
                    self._opened.close()

    def _save(self, storage_path: str, token: CancelToken, *, is_damaged: bool) -> SavedSlots:
        from forged.checkpoint.saving.slot_saver import save_slots
        from forged.checkpoint.storage.listing import read_manifest
        from forged.checkpoint.storage.local import LocalStorage

        # A worker could replace a directory of its own by a link to another one at any moment.
        storage, manifest = LocalStorage(storage_path).without_links(), self._slots.manifest
        try:
            if not (is_new := save_slots(storage, self._slots, token, is_damaged=is_damaged)):
                manifest = read_manifest(storage, manifest.prefix)
        except (ForgedError, OSError):
            raise
        except Exception as error:
            # Such as a manifest that is nested too deeply: no writer may end the daemon.
            raise RequestRefused("slots_unreadable", f"cannot save slots: {describe(error)}", "stage again") from error
        parent_path = f"{storage_path}/{manifest.links[-1].prefix}" if manifest.links else ""
        return SavedSlots(manifest.size_bytes, is_new, parent_path)

    def release(self) -> None:
        """Unlock and close the slots, or have the thread that still reads them do so."""
        with self._lock:
            self._is_released = True
            if not self.saves_in:
                self._opened.close()


def _import_checkpoints() -> None:
    """Import what saves checkpoints. It takes about a second, so a thread does it."""
    import forged.checkpoint.saving.slot_saver  # noqa: F401
