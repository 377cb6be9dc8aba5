"""What a member's failure means for its job: the fact, the failure budget, a due rescale, the job's end."""

from __future__ import annotations

from forged.elastic.coordinator.job_state import JobState
from forged.elastic.membership.member import Member
from forged.elastic.messages import GroupBroken, JobAborted, RescaleAborted, WorkerFailed
from forged.elastic.outbox import Moment
from forged.elastic.phases import Cause, Phase
from forged.kernel.messages import Fact
from forged.phrases import OPERATOR_REQUEST, in_words


def fail(job: JobState, member: Member, reason: str, now: Moment, *, is_uncounted: bool = False) -> None:
    """Remove a member as failed; `is_uncounted` keeps it out of the failure budget, as does a drain."""
    rank = job.membership.topology.rank_of(member.worker) if job.membership.in_world(member) else -1
    is_counted = rank >= 0 and not is_uncounted and member.drain_reason is None
    # A group counts once, whichever of its members fail, and however many.
    is_counted = is_counted and not job.membership.is_broken(member)
    partners = job.group_broken_without(member)
    job.remove_member(member)
    job.outbox.publish(WorkerFailed(member.id, rank, reason))
    if job.over:
        return
    if is_counted:
        job.failure_budget.count(job.training.current_step)
        if _over_budget(job) is not None:
            # The job's end follows from the failure that exceeds the budget, not from an earlier one.
            job.outbox.mark_trigger()
    if job.requires(member):
        job.note_missing_member(f"{member.id} failed: {reason}", now, is_reported=True)
    if partners:
        job.outbox.publish(GroupBroken(member.group, member.id, partners))


def _over_budget(job: JobState) -> str | None:
    groups = len(job.membership.world) // job.membership.group_size
    return job.failure_budget.exceeded(groups, job.config, "workers" if job.membership.group_size == 1 else "groups")


def fail_missing(job: JobState, member: Member, reason: str, now: Moment) -> None:
    """Fail a member because it is missing.

    A member not seen since the daemon's restart may have left in good order meanwhile, so it does not count.
    """
    if member.is_unseen_since_restart:
        reason += "; not counted as a failure: it disappeared while the daemon was down"
    fail(job, member, reason, now, is_uncounted=member.is_unseen_since_restart)


def abort_over_budget(job: JobState) -> bool:
    """Abort the job if its failures exceed the budget; returns whether the job is over."""
    reason = _over_budget(job)
    if reason is not None:
        abort(job, reason)
    return job.over


def abort(job: JobState, reason: str) -> None:
    if job.phase is not Phase.ABORTED:
        job.require_not_over()
        reason = in_words(reason, OPERATOR_REQUEST)
        end(job, Cause.ABORTED, reason, JobAborted(reason, job.step))


def end(job: JobState, cause: Cause, reason: str, fact: Fact) -> None:
    job.move_to(cause, reason)
    if job.attempt is not None:
        job.outbox.publish(RescaleAborted(job.attempt.number, reason))
        job.attempt = None
    job.missing_since = job.rescale_requested_at = job.too_few_since = None
    job.outbox.publish(fact)
