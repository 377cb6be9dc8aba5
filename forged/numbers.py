"""Plain numbers of what callers pass: Python's own, and those of libraries such as numpy.

Invariants:
- What is no such number is None, or is refused by the refusal that the caller gives.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def as_integer(value: Any) -> int | None:
    """The value as an integer. Numpy integers count, booleans do not."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """The value as a float; it may be infinite or NaN."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def as_finite(value: Any) -> float | None:
    """The value as a float that is neither infinite nor NaN."""
    number = as_float(value)
    return number if number is not None and math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class NumberChecks:
    """Checks of named numbers, with the refusal of a package."""

    refusal: Callable[[str, object, str], Exception]
    """Made from the name, the value, and what is wanted."""

    def count(self, name: str, value: Any, most: int) -> int:
        """The value as an integer from 0 to `most`."""
        number = as_integer(value)
        if number is None or not 0 <= number <= most:
            raise self.refusal(name, value, f"an integer from 0 to {most}")
        return number

    def time(self, name: str, value: Any) -> float:
        """The time as finite seconds: NaN has no place in an order."""
        seconds = as_finite(value)
        if seconds is None:
            raise self.refusal(name, value, "finite seconds")
        return seconds
