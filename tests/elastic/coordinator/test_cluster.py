"""Playbooks: what comes in, and which facts come out. Each sentence that is promised of the coordinator is one test."""

from __future__ import annotations

import pytest

from forged.elastic.coordinator.rescale_schedule import FAILED_JOINS_DOUBLED_MAX
from forged.elastic.failure_detector.detector import CONFIRM_S, NEVER
from forged.elastic.failure_detector.suspicion import REPORTED_WORLDS_MAX
from forged.elastic.membership.member import COLLECTIVES_PER_WORLD, PULSE_INTERVAL_S
from forged.elastic.messages import (
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
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRecovered,
    WorkerReturned,
    WorkerStalled,
)
from forged.elastic.model import RescaleType, WorkerId
from forged.elastic.outbox import Moment
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import Stage, StopReport
from forged.errors import ConfigError, RequestRefused, Unavailable
from forged.phrases import REASON_CHARS_MAX, REASONS_MAX
from tests.elastic.play import BEGINNING_S, WALL_S, WINDOW_S, Play, formed, incarnation, kinds, newcomer, worker_of

PATIENT = {"failure_tolerance_percentage": 100, "max_consecutive_failures": 1_000}
"""Settings of a job that failures alone do not end."""


def refusal(error: pytest.ExceptionInfo[RequestRefused] | pytest.ExceptionInfo[Unavailable]) -> str:
    return error.value.code


# Windows.


def test_a_worker_that_registers_has_joined_and_waits_for_its_rank() -> None:
    play = Play()
    assert play.join("a") == [WorkerJoined(worker_of("a"))]
    assert (play.cluster.phase, play.world, play.cluster.generation) == (Phase.FORMING, [], 0)


def test_joiners_wait_for_the_stability_window() -> None:
    play = Play()
    play.join("a", "b")
    assert play.wait(WINDOW_S - 0.5) == []
    (started,) = play.wait(1.0)
    assert started == RescaleStarted(1, RescaleType.SCALE_UP, 2, ["a", "b"], [], "a, b joined")
    assert play.cluster.phase is Phase.RESCALING


def test_the_window_begins_again_with_each_who_joins() -> None:
    play = Play()
    play.join("a")
    play.wait(WINDOW_S - 1)
    play.join("b")
    assert play.wait(WINDOW_S - 1) == []
    assert kinds(play.wait(2.0)) == ["RescaleStarted"]


def test_the_window_does_not_begin_again_with_one_who_only_comes_back() -> None:
    play = Play()
    play.join("a")
    play.wait(WINDOW_S - 1)
    assert play.join("a") == []
    play.lose("a")
    play.come_back("a")
    assert kinds(play.wait(2.0)) == ["RescaleStarted"]


def test_the_window_is_cut_short_when_as_many_as_there_may_be_are_there() -> None:
    play = Play(max_workers=2)
    assert kinds(play.join("a")) == ["WorkerJoined"]
    assert kinds(play.join("b")) == ["WorkerJoined", "RescaleStarted"]


def test_one_too_many_is_a_spare_and_keeps_nobody_busy() -> None:
    play = Play(max_workers=2)
    play.join("a", "b", "c")
    assert play.agree().added == ["a", "b"]
    assert play.wait(200.0) == []


def test_with_fewer_than_there_have_to_be_nobody_trains() -> None:
    play = Play(min_workers=2)
    play.join("a")
    assert play.wait(WINDOW_S * 3) == []
    play.join("b")
    assert kinds(play.wait(WINDOW_S)) == ["RescaleStarted"]


def test_a_failure_is_acted_on_after_its_window_so_that_several_make_one_rescale() -> None:
    play = formed("a", "b", "c", "d", **PATIENT)
    assert kinds(play.die("b")) == ["WorkerFailed"]
    play.time += 0.04
    play.tick()
    assert kinds(play.die("c")) == ["WorkerFailed"]
    (started,) = play.wait(0.02)
    assert isinstance(started, RescaleStarted)
    assert (started.type, started.removed, started.world_size) == (RescaleType.SCALE_DOWN, ["b", "c"], 2)
    assert started.reason == "b failed: its process has ended; c failed: its process has ended"


def test_a_window_of_nothing_is_over_at_once() -> None:
    play = formed("a", "b", failure_window_ms=0)
    assert kinds(play.die("b")) == ["WorkerFailed", "RescaleStarted"]


def test_a_job_begins_after_its_window_however_it_ticks() -> None:
    """The service sleeps until `due_at`, which therefore must name the moment itself."""
    play = Play(stability_window_ms=10_000)
    play.join("a")
    play.tick()
    assert play.cluster.due_at() <= BEGINNING_S + 10.0


# Replacing.


def test_a_waiting_joiner_takes_the_rank_of_a_failed_worker_in_one_rescale() -> None:
    play = formed("a", "b", "c")
    play.join("d")
    play.die("b")
    started = play.wait(0.1)[-1]
    assert started == RescaleStarted(
        2, RescaleType.REPLACE, 3, ["d"], ["b"], "b failed: its process has ended; d joined"
    )
    completed = play.agree()
    assert (completed.type, play.world) == (RescaleType.REPLACE, ["a", "d", "c"])


def test_a_spare_takes_the_place_of_who_failed() -> None:
    play = Play(max_workers=2)
    play.join("a", "b", "c")
    play.agree()
    play.die("a")
    play.wait(0.1)
    assert play.agree().added == ["c"]
    assert play.world == ["c", "b"]


def test_a_process_that_comes_back_under_the_id_of_one_that_died_is_another_worker() -> None:
    play = formed("a", "b")
    play.die("b")
    play.join("b", life=2)
    play.wait(0.1)
    completed = play.agree()
    assert (completed.added, completed.removed, completed.type) == (["b"], ["b"], RescaleType.REPLACE)
    assert (play.world, play.cluster.generation) == (["a", "b"], 2)


def test_rank_0_survives_if_its_worker_does() -> None:
    play = formed("a", "b", "c")
    play.join("d", "e")
    play.die("c")
    play.wait(0.1)
    play.agree()
    assert play.world == ["a", "b", "d", "e"]


# Who may register.


def test_the_id_of_a_worker_that_is_alive_is_refused() -> None:
    play = formed("a", "b")
    with pytest.raises(RequestRefused) as error:
        play.join("b", life=2)
    assert refusal(error) == "worker_exists"
    assert (play.news(), play.world) == ([], ["a", "b"])


def test_the_id_of_one_that_may_be_dead_has_to_wait_and_lets_its_address_be_probed() -> None:
    play = formed("a", "b")
    play.pulse("b")
    play.lose("b")
    assert play.probes == [], "the pulse would tell"
    play.time += 10 * PULSE_INTERVAL_S
    with pytest.raises(Unavailable) as error:
        play.join("b", life=2)
    assert refusal(error) == "worker_undecided"
    play.settle()
    assert [probe.worker.id for probe in play.probes] == ["b"]
    play.refuse("b")
    assert kinds(play.join("b", life=2)) == ["WorkerJoined"]


def test_an_id_that_returns_on_another_host_is_at_its_new_address() -> None:
    play = formed("a", "b")
    play.die("b")
    there = newcomer("b", 2)
    there.worker = WorkerId("b", "elsewhere", 9999)
    play.cluster.join(there, play.now)
    play.wait(0.1)
    play.agree()
    assert str(play.cluster.membership.topology.workers[1]) == "b@elsewhere:9999"


def test_the_same_process_may_register_again() -> None:
    play = formed("a", "b")
    assert play.join("a", "b") == []
    assert play.wait(100.0) == []


def test_who_registers_again_is_reached_through_its_new_client() -> None:
    play = formed("a")
    again = newcomer("a")
    again.client = b"another"
    play.cluster.join(again, play.now)
    play.restart()
    assert play.cluster.members["a"].client == b"another"


def test_a_job_that_is_over_takes_nobody() -> None:
    play = formed("a")
    play.cluster.abort(play.now, "a test")
    with pytest.raises(RequestRefused) as error:
        play.join("b")
    assert refusal(error) == "job_over"
    assert "a test" in str(error.value)


def test_no_more_join_than_a_commit_can_name() -> None:
    play = Play()
    members = [newcomer(f"{number:0128d}") for number in range(5_000)]
    for member in members:
        member.worker = WorkerId(member.id, "h" * 253, 1)

    def join_all() -> None:
        for member in members:
            play.cluster.join(member, play.now)

    with pytest.raises(RequestRefused) as error:
        join_all()
    assert refusal(error) == "workers_full"
    assert 1_000 < len(play.cluster.members) < 5_000
    play.wait(WINDOW_S + 1)
    play.agree()
    assert max(map(len, play.stored.values())) < 1 << 20


# Unknown workers.


def test_what_an_unknown_worker_says_or_what_is_said_of_it_is_no_error() -> None:
    play = formed("a")
    assert play.leave("x") + play.leave("a", life=2, done=True) == []
    assert play.die("x") + play.die("a", life=2) == []
    assert play.lose("x") + play.come_back("x") == []
    assert play.refuse("x") + play.refuse("a", life=2) == []
    play.cluster.heartbeat("x", b"", 5, 5, play.now)
    play.cluster.heartbeat("a", incarnation("a", 2), 5, 5, play.now)
    play.cluster.pulse("x", b"", 5, 5, 1.0, play.now)
    play.cluster.peer_report("x", b"", 1, play.now, peer="a", reason="")
    assert play.news() == []
    assert (play.cluster.training.current_step, play.cluster.members["a"].step) == (0, 0)


@pytest.mark.parametrize("act", ["drain", "evict"])
def test_an_operator_who_names_an_unknown_worker_is_told(act: str) -> None:
    play = formed("a")
    with pytest.raises(RequestRefused) as error:
        getattr(play.cluster, act)("x", play.now, "a test")
    assert refusal(error) == "worker_unknown"


# Evidence.


def test_the_end_of_its_process_fails_a_worker_at_once() -> None:
    play = formed("a", "b")
    assert play.die("b") == [WorkerFailed("b", 1, "its process has ended")]


def test_silence_of_library_and_pulse_fails_a_worker_after_the_timeout() -> None:
    play = formed("a", "b")
    assert play.wait(9.5, silent={"b"}) == []
    failed = play.wait(1.0, silent={"b"})[0]
    assert isinstance(failed, WorkerFailed)
    assert failed.reason.startswith("no heartbeat and no pulse for 10.")


def test_a_pulse_alone_keeps_a_worker_alive() -> None:
    play = formed("a", "b")
    for _ in range(40):
        assert play.wait(1.0, silent={"b"}) == []
        play.pulse("b")


