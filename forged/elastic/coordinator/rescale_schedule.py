"""When a rescale is due, and what the coordinator does when it is: start an attempt, wait for workers, or give up.

Invariants:
- `consider` runs on every tick and after every input that can make a rescale due; it alone starts attempts.
"""

from __future__ import annotations

from itertools import islice

from forged.elastic.coordinator import completion, failures, rescaling
from forged.elastic.coordinator.job_state import NEVER, JobState
from forged.elastic.failure_detector.timeouts import blocking_members, overdue_members
from forged.elastic.membership.member import Member
from forged.elastic.messages import JobWaiting, RescaleAborted
from forged.elastic.outbox import Moment
from forged.elastic.phases import Cause, Phase
from forged.elastic.rescale.attempt import Attempt
from forged.phrases import too_few

FAILED_JOINS_DOUBLED_MAX = 6
"""How often the extra wait for joiners, 1 s after the first attempt that lost joiners, doubles at most."""


def consider(job: JobState, now: Moment) -> None:
    """Do what has become due."""
    if job.attempt is not None and attempt_timeout_at(job) <= now.monotonic:
        _fail_late_members(job, job.attempt, now)
    # Before the limit on failures: members that are done need no other one.
    completion.consider(job, now)
    if job.over:
        return
    if failures.abort_over_budget(job) or _abort_after_wait(job, now):
        return
    if rescale_at(job) > now.monotonic:
        return
    joiners = _joiners_to_admit(job, now)
    size = job.membership.next_size(joiners)
    if size < job.config.min_workers:
        _wait_for_workers(job, size, now)
    else:
        rescaling.start(job, job.membership.next_survivors(joiners), joiners, now)


# When something is due, by the monotonic clock.


def rescale_at(job: JobState) -> float:
    """When a rescale is due, if nothing happens before."""
    if job.missing_since is not None:
        return job.missing_since + job.config.failure_window_s
    if job.rescale_requested_at is not None:
        return job.rescale_requested_at
    if job.attempt is not None:
        return drain_at(job)
    if job.phase is Phase.RESCALING:
        # The daemon restarted during an attempt. The next one starts when all members are back, or have failed.
        all_connected = all(member.connected for member in job.members.values())
        return -NEVER if all_connected else job.loaded_at + job.config.reconnect_grace_s
    return min(growth_at(job), drain_at(job))


def growth_at(job: JobState) -> float:
    """When joiners are taken in: after the stability window, or at once if `max_workers` are there."""
    if job.phase is not Phase.WAITING and next(job.membership.connected_joiners(), None) is None:
        return NEVER
    joiners = job.membership.next_joiners()
    size = job.membership.next_size(joiners)
    if size < job.config.min_workers:
        return NEVER
    if job.phase is Phase.WAITING:
        return -NEVER
    if not joiners:
        return NEVER
    is_full = size + job.membership.group_size > job.config.max_workers
    if is_full and not job.failed_join_attempts:
        return -NEVER
    last_joined_at = max(job.members[worker].seen_at for worker in joiners)
    backoff_s = 2.0 ** min(job.failed_join_attempts, FAILED_JOINS_DOUBLED_MAX) if job.failed_join_attempts else 0.0
    return last_joined_at + job.config.stability_window_s + backoff_s


def drain_at(job: JobState) -> float:
    """When a world without the first draining worker is due; further drains may follow within the failure window."""
    member = job.membership.next_to_leave(() if job.attempt is None else job.attempt.draining_set)
    return NEVER if member is None else member.drain_since + job.config.failure_window_s


def attempt_timeout_at(job: JobState) -> float:
    """When members that have not answered the attempt count as failed."""
    if job.attempt is None or job.member_is_missing:
        return NEVER
    return min(_silence_ends_at(job, job.attempt), _limit_at(job, job.attempt))


