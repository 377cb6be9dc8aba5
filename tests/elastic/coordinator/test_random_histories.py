"""Random histories of one job: whatever happens, in any order, with restarts of the daemon, its facts stay true.

Workers behave as the worker library does: they stop, meet, take the state and commit steps, some hold training data,
draining ones leave when they may, and they die or lose their connections. The daemon loses what it has not stored.
After every event all facts so far are checked, and at the end, without further faults, the job must come to rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.coordinator.records import changed_records, restore
from forged.elastic.failure_detector.detector import SCAN_INTERVAL_S
from forged.elastic.membership.member import COLLECTIVES_PER_WORLD, Member
from forged.elastic.messages import (
    Heartbeat,
    JobAborted,
    JobCompleted,
    JobReopened,
    Pulse,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerFailed,
    WorkerJoined,
)
from forged.elastic.model import ClusterTopology, RescaleType
from forged.elastic.outbox import Moment
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import Stage, StopReport, choose_sources
from forged.elastic.rescale.ranks import assign_ranks
from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Fact
from tests.elastic.coordinator_playbook import JOB, START_S, WALL_S, incarnation, newcomer

NAMES = [f"w{number}" for number in range(6)]
SETTLED_WITHIN_S = 200.0
"""So long after the last fault the job has a world, or is over, or waits for workers that do not exist."""


@dataclass
class Process:
    """A worker's process."""

    name: str
    life: int
    alive: bool = True
    connected: bool = True
    step: int = 0
    finished: bool = False
    holds_state: bool = False
    world: int = 0
    """The generation of the world that it is in; 0 for none."""
    answered: int = 0
    """The last attempt that it has said to have stopped for."""
    last_step_done: bool = False
    """Whether it makes no more steps."""

    @property
    def incarnation(self) -> bytes:
        return incarnation(self.name, self.life)

    @property
    def key(self) -> tuple[str, bytes]:
        return self.name, self.incarnation


@dataclass
class Told:
    """The facts so far, as a subscriber knows them."""

    topology: ClusterTopology = field(default_factory=ClusterTopology)
    worlds: dict[int, tuple[str, ...]] = field(default_factory=dict)
    attempt: RescaleStarted | None = None
    attempts: int = 0
    step: int = 0
    over: bool = False


