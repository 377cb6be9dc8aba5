"""The phases of a job's training and the transitions between them.

Invariants:
- A transition that is not in the table is an error that changes nothing. The diagram in docs/elastic.md equals the
  table, which a test checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from forged.errors import RequestRefused


class Phase(StrEnum):
    """The state of a job's training."""

    FORMING = "forming"
    """No world has been committed since the job was created or reopened; it waits for its first workers."""
    RUNNING = "running"
    """A world trains."""
    RESCALING = "rescaling"
    """An attempt at the next world is under way."""
    WAITING = "waiting"
    """There are fewer than `min_workers`; the job waits for more."""
    COMPLETED = "completed"
    """Training is complete."""
    ABORTED = "aborted"
    """Training was aborted."""


class Cause(StrEnum):
    """Why a job changes its phase."""

    RESCALE_STARTED = "rescale started"
    RESCALE_RESTARTED = "rescale restarted"
    RESCALE_COMPLETED = "rescale completed"
    TOO_FEW = "too few workers"
    COMPLETED = "completed"
    ABORTED = "aborted"
    REOPENED = "reopened"


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
    (Phase.ABORTED, Cause.REOPENED): Phase.FORMING,
}

OVER = frozenset({Phase.COMPLETED, Phase.ABORTED})


def next_phase(phase: Phase, cause: Cause) -> Phase:
    """The phase that follows, or `RequestRefused`."""
    found = TRANSITIONS.get((phase, cause))
    if found is None:
        reason = f"no transition from phase {phase} by {cause.value!r}"
        raise RequestRefused("phase_wrong", reason, "see `forgectl jobs show`")
    return found


def require_not_over(job: str, phase: Phase, reason: str) -> None:
    """Refuse a request to a job that is completed or aborted."""
    if phase in OVER:
        reopen = f"`forgectl jobs reopen {job}` lets new workers continue; or use another job name"
        fix = reopen if phase is Phase.ABORTED else _start_anew(job)
        raise RequestRefused("job_over", f"job {job} is {phase}: {reason}", fix)


def require_aborted(job: str, phase: Phase) -> None:
    """Refuse to reopen a job that is not aborted."""
    if phase is not Phase.ABORTED:
        fix = _start_anew(job) if phase is Phase.COMPLETED else "start its workers; the job accepts them"
        raise RequestRefused("job_not_aborted", f"phase of job {job} must be aborted, got {phase}", fix)


def _start_anew(job: str) -> str:
    return f"use another job name, or remove this job first: `forgectl jobs rm {job}`"