def test_a_lost_connection_alone_proves_nothing_and_is_told_with_the_grace() -> None:
    play = formed("a", "b")
    play.lose("b")
    (lost,) = play.wait(0.5)
    assert isinstance(lost, WorkerLost)
    assert lost.grace_s is not None
    assert 14.0 < lost.grace_s <= 15.0
    (returned,) = play.come_back("b")
    assert isinstance(returned, WorkerReturned)
    assert returned.after_s == pytest.approx(0.5)
    assert play.wait(60.0) == []
    assert play.cluster.generation == 1


def test_a_connection_that_is_back_before_anybody_looked_was_never_told_to_be_lost() -> None:
    play = formed("a", "b")
    play.tick()
    assert play.lose("b") + play.come_back("b") == []


def test_who_does_not_come_back_within_the_grace_has_failed() -> None:
    play = formed("a", "b")
    play.lose("b")
    assert kinds(play.wait(14.5)) == ["WorkerLost"]
    failed, started = play.wait(1.0)
    assert isinstance(failed, WorkerFailed)
    assert failed.reason.startswith("connection lost 15.")
    assert isinstance(started, RescaleStarted)


def test_a_worker_without_a_connection_is_probed_every_second_unless_its_pulse_would_tell() -> None:
    play = formed("a", "b")
    play.pulse("a")
    play.lose("a", "b")
    play.wait(1.0)
    assert {probe.worker.id for probe in play.probes} == {"b"}
    play.wait(4.0)
    counts = [sum(probe.worker.id == name for probe in play.probes) for name in "ab"]
    assert 1 <= counts[0] <= 5, "from when the pulse was silent for too long"
    assert 4 <= counts[1] <= 6


def test_a_refused_probe_proves_that_a_worker_without_a_connection_is_dead() -> None:
    play = formed("a", "b")
    assert play.refuse("b") == [], "it has a connection"
    play.lose("b")
    assert play.refuse("b") == [WorkerFailed("b", 1, "host-b:7000 refuses connections")]


def test_an_answered_probe_proves_nothing() -> None:
    play = formed("a", "b")
    play.lose("b")
    play.cluster.probed("b", incarnation("b"), play.now, refused=False)
    assert play.news() == []


def test_a_peer_and_the_daemon_together_prove_a_death_whoever_notices_first() -> None:
    first = formed("a", "b")
    first.lose("b")
    first.complain("a", "b")
    assert WorkerFailed("b", 1, "unreachable from the daemon and from a") in first.wait(CONFIRM_S + 0.1)
    second = formed("a", "b")
    second.complain("a", "b")
    second.lose("b")
    assert WorkerFailed("b", 1, "unreachable from the daemon and from a") in second.wait(CONFIRM_S + 0.1)


def test_a_network_that_pauses_for_all_takes_nobodys_life() -> None:
    play = formed("a", "b", "c", failure_tolerance_percentage=0)
    play.lose("a", "b", "c")
    play.wait(8.0, silent="abc")
    play.come_back("a")
    for peer in "bc":
        play.complain("a", peer)
    play.wait(2.0, silent="bc")
    play.come_back("b", "c")
    play.wait(1.0)
    assert "WorkerFailed" not in kinds(play.facts)


def test_a_complaint_about_one_that_only_has_to_come_back_to_a_new_daemon_proves_nothing() -> None:
    play = formed("a", "b")
    play.restart()
    play.come_back("a")
    assert play.complain("a", "b") == []
    assert "b" in play.cluster.members


def test_what_piled_up_while_the_daemon_did_not_get_its_turn_is_held_against_nobody() -> None:
    play = formed("a", "b", rescale_timeout_ms=5_000)
    assert play.sleep(3_600.0) == []
    play.lose("b")
    assert kinds(play.sleep(3_600.0)) == ["WorkerLost"]
    play.come_back("b")
    play.cluster.rescale(play.now, "a test")
    play.news()
    assert play.sleep(3_600.0) == []
    play.agree()
    assert play.world == ["a", "b"]


def test_a_daemon_that_is_always_a_little_late_notices_silence_all_the_same() -> None:
    play = formed("a", "b")
    for _ in range(60):
        play.beat("a")
        play.sleep(1.0)
    assert kinds(play.facts).count("WorkerFailed") == 1


# Progress, and none.


def test_who_lives_and_makes_no_progress_is_stalled_and_recovers_with_progress() -> None:
    play = formed("a", "b", stall_timeout_ms=60_000)
    play.beat("a", step=5, collective_seq=10_001)
    play.beat("b", step=5, collective_seq=10_000)
    for _ in range(70):
        play.pulse("a", "b", step=5)
        play.wait(1.0, still=True)
    stalled = [fact for fact in play.facts if isinstance(fact, WorkerStalled)]
    assert [(fact.worker_id, fact.step) for fact in stalled] == [("b", 5)], "the other waits for it"
    assert play.beat("b", step=5, collective_seq=10_001) == [WorkerRecovered("b", 5)]
    assert "b" in play.world


def test_who_is_stalled_is_put_out_only_where_that_is_wanted() -> None:
    play = formed("a", "b", stall_timeout_ms=5_000, evict_stalled=True)
    play.beat("a", collective_seq=10_000)
    stalled, failed = play.wait(5.5, still=True)[:2]
    assert isinstance(stalled, WorkerStalled)
    assert isinstance(failed, WorkerFailed)
    assert failed.worker_id == stalled.worker_id == "b"


def test_who_is_not_heard_is_not_known_to_make_no_progress() -> None:
    play = formed("a", "b", stall_timeout_ms=5_000)
    play.lose("b")
    assert kinds(play.wait(12.0)) == ["WorkerLost"]
    assert play.sleep(3_600.0) == []


@pytest.mark.parametrize("rests", ["paused", "rescaling"])
def test_nobody_is_stalled_while_nobody_is_to_train(rests: str) -> None:
    play = formed("a", "b", stall_timeout_ms=5_000, rescale_timeout_ms=0)
    if rests == "paused":
        play.cluster.pause(play.now, "lunch")
    else:
        play.join("c")
        play.wait(31.0)
        play.stop("a", "b", stop=StopReport(1, holds_state=True))
        play.stop("c", stop=StopReport(0, holds_state=False))
    play.news()
    assert play.wait(60.0, still=True) == []
    if rests == "paused":
        play.cluster.resume(play.now, "back")
    else:
        play.ready("c")
    play.news()
    assert play.wait(4.0, still=True) == [], "the time begins anew"
    assert set(kinds(play.wait(2.0, still=True))) == {"WorkerStalled"}


def test_who_keeps_a_rescale_waiting_in_its_step_is_stalled_and_who_has_stopped_is_not() -> None:
    play = formed("a", "b", stall_timeout_ms=5_000, rescale_timeout_ms=0)
    play.cluster.rescale(play.now, "a test")
    play.stop("a", stop=StopReport(1, holds_state=True))
    play.news()
    assert [fact.worker_id for fact in play.wait(20.0, still=True) if isinstance(fact, WorkerStalled)] == ["b"]


def test_a_new_world_is_a_new_beginning_for_who_was_stalled() -> None:
    play = formed("a", "b", stall_timeout_ms=5_000)
    play.wait(6.0, still=True)
    play.cluster.rescale(play.now, "a test")
    play.agree()
    assert kinds(play.facts[-4:]) == ["RescaleStarted", "WorkerRecovered", "WorkerRecovered", "RescaleCompleted"]


def test_the_committed_step_follows_those_in_the_world_alone() -> None:
    play = formed("a", "b")
    play.join("c")
    play.beat("c", step=1_000)
    assert play.cluster.training.current_step == 0
    play.beat("b", step=7)
    play.beat("a", step=6)
    assert play.cluster.training.current_step == 6
    play.beat("a", step=7)
    assert play.cluster.training.current_step == 7


def test_a_heartbeat_that_lies_is_not_believed_alone() -> None:
    play = formed("a", "b", "c")
    play.beat("b", step=1_000_000)
    assert play.cluster.training.current_step == 0
    play.beat("a", step=5)
    assert play.cluster.training.current_step == 5
    play.beat("b", step=2_000_000)
    play.beat("c", step=6)
    assert play.cluster.training.current_step == 6


def test_who_is_done_says_how_many_steps_there_were() -> None:
    play = formed("a", "b")
    a = play.cluster.members["a"]
    play.cluster.leave("a", a.incarnation, play.now, reason="", done=True, step=9)
    assert JobCompleted(9) in play.news()


def test_a_member_that_is_silent_is_failed_and_those_who_wait_for_it_are_not() -> None:
    """The others are in a collective with it, so they cannot answer either."""
    play = formed("a", "b", "c", rescale_timeout_ms=5_000, **PATIENT)
    play.join("d")
    play.wait(WINDOW_S)
    assert play.cluster.attempt is not None
    play.stop("d", stop=StopReport(0, holds_state=False))
    play.pulse("b")
    told = play.wait(7.0, silent=["b"], still=True)
    assert [fact.worker_id for fact in told if isinstance(fact, WorkerFailed)] == ["b"]


# The rescale.


def test_a_synchronous_rescale_is_a_barrier_with_one_commit() -> None:
    play = formed("a", "b")
    play.join("c")
    play.wait(WINDOW_S)
    assert play.last(RescaleStarted).attempt == 2
    play.news()
    assert play.stop("a", "c", stop=StopReport(9, holds_state=False)) == []
    (synchronising,) = play.stop(
        "b", stop=StopReport(9, holds_state=True, epoch=2, learning_rate=0.5, global_batch_size=64)
    )
    assert synchronising == RescaleSynchronising(2, worker_of("b"), 9, behind=2)
    assert play.ready("c") == []
    assert play.cluster.generation == 1
    (completed,) = play.ready("a")
    assert isinstance(completed, RescaleCompleted)
    assert (completed.step, completed.epoch, completed.learning_rate, completed.global_batch_size) == (9, 2, 0.5, 64)
    assert (play.cluster.generation, play.world) == (2, ["a", "b", "c"])
    assert play.cluster.training.active_worker_count == 3


def test_where_all_are_at_one_step_nobody_has_to_be_synchronised() -> None:
    play = formed("a", "b", "c")
    play.die("c")
    play.wait(0.1)
    play.stop("a", stop=StopReport(4, holds_state=True))
    (completed,) = play.stop("b", stop=StopReport(4, holds_state=True))
    assert isinstance(completed, RescaleCompleted)
    assert completed.step == 4


def test_the_first_world_begins_with_what_somebody_has_brought_back() -> None:
    play = Play()
    play.join("a", "b", "c")
    play.wait(WINDOW_S)
    play.stop("a", "c", stop=StopReport(0, holds_state=False))
    play.stop("b", stop=StopReport(500, holds_state=False))
    play.ready("a", "c")
    completed = play.last(RescaleCompleted)
    assert completed.step == 500
    assert completed.reason.endswith("; state taken from b, which starts with the most steps (500)")


