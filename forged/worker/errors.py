"""Errors that a worker raises in the training script, and errors between workers."""

from __future__ import annotations

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable

ABORTED = "collective_aborted"
STEP_VOIDED = "step_voided"
"""The code with which a world ends whose step the script of a member has voided: no worker is to blame."""
NEWS_DIFFER = frozenset({"generation_over", "topology_differs", "session_differs", "not_a_member"})
"""Codes with which workers refuse each other that have not received the same facts; the daemon knows the truth."""
BLAMELESS = NEWS_DIFFER | {"attempt_over"}
"""Codes of refusals by a worker that has received newer facts; it is not to blame."""


class StepAborted(Unavailable):
    """The step cannot be finished in this world; it is repeated in the next one."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "step_aborted", f"the step was aborted: {reason}", "do the step inside `with step:`, so that it is repeated"
        )
        self.reason = reason


class WorldIncomplete(Unavailable):
    """Not all members of a world have met. `peer` is a worker that was not reached, empty where that is unknown."""

    def __init__(self, reason: str, peer: str) -> None:
        super().__init__("world_incomplete", reason, "report the peer to the daemon and wait for its next world")
        self.peer = peer

    def __reduce__(self) -> tuple[type[WorldIncomplete], tuple[str, str]]:
        return WorldIncomplete, (self.message, self.peer)


class WorkerEvicted(RequestRefused):
    """The daemon counts this worker as dead, and training continues without it."""

    def __init__(self, reason: str) -> None:
        super().__init__("worker_evicted", f"the daemon declared this worker failed: {reason}", "start another worker")


class CollectiveAborted(Unavailable):
    """The world has ended. `peer` is the worker whose connection was lost, empty for another reason."""

    def __init__(self, reason: str, peer: str = "", code: str = ABORTED) -> None:
        super().__init__(code, reason, "enter the next world")
        self.peer = peer

    def __reduce__(self) -> tuple[type[CollectiveAborted], tuple[str, str, str]]:
        return CollectiveAborted, (self.message, self.peer, self.code)


class CollectiveMismatch(RequestRefused):
    """The ranks have called different collectives or brought too much: an error in the script, raised everywhere."""


class JobEnded(RequestRefused):
    """The job was aborted, removed, or completed before this worker was taken in."""


def job_aborted(job: str, reason: str) -> JobEnded:
    """Names what an operator needs next: why, and how training continues."""
    fix = f"see `forgectl events --job {job}`; `forgectl jobs reopen {job}` lets new workers continue"
    return JobEnded("job_aborted", f"the job was aborted: {reason}", fix)


def is_temporary(error: ForgedError) -> bool:
    """Whether a later try may succeed; an error in the script or its state stays."""
    return isinstance(error, (Unavailable, PeerError)) or error.code in NEWS_DIFFER
