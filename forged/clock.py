"""Time as an argument.

Law: nobody reads the time but through a `Clock`. `wall()` is for records that people read; `monotonic()` is for
deadlines and durations, means nothing outside this process, and starts anew after a restart.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Both kinds of time, in float seconds."""

    def wall(self) -> float:
        """Seconds since 1970, for records; it may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment of this process, for deadlines; it never jumps."""
        ...


class SystemClock:
    """The machine's clocks."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