def test_it_is_told_that_what_was_committed_is_lost() -> None:
    play = formed("a", "b", **PATIENT)
    for name in ("a", "b"):
        play.beat(name, step=1200)
    play.die("a", "b")
    play.join("c")
    play.wait(1.0)
    lost, completed = play.stop("c", stop=StopReport(0, holds_state=False))
    assert lost == ProgressLost(1200, 0, "no remaining worker holds them")
    assert isinstance(completed, RescaleCompleted)
    assert completed.reason.endswith("; 1,200 committed steps lost: no remaining worker holds them")
    assert play.cluster.reason == completed.reason


def test_survivors_of_a_death_inside_a_step_go_on_from_the_highest_committed_one() -> None:
    play = formed("a", "b", "c")
    play.die("c")
    play.wait(0.1)
    play.stop("a", stop=StopReport(4, holds_state=True))
    (synchronising,) = play.stop("b", stop=StopReport(5, holds_state=True))
    assert synchronising == RescaleSynchronising(2, worker_of("b"), 5, behind=1)
    assert play.ready("a")[0] == play.last(RescaleCompleted)
    assert play.last(RescaleCompleted).step == 5


def test_a_step_that_some_finished_and_nobody_committed_is_done_again() -> None:
    play = formed("a", "b", "c")
    play.die("c")
    play.wait(0.1)
    play.stop("a", stop=StopReport(4, holds_state=True, finished=True))
    (synchronising,) = play.stop("b", stop=StopReport(4, holds_state=True))
    assert synchronising == RescaleSynchronising(2, worker_of("b"), 4, behind=1)


def test_nothing_is_settled_by_an_attempt_that_comes_to_nothing() -> None:
    """Its source dies before the others have its state: the step that it alone had is done again."""
    play = formed("a", "b", "c", **PATIENT)
    play.beat("a", "b", "c", step=4)
    play.die("c")
    play.wait(0.1)
    play.stop("a", stop=StopReport(4, holds_state=True))
    play.stop("b", stop=StopReport(5, holds_state=True, learning_rate=9.0))
    assert (play.cluster.training.current_step, play.cluster.training.learning_rate) == (4, 0.0)
    play.die("b")
    play.wait(0.1)
    play.stop("a", stop=StopReport(4, holds_state=True))
    assert play.last(RescaleCompleted).step == 4


def test_a_death_in_an_attempt_restarts_it_without_the_dead() -> None:
    play = formed("a", "b", "c", **PATIENT)
    play.join("d")
    play.wait(WINDOW_S)
    play.news()
    play.die("b")
    aborted, started = play.wait(0.1)
    assert isinstance(aborted, RescaleAborted)
    assert aborted.attempt == 2
    assert isinstance(started, RescaleStarted)
    assert (started.attempt, started.added, started.removed) == (3, ["d"], ["b"])
    play.agree()
    assert play.world == ["a", "d", "c"]


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("goes", ["dies", "leaves"])
@pytest.mark.parametrize("who", ["a survivor", "a joiner"])
def test_who_goes_in_the_middle_of_an_attempt_is_never_in_a_world(stage: Stage, goes: str, who: str) -> None:
    """Also when all the others answer before the failure window is over."""
    play = formed("a", "b", "c", **PATIENT)
    play.join("d")
    play.wait(WINDOW_S)
    gone = "b" if who == "a survivor" else "d"
    for name in "abd" if stage is Stage.SYNCHRONISING else "bd":
        play.stop(name, stop=StopReport(3, holds_state=True))
    if stage is Stage.SYNCHRONISING:
        play.stop("c", stop=StopReport(2, holds_state=True))
        assert play.cluster.attempt is not None
        assert play.cluster.attempt.stage is stage
    getattr(play, "die" if goes == "dies" else "leave")(gone)
    if stage is Stage.STOPPING:
        play.stop("a", "c", stop=StopReport(3, holds_state=True))
    else:
        play.ready("c")
    assert play.cluster.generation == 1
    play.wait(0.1)
    play.agree(3)
    assert play.cluster.generation == 2
    assert gone not in play.world
    assert sorted(play.world) == sorted(set("abcd") - {gone})


def test_an_older_attempt_is_refused_and_changes_nothing() -> None:
    play = formed("a", "b")
    play.cluster.rescale(play.now, "a test")
    play.cluster.rescale(play.now, "another")
    play.news()
    with pytest.raises(RequestRefused) as stop:
        play.stop("a", stop=StopReport(1, holds_state=True), number=2)
    with pytest.raises(RequestRefused) as ready:
        play.ready("a", number=2)
    for error in (stop, ready):
        assert refusal(error) == "attempt_over"
        assert "attempt 3 is under way" in str(error.value)
    assert play.cluster.attempt is not None
    assert not play.cluster.attempt.stops


def test_who_is_not_in_the_attempt_has_no_say_in_it() -> None:
    play = formed("a", "b")
    play.cluster.rescale(play.now, "a test")
    play.join("c")
    with pytest.raises(RequestRefused) as error:
        play.stop("c", stop=StopReport(1, holds_state=True))
    assert refusal(error) == "attempt_over"
    with pytest.raises(RequestRefused):
        play.cluster.stopped("a", incarnation("a", 2), 2, StopReport(1, holds_state=True), play.now)


def test_without_an_attempt_every_number_is_over() -> None:
    play = formed("a")
    with pytest.raises(RequestRefused) as error:
        play.ready("a", number=1)
    assert "no attempt is under way" in str(error.value)


def test_who_is_in_a_long_step_together_with_all_others_is_waited_for() -> None:
    """A joiner must not cost a job its workers, because their step lasts longer than a rescale may."""
    play = formed("a", "b", rescale_timeout_ms=5_000, **PATIENT)
    play.join("c")
    play.wait(WINDOW_S)
    play.stop("c", stop=StopReport(0, holds_state=False))
    assert "WorkerFailed" not in kinds(play.wait(60.0))
    attempt = play.cluster.attempt
    assert attempt is not None
    play.stop("a", stop=StopReport(1, holds_state=True))
    assert "WorkerFailed" not in kinds(play.wait(4.0))
    play.stop("b", stop=StopReport(1, holds_state=True))
    failed = [fact.worker_id for fact in play.wait(6.0) if isinstance(fact, WorkerFailed)]
    assert failed == ["c"], "it does not take the state"


def test_who_is_held_up_in_a_step_is_waited_for_as_long_as_its_pulse_lives() -> None:
    """The others are in the same step, and cannot end it either."""
    play = formed("a", "b", rescale_timeout_ms=5_000, **PATIENT)
    play.join("c")
    play.wait(WINDOW_S)
    play.stop("c", stop=StopReport(0, holds_state=False))
    for _ in range(120):
        play.pulse("b")
        assert "WorkerFailed" not in kinds(play.wait(0.5, silent=["b"]))
    play.stop("a", stop=StopReport(1, holds_state=True))
    play.pulse("b")
    failed = [fact.worker_id for fact in play.wait(5.5, silent=["b"]) if isinstance(fact, WorkerFailed)]
    assert failed == ["b"], "the others have come to the end of the step"


def test_who_is_held_up_in_a_step_goes_where_those_who_are_stalled_do() -> None:
    play = formed("a", "b", rescale_timeout_ms=5_000, stall_timeout_ms=12_000, evict_stalled=True, **PATIENT)
    play.join("c")
    play.wait(WINDOW_S)
    play.stop("c", stop=StopReport(0, holds_state=False))
    failed = []
    for _ in range(40):
        play.pulse(*play.cluster.members.keys() & {"b"})
        failed += [fact.worker_id for fact in play.wait(0.5, silent=["b"]) if isinstance(fact, WorkerFailed)]
    assert failed[:1] == ["b"]


def test_a_joiner_that_does_not_answer_is_failed_though_somebody_is_held_up_in_a_step() -> None:
    play = formed("a", "b", rescale_timeout_ms=5_000, **PATIENT)
    play.join("c")
    play.wait(WINDOW_S)
    failed = []
    for _ in range(14):
        play.pulse("b")
        failed += [fact.worker_id for fact in play.wait(0.5, silent=["b"]) if isinstance(fact, WorkerFailed)]
    assert failed == ["c"]


def test_a_daemon_that_came_back_into_a_rescale_waits_for_nobody_for_ever() -> None:
    """A worker whose pulse lives does not fail; and may be held up for long."""
    play = formed("a", "b", "c", **PATIENT)
    play.cluster.rescale(play.now, "a test")
    play.settle()
    play.restart()
    play.come_back("a", "b")
    for _ in range(40):
        play.pulse("c")
        play.wait(0.5, silent=["c"])
    assert play.cluster.attempt is not None


def test_who_does_not_answer_in_time_has_failed_and_the_rescale_restarts_without_it() -> None:
    play = formed("a", "b", "c", rescale_timeout_ms=5_000)
    play.join("d")
    play.wait(WINDOW_S)
    play.stop("a", "b", stop=StopReport(0, holds_state=True))
    play.stop("d", stop=StopReport(0, holds_state=False))
    play.news()
    assert play.wait(4.0) == []
    failed, *rest = play.wait(2.0)
    assert failed == WorkerFailed("c", 2, "no answer in attempt 2 within 5 s")
    assert kinds(rest) == ["RescaleAborted", "RescaleStarted"]
    play.agree()
    assert play.world == ["a", "b", "d"]


def test_a_joiner_that_never_becomes_ready_is_failed_and_costs_the_job_nothing() -> None:
    play = formed("a", rescale_timeout_ms=5_000, max_consecutive_failures=1)
    play.join("b")
    play.wait(WINDOW_S)
    play.stop("a", stop=StopReport(3, holds_state=True))
    play.stop("b", stop=StopReport(0, holds_state=False))
    play.news()
    failed, *rest = play.wait(6.0)
    assert failed == WorkerFailed("b", -1, "no answer in attempt 2 within 5 s")
    assert kinds(rest) == ["RescaleAborted", "RescaleStarted"]
    play.agree(3)
    assert (play.world, play.cluster.failure_budget.in_world, play.cluster.failure_budget.in_a_row) == (["a"], 0, 0)


BEHIND = StopReport(7, holds_state=True)
AHEAD = StopReport(7, holds_state=True, finished=True)


