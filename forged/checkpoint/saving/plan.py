"""Who writes what.

Law: from the same descriptions every rank would decide the same. What one rank alone has, it writes; what several have
alike is written once, or as often as copies are wanted, and they share the bytes evenly. A tensor of which something
would be missing is refused before anything is written.
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
"""Less is not cut among ranks."""
CELLS_MAX = 1 << 24


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The arrays that a rank has to save, by column, in the order of its tree."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    """Of the whole arrays."""
    boxes: dict[int, BoxText]
    """Of those of which it has but a part."""
    private: list[int]
    """Those that are its own."""

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Description:
        """What there is to say of some leaves."""
        return cls(
            [leaf.name for leaf in leaves],
            [name_of(leaf.array.dtype) for leaf in leaves],
            [leaf.global_shape for leaf in leaves],
            {number: leaf.sharded_box for number, leaf in enumerate(leaves) if leaf.sharded_box is not None},
            [number for number, leaf in enumerate(leaves) if leaf.is_per_rank],
        )

    def digest(self) -> bytes:
        """What tells it from any other."""
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(self))

    def box(self, number: int) -> Box:
        """Which part of its array the rank has."""
        return Box(*self.boxes[number]) if number in self.boxes else whole(self.shapes[number])


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one rank writes: tensors, in this order, and the boxes of those that it does not write as a whole."""

    tensors: list[int]
    boxes: dict[int, BoxText]

    def box(self, place: int, shape: Shape) -> Box:
        """Of which part of its tensor a piece is."""
        return Box(*self.boxes[place]) if place in self.boxes else whole(shape)


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """All tensors of the checkpoint, and who writes what of them."""

    tensors: Tensors
    numbers: list[list[int]]
    """By rank: which of the tensors each of its arrays is, in the order of its tree."""
    shares: list[Share]


def plan(descriptions: Sequence[Description], copies: int = 1) -> Plan:
    """Who writes what, from what all ranks have."""
    if len(descriptions) == 1 and not descriptions[0].boxes:
        return _alone(descriptions[0])
    table = _Table()
    numbers = [table.enter(rank, description) for rank, description in enumerate(descriptions)]
    _note_splits(table.tensors, numbers, descriptions)
    return Plan(table.tensors, numbers, _shares(table, len(descriptions), copies))


def _alone(description: Description) -> Plan:
    """One rank that has all of everything writes all."""
    count = len(description.names)
    tensors = Tensors(description.names, description.dtypes, description.shapes, dict.fromkeys(description.private, 0))
    return Plan(tensors, [list(range(count))], [Share(list(range(count)), {})])


def _note_splits(tensors: Tensors, numbers: list[list[int]], descriptions: Sequence[Description]) -> None:
    """Tell what each rank has of the tensors that are given in parts; tensors that are split alike share that."""
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
    """The tensors of all ranks, and who has which parts of them."""

    def __init__(self) -> None:
        self.tensors = Tensors([], [], [], {}, [], {})
        self.holders: list[dict[Box, list[int]]] = []
        self._number: dict[tuple[str, int], int] = {}

    def enter(self, rank: int, description: Description) -> list[int]:
        """Take a rank's arrays in; returns their numbers."""
        private = frozenset(description.private)
        numbers = []
        for place, name in enumerate(description.names):
            owner = rank if place in private else -1
            number = self._number.setdefault((name, owner), len(self._number))
            if number == len(self.holders):
                self._begin(name, description.dtypes[place], description.shapes[place], owner)
            else:
                self._require_alike(number, rank, description, place)
            self.holders[number].setdefault(description.box(place), []).append(rank)
            numbers.append(number)
        return numbers

    def _begin(self, name: str, dtype: str, shape: Shape, owner: int) -> None:
        if owner >= 0:
            self.tensors.ranks[len(self.holders)] = owner
        self.tensors.names.append(name)
        self.tensors.dtypes.append(dtype)
        self.tensors.shapes.append(tuple(shape))
        self.holders.append({})

    def _require_alike(self, number: int, rank: int, description: Description, place: int) -> None:
        known = self.tensors.dtypes[number], tuple(self.tensors.shapes[number])
        its = description.dtypes[place], tuple(description.shapes[place])
        if known != its:
            other = min(ranks[0] for ranks in self.holders[number].values())
            raise CheckpointException(
                f"{self.tensors.names[number]} is {its[0]} {its[1]} at rank {rank}, "
                f"and {known[0]} {known[1]} at rank {other}",
                code="checkpoint_ranks_differ",
                fix="give parts of one array as ShardedArray, and what every rank has for itself as PerRank",
            )


