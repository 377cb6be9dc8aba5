"""Training progress: which steps are committed, by the workers' heartbeats and stop reports."""

from __future__ import annotations

from forged.elastic.coordinator.job_state import JobState
from forged.elastic.coordinator.step_witnesses import state_after
from forged.elastic.membership.member import COLLECTIVES_PER_WORLD, Member
from forged.elastic.outbox import Moment

STEPS_PER_S_MAX = 100_000
"""More steps than a world makes in a second."""
STEPS_UNCONFIRMED_MAX = 10_000
"""How many steps a report may be ahead of the last committed one, however little time has passed."""


def most_steps(job: JobState, now: Moment) -> int:
    """The most steps that the world can have committed; wall time, because training continues while no daemon runs."""
    passed_s = max(0.0, now.wall - job.training.state_timestamp)
    return job.training.current_step + STEPS_UNCONFIRMED_MAX + int(passed_s * STEPS_PER_S_MAX)


def is_possible(job: JobState, member: Member, step: int, now: Moment) -> bool:
    """Whether the member may have committed so many steps. Outside the world it may: no report of it counts."""
    if step <= job.training.current_step or not job.membership.in_world(member):
        return True
    return step <= most_steps(job, now)


def record(job: JobState, member: Member, step: int, now: Moment, collective_seq: int = 0) -> None:
    """Take a worker's report of its step and of its last collective; called for every heartbeat and pulse."""
    if not is_possible(job, member, step, now):
        step = member.step
    if not member.record_progress(now.monotonic, step, collective_seq):
        return
    job.detector.recovered(member, step)
    membership = job.membership
    if membership.in_world(member):
        job.last_progress_at = now.monotonic
    # A state holder's word that all have met counts for all; a member without the state would report it itself.
    is_witness = member.id in membership.state_holders or not membership.state_holders
    if is_witness and len(membership.state_holders) < len(membership.world) and _has_met(job, member):
        # No member passes the first collective of a world before all members have the state.
        membership.mark_all_state_holders()
        job.outbox.world = True
    if step <= job.training.current_step or not membership.in_world(member):
        return
    committed = job.step_witnesses.hear(member.id, step, len(membership.world))
    if job.trains:
        _commit_step(job, committed, now)
    job.reported_step = max(job.reported_step, committed)


def record_final_report(job: JobState, member: Member, step: int) -> None:
    """Take the step of a worker that has stopped or leaves; if no other worker holds that state, the steps are lost."""
    if job.membership.in_world(member):
        job.reported_step = max(job.reported_step, step)


def _has_met(job: JobState, member: Member) -> bool:
    """Whether the member has passed a collective of the committed world."""
    first = job.generation * COLLECTIVES_PER_WORLD
    return job.membership.in_world(member) and first < member.collective_seq < first + COLLECTIVES_PER_WORLD


def _commit_step(job: JobState, step: int, now: Moment) -> None:
    if step > job.training.current_step:
        job.training = state_after(job.training, step, now.wall)
        job.peer_reports.clear()
        # Written at once: after a restart the old failures would otherwise count together with the next ones.
        job.outbox.job = job.failure_budget.step_committed(step) or job.outbox.job
