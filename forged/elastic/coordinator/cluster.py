"""The training of one job: who is in its world, and how one world becomes the next.

Law: everything that happens comes in as a call with `now` and goes out as facts, writes and probes; nothing here waits.
Every decision says in words why it was taken. There is one committed world at a time, each under a generation of its
own, and between two of them one attempt: what belongs to an older attempt is refused. What is kept in the store is
enough to go on after a crash; the rest comes back as evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

from forged.elastic.compatibility import SharedConfig, require_compatible
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.coordinator.failure_budget import FailureBudget
from forged.elastic.coordinator.step_witnesses import StepWitnesses, state_at, state_behind
from forged.elastic.failure_detector.detector import NEVER, FailureDetector
from forged.elastic.failure_detector.peer_reports import PeerReports
from forged.elastic.failure_detector.suspicion import Suspicions
from forged.elastic.failure_detector.timeouts import keeping_others
from forged.elastic.membership.member import COLLECTIVES_PER_WORLD, Member
from forged.elastic.membership.registry import MemberRegistry
from forged.elastic.membership.world_membership import WorldMembership
from forged.elastic.messages import (
    AttemptMembers,
    JobAborted,
    JobCompleted,
    JobPaused,
    JobResumed,
    JobWaiting,
    ProgressLost,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerDraining,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
)
from forged.elastic.model import GlobalTrainingState, RescaleType
from forged.elastic.outbox import Moment, Outbox
from forged.elastic.phases import OVER, Cause, Phase, following, require_not_over
from forged.elastic.rescale.attempt import Attempt, Stage, StopReport, brought_along
from forged.elastic.rescale.ranks import assign_ranks
from forged.elastic.rescale.scaling import ScalingBase, paces
from forged.errors import RequestRefused, Unavailable
from forged.jobs.model import SettingValue
from forged.kernel.messages import Fact
from forged.phrases import REASONS_MAX, counted, in_words, is_or_are, joined, too_few

EVIDENCE_WAIT_S = 1.0
"""How long a worker's word that it does not reach another waits for what bears it out."""
SPOILT_DOUBLED_MAX = 6
"""How often the time is doubled, from a second on, that newcomers wait longer since others died of being taken in."""
WISH = "an operator's wish"


