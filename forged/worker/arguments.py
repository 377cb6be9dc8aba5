"""Numbers that a script gives, as what travels.

Law: who trains has the numbers of whatever it computes with; what comes out of here is Python's own, finite and not
negative, or a refusal that names the field.
"""

from __future__ import annotations

import math
import operator
from reprlib import repr as shortened
from typing import Any

from forged.errors import RequestRefused
from forged.net.protocol.messages import INTEGER_MAX


def rate(name: str, given: Any) -> float:
    """A number of any kind, such as a learning rate."""
    try:
        value = math.nan if isinstance(given, str | bytes | bytearray) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise RequestRefused(
            "number_invalid", f"{name} is {shortened(given)}", "give a finite number that is not negative"
        )
    return value


def count(name: str, given: Any, *, at_least: int = 0) -> int:
    """A whole number, such as that of samples."""
    try:
        value = operator.index(given)
    except TypeError:
        value = -1
    if not at_least <= value <= INTEGER_MAX:
        fix = f"give a whole number from {at_least} to {INTEGER_MAX}"
        raise RequestRefused("number_invalid", f"{name} is {shortened(given)}", fix)
    return value
