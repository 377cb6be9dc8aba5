"""What an exception in a step means: its world is over and the step is repeated, or the script has failed.

Invariants:
- An exception in a step whose world is over is that world's end. The evidence is the library's: a connection of the
  world has ended, or the daemon has said that a member is gone or that the world changes.
- Evidence may arrive after the exception, so it is awaited for `EVIDENCE_TIMEOUT_S`. Any other exception is the
  script's own and is raised unchanged.
- After the commit an exception is the script's own, whatever it is, and is raised at once. The state may be half
  changed then: the worker holds none.
- `StepAborted` that the script raises voids the step at all ranks. Their world ends, and no worker is blamed.
"""

from __future__ import annotations

import anyio

from forged.errors import RequestRefused, describe
from forged.log import Log
from forged.worker.errors import ABORTED, STEP_VOIDED, StepAborted
from forged.worker.worker_state.session_state import SessionState

EVIDENCE_TIMEOUT_S = 3.0
"""How long an exception in a step is held back until a member of its world is known to be lost."""
DEPARTURE_TIMEOUT_S = 1.5
"""For how much of that time a member that leaves counts, too. Ranks that run into the same error wait for as long as
each other, and the first one that gives up must not be the evidence of the rest."""
LOOK_INTERVAL_S = 0.02


class StepErrors:
    """Decides about the exceptions that leave the steps of one worker."""

    def __init__(self, state: SessionState, log: Log) -> None:
        self._state = state
        self._log = log

    def decide(self, step: int, error: Exception) -> bool:
        """Whether the step is void and is repeated, by what is known now."""
        if self._state.current_world.is_committed:
            self.give_up_state(step, describe(error))
            return False
        if isinstance(error, StepAborted):
            self._void(step, error)
            return True
        if isinstance(error, RequestRefused) or not (why := self._evidence()):
            return False
        self._repeat(step, error, why)
        return True

    async def decide_in_time(self, step: int, error: Exception) -> bool:
        """Whether the step is void and is repeated; waits for evidence in a world of several ranks."""
        is_committed = self._state.current_world.is_committed
        if self.decide(step, error):
            return True
        if isinstance(error, RequestRefused) or is_committed or not self._may_learn_more:
            return False
        self._log.warning(
            "an exception left the step; waiting for evidence that a worker of its world is lost",
            step=step,
            wait_s=EVIDENCE_TIMEOUT_S,
            error=describe(error),
        )
        began_at = anyio.current_time()
        while (waited_s := anyio.current_time() - began_at) < EVIDENCE_TIMEOUT_S:
            await anyio.sleep(LOOK_INTERVAL_S)
            if why := self._evidence(with_departures=waited_s < DEPARTURE_TIMEOUT_S):
                self._repeat(step, error, why)
                return True
        self._log.warning(
            "an exception has left the step, and no other worker is lost: the script has failed",
            step=step,
            error=describe(error),
        )
        return False

    def give_up_state(self, step: int, why: str) -> None:
        """The script has not finished a step that it has committed: its state is that of no step."""
        self._state.progress.give_up_state()
        current_world = self._state.current_world
        current_world.is_committed = False
        current_world.void_step(
            f"the script of {self._state.worker.id} did not finish step {step} after its commit: {why}"
        )

    def _void(self, step: int, error: StepAborted) -> None:
        current_world = self._state.current_world
        if not current_world.is_void:
            current_world.void_step(f"the script of {self._state.worker.id} voided step {step}: {error.reason}")

    def _repeat(self, step: int, error: Exception, why: str) -> None:
        self._log.warning(
            "the step is repeated, because its world is over", step=step, reason=why, error=describe(error)
        )
        self._state.current_world.void_step(
            f"the script of {self._state.worker.id} raised an exception in step {step}, and {why}: {describe(error)}"
        )

    @property
    def _may_learn_more(self) -> bool:
        """Whether the world has other members, and has not ended by an error in the script."""
        world = self._state.current_world.world
        return world is not None and world.size > 1 and world.ending is None

    def _evidence(self, *, with_departures: bool = True) -> str:
        """Why the world of the present step is over; empty while nothing shows that."""
        view, current_world = self._state.view, self._state.current_world
        world = current_world.world
        if view.end is not None or view.completed is not None:
            return "the training has ended"
        if current_world.is_void or world is None:
            return "the step was aborted"
        if world.size == 1:
            return ""
        ending = world.ending
        if ending is not None and (ending.peer or ending.code == STEP_VOIDED):
            return ending.reason
        if not with_departures:
            return ""
        if ending is not None and ending.code == ABORTED:
            return ending.reason
        if ending is None and current_world.over is not None:
            # At the hub the world does not end before its next collective when a member has left.
            return current_world.over.reason
        if view.lost:
            return f"{view.lost} failed or left"
        return "the job is rescaling" if view.rescaling or view.committed is not None else ""
