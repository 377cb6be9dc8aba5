"""Checks of the numbers that a training script passes.

Invariants:
- Numbers of other libraries, such as numpy's, become Python's own.
- A number that is not finite, or is negative, is refused with the name of its field.
"""

from __future__ import annotations

import math
import operator
from reprlib import repr as shortened
from typing import Any

from forged.errors import RequestRefused
from forged.net.protocol.messages import INTEGER_MAX


def rate(name: str, given: Any) -> float:
    """A finite number that is not negative, such as a learning rate."""
    try:
        value = math.nan if isinstance(given, str | bytes | bytearray) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise RequestRefused(
            "number_invalid",
            f"{name} must be finite and >= 0, got {shortened(given)}",
            "pass a number within these limits",
        )
    return value


def count(name: str, given: Any, *, at_least: int = 0) -> int:
    """An integer within limits, such as a number of samples."""
    try:
        value = operator.index(given)
    except TypeError:
        value = -1
    if not at_least <= value <= INTEGER_MAX:
        limits = f"an integer from {at_least} to {INTEGER_MAX}"
        raise RequestRefused(
            "number_invalid", f"{name} must be {limits}, got {shortened(given)}", "pass a number within these limits"
        )
    return value
