"""Deliberate bugs in elastic training, to show that the simulation finds them.

Invariants:
- Each mutant changes one thing, for one simulated world, and breaks the promise that `BREAKS` names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from forged.elastic.coordinator import completion, failures, operations, records
from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.coordinator.job_state import JobState
from forged.elastic.coordinator.step_witnesses import StepWitnesses
from forged.elastic.failure_detector import detector, timeouts
from forged.elastic.membership import world_membership
from forged.elastic.membership.member import Member, death_evidence
from forged.elastic.membership.world_membership import WorldMembership
from forged.elastic.phases import Phase
from forged.elastic.rescale import attempt
from forged.elastic.rescale.attempt import Attempt, StopReport
from forged.worker import rescaler
from forged.worker.collectives.world import World
from forged.worker.rescaler import Rescaler, StateAgreement, agree
from forged.worker.standstill import StandstillReporter
from forged.worker.state_transfer.transfer import StateExchange
from forged.worker.steps.step_errors import StepErrors
from forged.worker.worker_state.job_view import Commit
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import CurrentWorld
from tests.simulation.elastic.truth import Promise

Mutant = Callable[[], Any]


@contextmanager
def commit_before_all_have_stopped() -> Iterator[None]:
    """The first stop report counts for all members."""

    def hasty(self: Attempt) -> bool:
        for worker in self.members:
            self.stops.setdefault(worker, next(iter(self.stops.values())))
        return True

    with patch.object(Attempt, "all_stopped", property(hasty)):
        yield


@contextmanager
def commit_before_all_have_the_state() -> Iterator[None]:
    """The commit does not wait for joiners and laggards."""
    settle = Attempt.synchronise

    def hasty(self: Attempt, *what: Any) -> bool:
        settle(self, *what)
        self.unready = set()
        return True

    # Members that meet agree on the state source; without that no laggard would notice that it is behind.
    with patch.object(Attempt, "synchronise", hasty), _taken_at_their_word():
        yield


@contextmanager
def _taken_at_their_word() -> Iterator[None]:
    """Every member claims to be at the step of the commit."""
    come_to_agree = Rescaler._agree
    commits: dict[World, Commit] = {}

    async def claim(world: World, own: StopReport, group_size: int) -> StateAgreement:
        step = commits[world].step
        claimed = own if step is None else replace(own, step=step, finished=False, holds_state=True)
        return await agree(world, claimed, group_size)

    async def note(self: Rescaler, world: World, commit: Commit) -> StateAgreement:
        commits[world] = commit
        return await come_to_agree(self, world, commit)

    with patch.object(rescaler, "agree", claim), patch.object(Rescaler, "_agree", note):
        yield


@contextmanager
def take_the_lowest_step() -> Iterator[None]:
    """The worker with the lowest committed step is the state source."""

    def lowest(self: Attempt, *what: Any) -> bool:
        settle(self, *what)
        holders = [worker for worker in self.target if self.stops[worker].holds_state and worker not in self.added]
        if holders:
            self.sources = (min(holders, key=lambda worker: self.stops[worker].step),)
            self.step = self.stops[self.source].step
            self.stops[self.source] = replace(self.stops[self.source], finished=False)
            self.unready = {worker for worker in self.target if self.stops[worker].position != self.step}
        return True

    settle = Attempt.synchronise
    with patch.object(Attempt, "synchronise", lowest):
        yield


@contextmanager
def count_what_somebody_has_finished() -> Iterator[None]:
    """A step that one member has finished counts as committed."""

    def furthest(
        target: Sequence[str], stops: Mapping[str, StopReport], added: Collection[str] = (), *groups: Any
    ) -> tuple[str, ...]:
        holders = [worker for worker in target if stops[worker].holds_state]
        holders = [worker for worker in holders if worker not in added] or holders
        return (max(holders or target, key=lambda worker: stops[worker].position),)

    with patch.object(attempt, "choose_sources", furthest):
        yield


@contextmanager
def forget_the_attempt_at_restart() -> Iterator[None]:
    """A daemon that died over an attempt takes the world before for the one that trains."""
    take = records._restore_cluster

    def forgetful(found: JobState, record: records.ClusterRecord) -> None:
        take(found, record)
        if found.phase is Phase.RESCALING:
            found.phase, found.rescale_reasons = Phase.RUNNING, []

    def keep(self: JobCoordinator, now: Any) -> None:
        resume(self, now)
        self.rescale_reasons, self.missing_since = [], None

    resume = JobCoordinator.resume_from_store
    with patch.object(records, "_restore_cluster", forgetful), patch.object(JobCoordinator, "resume_from_store", keep):
        yield


@contextmanager
def number_attempts_anew_at_restart() -> Iterator[None]:
    """How many attempts there were is remembered in memory alone."""
    take = records._restore_cluster

    def forgetful(found: JobState, record: records.ClusterRecord) -> None:
        take(found, record)
        found.attempts = 0

    with patch.object(records, "_restore_cluster", forgetful):
        yield


@contextmanager
def keep_only_the_first_world() -> Iterator[None]:
    """The store is told of one world, so that after a restart a number is given to two."""
    changed_records = records.changed_records

    def sparing(found: JobState) -> dict[str, bytes | None]:
        changed = changed_records(found)
        if found.generation > 1:
            changed.pop(f"{records.PREFIX}{found.name}/{records.WORLD}", None)
        return changed

    with patch("forged.elastic.runtime.decisions.changed_records", sparing):
        yield


@contextmanager
def give_no_grace() -> Iterator[None]:
    """A lost worker is dead at once."""

    def merciless(member: Member, config: Any, now: float) -> str | None:
        if member.lost_at is not None:
            return f"its connection was lost {now - member.lost_at:.1f} s ago and did not come back"
        return death_evidence(member, config, now)

    with patch.object(detector, "death_evidence", merciless):
        yield


@contextmanager
def turn_the_ranks_around() -> Iterator[None]:
    """The survivors get their ranks in reverse order."""

    def around(old: Sequence[str], staying: Collection[str], joining: Iterable[str]) -> tuple[str, ...]:
        return (*(worker for worker in reversed(old) if worker in staying), *joining)

    with patch.object(world_membership, "assign_ranks", around):
        yield


@contextmanager
def tolerate_every_failure() -> Iterator[None]:
    """No failure is one too many."""
    with patch.object(failures, "abort_over_budget", lambda job: job.over):
        yield


@contextmanager
def count_failures_before_a_reopening() -> Iterator[None]:
    """A reopened job begins with the failures for which it was aborted."""
    reopen = operations.reopen

    def unforgiving(job: JobState, *what: Any) -> None:
        budget = job.failure_budget
        reopen(job, *what)
        job.failure_budget = budget

    with patch.object(operations, "reopen", unforgiving):
        yield


@contextmanager
def keep_workers_over_a_reopening() -> Iterator[None]:
    """A reopened job counts on the workers that it had when it was aborted."""
    reopen = operations.reopen

    def trusting(job: JobState, *what: Any) -> None:
        with patch.object(job, "remove_member", lambda member: None):
            reopen(job, *what)

    with patch.object(operations, "reopen", trusting):
        yield


@contextmanager
def forget_what_was_finished() -> Iterator[None]:
    """A worker that has finished a step which may not count says nothing of it."""
    stop: Callable[[TrainingProgress], StopReport] = vars(TrainingProgress)["stop_report"].fget

    def forgetful(self: TrainingProgress) -> StopReport:
        return replace(stop(self), finished=False)

    with patch.object(TrainingProgress, "stop_report", property(forgetful)):
        yield


@contextmanager
def answer_without_the_state() -> Iterator[None]:
    """A worker that is behind says that it has the state, and has not."""

    async def pretend(self: StateExchange, source: Any, number: int) -> None:
        return

    with patch.object(StateExchange, "fetch", pretend):
        yield


@contextmanager
def believe_every_heartbeat() -> Iterator[None]:
    """One worker's word is enough."""
    with patch.object(StepWitnesses, "hear", lambda self, worker, step, world: step):
        yield


