"""One attempt at a rescale, from its start over stop reports and state transfer to the commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forged.elastic.coordinator import completion, failures, progress
from forged.elastic.coordinator.job_state import JobState
from forged.elastic.coordinator.step_witnesses import state_at
from forged.elastic.membership.member import Member
from forged.elastic.messages import (
    AttemptMembers,
    ProgressLost,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
)
from forged.elastic.model import GlobalTrainingState, RescaleType
from forged.elastic.outbox import Moment
from forged.elastic.phases import Cause, Phase
from forged.elastic.rescale.attempt import Attempt, Stage, StopReport, initial_state_remark
from forged.elastic.rescale.scaling import ScalingBase, scale
from forged.errors import RequestRefused
from forged.phrases import REASONS_MAX, counted, joined


def start(job: JobState, survivors: set[str], joiners: list[str], now: Moment) -> None:
    """Start the next attempt, in place of the current one if there is one."""
    world, candidates = job.membership.world, job.membership.state_candidates()
    _explain_missing_state(job, candidates)
    # Besides those that drain, the members of broken groups, whose state and data may exist nowhere else.
    draining = tuple(name for name in candidates if name not in survivors and name not in joiners)
    reasons = ((name, candidates[name].drain_reason) for name in draining[:REASONS_MAX])
    drains = (f"draining {name}: {reason}" for name, reason in reasons if reason is not None)
    reason = "; ".join(dict.fromkeys([*job.rescale_reasons, *drains, *joined(joiners)])) or job.reason
    keeps_training = _keeps_training(job)
    if job.attempt is not None:
        job.outbox.publish(RescaleAborted(job.attempt.number, reason))
    job.move_to(Cause.RESCALE_RESTARTED if job.phase is Phase.RESCALING else Cause.RESCALE_STARTED, reason)
    target = job.membership.arranged(survivors, joiners)
    with_data = _with_data(job, (*target, *draining))
    in_background = bool(with_data) and keeps_training
    job.attempts += 1
    attempt = job.attempt = Attempt(
        number=job.attempts,
        type=_type(len(world), len(target)),
        target=target,
        draining=draining,
        added=tuple(joiners),
        removed=tuple(worker for worker in world if worker not in survivors),
        reason=reason,
        began_at=now.monotonic,
        heard_at=now.monotonic,
        stage=Stage.TRANSFERRING if in_background else Stage.STOPPING,
        unready=set(with_data) if in_background else set(),
        group_ranks=job.membership.group_ranks((*target, *draining)),
        group_size=job.membership.group_size,
    )
    job.missing_since = job.rescale_requested_at = job.too_few_since = None
    job.membership.announce_drains(announced=True)
    job.outbox.publish(
        RescaleStarted(
            attempt=attempt.number,
            type=attempt.type,
            world_size=len(target),
            added=list(attempt.added),
            removed=list(attempt.removed),
            reason=reason,
            in_background=in_background,
            draining=list(draining),
        )
    )
    # If no survivor is known to hold the state, all members must report where they start, so the commit waits.
    # Members of groups that cannot agree on a state must report where they are.
    must_stop = job.config.use_synchronous_rescaling or (job.must_stop and job.membership.group_size > 1)
    if job.membership.state_survives() and not (must_stop or with_data):
        commit(job, attempt, now)


def stopped(job: JobState, worker_id: str, incarnation: bytes, number: int, report: StopReport, now: Moment) -> None:
    """Take a member's stop report; after the last one the state source is chosen."""
    attempt, member = answering(job, worker_id, incarnation, number)
    if report.holds_state:
        completion.require_possible(job, member, report.step, now)
    member.heard_at = now.monotonic
    progress.record(job, member, report.step, now)
    progress.record_final_report(job, member, report.step)
    if attempt.stage is not Stage.STOPPING:
        return
    if job.membership.in_world(member) and not attempt.is_at_step_end:
        # All members end the same step, so those still in it get the time of a silence again.
        attempt.is_at_step_end = True
        attempt.heard_at = attempt.stopped_at = now.monotonic
    attempt.stops[worker_id] = report
    if attempt.all_stopped and not job.member_is_missing:
        _synchronise(job, attempt, now)


