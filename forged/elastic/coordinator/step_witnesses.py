"""Which step counts as committed, by what the members of a world report.

Invariants:
- A step is committed by all members of a world or by none, so a second member can confirm it. The report of one member
  alone does not count, unless it is alone in its world.
"""

from __future__ import annotations

from dataclasses import dataclass

from forged.elastic.model import GlobalTrainingState
from forged.elastic.rescale.attempt import StopReport


@dataclass(slots=True)
class StepWitnesses:
    """The step reports of one world's members."""

    _furthest_worker: str = ""
    _step: int = 0

    def hear(self, worker: str, step: int, world_size: int) -> int:
        """Take a report; returns the step that two members confirm, or 0."""
        if world_size <= 1:
            return step
        before, is_confirmed = self._step, self._furthest_worker not in ("", worker)
        if step > before:
            self._furthest_worker, self._step = worker, step
        return min(step, before) if is_confirmed else 0

    def reset(self) -> None:
        """Forget all reports because another world is committed."""
        self._furthest_worker, self._step = "", 0


def state_at(state: GlobalTrainingState, stop: StopReport, now: float) -> GlobalTrainingState:
    """The training state as the state source has reported it."""
    return GlobalTrainingState(
        stop.epoch,
        stop.position,
        state.learning_rate if stop.learning_rate is None else stop.learning_rate,
        stop.global_batch_size or state.global_batch_size,
        state.active_worker_count,
        now,
    )


def state_after(state: GlobalTrainingState, step: int, now: float) -> GlobalTrainingState:
    """The training state after `step`, with all else unchanged."""
    return GlobalTrainingState(
        state.current_epoch,
        step,
        state.learning_rate,
        state.global_batch_size,
        state.active_worker_count,
        now,
    )