def test_whose_state_is_wanted_and_cannot_be_had_goes_if_it_has_the_higher_rank() -> None:
    """The one step that counts is where the others cannot fetch it from."""
    play = formed("a", "b", "c", rescale_timeout_ms=5_000)
    play.complain("c", "a")
    play.wait(1.1)
    play.complain("a", "c")
    play.stop("a", "b", stop=AHEAD)
    play.stop("c", stop=BEHIND)
    assert play.last(RescaleSynchronising).source.id == "c"
    play.ready("b")
    play.news()
    failed, *_ = [fact for fact in play.wait(6.0) if isinstance(fact, WorkerFailed)]
    assert failed == WorkerFailed("c", 2, "a could not fetch the state from it in attempt 2 within 5 s")
    play.agree(7)
    assert play.world == ["a", "b"]


def test_the_state_of_the_lower_rank_stays_and_who_does_not_get_it_goes() -> None:
    play = formed("a", "b", "c", rescale_timeout_ms=5_000)
    play.complain("c", "a")
    play.wait(1.1)
    play.stop("a", stop=BEHIND)
    play.stop("b", "c", stop=AHEAD)
    play.ready("b")
    play.news()
    failed = [fact for fact in play.wait(6.0) if isinstance(fact, WorkerFailed)]
    assert failed == [WorkerFailed("c", 2, "no answer in attempt 2 within 5 s")]


def test_a_source_that_most_do_not_reach_goes_whatever_its_rank() -> None:
    play = formed("a", "b", "c", "d", rescale_timeout_ms=5_000, failure_tolerance_percentage=100)
    play.cluster.rescale(play.now, "a test")
    play.stop("a", stop=BEHIND)
    play.stop("b", "c", "d", stop=AHEAD)
    for name in ("b", "c"):
        play.receive(name, unreached="a", trouble="nobody answers")
    play.ready("d")
    assert play.last(RescaleSynchronising).source.id == "a"
    play.news()
    failed = [fact for fact in play.wait(6.0) if isinstance(fact, WorkerFailed)]
    assert failed == [WorkerFailed("a", 0, "b could not fetch the state from it in attempt 2 within 5 s")]
    play.agree(7)
    assert play.world == ["b", "c", "d"]


def test_a_newcomer_that_does_not_get_the_state_costs_nobody_else_its_place() -> None:
    play = formed("a", "b", rescale_timeout_ms=5_000)
    play.join("c", "d")
    play.wait(WINDOW_S)
    play.stop("a", "b", stop=BEHIND)
    play.stop("c", "d", stop=StopReport(0, holds_state=False))
    for name in ("c", "d"):
        play.receive(name, unreached="a", trouble="nobody answers")
    play.news()
    failed = [fact for fact in play.wait(6.0) if isinstance(fact, WorkerFailed)]
    why = "no answer in attempt 2 within 5 s: nobody answers"
    assert failed == [WorkerFailed("c", -1, why), WorkerFailed("d", -1, why)]


def test_a_source_that_neither_the_daemon_nor_a_member_reaches_has_failed() -> None:
    play = formed("a", "b", "c")
    play.cluster.rescale(play.now, "a test")
    play.stop("a", stop=BEHIND)
    play.stop("b", "c", stop=AHEAD)
    play.wait(0.1)
    play.lose("a")
    play.news()
    play.receive("b", unreached="a", trouble="nobody answers")
    failed, *_ = [fact for fact in play.wait(CONFIRM_S + 0.1) if isinstance(fact, WorkerFailed)]
    assert failed == WorkerFailed("a", 0, "unreachable from the daemon and from b")


def refused_by_its_source(**settings: int) -> Play:
    """Where `a` takes the state from `c`, and has said that `c` refuses it."""
    play = formed("a", "b", "c", **settings, **PATIENT)
    play.cluster.rescale(play.now, "a test")
    play.stop("a", "b", stop=AHEAD)
    play.stop("c", stop=BEHIND)
    play.ready("b")
    play.receive("a", unreached="c", trouble="refused")
    return play


def test_who_has_begun_to_take_the_state_has_nothing_against_its_source_any_more() -> None:
    play = refused_by_its_source(rescale_timeout_ms=5_000)
    play.receive("a", state=50 << 20)
    play.news()
    assert play.lose("c") == [], "it may come back"
    play.come_back("c")
    assert [fact.worker_id for fact in play.wait(6.0) if isinstance(fact, WorkerFailed)] == ["a"]


def test_who_is_silent_itself_is_not_kept_from_anything() -> None:
    play = refused_by_its_source(rescale_timeout_ms=5_000)
    play.news()
    assert [fact.worker_id for fact in play.wait(6.0, silent=["a"]) if isinstance(fact, WorkerFailed)] == ["a"]


def test_nobody_but_the_source_is_not_reached_by_who_takes_the_state() -> None:
    play = formed("a", "b", "c", **PATIENT)
    play.cluster.rescale(play.now, "a test")
    play.stop("a", stop=BEHIND)
    play.stop("b", "c", stop=AHEAD)
    play.wait(0.1)
    play.lose("c")
    play.news()
    assert play.receive("b", unreached="c", trouble="it lies") == []


@pytest.mark.parametrize("quarrel", ["in three worlds", "over the state"])
def test_who_alone_is_known_to_have_the_state_stays_whoever_complains(quarrel: str) -> None:
    """A newcomer may have a lower rank, and have met nobody."""
    play = formed("a", "b", use_synchronous_rescaling=False, rescale_timeout_ms=5_000, **PATIENT)
    play.join("c")
    play.die("a")
    play.wait(0.1)
    assert (play.world, play.cluster.membership.state_holders) == (["c", "b"], frozenset("b"))
    if quarrel == "in three worlds":
        for _ in range(2):
            play.complain("b", "c")
            play.complain("c", "b")
            play.wait(1.2)
        play.complain("c", "b")
    else:
        for name in "bc":
            play.cluster.members[name].with_data = True
        play.complain("b", "c")
        play.wait(1.2)
        play.stop("b", stop=BEHIND)
        play.stop("c", stop=StopReport(0, holds_state=False))
        play.receive("c", unreached="b", trouble="refused")
        play.ready("b")
        play.wait(6.0)
    assert [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)] == ["a", "c"]
    assert "b" in play.cluster.members


def test_who_alone_has_the_state_is_not_put_out_at_once_over_a_word_and_a_lost_connection() -> None:
    play = formed("a", use_synchronous_rescaling=False, **PATIENT)
    play.join("b")
    play.wait(WINDOW_S)
    play.complain("b", "a")
    play.lose("a")
    play.complain("b", "a")
    assert [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)] == []
    play.wait(16.0, silent="a")
    assert [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)] == ["a"], "it has had its grace"


def test_a_complaint_about_a_source_is_over_when_the_state_has_come() -> None:
    play = formed("a", "b", "c", **PATIENT)
    play.cluster.rescale(play.now, "a test")
    play.stop("a", "b", stop=AHEAD)
    play.stop("c", stop=BEHIND)
    source = play.cluster.synchronising
    assert source is not None
    play.receive("c", unreached=source.source.id, trouble="refused")
    play.ready("c")
    play.news()
    play.lose(source.source.id)
    assert [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)] == []


def test_who_had_to_wait_has_all_its_time_from_then_on() -> None:
    play = formed("a", rescale_timeout_ms=20_000, **PATIENT)
    play.join("b")
    for member in play.cluster.members.values():
        member.with_data = True
    play.wait(WINDOW_S)
    play.stop("a", stop=StopReport(30, holds_state=True))
    play.stop("b", stop=StopReport(0, holds_state=False))
    play.ready("a")
    for _ in range(39):
        play.receive("b", waits=True)
        play.wait(1.0)
    play.receive("b", waits=False)
    play.wait(15.0)
    assert "b" in play.cluster.members
    play.wait(6.0)
    assert [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)] == ["b"]


class TestWhoIsToldToGoAndDoesNot:
    def told(self, *names: str) -> Play:
        play = formed("a", *names, leave_timeout_ms=60_000, **PATIENT)
        play.cluster.drain("a", play.now, "its host is needed")
        play.news()
        return play

    def failed(self, play: Play) -> list[str]:
        return [fact.reason for fact in play.facts if isinstance(fact, WorkerFailed)]

    def test_is_waited_for_as_long_as_its_library_is_heard(self) -> None:
        play = self.told("b")
        play.wait(600.0)
        assert self.failed(play) == []

    def test_is_put_out_when_its_library_has_been_silent_for_so_long(self) -> None:
        play = self.told("b")
        for _ in range(58):
            play.wait(1.0, silent="a")
            play.pulse("a")
        assert self.failed(play) == []
        while "a" in play.cluster.members:
            play.pulse("a")
            play.wait(1.0, silent="a")
        (reason,) = self.failed(play)
        assert reason.startswith("draining for 60.")

    def test_is_put_out_when_nobody_has_taken_it_in(self) -> None:
        play = formed("a", leave_timeout_ms=60_000, **PATIENT)
        play.join("b")
        play.cluster.drain("b", play.now, "it is not wanted after all")
        play.wait(59.0)
        assert self.failed(play) == []
        play.wait(2.0)
        assert [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)] == ["b"]

    def test_is_not_held_to_what_it_could_not_have_been_heard_to_say(self) -> None:
        play = self.told("b")
        play.wait(50.0)
        play.sleep(30.0)
        play.wait(5.0)
        assert self.failed(play) == []

    @pytest.mark.parametrize("timeout_ms", [0, 1, 2000])
    def test_is_heard_at_its_pace_however_short_the_patience(self, timeout_ms: int) -> None:
        play = formed("a", "b", leave_timeout_ms=timeout_ms, **PATIENT)
        play.cluster.drain("a", play.now, "its host is needed")
        for _ in range(20):
            play.wait(3.3, silent="a")
            play.beat("a")
        assert self.failed(play) == []


def test_a_timeout_of_nothing_lets_a_rescale_take_as_long_as_it_does() -> None:
    play = formed("a", rescale_timeout_ms=0)
    play.cluster.rescale(play.now, "a test")
    play.news()
    assert play.wait(10_000.0) == []


def test_who_joins_in_the_middle_of_a_rescale_waits_for_the_next_one() -> None:
    play = formed("a")
    play.cluster.rescale(play.now, "a test")
    play.join("b")
    play.agree()
    assert play.world == ["a"]
    play.wait(WINDOW_S)
    play.agree()
    assert play.world == ["a", "b"]


def test_without_synchronising_the_topology_changes_and_nobody_stops() -> None:
    play = formed("a", "b", use_synchronous_rescaling=False)
    play.beat("a", "b", step=12)
    play.die("b")
    _, completed = play.wait(0.1)
    assert isinstance(completed, RescaleCompleted)
    assert (completed.removed, play.world) == (["b"], ["a"])
    assert (completed.step, completed.epoch) == (None, None), "who did not stop did not say where"
    assert (play.cluster.generation, play.cluster.phase) == (2, Phase.RUNNING)
    assert play.cluster.attempt is None
    assert play.cluster.training.current_step == 12


