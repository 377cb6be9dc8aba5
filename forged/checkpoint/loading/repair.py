"""Repair: replaces corrupt chunks with the same bytes from another copy, in this checkpoint or another one.

Invariants:
- A replacement has the digest that the manifest of the corrupt chunk states, so it is the same bytes.
- Other checkpoints are searched only when a chunk is corrupt: newest first, at most `MANIFESTS_SEARCHED_MAX`.
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
from forged.checkpoint.loading.manifest_index import Index, PartLayout, PieceId
from forged.checkpoint.model import RepairedChunk
from forged.checkpoint.ports import CancelToken, Storage

MANIFESTS_SEARCHED_MAX = 32


def manifests_newest_first(storage: Storage, prefix: str) -> Iterator[Manifest]:
    """The other checkpoints of a storage, newest first; each manifest is read when it is needed."""
    entries = {entry.name: entry for entry in storage.entries()}
    found = sorted((entry for name, entry in entries.items() if name.endswith(SUFFIX)), key=attrgetter("modified_at"))
    for entry in reversed(found):
        other = entry.name.removesuffix(SUFFIX)
        if other != prefix and other + TOMBSTONE not in entries:
            try:
                yield decode(storage.read(entry.name, MANIFEST_BYTES_MAX), entry.name)
            except CheckpointException:
                # The other checkpoint was deleted meanwhile, or is corrupt itself.
                continue


class CopyRepairer:
    """Repairs chunks from healthy copies; thread-safe."""

    def __init__(
        self,
        storage: Storage,
        index: Index,
        token: CancelToken,
        other_manifests: Callable[[], Iterator[Manifest]] | None = None,
    ) -> None:
        """`other_manifests` gives other checkpoints, newest first; default: those in the storage."""
        self._storage = storage
        self._index = index
        self._token = token
        self._other_manifests = other_manifests or partial(manifests_newest_first, storage, index.manifest.prefix)
        self._lock = threading.Lock()
        self._indexes: list[Index] | None = None

    def repair(self, layout: PartLayout, chunk: int, out: memoryview, cause: CheckpointException) -> RepairedChunk:
        """Fill `out` from a healthy copy; raise `cause` if there is none."""
        self._token.check()
        box, digest = layout.chunk_box(chunk), layout.digest(chunk)
        try:
            for index, piece_id in self._candidates(layout, chunk, box):
                self._token.check()
                tensor = index.layout(piece_id[0]).part.tensors[piece_id[1]]
                if self._copy_from(index, tensor, box, piece_id, digest, out):
                    return self._repaired_chunk(layout, chunk, index, piece_id)
        except CheckpointException:
            self._token.check()
        raise cause

    def _candidates(self, layout: PartLayout, chunk: int, box: Box) -> Iterator[tuple[Index, PieceId]]:
        """Pieces that may contain the same bytes: of this checkpoint, then of other checkpoints."""
        tensor, bad = layout.tensor_of(chunk), (layout.number, layout.piece_of(chunk))
        for piece_id in self._index.pieces_of(tensor):
            if piece_id != bad and self._index.layout(piece_id[0]).piece_box(piece_id[1]).covers(box):
                yield self._index, piece_id
        for index in self._other_indexes():
            other = self._same_tensor(index, tensor)
            for piece_id in index.pieces_of(other) if other is not None else ():
                if _has_chunk(index.layout(piece_id[0]), piece_id[1], box, layout.digest(chunk)):
                    yield index, piece_id

    def _same_tensor(self, index: Index, tensor: int) -> int | None:
        """The tensor of another checkpoint with the same name, rank, type and shape."""
        tensors, other_tensors = self._index.manifest.tensors, index.manifest.tensors
        other = index.tensor_number(tensors.names[tensor], tensors.ranks.get(tensor))
        is_alike = other is not None and (tensors.dtypes[tensor], tensors.shapes[tensor]) == (
            other_tensors.dtypes[other],
            other_tensors.shapes[other],
        )
        return other if is_alike else None

    def _other_indexes(self) -> list[Index]:
        with self._lock:
            if self._indexes is None:
                prefix = self._index.manifest.prefix
                other_manifests = (manifest for manifest in self._other_manifests() if manifest.prefix != prefix)
                self._indexes = [Index(manifest) for manifest in islice(other_manifests, MANIFESTS_SEARCHED_MAX)]
            return self._indexes

    def _copy_from(
        self, index: Index, tensor: int, box: Box, piece_id: PieceId, digest: bytes, out: memoryview
    ) -> bool:
        """Read a candidate into `out`; return whether its digest matches."""
        try:
            found = fetch(
                self._storage, index, [tensor], self._token, boxes={0: box}, only_piece=piece_id, threads=1
            ).arrays[0]
        except CheckpointException:
            self._token.check()
            return False
        data = bytes_of(np.ascontiguousarray(found))
        if xxhash.xxh3_128_digest(data) != digest:
            return False
        out[:] = data
        return True

    def _repaired_chunk(self, layout: PartLayout, chunk: int, index: Index, piece_id: PieceId) -> RepairedChunk:
        part, piece = layout.part, layout.piece_of(chunk)
        return RepairedChunk(
            tensor=self._index.manifest.tensors.names[part.tensors[piece]],
            rank=part.rank,
            file=part.file,
            chunk=chunk - layout.first_chunks[piece],
            source=index.manifest.parts[piece_id[0]].file,
        )


def _has_chunk(layout: PartLayout, piece: int, box: Box, digest: bytes) -> bool:
    """Whether a piece has a chunk of this box with this digest."""
    if not layout.piece_box(piece).covers(box):
        return False
    numbers = layout.chunks_of(piece)
    return any(layout.digest(chunk) == digest and layout.chunk_box(chunk) == box for chunk in numbers)
