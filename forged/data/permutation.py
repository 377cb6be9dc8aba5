"""A pseudo-random permutation of any size, computed without a table.

Invariants:
- A permutation depends only on its size and key: it is the same on every machine and in every version.
- The value at an index is computed from the index alone, in O(1) memory, so a worker can start anywhere.

Each round multiplies by an odd number, adds another and folds the upper half of the bits into the lower half. All of
this is invertible, so two indices never collide. A value beyond the size goes through the rounds again until it is
inside (cycle walking), which is again a permutation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from forged.errors import Problem, RequestRefused
from forged.numbers import as_integer

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]
Chosen = Places | slice
Turn = Callable[[Words, Chosen], None]

SIZE_MAX = 1 << 63
KEY_MAX = (1 << 64) - 1
ROUNDS = 6
ROUNDS_OF_FEW = 20
FEW_BITS = 12
"""Few bits mix worse and need more rounds."""
PIECE = 1 << 15
"""A block of this size stays in the CPU cache through all rounds."""

PIECE_OF_EACH = 1 << 11
"""Smaller, because each index has a key and round constants of its own."""

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Permutation:
    """The numbers below `size` in an order that depends on `key`, such as a seed and an epoch."""

    def __init__(self, size: int, *key: int) -> None:
        self.size = check_whole("permutation_invalid", "size", size, 0, SIZE_MAX)
        words = [check_whole("permutation_invalid", "key", word, 0, KEY_MAX) for word in key]
        self._rounds = _Rounds.of(self.size, *words)

    def at(self, indices: npt.ArrayLike) -> Indices:
        """The values at these indices."""
        found = _within(indices, self.size)
        _go_round(found, self.size, self._rounds.forwards)
        return found.view(np.int64)

    def span(self, start: int, stop: int) -> Indices:
        """The values from `start` up to `stop`, exclusive."""
        if not 0 <= start <= stop <= self.size:
            raise _outside(f"{start} to {stop}", self.size)
        found = np.arange(start, stop, dtype=np.uint64)
        _go_round(found, self.size, self._rounds.forwards)
        return found.view(np.int64)


def permute_each(size: int, indices: Indices, *key: int | Words) -> Indices:
    """The value at each index in a permutation of its own; a word of the key may be an array with one per index.

    Equal to `Permutation(size, *key).at(index)` with the words of that index.
    """
    found = _within(indices, size)
    for start in range(0, len(found), PIECE_OF_EACH):
        piece = slice(start, start + PIECE_OF_EACH)
        words = (word if isinstance(word, int) else word[piece] for word in key)
        _go_round(found[piece], size, _Rounds.of(size, *words).forwards)
    return found.view(np.int64)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """The constants of each round: one for all indices, or one for each."""

    bits: int
    factors: Words
    addends: Words

    @classmethod
    def of(cls, size: int, *key: int | Words) -> Self:
        bits = max(1, (size - 1).bit_length())
        state = np.zeros(1, np.uint64)
        for word in (size, *key):
            state = _mixed((state ^ np.asarray(word, np.uint64)) + np.uint64(_GAMMA))
        rounds = ROUNDS_OF_FEW if bits <= FEW_BITS else ROUNDS
        steps = np.arange(1, 2 * rounds + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        numbers = _mixed(state + steps[:, None]) >> np.uint64(64 - bits)
        return cls(bits, numbers[:rounds] | np.uint64(1), numbers[rounds:])

    def forwards(self, values: Words, chosen: Chosen) -> None:
        """Apply the rounds in place; `chosen` selects the constants of the values where each has its own."""
        mask, half = self._mask_and_half()
        scratch = np.empty_like(values)
        for factor, addend in zip(self._of(self.factors, chosen), self._of(self.addends, chosen), strict=True):
            np.multiply(values, factor, out=values)
            np.add(values, addend, out=values)
            np.bitwise_and(values, mask, out=values)
            np.right_shift(values, half, out=scratch)
            np.bitwise_xor(values, scratch, out=values)

    def _mask_and_half(self) -> tuple[np.uint64, np.uint64]:
        return np.uint64((1 << self.bits) - 1), np.uint64((self.bits + 1) // 2)

    @staticmethod
    def _of(numbers: Words, chosen: Chosen) -> Words:
        return numbers[:, 0] if numbers.shape[1] == 1 else numbers[:, chosen]


def check_whole(code: str, name: str, number: object, least: int, most: int) -> int:
    """The number as an int; refused outside these bounds."""
    found = as_integer(number)
    if found is None or not least <= found <= most:
        problem = Problem(name, number, f"a whole number from {least} to {most}")
        raise RequestRefused(code, str(problem))
    return found


def _go_round(values: Words, size: int, turn: Turn) -> None:
    """Apply the rounds in place until all values are inside."""
    outside = np.empty(0, np.intp)
    for start in range(0, len(values), PIECE):
        piece = slice(start, start + PIECE)
        turn(values[piece], piece)
        outside = np.concatenate([outside, start + np.flatnonzero(values[piece] >= np.uint64(size))])
        # The rest of several blocks goes together, because a small batch costs as much as a large one.
        while outside.size >= PIECE:
            outside = _go_again(values, outside, size, turn)
    while outside.size:
        outside = _go_again(values, outside, size, turn)


def _go_again(values: Words, outside: Places, size: int, turn: Turn) -> Places:
    """Apply the rounds once to the values outside; returns those that are still outside."""
    again = values[outside]
    turn(again, outside)
    values[outside] = again
    return outside[again >= np.uint64(size)]


def _within(indices: npt.ArrayLike, size: int) -> Words:
    """A mutable copy of the indices; refused if any is outside."""
    given = np.asarray(indices)
    if given.size == 0:
        return np.empty(0, np.uint64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise _outside(f"an array of {given.dtype} in {given.ndim} dimensions", size)
    if given.min() < 0 or int(given.max()) >= size:
        raise _outside(f"{given.min()} to {given.max()}", size)
    return given.astype(np.uint64)


def _outside(what: str, size: int) -> RequestRefused:
    text = (
        f"an index of a permutation of {size} must be a whole number from 0 to {size - 1}, got {what}"
        if size
        else f"an empty permutation has no index, got {what}"
    )
    return RequestRefused("permutation_index", text)


def _mixed(words: Words) -> Words:
    """The finalizer of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
