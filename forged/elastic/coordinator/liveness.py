"""Evidence for and against workers being alive: heartbeats, pulses, connections, probes, peer reports, the scan.

Invariants:
- Heartbeats and pulses only record; what has been silent for too long is found by `scan`.
- Silence while the daemon itself was stalled counts against no worker.
"""

from __future__ import annotations

from collections.abc import Collection

from forged.elastic.coordinator import completion, failures, progress
from forged.elastic.coordinator.job_state import NEVER, JobState
from forged.elastic.membership.member import Member
from forged.elastic.messages import AttemptProgress, Heartbeat, Pulse, WorkerStoodStill
from forged.elastic.outbox import Moment
from forged.elastic.rescale.attempt import RECEIVED_BYTES_MIN, Stage
from forged.phrases import in_words

EVIDENCE_WAIT_S = 1.0
"""How long a peer report delays the rescale, so that the daemon's own evidence can arrive first."""
NO_REASON = "no reason given"


# Reports of the worker itself. Heartbeats and pulses come by the thousand, so they cost next to nothing.


def heartbeat(job: JobState, signal: Heartbeat, now: Moment) -> None:
    """Record that a worker's library is alive, and its progress."""
    member = job.members.find(signal.worker_id, signal.incarnation)
    if member is not None:
        member.record_heartbeat(now.monotonic, signal.interval_s, job.config)
        member.is_unseen_since_restart = False
        progress.record(job, member, signal.step, now, signal.collective_seq)
        member.is_done, member.meeting = signal.is_done, signal.meeting
        if member.last_step_done != signal.last_step_done:
            member.last_step_done = signal.last_step_done
            job.store_member(member)
        if signal.is_done:
            completion.consider(job, now)


def pulse(job: JobState, signal: Pulse, now: Moment) -> None:
    """Record that a worker's process is alive, whatever its library does."""
    member = job.members.find(signal.worker_id, signal.incarnation)
    if member is not None:
        member.record_pulse(now.monotonic, signal.interval_s, signal.cpu_s)
        member.is_unseen_since_restart = False
        progress.record(job, member, signal.step, now, signal.collective_seq)


def attempt_progress(job: JobState, signal: AttemptProgress, now: Moment) -> None:
    """Record that a member of the attempt receives state or data, waits for it, or cannot reach its source."""
    worker_id, attempt = signal.worker_id, job.attempt
    member = job.members.find(worker_id, signal.incarnation)
    if attempt is None or member is None or attempt.number != signal.attempt or worker_id not in attempt.unready:
        return
    member.heard_at = now.monotonic
    # A complete shard is progress, however small it is.
    data_bytes = signal.data_bytes + signal.shards * RECEIVED_BYTES_MIN
    if attempt.record_received(worker_id, (signal.state_bytes, data_bytes)):
        attempt.heard_at = now.monotonic
    if signal.is_waiting and member.with_data:
        attempt.waiting_reports[worker_id] = now.monotonic
    elif attempt.waiting_reports.pop(worker_id, None) is not None:
        # What it waited for has arrived: its rescale timeout starts now.
        attempt.heard_at = now.monotonic
    if signal.problem:
        attempt.problems[worker_id] = in_words(signal.problem, NO_REASON)
    else:
        attempt.problems.pop(worker_id, None)
    if signal.store_failing_s:
        attempt.store_failing_s[worker_id] = signal.store_failing_s
    else:
        attempt.store_failing_s.pop(worker_id, None)
    source = attempt.source_of(worker_id)
    if signal.unreachable_peer and signal.unreachable_peer == source:
        job.suspicions.report_unreachable(member, signal.unreachable_peer, now.monotonic)
    elif signal.state_bytes:
        # Received bytes show that the source is reachable.
        job.peer_reports.withdraw(worker_id, source)


def peer_report(
    job: JobState, worker_id: str, incarnation: bytes, generation: int, now: Moment, *, peer: str, reason: str
) -> None:
    """Take a worker's word that it cannot continue with its world; reports about older worlds are ignored."""
    member = job.members.find(worker_id, incarnation)
    if member is None or not job.membership.in_world(member) or generation != job.generation or job.over:
        return
    if job.trains and not job.missing_is_explained:
        job.suspicions.report_without_peer(member, peer)
    job.suspicions.report_unreachable(member, peer, now.monotonic)
    if not job.trains:
        return
    text = f"{worker_id} cannot continue: {in_words(reason, NO_REASON)}"
    job.peer_report_reasons.add(text)
    job.must_stop = True
    other = job.members.get(peer)
    # If the peer's host is gone, the daemon's own connection shows it in a moment; a rescale now would hide that.
    delay_s = EVIDENCE_WAIT_S if other is not None and job.membership.in_world(other) else 0.0
    job.note_missing_member(text, now, delay_s=delay_s)
    _evict_most_reported(job, now)


