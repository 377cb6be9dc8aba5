"""Differences between two checkpoints, tensor by tensor.

Invariants:
- Chunks with equal checksums are not read; what is read is verified.
- Two tensors are the same only if they are equal bit for bit.
- Memory is bounded by a few chunks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from forged.checkpoint.format.boxes import Box, Shape, chunks, grid_of, whole
from forged.checkpoint.format.dtypes import EXTENDED, dtype_of
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.loading.fetching import fetch
from forged.checkpoint.loading.manifest_index import Index
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.thread_pool import run_all

Array = np.ndarray[Any, Any]
ELEMENTS_AT_ONCE = 1 << 13
"""Small enough that intermediate arrays stay in reused memory."""
EXACT_BYTES = 4
"""Differences of integers up to this size are exact as float64."""


class DifferenceKind(StrEnum):
    """How two tensors of one name differ."""

    SAME = "same"
    CHANGED = "changed"
    """Same shape and type, different values."""
    INCOMPATIBLE = "incompatible"
    """Different shape or type."""
    ONLY_IN_A = "only_in_a"
    ONLY_IN_B = "only_in_b"


@dataclass(frozen=True, slots=True)
class Amount:
    """How much two tensors of the same shape and type differ."""

    differing: int = 0
    """Elements whose bits differ."""
    max_abs: float | None = None
    """The largest difference of two numbers; None if no numbers differ."""
    norm: float | None = None
    """The Euclidean norm of the differences."""
    nan_on_one_side: int = 0
    """Elements that are NaN in only one of the two."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison of one tensor."""

    name: str
    rank: int | None
    """Its rank, if it is a per-rank tensor."""
    kind: DifferenceKind
    a: tuple[str, Shape] | None
    """Type and shape in the first checkpoint; None if it is absent there."""
    b: tuple[str, Shape] | None
    amount: Amount = Amount()

    @property
    def elements(self) -> int:
        """The number of elements, in the first checkpoint that has the tensor."""
        _, shape = self.a or self.b or ("", (0,))
        return math.prod(shape)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    storage: Storage
    manifest: Manifest