def test_where_nobody_trains_yet_all_say_where_they_begin_without_synchronising_too() -> None:
    play = Play(use_synchronous_rescaling=False)
    play.join("a", "b")
    assert kinds(play.wait(WINDOW_S)) == ["RescaleStarted"]
    play.stop("a", "b", stop=StopReport(7, holds_state=False, epoch=2))
    assert kinds(play.ready("b")) == ["RescaleCompleted"]
    completed = play.last(RescaleCompleted)
    assert (completed.step, completed.epoch) == (7, 2)


def test_who_comes_when_nobody_of_a_world_is_left_says_where_it_begins_without_synchronising_too() -> None:
    play = formed("a", use_synchronous_rescaling=False, **PATIENT)
    play.beat("a", step=100)
    play.die("a")
    play.wait(0.1)
    play.join("b")
    assert kinds(play.stop("b", stop=StopReport(90, holds_state=False))) == ["ProgressLost", "RescaleCompleted"]
    assert (play.last(RescaleCompleted).step, play.cluster.training.current_step) == (90, 90)


def test_who_is_left_and_may_never_have_met_who_had_the_state_says_where_it_begins() -> None:
    """It would begin anew, alone, and nobody would know that what the others have done is void."""
    play = formed("a", use_synchronous_rescaling=False, **PATIENT)
    play.beat("a", step=30)
    play.join("b")
    play.wait(WINDOW_S)
    assert (play.world, play.last(RescaleCompleted).step) == (["a", "b"], None)
    play.die("a")
    (started,) = play.wait(0.1)
    assert isinstance(started, RescaleStarted)
    assert started.reason.endswith("no remaining worker of world 2 is known to hold the state")
    assert kinds(play.stop("b", stop=StopReport(0, holds_state=False))) == ["ProgressLost", "RescaleCompleted"]
    assert (play.world, play.last(RescaleCompleted).step, play.cluster.training.current_step) == (["b"], 0, 0)


def test_who_has_said_where_it_begins_is_known_to_have_the_state_from_then_on() -> None:
    play = formed("a", use_synchronous_rescaling=False, **PATIENT)
    play.join("b")
    play.wait(WINDOW_S)
    play.die("a")
    play.wait(0.1)
    play.stop("b", stop=StopReport(30, holds_state=True))
    assert play.last(RescaleCompleted).step == 30
    play.join("c")
    assert kinds(play.wait(WINDOW_S)) == ["RescaleStarted", "RescaleCompleted"]
    play.die("c")
    assert kinds(play.wait(0.1)) == ["RescaleStarted", "RescaleCompleted"]
    assert (play.world, play.last(RescaleCompleted).step) == (["b"], None)


def test_who_has_met_the_others_has_the_state() -> None:
    play = formed("a", use_synchronous_rescaling=False, **PATIENT)
    play.join("b")
    play.wait(WINDOW_S)
    play.beat("a", collective_seq=2 * COLLECTIVES_PER_WORLD)
    assert play.cluster.membership.state_holders == {"a"}, "it may wait there for the others"
    play.beat("b", collective_seq=COLLECTIVES_PER_WORLD + 9)
    assert play.cluster.membership.state_holders == {"a"}, "it is on its way from the world before"
    play.beat("b", collective_seq=2 * COLLECTIVES_PER_WORLD + 1)
    assert play.cluster.membership.state_holders == {"a"}, "who may not have it cannot vouch for itself"
    play.beat("a", collective_seq=2 * COLLECTIVES_PER_WORLD + 1)
    play.restart()
    play.come_back("a", "b")
    assert play.cluster.membership.state_holders == {"a", "b"}
    play.die("a")
    assert kinds(play.wait(0.1)) == ["RescaleStarted", "RescaleCompleted"]
    assert (play.world, play.last(RescaleCompleted).step) == (["b"], None)


def test_who_comes_under_the_name_of_one_who_had_the_state_is_another() -> None:
    play = formed("a", "b", use_synchronous_rescaling=False, **PATIENT)
    play.die("a")
    play.join("a", life=2)
    play.wait(0.1)
    assert (sorted(play.world), play.last(RescaleCompleted).step) == (["a", "b"], None)
    play.die("b")
    assert kinds(play.wait(0.1)) == ["RescaleStarted"]
    play.stop("a", stop=StopReport(0, holds_state=False))
    assert (play.world, play.last(RescaleCompleted).step) == (["a"], 0)


def test_who_has_the_state_is_known_behind_a_restart() -> None:
    play = formed("a", use_synchronous_rescaling=False, **PATIENT)
    play.join("b")
    play.wait(WINDOW_S)
    play.restart()
    play.come_back("a", "b")
    play.join("c")
    play.wait(WINDOW_S)
    assert (play.world, play.last(RescaleCompleted).step) == (["a", "b", "c"], None)
    play.restart()
    play.come_back("b", "c")
    play.die("a")
    assert kinds(play.wait(0.1)) == ["RescaleStarted"]


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_the_rate_and_the_batch_follow_the_world_from_what_its_first_said(synchronous: bool, restarted: bool) -> None:
    play = Play(use_synchronous_rescaling=synchronous, scale_batch_with_world=True)
    first = play.form("a", "b", learning_rate=0.1, global_batch_size=32)
    assert (first.learning_rate, first.global_batch_size) == (0.1, 32)
    if restarted:
        play.restart()
        play.come_back("a", "b")
    play.join("c", "d")
    play.wait(WINDOW_S)
    if synchronous:
        play.agree(learning_rate=0.1, global_batch_size=32)
    grown = play.last(RescaleCompleted)
    assert (play.world, grown.learning_rate, grown.global_batch_size) == (["a", "b", "c", "d"], 0.2, 64)


def test_a_rate_that_does_not_follow_the_world_is_not_told_where_nobody_has_said_it() -> None:
    """The script may have changed it since the first world began."""
    play = Play(use_synchronous_rescaling=False, base_learning_rate=0.5)
    assert play.form("a", learning_rate=0.1, global_batch_size=32).learning_rate == 0.1
    play.join("b")
    play.wait(WINDOW_S)
    grown = play.last(RescaleCompleted)
    assert (play.world, grown.learning_rate, grown.global_batch_size) == (["a", "b"], 0.0, 0)
    assert (play.cluster.training.learning_rate, play.cluster.training.global_batch_size) == (0.0, 0)


def test_the_whole_world_may_be_replaced_and_says_so() -> None:
    play = formed("a", **PATIENT)
    play.beat("a", step=100)
    play.die("a")
    assert kinds(play.wait(0.1)) == ["JobWaiting"]
    play.join("b")
    play.stop("b", stop=StopReport(90, holds_state=True))
    completed = play.last(RescaleCompleted)
    assert (completed.step, completed.removed, completed.added) == (90, ["a"], ["b"])
    assert play.cluster.training.current_step == 90


# Failures.


def test_as_many_as_are_tolerated_may_fail_and_one_more_aborts_the_job() -> None:
    play = formed(*"abcdefghij", failure_tolerance_percentage=20, max_consecutive_failures=100)
    assert kinds(play.die("a", "b")) == ["WorkerFailed", "WorkerFailed"]
    _, aborted = play.die("c")
    assert isinstance(aborted, JobAborted)
    assert aborted.reason == "3 of 10 workers failed; limit 2"
    assert play.cluster.phase is Phase.ABORTED


def test_one_may_fail_however_small_the_world() -> None:
    play = formed("a", "b", failure_tolerance_percentage=0)
    assert kinds(play.die("a")) == ["WorkerFailed"]
    assert kinds(play.wait(0.1)) == ["RescaleStarted"]


def test_failures_are_counted_since_the_last_commit() -> None:
    play = formed("a", "b", "c", "d", failure_tolerance_percentage=0, max_consecutive_failures=100)
    for name in "abc":
        play.die(name)
        play.wait(0.1)
        play.agree()
    assert (play.world, play.cluster.failure_budget.in_world, play.cluster.over) == (["d"], 0, False)


def test_so_many_failures_without_a_committed_step_in_between_abort_the_job() -> None:
    play = formed("a", "b", "c", "d", max_consecutive_failures=3)
    for name in "ab":
        play.die(name)
        play.wait(0.1)
        play.agree()
    aborted = play.die("c")[-1]
    assert isinstance(aborted, JobAborted)
    assert aborted.reason == "3 failures without a committed step in between"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_committed_step_in_between_begins_the_count_anew(restarted: bool) -> None:
    play = formed("a", "b", "c", "d", max_consecutive_failures=3)
    for step, name in enumerate("abc", 1):
        play.die(name)
        play.wait(0.1)
        play.agree(step)
        play.beat("d", step=step + 1)
        if restarted:
            play.restart()
            play.come_back(*play.cluster.members)
    assert (play.cluster.over, play.cluster.failure_budget.in_a_row) == (False, 0)


def test_steps_that_are_done_again_from_an_older_state_count_as_steps_in_between() -> None:
    """All died, and a worker came that holds the state of long ago."""
    play = formed("a", max_consecutive_failures=3)
    play.beat("a", step=1_000)
    play.die("a")
    play.wait(0.1)
    play.join("b")
    play.stop("b", stop=StopReport(500, holds_state=True))
    play.beat("b", step=501)
    assert (play.cluster.training.current_step, play.cluster.failure_budget.in_a_row) == (501, 0)


def test_a_restart_does_not_forget_failures() -> None:
    play = formed("a", "b", "c", "d", max_consecutive_failures=3)
    for name in "ab":
        play.die(name)
        play.wait(0.1)
        play.agree()
        play.restart()
        play.come_back(*play.cluster.members)
    assert kinds(play.die("c")) == ["WorkerFailed", "JobAborted"]


def test_an_aborted_job_keeps_its_state_and_its_world() -> None:
    play = formed("a", "b")
    play.beat("a", "b", step=7)
    play.cluster.abort(play.now, "enough")
    assert play.news() == [JobAborted("enough", 7)]
    play.restart()
    assert (play.world, play.cluster.phase, play.cluster.reason) == (["a", "b"], Phase.ABORTED, "enough")


def test_a_rescale_ends_with_the_job() -> None:
    play = formed("a", "b")
    play.cluster.rescale(play.now, "a test")
    play.news()
    play.cluster.abort(play.now, "enough")
    assert play.news() == [RescaleAborted(2, "enough"), JobAborted("enough", 0)]
    with pytest.raises(RequestRefused):
        play.stop("a", stop=StopReport(1, holds_state=True))


