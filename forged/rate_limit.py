"""Limit the rate of reports and count the suppressed ones.

Every suppressed report is counted. The count is returned once: when the flood has ended, or about once per minute while
it lasts. Time is an argument.
"""

from __future__ import annotations

from forged.token_bucket import TokenBucket

COUNT_S = 60.0
"""The interval of counts during a flood."""


class RateLimit:
    """Admits up to a rate and burst, and counts the rest."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._bucket = TokenBucket(per_s, burst, now)
        self._suppressed = 0
        self._since = self._until = now

    def resize(self, per_s: float, burst: float) -> None:
        """Change rate and burst."""
        self._bucket.resize(per_s, burst)

    def admits(self, now: float) -> bool:
        """Whether the next report is admitted; otherwise it is counted."""
        if self._suppressed and now == self._until:
            # Fast path: many reports at the same moment.
            self._suppressed += 1
            return False
        if self._bucket.take(1, now):
            return True
        if not self._suppressed:
            self._since = now
        self._suppressed += 1
        self._until = now
        return False

    def count(self, now: float) -> int:
        """The number of suppressed reports if it is due, and reset it; to be called about once per second."""
        if not self._suppressed or (now - self._until < self._quiet_s and now - self._since < COUNT_S):
            return 0
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed

    @property
    def _quiet_s(self) -> float:
        """The time without suppression after which the flood has ended: until the bucket is full again."""
        bucket = self._bucket
        return bucket.burst / bucket.per_s if bucket.per_s else 0.0
