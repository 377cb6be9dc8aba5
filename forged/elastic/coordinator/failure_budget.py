"""How many failures a job has had since its last commit, and when they are too many.

Invariants:
- A job is aborted when more members of its world have failed than its settings tolerate, or after too many failures
  without a committed step in between.
- In a job with groups a group counts as one member, and fails when the first of its members does.
"""

from __future__ import annotations

from dataclasses import dataclass

from forged.elastic.config import ElasticTrainingConfig, tolerated_failures
from forged.phrases import counted


@dataclass(slots=True)
class FailureBudget:
    """The failures of world members."""

    in_world: int = 0
    """Since the world was committed."""
    in_a_row: int = 0
    """Without a committed step in between."""
    at_step: int = 0
    """The committed step at the last failure."""

    def count(self, step: int) -> None:
        self.in_world += 1
        self.in_a_row += 1
        self.at_step = step

    def step_committed(self, step: int) -> bool:
        """Returns whether that changes anything."""
        if not self.in_a_row or step <= self.at_step:
            return False
        self.in_a_row = 0
        return True

    def world_committed(self, step: int) -> None:
        if step > self.at_step:
            # Only failures in the previous world can have happened after that step.
            self.in_a_row = min(self.in_a_row, self.in_world)
        self.in_world = 0
        self.at_step = min(self.at_step, step)

    def exceeded(self, size: int, config: ElasticTrainingConfig, members: str = "workers") -> str | None:
        """Why the job must be aborted; None while the failures are tolerated. `size` counts the world's `members`."""
        tolerated = tolerated_failures(size, config.failure_tolerance_percentage)
        if self.in_world > tolerated:
            return f"{self.in_world} of {size} {members} failed; limit {tolerated}"
        if self.in_a_row and self.in_a_row >= config.max_consecutive_failures:
            return f"{counted(self.in_a_row, 'failure')} without a committed step in between"
        return None
