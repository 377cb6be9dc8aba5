"""`CheckpointView`: the tensors of a checkpoint as a mapping, each read on access.

Invariants:
- Nothing is read before it is requested; nothing is returned before it is verified.
- A mapped array is the file itself: read-only, verified the first time it is returned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from forged.checkpoint.errors import CheckpointException, invalid
from forged.checkpoint.format.boxes import Box, Shape, whole
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.loading.fetching import Array, fetch, is_storage_failure, verify_chunks
from forged.checkpoint.loading.manifest_index import Index, PieceId
from forged.checkpoint.loading.read_plan import blocks_of
from forged.checkpoint.loading.repair import CopyRepairer
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.storage.listing import hold_files
from forged.checkpoint.thread_pool import THREADS, run_all


class TensorInfo(NamedTuple):
    """What the manifest says about a tensor."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    rank: int | None
    """Its rank, if it is a per-rank tensor."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointView(Mapping[str, Array]):
    """The tensors of a checkpoint by name; of per-rank tensors, those of one rank.

    Close the view, or use it as a context manager, to close its files. Mapped arrays stay valid after that.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        *,
        rank: int = 0,
        token: Callable[[], CancelToken] = CancelToken,
        other_manifests: Callable[[], Iterator[Manifest]] | None = None,
        threads: int = THREADS,
    ) -> None:
        """`token` is called once per tensor; `other_manifests` gives checkpoints to search for healthy copies."""
        if not 0 <= rank < manifest.world_size:
            raise invalid(f"rank must be from 0 to {manifest.world_size - 1}, got {rank}", "give a rank that saved it")
        self.manifest = manifest
        self._storage = storage
        self._rank = rank
        self._token = token
        self._other_manifests = other_manifests
        self._threads = threads
        self._index = Index(manifest)
        self._open = ExitStack()
        self._open.enter_context(hold_files(storage, manifest))
        self._files: dict[int, memoryview | None] = {}
        self._verified: set[PieceId] = set()
        ranks = manifest.tensors.ranks
        self._numbers = {
            name: number for number, name in enumerate(manifest.tensors.names) if ranks.get(number, rank) == rank
        }

    def __getitem__(self, name: str) -> Array:
        return self._fetch(self._number(name), {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._open.close()

    def info(self, name: str) -> TensorInfo:
        return self._info(self._number(name))

    def box(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Array:
        """A part of a tensor; reads only the chunks that the part touches."""
        number = self._number(name)
        box = Box(tuple(offset), tuple(shape))
        of = self.manifest.tensors.shapes[number]
        axes = {len(box.offset), len(box.shape), len(of)}
        if len(axes) > 1 or min((*box.offset, *box.shape), default=0) < 0 or not whole(of).covers(box):
            raise invalid(
                f"a box of shape {box.shape} at {box.offset} does not lie within {name} of shape {of}",
                "give a box within the tensor",
                code="checkpoint_box_invalid",
            )
        return self._fetch(number, {0: box})

    def mapped(self, name: str) -> Array:
        """A tensor mapped from its file without a copy; read like `view[name]` where it cannot be mapped."""
        number = self._number(name)
        for piece_id in self._index.pieces_of(number):
            found = self._mapped(number, piece_id)
            if found is not None:
                return found
        return self._fetch(number, {})

    def _mapped(self, number: int, piece_id: PieceId) -> Array | None:
        layout = self._index.layout(piece_id[0])
        shape = self.manifest.tensors.shapes[number]
        first, end = layout.first_chunks[piece_id[1]], layout.chunk_ends[piece_id[1]]
        if layout.part.stored is not None or layout.piece_box(piece_id[1]) != whole(shape) or first == end:
            return None
        try:
            file = self._file(piece_id[0])
            if file is None or len(file) != layout.part.size:
                return None
            if piece_id not in self._verified:
                blocks = blocks_of(layout.memory_offsets, first, end)
                run_all(partial(verify_chunks, self._index, layout, file), blocks, self._token(), self._threads)
                self._verified.add(piece_id)
        except CheckpointException as error:
            if not is_storage_failure(error):
                raise
            return None
        array: Array = np.ndarray(
            shape, dtype_of(self.manifest.tensors.dtypes[number]), file, layout.file_offsets[first]
        )
        return array

    def _file(self, part: int) -> memoryview | None:
        """A file mapped into memory; None if the storage cannot map it."""
        if part not in self._files:
            reader = self._open.enter_context(self._storage.open(self.manifest.parts[part].file))
            self._files[part] = reader.mapped()
        return self._files[part]

    def _fetch(self, number: int, boxes: dict[int, Box]) -> Array:
        token = self._token()
        storage = bounded(self._storage, token)
        repairer = CopyRepairer(storage, self._index, token, self._other_manifests)
        return fetch(
            storage,
            self._index,
            [number],
            token,
            boxes=boxes,
            repairer=repairer,
            rank=self._rank,
            threads=self._threads,
        ).arrays[0]

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            raise KeyError(name)
        return self._numbers[name]

    def _info(self, number: int) -> TensorInfo:
        tensors = self.manifest.tensors
        return TensorInfo(
            tensors.names[number],
            dtype_of(tensors.dtypes[number]),
            tensors.shapes[number],
            tensors.ranks.get(number),
        )


def view(where: str | os.PathLike[str], *, rank: int = 0) -> CheckpointView:
    """Open the checkpoint at a path or URL."""
    from forged.checkpoint.storage.listing import read_manifest
    from forged.checkpoint.storage.locations import storage_at

    storage, prefix = storage_at(where)
    return CheckpointView(storage, read_manifest(storage, prefix), rank=rank)