def _silence_ends_at(job: JobState, attempt: Attempt) -> float:
    """When the attempt has made no progress for too long; at once if a member's store has failed for so long."""
    silence_s = job.config.rescale_silence_s or NEVER
    return -NEVER if attempt.failing_stores(silence_s) else attempt.heard_at + silence_s


def _limit_at(job: JobState, attempt: Attempt) -> float:
    """When the attempt has taken too long; never, while no member has stopped training for it."""
    return NEVER if attempt.stopped_at is None else attempt.stopped_at + (job.config.rescale_timeout_s or NEVER)


def abort_at(job: JobState) -> float:
    """When the job has waited for `min_workers` for too long."""
    # A paused job is meant to rest, so its wait does not run out.
    if job.too_few_since is None or job.paused:
        return NEVER
    return job.too_few_since + job.config.min_workers_timeout_s


# What is done when it is due.


def _joiners_to_admit(job: JobState, now: Moment) -> list[str]:
    """The joiners of the next world.

    If the current attempt has lost only joiners, its remaining ones: later joiners wait for their window, so that
    joiners which die one after the other do not keep the world from training.
    """
    joiners, attempt = job.membership.next_joiners(), job.attempt
    if attempt is None or not job.member_is_missing or not job.membership.world or not job.membership.is_complete:
        return joiners
    gone = {one for one in joiners if one not in attempt.added or job.members[one].seen_at > attempt.began_at}
    left = job.membership.without_groups_of(gone, joiners)
    if len(left) == len(attempt.added):
        return joiners
    job.failed_join_attempts += 1
    is_enough = job.membership.next_size(left) >= job.config.min_workers
    return left if is_enough and growth_at(job) > now.monotonic else joiners


def _fail_late_members(job: JobState, attempt: Attempt, now: Moment) -> None:
    """Fail the members for which the attempt has waited too long."""
    late: list[tuple[Member, str]] = []
    if _silence_ends_at(job, attempt) <= now.monotonic:
        late = list(blocking_members(attempt, job.membership, job.peer_reports, now.monotonic, trains=job.trains))
    is_over_limit = _limit_at(job, attempt) <= now.monotonic
    if not late and is_over_limit:
        late = list(overdue_members(attempt, job.membership, job.peer_reports, now.monotonic))
    if not late:
        attempt.heard_at = now.monotonic
        attempt.stopped_at = now.monotonic if is_over_limit else attempt.stopped_at
    for member, reason in late:
        failures.fail(job, member, reason, now)


def _wait_for_workers(job: JobState, present: int, now: Moment) -> None:
    """Give up the attempt, if there is one, and wait until there are `min_workers`."""
    job.missing_since = job.rescale_requested_at = None
    if job.phase is Phase.FORMING or job.too_few_since is not None:
        return
    if job.attempt is not None:
        job.outbox.publish(RescaleAborted(job.attempt.number, "too few workers"))
        job.attempt = None
    job.membership.announce_drains(announced=False)
    if job.phase is not Phase.WAITING:
        job.move_to(Cause.TOO_FEW, too_few(present, job.config.min_workers))
        job.outbox.publish(JobWaiting(present, job.config.min_workers))
    job.too_few_since = now.monotonic


def _abort_after_wait(job: JobState, now: Moment) -> bool:
    """Abort the job if it has waited for too long; returns whether it did."""
    if job.phase is Phase.FORMING:
        _update_too_few_since(job, now)
    if abort_at(job) > now.monotonic:
        return False
    failures.abort(job, f"fewer than {job.config.min_workers} workers for {job.config.min_workers_timeout_s:g} s")
    return True


def _update_too_few_since(job: JobState, now: Moment) -> None:
    needed = job.config.min_workers
    # Counting stops at `min_workers`: this runs at every join, of a thousand workers perhaps.
    if not job.members or sum(1 for _ in islice(job.membership.connected_joiners(), needed)) >= needed:
        job.too_few_since = None
    elif job.too_few_since is None:
        job.too_few_since = now.monotonic
