"""What is told one by one until there is too much of it, and then by number.

Law: nothing is left out without being counted, and the count is told once: when the flood is over, or while it goes on
about once a minute. Time is an argument.
"""

from __future__ import annotations

from forged.token_bucket import TokenBucket

COUNT_S = 60.0
"""How long a flood goes on before what was left out is told in the middle of it."""


class RateLimit:
    """Lets through as much as its allowance, and counts the rest."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._allowance = TokenBucket(per_s, burst, now)
        self._left_out = 0
        self._since = self._until = now

    def resize(self, per_s: float, burst: float) -> None:
        """Let through more, or less, from now on."""
        self._allowance.resize(per_s, burst)

    def admits(self, now: float) -> bool:
        """Whether the next one is let through; if not, it is counted."""
        if self._left_out and now == self._until:
            # Nothing has come in since the last one was left out; of many at once this is the usual case.
            self._left_out += 1
            return False
        if self._allowance.take(1, now):
            return True
        if not self._left_out:
            self._since = now
        self._left_out += 1
        self._until = now
        return False

    def count(self, now: float) -> int:
        """How many were left out, once that is to be told: then they are forgotten. Ask about once a second."""
        if not self._left_out or (now - self._until < self._quiet_s and now - self._since < COUNT_S):
            return 0
        left_out, self._left_out = self._left_out, 0
        return left_out

    @property
    def _quiet_s(self) -> float:
        """For how long nothing must have been left out before the flood is over: until the allowance is whole again."""
        allowance = self._allowance
        return allowance.burst / allowance.per_s if allowance.per_s else 0.0
