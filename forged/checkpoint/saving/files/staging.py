"""Staging: the copy of a part into reusable memory, so that training continues while the part is written.

Invariants:
- Memory is touched before it is used, and reused: the first touch of a page costs ten times its copy.
- There are at most two buffers: one save is written while another is staged.
- Where the host has slots for this process, these are the buffers.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np

from forged.checkpoint.format.slot import PART_OFFSET
from forged.checkpoint.large_pages import new_memory
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken
from forged.checkpoint.saving.files.image import ArrayImage, blocks
from forged.checkpoint.saving.files.slots import Slot, SlotContent, Slots
from forged.checkpoint.thread_pool import THREADS, run_all

BUFFERS_MAX = 2


class StagedPart:
    """A staged part, laid out as its file; a `ports.Source`."""

    def __init__(self, memory: mmap.mmap, size: int, slot: Slot | None = None) -> None:
        self.memory = memory
        self.size = size
        self.slot = slot
        """The slot that the memory is; None for memory of the process."""
        start = 0 if slot is None else PART_OFFSET
        self._view = memoryview(memory)[start : start + size]

    def block(self, offset: int, room: memoryview) -> memoryview:
        return self._view[offset : offset + len(room)]

    def view(self) -> memoryview:
        return self._view

    def close(self) -> None:
        self._view.release()


class StagingMemory:
    """The staging buffers of a process."""

    def __init__(self, threads: int = THREADS, slots: Slots | None = None) -> None:
        self._threads = threads
        self.slots = slots
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._in_use = 0

    def prepare(self, size: int, token: CancelToken) -> None:
        """Allocate and touch a buffer for `size` bytes, unless all buffers are in use."""
        if self.slots is not None and self.slots.prepare(size, token):
            return
        with self._lock:
            is_exhausted = self._in_use == BUFFERS_MAX
        if not is_exhausted:
            self._give_back(self._take(size, token))

    def stage(self, image: ArrayImage, token: CancelToken) -> StagedPart:
        """Copy a part into memory of the process. Its arrays may change afterwards."""
        memory = self._take(image.size, token)
        view = memoryview(memory)

        def copy(offset: int) -> None:
            image.block(offset, view[offset : offset + BLOCK_BYTES])

        try:
            run_all(copy, blocks(image.size), token, self._threads)
        except BaseException:
            view.release()
            self._give_back(memory)
            raise
        view.release()
        return StagedPart(memory, image.size)

    def stage_in_slot(self, image: ArrayImage, content: SlotContent, token: CancelToken) -> StagedPart | None:
        """Copy a part into a slot; None if there is none for it."""
        slot = None if self.slots is None else self.slots.stage(image, content, token)
        return None if slot is None else StagedPart(slot.memory, image.size, slot)

    def unstage(self, staged: StagedPart) -> None:
        """Return the buffer of a part that is no longer needed."""
        staged.close()
        if staged.slot is None:
            self._give_back(staged.memory)
        elif self.slots is not None:
            self.slots.give_back(staged.slot)

    def close(self) -> None:
        """Free all buffers that are not in use."""
        if self.slots is not None:
            self.slots.close()
        with self._lock:
            self._free.clear()

    def _take(self, size: int, token: CancelToken) -> mmap.mmap:
        with self._lock:
            fitting = [memory for memory in self._free if len(memory) >= size]
            if fitting:
                found = min(fitting, key=len)
                self._free.remove(found)
                self._in_use += 1
                return found
            # Too small. They are freed with their last reference: a failed write may still hold one.
            self._free.clear()
        made = self._new(size, token)
        with self._lock:
            self._in_use += 1
        return made

    def _new(self, size: int, token: CancelToken) -> mmap.mmap:
        memory = new_memory(size)

        def touch(offset: int) -> None:
            np.frombuffer(memory, np.uint8)[offset : offset + BLOCK_BYTES : mmap.PAGESIZE] = 0

        run_all(touch, blocks(len(memory)), token, self._threads)
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._in_use -= 1
            self._free.append(memory)