class Cluster:
    """The workers and the world of one job."""

    def __init__(self, job: str, settings: Mapping[str, SettingValue], key: bytes = b"") -> None:
        self.job = job
        self.key = key
        """The secret of the job's workers."""
        self.settings = dict(settings)
        self.config = ElasticTrainingConfig.from_settings(settings)
        self.known = False
        """Whether the store has a record of it."""
        self.phase = Phase.FORMING
        self.paused = False
        self.paused_because = ""
        """Why it rests, or rested last."""
        self.state = GlobalTrainingState()
        self.attempts = 0
        self.told_over = 0
        """The newest attempt that was given up because a daemon died over it."""
        self.failures = FailureBudget()
        self.base = ScalingBase()
        self.reason = ""
        """Why the phase is what it is."""
        self.why: list[str] = []
        """What has happened since the last commit that makes a new world necessary."""
        self.shared_config: SharedConfig | None = None
        """What all workers have to have in shared_config; None while none has said it."""
        self.cause = 0
        """The id of the fact that the next rescale, or what is left of this one, follows from."""
        self.membership = WorldMembership(job, self.config)
        self.attempt: Attempt | None = None
        self.out = Outbox()
        self.watch = FailureDetector(self.out)
        self._hole_at: float | None = None
        """Since when somebody is missing in the world, or from the attempt."""
        self._hole_is_told = False
        """Whether a fact tells of the hole, which then is the cause of what follows."""
        self._wanted_at: float | None = None
        """Since when somebody wants a rescale at once."""
        self._waiting_at: float | None = None
        """Since when there are too few workers."""
        self._resumed_at = -NEVER
        """Since when this daemon has the job."""
        self.advanced_at = -NEVER
        """When anybody of the world was known to have come further last, or could first."""
        self._quarrels = Suspicions(self.membership, self.watch)
        self._witnesses = StepWitnesses()
        self._troubles: set[str] = set()
        """Those of the reasons that only tell of what some other one explains."""
        self._must_stop = False
        """Whether all stop for the next world, whatever the settings say: this one cannot go on, or is not to."""
        self._furthest = 0
        """How far the training was told to be since it trains no more: that may be lost with those who say so."""
        self._spoilt = 0
        """How many attempts have lost newcomers, and nobody else, since somebody was taken in."""

    def configure(self, settings: Mapping[str, SettingValue]) -> None:
        """Go by these settings from now on; the workers do so when they have heard of them."""
        before, self.config = self.config, ElasticTrainingConfig.from_settings(settings)
        self.membership.config = self.config
        self.settings = dict(settings)
        for member in self.members.values():
            member.reconsider(before, self.config)

    @property
    def members(self) -> MemberRegistry:
        """Who has registered."""
        return self.membership.members

    @property
    def generation(self) -> int:
        """The number of the committed world."""
        return self.membership.topology.epoch

    @property
    def over(self) -> bool:
        """Whether nothing will happen any more."""
        return self.phase in OVER

    @property
    def trains(self) -> bool:
        """Whether the committed world makes steps: it does so until its members are to stop for another."""
        return self.phase is Phase.RUNNING or (self.attempt is not None and self.attempt.in_background)

    @property
    def complaints(self) -> PeerReports:
        """What workers have said of each other."""
        return self._quarrels.complaints

    def resume_from_store(self, now: Moment) -> None:
        """Go on where another daemon, or this one before its store failed, has left off."""
        known = self.members.known
        missing = [
            worker for worker, incarnation in self.membership.world.items() if known(worker, incarnation) is None
        ]
        for member in self.membership.present():
            # So far they were at least.
            member.step = self.state.current_step
        if self.phase is Phase.RESCALING and self.told_over < self.attempts:
            self.told_over = self.attempts
            self._changed(RescaleAborted(self.attempts, "the daemon has begun anew"))
        if missing and not (self.why or self.over):
            self.why = [f"{missing[0]} is gone" if len(missing) == 1 else f"{len(missing)} workers are gone"]
        self._must_stop = bool(self.why)
        self._resumed_at = self.advanced_at = now.monotonic
        self.membership.sort()
        if self.why and self.phase is Phase.RUNNING:
            self._hole_at = now.monotonic
        if self.phase is Phase.WAITING:
            self._waiting_at = now.monotonic

    # Coming and going.

    def require_compatible(self, shared_config: SharedConfig | None) -> None:
        """Refuse who would train with something else than the others do. What nobody has trained with, nor is here to,
        binds nobody."""
        is_settled = bool(self.members or self.generation)
        if shared_config is not None and self.shared_config is not None and is_settled and not self.over:
            require_compatible(self.job, self.shared_config, shared_config)

    def agree(self, shared_config: SharedConfig | None) -> None:
        """A worker that was welcome has said it."""
        if shared_config is not None and shared_config != self.shared_config:
            self.shared_config, self.out.cluster = shared_config, True

    def join(self, newcomer: Member, now: Moment) -> None:
        """Register a worker; the same incarnation again changes nothing but that it is there, if it still is."""
        self._require_alive()
        known = self.members.get(newcomer.id)
        if known is not None and known.incarnation != newcomer.incarnation:
            self._refuse_twin(known, now)
        if known is not None:
            known.client, known.heard_at, known.is_awaited = newcomer.client, now.monotonic, False
            self._put_member(known)
            if newcomer.connected:
                self.returned(known.id, now)
            else:
                self.lost(known.id, now)
            return
        if not self.members:
            self.watch.begin_anew()
        newcomer.seen_at = newcomer.progress_at = now.monotonic
        self.membership.enter(newcomer)
        if not newcomer.connected:
            self.watch.lose(newcomer, now.monotonic)
        self.out.cluster = self.out.cluster or not self.known
        self._put_member(newcomer)
        self.out.say(WorkerJoined(newcomer.worker))
        self._consider(now)

    def leave(self, worker_id: str, incarnation: bytes, now: Moment, *, reason: str, done: bool, step: int) -> None:
        """Let a worker go in good order. One that is not known is gone already."""
        member = self.members.known(worker_id, incarnation)
        if member is None:
            return
        self._progress(member, step, now)
        self._take_word(member, step)
        self._drop(member)
        reason = in_words(reason, "the training is done" if done else "it wanted to")
        self.out.say(WorkerLeft(worker_id, reason))
        if done and self.membership.holds(member) and not self.over:
            # Whoever says that all is done has done the last step together with the others.
            self.state = state_behind(self.state, step or self.state.current_step, now.wall)
            self.out.trigger()
            self._end(Cause.COMPLETED, "the training is done", JobCompleted(self.state.current_step))
        elif self._is_needed(member) and not self.over:
            self._hole(f"{worker_id} left: {reason}", now, is_told=True)
        self._consider(now)

    def died(self, worker_id: str, incarnation: bytes, now: Moment, reason: str) -> None:
        """Take evidence that a worker's process is no more."""
        member = self.members.known(worker_id, incarnation)
        if member is not None:
            self._fail(member, in_words(reason, "its process has ended"), now)
            self._consider(now)

    def lost(self, worker_id: str, now: Moment) -> None:
        """A worker's connection is gone, which proves nothing yet."""
        member = self.members.get(worker_id)
        if member is None or not member.connected:
            return
        if self.over:
            self._drop(member)
            return
        member.lost_at = now.monotonic
        self._quarrels.lost(member, now.monotonic)
        self.watch.lose(member, now.monotonic)
        self._consider(now)

    def returned(self, worker_id: str, now: Moment) -> None:
        """A worker has a connection again."""
        member = self.members.get(worker_id)
        if member is None or member.connected:
            return
        self.watch.found(member, now.monotonic)
        self._consider(now)

    def probed(self, worker_id: str, incarnation: bytes, now: Moment, *, refused: bool) -> None:
        """Take what came of a probe; only a refusal proves something."""
        member = self.members.known(worker_id, incarnation)
        if refused and member is not None and not member.connected:
            self._fail_unseen(member, f"nobody listens at {member.worker.hostname}:{member.worker.port} any more", now)
            self._consider(now)

    # Word of progress. Called for every heartbeat, so it costs next to nothing.

    def heartbeat(
        self,
        worker_id: str,
        incarnation: bytes,
        step: int,
        collective_seq: int,
        now: Moment,
        interval_s: float = 0.0,
        *,
        last_step_done: bool = False,
    ) -> None:
        """A worker's library says that it lives."""
        member = self.members.known(worker_id, incarnation)
        if member is not None:
            member.beat(now.monotonic, interval_s, self.config)
            member.is_awaited = False
            self._progress(member, step, now, collective_seq)
            if member.last_step_done != last_step_done:
                member.last_step_done = last_step_done
                self._put_member(member)

    def pulse(
        self,
        worker_id: str,
        incarnation: bytes,
        step: int,
        collective_seq: int,
        cpu_s: float,
        now: Moment,
        interval_s: float = 0.0,
    ) -> None:
        """A worker's pulse says that its process lives."""
        member = self.members.known(worker_id, incarnation)
        if member is not None:
            member.pulsate(now.monotonic, interval_s, cpu_s)
            member.is_awaited = False
            self._progress(member, step, now, collective_seq)

    def receiving(
        self,
        worker_id: str,
        incarnation: bytes,
        number: int,
        received: tuple[int, int],
        now: Moment,
        *,
        waits: bool,
        trouble: str = "",
        unreached: str = "",
    ) -> None:
        """A member of the attempt is being sent what it needs, or waits for others: both may last.

        Trouble is told, and who does not reach another says whom.
        """
        attempt, member = self.attempt, self.members.known(worker_id, incarnation)
        if attempt is None or member is None or attempt.number != number or worker_id not in attempt.behind:
            return
        member.heard_at = now.monotonic
        if attempt.receive(worker_id, received):
            attempt.heard_at = now.monotonic
        if waits and member.with_data:
            attempt.resting[worker_id] = now.monotonic
        elif attempt.resting.pop(worker_id, None) is not None:
            # What it had to wait for has come: it has all its time from here on.
            attempt.heard_at = now.monotonic
        if trouble:
            attempt.troubles[worker_id] = in_words(trouble, "it did not say why")
        else:
            attempt.troubles.pop(worker_id, None)
        if unreached and unreached == attempt.source:
            self._quarrels.does_not_reach(member, unreached, now.monotonic)
        elif received[0]:
            # It has reached the source since.
            self.complaints.withdraw(worker_id, attempt.source)

    # Answers in an attempt.

    def stopped(self, worker_id: str, incarnation: bytes, number: int, stop: StopReport, now: Moment) -> None:
        """A member of the attempt has stopped."""
        attempt, member = self._answering(worker_id, incarnation, number)
        member.heard_at = now.monotonic
        self._progress(member, stop.step, now)
        self._take_word(member, stop.step)
        if attempt.stage is Stage.PAUSING:
            if self.membership.holds(member) and not attempt.is_at_step_end:
                # The others are at the end of the same step.
                attempt.is_at_step_end, attempt.heard_at = True, now.monotonic
            attempt.stops[worker_id] = stop
            if attempt.stopped and not self._is_doomed:
                self._synchronise(attempt, now)
        self._consider(now)

    def ready(self, worker_id: str, incarnation: bytes, number: int, now: Moment) -> None:
        """A member of the attempt has the source's state, and its training data."""
        attempt, member = self._answering(worker_id, incarnation, number)
        member.heard_at = now.monotonic
        # It has reached the source, and may not have said so since.
        self.complaints.withdraw(worker_id, attempt.source)
        if attempt.stage is not Stage.PAUSING:
            attempt.behind.discard(worker_id)
            if not (attempt.behind or self._is_doomed):
                self._commit(attempt, now)
        self._consider(now)

    def attempt_members(self, worker_id: str, incarnation: bytes) -> AttemptMembers:
        """Who is in the attempt, for one of its members."""
        number = 0 if self.attempt is None else self.attempt.number
        attempt, asking = self._answering(worker_id, incarnation, number)
        there = (self.members[worker] for worker in attempt.members if worker in self.members)
        members = [member for member in there if member.with_data]
        going = {member.id for member in members if member.is_expected_to_go or member.id in attempt.relieved}
        leaving = tuple(member.worker for member in members if member.id in going)
        return AttemptMembers(
            attempt.number,
            tuple(member.worker for member in members if member.id not in going) or leaving,
            leaving,
            self.settings,
            attempt.in_background,
            self.generation,
            self.membership.has_room_beside(attempt.target),
            self.membership.left_out(attempt.target),
            attempt.started_id,
            asking.joined_id,
        )

    @property
    def _is_doomed(self) -> bool:
        """Whether a member of the attempt is gone, so that another attempt follows."""
        return self._hole_at is not None

    def trouble(self, worker_id: str, incarnation: bytes, generation: int, now: Moment, *, peer: str, why: str) -> None:
        """A worker cannot go on with its world. Trouble in an older world is over."""
        member = self.members.known(worker_id, incarnation)
        if member is None or not self.membership.holds(member) or generation != self.generation or self.over:
            return
        if self.trains and not self._is_explained:
            self._quarrels.cannot_go_on(member, peer)
        self._quarrels.does_not_reach(member, peer, now.monotonic)
        if self.trains:
            trouble = f"{worker_id} cannot go on: {in_words(why, 'it did not say why')}"
            self._troubles.add(trouble)
            self._must_stop = True
            other = self.members.get(peer)
            # If its host is gone, the daemon's own connection tells so in a moment; asking it now would hide that.
            self._hole(
                trouble, now, later_s=EVIDENCE_WAIT_S if other is not None and self.membership.holds(other) else 0.0
            )
            self._settle_quarrel(now)
        self._consider(now)

    def _settle_quarrel(self, now: Moment) -> None:
        """Part those who will not work together in any world."""
        loser, worlds = self._quarrels.loser(), self.complaints.worlds
        if loser is not None:
            self._fail(self.members[loser], f"{worlds} worlds in a row could not work with it in them", now)
            self.complaints.clear()

    # What operators want.

    def drain(self, worker_id: str, now: Moment, reason: str) -> None:
        """Have a worker finish its step and go."""
        member = self.members.require(worker_id)
        if member.drain_reason is None:
            member.drain_reason, member.drain_since = in_words(reason, WISH), now.monotonic
            self._put_member(member)
            self.out.say(WorkerDraining(worker_id, member.drain_reason))
            if self._is_needed(member) and self._hole_at is None and self._relief_at() == NEVER:
                self.out.trigger()
            self.membership.send_away(member)
            if self._is_needed(member) and not self.membership.holds(member):
                # It was about to be taken in.
                self._wanted_at = now.monotonic + self.config.failure_window_s
            self._consider(now)

    def may_go(self, member: Member) -> bool:
        """Whether one that is to go may do so now."""
        attempt = self.attempt
        if self.over:
            return True
        if attempt is not None and member.id in attempt.relieved:
            return self._is_spare(member, attempt)
        return self.membership.may_go(member, is_under_way=attempt is not None)

    def _is_spare(self, member: Member, attempt: Attempt) -> bool:
        """Whether the attempt has no use for it any more, and one can be reached whose state is kept."""
        keepers = filter(None, map(self.members.get, attempt.keepers))
        return member.id in attempt.spare and any(keeper.connected for keeper in keepers)

    def evict(self, worker_id: str, now: Moment, reason: str) -> None:
        """Count a worker as dead; that is somebody's will, and says nothing of how the training fares."""
        self._fail(self.members.require(worker_id), f"evicted: {in_words(reason, WISH)}", now, is_uncounted=True)
        self._consider(now)

    def pause(self, now: Moment, reason: str) -> None:
        """Let training rest."""
        self._require_alive()
        if not self.paused:
            self.paused, self.paused_because = True, in_words(reason, WISH)
            self._changed(JobPaused(self.paused_because))

    def resume(self, now: Moment, reason: str) -> None:
        """Let training go on."""
        self._require_alive()
        if self.paused:
            self.paused, self.advanced_at = False, now.monotonic
            for member in self.members.values():
                member.progress_at = now.monotonic
            if self._waiting_at is not None:
                self._waiting_at = now.monotonic
            self._changed(JobResumed(in_words(reason, WISH)))

    def abort(self, now: Moment, reason: str) -> None:
        """Give the training up, as somebody wishes: that follows from nothing that has happened to it."""
        self.cause = 0
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        if self.phase is not Phase.ABORTED:
            self._require_alive()
            reason = in_words(reason, WISH)
            self._end(Cause.ABORTED, reason, JobAborted(reason, self.step))

    def rescale(self, now: Moment, reason: str, *, stops: bool = False) -> None:
        """Agree on a new world now; `stops` tells that nobody is to train until it holds."""
        self._require_alive()
        if not self.members:
            raise RequestRefused("workers_none", f"job {self.job} has no workers", "start some")
        self._must_stop |= stops
        self._wanted_at = now.monotonic
        self._because(in_words(reason, WISH))
        self._consider(now)

    # Time.

    def tick(self, now: Moment) -> None:
        """Do what is due."""
        if not self.over:
            if self._look_at() <= now.monotonic:
                self._look(now)
            self._consider(now)
        if self.over:
            self._forget_gone(now)

    def due_at(self) -> float:
        """When to tick again, by the monotonic clock."""
        if self.over:
            return min((self._gone_at(member) for member in self.members.values()), default=NEVER)
        return min(self._look_at(), self.rescale_at(), self._silent_at(), self.alone_at())

    def _look_at(self) -> float:
        return self.watch.due_at() if self.members else NEVER

    def _silent_at(self) -> float:
        """When those who have not answered have failed."""
        if self.attempt is None or self._is_doomed:
            return NEVER
        return self.attempt.heard_at + (self.config.rescale_timeout_s or NEVER)

    def alone_at(self) -> float:
        """When there have been too few workers for too long."""
        # Who lays a job to rest does not want it given up for resting.
        if self._waiting_at is None or self.paused:
            return NEVER
        return self._waiting_at + self.config.min_workers_timeout_s

    def _gone_at(self, member: Member) -> float:
        return NEVER if member.lost_at is None else member.lost_at + self.config.reconnect_grace_s

    def _forget_gone(self, now: Moment) -> None:
        """Let go of who did not come back to a job that is over."""
        for member in list(self.members.values()):
            if self._gone_at(member) <= now.monotonic:
                self._drop(member)

    def _look(self, now: Moment) -> None:
        """Look at every member."""
        self._forgive(now)
        world = {member.id for member in self.members.values() if self.membership.holds(member)}
        kept = self.membership.retained
        stepping = self._stepping(world)
        for member, why in self.watch.look(self.members, world, kept, self.config, now.monotonic, stepping=stepping):
            self._fail_unseen(member, why, now)

    def _stepping(self, world: Collection[str]) -> Collection[str]:
        """Who of the world may be in a step: all while it trains, and in an attempt those who have yet to stop."""
        if self.paused:
            return ()
        if self.trains:
            return world
        if self.attempt is None or self.attempt.stage is not Stage.PAUSING:
            return ()
        # Asked for one by one, by a thousand.
        return frozenset(self.attempt.waiting_for)

    def _forgive(self, now: Moment) -> None:
        """Hold nothing against anybody that has piled up while this process did not get its turn."""
        late_s = self.watch.late_s(now.monotonic)
        if not late_s:
            return
        for member in self.members.values():
            member.forgive(late_s, now.monotonic)
        self.watch.forgive(now.monotonic)
        self._resumed_at = min(self._resumed_at + late_s, now.monotonic)
        self.advanced_at = min(self.advanced_at + late_s, now.monotonic)
        if self._waiting_at is not None:
            self._waiting_at = min(self._waiting_at + late_s, now.monotonic)
        if self.attempt is not None:
            self.attempt.began_at = min(self.attempt.began_at + late_s, now.monotonic)
            self.attempt.heard_at = min(self.attempt.heard_at + late_s, now.monotonic)

    # Deciding.

    def _consider(self, now: Moment) -> None:
        """Start what has become due."""
        if self.over:
            return
        if self.attempt is not None and self._silent_at() <= now.monotonic:
            self._give_up_silent(self.attempt, now)
        if self._too_many_failures(now) or self._too_long_alone(now):
            return
        if self.rescale_at() > now.monotonic:
            return
        staying, joining = self.membership.staying(), self._take_in(now)
        size = self.membership.size_with(joining)
        if size < self.config.min_workers:
            self._wait(size, now)
        else:
            self._begin(staying, joining, now)

    def _take_in(self, now: Moment) -> list[str]:
        """Who comes into the next world: all who wait. Where the last attempt has lost nobody but newcomers, those it
        has left; the others wait for their time, so that no two who die of it in turn keep the world from training."""
        joining, attempt = self.membership.joining(), self.attempt
        if attempt is None or self._hole_at is None or not self.membership.world or not self.membership.is_whole:
            return joining
        left = [one for one in joining if one in attempt.added and self.members[one].seen_at <= attempt.began_at]
        if len(left) == len(attempt.added):
            return joining
        self._spoilt += 1
        is_enough = self.membership.size_with(left) >= self.config.min_workers
        return left if is_enough and self.growth_at() > now.monotonic else joining

    def rescale_at(self) -> float:
        """When a rescale is due, if nothing happens before."""
        if self._hole_at is not None:
            return self._hole_at + self.config.failure_window_s
        if self._wanted_at is not None:
            return self._wanted_at
        if self.attempt is not None:
            return self._relief_at()
        if self.phase is Phase.RESCALING:
            # A daemon died over an attempt. It starts again when all are back, or have failed.
            is_whole = all(member.connected for member in self.members.values())
            return -NEVER if is_whole else self._resumed_at + self.config.reconnect_grace_s
        return min(self.growth_at(), self._relief_at())

    def growth_at(self) -> float:
        """When those who wait are taken in."""
        if self.phase is not Phase.WAITING and next(self.membership.waiting(), None) is None:
            return NEVER
        joining = self.membership.joining()
        size = self.membership.size_with(joining)
        if size < self.config.min_workers:
            return NEVER
        if self.phase is Phase.WAITING:
            return -NEVER
        if not joining:
            return NEVER
        if size >= self.config.max_workers and not self._spoilt:
            return -NEVER
        # Since when nobody has joined any more.
        joined_at = max(self.members[worker].seen_at for worker in joining)
        pause_s = 2.0 ** min(self._spoilt, SPOILT_DOUBLED_MAX) if self._spoilt else 0.0
        return joined_at + self.config.stability_window_s + pause_s

    def _relief_at(self) -> float:
        """When a world is formed because somebody is to go. Others may be told so in the window."""
        first = self.membership.to_be_relieved(() if self.attempt is None else self.attempt.relieved)
        return NEVER if first is None else first.drain_since + self.config.failure_window_s

    def _begin(self, staying: set[str], joining: list[str], now: Moment) -> None:
        """Start an attempt."""
        world, present = self.membership.world, self.membership.givers()
        if world and not present:
            self._because(
                f"nobody of world {self.generation} is left, so what the first of the others has is the state"
            )
        elif world and not (self.config.use_synchronous_rescaling or self.membership.state_holders & present.keys()):
            # Others may have come into this world and never have met who had the state.
            self._because(f"nobody who is left of world {self.generation} is known to have the state")
        leavers = tuple(name for name in present if name not in staying)
        going = (_is_to_go(present[name]) for name in leavers[:REASONS_MAX])
        reason = "; ".join(dict.fromkeys([*self.why, *going, *joined(joining)])) or self.reason
        goes_on = self._can_go_on
        if self.attempt is not None:
            self.out.say(RescaleAborted(self.attempt.number, reason))
        cause = Cause.RESCALE_RESTARTED if self.phase is Phase.RESCALING else Cause.RESCALE_STARTED
        self._go_on(cause, reason)
        target = assign_ranks(list(world), staying, joining)
        removed = tuple(worker for worker in world if worker not in staying)
        with_data = self._with_data((*target, *leavers))
        in_background = bool(with_data) and goes_on
        self.attempts += 1
        attempt = self.attempt = Attempt(
            number=self.attempts,
            type=_type(len(world), len(target)),
            target=target,
            leavers=leavers,
            added=tuple(joining),
            removed=removed,
            reason=reason,
            began_at=now.monotonic,
            heard_at=now.monotonic,
            stage=Stage.MOVING if in_background else Stage.PAUSING,
            behind=set(with_data) if in_background else set(),
        )
        self._hole_at = self._wanted_at = self._waiting_at = None
        self.membership.expect_leavers(to_go=True)
        self.out.say(
            RescaleStarted(
                attempt=attempt.number,
                type=attempt.type,
                world_size=len(target),
                added=list(attempt.added),
                removed=list(removed),
                reason=reason,
                in_background=in_background,
                leaving=list(leavers),
            )
        )
        # Where nobody is known to train all say with which step, rate and batch they begin: that may be anew.
        if self.membership.is_state_kept() and not (self.config.use_synchronous_rescaling or with_data):
            self._commit(attempt, now)

    @property
    def _can_go_on(self) -> bool:
        """Whether the world may train, as it is, until another one holds, where somebody has its state."""
        is_whole = self.membership.is_state_kept() and self.membership.is_whole
        return is_whole and self.trains and not (self._must_stop or self.config.use_synchronous_rescaling)

    def _with_data(self, target: Iterable[str]) -> list[str]:
        """Who of them holds training data."""
        return [worker for worker in target if self.members[worker].with_data]

    def _synchronise(self, attempt: Attempt, now: Moment) -> None:
        """All have stopped: settle whose state holds."""
        attempt.settle(self._with_data(attempt.members))
        if not attempt.behind:
            self._commit(attempt, now)
            return
        settled = self.synchronising
        assert settled is not None
        self.out.say(settled)

    @property
    def synchronising(self) -> RescaleSynchronising | None:
        """Whose state the members of the attempt take; None while that is not settled, or its worker is gone."""
        attempt = self.attempt
        source = self.members.get(attempt.source) if attempt is not None else None
        if attempt is None or source is None or attempt.stage is not Stage.SYNCHRONISING:
            return None
        return RescaleSynchronising(attempt.number, source.worker, attempt.step, len(attempt.takers))

    def _commit(self, attempt: Attempt, now: Moment) -> None:
        """Let the new world hold."""
        before, has_stopped = self.membership.topology, bool(attempt.source)
        self.membership.commit(attempt.target, attempt.removed, now.wall, all_have_stopped=has_stopped)
        members = list(self.membership.present())
        known_step, told_step, self._furthest = self.state.current_step, self.step, 0
        if attempt.source:
            self.state = state_at(self.state, attempt.stops[attempt.source], now.wall)
        if not self.base.world:
            self.base = ScalingBase(len(members), self.state.learning_rate, self.state.global_batch_size)
        # Where nobody has stopped, and the rate does not follow the world, it is whatever the workers have by now.
        is_known = bool(attempt.source) or self.config.scale_batch_with_world
        rate, batch = self.paces(len(members)) if is_known else (0.0, 0)
        self.state = GlobalTrainingState(
            self.state.current_epoch, self.state.current_step, rate, batch, len(members), now.wall
        )
        self._witnesses.begin_anew()
        self.failures.committed(self.state.current_step)
        if self.state.current_step > known_step:
            # The world before has come to something, as is only known now that all have said where they are.
            self.complaints.clear()
        reason = "; ".join([attempt.reason, *self._beginning(attempt, told_step)])
        self.attempt, self.why = None, []
        self.advanced_at = now.monotonic
        self._must_stop = False
        self._troubles.clear()
        self._spoilt = 0 if attempt.added else self._spoilt
        for leaver in filter(None, map(self.members.get, attempt.leavers)):
            # Until now the others have kept it.
            leaver.drain_since = now.monotonic
        for member in members:
            self.watch.recovered(member, self.state.current_step)
            member.step, member.progress_at = self.state.current_step, now.monotonic
        self._go_on(Cause.RESCALE_COMPLETED, reason)
        self.out.world = True
        self.out.say(
            RescaleCompleted(
                attempt=attempt.number,
                type=attempt.type,
                delta=before.delta_to(self.membership.topology),
                step=self.state.current_step if attempt.source else None,
                epoch=self.state.current_epoch if attempt.source else None,
                learning_rate=rate,
                global_batch_size=batch,
                added=list(attempt.added),
                removed=list(attempt.removed),
                reason=reason,
                took_s=round(now.monotonic - attempt.began_at, 6),
            )
        )

    def _beginning(self, attempt: Attempt, known_step: int) -> Iterator[str]:
        """What there is to say of where the new world begins; steps that are gone are told by themselves, too."""
        if attempt.source and (brought := brought_along(attempt.source, attempt.stops)):
            yield brought
        lost = known_step - self.state.current_step
        if attempt.source and lost > 0:
            why = "nobody who had them is left"
            self.out.say(ProgressLost(lost, self.state.current_step, why))
            yield f"{counted(lost, 'committed step')} {is_or_are(lost)} lost: {why}"

    def paces(self, world: int) -> tuple[float, int]:
        """The learning rate and the global batch for a world of that size."""
        return paces(self.config, self.base, self.state, world)

    def _give_up_silent(self, attempt: Attempt, now: Moment) -> None:
        """Fail those for whom an attempt has waited too long."""
        late = list(keeping_others(attempt, self.membership, self.complaints, now.monotonic, trains=self.trains))
        if not late:
            attempt.heard_at = now.monotonic
        for member, why in late:
            self._fail(member, why, now)

    def _wait(self, there: int, now: Moment) -> None:
        """Rest until there are enough workers."""
        self._hole_at = self._wanted_at = None
        if self.phase is Phase.FORMING or self._waiting_at is not None:
            return
        if self.attempt is not None:
            self.out.say(RescaleAborted(self.attempt.number, "too few workers are left"))
            self.attempt = None
        self.membership.expect_leavers(to_go=False)
        if self.phase is not Phase.WAITING:
            self._go_on(Cause.TOO_FEW, too_few(there, self.config.min_workers))
            self.out.say(JobWaiting(there, self.config.min_workers))
        self._waiting_at = now.monotonic

    def _too_long_alone(self, now: Moment) -> bool:
        if self.phase is Phase.FORMING:
            self._see_whether_short(now)
        if self.alone_at() > now.monotonic:
            return False
        limit_s = self.config.min_workers_timeout_s
        self._give_up(f"fewer than {self.config.min_workers} workers for {limit_s:g} s")
        return True

    def _see_whether_short(self, now: Moment) -> None:
        needed = self.config.min_workers
        # The first few will do: this is asked whenever somebody joins.
        if not self.members or sum(1 for _ in islice(self.membership.waiting(), needed)) >= needed:
            self._waiting_at = None
        elif self._waiting_at is None:
            self._waiting_at = now.monotonic

    def _too_many_failures(self, now: Moment) -> bool:
        why = self.failures.too_many(len(self.membership.world), self.config)
        if why is not None:
            self._give_up(why)
        return self.over

    def _fail_unseen(self, member: Member, reason: str, now: Moment) -> None:
        """Let one fail of which nothing is known but that it is not there. Who was not seen since this daemon has begun
        may have left in good order when there was none, and nobody can tell."""
        if member.is_awaited:
            reason += "; it went while there was no daemon, which counts towards no limit"
        self._fail(member, reason, now, is_uncounted=member.is_awaited)

    def _fail(self, member: Member, reason: str, now: Moment, *, is_uncounted: bool = False) -> None:
        rank = self.membership.topology.rank_of(member.worker) if self.membership.holds(member) else -1
        self._drop(member)
        self.out.say(WorkerFailed(member.id, rank, reason))
        if self.over:
            return
        if rank >= 0 and not is_uncounted and member.drain_reason is None:
            self.failures.count(self.state.current_step)
            if self.failures.too_many(len(self.membership.world), self.config) is not None:
                # Of several failures, the one that is too many is what the job's end follows from.
                self.out.trigger()
        if self._is_needed(member):
            self._hole(f"{member.id} failed: {reason}", now, is_told=True)

    def _is_needed(self, member: Member) -> bool:
        """Whether the world, or the attempt at one, cannot go on without it."""
        attempt = self.attempt
        if attempt is None:
            return self.membership.holds(member)
        return member.id in attempt and member.id not in attempt.spare

    @property
    def _is_explained(self) -> bool:
        """Whether somebody is missing, as a fact tells."""
        return self._hole_is_told and self._hole_at is not None

    def _hole(self, why: str, now: Moment, *, is_told: bool = False, later_s: float = 0.0) -> None:
        """Somebody is missing, as the fact that was said last tells or none does; others may follow in the window.

        That begins `later_s` later, if nothing else makes it begin before.
        """
        was_told = self._is_explained
        if is_told:
            self.complaints.explain(self.generation)
            self.why = [reason for reason in self.why if reason not in self._troubles]
        if is_told or not was_told:
            self._because(why)
        if is_told and not was_told:
            self.out.trigger()
        self._hole_is_told = is_told or was_told
        begins_at = now.monotonic + later_s
        self._hole_at = begins_at if self._hole_at is None else min(begins_at, self._hole_at)

    def _because(self, why: str) -> None:
        if why not in self.why and len(self.why) < REASONS_MAX:
            self.why.append(why)
            self.out.cluster = True

    def _progress(self, member: Member, step: int, now: Moment, collective_seq: int = 0) -> None:
        if not member.hear(now.monotonic, step, collective_seq):
            return
        self.watch.recovered(member, step)
        if self.membership.holds(member):
            self.advanced_at = now.monotonic
        # Who has it is believed that all have met; who may not have it would speak for itself.
        is_witness = member.id in self.membership.state_holders or not self.membership.state_holders
        if is_witness and len(self.membership.state_holders) < len(self.membership.world) and self._has_met(member):
            # Nobody goes on in a world before all of it have the state.
            self.membership.have_met()
            self.out.world = True
        if step <= self.state.current_step or not self.membership.holds(member):
            return
        borne_out = self._witnesses.hear(member.id, step, len(self.membership.world))
        if self.trains:
            self._stepped(borne_out, now)
        self._furthest = max(self._furthest, borne_out)

    def _take_word(self, member: Member, step: int) -> None:
        """One that has stopped, or goes, says how far the training is; with nobody else left it is lost."""
        if self.membership.holds(member):
            self._furthest = max(self._furthest, step)

    @property
    def step(self) -> int:
        """How many steps are known to be committed, by whatever was said of it."""
        return max(self.state.current_step, self._furthest)

    def _has_met(self, member: Member) -> bool:
        """Whether it has come to where workers meet in the committed world."""
        first = self.generation * COLLECTIVES_PER_WORLD
        return self.membership.holds(member) and first < member.collective_seq < first + COLLECTIVES_PER_WORLD

    def _stepped(self, step: int, now: Moment) -> None:
        """So many steps are known to be committed."""
        if step > self.state.current_step:
            self.state = state_behind(self.state, step, now.wall)
            self.complaints.clear()
            # Told to the store at once: after a restart they would count with the next failures otherwise.
            self.out.cluster = self.failures.stepped(step) or self.out.cluster

    def _end(self, cause: Cause, reason: str, fact: Fact) -> None:
        self._go_on(cause, reason)
        if self.attempt is not None:
            self.out.say(RescaleAborted(self.attempt.number, reason))
            self.attempt = None
        self._hole_at = self._wanted_at = self._waiting_at = None
        self.out.say(fact)

    # Small things.

    def _go_on(self, cause: Cause, reason: str) -> None:
        self.phase, self.reason = following(self.phase, cause), reason
        self.out.cluster = True

    def _changed(self, fact: Fact) -> None:
        self.out.cluster = True
        self.out.say(fact)

    def _put_member(self, member: Member) -> None:
        self.out.members.add(member.id)

    def _drop(self, member: Member) -> None:
        self.membership.strike(member)
        self.complaints.forget(member.id)
        self.watch.forget(member)
        self.out.members.add(member.id)

    def _answering(self, worker_id: str, incarnation: bytes, number: int) -> tuple[Attempt, Member]:
        attempt = self.attempt
        member = self.members.known(worker_id, incarnation)
        if attempt is None or attempt.number != number or worker_id not in attempt or member is None:
            present = "there is none now" if attempt is None else f"attempt {attempt.number} is under way"
            raise RequestRefused("attempt_over", f"attempt {number} is over; {present}", "go by the newest")
        return attempt, member

    def _require_alive(self) -> None:
        require_not_over(self.job, self.phase, self.reason)

    def _refuse_twin(self, known: Member, now: Moment) -> None:
        if known.connected:
            raise RequestRefused(
                "worker_exists", f"worker {known.id} of job {self.job} is alive", "give this one another id"
            )
        self.watch.probe(known, now.monotonic)
        raise Unavailable(
            "worker_undecided",
            f"the connection of worker {known.id} is lost, and nothing says yet that it died",
            "try again in a moment, or take another id",
        )


def _is_to_go(member: Member) -> str:
    return f"{member.id} is to go: {member.drain_reason}"


def _type(before: int, after: int) -> RescaleType:
    if after == before:
        return RescaleType.REPLACE
    return RescaleType.SCALE_UP if after > before else RescaleType.SCALE_DOWN