def differences(
    a: Side, b: Side, token: CancelToken, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[Difference]:
    """Compare all tensors whose names are wanted: those of the first checkpoint, then those only in the second."""
    comparison = _Comparison(a, b, token)
    in_a, in_b = _numbers(a.manifest, wanted), _numbers(b.manifest, wanted)
    for (name, rank), number in in_a.items():
        token.check()
        described_a = _described(a.manifest, number)
        if (name, rank) not in in_b:
            yield Difference(name, rank, DifferenceKind.ONLY_IN_A, described_a, None)
            continue
        other = in_b[name, rank]
        described_b = _described(b.manifest, other)
        if described_a != described_b:
            yield Difference(name, rank, DifferenceKind.INCOMPATIBLE, described_a, described_b)
        else:
            amount = comparison.compare(number, other)
            kind = DifferenceKind.CHANGED if amount.differing else DifferenceKind.SAME
            yield Difference(name, rank, kind, described_a, described_b, amount)
    for (name, rank), number in in_b.items():
        if (name, rank) not in in_a:
            yield Difference(name, rank, DifferenceKind.ONLY_IN_B, None, _described(b.manifest, number))


class _Comparison:
    """The comparison of two checkpoints."""

    def __init__(self, a: Side, b: Side, token: CancelToken) -> None:
        self._a = a.storage, Index(a.manifest)
        self._b = b.storage, Index(b.manifest)
        self._token = token

    def compare(self, tensor: int, other: int) -> Amount:
        """Compare two tensors of the same shape and type."""
        digests_a, digests_b = _digests(self._a[1], tensor), _digests(self._b[1], other)
        accumulator = _Accumulator()
        if digests_a == digests_b:
            return accumulator.amount()
        shape, dtype = self._a[1].manifest.tensors.shapes[tensor], dtype_of(self._a[1].manifest.tensors.dtypes[tensor])
        cells = (
            box
            for box in chunks(whole(shape), grid_of(shape, dtype.itemsize))
            if box not in digests_a or digests_a[box] != digests_b.get(box)
        )

        def compare(box: Box) -> None:
            accumulator.add(self._read(self._a, tensor, box), self._read(self._b, other, box))

        run_all(compare, cells, self._token)
        return accumulator.amount()

    def _read(self, side: tuple[Storage, Index], tensor: int, box: Box) -> Array:
        return fetch(*side, [tensor], self._token, boxes={0: box}, threads=1).arrays[0].reshape(-1)


class _Accumulator:
    """Sums up the differences of a tensor's chunks; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._differing = 0
        self._nan_on_one_side = 0
        self._max_abs: float | None = None
        self._squares = 0.0

    def add(self, a: Array, b: Array) -> None:
        """Add two chunks, in small portions because fresh memory costs more than the arithmetic."""
        for start in range(0, a.size, ELEMENTS_AT_ONCE):
            self._add(a[start : start + ELEMENTS_AT_ONCE], b[start : start + ELEMENTS_AT_ONCE])

    def _add(self, a: Array, b: Array) -> None:
        differs = _differing(a, b)
        count = int(np.count_nonzero(differs))
        if not count:
            return
        distances = _distances(a, b) if count == a.size else _distances(a[differs], b[differs])
        if distances is None:
            with self._lock:
                self._differing += count
            return
        is_nan = np.isnan(distances)
        nan = int(np.count_nonzero(is_nan))
        numbers = distances[~is_nan] if nan else distances
        with np.errstate(over="ignore"):
            max_abs, squares = float(numbers.max(initial=0)), float(np.einsum("i,i", numbers, numbers))
        with self._lock:
            self._differing += count
            self._nan_on_one_side += nan
            self._max_abs = max(self._max_abs or 0.0, max_abs)
            self._squares += squares

    def amount(self) -> Amount:
        """The totals over all tensors."""
        norm = None if self._max_abs is None else math.sqrt(self._squares)
        return Amount(self._differing, self._max_abs, norm, self._nan_on_one_side)


def _numbers(manifest: Manifest, wanted: Callable[[str], bool]) -> dict[tuple[str, int | None], int]:
    tensors = manifest.tensors
    return {(name, tensors.ranks.get(number)): number for number, name in enumerate(tensors.names) if wanted(name)}


def _described(manifest: Manifest, tensor: int) -> tuple[str, Shape]:
    return manifest.tensors.dtypes[tensor], tuple(manifest.tensors.shapes[tensor])


def _digests(index: Index, tensor: int) -> dict[Box, bytes]:
    """The checksums of a tensor's chunks, by box."""
    found: dict[Box, bytes] = {}
    for number, place in index.pieces_of(tensor):
        layout = index.layout(number)
        boxes = chunks(layout.piece_box(place), layout.grid(place))
        for chunk, box in enumerate(boxes, layout.first_chunks[place]):
            found[box] = layout.digest(chunk)
    return found


def _differing(a: Array, b: Array) -> Array:
    """Which elements differ in their bits."""
    size = a.itemsize
    if size in {1, 2, 4, 8}:
        elements: Array = np.not_equal(a.view(f"u{size}"), b.view(f"u{size}"))
        return elements
    bytes_of_them = np.not_equal(a.view(np.uint8).reshape(a.size, size), b.view(np.uint8).reshape(b.size, size))
    differs: Array = np.logical_or.reduce(bytes_of_them, axis=1)
    return differs


def _distances(a: Array, b: Array) -> Array | None:
    """The distances of elements: NaN where one of two is NaN, 0 where both are. None for text."""
    if a.dtype.name in EXTENDED:
        a, b = a.astype(np.float32), b.astype(np.float32)
    match a.dtype.kind:
        case "b":
            return np.ones(a.size)
        case "i" | "u" | "m" | "M":
            return _whole_distances(a, b)
        case "f" | "c":
            return _real_distances(a, b)
        case _:
            return None


def _whole_distances(a: Array, b: Array) -> Array:
    """Distances of integers, without overflow."""
    if a.itemsize <= EXACT_BYTES:
        return np.abs(np.subtract(a, b, dtype=np.float64))
    kind = np.dtype(np.uint64 if a.dtype.kind == "u" else np.int64)
    a, b = a.astype(kind), b.astype(kind)
    up, down = a.view(np.uint64) - b.view(np.uint64), b.view(np.uint64) - a.view(np.uint64)
    return np.where(a > b, up, down).astype(np.float64)


def _real_distances(a: Array, b: Array) -> Array:
    wide = np.promote_types(a.dtype, np.complex128 if a.dtype.kind == "c" else np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        distances: Array = np.abs(a.astype(wide) - b.astype(wide))
    distances[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
    return distances
