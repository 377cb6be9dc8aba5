"""What a worker tells the training script, and what it keeps to itself."""

from __future__ import annotations

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable

NEWS_DIFFER = frozenset({"generation_over", "topology_differs", "incarnation_differs", "not_a_member"})
"""With which workers refuse each other when they have not heard the same; the daemon knows what holds."""
BLAMELESS = NEWS_DIFFER | {"attempt_over"}
"""With which a worker tells another that it has gone on to newer news, which is nobody's fault."""


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


def passes(error: ForgedError) -> bool:
    """Whether it is the others' affair, or the daemon's; what is wrong with the script or its state does not pass."""
    return isinstance(error, (Unavailable, PeerError)) or error.code in NEWS_DIFFER