def refused(act: Callable[[], None]) -> str:
    """With which code a call was refused; empty where it was not."""
    try:
        act()
    except (RequestRefused, Unavailable) as error:
        return error.code
    return ""


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.time = START_S
        self.processes: dict[str, Process] = {}
        self.stored: dict[str, bytes] = {}
        self.told = Told()
        self.committed = 0
        """The highest step that any worker was told to be committed."""
        self.met = 0
        """The last world of which all have met, and so have the state."""
        self.with_data: set[str] = set()
        self.lives = dict.fromkeys(NAMES, 0)
        self.store_fails = False

    @initialize(
        least=st.integers(1, 3),
        most=st.sampled_from([3, 5, 100]),
        failures=st.sampled_from([3, 50, 1_000]),
        tolerance=st.sampled_from([0, 50, 100, 100]),
        evict=st.booleans(),
        waits=st.sampled_from([None, 60_000]),
        window=st.sampled_from([0, 50]),
        with_data=st.sampled_from([[], [], NAMES, NAMES[::2]]),
        synchronous=st.booleans(),
    )
    def begin(
        self,
        least: int,
        most: int,
        failures: int,
        tolerance: int,
        evict: bool,
        waits: int | None,
        window: int,
        with_data: list[str],
        synchronous: bool,
    ) -> None:
        self.with_data = set(with_data)
        self.coordinator = JobCoordinator(
            JOB,
            {
                "use_synchronous_rescaling": synchronous,
                "min_workers": least,
                "max_workers": most,
                "max_consecutive_failures": failures,
                "failure_tolerance_percentage": tolerance,
                "evict_stalled": evict,
                "min_workers_timeout_ms": waits,
                "failure_window_ms": window,
                "stability_window_ms": 2_000,
                "rescale_silence_ms": 5_000,
                "worker_heartbeat_timeout_ms": 3_000,
                "reconnect_grace_ms": 4_000,
                "stall_timeout_ms": 10_000,
            },
        )

    @property
    def now(self) -> Moment:
        return Moment(WALL_S + self.time, self.time)

    @property
    def phase(self) -> Phase:
        return self.coordinator.phase

    # Workers that join, leave and die.

    @rule(name=st.sampled_from(NAMES))
    def start_a_worker(self, name: str) -> None:
        """A new process under a name that may be another's still."""
        known = self.coordinator.members.get(name)
        was_over = self.coordinator.over
        life = self.lives[name] + 1
        code = refused(lambda: self.coordinator.join(self.newcomer(name, life), self.now))
        if was_over:
            assert code == "job_over"
        elif known is not None:
            assert code == ("worker_exists" if known.connected else "worker_undecided")
        else:
            assert code == ""
            # It may be in a world at once.
            before, self.processes[name] = self.processes.get(name), Process(name, life)
            if self.settle():
                self.lives[name] = life
            elif before is None:
                del self.processes[name]
            else:
                self.processes[name] = before

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=2))
    def start_several_and_let_them_train(self, names: set[str]) -> None:
        for name in sorted(names):
            self.start_a_worker(name)
        self.pass_time(self.coordinator.config.stability_window_s)
        self.answer_all()
        self.meet()
        self.train(set(NAMES), finished=True)

    @rule(name=st.sampled_from(NAMES))
    def say_hello_again(self, name: str) -> None:
        """The same process registers again: that changes nothing."""
        process = self.processes.get(name)
        if process is None or not self.is_member(process) or not process.connected or self.coordinator.over:
            return
        before = list(self.coordinator.members)
        self.coordinator.join(self.newcomer(name, process.life), self.now)
        assert list(self.coordinator.members) == before
        assert not [fact for fact in self.coordinator.outbox.facts if isinstance(fact, WorkerJoined)]
        self.settle()

    @rule(name=st.sampled_from(NAMES), done=st.sampled_from([False, False, False, True]))
    def leave(self, name: str, done: bool) -> None:
        process = self.living(name)
        if process is not None:
            done = done and process.world == self.coordinator.generation and not process.finished
            self.coordinator.leave(name, process.incarnation, self.now, reason="", done=done, step=process.step)
            if self.settle():
                process.alive = process.connected = False

    @rule(name=st.sampled_from(NAMES))
    def leave_if_it_may(self, name: str) -> None:
        """What a worker does that was told to go."""
        process, member = self.living(name), self.coordinator.members.get(name)
        if process is None or member is None or not (self.is_member(process) and process.connected):
            return
        if member.drain_reason is None or not self.coordinator.may_leave(member):
            return
        others = [one for one in self.coordinator.members.values() if one is not member]
        if not self.coordinator.over and self.has_all(process) and any(one.drain_reason is None for one in others):
            reached = [self.processes[one.id] for one in others if one.connected]
            assert any(self.has_all(other) for other in reached), "it takes the only state along"
        self.leave(name, done=False)

    @rule(name=st.sampled_from(NAMES))
    def part(self, name: str) -> None:
        """One that was told to go, and may, saves what it has first."""
        process, member = self.living(name), self.coordinator.members.get(name)
        if process is None or member is None or not (self.is_member(process) and process.connected):
            return
        process.last_step_done = member.drain_reason is not None and self.coordinator.may_leave(member)
        self.beat(name, by_pulse=False)

    @rule(name=st.sampled_from(NAMES), told=st.booleans())
    def kill(self, name: str, told: bool) -> None:
        """Its process ends; the pulse says so, or only the connection breaks."""
        process = self.living(name)
        if process is not None:
            process.alive = False
            self.break_connection(name)
            if told:
                self.coordinator.died(name, process.incarnation, self.now, "its process has ended")
                self.settle()

    @rule(name=st.sampled_from(NAMES))
    def break_connection(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.connected:
            process.connected = False
            if self.is_member(process):
                self.coordinator.connection_lost(name, self.now)
                self.settle()

    @rule(name=st.sampled_from(NAMES))
    def mend_connection(self, name: str) -> None:
        process = self.living(name)
        if process is not None and not process.connected:
            process.connected = True
            if self.is_member(process):
                self.coordinator.connection_restored(name, self.now)
                self.settle()

    @rule(name=st.sampled_from(NAMES))
    def probe(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None:
            self.coordinator.probed(name, process.incarnation, self.now, refused=not process.alive)
            self.settle()

    # What workers do.

    @rule(name=st.sampled_from(NAMES))
    def answer(self, name: str) -> None:
        """Do the next thing that an attempt wants of a worker."""
        process = self.living(name)
        attempt = self.coordinator.attempt
        if process is None or attempt is None or name not in attempt.members or not process.connected:
            return
        if not self.is_member(process):
            return
        if process.answered < attempt.number and attempt.stage is Stage.STOPPING:
            stop = StopReport(process.step, process.holds_state, process.holds_state and process.finished, 0, 0.1, 32)
            self.coordinator.stopped(name, process.incarnation, attempt.number, stop, self.now)
            if self.settle():
                process.answered = attempt.number
                process.world = process.world if self.coordinator.attempt is None else 0
        elif attempt.stage is not Stage.STOPPING and name in attempt.unready:
            before = process.step, process.finished, process.holds_state
            if name in attempt.state_receivers:
                if not self.processes[attempt.source].alive:
                    return
                process.step, process.finished, process.holds_state = attempt.step, False, True
            self.coordinator.ready(name, process.incarnation, attempt.number, self.now)
            if not self.settle():
                process.step, process.finished, process.holds_state = before

    @rule()
    def meet(self) -> None:
        """All members of an asynchronous world meet and agree on the state source."""
        world = [self.processes.get(worker.id) for worker in self.coordinator.membership.topology.workers]
        members = [process for process in world if process is not None and self.may_meet(process)]
        if not members or len(members) < len(world) or self.met == self.coordinator.generation:
            return
        if self.phase is Phase.RUNNING:
            stops = {
                one.name: StopReport(one.step, one.holds_state, one.holds_state and one.finished) for one in members
            }
            self.take_up(stops[choose_sources(tuple(stops), stops)[0]].position, tuple(stops))

    @rule()
    def answer_all(self) -> None:
        for name in NAMES * 2:
            self.answer(name)

    @rule(name=st.sampled_from(NAMES), leaves=st.booleans())
    def go_while_the_others_answer(self, name: str, leaves: bool) -> None:
        if self.coordinator.attempt is None:
            self.want("rescale", "a test")
        self.answer(name)
        if leaves:
            self.leave(name, done=False)
        else:
            self.kill(name, told=True)
        self.answer_all()

    @rule(heard=st.sets(st.sampled_from(NAMES)), finished=st.booleans())
    def train(self, heard: set[str], finished: bool) -> None:
        """All finish a step, and these hear that it is committed; or one does not finish, and no worker hears it."""
        world = [self.processes.get(worker.id) for worker in self.coordinator.membership.topology.workers]
        members = [process for process in world if process is not None]
        able = all(self.trains(process) for process in members) and len(members) == len(world)
        able = able and self.met == self.coordinator.generation
        if not able or not members or self.phase is not Phase.RUNNING or self.coordinator.paused:
            return
        if not finished:
            for process in members[1:]:
                process.finished = True
            return
        # The first is the hub, from which its peers hear it.
        hear = {members[0].name} | (heard & {process.name for process in members})
        for process in members:
            if process.name in hear:
                process.step += 1
            else:
                process.finished = True
        self.committed = max(self.committed, members[0].step)

    @rule(name=st.sampled_from(NAMES), by_pulse=st.booleans())
    def beat(self, name: str, by_pulse: bool) -> None:
        process = self.living(name)
        if process is None:
            return
        if by_pulse:
            pulse = Pulse(JOB, name, process.incarnation, 1.0, process.step, self.collective_seq(process))
            self.coordinator.pulse(pulse, self.now)
        elif process.connected:
            self.say_how_far(process)
        self.settle()

    @rule(name=st.sampled_from(NAMES), peer=st.sampled_from([*NAMES, ""]), back=st.integers(0, 1))
    def report_peer(self, name: str, peer: str, back: int) -> None:
        """A worker says that it does not reach another one; it may be wrong, or late."""
        process = self.living(name)
        if process is not None and process.connected:
            generation = self.coordinator.generation - back
            why = f"{peer} is away"
            self.coordinator.peer_report(name, process.incarnation, generation, self.now, peer=peer, reason=why)
            self.settle()

    @rule(name=st.sampled_from(NAMES), back=st.integers(1, 2))
    def answer_an_older_attempt(self, name: str, back: int) -> None:
        process = self.living(name)
        if process is None:
            return
        number, stop = self.coordinator.attempts - back, StopReport(0, holds_state=False)
        known, outbox = process.incarnation, self.coordinator.outbox
        # A restarted daemon may still have to say that it has given up an attempt.
        before = (list(outbox.facts), set(outbox.members), outbox.job, outbox.world)
        assert refused(lambda: self.coordinator.stopped(name, known, number, stop, self.now)) == "attempt_over"
        assert refused(lambda: self.coordinator.ready(name, known, number, self.now)) == "attempt_over"
        assert (outbox.facts, outbox.members, outbox.job, outbox.world) == before

    @rule(name=st.sampled_from(NAMES))
    def a_former_life_speaks(self, name: str) -> None:
        """What an earlier process under the name says changes nothing."""
        process = self.processes.get(name)
        if process is None or process.life == 1 or not self.is_member(process):
            return
        earlier = incarnation(name, process.life - 1)
        self.coordinator.leave(name, earlier, self.now, reason="", done=True, step=10**6)
        self.coordinator.died(name, earlier, self.now, "it ended")
        self.coordinator.heartbeat(Heartbeat(JOB, name, earlier, 10**6, 10**6), self.now)
        self.coordinator.pulse(Pulse(JOB, name, earlier, 1.0, 10**6, 10**6), self.now)
        self.coordinator.peer_report(name, earlier, self.coordinator.generation, self.now, peer="", reason="")
        self.coordinator.probed(name, earlier, self.now, refused=True)
        assert not self.coordinator.outbox

    # What operators do.

    @rule(name=st.sampled_from(NAMES), evict=st.booleans(), reason=st.sampled_from(["", "maintenance"]))
    def send_away(self, name: str, evict: bool, reason: str) -> None:
        act = self.coordinator.evict if evict else self.coordinator.drain
        is_known = name in self.coordinator.members
        assert refused(lambda: act(name, self.now, reason)) == ("" if is_known else "worker_unknown")
        self.settle()

    @rule(names=st.sets(st.sampled_from(NAMES)), joins=st.sampled_from([*NAMES, None]), answers=st.booleans())
    def send_several_away(self, names: set[str], joins: str | None, answers: bool) -> None:
        """These workers drain, a joiner may come, and they try to leave."""
        for name in sorted(names & self.coordinator.members.keys()):
            self.send_away(name, evict=False, reason="the night")
        if joins is not None and joins not in self.coordinator.members:
            self.start_a_worker(joins)
        self.pass_time(1.0)
        for name in sorted(names):
            if answers:
                self.answer_all()
            self.leave_if_it_may(name)

    @rule(what=st.sampled_from(["pause", "resume", "rescale"]), reason=st.sampled_from(["", "a test"]))
    def want(self, what: str, reason: str) -> None:
        act = getattr(self.coordinator, what)
        expected = "job_over" if self.coordinator.over else ""
        if what == "rescale" and not self.coordinator.over and not self.coordinator.members:
            expected = "workers_none"
        assert refused(lambda: act(self.now, reason)) == expected
        self.settle()

    @rule(chance=st.integers(0, 30))
    def abort(self, chance: int) -> None:
        if chance == 30:
            is_done = self.phase is Phase.COMPLETED
            assert refused(lambda: self.coordinator.abort(self.now, "")) == ("job_over" if is_done else "")
            self.settle()

    @rule()
    def reopen(self) -> None:
        """Workers that live on are heard no more, and new ones may have their names."""
        expected = "" if self.phase is Phase.ABORTED else "job_not_aborted"
        assert refused(lambda: self.coordinator.reopen(self.now, "")) == expected
        self.settle()

    # Time, and what happens to the daemon.

    @rule(seconds=st.sampled_from([0.05, 0.3, 2.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        """The daemon works, and connected workers are heard."""
        self.pass_time(seconds)

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 1_000.0]))
    def sleep(self, seconds: float) -> None:
        """The daemon does not get its turn for so long."""
        self.hear_all()
        self.time += seconds
        heard = {name for name, process in self.processes.items() if process.alive and process.connected}
        self.tick()
        for fact in self.newest:
            if isinstance(fact, WorkerFailed) and fact.worker_id in heard:
                assert "was heard" not in fact.reason, "a stalled daemon heard no worker"

    @rule()
    def crash(self) -> None:
        """The daemon dies; what it has said is stored, and all workers must reconnect."""
        self.reload()

    @rule()
    def let_the_store_fail(self) -> None:
        """What is decided next will not have happened."""
        self.store_fails = True

    @precondition(lambda self: self.coordinator.members)
    @rule(least=st.integers(1, 3), most=st.sampled_from([3, 5, 100]))
    def change_settings(self, least: int, most: int) -> None:
        self.coordinator.configure({**self.coordinator.settings, "min_workers": least, "max_workers": most})
        self.coordinator.outbox.job = True
        self.settle()

    # What has to be so.

    def settle(self) -> bool:
        """Store and tell what has come out; False when the store failed, and nothing of it has happened."""
        if self.store_fails and self.coordinator.outbox:
            self.store_fails = False
            self.reload()
            return False
        for key, value in changed_records(self.coordinator).items():
            if value is None:
                self.stored.pop(key, None)
            else:
                self.stored[key] = value
        out = self.coordinator.outbox.take()
        self.coordinator.is_stored = self.coordinator.is_stored or bool(self.stored)
        self.newest = out.facts
        for fact in out.facts:
            self.hear(fact)
        return True

    newest: list[Fact] = []  # noqa: RUF012 - replaced, never changed

    def hear(self, fact: Fact) -> None:
        reason = getattr(fact, "reason", "a fact without one")
        assert reason.strip(), f"{fact} does not say why"
        if self.told.over:
            assert not isinstance(fact, RescaleStarted | RescaleCompleted | RescaleAborted | WorkerJoined)
        match fact:
            case RescaleStarted():
                self.hear_start(fact)
            case RescaleSynchronising():
                assert self.told.attempt is not None
                assert fact.attempt == self.told.attempt.attempt
            case RescaleAborted():
                # The daemon that had begun it may have died.
                assert fact.attempt == self.told.attempts
                self.told.attempt = None
            case RescaleCompleted():
                self.hear_commit(fact)
            case JobCompleted() | JobAborted():
                assert not self.told.over
                self.told.over = True
            case JobReopened():
                assert self.told.over
                assert not self.coordinator.members, "its workers are fenced off"
                self.told.over = False
            case WorkerFailed():
                ranks = {worker.id: rank for rank, worker in enumerate(self.told.topology.workers)}
                assert fact.rank in {-1, ranks.get(fact.worker_id, -1)}
            case _:
                pass

    def hear_start(self, fact: RescaleStarted) -> None:
        assert fact.attempt == self.told.attempts + 1
        self.told.attempts = fact.attempt
        self.told.attempt = fact
        survivors = len(self.told.topology.workers) - len(fact.removed)
        assert fact.world_size == survivors + len(fact.added)
        assert self.coordinator.config.min_workers <= fact.world_size
        assert not fact.added or fact.world_size <= self.coordinator.config.max_workers

    def hear_commit(self, fact: RescaleCompleted) -> None:
        started, told = self.told.attempt, self.told
        assert started is not None
        assert (fact.attempt, fact.added, fact.removed) == (started.attempt, started.added, started.removed)
        old = [worker.id for worker in told.topology.workers]
        told.topology = told.topology.apply(fact.delta)
        new = tuple(worker.id for worker in told.topology.workers)
        assert told.topology.epoch == fact.delta.base_generation + 1
        assert told.topology.epoch not in told.worlds, "one world per generation"
        told.worlds[told.topology.epoch] = new
        assert len(set(new)) == len(new) == started.world_size
        assert new == assign_ranks(old, set(old) - set(fact.removed), fact.added)
        sizes = {RescaleType.SCALE_UP: len(new) > len(old), RescaleType.SCALE_DOWN: len(new) < len(old)}
        assert sizes.get(fact.type, len(new) == len(old))
        for name in new:
            process = self.processes[name]
            has_answered = process.answered == fact.attempt or process.name == self.answering(fact.attempt)
            assert has_answered or fact.step is None
        for name in new:
            self.processes[name].world, self.processes[name].answered = told.topology.epoch, fact.attempt
        if fact.step is not None:
            self.take_up(fact.step, new)
        told.attempt = None

    def take_up(self, step: int, world: tuple[str, ...]) -> None:
        """All of a world have the state behind that step."""
        if step < self.committed:
            lost = [one.name for one in self.processes.values() if one.connected and self.has_all(one)]
            assert not lost, f"{lost} had what was committed, and it is taken back"
        # If no worker with the state is left, there is nothing to continue from.
        self.committed, self.met = step, self.told.topology.epoch
        for name in world:
            process = self.processes[name]
            process.step, process.finished, process.holds_state = step, False, True

    def answering(self, number: int) -> str:
        """The worker whose answer makes the attempt succeed."""
        late = [process.name for process in self.processes.values() if process.answered != number]
        behind = [name for name in late if name in self.told.worlds[self.told.topology.epoch]]
        return behind[0] if len(behind) == 1 else ""

    @invariant()
    def what_was_told_is_what_is(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        coordinator = self.coordinator
        assert coordinator.membership.topology.workers == self.told.topology.workers
        assert coordinator.generation == self.told.topology.epoch == len(self.told.worlds)
        assert list(coordinator.membership.world) == [worker.id for worker in coordinator.membership.topology.workers]
        assert coordinator.over == self.told.over
        assert (coordinator.phase is Phase.RESCALING) or coordinator.attempt is None
        if coordinator.attempt is not None:
            missing = set(coordinator.attempt.members) - coordinator.members.keys()
            assert not missing or coordinator.member_is_missing, "an attempt waits for a worker that is gone"
        if self.phase is Phase.RUNNING and coordinator.attempt is None:
            assert coordinator.membership.is_complete or coordinator.member_is_missing, (
                "a world trains on without a member"
            )

    @invariant()
    def what_is_stored_is_what_is(self) -> None:
        if not hasattr(self, "coordinator") or self.coordinator.outbox or not self.stored:
            return
        other = restore(JOB, sorted(self.stored.items()), self.now)
        assert other is not None
        ours = self.coordinator
        for name in ("settings", "key", "phase", "paused", "attempts", "failure_budget", "rescale_reasons"):
            assert getattr(other, name) == getattr(ours, name), name
        assert (other.membership.topology, other.membership.world) == (ours.membership.topology, ours.membership.world)
        assert (other.reason, other.members.keys()) == (ours.reason, ours.members.keys())
        assert other.scaling_base == ours.scaling_base
        assert list(other.membership.world) == list(ours.membership.world)
        for member in ours.members.values():
            twin = other.members[member.id]
            for field_name in ("worker", "incarnation", "client", "joined_at", "drain_reason", "attributes"):
                assert getattr(twin, field_name) == getattr(member, field_name)

    @invariant()
    def the_daemon_can_rest(self) -> None:
        if hasattr(self, "coordinator"):
            self.tick()

    def teardown(self) -> None:
        """Nothing more goes wrong: the job comes to rest."""
        if not hasattr(self, "coordinator"):
            return
        self.store_fails = False
        if self.coordinator.paused and not self.coordinator.over:
            self.coordinator.resume(self.now, "")
            self.settle()
        end = self.time + SETTLED_WITHIN_S
        while self.time < end and not self.at_rest():
            for name in NAMES:
                self.mend_connection(name)
            self.answer_all()
            self.meet()
            for name in NAMES:
                self.leave_if_it_may(name)
            self.pass_time(0.5)
        assert self.at_rest(), f"{self.phase} for ever: {self.coordinator.reason}"

    def at_rest(self) -> bool:
        coordinator = self.coordinator
        if coordinator.over:
            return True
        alive = [process for process in self.processes.values() if process.alive and self.is_member(process)]
        if len(alive) != len(coordinator.members):
            return False
        willing = sum(member.drain_reason is None for member in coordinator.members.values())
        enough = willing >= coordinator.config.min_workers
        if enough and willing < len(coordinator.members):
            # Draining workers have left, if enough workers remain.
            return False
        if self.phase is Phase.RUNNING:
            taken_in = sum(process.world == coordinator.generation for process in alive)
            full = len(coordinator.membership.world) >= coordinator.config.max_workers
            is_whole = taken_in == len(coordinator.membership.world)
            return is_whole and (willing == taken_in or full or not enough)
        return self.phase in {Phase.FORMING, Phase.WAITING} and not enough

    # Small things.

    def tick(self) -> None:
        self.coordinator.tick(self.now)
        assert self.coordinator.due_at() > self.time, "the service would never rest"
        self.settle()

    def pass_time(self, seconds: float) -> None:
        end = self.time + seconds
        while self.time < end:
            self.time = min(end, self.time + SCAN_INTERVAL_S, max(self.time, self.coordinator.due_at()))
            self.hear_all()
            self.tick()

    def hear_all(self) -> None:
        for process in self.processes.values():
            if process.alive and process.connected:
                self.say_how_far(process)
        self.settle()

    def reload(self) -> None:
        self.time += 0.1
        found = restore(JOB, sorted(self.stored.items()), self.now)
        self.coordinator = found or JobCoordinator(JOB, self.coordinator.settings)
        for process in self.processes.values():
            process.connected = False

    def newcomer(self, name: str, life: int) -> Member:
        member = newcomer(name, life, self.time)
        member.with_data = name in self.with_data
        return member

    def say_how_far(self, process: Process) -> None:
        """A heartbeat."""
        heartbeat = Heartbeat(
            JOB,
            process.name,
            process.incarnation,
            process.step,
            self.collective_seq(process),
            last_step_done=process.last_step_done,
        )
        self.coordinator.heartbeat(heartbeat, self.now)

    def collective_seq(self, process: Process) -> int:
        has_met = process.world > 0 and process.world == self.met
        return process.world * COLLECTIVES_PER_WORLD + (1 + process.step if has_met else 0)

    def has_all(self, process: Process) -> bool:
        """Whether it holds all committed steps."""
        steps = process.step + process.finished
        return process.alive and self.is_member(process) and process.holds_state and steps >= self.committed > 0

    def may_meet(self, process: Process) -> bool:
        is_there = process.alive and self.is_member(process) and process.world == self.coordinator.generation
        return is_there and not process.last_step_done

    def living(self, name: str) -> Process | None:
        process = self.processes.get(name)
        return process if process is not None and process.alive else None

    def is_member(self, process: Process) -> bool:
        member = self.coordinator.members.get(process.name)
        return member is not None and member.incarnation == process.incarnation

    def trains(self, process: Process) -> bool:
        return self.may_meet(process) and not process.finished


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
