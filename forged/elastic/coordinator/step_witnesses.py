"""How far a job is, by what its workers say of themselves.

Law: a step is committed by all of a world or by nobody, so a second worker can tell of it, too. What one alone says is
not believed: its library may be out of its mind. Who is alone in its world has no other witness.
"""

from __future__ import annotations

from dataclasses import dataclass

from forged.elastic.model import GlobalTrainingState
from forged.elastic.rescale.attempt import StopReport


@dataclass(slots=True)
class StepWitnesses:
    """What the members of a world have said."""

    _furthest: str = ""
    """Who says that most is committed."""
    _step: int = 0

    def hear(self, worker: str, step: int, world: int) -> int:
        """Take a worker's word in a world of that size; returns how many steps it bears out to be committed."""
        if world <= 1:
            return step
        before, others = self._step, self._furthest not in ("", worker)
        if step > before:
            self._furthest, self._step = worker, step
        return min(step, before) if others else 0

    def begin_anew(self) -> None:
        """Another world holds."""
        self._furthest, self._step = "", 0


def state_at(state: GlobalTrainingState, stop: StopReport, now: float) -> GlobalTrainingState:
    """The job's state as it is where its source has stopped."""
    return GlobalTrainingState(
        stop.epoch,
        stop.position,
        stop.learning_rate or state.learning_rate,
        stop.global_batch_size or state.global_batch_size,
        state.active_worker_count,
        now,
    )


def state_behind(state: GlobalTrainingState, step: int, now: float) -> GlobalTrainingState:
    """The job's state when so many steps are committed, and nothing else is known to have changed."""
    return GlobalTrainingState(
        state.current_epoch,
        step,
        state.learning_rate,
        state.global_batch_size,
        state.active_worker_count,
        now,
    )