@contextmanager
def complete_by_one_members_word() -> Iterator[None]:
    """A member that says that it is done completes the job, whatever the other members say."""
    with patch.object(completion, "_agrees", lambda member, step: True):
        yield


@contextmanager
def complete_when_all_have_reached_the_step() -> Iterator[None]:
    """The other members need only have come as far as the member that is done, and may want further steps."""
    with patch.object(completion, "_agrees", lambda member, step: member.step >= step):
        yield


@contextmanager
def accept_any_step() -> Iterator[None]:
    """A member is believed to have committed any number of steps."""
    with patch.object(completion, "is_possible", lambda *what: True):
        yield


@contextmanager
def give_the_suspended_no_more_than_the_grace() -> Iterator[None]:
    """A lost worker is dead after the grace, even with a live pulse."""

    def deaf(member: Member, config: Any, now: float) -> str | None:
        return death_evidence(member if member.connected else replace(member, pulse_at=None), config, now)

    with patch.object(detector, "death_evidence", deaf):
        yield


@contextmanager
def fail_whoever_has_not_answered() -> Iterator[None]:
    """Members that wait for another one count as late, too."""

    def everybody(waiting: Iterable[Member], *what: Any) -> list[Member]:
        return list(waiting)

    def all_that_owe_an_answer(attempt: Attempt, *what: Any) -> list[str]:
        return list(attempt.waiting_for)

    def hurried(*what: Any) -> bool:
        return False

    with (
        patch.object(timeouts, "members_holding_up", everybody),
        patch.object(timeouts, "_active", all_that_owe_an_answer),
        patch.object(timeouts, "is_in_step", hurried),
    ):
        yield


