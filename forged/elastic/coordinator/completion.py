"""When a job is complete: what one member says about the training's end, and what the other members confirm.

Invariants:
- A job is complete once all registered members of its world say that training is complete after the same step: by a
  heartbeat, or when they leave. A failure confirms nothing, and a commit of another world voids what those have said
  that have left.
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
    """A member of the world that leaves says that training is complete after this step."""
    job.claimed_end = step or job.training.current_step
    # The job's end follows from the leave, whenever it is confirmed.
    job.outbox.mark_trigger()
    if all(_agrees(member, job.claimed_end) for member in job.membership.present()):
        _complete(job, job.claimed_end, now)


def confirmation_wait_s(job: JobState) -> float:
    """How long the other members may take to confirm; a rescale without the member that is done is due then."""
    return job.config.heartbeat_interval_s + CONFIRMATION_WAIT_S


def consider(job: JobState, now: Moment) -> None:
    """Complete the job if all members of the world agree with the one that has left; without any, none confirms it."""
    step = job.claimed_end
    if step is None or job.over:
        return
    members = list(job.membership.present())
    if members and all(_agrees(member, step) for member in members):
        _complete(job, step, now)


def _agrees(member: Member, step: int) -> bool:
    return member.is_done and member.step == step


def _complete(job: JobState, step: int, now: Moment) -> None:
    job.training = state_after(job.training, step, now.wall)
    failures.end(job, Cause.COMPLETED, "training completed", JobCompleted(step))
