"""The save plan: which rank writes which box of which tensor.

Invariants:
- The plan is a function of the ranks' descriptions.
- A box that one rank holds is written by that rank. A box that several ranks hold is written once, or `copies` times,
  and these ranks share the bytes evenly.
- A tensor whose boxes do not cover its shape is refused before anything is written.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import xxhash

from forged.checkpoint.errors import CheckpointException, invalid
from forged.checkpoint.format.boxes import Box, Grid, Shape, grid_of, whole
from forged.checkpoint.format.dtypes import dtype_of, name_of
from forged.checkpoint.format.manifest import BoxText, Tensors
from forged.checkpoint.format.tree import Leaf

UNSPLIT_BYTES_MAX = 1 << 20
"""Boxes up to this size are not split among ranks."""
CELLS_MAX = 1 << 24


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The arrays of a rank as columns, in the order of its tree."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    """Global shapes."""
    boxes: dict[int, BoxText]
    """By position: the boxes of arrays that the rank holds in part."""
    private: list[int]
    """Positions of arrays that belong to this rank only (`PerRank`)."""

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Description:
        return cls(
            [leaf.name for leaf in leaves],
            [name_of(leaf.array.dtype) for leaf in leaves],
            [leaf.global_shape for leaf in leaves],
            {number: leaf.sharded_box for number, leaf in enumerate(leaves) if leaf.sharded_box is not None},
            [number for number, leaf in enumerate(leaves) if leaf.is_per_rank],
        )

    def digest(self) -> bytes:
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(self))

    def box(self, number: int) -> Box:
        """The box of an array that the rank holds."""
        return Box(*self.boxes[number]) if number in self.boxes else whole(self.shapes[number])


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one rank writes: tensors in this order, and the boxes of those that it writes in part."""

    tensors: list[int]
    boxes: dict[int, BoxText]

    def box(self, place: int, shape: Shape) -> Box:
        """The box of a piece in its tensor."""
        return Box(*self.boxes[place]) if place in self.boxes else whole(shape)


