"""What is different between two checkpoints, tensor by tensor.

Law: where the checksums say that chunks are the same, nothing is read; what is read was verified. "Same" means to the
last bit. There are never more than a few chunks in memory.
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
from forged.checkpoint.loading.read_plan import Index
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.thread_pool import run_all

Array = np.ndarray[Any, Any]
ELEMENTS_AT_ONCE = 1 << 13
"""So few that what is worked out of them fits into memory that is used again and again."""
EXACT_BYTES = 4
"""Of integers of so many bytes all differences are exact as floats."""


class Kind(StrEnum):
    """How two tensors of one name differ."""

    SAME = "same"
    CHANGED = "changed"
    """Same shape and type, other values."""
    UNLIKE = "unlike"
    """Another shape or type."""
    ONLY_IN_A = "only_in_a"
    ONLY_IN_B = "only_in_b"


@dataclass(frozen=True, slots=True)
class Amount:
    """How much two tensors of the same shape and type differ."""

    differing: int = 0
    """Elements whose bits differ."""
    max_abs: float | None = None
    """The largest difference of two numbers; None where nothing differs, or no number does."""
    norm: float | None = None
    """The square root of the sum of the squares of all differences."""
    nan_on_one_side: int = 0
    """Elements that are not a number in one of the two."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What there is to say of a tensor."""

    name: str
    rank: int | None
    """Whose own it is; None where it is no rank's own."""
    kind: Kind
    a: tuple[str, Shape] | None
    """Its type and shape in the first checkpoint; None if it is not there."""
    b: tuple[str, Shape] | None
    amount: Amount = Amount()

    @property
    def elements(self) -> int:
        """How many there are, in the first checkpoint that has it."""
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
    """All tensors of both whose names are wanted: those of the first in its order, then those of the second alone."""
    comparing = _Comparing(a, b, token)
    there, here = _numbers(b.manifest, wanted), _numbers(a.manifest, wanted)
    for (name, rank), number in here.items():
        token.check()
        its = _described(a.manifest, number)
        if (name, rank) not in there:
            yield Difference(name, rank, Kind.ONLY_IN_A, its, None)
            continue
        other = there[name, rank]
        others = _described(b.manifest, other)
        if its != others:
            yield Difference(name, rank, Kind.UNLIKE, its, others)
        else:
            amount = comparing.compare(number, other)
            yield Difference(name, rank, Kind.CHANGED if amount.differing else Kind.SAME, its, others, amount)
    for (name, rank), number in there.items():
        if (name, rank) not in here:
            yield Difference(name, rank, Kind.ONLY_IN_B, None, _described(b.manifest, number))


class _Comparing:
    """Two checkpoints that are being compared."""

    def __init__(self, a: Side, b: Side, token: CancelToken) -> None:
        self._a = a.storage, Index(a.manifest)
        self._b = b.storage, Index(b.manifest)
        self._token = token

    def compare(self, tensor: int, other: int) -> Amount:
        """Two tensors of the same shape and type."""
        ours, theirs = _digests(self._a[1], tensor), _digests(self._b[1], other)
        tally = _Tally()
        if ours == theirs:
            return tally.amount()
        shape, dtype = self._a[1].manifest.tensors.shapes[tensor], dtype_of(self._a[1].manifest.tensors.dtypes[tensor])
        cells = (
            box
            for box in chunks(whole(shape), grid_of(shape, dtype.itemsize))
            if box not in ours or ours[box] != theirs.get(box)
        )

        def compare(box: Box) -> None:
            tally.add(self._read(self._a, tensor, box), self._read(self._b, other, box))

        run_all(compare, cells, self._token)
        return tally.amount()

    def _read(self, side: tuple[Storage, Index], tensor: int, box: Box) -> Array:
        return fetch(*side, [tensor], self._token, boxes={0: box}, threads=1).arrays[0].reshape(-1)


class _Tally:
    """What the chunks of a tensor come to; several threads add theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._differing = 0
        self._nan_on_one_side = 0
        self._max_abs: float | None = None
        self._squares = 0.0

    def add(self, a: Array, b: Array) -> None:
        """Count two chunks in; a little at a time, because new memory costs more than the sums."""
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
        """What they have come to."""
        norm = None if self._max_abs is None else math.sqrt(self._squares)
        return Amount(self._differing, self._max_abs, norm, self._nan_on_one_side)


def _numbers(manifest: Manifest, wanted: Callable[[str], bool]) -> dict[tuple[str, int | None], int]:
    tensors = manifest.tensors
    return {(name, tensors.ranks.get(number)): number for number, name in enumerate(tensors.names) if wanted(name)}


def _described(manifest: Manifest, tensor: int) -> tuple[str, Shape]:
    return manifest.tensors.dtypes[tensor], tuple(manifest.tensors.shapes[tensor])


def _digests(index: Index, tensor: int) -> dict[Box, bytes]:
    """The checksums of all chunks that there are of a tensor."""
    found: dict[Box, bytes] = {}
    for number, place in index.pieces_of(tensor):
        layout = index.layout(number)
        boxes = chunks(layout.piece_box(place), layout.grid(place))
        for chunk, box in enumerate(boxes, layout.first_chunks[place]):
            found[box] = layout.digest(chunk)
    return found


def _differing(a: Array, b: Array) -> Array:
    """Which elements have other bits."""
    size = a.itemsize
    if size in {1, 2, 4, 8}:
        elements: Array = np.not_equal(a.view(f"u{size}"), b.view(f"u{size}"))
        return elements
    bytes_of_them = np.not_equal(a.view(np.uint8).reshape(a.size, size), b.view(np.uint8).reshape(b.size, size))
    differs: Array = np.logical_or.reduce(bytes_of_them, axis=1)
    return differs


def _distances(a: Array, b: Array) -> Array | None:
    """How far elements are apart; NaN where one of two is, and nothing where both are. None for texts."""
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
    """Those of integers, none of which wraps around."""
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
