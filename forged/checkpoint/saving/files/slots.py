"""The slots of one process: memory of its host, into which saves are staged and which outlives the process.

Invariants:
- There are two slots. The one that all ranks have last staged alike is never overwritten. All ranks stage together; so
  whenever one of them dies, all slots of one save are whole.
- A rank that has not heard whether a copy succeeded at all ranks asks them before the next one.
- A slot is locked while it is overwritten. One that the host has locked, because it is being saved, is left alone.
- A save without a slot is staged into memory of the process.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.manifest import DIGEST_BYTES
from forged.checkpoint.format.slot import (
    HEADER_BYTES,
    PART_OFFSET,
    SlotFrame,
    SlotHeader,
    content_digest,
    encode_frame,
    encode_header,
    slot_bytes,
)
from forged.checkpoint.ports import BLOCK_BYTES, CancelToken, HostSlots, SlotLease, SlotMemory, Storage
from forged.checkpoint.saving.files.image import ArrayImage, blocks
from forged.checkpoint.thread_pool import run_all

SLACK = 16
"""Slots are opened larger than they need to be by one part in so many, for later saves that are a little larger."""
SLACK_BYTES_MIN = 64 << 10


class SlotContent(NamedTuple):
    """What a slot says about the part in it."""

    save_id: str
    rank: int
    world_size: int
    step: int | None
    epoch: int | None
    generation: int
    frame: SlotFrame


class Slot:
    """One slot, as writable memory."""

    def __init__(self, slot: SlotMemory) -> None:
        self.save_id = ""
        """Of what it holds; empty while that is not whole."""
        self.sequence = 0
        self.memory = slot.memory
        self._fd = slot.fd
        weakref.finalize(self, os.close, slot.fd)

    def begin(self) -> bool:
        """From now on the slot holds nothing; false if the host reads it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.save_id = ""
        self.memory[:HEADER_BYTES] = bytes(HEADER_BYTES)
        return True

    def end(self) -> None:
        """The slot is not overwritten any more."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def commit(self, content: SlotContent, frame: bytes, digests: bytes, sequence: int) -> None:
        """Say that the part is in place."""
        behind = frame + digests
        header = SlotHeader(
            sequence,
            content.save_id,
            content.rank,
            content.world_size,
            content.step,
            content.epoch,
            content.generation,
            content.frame.part.size,
            len(frame),
            len(digests) // DIGEST_BYTES,
            content_digest(behind),
        )
        self.memory[header.frame_offset : header.frame_offset + len(behind)] = behind
        self.memory[:HEADER_BYTES] = encode_header(header)
        self.save_id, self.sequence = content.save_id, sequence


class Slots:
    """The two slots of this process, opened when the first save is staged."""

    def __init__(self, host: HostSlots, storage: Storage, threads: int) -> None:
        self._host = host
        self._storage = storage
        self._threads = threads
        self._lock = threading.Lock()
        self._lease: SlotLease | None = None
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._agreed: Slot | None = None
        """The slot that was last staged alike by all ranks."""
        self._sequence = 0

    @property
    def agreed(self) -> str:
        """The save that all ranks have last staged alike, as far as this one was told; empty if there is none."""
        agreed = self._agreed
        return "" if agreed is None else agreed.save_id

    @property
    def is_persisted(self) -> bool:
        """Whether the host persists what is staged into the slots."""
        lease = self._lease
        return lease is not None and lease.persists and self._host.is_present

    def persist(self, save_id: str, token: CancelToken) -> int:
        """Have the host persist all slots of a save; returns its size when the checkpoint exists."""
        return self._host.persist(save_id, token)

    def refusal_of(self, save_id: str) -> CheckpointException | None:
        """Why the host has not persisted a save that the root has asked for; None as long as it may do so."""
        return self._host.refusal_of(save_id)

    def prepare(self, size: int, token: CancelToken) -> bool:
        """Open slots for a part of this size; returns whether there are any."""
        with self._lock:
            self._open(slot_bytes(size, SLACK_BYTES_MIN), token)
            return self._lease is not None

    def stage(self, image: ArrayImage, content: SlotContent, token: CancelToken) -> Slot | None:
        """Copy a part into a slot; None if there is none for it. Its arrays may change afterwards."""
        frame = encode_frame(content.frame)
        slot = self._take(slot_bytes(image.size, len(frame) + len(image.digests)), token)
        if slot is None:
            return None
        try:
            with memoryview(slot.memory) as memory, memory[PART_OFFSET : PART_OFFSET + image.size] as part:

                def copy(offset: int) -> None:
                    with part[offset : offset + BLOCK_BYTES] as room:
                        image.block(offset, room)

                run_all(copy, blocks(image.size), token, self._threads)
            slot.commit(content, frame, bytes(image.digests), self._sequence)
        except BaseException:
            self.give_back(slot)
            raise
        finally:
            slot.end()
        return slot

    def agree(self, slot: Slot) -> None:
        """All ranks have staged the save that this slot holds."""
        self._agreed = slot

    def settle(self, staged: Sequence[str]) -> None:
        """All ranks have staged these saves; a rank was not told of the last one if the root has died meanwhile."""
        known = [slot for slot in self._slots if slot.save_id in staged]
        self._agreed = max(known, key=lambda slot: slot.sequence, default=self._agreed)

    def give_back(self, slot: Slot) -> None:
        """The slot may be overwritten; until then it keeps what it holds."""
        with self._lock:
            if slot in self._slots:
                self._free.append(slot)

    def close(self) -> None:
        """Unmap the slots, which keep what they hold."""
        with self._lock:
            self._drop()

    def _take(self, size: int, token: CancelToken) -> Slot | None:
        with self._lock:
            self._open(size, token)
            # Also while the other one is being saved: that save may fail, or end between the copies of two ranks.
            fitting = [slot for slot in self._free if slot is not self._agreed and len(slot.memory) >= size]
            found = next((slot for slot in fitting if slot.begin()), None)
            if found is not None:
                self._free.remove(found)
                self._sequence += 1
            return found

    def _open(self, size: int, token: CancelToken) -> None:
        """Open slots if there are none, if the host has replaced them, or if they are too small."""
        lease = self._lease
        is_own = lease is not None and lease.owner == self._host.owner
        if is_own and all(len(slot.memory) >= size for slot in self._slots):
            return
        opened = self._host.open(size + max(SLACK_BYTES_MIN, size // SLACK), self._storage.url, token)
        if opened is not None or not is_own:
            self._drop()
        if opened is not None:
            self._lease, self._slots = opened, [Slot(slot) for slot in opened.slots]
            self._free = list(self._slots)

    def _drop(self) -> None:
        """Forget the slots. Those in use are unmapped when they are given back."""
        self._lease, self._slots, self._free, self._agreed = None, [], [], None