@contextmanager
def count_evictions() -> Iterator[None]:
    """An eviction counts as a failure."""
    fail = failures.fail

    def counted(*what: Any, is_uncounted: bool = False) -> None:
        fail(*what)

    with patch.object(failures, "fail", counted):
        yield


@contextmanager
def take_everybody_for_a_holder_of_the_state() -> Iterator[None]:
    """All members of a world count as state holders, though they may never have met one."""
    everybody = property(lambda self: frozenset(self.world), lambda self, holders: None)
    with patch.object(WorldMembership, "state_holders", everybody, create=True):
        yield


@contextmanager
def keep_nobody_for_the_state() -> Iterator[None]:
    """A draining worker may leave at once, though only it has the state."""
    with patch.object(JobCoordinator, "may_leave", lambda self, member: True):
        yield


@contextmanager
def keep_the_own_rate_where_the_worlds_is_zero() -> Iterator[None]:
    """A worker takes a learning rate of 0 for none, and keeps its own."""
    honest = TrainingProgress._set_rate_and_batch

    def take(progress: TrainingProgress, learning_rate: float | None, global_batch_size: int) -> None:
        honest(progress, learning_rate or progress.learning_rate, global_batch_size)

    with patch.object(TrainingProgress, "_set_rate_and_batch", take):
        yield


@contextmanager
def stand_still_in_silence() -> Iterator[None]:
    """A worker does not notice that it stands still."""
    with patch.object(StandstillReporter, "_look", lambda self: None):
        yield


@contextmanager
def count_a_voided_step() -> Iterator[None]:
    """A worker whose script voids a step goes on as if the step were finished."""
    with patch.object(StepErrors, "_void", lambda self, step, error: None):
        yield


@contextmanager
def take_the_end_of_a_world_for_a_failure() -> Iterator[None]:
    """An exception in a step is always the script's own."""
    with patch.object(StepErrors, "_evidence", lambda self, **options: ""):
        yield


@contextmanager
def forget_the_vote() -> Iterator[None]:
    """A worker that has finished a step after a vote says that it may be repeated."""
    finish = TrainingProgress.finish_step

    def forgetful(self: TrainingProgress, *, is_voted: bool = False) -> None:
        finish(self)

    with patch.object(TrainingProgress, "finish_step", forgetful):
        yield


@contextmanager
def vote_without_waiting() -> Iterator[None]:
    """A rank goes on as soon as it has voted itself."""

    async def hasty(self: World, step: int) -> None:
        return

    with patch.object(World, "commit", hasty):
        yield


