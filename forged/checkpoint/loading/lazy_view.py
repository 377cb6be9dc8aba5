"""A checkpoint that is read as it is looked at.

Law: nothing is read before it is asked for, and nothing is handed out before it was verified. What is mapped is the
file itself: verified when it is handed out for the first time, and read-only.
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
from forged.checkpoint.format.tree import unflatten
from forged.checkpoint.loading.fetching import Array, fetch, is_of_storage, require_right
from forged.checkpoint.loading.read_plan import Copy, Index, blocks_of
from forged.checkpoint.loading.repair import CopyRepairer
from forged.checkpoint.ports import Halt, Storage, bounded
from forged.checkpoint.thread_pool import THREADS, run_all


class TensorInfo(NamedTuple):
    """What is known of a tensor without reading it."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    rank: int | None
    """Whose own it is, if it is one's own."""

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointView(Mapping[str, Array]):
    """The tensors of a checkpoint by name; of those that ranks have for themselves, the ones of one rank.

    Close it, or use it as a context, for the files to be closed. Arrays that are mapped stay good for as long as they
    are there.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        *,
        rank: int = 0,
        halt: Callable[[], Halt] = Halt,
        others: Callable[[], Iterator[Manifest]] | None = None,
        threads: int = THREADS,
    ) -> None:
        """`halt` is asked anew for every tensor; `others` gives manifests in which healthy copies are looked for."""
        if not 0 <= rank < manifest.world_size:
            raise invalid(f"rank {rank} of {manifest.world_size}", "give one of the ranks that have saved it")
        self.manifest = manifest
        self._storage = storage
        self._rank = rank
        self._halt = halt
        self._others = others
        self._threads = threads
        self._index = Index(manifest)
        self._open = ExitStack()
        self._files: dict[int, memoryview | None] = {}
        self._verified: set[Copy] = set()
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

    def outline(self) -> Any:
        """The state of the rank, with a `TensorInfo` in place of each array."""
        return unflatten(self.manifest.tree(self._rank), self._info)

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor."""
        return self._info(self._number(name))

    def box(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Array:
        """A part of a tensor; no more of it is read than the chunks that it lies in."""
        number = self._number(name)
        box = Box(tuple(offset), tuple(shape))
        of = self.manifest.tensors.shapes[number]
        axes = {len(box.offset), len(box.shape), len(of)}
        if len(axes) > 1 or min((*box.offset, *box.shape), default=0) < 0 or not whole(of).covers(box):
            raise invalid(
                f"{name} of shape {of} has no part of shape {box.shape} at {box.offset}",
                "give one that lies in it",
                code="checkpoint_box_invalid",
            )
        return self._fetch(number, {0: box})

    def mapped(self, name: str) -> Array:
        """A tensor as it lies in its file, without a copy, where that can be; else as if it were asked for by name."""
        number = self._number(name)
        for copy in self._index.copies(number):
            found = self._mapped(number, copy)
            if found is not None:
                return found
        return self._fetch(number, {})

    def _mapped(self, number: int, copy: Copy) -> Array | None:
        layout = self._index.layout(copy[0])
        shape = self.manifest.tensors.shapes[number]
        first, end = layout.first_chunks[copy[1]], layout.first_chunks[copy[1] + 1]
        if layout.part.stored is not None or layout.box_of_piece(copy[1]) != whole(shape) or first == end:
            return None
        try:
            file = self._file(copy[0])
            if file is None or len(file) != layout.part.size:
                return None
            if copy not in self._verified:
                blocks = blocks_of(layout.memory, first, end)
                run_all(partial(require_right, self._index, layout, file), blocks, self._halt(), self._threads)
                self._verified.add(copy)
        except CheckpointException as error:
            if not is_of_storage(error):
                raise
            return None
        array: Array = np.ndarray(shape, dtype_of(self.manifest.tensors.dtypes[number]), file, layout.starts[first])
        return array

    def _file(self, part: int) -> memoryview | None:
        """A file as memory."""
        if part not in self._files:
            reader = self._open.enter_context(self._storage.open(self.manifest.parts[part].file))
            self._files[part] = reader.mapped()
        return self._files[part]

    def _fetch(self, number: int, boxes: dict[int, Box]) -> Array:
        halt = self._halt()
        storage = bounded(self._storage, halt)
        repairer = CopyRepairer(storage, self._index, halt, self._others)
        return fetch(
            storage,
            self._index,
            [number],
            halt,
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
    """The checkpoint at a path or URL."""
    from forged.checkpoint.storage.listing import read_manifest
    from forged.checkpoint.storage.locations import storage_at

    storage, prefix = storage_at(where)
    return CheckpointView(storage, read_manifest(storage, prefix), rank=rank)