def step_voided(
    job: JobState, worker_id: str, incarnation: bytes, generation: int, now: Moment, *, reason: str
) -> None:
    """Form another world of the same members, because the script of one has voided the step; no worker is to blame."""
    member = job.members.find(worker_id, incarnation)
    if member is None or not job.membership.in_world(member) or generation != job.generation or not job.trains:
        return
    text = in_words(reason, NO_REASON)
    job.peer_report_reasons.add(text)
    job.must_stop = True
    job.note_missing_member(text, now)


def stood_still(job: JobState, worker_id: str, incarnation: bytes, generation: int, *, peer: str, for_s: float) -> None:
    """Record a worker's word that it has stood still without a daemon. It is no evidence about the lost peer."""
    if job.members.find(worker_id, incarnation) is not None and 0 < generation <= job.generation:
        job.outbox.publish(WorkerStoodStill(worker_id, generation, peer, round(for_s, 1)))


def _evict_most_reported(job: JobState, now: Moment) -> None:
    """Evict the worker with the most peer reports, once enough worlds in a row have failed over them."""
    worker, worlds = job.suspicions.worker_to_evict(), job.peer_reports.worlds
    if worker is not None:
        failures.fail(job, job.members[worker], f"most peer reports in {worlds} consecutive worlds", now)
        job.peer_reports.clear()


# What the daemon sees of connections and processes.


def connection_lost(job: JobState, worker_id: str, now: Moment) -> None:
    """Note that a worker's connection is gone, which proves nothing yet."""
    member = job.members.get(worker_id)
    if member is None or not member.connected:
        return
    if job.over:
        job.remove_member(member)
        return
    member.lost_at = now.monotonic
    job.suspicions.connection_lost(member, now.monotonic)
    job.detector.connection_lost(member, now.monotonic)


def connection_restored(job: JobState, worker_id: str, now: Moment) -> None:
    member = job.members.get(worker_id)
    if member is not None and not member.connected:
        job.detector.connection_restored(member, now.monotonic)


def probed(job: JobState, worker_id: str, incarnation: bytes, now: Moment, *, refused: bool) -> None:
    """Take a probe's result; only a refusal is evidence, that the process of a lost worker is gone."""
    member = job.members.find(worker_id, incarnation)
    if refused and member is not None and not member.connected:
        address = f"{member.worker.hostname}:{member.worker.port}"
        failures.fail_missing(job, member, f"{address} refuses connections", now)


# What time alone shows.


def scan_at(job: JobState) -> float:
    return job.detector.due_at() if job.members else NEVER


def scan(job: JobState, now: Moment) -> None:
    """Judge every member; fail those that the failure detector finds dead."""
    if stall_s := job.detector.daemon_stall_s(now.monotonic):
        job.extend_deadlines(stall_s, now.monotonic)
    world = {member.id for member in job.members.values() if job.membership.in_world(member)}
    dead = job.detector.scan(
        job.members, world, job.membership.retained, job.config, now.monotonic, stepping=_stepping(job, world)
    )
    for member, reason in dead:
        failures.fail_missing(job, member, reason, now)


def _stepping(job: JobState, world: Collection[str]) -> Collection[str]:
    """The members that may be in a step: all while the world trains, else those that have yet to stop."""
    if job.paused:
        return ()
    if job.trains:
        return world
    if job.attempt is None or job.attempt.stage is not Stage.STOPPING:
        return ()
    # A set, because each of a thousand members is looked up in it.
    return frozenset(job.attempt.waiting_for)


def forget_at(job: JobState, member: Member) -> float:
    """When a member of a job that is over is forgotten."""
    return NEVER if member.lost_at is None else member.lost_at + job.config.reconnect_grace_s


def forget_lost(job: JobState, now: Moment) -> None:
    """Remove the members of a job that is over which did not reconnect."""
    for member in list(job.members.values()):
        if forget_at(job, member) <= now.monotonic:
            job.remove_member(member)
