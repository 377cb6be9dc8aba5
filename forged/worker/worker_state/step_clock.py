"""Where one worker's time goes, from its first step on.

Invariants:
- Each moment since the first step has one cause. What a step has spent counts by cause once the step is committed, and
  as aborted if it is not.
- A save of a checkpoint counts as one, with the meetings in it.
- A step costs a few additions and no lock. A total that is read while another thread measures may miss the moment that
  is just being added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forged.metrics.messages import TimeSpent

STEP, WAITING, ABORTED, RESCALE, STANDSTILL, CHECKPOINT, WORKERS, PAUSED, SCRIPT = TimeSpent.__struct_fields__


class StepClock:
    """Measures one worker in one session; `now` is a monotonic clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.steps = 0
        """Committed steps since the first."""
        self._now = now
        self._spent = dict.fromkeys(TimeSpent.__struct_fields__, 0.0)
        self._in_step = {STEP: 0.0, WAITING: 0.0, CHECKPOINT: 0.0}
        self._is_stepping = False
        self._stretch: tuple[float, str] | None = None
        """When the present stretch of time began, and its cause; None before the first step."""

    @property
    def has_begun(self) -> bool:
        return self._stretch is not None

    def spent(self) -> TimeSpent:
        """All time since the first step; that of the present step as if it will be committed."""
        spent = dict(self._spent)
        for cause, seconds in self._in_step.items():
            spent[cause] += seconds
        if self._stretch is not None:
            began_at, cause = self._stretch
            spent[cause] += max(0.0, self._now() - began_at)
        return TimeSpent(**spent)

    def begin_step(self) -> None:
        """The script begins a step."""
        self._switch(STEP)
        self._is_stepping = True

    def end_step(self, *, is_committed: bool) -> None:
        """The step has ended; the script goes on after it."""
        if not self._is_stepping:
            return
        self._switch(SCRIPT)
        self._is_stepping = False
        self.steps += is_committed
        for cause, seconds in self._in_step.items():
            self._spent[cause if is_committed else ABORTED] += seconds
            self._in_step[cause] = 0.0

    def wait_between_steps(self, cause: str) -> None:
        """The worker waits for something before its next step. No effect before the first one."""
        if self._stretch is not None:
            self.end_step(is_committed=False)
            self._switch(cause)

    def begin_meeting(self) -> bool:
        """The worker waits for the other ranks until `end_meeting`, which is to be called if this returns true.

        False outside of a step, where the time keeps its cause.
        """
        is_measured = self._is_stepping and self._stretch is not None and self._stretch[1] == STEP
        if is_measured:
            self._switch(WAITING)
        return is_measured

    def end_meeting(self) -> None:
        self._switch_back(WAITING)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The script waits for a save of a checkpoint inside the block."""
        before = None if self._stretch is None else self._stretch[1]
        if before in (None, CHECKPOINT):
            yield
            return
        self._switch(CHECKPOINT)
        try:
            yield
        finally:
            self._switch_back(CHECKPOINT)

    def _switch_back(self, cause: str) -> None:
        """End a block, unless the step has ended within it."""
        if self._stretch is not None and self._stretch[1] == cause:
            self._switch(STEP if self._is_stepping else SCRIPT)

    def _switch(self, cause: str) -> None:
        now = self._now()
        if self._stretch is not None:
            began_at, before = self._stretch
            of = self._in_step if self._is_stepping else self._spent
            of[before] += max(0.0, now - began_at)
        self._stretch = now, cause
