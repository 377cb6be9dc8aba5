"""Checks of whole numbers from scripts.

Numpy integers count, and become Python's int; booleans do not.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex, cast

import numpy as np


def whole(number: object) -> int | None:
    """The number as an int; None if it is not a whole number."""
    if type(number) is int:
        return number
    if isinstance(number, (bool, np.bool_)):
        return None
    try:
        return operator.index(cast("SupportsIndex", number))
    except TypeError:
        return None
