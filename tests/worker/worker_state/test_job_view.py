"""What facts mean for one worker."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from forged.elastic.messages import (
    JobAborted,
    JobCompleted,
    JobPaused,
    JobResumed,
    JobWaiting,
    JoinReply,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerDraining,
    WorkerFailed,
    WorkerLeft,
)
from forged.elastic.model import ClusterTopology, GlobalTrainingState, RescaleType, WorkerId
from forged.elastic.phases import Phase
from forged.errors import ForgedError
from forged.jobs.model import JobChanged, JobRemoved, SettingValue
from forged.kernel.messages import Fact, Fence, Gap, Record
from forged.worker.errors import JobEnded, WorkerEvicted
from forged.worker.worker_state.job_view import FOLLOWED, JobView

A, B, C, ME = (WorkerId(name, "host", port) for port, name in enumerate(("a", "b", "c", "me"), 1))


class Listener:
    """A view, and facts that come one after the other."""

    def __init__(self, *workers: WorkerId, known: bool = True) -> None:
        self.view = JobView("me")
        self.ids = itertools.count(10)
        self.epoch = 0
        if known:
            self.view.catch_up(joined())
        if workers:
            self.commit(*workers)
            self.view.committed = None

    def hear(self, *facts: Fact) -> None:
        for fact in facts:
            self.view.hear(Record.of(fact, fact_id=next(self.ids), at=0.0, job="run"))

    def commit(self, *workers: WorkerId, attempt: int = 1, base: ClusterTopology | None = None) -> None:
        before = base if base is not None else self.view.topology
        self.hear(completed(before, ClusterTopology(workers, before.epoch + 1), attempt))

    def start(
        self,
        attempt: int,
        *,
        added: list[str] | None = None,
        removed: list[str] | None = None,
        in_background: bool = False,
    ) -> None:
        self.hear(RescaleStarted(attempt, RescaleType.REPLACE, 2, added or [], removed or [], "why", in_background))


def completed(before: ClusterTopology, after: ClusterTopology, attempt: int) -> RescaleCompleted:
    return RescaleCompleted(attempt, RescaleType.REPLACE, before.delta_to(after), 7, 2, 0.5, 64, [], [], "because", 0.1)


def joined(
    topology: ClusterTopology | None = None,
    *,
    attempt: int = 0,
    paused: bool = False,
    is_member: bool = False,
    leaving: str | None = None,
    synchronising: RescaleSynchronising | None = None,
    in_background: bool = False,
    settings: dict[str, SettingValue] | None = None,
) -> JoinReply:
    world = topology or ClusterTopology()
    state = GlobalTrainingState(2, 7, 0.5, 64)
    return JoinReply(
        world.epoch,
        Fence(1, world.epoch),
        Phase.RUNNING,
        paused,
        attempt,
        b"key",
        world,
        state,
        settings or {},
        is_member,
        leaving,
        synchronising,
        in_background,
        learning_rate=0.5,
    )


class TestMoving:
    """What concerns an attempt for which training data moves while training goes on."""

    def in_background(self) -> Listener:
        listener = Listener(A, ME)
        listener.start(2, added=["b"], in_background=True)
        return listener

    def test_background_rescale_asks_for_no_stop_and_marks_no_worker_as_lost(self) -> None:
        listener = self.in_background()
        view = listener.view
        assert (view.attempt, view.background_attempt) == (2, 2)
        assert (view.stop_wanted, view.rescaling, view.lost) == (0, False, "")

    def test_does_not_call_off_a_pause(self) -> None:
        listener = Listener(A, ME)
        listener.hear(JobPaused("lunch"))
        wanted = listener.view.stop_wanted
        listener.start(2, added=["b"], in_background=True)
        assert listener.view.stop_wanted == wanted > 0

    def test_attempt_concerns_added_workers_and_not_omitted_ones(self) -> None:
        joiner, outsider = Listener(A, B), Listener(A, B)
        joiner.start(2, added=["me"], in_background=True)
        outsider.start(2, added=["c"], in_background=True)
        assert (joiner.view.background_attempt, outsider.view.background_attempt) == (2, 0)

    @pytest.mark.parametrize(
        "fact",
        [
            RescaleAborted(2, "why"),
            JobWaiting(1, 2),
            JobCompleted(9),
            JobAborted("enough", 9),
            JobRemoved("run"),
            RescaleStarted(3, RescaleType.REPLACE, 2, [], [], "why"),
            RescaleStarted(3, RescaleType.REPLACE, 2, [], ["me"], "why"),
        ],
        ids=lambda fact: type(fact).__name__,
    )
    def test_background_attempt_ends_with_the_attempt(self, fact: Fact) -> None:
        listener = self.in_background()
        listener.hear(fact)
        assert listener.view.background_attempt == 0

    def test_is_over_with_the_commit_for_which_all_stop(self) -> None:
        listener = self.in_background()
        listener.commit(A, ME, B, attempt=2)
        assert (listener.view.background_attempt, listener.view.stop_wanted) == (
            0,
            listener.view.newest_fact_id,
        )

    def test_goes_on_with_the_next_attempt_in_the_background(self) -> None:
        listener = self.in_background()
        listener.hear(RescaleAborted(2, "b failed"))
        listener.start(3, in_background=True)
        assert (listener.view.background_attempt, listener.view.stop_wanted) == (3, 0)

    def test_joiner_learns_of_a_background_attempt_from_the_answer(self) -> None:
        listener = Listener(known=False)
        listener.view.catch_up(joined(ClusterTopology((A, ME), 4), attempt=7, is_member=True, in_background=True))
        view = listener.view
        assert (view.attempt, view.background_attempt, view.rescaling) == (7, 7, False)

    def test_outlasts_a_gap_if_the_daemon_says_so(self) -> None:
        for still_under_way in (True, False):
            listener = self.in_background()
            listener.view.miss(Gap(12, 20, "why"))
            attempt = 2 if still_under_way else 0
            listener.view.catch_up(
                joined(listener.view.topology, attempt=attempt, is_member=True, in_background=still_under_way)
            )
            assert listener.view.background_attempt == attempt

    def test_may_have_begun_behind_the_daemons_answer(self) -> None:
        listener = self.in_background()
        listener.view.catch_up(joined(ClusterTopology((A, ME), 5), is_member=True))
        assert listener.view.background_attempt == 2

    def test_is_over_if_the_daemon_tells_of_a_newer_attempt_that_stops(self) -> None:
        listener = self.in_background()
        listener.view.catch_up(joined(listener.view.topology, attempt=3, is_member=True))
        assert (listener.view.background_attempt, listener.view.rescaling) == (0, True)

    def test_of_a_commit_that_does_not_fit_is_over_unless_it_is_newer(self) -> None:
        for commit, left in ((2, 0), (1, 2)):
            listener = self.in_background()
            listener.commit(A, ME, attempt=commit, base=ClusterTopology((A, B), 40))
            assert listener.view.background_attempt == left


class TestSettings:
    """Those of the job."""

    def test_settings_of_the_join_reply_are_taken(self) -> None:
        listener = Listener(known=False)
        listener.view.catch_up(joined(settings={"max_workers": 3}))
        assert listener.view.settings == {"max_workers": 3}

    def test_settings_of_a_later_fact_survive_an_older_join_reply(self) -> None:
        listener = Listener()
        listener.hear(JobChanged("run", 2, {"max_workers": 4}))
        assert listener.view.settings == {"max_workers": 4}
        listener.view.catch_up(joined(settings={"max_workers": 3}))
        assert listener.view.settings == {"max_workers": 4}

    def test_are_asked_for_when_something_was_missed(self) -> None:
        listener = Listener()
        listener.hear(JobChanged("run", 2, {"max_workers": 4}))
        listener.view.miss(Gap(1, 99, "it was away"))
        listener.view.catch_up(joined(settings={"max_workers": 5}))
        assert listener.view.settings == {"max_workers": 5}

    def test_are_not_those_of_a_job_that_was_removed_before(self) -> None:
        listener = Listener(known=False)
        listener.hear(JobChanged("run", 2, {"max_workers": 4}), JobRemoved("run"))
        listener.view.catch_up(joined(settings={"max_workers": 5}))
        assert listener.view.settings == {"max_workers": 5}

    def test_job_changed_facts_are_subscribed(self) -> None:
        assert JobChanged in FOLLOWED


class TestStopping:
    def test_no_stop_is_wanted_at_first(self) -> None:
        assert Listener(A, ME).view.stop_wanted == 0

    def test_a_rescale_wants_it_until_its_commit_is_entered(self) -> None:
        listener = Listener(A, ME)
        listener.start(2, added=["b"])
        assert listener.view.stop_wanted == listener.view.newest_fact_id
        listener.commit(A, ME, B, attempt=2)
        assert listener.view.stop_wanted == listener.view.newest_fact_id
        listener.view.committed = None
        assert listener.view.stop_wanted == 0

    def test_a_pause_wants_it_until_it_is_over(self) -> None:
        listener = Listener(A, ME)
        listener.hear(JobPaused("lunch"))
        assert listener.view.stop_wanted == listener.view.newest_fact_id
        listener.hear(JobResumed("done"))
        assert listener.view.stop_wanted == 0

    def test_a_resumption_does_not_call_off_a_rescale(self) -> None:
        listener = Listener(A, ME)
        listener.hear(JobPaused("lunch"))
        listener.start(2, added=["b"])
        wanted = listener.view.stop_wanted
        listener.hear(JobResumed("done"))
        assert listener.view.stop_wanted == wanted > 0

    def test_a_rescale_does_not_call_off_a_pause(self) -> None:
        listener = Listener(A, ME)
        listener.hear(JobPaused("lunch"))
        listener.start(2, added=["b"])
        listener.commit(A, ME, B, attempt=2)
        listener.view.committed = None
        assert listener.view.stop_wanted > 0

    def test_a_pause_of_which_the_fact_is_not_known_wants_it_too(self) -> None:
        view = JobView("me")
        view.catch_up(joined(paused=True))
        assert view.stop_wanted > 0

    def test_a_rescale_without_this_worker_is_nothing_to_it(self) -> None:
        listener = Listener(A, B)
        listener.start(2, added=["c"])
        assert (listener.view.attempt, listener.view.stop_wanted) == (0, 0)


class TestWaiting:
    def test_job_waits_for_workers_until_a_rescale_starts(self) -> None:
        listener = Listener(A, ME)
        listener.hear(RescaleAborted(2, "too few workers"), JobWaiting(1, 2))
        assert listener.view.waiting
        listener.start(3, added=["b"], removed=["a"])
        assert not listener.view.waiting

    def test_join_reply_tells_whether_the_job_waits_unless_a_later_fact_does(self) -> None:
        listener = Listener(A, ME)
        reply = msgspec.structs.replace(joined(listener.view.topology), phase=Phase.WAITING)
        listener.view.miss(Gap(20, 30, ""))
        listener.view.catch_up(reply)
        assert listener.view.waiting
        listener.view.miss(Gap(31, 40, ""))
        listener.start(3, added=["b"])
        listener.view.catch_up(reply)
        assert not listener.view.waiting


class TestAttempts:
    def test_new_attempt_ends_the_synchronising_of_the_old_one(self) -> None:
        listener = Listener(A, ME)
        listener.start(2)
        settled = RescaleSynchronising(2, A, 7, 1)
        listener.hear(settled)
        before = listener.view.synchronising
        assert before == settled
        listener.start(3)
        assert (listener.view.attempt, listener.view.synchronising) == (3, None)
        listener.hear(settled)
        assert listener.view.synchronising is None

    def test_state_transfer_is_under_way_for_the_attempt_that_is_settled_only(self) -> None:
        listener = Listener(A, ME)
        listener.start(2)
        assert not listener.view.is_synchronising_for(2)
        listener.hear(RescaleSynchronising(2, A, 7, 1))
        assert [listener.view.is_synchronising_for(attempt) for attempt in (1, 2, 3)] == [False, True, False]

    @pytest.mark.parametrize("fact", [RescaleAborted(2, "a member is gone"), JobCompleted(7), JobAborted("enough", 7)])
    def test_state_transfer_ends_with_its_attempt_and_with_the_training(self, fact: Fact) -> None:
        listener = Listener(A, ME)
        listener.start(2)
        listener.hear(RescaleSynchronising(2, A, 7, 1), fact)
        assert not listener.view.is_synchronising_for(2)

    def test_state_transfer_waits_until_the_worker_has_crossed_into_the_world_before(self) -> None:
        listener = Listener(A, ME)
        listener.commit(A, B, ME, attempt=2)
        listener.start(3)
        listener.hear(RescaleSynchronising(3, A, 7, 1))
        assert not listener.view.is_synchronising_for(3)
        listener.view.committed = None
        assert listener.view.is_synchronising_for(3)

    def test_one_that_was_given_up_has_nothing_settled(self) -> None:
        listener = Listener(A, ME)
        listener.start(2)
        listener.hear(RescaleSynchronising(2, A, 7, 1), RescaleAborted(2, "why"))
        assert listener.view.synchronising is None

    def test_a_joiner_takes_part_in_the_one_that_adds_it(self) -> None:
        listener = Listener(A, B)
        listener.start(2, added=["me"])
        assert listener.view.attempt == 2

    def test_one_that_replaces_a_dead_worker_of_this_name_is_this_workers(self) -> None:
        listener = Listener(A, ME)
        listener.start(2, added=["me"], removed=["me"])
        assert (listener.view.attempt, listener.view.lost) == (2, "")


class TestCommits:
    def test_a_commit_leads_from_the_world_before_into_the_next(self) -> None:
        listener = Listener(A, ME)
        before = listener.view.topology
        listener.commit(A, ME, B, attempt=2)
        commit = listener.view.committed
        assert commit is not None
        assert (commit.before, commit.topology) == (before, listener.view.topology)
        assert commit.topology.workers == (A, ME, B)
        assert (commit.attempt, commit.step, commit.epoch) == (2, 7, 2)
        assert (commit.learning_rate, commit.global_batch_size, commit.reason) == (0.5, 64, "because")

    def test_commit_from_an_unknown_world_makes_the_view_outdated(self) -> None:
        listener = Listener(A, ME)
        listener.commit(A, attempt=9, base=ClusterTopology((A, B), 7))
        view = listener.view
        assert (view.outdated, view.committed, view.topology.epoch) == (True, None, 1)
        later = ClusterTopology((A, ME), 8)
        view.catch_up(joined(later, is_member=True))
        assert not view.outdated
        assert view.committed is not None
        assert view.committed.topology == later

    def test_join_reply_older_than_the_facts_leaves_the_view_outdated(self) -> None:
        listener = Listener(A, ME)
        listener.commit(A, attempt=9, base=ClusterTopology((A, B), 7))
        listener.view.catch_up(joined(ClusterTopology((A, B), 7)))
        assert listener.view.outdated


class TestTheLost:
    @pytest.mark.parametrize("fact", [WorkerFailed("a", 0, "dead"), WorkerLeft("a", "done")])
    def test_member_that_has_failed_is_lost_until_the_next_world(self, fact: Fact) -> None:
        listener = Listener(A, ME)
        listener.hear(fact)
        assert listener.view.lost == "a"
        listener.start(2, removed=["a"])
        listener.commit(ME, attempt=2)
        assert listener.view.lost == ""

    def test_failure_outside_the_world_marks_no_worker_as_lost(self) -> None:
        listener = Listener(A, ME)
        listener.hear(WorkerFailed("b", -1, "dead"))
        assert listener.view.lost == ""

    def test_rescale_that_removes_a_worker_marks_it_as_lost(self) -> None:
        listener = Listener(A, ME)
        listener.start(2, removed=["a"])
        assert listener.view.lost == "a"


class TestTheEnd:
    @pytest.mark.parametrize(
        ("fact", "kind", "code"),
        [
            (WorkerFailed("me", 1, "requested by an operator"), WorkerEvicted, "worker_evicted"),
            (JobAborted("too many", 7), JobEnded, "job_aborted"),
            (JobRemoved("run"), JobEnded, "job_removed"),
        ],
    )
    def test_it_has_a_type_and_a_code(self, fact: Fact, kind: type[ForgedError], code: str) -> None:
        listener = Listener(A, ME)
        listener.hear(fact)
        assert isinstance(listener.view.end, kind)
        assert listener.view.end.code == code

    def test_abort_names_the_command_that_lets_new_workers_continue(self) -> None:
        listener = Listener(A, ME)
        listener.hear(JobAborted("too many", 7))
        assert isinstance(listener.view.end, JobEnded)
        assert "`forgectl jobs reopen run`" in listener.view.end.fix

    @pytest.mark.parametrize(
        "fact", [WorkerFailed("me", 1, "dead"), WorkerDraining("me", "go"), JobAborted("x", 1), JobRemoved("run")]
    )
    def test_facts_about_an_earlier_holder_of_the_name_are_ignored(self, fact: Fact) -> None:
        listener = Listener(known=False)
        listener.hear(fact)
        listener.view.catch_up(joined())
        assert (listener.view.end, listener.view.draining) == (None, None)

    def test_that_training_is_done_comes_with_the_steps(self) -> None:
        listener = Listener(A, ME)
        listener.hear(JobCompleted(7))
        assert listener.view.completed == 7

    def test_a_worker_drains_when_it_is_meant(self) -> None:
        listener = Listener(A, ME)
        listener.hear(WorkerDraining("a", "go"))
        assert listener.view.draining is None
        listener.hear(WorkerDraining("me", "go"))
        assert listener.view.draining == "go"


class TestWhatWasMissed:
    def test_gap_makes_the_view_outdated_and_advances_the_newest_fact(self) -> None:
        listener = Listener(A, ME)
        listener.view.miss(Gap(20, 90, "too slow"))
        assert (listener.view.outdated, listener.view.newest_fact_id) == (True, 90)

    def test_synchronising_is_kept_until_the_join_reply(self) -> None:
        settled = RescaleSynchronising(5, A, 7, 1)
        for said, behind in ((settled, settled), (None, None)):
            listener = Listener(A, ME)
            listener.start(5)
            listener.hear(settled)
            listener.view.miss(Gap(20, 90, "too slow"))
            assert listener.view.synchronising == settled
            listener.view.catch_up(joined(listener.view.topology, attempt=5, synchronising=said))
            assert listener.view.synchronising == behind

    def test_synchronising_ends_with_its_attempt(self) -> None:
        listener = Listener(A, ME)
        listener.start(5)
        listener.hear(RescaleSynchronising(5, A, 7, 1))
        listener.view.miss(Gap(20, 90, "too slow"))
        listener.view.catch_up(joined(listener.view.topology, attempt=6))
        assert (listener.view.attempt, listener.view.synchronising) == (6, None)

    def test_synchronising_after_the_gap_survives_an_older_join_reply(self) -> None:
        listener = Listener(A, ME)
        listener.start(5)
        listener.hear(RescaleSynchronising(5, A, 7, 1))
        listener.view.miss(Gap(20, 90, "too slow"))
        listener.start(6)
        settled = RescaleSynchronising(6, A, 7, 1)
        listener.hear(settled)
        listener.view.catch_up(joined(listener.view.topology, attempt=5))
        assert listener.view.synchronising is settled

    def test_join_reply_restores_attempt_pause_and_drain(self) -> None:
        listener = Listener(A, ME)
        listener.view.miss(Gap(20, 90, "too slow"))
        settled = RescaleSynchronising(5, A, 7, 1)
        listener.view.catch_up(
            joined(listener.view.topology, attempt=5, paused=True, leaving="go", synchronising=settled)
        )
        view = listener.view
        assert (view.attempt, view.rescaling, view.paused, view.draining) == (5, True, True, "go")
        assert view.synchronising == settled
        assert not view.outdated

    def test_facts_after_the_gap_survive_an_older_join_reply(self) -> None:
        listener = Listener(A, ME)
        old = listener.view.topology
        listener.view.miss(Gap(20, 90, "too slow"))
        listener.hear(JobResumed("go on"))
        listener.commit(A, ME, B, attempt=6)
        commit = listener.view.committed
        listener.view.catch_up(joined(old, attempt=6, paused=True, is_member=True))
        assert not listener.view.paused
        assert listener.view.committed is commit
        assert listener.view.topology.epoch == 2

    def test_a_world_that_is_entered_is_not_entered_again(self) -> None:
        listener = Listener(A, ME)
        listener.view.miss(Gap(20, 90, "too slow"))
        listener.view.catch_up(joined(listener.view.topology, is_member=True))
        assert listener.view.committed is None

    def test_a_world_that_was_committed_together_with_the_answer_is_entered(self) -> None:
        """A job that does not stop for rescales takes a joiner in at once, and tells of it before it answers."""
        listener = Listener(known=False)
        listener.start(1, added=["me"])
        listener.commit(ME, attempt=1)
        assert listener.view.committed is None
        listener.view.catch_up(joined(listener.view.topology, is_member=True))
        commit = listener.view.committed
        assert commit is not None
        assert (commit.attempt, commit.topology.workers) == (1, (ME,))

    def test_first_join_reply_older_than_the_facts_is_requested_again(self) -> None:
        listener = Listener(known=False)
        listener.start(1, added=["me"])
        listener.commit(ME, attempt=1)
        listener.commit(ME, A, attempt=2)
        view = listener.view
        view.catch_up(joined())
        assert (view.outdated, view.committed) == (True, None)
        view.catch_up(joined(view.topology, is_member=True))
        assert not view.outdated
        assert view.committed is not None
        assert view.committed.topology.workers == (ME, A)

    @pytest.mark.parametrize(
        "fact",
        [
            WorkerFailed("me", 1, "dead"),
            WorkerLeft("me", "done"),
            WorkerDraining("me", "go"),
            JobCompleted(7),
            JobAborted("x", 1),
            JobRemoved("run"),
        ],
    )
    def test_fact_before_registration_about_its_own_name_is_asked_about_again(self, fact: Fact) -> None:
        listener = Listener(known=False)
        listener.hear(fact)
        listener.view.catch_up(joined())
        assert listener.view.outdated
        listener.view.catch_up(joined())
        assert not listener.view.outdated

    def test_a_world_of_another_under_this_name_is_not_entered(self) -> None:
        view = JobView("me")
        view.catch_up(joined(ClusterTopology((A, ME), 4)))
        assert (view.committed, view.topology.epoch) == (None, 4)

    def test_attempt_known_before_the_join_reply_is_kept(self) -> None:
        listener = Listener(known=False)
        listener.start(3, added=["me"])
        listener.view.catch_up(joined(ClusterTopology((A, B), 4), attempt=3))
        assert (listener.view.attempt, listener.view.rescaling) == (3, True)

    def test_attempt_started_after_the_join_reply_is_kept(self) -> None:
        listener = Listener(known=False)
        listener.start(3, added=["me"])
        listener.view.catch_up(joined(ClusterTopology((A, B), 4)))
        assert (listener.view.attempt, listener.view.rescaling) == (3, True)

    def test_attempt_that_the_answer_calls_ended_is_over(self) -> None:
        listener = Listener(known=False)
        after = ClusterTopology((A, ME, B), 2)
        listener.start(3, added=["me"])
        listener.view.catch_up(joined(after, is_member=True))
        assert listener.view.rescaling
        listener.hear(completed(ClusterTopology((A, B), 1), after, 3))
        assert not listener.view.rescaling
        assert listener.view.committed is not None

    def test_join_reply_ends_an_attempt_with_a_missed_end(self) -> None:
        listener = Listener(A, ME)
        listener.start(3, added=["b"])
        listener.view.miss(Gap(20, 90, "too slow"))
        listener.view.catch_up(joined(ClusterTopology((A, ME, B), 2), is_member=True))
        assert not listener.view.rescaling
        assert listener.view.committed is not None