def test_nothing_is_decided_when_a_job_is_over() -> None:
    play = formed("a", "b")
    play.join("c")
    play.cluster.abort(play.now, "enough")
    play.news()
    assert kinds(play.die("a")) == ["WorkerFailed"]
    assert kinds(play.leave("c")) == ["WorkerLeft"]
    assert play.wait(1_000.0) == []
    play.cluster.abort(play.now, "again")
    assert play.news() == []
    for act in (play.cluster.pause, play.cluster.resume, play.cluster.rescale):
        with pytest.raises(RequestRefused) as error:
            act(play.now, "a test")
        assert refusal(error) == "job_over"


def test_who_goes_from_a_job_that_is_over_is_forgotten() -> None:
    play = formed("a", "b")
    play.cluster.abort(play.now, "enough")
    play.lose("a")
    assert list(play.cluster.members) == ["b"]
    play.restart()
    play.wait(20.0)
    assert (play.cluster.members, play.cluster.due_at()) == ({}, float("inf"))
    assert not [key for key in play.stored if "/member/" in key]


# Too few.


def test_below_min_workers_the_job_waits() -> None:
    play = formed("a", "b", min_workers=2)
    play.die("b")
    (waiting,) = play.wait(0.1)
    assert waiting == JobWaiting(1, 2)
    assert (play.cluster.phase, play.cluster.reason) == (Phase.WAITING, "1 worker left; min_workers is 2")
    assert play.wait(300.0) == []


def test_a_job_that_waits_goes_on_as_soon_as_there_are_enough() -> None:
    play = formed("a", "b", min_workers=2)
    play.die("b")
    play.wait(0.1)
    _, started = play.join("c")
    assert isinstance(started, RescaleStarted)
    assert started.reason == "b failed: its process has ended; c joined"
    play.agree(4)
    assert (play.world, play.cluster.phase) == (["a", "c"], Phase.RUNNING)


def test_a_job_that_has_waited_for_too_long_is_aborted() -> None:
    play = formed("a", "b", min_workers=2, min_workers_timeout_ms=60_000)
    play.die("b")
    assert kinds(play.wait(59.0)) == ["JobWaiting"]
    (aborted,) = play.wait(2.0)
    assert aborted == JobAborted("fewer than 2 workers for 60 s", 0)


def test_a_job_may_wait_for_ever() -> None:
    play = formed("a", "b", min_workers=2, min_workers_timeout_ms=None)
    play.die("b")
    play.wait(1.0)
    assert play.wait(10_000.0) == []


def test_all_may_be_gone_while_it_waits_and_the_time_runs() -> None:
    play = formed("a", min_workers_timeout_ms=60_000)
    play.leave("a")
    assert kinds(play.wait(0.1)) == ["JobWaiting"]
    assert kinds(play.wait(60.0)) == ["JobAborted"]


def test_it_begins_to_wait_anew_behind_each_world() -> None:
    play = formed("a", "b", min_workers=2, min_workers_timeout_ms=60_000, **PATIENT)
    play.die("b")
    play.wait(50.0)
    play.join("c")
    play.agree()
    play.wait(50.0)
    play.die("c")
    assert kinds(play.wait(50.0)) == ["JobWaiting"]


def test_a_restart_does_not_let_a_job_wait_for_ever() -> None:
    play = formed("a", "b", min_workers=2, min_workers_timeout_ms=60_000)
    play.die("b")
    play.wait(1.0)
    play.restart()
    play.come_back("a")
    play.news()
    assert kinds(play.wait(61.0)) == ["JobAborted"]


def test_a_job_that_never_had_enough_is_aborted_as_well() -> None:
    play = Play(min_workers=2, min_workers_timeout_ms=60_000)
    play.join("a")
    assert play.wait(59.0) == []
    assert kinds(play.wait(2.0)) == ["JobAborted"]


def test_a_job_without_a_worker_waits_for_its_first_one_as_long_as_that_takes() -> None:
    play = Play(min_workers=2, min_workers_timeout_ms=60_000)
    play.join("a")
    play.leave("a")
    assert play.cluster.due_at() == float("inf")
    play.time += 1_000
    assert kinds(play.join("b")) == ["WorkerJoined"]
    assert play.wait(59.0) == []


def test_enough_workers_that_wait_for_the_window_have_nothing_to_fear_from_a_shorter_timeout() -> None:
    play = Play(min_workers=2, min_workers_timeout_ms=5_000)
    play.join("a", "b")
    assert kinds(play.wait(WINDOW_S)) == ["RescaleStarted"]


def test_a_job_that_waits_goes_on_when_fewer_are_needed() -> None:
    play = formed("a", "b", min_workers=2)
    play.die("b")
    play.wait(1.0)
    play.cluster.configure({"min_workers": 1})
    assert kinds(play.wait(0.3)) == ["RescaleStarted"]
    assert play.agree().reason == "b failed: its process has ended"


# Leaving.


def test_who_leaves_in_good_order_is_no_failure() -> None:
    play = formed("a", "b", failure_tolerance_percentage=0, max_consecutive_failures=1)
    assert play.leave("b", reason="lunch") == [WorkerLeft("b", "lunch")]
    (started,) = play.wait(0.1)
    assert isinstance(started, RescaleStarted)
    assert started.reason == "b left: lunch"
    assert (play.cluster.failure_budget.in_world, play.cluster.failure_budget.in_a_row) == (0, 0)


def test_a_joiner_may_go_again() -> None:
    play = formed("a")
    play.join("b")
    assert play.leave("b") == [WorkerLeft("b", "its own request")]
    assert play.wait(100.0) == []


def test_the_first_that_is_done_completes_the_job() -> None:
    play = formed("a", "b")
    assert play.leave("b", done=True, step=100) == [WorkerLeft("b", "training completed"), JobCompleted(100)]
    assert play.cluster.phase is Phase.COMPLETED
    assert play.leave("a", done=True, step=100) == [WorkerLeft("a", "training completed")]


def test_who_is_not_in_the_world_cannot_complete_the_job() -> None:
    play = formed("a")
    play.join("b")
    assert play.leave("b", done=True, step=10**9) == [WorkerLeft("b", "training completed")]
    assert (play.cluster.phase, play.cluster.training.current_step) == (Phase.RUNNING, 0)


def test_evictions_are_no_failures_that_abort_a_job() -> None:
    play = formed("a", "b", "c", "d", max_consecutive_failures=1, failure_tolerance_percentage=0)
    for name in "bcd":
        play.cluster.evict(name, play.now, "its host is needed")
    assert "JobAborted" not in kinds(play.wait(1.0))
    assert (play.cluster.failure_budget.in_world, play.cluster.failure_budget.in_a_row) == (0, 0)
    play.agree()
    assert play.world == ["a"]
    assert "JobAborted" in kinds(play.die("a")), "a death counts as before"


def test_who_was_told_to_go_and_does_not_answer_fails_and_counts_towards_no_limit() -> None:
    play = Play(rescale_timeout_ms=5_000)
    play.form("a", "b", "c")
    play.cluster.drain("b", play.now, "the night")
    play.die("c")
    play.wait(0.2)
    play.stop("a", stop=StopReport(5, True))
    play.wait(8.0)
    assert [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)] == ["c", "b"]
    assert play.cluster.phase is Phase.RESCALING
    assert play.agree(5).removed == ["b", "c"]


def test_an_evicted_worker_has_failed() -> None:
    play = formed("a", "b")
    play.cluster.evict("b", play.now, "it smells")
    assert play.news() == [WorkerFailed("b", 1, "evicted: it smells")]
    assert kinds(play.wait(0.1)) == ["RescaleStarted"]


# Operators.


def test_training_rests_and_goes_on_again() -> None:
    play = formed("a")
    play.cluster.pause(play.now, "lunch")
    play.cluster.pause(play.now, "more lunch")
    assert play.news() == [JobPaused("lunch")]
    play.restart()
    assert play.cluster.paused
    play.cluster.resume(play.now, "coffee")
    play.cluster.resume(play.now, "more coffee")
    assert play.news() == [JobResumed("coffee")]
    assert not play.cluster.paused


def test_an_operator_may_have_a_rescale_at_once() -> None:
    play = formed("a")
    play.join("b")
    play.cluster.rescale(play.now, "now please")
    started = play.news()[-1]
    assert started == RescaleStarted(2, RescaleType.SCALE_UP, 2, ["b"], [], "now please; b joined")


def test_a_rescale_that_is_wanted_twice_begins_anew() -> None:
    play = formed("a")
    play.cluster.rescale(play.now, "once")
    play.news()
    play.cluster.rescale(play.now, "twice")
    assert kinds(play.news()) == ["RescaleAborted", "RescaleStarted"]


def test_a_rescale_of_nobody_is_refused() -> None:
    with pytest.raises(RequestRefused) as error:
        Play().cluster.rescale(Moment(WALL_S, BEGINNING_S), "a test")
    assert refusal(error) == "workers_none"


def test_a_completed_job_cannot_be_aborted() -> None:
    play = formed("a")
    play.leave("a", done=True)
    with pytest.raises(RequestRefused) as error:
        play.cluster.abort(play.now, "a test")
    assert refusal(error) == "job_over"
    assert error.value.message == "job run is completed: training completed"
    assert play.news() == []


@pytest.mark.parametrize("act", ["drain", "evict", "pause", "abort", "rescale"])
@pytest.mark.parametrize("reason", ["", " \n", "x" * 100_000])
def test_every_decision_has_a_reason_in_words_that_can_be_kept(act: str, reason: str) -> None:
    play = formed("a", "b")
    arguments = ("b", play.now, reason) if act in {"drain", "evict"} else (play.now, reason)
    getattr(play.cluster, act)(*arguments)
    for fact in play.news():
        said = getattr(fact, "reason", "nothing to say")
        assert 0 < len(said.strip()) <= REASON_CHARS_MAX + 50
    assert play.cluster.reason or act in {"drain", "evict"}


def test_of_many_reasons_the_first_ones_are_told() -> None:
    names = [f"w{number:03}" for number in range(300)]
    play = formed(*names, **PATIENT)
    play.die(*names[:200])
    (started,) = play.wait(0.1)
    assert isinstance(started, RescaleStarted)
    assert started.reason.count("failed") == REASONS_MAX
    play.join(*[f"n{number}" for number in range(100)])
    play.cluster.rescale(play.now, "more")
    assert play.last(RescaleStarted).reason.endswith("n7 and 92 more joined")


# Trouble.


def test_trouble_leads_to_another_world_of_the_same_workers() -> None:
    play = formed("a", "b")
    play.complain("a", "b", why="it closed the connection")
    (started,) = play.wait(1.1)
    assert isinstance(started, RescaleStarted)
    assert (started.type, started.reason) == (RescaleType.REPLACE, "a cannot continue: it closed the connection")
    play.agree(3)
    assert (play.world, play.cluster.generation) == (["a", "b"], 2)


