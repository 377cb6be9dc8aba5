"""The clock port: all code gets the time from a `Clock`.

`wall()` is for records. `monotonic()` is for deadlines and durations; its values are valid in one process only.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall and monotonic time in seconds."""

    def wall(self) -> float:
        """Seconds since 1970; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never jumps."""
        ...


class SystemClock:
    """The system's clocks."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
