"""Select the cases of a sweep: a fault at each of many moments, in each of several ways.

A normal run covers every moment with some of the ways; `FORGED_WHOLE=1` (set by `make soak`) covers every moment with
all ways. The selection is deterministic.
"""

from __future__ import annotations

import os

WHOLE = os.environ.get("FORGED_WHOLE") == "1"


def share(count: int, way: int, ways: int, *, first: int = 0) -> range:
    """The moments of `count` at which this of the `ways` is tried."""
    return range(first, count) if WHOLE else range(first + way % ways, count, ways)