def ready(job: JobState, worker_id: str, incarnation: bytes, number: int, now: Moment) -> None:
    """Take a member's word that it has the source's state and its training data; the last one commits."""
    attempt, member = answering(job, worker_id, incarnation, number)
    member.heard_at = now.monotonic
    # It has reached the source; an earlier peer report about the source no longer holds.
    job.peer_reports.withdraw(worker_id, attempt.source_of(worker_id))
    if attempt.stage is Stage.STOPPING:
        return
    attempt.unready.discard(worker_id)
    if not (attempt.unready or job.member_is_missing):
        commit(job, attempt, now)


def _synchronise(job: JobState, attempt: Attempt, now: Moment) -> None:
    """Choose the state source and tell the members; commit at once if no member needs anything."""
    if not attempt.synchronise(_with_data(job, attempt.members)):
        _give_up_state(job, attempt, now)
        return
    if not attempt.unready:
        commit(job, attempt, now)
        return
    fact = synchronising(job)
    assert fact is not None
    job.outbox.publish(fact)


def _give_up_state(job: JobState, attempt: Attempt, now: Moment) -> None:
    """Fail the members that have parts of a state of which no part exists for some group ranks.

    The rest forms the next world; processes that are started again may load a checkpoint.
    """
    stops = attempt.stops
    useless = [worker for worker in attempt.members if stops[worker].holds_state or stops[worker].is_stale]
    if not useless:
        steps = ", ".join(f"{step:,}" for step in sorted({stop.position for stop in stops.values()}))
        text = f"no group starts after the same step at all its ranks (steps {steps})"
        failures.abort(job, f"{text}; load the same checkpoint at all ranks of a group")
    for worker in useless:
        step, group_rank = stops[worker].position, attempt.group_ranks[worker]
        reason = f"it has group rank {group_rank} of the state after step {step:,}, and other group ranks are lost"
        failures.fail(job, job.members[worker], f"{reason}; start its group again", now, is_uncounted=True)


def commit(job: JobState, attempt: Attempt, now: Moment) -> None:
    """Commit the attempt's world under the next generation."""
    before, has_stopped = job.membership.topology, bool(attempt.source)
    job.membership.commit(attempt.target, attempt.removed, now.wall, all_have_stopped=has_stopped)
    members = list(job.membership.present())
    known_step, reported_step, job.reported_step = job.training.current_step, job.step, 0
    rate = None
    if attempt.source:
        stop = attempt.stops[attempt.source]
        job.training, rate = state_at(job.training, stop, now.wall), stop.learning_rate
    if not job.scaling_base.world:
        job.scaling_base = ScalingBase(len(members), rate, job.training.global_batch_size)
    # Without stop reports only the workers know rate and batch, unless both follow from the world size.
    is_known = has_stopped or job.config.scale_batch_with_world
    batch = job.training.global_batch_size
    rate, batch = scale(job.config, job.scaling_base, rate, batch, len(members)) if is_known else (None, 0)
    step, epoch = job.training.current_step, job.training.current_epoch
    # The step is as old as its report, which bounds how many the new world can have made.
    step_at = now.wall if has_stopped else job.training.state_timestamp
    job.training = GlobalTrainingState(epoch, step, rate or 0.0, batch, len(members), step_at)
    job.learning_rate = rate
    job.step_witnesses.reset()
    job.failure_budget.world_committed(step)
    if step > known_step:
        # The stop reports show that the previous world did commit steps, so its peer reports are settled.
        job.peer_reports.clear()
    reason = "; ".join([attempt.reason, *_starting_point(job, attempt, reported_step)])
    job.attempt, job.rescale_reasons, job.must_stop = None, [], False
    job.peer_report_reasons.clear()
    job.last_progress_at = now.monotonic
    job.failed_join_attempts = 0 if attempt.added else job.failed_join_attempts
    for member in filter(None, map(job.members.get, attempt.draining)):
        # Its time to leave starts now: until the commit the world required it.
        member.drain_since = now.monotonic
    for member in members:
        job.detector.recovered(member, step)
        member.step, member.progress_at = step, now.monotonic
    job.move_to(Cause.RESCALE_COMPLETED, reason)
    job.outbox.world = True
    job.outbox.publish(
        RescaleCompleted(
            attempt=attempt.number,
            type=attempt.type,
            delta=before.delta_to(job.membership.topology),
            step=step if has_stopped else None,
            epoch=epoch if has_stopped else None,
            learning_rate=rate,
            global_batch_size=batch,
            added=list(attempt.added),
            removed=list(attempt.removed),
            reason=reason,
            took_s=round(now.monotonic - attempt.began_at, 6),
        )
    )


