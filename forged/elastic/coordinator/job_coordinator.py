"""The coordinator of one job: takes every input, hands it to the part that handles it, then lets the schedule decide.

Invariants:
- Every input is a call with `now`; every output is a fact, a write or a probe in the outbox. No call waits.
- Answers to an older attempt are refused; reports about an older world are ignored.
- What the store keeps is enough to continue after a crash; the rest comes back as evidence.
"""

from __future__ import annotations

from forged.elastic.compatibility import FIX, SharedConfig, require_compatible
from forged.elastic.coordinator import completion, failures, liveness, operations, progress, rescale_schedule, rescaling
from forged.elastic.coordinator.job_state import NEVER, JobState
from forged.elastic.membership.member import Member
from forged.elastic.messages import (
    AttemptMembers,
    AttemptProgress,
    GroupBroken,
    Heartbeat,
    Pulse,
    RescaleAborted,
    RescaleSynchronising,
    WorkerJoined,
    WorkerLeft,
)
from forged.elastic.outbox import Moment
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import StopReport
from forged.errors import RequestRefused, Unavailable
from forged.phrases import in_words


class JobCoordinator(JobState):
    """The state of one job, with the calls that change it."""

    def resume_from_store(self, now: Moment) -> None:
        """Continue after a restart of the daemon, or after its store failed."""
        find = self.members.find
        missing = [worker for worker, incarnation in self.membership.world.items() if find(worker, incarnation) is None]
        for member in self.membership.present():
            member.step = self.training.current_step
        if self.phase is Phase.RESCALING and self.interrupted_attempt < self.attempts:
            self.interrupted_attempt = self.attempts
            self.publish_change(RescaleAborted(self.attempts, "the daemon restarted"))
        # The world of a job that was reopened, and forms, is not to be continued.
        is_to_continue = not self.over and self.phase is not Phase.FORMING
        if missing and is_to_continue and not self.rescale_reasons:
            which = f"{missing[0]} is" if len(missing) == 1 else f"{len(missing)} workers are"
            self.rescale_reasons = [f"{which} missing"]
        self.must_stop = bool(self.rescale_reasons)
        self.loaded_at = self.last_progress_at = now.monotonic
        self.membership.classify()
        if self.rescale_reasons and self.phase is Phase.RUNNING:
            self.missing_since = now.monotonic
        if self.phase is Phase.WAITING:
            self.too_few_since = now.monotonic

    # Registration and leaving.

    def require_compatible(self, shared_config: SharedConfig | None) -> None:
        """Refuse a worker whose shared configuration differs from the job's, once a worker has trained with that."""
        is_settled = bool(self.members or self.generation)
        if shared_config is not None and self.shared_config is not None and is_settled and not self.over:
            require_compatible(self.name, self.shared_config, shared_config)

    def adopt_shared_config(self, shared_config: SharedConfig | None) -> None:
        if shared_config is not None and shared_config != self.shared_config:
            self.shared_config, self.outbox.job = shared_config, True

    def settle_group_size(self, group_size: int) -> None:
        """Take the group size of the job's first worker; refuse a worker with another one."""
        known, is_settled = self.membership.group_size, bool(self.members or self.generation)
        if known == group_size or self.over:
            return
        if group_size > self.config.max_workers:
            text = f"group_size must be <= max_workers of job {self.name}, {self.config.max_workers}, got {group_size}"
            raise RequestRefused("group_invalid", text, "raise max_workers, or use smaller groups")
        if is_settled:
            text = f"job {self.name} trains in groups of {known}, this worker is of a group of {group_size}"
            raise RequestRefused("group_size_differs", text, FIX)
        self.membership.group_size, self.outbox.job = group_size, True

    def join(self, newcomer: Member, now: Moment) -> None:
        """Register a worker. If the same incarnation is registered already, only its connection is updated."""
        self.require_not_over()
        known = self.members.get(newcomer.id)
        if known is not None and known.incarnation != newcomer.incarnation:
            self._refuse_duplicate(known, now)
        if known is not None:
            known.client, known.heard_at, known.is_unseen_since_restart = newcomer.client, now.monotonic, False
            self.store_member(known)
            if newcomer.connected:
                self.connection_restored(known.id, now)
            else:
                self.connection_lost(known.id, now)
            return
        self._refuse_taken_place(newcomer, now)
        if not self.members:
            self.detector.reset()
        newcomer.seen_at = newcomer.progress_at = now.monotonic
        self.membership.add(newcomer)
        if not newcomer.connected:
            self.detector.connection_lost(newcomer, now.monotonic)
        self.outbox.job = self.outbox.job or not self.is_stored
        self.store_member(newcomer)
        self.outbox.publish(WorkerJoined(newcomer.worker))
        rescale_schedule.consider(self, now)

    def _refuse_duplicate(self, known: Member, now: Moment) -> None:
        if known.connected:
            text = f"worker {known.id} of job {self.name} is alive"
            raise RequestRefused("worker_exists", text, "use another worker id")
        self.detector.probe(known, now.monotonic)
        raise Unavailable(
            "worker_undecided",
            f"worker {known.id} has lost its connection, and may still be alive",
            "retry in a moment, or use another worker id",
        )

    def _refuse_taken_place(self, newcomer: Member, now: Moment) -> None:
        """A place in a group belongs to one process at a time."""
        partners = self.membership.partners(newcomer)
        other = next((one for one in partners if one.group_rank == newcomer.group_rank), None)
        if other is None:
            return
        place = f"rank {newcomer.group_rank} of group {newcomer.group} of job {self.name}"
        if other.connected:
            fix = "give each group a name of its own, and each of its processes a group_rank of its own"
            raise RequestRefused("group_rank_taken", f"worker {other.id} is {place}, and is alive", fix)
        self.detector.probe(other, now.monotonic)
        text = f"worker {other.id}, which is {place}, has lost its connection, and may still be alive"
        raise Unavailable("worker_undecided", text, "retry in a moment, or use another group name")

    def leave(self, worker_id: str, incarnation: bytes, now: Moment, *, reason: str, done: bool, step: int) -> None:
        """Remove a worker that leaves in good order; an unknown worker has left already."""
        member = self.members.find(worker_id, incarnation)
        if member is None:
            return
        completion.require_possible(self, member, step, now)
        progress.record(self, member, step, now)
        progress.record_final_report(self, member, step)
        partners = [] if done or self.over else self.group_broken_without(member)
        self.remove_member(member)
        reason = in_words(reason, "training completed" if done else "its own request")
        self.outbox.publish(WorkerLeft(worker_id, reason))
        if done and self.membership.in_world(member) and not self.over:
            completion.claim(self, step, now)
        if self.requires(member) and not self.over:
            delay_s = completion.confirmation_wait_s(self) if done else 0.0
            self.note_missing_member(f"{worker_id} left: {reason}", now, is_reported=True, delay_s=delay_s)
        if partners:
            self.outbox.publish(GroupBroken(member.group, worker_id, partners))
        rescale_schedule.consider(self, now)

    def may_leave(self, member: Member) -> bool:
        """Whether a draining worker may leave now."""
        return operations.may_leave(self, member)

    # Liveness.

    def heartbeat(self, signal: Heartbeat, now: Moment) -> None:
        liveness.heartbeat(self, signal, now)

    def pulse(self, signal: Pulse, now: Moment) -> None:
        liveness.pulse(self, signal, now)

    def died(self, worker_id: str, incarnation: bytes, now: Moment, reason: str) -> None:
        """Take evidence that a worker's process has ended."""
        member = self.members.find(worker_id, incarnation)
        if member is not None:
            failures.fail(self, member, in_words(reason, "its process has ended"), now)
            rescale_schedule.consider(self, now)

    def connection_lost(self, worker_id: str, now: Moment) -> None:
        liveness.connection_lost(self, worker_id, now)
        rescale_schedule.consider(self, now)

    def connection_restored(self, worker_id: str, now: Moment) -> None:
        liveness.connection_restored(self, worker_id, now)
        rescale_schedule.consider(self, now)

    def probed(self, worker_id: str, incarnation: bytes, now: Moment, *, refused: bool) -> None:
        liveness.probed(self, worker_id, incarnation, now, refused=refused)
        rescale_schedule.consider(self, now)

    def peer_report(
        self,
        worker_id: str,
        incarnation: bytes,
        generation: int,
        now: Moment,
        *,
        peer: str,
        reason: str,
        step_voided: bool = False,
    ) -> None:
        if step_voided:
            liveness.step_voided(self, worker_id, incarnation, generation, now, reason=reason)
        else:
            liveness.peer_report(self, worker_id, incarnation, generation, now, peer=peer, reason=reason)
        rescale_schedule.consider(self, now)

    def stood_still(self, worker_id: str, incarnation: bytes, generation: int, *, peer: str, for_s: float) -> None:
        liveness.stood_still(self, worker_id, incarnation, generation, peer=peer, for_s=for_s)

    # Attempts.

    def stopped(self, worker_id: str, incarnation: bytes, number: int, report: StopReport, now: Moment) -> None:
        rescaling.stopped(self, worker_id, incarnation, number, report, now)
        rescale_schedule.consider(self, now)

    def attempt_progress(self, signal: AttemptProgress, now: Moment) -> None:
        liveness.attempt_progress(self, signal, now)

    def ready(self, worker_id: str, incarnation: bytes, number: int, now: Moment) -> None:
        rescaling.ready(self, worker_id, incarnation, number, now)
        rescale_schedule.consider(self, now)

    def attempt_members(self, worker_id: str, incarnation: bytes) -> AttemptMembers:
        return rescaling.attempt_members(self, worker_id, incarnation)

    @property
    def synchronising(self) -> RescaleSynchronising | None:
        return rescaling.synchronising(self)

    # Operations.

    def drain(self, worker_id: str, now: Moment, reason: str) -> None:
        operations.drain(self, worker_id, now, reason)
        rescale_schedule.consider(self, now)

    def evict(self, worker_id: str, now: Moment, reason: str) -> None:
        operations.evict(self, worker_id, now, reason)
        rescale_schedule.consider(self, now)

    def pause(self, now: Moment, reason: str) -> None:
        operations.pause(self, reason)

    def resume(self, now: Moment, reason: str) -> None:
        operations.resume(self, now, reason)

    def rescale(self, now: Moment, reason: str, *, synchronous: bool = False) -> None:
        operations.rescale(self, now, reason, synchronous=synchronous)
        rescale_schedule.consider(self, now)

    def abort(self, now: Moment, reason: str) -> None:
        operations.abort(self, reason)

    def reopen(self, now: Moment, reason: str) -> None:
        operations.reopen(self, now, reason)

    # Time.

    def tick(self, now: Moment) -> None:
        """Do what is due."""
        if not self.over:
            if liveness.scan_at(self) <= now.monotonic:
                liveness.scan(self, now)
            rescale_schedule.consider(self, now)
        if self.over:
            liveness.forget_lost(self, now)

    def due_at(self) -> float:
        """When to tick again, by the monotonic clock."""
        if self.over:
            return min((liveness.forget_at(self, member) for member in self.members.values()), default=NEVER)
        return min(
            liveness.scan_at(self),
            rescale_schedule.rescale_at(self),
            rescale_schedule.attempt_timeout_at(self),
            rescale_schedule.abort_at(self),
        )