def _shares(table: _Table, ranks: int, copies: int) -> list[Share]:
    """What each rank writes."""
    shares = [Share([], {}) for _ in range(ranks)]
    common: defaultdict[tuple[int, ...], list[tuple[int, Box, int]]] = defaultdict(list)
    for number, held in enumerate(table.holders):
        shape = tuple(table.tensors.shapes[number])
        itemsize = dtype_of(table.tensors.dtypes[number]).itemsize
        _require_covered(table.tensors.names[number], shape, list(held))
        for box, holders in held.items():
            if len(holders) == 1:
                _give(shares[holders[0]], number, box, shape)
            else:
                common[tuple(holders)].append((number, box, box.volume * itemsize))
    for together, boxes in common.items():
        for who, number, box in _spread(table, boxes, len(together)):
            for copy in range(min(copies, len(together))):
                _give(shares[together[(who + copy) % len(together)]], number, box, tuple(table.tensors.shapes[number]))
    return shares


def _give(share: Share, number: int, box: Box, shape: Shape) -> None:
    if box != whole(shape):
        share.boxes[len(share.tensors)] = box
    share.tensors.append(number)


def _spread(table: _Table, boxes: list[tuple[int, Box, int]], ranks: int) -> Iterator[tuple[int, int, Box]]:
    """The boxes, cut where that is needed for each of the ranks to have as many bytes as the others."""
    total, at = sum(size for _, _, size in boxes), 0
    for number, box, size in boxes:
        first = at * ranks // total if total else 0
        last = max(first, (at + size - 1) * ranks // total) if size else first
        if first == last or size <= UNSPLIT_BYTES_MAX or not box.shape:
            yield (at + size // 2) * ranks // total if size else 0, number, box
        else:
            grid = grid_of(tuple(table.tensors.shapes[number]), dtype_of(table.tensors.dtypes[number]).itemsize)
            marks = [(who * total / ranks - at) / size for who in range(first + 1, last + 1)]
            yield from ((first + part, number, piece) for part, piece in _cut(box, grid, marks))
        at += size


def _cut(box: Box, grid: Grid, marks: list[float]) -> Iterator[tuple[int, Box]]:
    """A box cut along its first axis, near those fractions of it, between chunks; with the number of each piece."""
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
    """Refuse a tensor of which nobody has some part."""
    if any(box.shape == shape for box in boxes) or not math.prod(shape):
        return
    if sum(box.volume for box in boxes) < math.prod(shape) or not _covered(shape, boxes):
        raise invalid(
            f"the parts of {name} that the ranks have do not make up all of its shape {shape}",
            "look at the global_shape and the offset of each ShardedArray",
            code="checkpoint_incomplete",
        )


def _covered(shape: Shape, boxes: list[Box]) -> bool:
    """Whether the boxes cover everything: looked up in the grid that all their edges make."""
    edges = [
        sorted({0, size, *(e for box in boxes for e in (box.offset[axis], box.offset[axis] + box.shape[axis]))})
        for axis, size in enumerate(shape)
    ]
    cells = math.prod(len(one) - 1 for one in edges)
    if cells > CELLS_MAX:
        raise invalid(
            f"the parts of an array of shape {shape} are cut in {cells} ways", "cut along fewer axes, or in fewer parts"
        )
    places = [{edge: place for place, edge in enumerate(one)} for one in edges]
    is_covered = np.zeros([len(one) - 1 for one in edges], np.bool_)
    for box in boxes:
        if box.volume:
            where = zip(places, box.offset, box.shape, strict=True)
            is_covered[tuple(slice(place[start], place[start + size]) for place, start, size in where)] = True
    return bool(is_covered.all())
