"""A token bucket: a rate limit that allows bursts. Time is an argument."""

from __future__ import annotations


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
