"""Drives one job's coordinator: obedient workers, a clock that tests move, and a store."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.coordinator.records import changed_records, restore
from forged.elastic.failure_detector.detector import SCAN_INTERVAL_S
from forged.elastic.membership.member import Member
from forged.elastic.messages import AttemptProgress, Heartbeat, Pulse, RescaleCompleted
from forged.elastic.model import WorkerId
from forged.elastic.outbox import Moment, Probe
from forged.elastic.rescale.attempt import Stage, StopReport
from forged.jobs.model import SettingValue
from forged.kernel.messages import Fact

F = TypeVar("F", bound=Fact)

JOB = "run"
START_S = 1_000.0
WALL_S = 1_750_000_000.0
WINDOW_S = 30.0
"""The stability window, where a test sets no other."""


def worker_of(name: str, port: int = 7000) -> WorkerId:
    return WorkerId(name, f"host-{name}", port)


def incarnation(name: str, life: int = 1) -> bytes:
    """The incarnation of a worker's process; `life` counts its starts."""
    return f"{name}/{life}".encode().ljust(16, b".")


def newcomer(name: str, life: int = 1, now: float = START_S) -> Member:
    client = b"client of " + incarnation(name, life)
    return Member(worker_of(name), incarnation(name, life), client, WALL_S + now)