@contextmanager
def tell_the_end_of_a_world_late() -> Iterator[None]:
    """A script that is in a step when its world is over is told when it enters the next one."""
    be_over = CurrentWorld.be_over

    def late(self: CurrentWorld, *what: Any, **more: Any) -> None:
        if not self.is_stepping:
            be_over(self, *what, **more)

    def catch_up(self: CurrentWorld, world: World) -> None:
        be_over(self, "it enters the next one")
        enter(self, world)

    enter = CurrentWorld.enter
    with patch.object(CurrentWorld, "be_over", late), patch.object(CurrentWorld, "enter", catch_up):
        yield


@contextmanager
def begin_the_steps_of_a_world_at_once() -> Iterator[None]:
    """No script is told that a world is entered."""
    with patch.object(CurrentWorld, "is_entry_due", property(lambda self: False, lambda self, due: None), create=True):
        yield


MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        commit_before_all_have_stopped,
        commit_before_all_have_the_state,
        take_the_lowest_step,
        count_what_somebody_has_finished,
        forget_the_attempt_at_restart,
        number_attempts_anew_at_restart,
        keep_only_the_first_world,
        give_no_grace,
        turn_the_ranks_around,
        tolerate_every_failure,
        count_failures_before_a_reopening,
        keep_workers_over_a_reopening,
        forget_what_was_finished,
        answer_without_the_state,
        believe_every_heartbeat,
        accept_any_step,
        complete_by_one_members_word,
        complete_when_all_have_reached_the_step,
        give_the_suspended_no_more_than_the_grace,
        fail_whoever_has_not_answered,
        count_evictions,
        take_everybody_for_a_holder_of_the_state,
        keep_nobody_for_the_state,
        keep_the_own_rate_where_the_worlds_is_zero,
        stand_still_in_silence,
        count_a_voided_step,
        take_the_end_of_a_world_for_a_failure,
        forget_the_vote,
        vote_without_waiting,
        tell_the_end_of_a_world_late,
        begin_the_steps_of_a_world_at_once,
    )
}

BREAKS: dict[str, Promise] = {
    "commit_before_all_have_stopped": Promise.ACKNOWLEDGED,
    "commit_before_all_have_the_state": Promise.ACKNOWLEDGED,
    "take_the_lowest_step": Promise.STATE,
    "count_what_somebody_has_finished": Promise.STEPS,
    "forget_the_attempt_at_restart": Promise.RUNS_AGAIN,
    "number_attempts_anew_at_restart": Promise.GENERATIONS_GROW,
    "keep_only_the_first_world": Promise.GENERATIONS_GROW,
    "give_no_grace": Promise.EVIDENCE,
    "turn_the_ranks_around": Promise.ORDER_KEPT,
    "tolerate_every_failure": Promise.TOLERANCE,
    "count_failures_before_a_reopening": Promise.TOLERANCE,
    "keep_workers_over_a_reopening": Promise.MEMBERS,
    "forget_what_was_finished": Promise.STATE,
    "answer_without_the_state": Promise.STATE,
    "believe_every_heartbeat": Promise.STEPS,
    "accept_any_step": Promise.STEPS,
    "complete_by_one_members_word": Promise.STEPS,
    "complete_when_all_have_reached_the_step": Promise.STEPS,
    "give_the_suspended_no_more_than_the_grace": Promise.EVIDENCE,
    "fail_whoever_has_not_answered": Promise.EVIDENCE,
    "count_evictions": Promise.TOLERANCE,
    "take_everybody_for_a_holder_of_the_state": Promise.STEPS,
    "keep_nobody_for_the_state": Promise.HANDED_OVER,
    "keep_the_own_rate_where_the_worlds_is_zero": Promise.ONE_RATE,
    "stand_still_in_silence": Promise.STANDSTILL,
    "count_a_voided_step": Promise.STEPS,
    "take_the_end_of_a_world_for_a_failure": Promise.STEP_ERRORS,
    "forget_the_vote": Promise.VOTES,
    "vote_without_waiting": Promise.VOTES,
    "tell_the_end_of_a_world_late": Promise.RELEASED,
    "begin_the_steps_of_a_world_at_once": Promise.WORLDS,
}
"""The promise that each of them breaks."""