def test_trouble_in_an_older_world_or_from_outside_is_none() -> None:
    play = formed("a", "b")
    play.join("c")
    assert play.complain("a", "b", back=1) + play.complain("c", "a") == []
    assert play.wait(1.0) == []


def test_trouble_that_was_acknowledged_outlives_the_daemon() -> None:
    play = formed("a", "b")
    play.complain("a", "b")
    play.restart()
    play.come_back("a", "b")
    started = play.wait(0.3)[-1]
    assert isinstance(started, RescaleStarted)
    assert started.reason == "a cannot continue: it got no answer"


def test_what_a_failure_explains_is_not_told_beside_it() -> None:
    play = formed("a", "b", "c", **PATIENT)
    play.complain("a", "c", why="it closed the connection")
    play.die("c")
    play.complain("b", "c", why="it closed the connection")
    play.wait(1.0)
    assert play.last(RescaleStarted).reason == "c failed: its process has ended"


def test_a_complaint_waits_a_moment_for_what_bears_it_out() -> None:
    """A host that is gone is known to be when the daemon's own connection breaks, too."""
    play = formed("a", "b", "c", **PATIENT)
    play.complain("a", "c")
    assert play.wait(0.9) == []
    play.lose("c")
    play.wait(CONFIRM_S + 0.1)
    assert play.last(WorkerFailed) == WorkerFailed("c", 2, "unreachable from the daemon and from a")
    assert play.last(RescaleStarted).removed == ["c"]


def test_quarrels_with_steps_in_between_part_nobody() -> None:
    """That there were steps is often known only when all say where they have stopped."""
    play = formed("a", "b", **PATIENT)
    for step in range(1, 6):
        play.complain("a", "b")
        play.wait(1.1)
        play.stop("a", "b", stop=StopReport(step, holds_state=True))
        assert play.world == ["a", "b"]
    assert play.cluster.generation == 6


def test_where_nobody_is_left_of_a_world_the_reason_says_so() -> None:
    play = formed("a", "b", **PATIENT)
    play.join("c")
    play.die("a", "b")
    play.wait(WINDOW_S)
    reason = play.last(RescaleStarted).reason
    assert "no worker of world 1 remains" in reason
    assert reason.endswith("c joined")


def test_deaths_that_are_noticed_by_others_first_make_no_quarrel() -> None:
    """Without a stop it may not be known that there were steps in between."""
    play = formed("a", "b", "c", "d", "e", use_synchronous_rescaling=False, **PATIENT)
    for victim in "abc":
        play.complain("d", victim)
        play.die(victim)
        play.wait(1.0, still=True)
    assert play.world == ["d", "e"]
    assert [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)] == ["a", "b", "c"]


def test_workers_that_reach_each_other_in_no_world_are_parted() -> None:
    play = formed("a", "b", "c", **PATIENT)
    for _ in range(2):
        play.complain("b", "c")
        play.complain("c", "b")
        play.wait(1.1)
        play.agree()
    assert play.complain("b", "c") == [WorkerFailed("c", 2, "most peer reports in 3 consecutive worlds")]
    play.wait(1.1)
    play.agree()
    assert play.world == ["a", "b"]


def test_a_hub_that_nobody_reaches_is_the_one_to_go() -> None:
    play = formed("a", "b", "c", **PATIENT)
    for _ in range(2):
        play.complain("b", "a")
        play.complain("c", "a")
        play.wait(1.1)
        play.agree()
    (failed,) = play.complain("c", "a")
    assert isinstance(failed, WorkerFailed)
    assert failed.worker_id == "a"


def test_a_step_in_between_is_proof_that_they_do_reach_each_other() -> None:
    play = formed("a", "b", **PATIENT)
    for step in range(10):
        play.complain("a", "b")
        play.wait(1.1)
        play.agree(step)
        play.beat("a", "b", step=step + 1)
    assert "WorkerFailed" not in kinds(play.facts)


# Learning rate and batch.


def test_with_a_fixed_batch_the_rate_stays() -> None:
    play = Play()
    play.form("a", "b", learning_rate=0.1, global_batch_size=64)
    play.join("c", "d")
    play.wait(WINDOW_S)
    completed = play.agree(learning_rate=0.1, global_batch_size=64)
    assert (completed.learning_rate, completed.global_batch_size) == (0.1, 64)


def test_a_schedule_of_the_script_is_kept_with_a_fixed_batch() -> None:
    play = Play()
    play.form("a", "b", learning_rate=0.1, global_batch_size=64)
    play.die("b")
    play.wait(0.1)
    assert play.agree(9, learning_rate=0.01, global_batch_size=64).learning_rate == 0.01


def test_the_settings_stand_in_for_a_worker_that_says_nothing() -> None:
    play = Play(base_learning_rate=0.3, global_batch_size=128)
    completed = play.form("a")
    assert (completed.learning_rate, completed.global_batch_size) == (0.3, 128)


@pytest.mark.parametrize(("strategy", "rate"), [("linear", 0.2), ("square_root", 0.1 * 2**0.5), ("none", 0.1)])
def test_with_a_batch_that_grows_the_rate_follows_from_the_base(strategy: str, rate: float) -> None:
    play = Play(scale_batch_with_world=True, lr_adaptation_strategy=strategy)
    play.form("a", "b", learning_rate=0.1, global_batch_size=64)
    play.join("c", "d")
    play.wait(WINDOW_S)
    completed = play.agree(learning_rate=0.1, global_batch_size=64)
    assert completed.learning_rate == pytest.approx(rate)
    assert completed.global_batch_size == 128


def test_a_hundred_rescales_do_not_drift() -> None:
    play = Play(scale_batch_with_world=True, lr_adaptation_strategy="square_root", stability_window_ms=500, **PATIENT)
    play.form("a", "b", "c", learning_rate=0.1, global_batch_size=100)
    for number in range(100):
        play.join(f"n{number}")
        play.wait(0.5)
        play.agree(number)
        play.leave(f"n{number}")
        play.wait(0.1)
        play.agree(number)
    assert play.last(RescaleCompleted).delta.epoch == 201
    assert (play.cluster.training.learning_rate, play.cluster.training.global_batch_size) == (0.1, 100)


def test_a_base_in_the_settings_goes_before_that_of_the_first_world() -> None:
    play = Play(scale_batch_with_world=True, base_world_size=4, base_learning_rate=0.4, global_batch_size=400)
    completed = play.form("a", "b", learning_rate=9.0, global_batch_size=9)
    assert (completed.learning_rate, completed.global_batch_size) == (0.2, 200)


def test_the_base_outlives_the_daemon() -> None:
    play = Play(scale_batch_with_world=True)
    play.form("a", "b", learning_rate=0.1, global_batch_size=64)
    play.restart()
    play.come_back("a", "b")
    play.join("c")
    play.wait(WINDOW_S)
    assert play.agree(learning_rate=7.0).learning_rate == pytest.approx(0.15)


# Settings.


def test_settings_that_nobody_can_train_with_change_nothing() -> None:
    play = formed("a")
    with pytest.raises(ConfigError):
        play.cluster.configure({"min_workers": 0})
    assert play.cluster.config.min_workers == 1


def test_a_spare_is_taken_in_when_there_may_be_more() -> None:
    play = Play(max_workers=1)
    play.join("a", "b")
    play.agree()
    play.wait(100.0)
    play.cluster.configure({"max_workers": 2})
    assert kinds(play.wait(0.3)) == ["RescaleStarted"]


# A daemon that dies, in each stage.


def test_workers_come_back_to_a_new_daemon_with_the_same_ranks_and_without_a_rescale() -> None:
    play = formed("a", "b", "c")
    play.restart()
    assert play.wait(5.0) == []
    assert play.come_back("c", "a", "b") == []
    assert play.wait(100.0) == []
    assert (play.world, play.cluster.generation) == (["a", "b", "c"], 1)


def test_who_does_not_come_back_to_a_new_daemon_within_the_grace_has_failed() -> None:
    play = formed("a", "b", "c")
    play.restart()
    play.come_back("a", "c")
    assert play.wait(14.0) == [], "silence alone is to be expected"
    failed, started = play.wait(2.0)
    assert isinstance(failed, WorkerFailed)
    assert failed.worker_id == "b"
    assert isinstance(started, RescaleStarted)


def test_a_daemon_that_dies_over_the_first_workers_lets_them_wait_again_in_their_order() -> None:
    play = Play()
    play.join("z")
    play.wait(1.0)
    play.join("a")
    play.restart()
    play.come_back("a", "z")
    play.wait(WINDOW_S)
    assert play.agree().added == ["z", "a"]


@pytest.mark.parametrize("stage", Stage)
def test_a_daemon_that_dies_over_a_rescale_begins_it_again_when_all_are_back(stage: Stage) -> None:
    play = formed("a", "b")
    play.join("c")
    play.wait(WINDOW_S)
    if stage is Stage.SYNCHRONISING:
        play.stop("a", "b", stop=StopReport(3, holds_state=True))
        play.stop("c", stop=StopReport(0, holds_state=False))
    play.restart()
    play.come_back("a", "b")
    assert play.cluster.attempt is None
    with pytest.raises(RequestRefused):
        play.stop("a", stop=StopReport(3, holds_state=True), number=2)
    play.wait(1.0)
    assert play.cluster.attempt is None
    play.news()
    (started,) = play.come_back("c")
    assert isinstance(started, RescaleStarted)
    assert (started.attempt, started.added, started.reason) == (3, ["c"], "c joined")
    assert (play.agree(3).step, play.cluster.generation) == (3, 2)


def test_who_does_not_come_back_to_a_rescale_is_left_out_of_it() -> None:
    play = formed("a", "b")
    play.join("c")
    play.wait(WINDOW_S)
    play.restart()
    play.come_back("a", "c")
    started = play.wait(16.0)[-1]
    assert isinstance(started, RescaleStarted)
    assert (started.added, started.removed) == (["c"], ["b"])


def test_a_daemon_that_dies_between_a_failure_and_its_rescale_goes_on_with_it() -> None:
    play = formed("a", "b", "c")
    play.die("b")
    play.restart()
    play.come_back("a", "c")
    started = play.wait(0.3)[-1]
    assert isinstance(started, RescaleStarted)
    assert (started.removed, started.reason) == (["b"], "b failed: its process has ended")


def test_a_member_whose_record_is_gone_is_missed_although_nothing_says_why() -> None:
    play = formed("a", "b")
    play.settle()
    del play.stored["elastic/run/member/b"]
    play.restart()
    play.come_back("a")
    started = play.wait(0.3)[-1]
    assert isinstance(started, RescaleStarted)
    assert (started.removed, started.reason) == (["b"], "b is missing")


