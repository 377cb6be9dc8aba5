"""When a run saves: after so many steps without a question, or when rank 0 finds that enough time has passed.

At a look, rank 0 decides whether to save, and announces the step of the next look to all ranks.

Invariants:
- All ranks of a world look after the same steps: those that rank 0 has announced, and the first one of each world.
- There is about one look in `LOOK_INTERVAL_S`, however short the steps are.
- A rank that becomes rank 0 decides by what it has seen itself: each rank notes all saves and what they cost.
- Time is an argument.
"""

from __future__ import annotations

import msgspec

from forged.catalog.cadence import CadencePolicy, Measured, SinceLastSave, choose_cadence
from forged.phrases import counted

LOOK_INTERVAL_S = 1.0
LOOK_STEPS_MAX = 1000
"""The most steps from one look to the next: steps may become slower meanwhile."""


class Look(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 announces."""

    is_due: bool
    next_step: int
    reason: str
    """Why the state is saved after this step, or which interval holds."""


class SaveSchedule:
    """The schedule of one run, as one rank keeps it."""

    def __init__(self, policy: CadencePolicy, now: float) -> None:
        self._every_steps = policy.every_steps
        self._timed = msgspec.structs.replace(policy, every_steps=None)
        self._is_timed = policy.automatic or policy.every_seconds is not None
        self._began_at = self._saved_at = now
        self._saved_step: int | None = None
        """The step that was saved or resumed last, or the first one that was seen."""
        self._cost_s: float | None = None
        self._generation: int | None = None
        """The world of the last look."""
        self._next_step = 0
        self._seen: tuple[int, float] | None = None
        """The step and the time of the last look at this rank."""
        self._stride = 1

    @property
    def steps_reason(self) -> str:
        """The interval in steps, in words; empty if there is none."""
        return "" if self._every_steps is None else f"every {counted(self._every_steps, 'step')}"

    def described(self, look: Look) -> str:
        """When the run saves, in words."""
        return ", or ".join(filter(None, (self.steps_reason, look.reason)))

    def is_due_by_steps(self, step: int) -> bool:
        """Whether the interval in steps ends with this step. All ranks know that by themselves."""
        return self._every_steps is not None and step > 0 and step % self._every_steps == 0

    def is_look_due(self, step: int, generation: int) -> bool:
        """Whether all ranks look after this step."""
        return self._is_timed and (generation != self._generation or step >= self._next_step)

    def look(self, step: int, now: float, measured: Measured) -> Look:
        """What rank 0 decides; `measured` is what is known of the job besides the cost of a save."""
        if self._saved_step is None or step < self._saved_step:
            self._saved_step = step
        if not measured.observed_s:
            measured = msgspec.structs.replace(measured, observed_s=now - self._began_at)
        measured = msgspec.structs.replace(measured, save_cost_s=self._cost_s)
        passed_s = now - self._saved_at
        choice = choose_cadence(self._timed, measured, SinceLastSave(steps=step - self._saved_step, seconds=passed_s))
        left_s = LOOK_INTERVAL_S if choice.interval_s is None or choice.is_due else choice.interval_s - passed_s
        self._stride = self._steps_until(step, now, left_s)
        self._seen = step, now
        return Look(choice.is_due, step + self._stride, choice.reason)

    def take(self, look: Look, generation: int) -> None:
        """Go by what rank 0 has announced."""
        self._next_step, self._generation = look.next_step, generation

    def begin(self, step: int, now: float) -> None:
        """Training continues from a checkpoint of this step."""
        self._saved_step, self._saved_at, self._next_step, self._seen = step, now, step, None

    def saved(self, step: int, now: float, cost_s: float) -> None:
        """This step was saved, and that has held up training for `cost_s`."""
        self._saved_step, self._saved_at = step, now
        self._cost_s = cost_s if self._cost_s is None else (self._cost_s + cost_s) / 2.0

    def _steps_until(self, step: int, now: float, left_s: float) -> int:
        """The steps to the next look, at the speed since the last one."""
        if self._seen is None or step <= self._seen[0] or now <= self._seen[1]:
            return 1
        speed = (step - self._seen[0]) / (now - self._seen[1])
        wanted_s = min(left_s, LOOK_INTERVAL_S) if left_s > 0.0 else LOOK_INTERVAL_S
        # One fast step says little about the next ones.
        return max(1, min(int(speed * wanted_s), 2 * self._stride, LOOK_STEPS_MAX))