class Playbook:
    """A coordinator and its output."""

    def __init__(self, **settings: SettingValue) -> None:
        self.settings = settings
        self.coordinator = JobCoordinator(JOB, settings, b"key")
        self.time = START_S
        self.stored: dict[str, bytes] = {}
        self.facts: list[Fact] = []
        """All facts, oldest first."""
        self.probes: list[Probe] = []
        self._heard = 0

    @property
    def now(self) -> Moment:
        return Moment(WALL_S + self.time, self.time)

    @property
    def world(self) -> list[str]:
        """The committed world in rank order."""
        return [worker.id for worker in self.coordinator.membership.topology.workers]

    # Inputs.

    def join(self, *names: str, life: int = 1) -> list[Fact]:
        for name in names:
            self.coordinator.join(newcomer(name, life, self.time), self.now)
            self.settle()
        return self.new_facts()

    def leave(self, name: str, *, reason: str = "", done: bool = False, step: int = 0, life: int = 1) -> list[Fact]:
        self.coordinator.leave(name, incarnation(name, life), self.now, reason=reason, done=done, step=step)
        return self.new_facts()

    def die(self, *names: str, life: int = 1) -> list[Fact]:
        """The pulses report these deaths."""
        for name in names:
            self.coordinator.died(name, incarnation(name, life), self.now, "its process has ended")
        return self.new_facts()

    def lose(self, *names: str) -> list[Fact]:
        for name in names:
            self.coordinator.connection_lost(name, self.now)
        return self.new_facts()

    def reconnect(self, *names: str) -> list[Fact]:
        for name in names:
            self.coordinator.connection_restored(name, self.now)
        return self.new_facts()

    def refuse_probe(self, name: str, life: int = 1) -> list[Fact]:
        """A probe of the worker is refused."""
        self.coordinator.probed(name, incarnation(name, life), self.now, refused=True)
        return self.new_facts()

    def heartbeat(
        self,
        *names: str,
        step: int = 0,
        collective_seq: int = 0,
        last_step_done: bool = False,
        is_done: bool = False,
        meeting: str = "",
    ) -> list[Fact]:
        for name in names:
            member = self.coordinator.members[name]
            who = JOB, name, member.incarnation
            signal = Heartbeat(
                *who, step, collective_seq, last_step_done=last_step_done, is_done=is_done, meeting=meeting
            )
            self.coordinator.heartbeat(signal, self.now)
        return self.new_facts()

    def pulse(self, *names: str, step: int = 0, collective_seq: int = 0, cpu_s: float = 1.0) -> list[Fact]:
        for name in names:
            member = self.coordinator.members[name]
            signal = Pulse(JOB, name, member.incarnation, cpu_s, step, collective_seq)
            self.coordinator.pulse(signal, self.now)
        return self.new_facts()

    def stop(self, *names: str, stop: StopReport, number: int | None = None) -> list[Fact]:
        """These workers report that they have stopped there."""
        for name in names:
            attempt = self.coordinator.attempts if number is None else number
            self.coordinator.stopped(name, self.coordinator.members[name].incarnation, attempt, stop, self.now)
        return self.new_facts()

    def ready(self, *names: str, number: int | None = None) -> list[Fact]:
        for name in names:
            attempt = self.coordinator.attempts if number is None else number
            self.coordinator.ready(name, self.coordinator.members[name].incarnation, attempt, self.now)
        return self.new_facts()

    def receive_state(
        self, name: str, *, state: int = 0, waits: bool = False, problem: str = "", unreached: str = ""
    ) -> list[Fact]:
        """The worker reports its progress in the attempt."""
        signal = AttemptProgress(
            JOB,
            name,
            self.coordinator.members[name].incarnation,
            self.coordinator.attempts,
            state,
            is_waiting=waits,
            problem=problem,
            unreachable_peer=unreached,
        )
        self.coordinator.attempt_progress(signal, self.now)
        return self.new_facts()

    def report_peer(
        self, name: str, peer: str = "", *, why: str = "it got no answer", back: int = 0, voided: bool = False
    ) -> list[Fact]:
        generation = self.coordinator.generation - back
        known = self.coordinator.members[name].incarnation
        self.coordinator.peer_report(name, known, generation, self.now, peer=peer, reason=why, step_voided=voided)
        return self.new_facts()

    def report_standstill(
        self, name: str, peer: str = "", *, for_s: float = 12.34, generation: int | None = None, life: int = 1
    ) -> list[Fact]:
        lost_generation = self.coordinator.generation if generation is None else generation
        self.coordinator.stood_still(name, incarnation(name, life), lost_generation, peer=peer, for_s=for_s)
        return self.new_facts()

    def wait(self, seconds: float, *, silent: Collection[str] = (), still: bool = False) -> list[Fact]:
        """Let time pass as it does for the service: the coordinator ticks when it is due.

        Connected workers send heartbeats, except the `silent` ones, and make progress unless they stand `still`.
        """
        end = self.time + seconds
        while self.time < end:
            self.time = min(end, self.time + SCAN_INTERVAL_S / 2, max(self.time, self.coordinator.due_at()))
            for member in self.coordinator.members.values():
                if member.connected and member.id not in silent:
                    collective_seq, done = 0 if still else int(self.time), member.last_step_done
                    signal = Heartbeat(JOB, member.id, member.incarnation, 0, collective_seq, last_step_done=done)
                    self.coordinator.heartbeat(signal, self.now)
            if self.coordinator.due_at() <= self.time:
                self.tick()
            self.settle()
        return self.new_facts()

    def tick(self) -> None:
        self.coordinator.tick(self.now)
        assert self.coordinator.due_at() > self.time, "the service would never rest"
        self.settle()

    def stall_daemon(self, seconds: float) -> list[Fact]:
        """The daemon is stalled for that time."""
        self.time += seconds
        self.tick()
        return self.new_facts()

    def restart(self) -> None:
        """The daemon restarts; no worker has reconnected yet."""
        self.settle()
        self.time += 1.0
        found = restore(JOB, sorted(self.stored.items()), self.now)
        assert found is not None
        self.coordinator = found

    # Output.

    def settle(self) -> None:
        """Take the output and keep it."""
        for key, value in changed_records(self.coordinator).items():
            if value is None:
                self.stored.pop(key, None)
            else:
                self.stored[key] = value
        self.coordinator.is_stored = self.coordinator.is_stored or bool(self.stored)
        out = self.coordinator.outbox.take()
        self.facts += out.facts
        self.probes += out.probes

    def new_facts(self) -> list[Fact]:
        """The facts since the last call."""
        self.settle()
        new_facts, self._heard = self.facts[self._heard :], len(self.facts)
        return new_facts

    def last(self, kind: type[F]) -> F:
        """The newest fact of a kind."""
        self.settle()
        return next(fact for fact in reversed(self.facts) if isinstance(fact, kind))

    # Several steps at once.

    def complete_attempt(self, step: int = 0, **more: float) -> RescaleCompleted:
        """All members of the attempt stop after a step, and report ready if they have to."""
        attempt = self.coordinator.attempt
        assert attempt is not None
        for name in attempt.members:
            holds = name in self.coordinator.membership.world and name not in attempt.added
            self.stop(name, stop=StopReport(step if holds else 0, holds, **more))  # type: ignore[arg-type]
        for name in attempt.waiting_for if attempt.stage is Stage.SYNCHRONISING else ():
            self.ready(name)
        return self.last(RescaleCompleted)

    def form_world(self, *names: str, step: int = 0, **more: float) -> RescaleCompleted:
        """Make these workers the first world."""
        self.join(*names)
        self.wait(self.coordinator.config.stability_window_s)
        completed = self.complete_attempt(step, **more)
        self.new_facts()
        return completed


def formed(*names: str, **settings: SettingValue) -> Playbook:
    """A playbook with a committed world."""
    book = Playbook(**settings)
    book.form_world(*names)
    return book


def kinds(facts: Iterable[Fact]) -> list[str]:
    """The facts' types, in order."""
    return [type(fact).__name__ for fact in facts]