def test_all_may_die_while_the_daemon_is_down() -> None:
    play = formed("a", "b", **PATIENT)
    play.restart()
    assert kinds(play.wait(16.0)) == ["WorkerFailed", "WorkerFailed", "JobWaiting"]
    play.join("c")
    play.agree()
    assert play.world == ["c"]


def test_generations_and_attempts_go_on_where_they_were() -> None:
    play = formed("a")
    for number in range(2, 6):
        play.restart()
        play.come_back("a")
        play.cluster.rescale(play.now, "a test")
        completed = play.agree()
        assert (completed.attempt, completed.delta.base_epoch, completed.delta.epoch) == (number, number - 1, number)


# Newcomers that die of being taken in.


def _crash_in_turn(play: Play, for_s: float) -> float:
    """Two newcomers die in every attempt, one after the other, and come back; for how long the others stood still."""
    lives, asked, stood_s = {"x": 1, "y": 1}, {"x": 0, "y": 0}, 0.0
    dies_at, back_at = dict.fromkeys("xy", NEVER), dict.fromkeys("xy", NEVER)
    play.join("x", "y")
    end = play.time + for_s
    while play.time < end:
        play.wait(0.1)
        attempt = play.cluster.attempt
        stood_s += 0.1 if attempt else 0.0
        if attempt is not None and attempt.stage is Stage.STOPPING:
            play.stop(*(name for name in "abc" if name not in attempt.stops), stop=StopReport(1, holds_state=True))
        attempt = play.cluster.attempt
        for name in lives:
            if attempt is not None and name in attempt and asked[name] != attempt.number:
                asked[name], dies_at[name] = attempt.number, play.time + (3.0 if name == "x" else 5.0)
            if play.time >= dies_at[name]:
                dies_at[name], back_at[name] = NEVER, play.time + 1.0
                play.die(name, life=lives[name])
            if play.time >= back_at[name]:
                back_at[name], lives[name] = NEVER, lives[name] + 1
                play.join(name, life=lives[name])
    return stood_s


@pytest.mark.parametrize("window_ms", [0, 1_000, 30_000])
def test_newcomers_that_die_in_turn_while_they_are_taken_in_do_not_keep_the_others_from_training(
    window_ms: int,
) -> None:
    play = formed("a", "b", "c", stability_window_ms=window_ms)
    assert _crash_in_turn(play, 1_200.0) < 240.0
    assert play.cluster.phase is not Phase.ABORTED


def test_where_a_newcomer_dies_in_an_attempt_the_others_in_it_come_in_and_who_came_later_waits() -> None:
    play = formed("a")
    play.join("b", "x")
    play.wait(31.0)
    play.join("y")
    play.die("x")
    play.wait(0.1)
    assert play.last(RescaleStarted).added == ["b"]
    play.agree(3)
    assert play.world == ["a", "b"]
    play.wait(31.0, still=True)
    play.agree(4)
    assert play.world == ["a", "b", "y"]


def test_where_a_member_dies_too_whoever_waits_takes_its_place() -> None:
    play = formed("a", "b")
    play.join("x")
    play.wait(31.0)
    play.join("y")
    play.die("x", "b")
    play.wait(0.1)
    assert play.last(RescaleStarted).added == ["y"]


# Worlds that come to nothing.


def test_of_worlds_that_come_to_nothing_and_nobody_says_over_whom_who_says_so_goes() -> None:
    play = formed("a", "b", "c")
    for _ in range(REPORTED_WORLDS_MAX):
        assert "b" in play.world
        play.complain("b", why="it has no memory for it")
        play.wait(0.1)
        play.agree(0)
    assert play.world == ["a", "c"]
    assert play.last(WorkerFailed).reason == "most peer reports in 3 consecutive worlds"


def test_who_cannot_go_on_because_others_went_is_not_put_out_for_that() -> None:
    play = formed("a", "b", "c", "d", "e", failure_tolerance_percentage=100, max_consecutive_failures=100)
    for name in "bcd":
        play.complain("a", why=f"{name} left the world in good order")
        play.leave(name)
        play.wait(0.1)
        play.agree(0)
    assert play.world == ["a", "e"]


def test_what_was_said_of_who_is_in_no_world_any_more_counts_no_more() -> None:
    play = formed("a", "b", "x", failure_tolerance_percentage=100)
    for _ in range(2):
        play.complain("a", "x")
        play.wait(1.2)
        play.agree(0)
    play.cluster.drain("x", play.now, "the night")
    play.wait(0.1)
    play.agree(0)
    assert (play.world, "x" in play.cluster.members) == (["a", "b"], True)
    play.complain("a", "b")
    play.wait(1.2)
    assert play.cluster.phase is Phase.RESCALING


# Time in which nobody listened, or nobody was to train.


def test_a_job_that_waits_is_not_given_up_for_the_time_in_which_the_daemon_did_not_get_its_turn() -> None:
    play = formed("a", "b", min_workers=2)
    play.die("b")
    play.wait(1.0)
    play.sleep(3_000.0)
    assert not play.cluster.over
    play.wait(700.0)
    assert play.cluster.over


def test_a_job_that_was_laid_to_rest_is_not_given_up_for_too_few_workers() -> None:
    play = formed("a", "b", min_workers=2)
    play.cluster.pause(play.now, "maintenance")
    play.die("b")
    play.wait(3_000.0)
    play.cluster.resume(play.now, "")
    play.wait(590.0)
    assert not play.cluster.over
    play.wait(11.0)
    assert play.cluster.over


def test_who_is_stalled_already_goes_when_the_policy_becomes_so() -> None:
    play = formed("a", "b", stall_timeout_ms=5_000)
    first = play.cluster.generation * COLLECTIVES_PER_WORLD
    for second in range(1, 10):
        play.beat("a", collective_seq=first + second)
        play.beat("b", collective_seq=first + 1)
        play.wait(1.0, still=True)
    assert "WorkerStalled" in kinds(play.facts)
    play.cluster.configure({**play.cluster.settings, "evict_stalled": True})
    play.wait(1.0, still=True)
    assert play.last(WorkerFailed).worker_id == "b"


# What happened while there was no daemon.


@pytest.mark.parametrize("how", ["refused", "out of its grace"])
def test_who_went_while_there_was_no_daemon_may_have_left_in_good_order_and_does_not_count(how: str) -> None:
    play = formed("a", "b", "c", "d", failure_tolerance_percentage=0)
    play.restart()
    play.come_back("a", "d")
    if how == "refused":
        play.wait(2.5, silent="bc")
        play.refuse("b")
        play.refuse("c")
    play.wait(16.0, silent="bc")
    failed = [fact for fact in play.facts if isinstance(fact, WorkerFailed)]
    assert [fact.worker_id for fact in failed] == ["b", "c"]
    assert all("; not counted as a failure: it disappeared while the daemon was down" in fact.reason for fact in failed)
    play.agree(7)
    assert play.world == ["d", "a"] or play.world == ["a", "d"]


def test_whose_death_is_told_though_there_was_no_daemon_then_counts() -> None:
    play = formed("a", "b", "c", "d")
    play.restart()
    play.come_back("a", "d")
    play.die("b", "c")
    assert play.cluster.phase is Phase.ABORTED


def test_who_was_back_and_is_lost_again_counts() -> None:
    play = formed("a", "b", "c", "d")
    play.restart()
    play.come_back("a", "b", "c", "d")
    play.lose("b", "c")
    play.refuse("b")
    play.refuse("c")
    assert play.cluster.phase is Phase.ABORTED


def test_an_attempt_over_which_a_daemon_died_is_told_to_be_over_once() -> None:
    play = formed("a", "b")
    play.cluster.rescale(play.now, "a test")
    play.settle()
    for _ in range(2):
        play.restart()
        play.settle()
    play.come_back("a", "b")
    play.wait(0.1)
    aborted = [fact for fact in play.facts if isinstance(fact, RescaleAborted)]
    assert aborted == [RescaleAborted(2, "the daemon restarted")]
    assert play.last(RescaleStarted).attempt == 3


# Steps that go with those who know of them.


@pytest.mark.parametrize("said", ["in its stop", "in its goodbye"])
def test_steps_are_told_to_be_lost_with_the_last_who_said_in_an_attempt_that_they_are_committed(said: str) -> None:
    play = formed("a", "b", **PATIENT)
    play.join("c")
    play.wait(31.0)
    play.stop("b", stop=StopReport(9, holds_state=True))
    if said == "in its stop":
        play.stop("a", stop=StopReport(9, holds_state=True))
        play.die("a", "b")
    else:
        play.die("b")
        play.leave("a", step=9)
    play.wait(WINDOW_S)
    play.agree(0)
    assert play.last(ProgressLost) == ProgressLost(9, 0, "no remaining worker holds them")


def test_a_job_is_given_up_behind_the_step_that_was_told_last() -> None:
    play = formed("a", "b", min_workers=2)
    play.cluster.rescale(play.now, "a test")
    play.stop("a", "b", stop=StopReport(9, holds_state=True, finished=True))
    play.cluster.rescale(play.now, "once more")
    play.stop("a", stop=StopReport(12, holds_state=True))
    play.cluster.abort(play.now, "")
    play.settle()
    assert play.last(JobAborted).step == 12


@pytest.mark.parametrize("heard", ["its library", "its pulse"])
def test_who_was_heard_by_this_daemon_did_not_go_before_it(heard: str) -> None:
    play = formed("a", "b", "c", "d")
    play.restart()
    play.come_back("a", "d")
    play.beat("b", "c") if heard == "its library" else play.pulse("b", "c")
    play.wait(20.0, silent="bc")
    assert play.cluster.phase is Phase.ABORTED


def test_however_many_newcomers_have_died_the_next_one_is_taken_in_within_a_minute_or_so() -> None:
    play = formed("a")
    play.cluster.failed_join_attempts = 100_000
    play.join("b")
    play.wait(30.0 + 2.0**FAILED_JOINS_DOUBLED_MAX + 1.0, still=True)
    assert play.last(RescaleStarted).added == ["b"]


def test_an_attempt_that_its_own_world_breaks_keeps_no_newcomer_out() -> None:
    play = formed("a", "b", use_synchronous_rescaling=False, max_workers=4)
    for member in play.cluster.members.values():
        member.with_data = True
    play.join("x")
    play.wait(31.0)
    assert play.last(RescaleStarted).in_background
    play.join("y")
    play.complain("a", why="it is a bad day")
    play.wait(0.1)
    assert play.last(RescaleStarted).added == ["x", "y"]
