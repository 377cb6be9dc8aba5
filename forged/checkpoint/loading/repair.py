"""Healthy copies of chunks that are bad: elsewhere in the same checkpoint, or in another one of the storage.

Law: what is given instead has the hash that the manifest of the bad one says, so it is the same bytes. Other
checkpoints are looked at only when something is bad, the newest first, and so many at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter

import numpy as np
import xxhash

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.manifest import MANIFEST_BYTES_MAX, SUFFIX, TOMBSTONE, Manifest, decode
from forged.checkpoint.loading.fetching import bytes_of, fetch
from forged.checkpoint.loading.read_plan import Copy, Index, PartLayout
from forged.checkpoint.model import RepairedChunk
from forged.checkpoint.ports import Halt, Storage

OTHERS_MAX = 32


def others_in(storage: Storage, prefix: str) -> Iterator[Manifest]:
    """The other checkpoints of a storage, the newest first; each is read when it is asked for."""
    entries = {entry.name: entry for entry in storage.entries()}
    found = sorted((entry for name, entry in entries.items() if name.endswith(SUFFIX)), key=attrgetter("modified_at"))
    for entry in reversed(found):
        other = entry.name.removesuffix(SUFFIX)
        if other != prefix and other + TOMBSTONE not in entries:
            try:
                yield decode(storage.read(entry.name, MANIFEST_BYTES_MAX), entry.name)
            except CheckpointException:
                # It is gone by now, or bad itself.
                continue


class CopyRepairer:
    """Looks for healthy copies; called by several threads."""

    def __init__(
        self, storage: Storage, index: Index, halt: Halt, others: Callable[[], Iterator[Manifest]] | None = None
    ) -> None:
        """`others` gives the manifests of other checkpoints, the newest first; without it, those in the storage."""
        self._storage = storage
        self._index = index
        self._halt = halt
        self._others = others or partial(others_in, storage, index.manifest.prefix)
        self._lock = threading.Lock()
        self._known: list[Index] | None = None

    def repair(self, layout: PartLayout, chunk: int, room: memoryview, cause: CheckpointException) -> RepairedChunk:
        """Put the right bytes there; raises the cause if nobody has them."""
        self._halt.check()
        box, digest = layout.box_of(chunk), layout.digest(chunk)
        try:
            for index, copy in self._candidates(layout, chunk, box):
                self._halt.check()
                tensor = index.layout(copy[0]).part.tensors[copy[1]]
                if self._take(index, tensor, box, copy, digest, room):
                    return self._told(layout, chunk, index, copy)
        except CheckpointException:
            self._halt.check()
        raise cause

    def _candidates(self, layout: PartLayout, chunk: int, box: Box) -> Iterator[tuple[Index, Copy]]:
        """Pieces that may have the same bytes."""
        tensor, bad = layout.tensor_of(chunk), (layout.number, layout.place_of(chunk))
        for copy in self._index.copies(tensor):
            if copy != bad and self._index.layout(copy[0]).box_of_piece(copy[1]).covers(box):
                yield self._index, copy
        for index in self._other_indexes():
            other = self._same(index, tensor)
            for copy in index.copies(other) if other is not None else ():
                if _has(index.layout(copy[0]), copy[1], box, layout.digest(chunk)):
                    yield index, copy

    def _same(self, index: Index, tensor: int) -> int | None:
        """The tensor of another checkpoint that has the same name, and the same chunks."""
        mine, its = self._index.manifest.tensors, index.manifest.tensors
        other = index.number_of(mine.names[tensor], mine.ranks.get(tensor))
        is_alike = other is not None and (mine.dtypes[tensor], mine.shapes[tensor]) == (
            its.dtypes[other],
            its.shapes[other],
        )
        return other if is_alike else None

    def _other_indexes(self) -> list[Index]:
        with self._lock:
            if self._known is None:
                prefix = self._index.manifest.prefix
                others = (manifest for manifest in self._others() if manifest.prefix != prefix)
                self._known = [Index(manifest) for manifest in islice(others, OTHERS_MAX)]
            return self._known

    def _take(self, index: Index, tensor: int, box: Box, copy: Copy, digest: bytes, room: memoryview) -> bool:
        """Read a candidate; tells whether it was what was looked for."""
        try:
            found = fetch(self._storage, index, [tensor], self._halt, boxes={0: box}, only=copy, threads=1).arrays[0]
        except CheckpointException:
            self._halt.check()
            return False
        data = bytes_of(np.ascontiguousarray(found))
        if xxhash.xxh3_128_digest(data) != digest:
            return False
        room[:] = data
        return True

    def _told(self, layout: PartLayout, chunk: int, index: Index, copy: Copy) -> RepairedChunk:
        part, place = layout.part, layout.place_of(chunk)
        return RepairedChunk(
            tensor=self._index.manifest.tensors.names[part.tensors[place]],
            rank=part.rank,
            file=part.file,
            chunk=chunk - layout.first_chunks[place],
            source=index.manifest.parts[copy[0]].file,
        )


def _has(layout: PartLayout, place: int, box: Box, digest: bytes) -> bool:
    """Whether a piece has a chunk of that box with that hash."""
    if not layout.box_of_piece(place).covers(box):
        return False
    numbers = range(layout.first_chunks[place], layout.first_chunks[place + 1])
    return any(layout.digest(chunk) == digest and layout.box_of(chunk) == box for chunk in numbers)
