"""What operators, and workers for themselves, ask of a job: drain, evict, pause, resume, rescale, abort, reopen."""

from __future__ import annotations

from forged.elastic.coordinator import failures
from forged.elastic.coordinator.failure_budget import FailureBudget
from forged.elastic.coordinator.job_state import NEVER, JobState
from forged.elastic.coordinator.rescale_schedule import drain_at
from forged.elastic.membership.member import Member
from forged.elastic.messages import JobPaused, JobReopened, JobResumed, WorkerDraining
from forged.elastic.outbox import Moment
from forged.elastic.phases import Cause, require_aborted
from forged.elastic.rescale.attempt import Attempt
from forged.errors import RequestRefused
from forged.phrases import OPERATOR_REQUEST, in_words


def drain(job: JobState, worker_id: str, now: Moment, reason: str) -> None:
    """Have a worker finish its step and leave once a world without it is committed, and with it all of its group."""
    member = job.members.require(worker_id)
    if member.drain_reason is not None:
        return
    partners = job.membership.partners(member)
    reason = in_words(reason, OPERATOR_REQUEST)
    _drain_one(job, member, now, reason)
    for partner in partners:
        _drain_one(job, partner, now, f"{reason} (with {worker_id}, group {member.group})")


def _drain_one(job: JobState, member: Member, now: Moment, reason: str) -> None:
    member.drain_reason, member.drain_since = reason, now.monotonic
    job.store_member(member)
    job.outbox.publish(WorkerDraining(member.id, reason))
    if job.requires(member) and not job.member_is_missing and drain_at(job) == NEVER:
        job.outbox.mark_trigger()
    job.membership.mark_draining(member)
    if job.requires(member) and not job.membership.in_world(member):
        # It is a joiner of the current attempt, which must be repeated without it.
        job.rescale_requested_at = now.monotonic + job.config.failure_window_s


def may_leave(job: JobState, member: Member) -> bool:
    """Whether a draining worker may leave now."""
    attempt = job.attempt
    if job.over:
        return True
    if attempt is not None and member.id in attempt.draining_set:
        return _is_dispensable(job, member, attempt)
    return job.membership.may_leave(member, attempt_is_under_way=attempt is not None)


def _is_dispensable(job: JobState, member: Member, attempt: Attempt) -> bool:
    """Whether the attempt no longer needs it, and a worker that holds the state is connected."""
    keepers = filter(None, map(job.members.get, attempt.state_keepers))
    connected = (keeper.id for keeper in keepers if keeper.connected)
    return member.id in attempt.dispensable and attempt.has_keeper_for(member.id, connected)


def evict(job: JobState, worker_id: str, now: Moment, reason: str) -> None:
    """Treat a worker as failed; an eviction does not count towards the failure budget."""
    member = job.members.require(worker_id)
    failures.fail(job, member, f"evicted: {in_words(reason, OPERATOR_REQUEST)}", now, is_uncounted=True)


def pause(job: JobState, reason: str) -> None:
    """Pause training after the current step."""
    job.require_not_over()
    if not job.paused:
        job.paused, job.pause_reason = True, in_words(reason, OPERATOR_REQUEST)
        job.publish_change(JobPaused(job.pause_reason))


def resume(job: JobState, now: Moment, reason: str) -> None:
    job.require_not_over()
    if not job.paused:
        return
    job.paused, job.last_progress_at = False, now.monotonic
    for member in job.members.values():
        member.progress_at = now.monotonic
    if job.too_few_since is not None:
        job.too_few_since = now.monotonic
    job.publish_change(JobResumed(in_words(reason, OPERATOR_REQUEST)))


def rescale(job: JobState, now: Moment, reason: str, *, synchronous: bool = False) -> None:
    """Make a rescale due now; `synchronous` stops training for it in either mode."""
    job.require_not_over()
    if not job.members:
        raise RequestRefused("workers_none", f"job {job.name} has no workers", "start workers first")
    job.must_stop |= synchronous
    job.rescale_requested_at = now.monotonic
    job.add_reason(in_words(reason, OPERATOR_REQUEST))


def abort(job: JobState, reason: str) -> None:
    """Abort the training by request: that follows from no fact."""
    job.cause_id = 0
    failures.abort(job, reason)


def reopen(job: JobState, now: Moment, reason: str) -> None:
    """Let an aborted job accept workers again, as after its creation; only the worlds and attempts count on.

    The workers that it still has are removed without a fact: `JobAborted` has ended them, and a new process may have
    the name of one.
    """
    require_aborted(job.name, job.phase)
    reason = in_words(reason, OPERATOR_REQUEST)
    job.move_to(Cause.REOPENED, reason)
    for member in list(job.members.values()):
        job.remove_member(member)
    job.failure_budget = FailureBudget()
    job.rescale_reasons, job.must_stop, job.cause_id = [], False, 0
    job.peer_report_reasons.clear()
    job.peer_reports.clear()
    job.failed_join_attempts, job.last_progress_at = 0, now.monotonic
    job.publish_change(JobReopened(reason, job.step))
