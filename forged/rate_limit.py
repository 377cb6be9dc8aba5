"""Rate limits: a token bucket, and a limit of reports that counts the suppressed ones. Time is an argument."""

from __future__ import annotations

COUNT_S = 60.0
"""The interval of counts during a flood."""


class TokenBucket:
    """A bucket that fills at `per_s` and holds `burst`."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._left = burst
        self._filled_at = now

    def resize(self, per_s: float, burst: float) -> None:
        """Change rate and burst."""
        self.per_s, self.burst = per_s, burst

    def take(self, amount: float, now: float) -> bool:
        """Take `amount` if it is available; returns whether it was."""
        self._left = min(self.burst, self._left + max(0.0, now - self._filled_at) * self.per_s)
        self._filled_at = max(self._filled_at, now)
        if amount > self._left:
            return False
        self._left -= amount
        return True


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
