"""Bounds the work that requests can cause: for each job, and for all jobs together."""

from __future__ import annotations

from forged.rate_limit import TokenBucket


class JobBudgets:
    """A budget of each job, and twice as much for all jobs, so that no job uses up what the others need."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._all = TokenBucket(2 * per_s, 2 * burst, 0.0)
        self._of_job: dict[str, TokenBucket] = {}

    def take(self, job: str, amount: float, now: float) -> bool:
        """Take so much for a job if both budgets have it; returns whether they had."""
        own = self._of_job.get(job)
        if own is None:
            own = self._of_job[job] = TokenBucket(self._per_s, self._burst, now)
        return own.take(amount, now) and self._all.take(amount, now)

    def forget(self, job: str) -> None:
        self._of_job.pop(job, None)
