"""A step of a torch run.

Invariants:
- Each step is voted for by all ranks: where the script says so, else before an optimizer of the state changes it, else
  at the end of the block.
- A step that is repeated begins with the buffers, gradients and random generators with which it began before.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from forged.errors import ForgedError, describe
from forged.torch.collective_errors import is_collective_error
from forged.worker.errors import StepAborted
from forged.worker.steps.step_loop import Step


class StepHooks(NamedTuple):
    """What a step asks of its run."""

    before_vote: Callable[[], object]
    """Called when all collectives of the step have been called here."""
    count_abort: Callable[[int, Exception], object]
    """Called when this worker voids the step; raises if it has done so too often."""
    restore: Callable[[], object]
    """Called when the step is void and is repeated."""


class RunStep(int):
    """The number of a step, and a context manager in which the step may be aborted."""

    _step: Step
    _hooks: StepHooks

    @classmethod
    def of(cls, step: Step, hooks: StepHooks, number: int) -> Self:
        """The step of this number of a run, which the worker may count otherwise."""
        made = cls(number)
        made._step, made._hooks = step, hooks
        return made

    @property
    def aborted(self) -> bool:
        """Whether the step was aborted, so that it is repeated."""
        return self._step.aborted

    @property
    def is_committed(self) -> bool:
        """Whether all ranks have voted for the step."""
        return self._step.is_committed

    @property
    def is_entered(self) -> bool:
        """Whether the script does the step inside `with step:`."""
        return self._step.is_entered

    def abort(self, reason: str) -> NoReturn:
        """Void the step at all ranks, which repeat it: raises `StepAborted`, inside the block."""
        self._step.abort(reason)

    def commit(self) -> None:
        """Wait until all ranks have come here; only then change parameters, optimizer and scheduler.

        Raises `StepAborted` if a rank is lost before. No effect if the ranks have voted already.
        """
        if not self.is_committed:
            self._hooks.before_vote()
            self._step.commit()

    def __enter__(self) -> Self:
        self._step.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        failure = error
        if error is None:
            try:
                self.commit()
            except ForgedError as failed:
                failure = failed
        if isinstance(failure, Exception) and not self.is_committed:
            failure = self._voiding(failure)
        if failure is None:
            return False
        is_repeated = self._step.__exit__(type(failure), failure, failure.__traceback__)
        if is_repeated:
            self._hooks.restore()
        elif failure is not error:
            raise failure
        return is_repeated

    def _voiding(self, error: Exception) -> Exception:
        """The exception as which the step learns of a failure: that of a collective voids the step."""
        if not (isinstance(error, StepAborted) or is_collective_error(error)):
            return error
        self._hooks.count_abort(int(self), error)
        if isinstance(error, StepAborted):
            return error
        void = StepAborted(f"a collective of torch failed: {describe(error).splitlines()[0]}")
        void.__cause__ = error
        return void
