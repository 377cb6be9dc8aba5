"""What a job's training goes through.

Law: transitions are a table; one that is not in it is an error that changes nothing. The picture in docs/elastic.md is
drawn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from forged.errors import RequestRefused


class Phase(StrEnum):
    """Where a job's training is."""

    FORMING = "forming"
    """No world has been committed yet: it waits for its first workers."""
    RUNNING = "running"
    """A world trains."""
    RESCALING = "rescaling"
    """A new world is being agreed on."""
    WAITING = "waiting"
    """Too few workers are left: it waits for others."""
    COMPLETED = "completed"
    """The training is done."""
    ABORTED = "aborted"
    """It was given up."""


class Cause(StrEnum):
    """Why a job goes from one phase to another."""

    RESCALE_STARTED = "rescale started"
    RESCALE_RESTARTED = "rescale restarted"
    RESCALE_COMPLETED = "rescale completed"
    TOO_FEW = "too few workers"
    COMPLETED = "completed"
    ABORTED = "aborted"


TRANSITIONS: Mapping[tuple[Phase, Cause], Phase] = {
    (Phase.FORMING, Cause.RESCALE_STARTED): Phase.RESCALING,
    (Phase.FORMING, Cause.COMPLETED): Phase.COMPLETED,
    (Phase.FORMING, Cause.ABORTED): Phase.ABORTED,
    (Phase.RUNNING, Cause.RESCALE_STARTED): Phase.RESCALING,
    (Phase.RUNNING, Cause.TOO_FEW): Phase.WAITING,
    (Phase.RUNNING, Cause.COMPLETED): Phase.COMPLETED,
    (Phase.RUNNING, Cause.ABORTED): Phase.ABORTED,
    (Phase.RESCALING, Cause.RESCALE_RESTARTED): Phase.RESCALING,
    (Phase.RESCALING, Cause.RESCALE_COMPLETED): Phase.RUNNING,
    (Phase.RESCALING, Cause.TOO_FEW): Phase.WAITING,
    (Phase.RESCALING, Cause.COMPLETED): Phase.COMPLETED,
    (Phase.RESCALING, Cause.ABORTED): Phase.ABORTED,
    (Phase.WAITING, Cause.RESCALE_STARTED): Phase.RESCALING,
    (Phase.WAITING, Cause.COMPLETED): Phase.COMPLETED,
    (Phase.WAITING, Cause.ABORTED): Phase.ABORTED,
}

OVER = frozenset({Phase.COMPLETED, Phase.ABORTED})


def following(phase: Phase, cause: Cause) -> Phase:
    """The phase behind this one, or `RequestRefused`."""
    found = TRANSITIONS.get((phase, cause))
    if found is None:
        reason = f"a job that is {phase} cannot go on with {cause.value!r}"
        raise RequestRefused("phase_wrong", reason, "see `forgectl jobs show`")
    return found


def require_not_over(job: str, phase: Phase, reason: str) -> None:
    """Refuse what is wanted of a job that is over."""
    if phase in OVER:
        raise RequestRefused(
            "job_over",
            f"job {job} is {phase}: {reason}",
            f"train under another name, or remove this one first: `forgectl jobs rm {job}`",
        )
