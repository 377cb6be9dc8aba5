"""Whole numbers that a script gives.

Law: whatever counts as one in Python counts here, numpy's too, and becomes Python's own; truth values are none.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex, cast

import numpy as np


def whole(number: object) -> int | None:
    """The number as Python's own; None where it is no whole one."""
    if type(number) is int:
        return number
    if isinstance(number, (bool, np.bool_)):
        return None
    try:
        return operator.index(cast("SupportsIndex", number))
    except TypeError:
        return None
