"""How many failures a job has had, and how many it bears.

Law: a job is given up when more of its world have failed than its settings tolerate, or when world after world has come
to nothing; a committed step shows that it can go on, and ends the row.
"""

from __future__ import annotations

from dataclasses import dataclass

from forged.elastic.config import ElasticTrainingConfig, tolerated_failures
from forged.phrases import counted


@dataclass(slots=True)
class FailureBudget:
    """The failures of members of a world."""

    in_world: int = 0
    """Since it was committed."""
    in_a_row: int = 0
    """Without a committed step in between."""
    at_step: int = 0
    """How far the training was at the last one."""

    def count(self, step: int) -> None:
        """One more has failed."""
        self.in_world += 1
        self.in_a_row += 1
        self.at_step = step

    def stepped(self, step: int) -> bool:
        """A step was committed; tells whether that changes anything."""
        if not self.in_a_row or step <= self.at_step:
            return False
        self.in_a_row = 0
        return True

    def committed(self, step: int) -> None:
        """Another world holds, with so many steps behind it."""
        if step > self.at_step:
            # Only those in the world before may have come behind the step.
            self.in_a_row = min(self.in_a_row, self.in_world)
        self.in_world = 0
        self.at_step = min(self.at_step, step)

    def too_many(self, world: int, config: ElasticTrainingConfig) -> str | None:
        """Why the job is to be given up; None while it is not."""
        tolerated = tolerated_failures(world, config.failure_tolerance_percentage)
        if self.in_world > tolerated:
            return f"{self.in_world} of {world} workers failed, and {tolerated} may"
        if self.in_a_row and self.in_a_row >= config.max_consecutive_failures:
            return f"{counted(self.in_a_row, 'failure')} without a committed step in between"
        return None
