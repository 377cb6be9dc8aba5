"""How much of a sweep is gone through: what is tried at each of many moments, in each of several ways.

Law: every run tries something at every moment, each time in a few of the ways; `FORGED_WHOLE=1`, which `make soak`
says, has it tried at every moment in all of them. What a run tries is the same each time.
"""

from __future__ import annotations

import os

WHOLE = os.environ.get("FORGED_WHOLE") == "1"


def share(count: int, way: int, ways: int, *, first: int = 0) -> range:
    """The moments, of so many, at which it is tried in this way: of so many ways one after the other has its turn."""
    return range(first, count) if WHOLE else range(first + way % ways, count, ways)
