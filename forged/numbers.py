"""Plain numbers of what callers pass: Python's own, and those of libraries such as numpy.

Invariants:
- What is no such number is None; the caller refuses it in its own words.
"""

from __future__ import annotations

import math
import operator
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
