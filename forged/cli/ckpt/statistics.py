"""Statistics of an array, accumulated block by block.

Invariants:
- The order and size of the blocks change only the last digits.
- NaN and infinite elements are counted and otherwise ignored.
- Complex numbers have counts only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forged.checkpoint.format.dtypes import EXTENDED

Array = np.ndarray[Any, Any]
Number = int | float
ELEMENTS_AT_ONCE = 1 << 13


class Statistics:
    """The statistics of all elements given to `add`."""

    def __init__(self) -> None:
        self._finite = 0
        self._nan = 0
        self._infinite = 0
        self._zeros = 0
        self._low: Number | None = None
        self._high: Number | None = None
        self._mean = 0.0
        self._squares = 0.0
        """The sum of the squares of the distances from the mean."""

    def add(self, block: Array) -> None:
        """Add elements, in small portions because fresh memory costs more than the arithmetic."""
        flat = block.reshape(-1)
        for start in range(0, flat.size, ELEMENTS_AT_ONCE):
            self._add(flat[start : start + ELEMENTS_AT_ONCE])

    def _add(self, block: Array) -> None:
        numbers = _numbers(block)
        self._zeros += int(np.count_nonzero(numbers == 0))
        if numbers.dtype.kind in "fc":
            is_nan = np.isnan(numbers)
            is_finite = np.isfinite(numbers)
            self._nan += int(np.count_nonzero(is_nan))
            self._infinite += int(np.count_nonzero(~is_finite & ~is_nan))
            numbers = numbers[is_finite]
        if numbers.size and numbers.dtype.kind != "c":
            self._update_range(numbers)
            self._update_mean(numbers)

    def summary(self) -> dict[str, Any]:
        """All statistics; None for those that do not exist."""
        has_any = self._finite > 0
        return {
            "min": self._low,
            "max": self._high,
            "mean": self._mean if has_any else None,
            "std": math.sqrt(self._squares / self._finite) if has_any else None,
            "zeros": self._zeros,
            "nan": self._nan,
            "infinite": self._infinite,
        }

    def _update_range(self, numbers: Array) -> None:
        low, high = _number(numbers.min()), _number(numbers.max())
        self._low = low if self._low is None else min(self._low, low)
        self._high = high if self._high is None else max(self._high, high)

    def _update_mean(self, numbers: Array) -> None:
        """Combine mean and variance of two blocks (Chan's formula)."""
        count = self._finite + numbers.size
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(numbers.mean(dtype=np.float64))
            squares = float(np.square(numbers.astype(np.float64) - mean).sum())
        apart = mean - self._mean
        self._squares += squares + apart * apart * self._finite * numbers.size / count
        self._mean += apart * numbers.size / count
        self._finite = count


def has_statistics(dtype: np.dtype[Any]) -> bool:
    """Whether the elements are numbers."""
    return dtype.kind in "biufc" or dtype.name in EXTENDED


def plain_elements(array: Array) -> list[Any]:
    """Elements as JSON values; floats with the fewest digits that identify them."""
    if array.dtype.name in EXTENDED:
        array = array.astype(np.float32)
    flat = array.reshape(-1)
    if flat.dtype.kind in "biufSU":
        return [float(str(one)) for one in flat] if flat.dtype.kind == "f" else list(flat.tolist())
    return [one.tobytes() if flat.dtype.kind == "V" else str(one) for one in flat]


def _numbers(block: Array) -> Array:
    if block.dtype.name in EXTENDED:
        return block.astype(np.float32)
    return block.astype(np.uint8) if block.dtype.kind == "b" else block


def _number(value: Any) -> Number:
    return int(value) if value.dtype.kind in "iu" else float(str(value))