class SavePlan(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of a checkpoint, and each rank's share of them."""

    tensors: Tensors
    numbers: list[list[int]]
    """By rank: the tensor number of each array, in the order of the rank's tree."""
    shares: list[Share]


def plan(descriptions: Sequence[Description], copies: int = 1) -> SavePlan:
    """Make the plan from the descriptions of all ranks."""
    if len(descriptions) == 1 and not descriptions[0].boxes:
        return _alone(descriptions[0])
    table = _Table()
    numbers = [table.add(rank, description) for rank, description in enumerate(descriptions)]
    _record_splits(table.tensors, numbers, descriptions)
    return SavePlan(table.tensors, numbers, _shares(table, len(descriptions), copies))


def _alone(description: Description) -> SavePlan:
    """The plan of a single rank without sharded arrays."""
    count = len(description.names)
    tensors = Tensors(description.names, description.dtypes, description.shapes, dict.fromkeys(description.private, 0))
    return SavePlan(tensors, [list(range(count))], [Share(list(range(count)), {})])


def _record_splits(tensors: Tensors, numbers: list[list[int]], descriptions: Sequence[Description]) -> None:
    """Record which rank holds which box of each sharded tensor; tensors with equal splits share one entry."""
    splits: defaultdict[int, dict[int, BoxText]] = defaultdict(dict)
    for rank, description in enumerate(descriptions):
        its = numbers[rank]
        for place, box in description.boxes.items():
            splits[its[place]][rank] = box
    known: dict[tuple[tuple[int, BoxText], ...], int] = {}
    for tensor, split in splits.items():
        number = tensors.split_of[tensor] = known.setdefault(tuple(split.items()), len(known))
        if number == len(tensors.splits):
            tensors.splits.append(split)


class _Table:
    """The tensors of all ranks, and the ranks that hold each of their boxes."""

    def __init__(self) -> None:
        self.tensors = Tensors([], [], [], {}, [], {})
        self.holders: list[dict[Box, list[int]]] = []
        self._number: dict[tuple[str, int], int] = {}

    def add(self, rank: int, description: Description) -> list[int]:
        """Add a rank's arrays; returns their tensor numbers."""
        private = frozenset(description.private)
        numbers = []
        for place, name in enumerate(description.names):
            owner = rank if place in private else -1
            number = self._number.setdefault((name, owner), len(self._number))
            if number == len(self.holders):
                self._add_tensor(name, description.dtypes[place], description.shapes[place], owner)
            else:
                self._require_same_type(number, rank, description, place)
            self.holders[number].setdefault(description.box(place), []).append(rank)
            numbers.append(number)
        return numbers

    def _add_tensor(self, name: str, dtype: str, shape: Shape, owner: int) -> None:
        if owner >= 0:
            self.tensors.ranks[len(self.holders)] = owner
        self.tensors.names.append(name)
        self.tensors.dtypes.append(dtype)
        self.tensors.shapes.append(tuple(shape))
        self.holders.append({})

    def _require_same_type(self, number: int, rank: int, description: Description, place: int) -> None:
        known = self.tensors.dtypes[number], tuple(self.tensors.shapes[number])
        its = description.dtypes[place], tuple(description.shapes[place])
        if known != its:
            other = min(ranks[0] for ranks in self.holders[number].values())
            raise CheckpointException(
                f"{self.tensors.names[number]} is {its[0]} {its[1]} at rank {rank}, "
                f"but {known[0]} {known[1]} at rank {other}",
                code="checkpoint_ranks_differ",
                fix="use ShardedArray for parts of one array, and PerRank for values that differ between ranks",
            )


def _shares(table: _Table, ranks: int, copies: int) -> list[Share]:
    """Which boxes each rank writes. A box that several ranks hold is divided among them by size."""
    shares = [Share([], {}) for _ in range(ranks)]
    common: defaultdict[tuple[int, ...], list[tuple[int, Box, int]]] = defaultdict(list)
    for number, held in enumerate(table.holders):
        shape = tuple(table.tensors.shapes[number])
        itemsize = dtype_of(table.tensors.dtypes[number]).itemsize
        _require_covered(table.tensors.names[number], shape, list(held))
        for box, ranks_of_box in held.items():
            if len(ranks_of_box) == 1:
                _add(shares[ranks_of_box[0]], number, box, shape)
            else:
                common[tuple(ranks_of_box)].append((number, box, box.volume * itemsize))
    for holders, boxes in common.items():
        for position, number, box in _spread(table, boxes, len(holders)):
            for copy in range(min(copies, len(holders))):
                _add(
                    shares[holders[(position + copy) % len(holders)]], number, box, tuple(table.tensors.shapes[number])
                )
    return shares


def _add(share: Share, number: int, box: Box, shape: Shape) -> None:
    if box != whole(shape):
        share.boxes[len(share.tensors)] = box
    share.tensors.append(number)


def _spread(table: _Table, boxes: list[tuple[int, Box, int]], ranks: int) -> Iterator[tuple[int, int, Box]]:
    """Distribute boxes over ranks, splitting boxes so that each rank gets the same number of bytes."""
    total, at = sum(size for _, _, size in boxes), 0
    for number, box, size in boxes:
        first = at * ranks // total if total else 0
        last = max(first, (at + size - 1) * ranks // total) if size else first
        if first == last or size <= UNSPLIT_BYTES_MAX or not box.shape:
            yield (at + size // 2) * ranks // total if size else 0, number, box
        else:
            grid = grid_of(tuple(table.tensors.shapes[number]), dtype_of(table.tensors.dtypes[number]).itemsize)
            marks = [(position * total / ranks - at) / size for position in range(first + 1, last + 1)]
            yield from ((first + part, number, piece) for part, piece in _split(box, grid, marks))
        at += size


def _split(box: Box, grid: Grid, marks: list[float]) -> Iterator[tuple[int, Box]]:
    """Split a box along its first axis at chunk boundaries near the given fractions; yields numbered pieces."""
    start, rows = box.offset[0], box.shape[0]
    step = grid.step if grid.axis == 0 else 1
    edges = [start]
    for mark in marks:
        edge = round((start + mark * rows) / step) * step
        edges.append(min(max(edge, edges[-1]), start + rows))
    for part, (low, high) in enumerate(pairwise([*edges, start + rows])):
        if high > low:
            yield part, Box((low, *box.offset[1:]), (high - low, *box.shape[1:]))


def _require_covered(name: str, shape: Shape, boxes: list[Box]) -> None:
    """Refuse a tensor whose boxes do not cover its shape."""
    if any(box.shape == shape for box in boxes) or not math.prod(shape):
        return
    if sum(box.volume for box in boxes) < math.prod(shape) or not _covered(shape, boxes):
        raise invalid(
            f"the boxes of {name} do not cover its shape {shape}",
            "check global_shape and offset of each ShardedArray",
            code="checkpoint_incomplete",
        )


def _covered(shape: Shape, boxes: list[Box]) -> bool:
    """Whether the boxes cover the shape, decided on the grid of all their edges."""
    edges = [
        sorted({0, size, *(e for box in boxes for e in (box.offset[axis], box.offset[axis] + box.shape[axis]))})
        for axis, size in enumerate(shape)
    ]
    cells = math.prod(len(one) - 1 for one in edges)
    if cells > CELLS_MAX:
        raise invalid(
            f"the shards of an array of shape {shape} divide it into {cells} cells; limit {CELLS_MAX}",
            "shard along fewer axes, or into fewer shards",
        )
    places = [{edge: place for place, edge in enumerate(one)} for one in edges]
    is_covered = np.zeros([len(one) - 1 for one in edges], np.bool_)
    for box in boxes:
        if box.volume:
            where = zip(places, box.offset, box.shape, strict=True)
            is_covered[tuple(slice(place[start], place[start + size]) for place, start, size in where)] = True
    return bool(is_covered.all())