# What members of the attempt are told.


def answering(job: JobState, worker_id: str, incarnation: bytes, number: int) -> tuple[Attempt, Member]:
    """The current attempt and its member, or a refusal if the worker answers another attempt."""
    attempt = job.attempt
    member = job.members.find(worker_id, incarnation)
    if attempt is None or attempt.number != number or worker_id not in attempt or member is None:
        current = "no attempt is under way" if attempt is None else f"attempt {attempt.number} is under way"
        raise RequestRefused("attempt_over", f"attempt {number} is over; {current}", "answer the newest attempt")
    return attempt, member


def attempt_members(job: JobState, worker_id: str, incarnation: bytes) -> AttemptMembers:
    """Which members of the attempt hold training data, for a member that asks."""
    number = 0 if job.attempt is None else job.attempt.number
    attempt, asking = answering(job, worker_id, incarnation, number)
    present = (job.members[worker] for worker in attempt.members if worker in job.members)
    members = [member for member in present if member.with_data]
    draining_ids = {member.id for member in members if member.drain_announced or member.id in attempt.draining_set}
    draining = tuple(member.worker for member in members if member.id in draining_ids)
    return AttemptMembers(
        attempt.number,
        tuple(member.worker for member in members if member.id not in draining_ids) or draining,
        draining,
        job.settings,
        attempt.in_background,
        job.generation,
        job.membership.has_room_beside(attempt.target),
        job.membership.left_out(attempt.target),
        attempt.started_id,
        asking.joined_id,
    )


def synchronising(job: JobState) -> RescaleSynchronising | None:
    """The chosen state source, for the members; None before the choice, or if the source is gone."""
    attempt = job.attempt
    source = job.members.get(attempt.source) if attempt is not None else None
    if attempt is None or source is None or attempt.stage is not Stage.SYNCHRONISING:
        return None
    sources = [job.members.get(one) for one in attempt.sources] if attempt.group_size > 1 else []
    if None in sources:
        return None
    behind, workers = len(attempt.state_receivers), [source.worker for source in sources if source is not None]
    return RescaleSynchronising(attempt.number, source.worker, attempt.step, behind, workers)


# What the attempt's facts say.


def _explain_missing_state(job: JobState, candidates: dict[str, Member]) -> None:
    """Add a reason if the training state is lost, or not known to be held."""
    if job.membership.world and not candidates:
        job.add_reason(f"no worker of world {job.generation} remains; training starts from a joiner's state")
    elif job.membership.world and not job.membership.covers_group_ranks(candidates.values()):
        job.add_reason(f"no worker of world {job.generation} remains for some group ranks")
    elif job.membership.world and not (
        job.config.use_synchronous_rescaling or job.membership.state_holders & candidates.keys()
    ):
        # The candidates may have joined this world and never met a worker that held the state.
        job.add_reason(f"no remaining worker of world {job.generation} is known to hold the state")


def _starting_point(job: JobState, attempt: Attempt, reported_step: int) -> Iterator[str]:
    """What the commit's reason says about the new world's first step; publishes lost progress."""
    if not attempt.source:
        return
    if remark := initial_state_remark(attempt.source, attempt.stops):
        yield remark
    lost = reported_step - job.training.current_step
    if lost > 0:
        reason = "no remaining worker holds them"
        job.outbox.publish(ProgressLost(lost, job.training.current_step, reason))
        yield f"{counted(lost, 'committed step')} lost: {reason}"


def _keeps_training(job: JobState) -> bool:
    """Whether the current world may train on, complete and with a state holder, until the next one is committed."""
    is_complete = job.membership.state_survives() and job.membership.is_complete
    return is_complete and job.trains and not (job.must_stop or job.config.use_synchronous_rescaling)


def _with_data(job: JobState, workers: Iterable[str]) -> list[str]:
    return [worker for worker in workers if job.members[worker].with_data]


def _type(before: int, after: int) -> RescaleType:
    if after == before:
        return RescaleType.REPLACE
    return RescaleType.SCALE_UP if after > before else RescaleType.SCALE_DOWN
