"""When a job is complete: what one member says about the training's end, and what the other members confirm.

Invariants:
- A job is complete once a member of its world has left or failed, and all registered ones say that training is complete
  after the same step, by a heartbeat; the last one also when it leaves. A failure confirms nothing.
- What a member has said that has left is not needed, so a restart of the daemon forgets nothing.
- A member of a world can be no further than its world can have come since the last committed step.
"""

from __future__ import annotations

from forged.elastic.coordinator import failures
from forged.elastic.coordinator.job_state import JobState
from forged.elastic.coordinator.progress import is_possible, most_steps
from forged.elastic.coordinator.step_witnesses import state_after
from forged.elastic.membership.member import Member
from forged.elastic.messages import JobCompleted
from forged.elastic.outbox import Moment
from forged.elastic.phases import Cause
from forged.errors import RequestRefused

CONFIRMATION_WAIT_S = 1.0
"""How much longer than a heartbeat's interval the other members have to confirm that training is complete."""


def require_possible(job: JobState, member: Member, step: int, now: Moment) -> None:
    """Refuse a step that the member's world cannot have reached."""
    if not is_possible(job, member, step, now):
        most = most_steps(job, now)
        text = f"step must be <= {most}, which world {job.generation} can have reached by now, got {step}"
        raise RequestRefused("step_impossible", text, "report the committed steps of this world")


def claim(job: JobState, step: int, now: Moment) -> None:
    """A member of the world has left because training is complete after this step; the last one speaks for all."""
    # The job's end follows from the leave, whenever it is confirmed.
    job.outbox.mark_trigger()
    if next(job.membership.present(), None) is None:
        _complete(job, step or job.training.current_step, now)
    else:
        consider(job, now)


def confirmation_wait_s(job: JobState) -> float:
    """How long the other members may take to confirm; a rescale without the member that is done is due then."""
    return job.config.heartbeat_interval_s + CONFIRMATION_WAIT_S


def consider(job: JobState, now: Moment) -> None:
    """Complete the job if a member of the world is gone, and the registered ones agree; without any, none confirms."""
    first = None if job.over or job.membership.is_complete else next(job.membership.present(), None)
    if first is not None and all(_agrees(member, first.step) for member in job.membership.present()):
        _complete(job, first.step, now)


def _agrees(member: Member, step: int) -> bool:
    return member.is_done and member.step == step


def _complete(job: JobState, step: int, now: Moment) -> None:
    job.training = state_after(job.training, step, now.wall)
    failures.end(job, Cause.COMPLETED, "training completed", JobCompleted(step))
