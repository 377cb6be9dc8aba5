"""What a worker tells the training script."""

from __future__ import annotations

from forged.errors import RequestRefused, Unavailable


class StepAborted(Unavailable):
    """The step cannot be finished with this world; it is done again in the next one."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "step_aborted", f"the step was aborted: {reason}", "do the step inside `with step:`, so that it is repeated"
        )


class WorkerEvicted(RequestRefused):
    """The daemon counts this worker as dead, and the others go on without it."""

    def __init__(self, reason: str) -> None:
        super().__init__("worker_evicted", f"this worker counts as dead: {reason}", "start another")


class JobEnded(RequestRefused):
    """There is nothing to train any more."""
