"""Playbooks: what comes in, and which facts come out. Each sentence that is promised of the coordinator is one test."""

from __future__ import annotations

import re
from typing import Any

import pytest

from forged.elastic.config import PULSE_INTERVAL_S
from forged.elastic.coordinator.rescale_schedule import FAILED_JOINS_DOUBLED_MAX
from forged.elastic.failure_detector.detector import CONFIRM_S, NEVER
from forged.elastic.failure_detector.suspicion import REPORTED_WORLDS_MAX
from forged.elastic.membership.member import COLLECTIVES_PER_WORLD
from forged.elastic.messages import (
    Heartbeat,
    JobAborted,
    JobCompleted,
    JobPaused,
    JobReopened,
    JobResumed,
    JobWaiting,
    ProgressLost,
    Pulse,
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
    WorkerStoodStill,
)
from forged.elastic.model import RescaleType, WorkerId
from forged.elastic.outbox import Moment
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import RECEIVED_BYTES_MIN, Stage, StopReport
from forged.errors import ConfigError, RequestRefused, Unavailable
from forged.phrases import REASON_CHARS_MAX, REASONS_MAX
from tests.elastic.coordinator_playbook import (
    JOB,
    START_S,
    WALL_S,
    WINDOW_S,
    Playbook,
    formed,
    incarnation,
    kinds,
    newcomer,
    worker_of,
)

PATIENT = {"failure_tolerance_percentage": 100, "max_consecutive_failures": 1_000}
"""Settings of a job that failures alone do not end."""


def refusal(error: pytest.ExceptionInfo[RequestRefused] | pytest.ExceptionInfo[Unavailable]) -> str:
    return error.value.code


# Windows.


def test_a_worker_that_registers_has_joined_and_waits_for_its_rank() -> None:
    book = Playbook()
    assert book.join("a") == [WorkerJoined(worker_of("a"))]
    assert (book.coordinator.phase, book.world, book.coordinator.generation) == (Phase.FORMING, [], 0)


def test_joiners_wait_for_the_stability_window() -> None:
    book = Playbook()
    book.join("a", "b")
    assert book.wait(WINDOW_S - 0.5) == []
    (started,) = book.wait(1.0)
    assert started == RescaleStarted(1, RescaleType.SCALE_UP, 2, ["a", "b"], [], "a, b joined")
    assert book.coordinator.phase is Phase.RESCALING


def test_the_window_begins_again_with_each_joiner() -> None:
    book = Playbook()
    book.join("a")
    book.wait(WINDOW_S - 1)
    book.join("b")
    assert book.wait(WINDOW_S - 1) == []
    assert kinds(book.wait(2.0)) == ["RescaleStarted"]


def test_the_window_does_not_begin_again_with_worker_that_only_comes_back() -> None:
    book = Playbook()
    book.join("a")
    book.wait(WINDOW_S - 1)
    assert book.join("a") == []
    book.lose("a")
    book.reconnect("a")
    assert kinds(book.wait(2.0)) == ["RescaleStarted"]


def test_the_window_is_cut_short_when_as_many_as_there_may_be_are_there() -> None:
    book = Playbook(max_workers=2)
    assert kinds(book.join("a")) == ["WorkerJoined"]
    assert kinds(book.join("b")) == ["WorkerJoined", "RescaleStarted"]


def test_one_too_many_is_a_spare_and_keeps_no_worker_busy() -> None:
    book = Playbook(max_workers=2)
    book.join("a", "b", "c")
    assert book.complete_attempt().added == ["a", "b"]
    assert book.wait(200.0) == []


def test_with_fewer_than_there_have_to_be_no_worker_trains() -> None:
    book = Playbook(min_workers=2)
    book.join("a")
    assert book.wait(WINDOW_S * 3) == []
    book.join("b")
    assert kinds(book.wait(WINDOW_S)) == ["RescaleStarted"]


def test_a_failure_is_acted_on_after_its_window_so_that_several_make_one_rescale() -> None:
    book = formed("a", "b", "c", "d", **PATIENT)
    assert kinds(book.die("b")) == ["WorkerFailed"]
    book.time += 0.04
    book.tick()
    assert kinds(book.die("c")) == ["WorkerFailed"]
    (started,) = book.wait(0.02)
    assert isinstance(started, RescaleStarted)
    assert (started.type, started.removed, started.world_size) == (RescaleType.SCALE_DOWN, ["b", "c"], 2)
    assert started.reason == "b failed: its process has ended; c failed: its process has ended"


def test_a_window_of_nothing_is_over_at_once() -> None:
    book = formed("a", "b", failure_window_ms=0)
    assert kinds(book.die("b")) == ["WorkerFailed", "RescaleStarted"]


def test_a_job_begins_after_its_window_however_it_ticks() -> None:
    """The service sleeps until `due_at`, which therefore must name the moment itself."""
    book = Playbook(stability_window_ms=10_000)
    book.join("a")
    book.tick()
    assert book.coordinator.due_at() <= START_S + 10.0


# Replacing.


def test_a_waiting_joiner_takes_the_rank_of_a_failed_worker_in_one_rescale() -> None:
    book = formed("a", "b", "c")
    book.join("d")
    book.die("b")
    started = book.wait(0.1)[-1]
    assert started == RescaleStarted(
        2, RescaleType.REPLACE, 3, ["d"], ["b"], "b failed: its process has ended; d joined"
    )
    completed = book.complete_attempt()
    assert (completed.type, book.world) == (RescaleType.REPLACE, ["a", "d", "c"])


def test_a_spare_takes_the_place_of_worker_that_failed() -> None:
    book = Playbook(max_workers=2)
    book.join("a", "b", "c")
    book.complete_attempt()
    book.die("a")
    book.wait(0.1)
    assert book.complete_attempt().added == ["c"]
    assert book.world == ["c", "b"]


def test_a_process_that_comes_back_under_the_id_of_one_that_died_is_another_worker() -> None:
    book = formed("a", "b")
    book.die("b")
    book.join("b", life=2)
    book.wait(0.1)
    completed = book.complete_attempt()
    assert (completed.added, completed.removed, completed.type) == (["b"], ["b"], RescaleType.REPLACE)
    assert (book.world, book.coordinator.generation) == (["a", "b"], 2)


def test_rank_0_survives_if_its_worker_does() -> None:
    book = formed("a", "b", "c")
    book.join("d", "e")
    book.die("c")
    book.wait(0.1)
    book.complete_attempt()
    assert book.world == ["a", "b", "d", "e"]


# Registration.


def test_the_id_of_a_worker_that_is_alive_is_refused() -> None:
    book = formed("a", "b")
    with pytest.raises(RequestRefused) as error:
        book.join("b", life=2)
    assert refusal(error) == "worker_exists"
    assert (book.new_facts(), book.world) == ([], ["a", "b"])


def test_the_id_of_one_that_may_be_dead_has_to_wait_and_lets_its_address_be_probed() -> None:
    book = formed("a", "b")
    book.pulse("b")
    book.lose("b")
    assert book.probes == [], "the pulse would tell"
    book.time += 10 * PULSE_INTERVAL_S
    with pytest.raises(Unavailable) as error:
        book.join("b", life=2)
    assert refusal(error) == "worker_undecided"
    book.settle()
    assert [probe.worker.id for probe in book.probes] == ["b"]
    book.refuse_probe("b")
    assert kinds(book.join("b", life=2)) == ["WorkerJoined"]


def test_an_id_that_returns_on_another_host_is_at_its_new_address() -> None:
    book = formed("a", "b")
    book.die("b")
    there = newcomer("b", 2)
    there.worker = WorkerId("b", "elsewhere", 9999)
    book.coordinator.join(there, book.now)
    book.wait(0.1)
    book.complete_attempt()
    assert str(book.coordinator.membership.topology.workers[1]) == "b@elsewhere:9999"


def test_the_same_process_may_register_again() -> None:
    book = formed("a", "b")
    assert book.join("a", "b") == []
    assert book.wait(100.0) == []


def test_worker_that_registers_again_is_reached_through_its_new_client() -> None:
    book = formed("a")
    again = newcomer("a")
    again.client = b"another"
    book.coordinator.join(again, book.now)
    book.restart()
    assert book.coordinator.members["a"].client == b"another"


def test_a_job_that_is_over_takes_no_worker() -> None:
    book = formed("a")
    book.coordinator.abort(book.now, "a test")
    with pytest.raises(RequestRefused) as error:
        book.join("b")
    assert refusal(error) == "job_over"
    assert "a test" in str(error.value)


def test_no_more_join_than_a_commit_can_name() -> None:
    book = Playbook()
    members = [newcomer(f"{number:0128d}") for number in range(5_000)]
    for member in members:
        member.worker = WorkerId(member.id, "h" * 253, 1)

    def join_all() -> None:
        for member in members:
            book.coordinator.join(member, book.now)

    with pytest.raises(RequestRefused) as error:
        join_all()
    assert refusal(error) == "workers_full"
    assert 1_000 < len(book.coordinator.members) < 5_000
    book.wait(WINDOW_S + 1)
    book.complete_attempt()
    assert max(map(len, book.stored.values())) < 1 << 20


# Unknown workers.


def test_inputs_about_unknown_workers_are_ignored() -> None:
    book = formed("a")
    assert book.leave("x") + book.leave("a", life=2, done=True) == []
    assert book.die("x") + book.die("a", life=2) == []
    assert book.lose("x") + book.reconnect("x") == []
    assert book.refuse_probe("x") + book.refuse_probe("a", life=2) == []
    book.coordinator.heartbeat(Heartbeat(JOB, "x", b"", 5, 5), book.now)
    book.coordinator.heartbeat(Heartbeat(JOB, "a", incarnation("a", 2), 5, 5), book.now)
    book.coordinator.pulse(Pulse(JOB, "x", b"", 1.0, 5, 5), book.now)
    book.coordinator.peer_report("x", b"", 1, book.now, peer="a", reason="")
    assert book.new_facts() == []
    assert (book.coordinator.training.current_step, book.coordinator.members["a"].step) == (0, 0)


@pytest.mark.parametrize("act", ["drain", "evict"])
def test_operation_on_an_unknown_worker_is_refused(act: str) -> None:
    book = formed("a")
    with pytest.raises(RequestRefused) as error:
        getattr(book.coordinator, act)("x", book.now, "a test")
    assert refusal(error) == "worker_unknown"


# Evidence.


def test_the_end_of_its_process_fails_a_worker_at_once() -> None:
    book = formed("a", "b")
    assert book.die("b") == [WorkerFailed("b", 1, "its process has ended")]


def test_silence_of_library_and_pulse_fails_a_worker_after_the_timeout() -> None:
    book = formed("a", "b")
    assert book.wait(9.5, silent={"b"}) == []
    failed = book.wait(1.0, silent={"b"})[0]
    assert isinstance(failed, WorkerFailed)
    assert failed.reason.startswith("no heartbeat and no pulse for 10.")


def test_a_pulse_alone_keeps_a_worker_alive() -> None:
    book = formed("a", "b")
    for _ in range(40):
        assert book.wait(1.0, silent={"b"}) == []
        book.pulse("b")


def test_lost_connection_is_reported_with_its_grace_and_fails_no_worker() -> None:
    book = formed("a", "b")
    book.lose("b")
    (lost,) = book.wait(0.5)
    assert isinstance(lost, WorkerLost)
    assert lost.grace_s is not None
    assert 14.0 < lost.grace_s <= 15.0
    (returned,) = book.reconnect("b")
    assert isinstance(returned, WorkerReturned)
    assert returned.after_s == pytest.approx(0.5)
    assert book.wait(60.0) == []
    assert book.coordinator.generation == 1


def test_reconnect_before_the_scan_reports_nothing() -> None:
    book = formed("a", "b")
    book.tick()
    assert book.lose("b") + book.reconnect("b") == []


def test_worker_that_does_not_come_back_within_the_grace_has_failed() -> None:
    book = formed("a", "b")
    book.lose("b")
    assert kinds(book.wait(14.5)) == ["WorkerLost"]
    failed, started = book.wait(1.0)
    assert isinstance(failed, WorkerFailed)
    assert failed.reason.startswith("connection lost 15.")
    assert isinstance(started, RescaleStarted)


def test_a_worker_without_a_connection_is_probed_every_second_unless_its_pulse_would_tell() -> None:
    book = formed("a", "b")
    book.pulse("a")
    book.lose("a", "b")
    book.wait(1.0)
    assert {probe.worker.id for probe in book.probes} == {"b"}
    book.wait(4.0)
    counts = [sum(probe.worker.id == name for probe in book.probes) for name in "ab"]
    assert 1 <= counts[0] <= 5, "from when the pulse was silent for too long"
    assert 4 <= counts[1] <= 6


def test_a_refused_probe_proves_that_a_worker_without_a_connection_is_dead() -> None:
    book = formed("a", "b")
    assert book.refuse_probe("b") == [], "it has a connection"
    book.lose("b")
    assert book.refuse_probe("b") == [WorkerFailed("b", 1, "host-b:7000 refuses connections")]


def test_an_answered_probe_proves_nothing() -> None:
    book = formed("a", "b")
    book.lose("b")
    book.coordinator.probed("b", incarnation("b"), book.now, refused=False)
    assert book.new_facts() == []


def test_peer_and_daemon_together_prove_a_death_in_either_order() -> None:
    first = formed("a", "b")
    first.lose("b")
    first.report_peer("a", "b")
    assert WorkerFailed("b", 1, "unreachable from the daemon and from a") in first.wait(CONFIRM_S + 0.1)
    second = formed("a", "b")
    second.report_peer("a", "b")
    second.lose("b")
    assert WorkerFailed("b", 1, "unreachable from the daemon and from a") in second.wait(CONFIRM_S + 0.1)


def test_network_wide_pause_fails_no_worker() -> None:
    book = formed("a", "b", "c", failure_tolerance_percentage=0)
    book.lose("a", "b", "c")
    book.wait(8.0, silent="abc")
    book.reconnect("a")
    for peer in "bc":
        book.report_peer("a", peer)
    book.wait(2.0, silent="bc")
    book.reconnect("b", "c")
    book.wait(1.0)
    assert "WorkerFailed" not in kinds(book.facts)


def test_a_report_about_one_that_only_has_to_come_back_to_a_new_daemon_proves_nothing() -> None:
    book = formed("a", "b")
    book.restart()
    book.reconnect("a")
    assert book.report_peer("a", "b") == []
    assert "b" in book.coordinator.members


def test_daemon_stall_fails_no_worker() -> None:
    book = formed("a", "b", rescale_silence_ms=5_000)
    assert book.stall_daemon(3_600.0) == []
    book.lose("b")
    assert kinds(book.stall_daemon(3_600.0)) == ["WorkerLost"]
    book.reconnect("b")
    book.coordinator.rescale(book.now, "a test")
    book.new_facts()
    assert book.stall_daemon(3_600.0) == []
    book.complete_attempt()
    assert book.world == ["a", "b"]


def test_a_daemon_that_is_always_a_little_late_notices_silence_all_the_same() -> None:
    book = formed("a", "b")
    for _ in range(60):
        book.heartbeat("a")
        book.stall_daemon(1.0)
    assert kinds(book.facts).count("WorkerFailed") == 1


# Progress, and none.


def test_worker_that_lives_and_makes_no_progress_is_stalled_and_recovers_with_progress() -> None:
    book = formed("a", "b", stall_timeout_ms=60_000)
    book.heartbeat("a", step=5, collective_seq=10_001)
    book.heartbeat("b", step=5, collective_seq=10_000)
    for _ in range(70):
        book.pulse("a", "b", step=5)
        book.wait(1.0, still=True)
    stalled = [fact for fact in book.facts if isinstance(fact, WorkerStalled)]
    assert [(fact.worker_id, fact.step) for fact in stalled] == [("b", 5)], "the other waits for it"
    assert book.heartbeat("b", step=5, collective_seq=10_001) == [WorkerRecovered("b", 5)]
    assert "b" in book.world


def test_worker_that_is_stalled_is_evicted_only_where_that_is_wanted() -> None:
    book = formed("a", "b", stall_timeout_ms=5_000, evict_stalled=True)
    book.heartbeat("a", collective_seq=10_000)
    stalled, failed = book.wait(5.5, still=True)[:2]
    assert isinstance(stalled, WorkerStalled)
    assert isinstance(failed, WorkerFailed)
    assert failed.worker_id == stalled.worker_id == "b"


def test_lost_worker_is_not_reported_as_stalled() -> None:
    book = formed("a", "b", stall_timeout_ms=5_000)
    book.lose("b")
    assert kinds(book.wait(12.0)) == ["WorkerLost"]
    assert book.stall_daemon(3_600.0) == []


@pytest.mark.parametrize("rests", ["paused", "rescaling"])
def test_no_worker_is_stalled_while_no_worker_is_to_train(rests: str) -> None:
    book = formed("a", "b", stall_timeout_ms=5_000, rescale_silence_ms=0, rescale_timeout_ms=0)
    if rests == "paused":
        book.coordinator.pause(book.now, "lunch")
    else:
        book.join("c")
        book.wait(31.0)
        book.stop("a", "b", stop=StopReport(1, holds_state=True))
        book.stop("c", stop=StopReport(0, holds_state=False))
    book.new_facts()
    assert book.wait(60.0, still=True) == []
    if rests == "paused":
        book.coordinator.resume(book.now, "back")
    else:
        book.ready("c")
    book.new_facts()
    assert book.wait(4.0, still=True) == [], "the time begins anew"
    assert set(kinds(book.wait(2.0, still=True))) == {"WorkerStalled"}


def test_worker_that_keeps_a_rescale_waiting_in_its_step_is_stalled_and_worker_that_has_stopped_is_not() -> None:
    book = formed("a", "b", stall_timeout_ms=5_000, rescale_silence_ms=0)
    book.coordinator.rescale(book.now, "a test")
    book.stop("a", stop=StopReport(1, holds_state=True))
    book.new_facts()
    assert [fact.worker_id for fact in book.wait(20.0, still=True) if isinstance(fact, WorkerStalled)] == ["b"]


def test_a_new_world_is_a_new_beginning_for_worker_that_was_stalled() -> None:
    book = formed("a", "b", stall_timeout_ms=5_000)
    book.wait(6.0, still=True)
    book.coordinator.rescale(book.now, "a test")
    book.complete_attempt()
    assert kinds(book.facts[-4:]) == ["RescaleStarted", "WorkerRecovered", "WorkerRecovered", "RescaleCompleted"]


def test_the_committed_step_follows_those_in_the_world_alone() -> None:
    book = formed("a", "b")
    book.join("c")
    book.heartbeat("c", step=1_000)
    assert book.coordinator.training.current_step == 0
    book.heartbeat("b", step=7)
    book.heartbeat("a", step=6)
    assert book.coordinator.training.current_step == 6
    book.heartbeat("a", step=7)
    assert book.coordinator.training.current_step == 7


def test_a_heartbeat_that_lies_is_not_believed_alone() -> None:
    book = formed("a", "b", "c")
    book.heartbeat("b", step=9_000)
    assert book.coordinator.training.current_step == 0
    book.heartbeat("a", step=5)
    assert book.coordinator.training.current_step == 5
    book.heartbeat("b", step=9_500)
    book.heartbeat("c", step=6)
    assert book.coordinator.training.current_step == 6


def test_worker_that_is_done_says_how_many_steps_there_were() -> None:
    book = formed("a", "b")
    a = book.coordinator.members["a"]
    book.heartbeat("b", step=9, is_done=True)
    book.coordinator.leave("a", a.incarnation, book.now, reason="", done=True, step=9)
    assert JobCompleted(9) in book.new_facts()


def test_a_member_that_is_silent_is_failed_and_waiting_workers_for_it_are_not() -> None:
    """All other workers are in a collective with it, so they cannot answer either."""
    book = formed("a", "b", "c", rescale_silence_ms=5_000, **PATIENT)
    book.join("d")
    book.wait(WINDOW_S)
    assert book.coordinator.attempt is not None
    book.stop("d", stop=StopReport(0, holds_state=False))
    book.pulse("b")
    told = book.wait(7.0, silent=["b"], still=True)
    assert [fact.worker_id for fact in told if isinstance(fact, WorkerFailed)] == ["b"]


# The rescale.


def test_a_synchronous_rescale_is_a_barrier_with_one_commit() -> None:
    book = formed("a", "b")
    book.join("c")
    book.wait(WINDOW_S)
    assert book.last(RescaleStarted).attempt == 2
    book.new_facts()
    assert book.stop("a", "c", stop=StopReport(9, holds_state=False)) == []
    (synchronising,) = book.stop(
        "b", stop=StopReport(9, holds_state=True, epoch=2, learning_rate=0.5, global_batch_size=64)
    )
    assert synchronising == RescaleSynchronising(2, worker_of("b"), 9, behind=2)
    assert book.ready("c") == []
    assert book.coordinator.generation == 1
    (completed,) = book.ready("a")
    assert isinstance(completed, RescaleCompleted)
    assert (completed.step, completed.epoch, completed.learning_rate, completed.global_batch_size) == (9, 2, 0.5, 64)
    assert (book.coordinator.generation, book.world) == (2, ["a", "b", "c"])
    assert book.coordinator.training.active_worker_count == 3


def test_where_all_are_at_one_step_no_worker_has_to_be_synchronised() -> None:
    book = formed("a", "b", "c")
    book.die("c")
    book.wait(0.1)
    book.stop("a", stop=StopReport(4, holds_state=True))
    (completed,) = book.stop("b", stop=StopReport(4, holds_state=True))
    assert isinstance(completed, RescaleCompleted)
    assert completed.step == 4


def test_first_world_starts_with_the_most_advanced_initial_state() -> None:
    book = Playbook()
    book.join("a", "b", "c")
    book.wait(WINDOW_S)
    book.stop("a", "c", stop=StopReport(0, holds_state=False))
    book.stop("b", stop=StopReport(500, holds_state=False))
    book.ready("a", "c")
    completed = book.last(RescaleCompleted)
    assert completed.step == 500
    assert completed.reason.endswith("; state taken from b, which starts with the most steps (500)")


def test_lost_committed_steps_are_reported() -> None:
    book = formed("a", "b", **PATIENT)
    for name in ("a", "b"):
        book.heartbeat(name, step=1200)
    book.die("a", "b")
    book.join("c")
    book.wait(1.0)
    lost, completed = book.stop("c", stop=StopReport(0, holds_state=False))
    assert lost == ProgressLost(1200, 0, "no remaining worker holds them")
    assert isinstance(completed, RescaleCompleted)
    assert completed.reason.endswith("; 1,200 committed steps lost: no remaining worker holds them")
    assert book.coordinator.reason == completed.reason


def test_survivors_of_a_death_inside_a_step_go_on_from_the_highest_committed_one() -> None:
    book = formed("a", "b", "c")
    book.die("c")
    book.wait(0.1)
    book.stop("a", stop=StopReport(4, holds_state=True))
    (synchronising,) = book.stop("b", stop=StopReport(5, holds_state=True))
    assert synchronising == RescaleSynchronising(2, worker_of("b"), 5, behind=1)
    assert book.ready("a")[0] == book.last(RescaleCompleted)
    assert book.last(RescaleCompleted).step == 5


def test_a_step_that_some_finished_and_no_worker_committed_is_done_again() -> None:
    book = formed("a", "b", "c")
    book.die("c")
    book.wait(0.1)
    book.stop("a", stop=StopReport(4, holds_state=True, finished=True))
    (synchronising,) = book.stop("b", stop=StopReport(4, holds_state=True))
    assert synchronising == RescaleSynchronising(2, worker_of("b"), 4, behind=1)


def test_nothing_is_settled_by_an_attempt_that_comes_to_nothing() -> None:
    """The source dies before any worker has its state: the step that only it had is repeated."""
    book = formed("a", "b", "c", **PATIENT)
    book.heartbeat("a", "b", "c", step=4)
    book.die("c")
    book.wait(0.1)
    book.stop("a", stop=StopReport(4, holds_state=True))
    book.stop("b", stop=StopReport(5, holds_state=True, learning_rate=9.0))
    assert (book.coordinator.training.current_step, book.coordinator.training.learning_rate) == (4, 0.0)
    book.die("b")
    book.wait(0.1)
    book.stop("a", stop=StopReport(4, holds_state=True))
    assert book.last(RescaleCompleted).step == 4


def test_a_death_in_an_attempt_restarts_it_without_the_dead() -> None:
    book = formed("a", "b", "c", **PATIENT)
    book.join("d")
    book.wait(WINDOW_S)
    book.new_facts()
    book.die("b")
    aborted, started = book.wait(0.1)
    assert isinstance(aborted, RescaleAborted)
    assert aborted.attempt == 2
    assert isinstance(started, RescaleStarted)
    assert (started.attempt, started.added, started.removed) == (3, ["d"], ["b"])
    book.complete_attempt()
    assert book.world == ["a", "d", "c"]


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("goes", ["dies", "leaves"])
@pytest.mark.parametrize("who", ["a survivor", "a joiner"])
def test_worker_that_goes_in_the_middle_of_an_attempt_is_never_in_a_world(stage: Stage, goes: str, who: str) -> None:
    """Also when all other members answer before the failure window is over."""
    book = formed("a", "b", "c", **PATIENT)
    book.join("d")
    book.wait(WINDOW_S)
    gone = "b" if who == "a survivor" else "d"
    for name in "abd" if stage is Stage.SYNCHRONISING else "bd":
        book.stop(name, stop=StopReport(3, holds_state=True))
    if stage is Stage.SYNCHRONISING:
        book.stop("c", stop=StopReport(2, holds_state=True))
        assert book.coordinator.attempt is not None
        assert book.coordinator.attempt.stage is stage
    getattr(book, "die" if goes == "dies" else "leave")(gone)
    if stage is Stage.STOPPING:
        book.stop("a", "c", stop=StopReport(3, holds_state=True))
    else:
        book.ready("c")
    assert book.coordinator.generation == 1
    book.wait(0.1)
    book.complete_attempt(3)
    assert book.coordinator.generation == 2
    assert gone not in book.world
    assert sorted(book.world) == sorted(set("abcd") - {gone})


def test_an_older_attempt_is_refused_and_changes_nothing() -> None:
    book = formed("a", "b")
    book.coordinator.rescale(book.now, "a test")
    book.coordinator.rescale(book.now, "another")
    book.new_facts()
    with pytest.raises(RequestRefused) as stop:
        book.stop("a", stop=StopReport(1, holds_state=True), number=2)
    with pytest.raises(RequestRefused) as ready:
        book.ready("a", number=2)
    for error in (stop, ready):
        assert refusal(error) == "attempt_over"
        assert "attempt 3 is under way" in str(error.value)
    assert book.coordinator.attempt is not None
    assert not book.coordinator.attempt.stops


def test_worker_that_is_not_in_the_attempt_has_no_say_in_it() -> None:
    book = formed("a", "b")
    book.coordinator.rescale(book.now, "a test")
    book.join("c")
    with pytest.raises(RequestRefused) as error:
        book.stop("c", stop=StopReport(1, holds_state=True))
    assert refusal(error) == "attempt_over"
    with pytest.raises(RequestRefused):
        book.coordinator.stopped("a", incarnation("a", 2), 2, StopReport(1, holds_state=True), book.now)


def test_without_an_attempt_every_number_is_over() -> None:
    book = formed("a")
    with pytest.raises(RequestRefused) as error:
        book.ready("a", number=1)
    assert "no attempt is under way" in str(error.value)


def test_worker_that_is_in_a_long_step_together_with_all_other_workers_is_waited_for() -> None:
    """A joiner must not cost a job its workers, because their step lasts longer than a rescale may."""
    book = formed("a", "b", rescale_silence_ms=5_000, **PATIENT)
    book.join("c")
    book.wait(WINDOW_S)
    book.stop("c", stop=StopReport(0, holds_state=False))
    assert "WorkerFailed" not in kinds(book.wait(60.0))
    attempt = book.coordinator.attempt
    assert attempt is not None
    book.stop("a", stop=StopReport(1, holds_state=True))
    assert "WorkerFailed" not in kinds(book.wait(4.0))
    book.stop("b", stop=StopReport(1, holds_state=True))
    failed = [fact.worker_id for fact in book.wait(6.0) if isinstance(fact, WorkerFailed)]
    assert failed == ["c"], "it does not take the state"


def test_worker_that_is_blocked_in_a_step_is_waited_for_as_long_as_its_pulse_lives() -> None:
    """All other workers are in the same step, and cannot end it either."""
    book = formed("a", "b", rescale_silence_ms=5_000, **PATIENT)
    book.join("c")
    book.wait(WINDOW_S)
    book.stop("c", stop=StopReport(0, holds_state=False))
    for _ in range(120):
        book.pulse("b")
        assert "WorkerFailed" not in kinds(book.wait(0.5, silent=["b"]))
    book.stop("a", stop=StopReport(1, holds_state=True))
    book.pulse("b")
    failed = [fact.worker_id for fact in book.wait(5.5, silent=["b"]) if isinstance(fact, WorkerFailed)]
    assert failed == ["b"], "all other workers are at the end of the step"


def test_worker_that_is_blocked_in_a_step_goes_where_workers_that_are_stalled_do() -> None:
    book = formed("a", "b", rescale_silence_ms=5_000, stall_timeout_ms=12_000, evict_stalled=True, **PATIENT)
    book.join("c")
    book.wait(WINDOW_S)
    book.stop("c", stop=StopReport(0, holds_state=False))
    failed = []
    for _ in range(40):
        book.pulse(*book.coordinator.members.keys() & {"b"})
        failed += [fact.worker_id for fact in book.wait(0.5, silent=["b"]) if isinstance(fact, WorkerFailed)]
    assert failed[:1] == ["b"]


def test_a_joiner_that_does_not_answer_is_failed_though_a_worker_is_blocked_in_a_step() -> None:
    book = formed("a", "b", rescale_silence_ms=5_000, **PATIENT)
    book.join("c")
    book.wait(WINDOW_S)
    failed = []
    for _ in range(14):
        book.pulse("b")
        failed += [fact.worker_id for fact in book.wait(0.5, silent=["b"]) if isinstance(fact, WorkerFailed)]
    assert failed == ["c"]


def test_a_daemon_that_came_back_into_a_rescale_waits_for_no_worker_for_ever() -> None:
    """A worker whose pulse lives does not fail; and may be held up for long."""
    book = formed("a", "b", "c", **PATIENT)
    book.coordinator.rescale(book.now, "a test")
    book.settle()
    book.restart()
    book.reconnect("a", "b")
    for _ in range(40):
        book.pulse("c")
        book.wait(0.5, silent=["c"])
    assert book.coordinator.attempt is not None


def test_worker_that_does_not_answer_in_time_has_failed_and_the_rescale_restarts_without_it() -> None:
    book = formed("a", "b", "c", rescale_silence_ms=5_000)
    book.join("d")
    book.wait(WINDOW_S)
    book.stop("a", "b", stop=StopReport(0, holds_state=True))
    book.stop("d", stop=StopReport(0, holds_state=False))
    book.new_facts()
    assert book.wait(4.0) == []
    failed, *rest = book.wait(2.0)
    assert failed == WorkerFailed("c", 2, "no answer in attempt 2 within 5 s")
    assert kinds(rest) == ["RescaleAborted", "RescaleStarted"]
    book.complete_attempt()
    assert book.world == ["a", "b", "d"]


def test_a_joiner_that_never_becomes_ready_is_failed_and_costs_the_job_nothing() -> None:
    book = formed("a", rescale_silence_ms=5_000, max_consecutive_failures=1)
    book.join("b")
    book.wait(WINDOW_S)
    book.stop("a", stop=StopReport(3, holds_state=True))
    book.stop("b", stop=StopReport(0, holds_state=False))
    book.new_facts()
    failed, *rest = book.wait(6.0)
    assert failed == WorkerFailed("b", -1, "no answer in attempt 2 within 5 s")
    assert kinds(rest) == ["RescaleAborted", "RescaleStarted"]
    book.complete_attempt(3)
    assert (book.world, book.coordinator.failure_budget.in_world, book.coordinator.failure_budget.in_a_row) == (
        ["a"],
        0,
        0,
    )


BEHIND = StopReport(7, holds_state=True)
AHEAD = StopReport(7, holds_state=True, finished=True)


@pytest.mark.parametrize("limits", [{"rescale_silence_ms": 5_000}, {"rescale_timeout_ms": 5_000}], ids="-".join)
def test_state_source_that_cannot_be_reached_fails_if_it_has_the_higher_rank(limits: dict[str, int]) -> None:
    """The only committed state is at a worker that no laggard can reach."""
    book = formed("a", "b", "c", **limits)
    book.report_peer("c", "a")
    book.wait(1.1)
    book.report_peer("a", "c")
    book.stop("a", "b", stop=AHEAD)
    book.stop("c", stop=BEHIND)
    assert book.last(RescaleSynchronising).source.id == "c"
    book.ready("b")
    book.new_facts()
    failed, *_ = [fact for fact in book.wait(6.0) if isinstance(fact, WorkerFailed)]
    assert failed == WorkerFailed("c", 2, "a could not fetch the state from it in attempt 2 within 5 s")
    book.complete_attempt(7)
    assert book.world == ["a", "b"]


def test_state_source_with_the_lower_rank_stays_and_the_laggard_fails() -> None:
    book = formed("a", "b", "c", rescale_silence_ms=5_000)
    book.report_peer("c", "a")
    book.wait(1.1)
    book.stop("a", stop=BEHIND)
    book.stop("b", "c", stop=AHEAD)
    book.ready("b")
    book.new_facts()
    failed = [fact for fact in book.wait(6.0) if isinstance(fact, WorkerFailed)]
    assert failed == [WorkerFailed("c", 2, "no answer in attempt 2 within 5 s")]


def test_source_unreachable_for_most_members_is_evicted_at_any_rank() -> None:
    book = formed("a", "b", "c", "d", rescale_silence_ms=5_000, failure_tolerance_percentage=100)
    book.coordinator.rescale(book.now, "a test")
    book.stop("a", stop=BEHIND)
    book.stop("b", "c", "d", stop=AHEAD)
    for name in ("b", "c"):
        book.receive_state(name, unreached="a", problem="no peer answers")
    book.ready("d")
    assert book.last(RescaleSynchronising).source.id == "a"
    book.new_facts()
    failed = [fact for fact in book.wait(6.0) if isinstance(fact, WorkerFailed)]
    assert failed == [WorkerFailed("a", 0, "b could not fetch the state from it in attempt 2 within 5 s")]
    book.complete_attempt(7)
    assert book.world == ["b", "c", "d"]


def test_a_joiner_that_does_not_get_the_state_costs_no_other_worker_its_place() -> None:
    book = formed("a", "b", rescale_silence_ms=5_000)
    book.join("c", "d")
    book.wait(WINDOW_S)
    book.stop("a", "b", stop=BEHIND)
    book.stop("c", "d", stop=StopReport(0, holds_state=False))
    for name in ("c", "d"):
        book.receive_state(name, unreached="a", problem="no peer answers")
    book.new_facts()
    failed = [fact for fact in book.wait(6.0) if isinstance(fact, WorkerFailed)]
    why = "no answer in attempt 2 within 5 s: no peer answers"
    assert failed == [WorkerFailed("c", -1, why), WorkerFailed("d", -1, why)]


def test_a_source_that_neither_the_daemon_nor_a_member_reaches_has_failed() -> None:
    book = formed("a", "b", "c")
    book.coordinator.rescale(book.now, "a test")
    book.stop("a", stop=BEHIND)
    book.stop("b", "c", stop=AHEAD)
    book.wait(0.1)
    book.lose("a")
    book.new_facts()
    book.receive_state("b", unreached="a", problem="no peer answers")
    failed, *_ = [fact for fact in book.wait(CONFIRM_S + 0.1) if isinstance(fact, WorkerFailed)]
    assert failed == WorkerFailed("a", 0, "unreachable from the daemon and from b")


def refused_by_its_source(**settings: int) -> Playbook:
    """Where `a` takes the state from `c`, and has said that `c` refuses it."""
    book = formed("a", "b", "c", **settings, **PATIENT)
    book.coordinator.rescale(book.now, "a test")
    book.stop("a", "b", stop=AHEAD)
    book.stop("c", stop=BEHIND)
    book.ready("b")
    book.receive_state("a", unreached="c", problem="refused")
    return book


def test_worker_that_has_begun_to_take_the_state_has_nothing_against_its_source_any_more() -> None:
    book = refused_by_its_source(rescale_silence_ms=5_000)
    book.receive_state("a", state=50 << 20)
    book.new_facts()
    assert book.lose("c") == [], "it may come back"
    book.reconnect("c")
    assert [fact.worker_id for fact in book.wait(6.0) if isinstance(fact, WorkerFailed)] == ["a"]


def test_worker_that_is_silent_itself_is_not_kept_from_anything() -> None:
    book = refused_by_its_source(rescale_silence_ms=5_000)
    book.new_facts()
    assert [fact.worker_id for fact in book.wait(6.0, silent=["a"]) if isinstance(fact, WorkerFailed)] == ["a"]


def test_only_reports_about_the_source_count_in_a_state_transfer() -> None:
    book = formed("a", "b", "c", **PATIENT)
    book.coordinator.rescale(book.now, "a test")
    book.stop("a", stop=BEHIND)
    book.stop("b", "c", stop=AHEAD)
    book.wait(0.1)
    book.lose("c")
    book.new_facts()
    assert book.receive_state("b", unreached="c", problem="it lies") == []


@pytest.mark.parametrize("quarrel", ["in three worlds", "over the state"])
def test_only_known_state_holder_is_not_evicted_by_peer_reports(quarrel: str) -> None:
    """A joiner may have a lower rank without having met any worker."""
    book = formed("a", "b", use_synchronous_rescaling=False, rescale_silence_ms=5_000, **PATIENT)
    book.join("c")
    book.die("a")
    book.wait(0.1)
    assert (book.world, book.coordinator.membership.state_holders) == (["c", "b"], frozenset("b"))
    if quarrel == "in three worlds":
        for _ in range(2):
            book.report_peer("b", "c")
            book.report_peer("c", "b")
            book.wait(1.2)
        book.report_peer("c", "b")
    else:
        for name in "bc":
            book.coordinator.members[name].with_data = True
        book.report_peer("b", "c")
        book.wait(1.2)
        book.stop("b", stop=BEHIND)
        book.stop("c", stop=StopReport(0, holds_state=False))
        book.receive_state("c", unreached="b", problem="refused")
        book.ready("b")
        book.wait(6.0)
    assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == ["a", "c"]
    assert "b" in book.coordinator.members


def test_only_state_holder_is_not_failed_at_once_over_a_peer_report_and_a_lost_connection() -> None:
    book = formed("a", use_synchronous_rescaling=False, **PATIENT)
    book.join("b")
    book.wait(WINDOW_S)
    book.report_peer("b", "a")
    book.lose("a")
    book.report_peer("b", "a")
    assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == []
    book.wait(16.0, silent="a")
    assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == ["a"], "it has had its grace"


def test_a_report_about_a_source_is_over_when_the_state_has_come() -> None:
    book = formed("a", "b", "c", **PATIENT)
    book.coordinator.rescale(book.now, "a test")
    book.stop("a", "b", stop=AHEAD)
    book.stop("c", stop=BEHIND)
    source = book.coordinator.synchronising
    assert source is not None
    book.receive_state("c", unreached=source.source.id, problem="refused")
    book.ready("c")
    book.new_facts()
    book.lose(source.source.id)
    assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == []


def test_worker_that_had_to_wait_has_all_its_time_from_then_on() -> None:
    book = formed("a", rescale_silence_ms=20_000, **PATIENT)
    book.join("b")
    for member in book.coordinator.members.values():
        member.with_data = True
    book.wait(WINDOW_S)
    book.stop("a", stop=StopReport(30, holds_state=True))
    book.stop("b", stop=StopReport(0, holds_state=False))
    book.ready("a")
    for _ in range(39):
        book.receive_state("b", waits=True)
        book.wait(1.0)
    book.receive_state("b", waits=False)
    book.wait(15.0)
    assert "b" in book.coordinator.members
    book.wait(6.0)
    assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == ["b"]


class TestRescaleTimeout:
    """`rescale_timeout_ms` bounds the time for which training stands still for a rescale, also while it progresses."""

    def slow_joiner(self, **settings: Any) -> Playbook:
        book = formed("a", rescale_timeout_ms=20_000, rescale_silence_ms=10_000, **settings, **PATIENT)
        book.join("b")
        book.wait(WINDOW_S)
        book.stop("a", stop=StopReport(30, holds_state=True))
        book.stop("b", stop=StopReport(0, holds_state=False))
        return book

    def transfer(self, book: Playbook, seconds: int) -> list[WorkerFailed]:
        for second in range(seconds):
            if "b" not in book.coordinator.members:
                break
            book.receive_state("b", state=(second + 1) * 10 * RECEIVED_BYTES_MIN)
            book.wait(1.0)
        return [fact for fact in book.facts if isinstance(fact, WorkerFailed)]

    def test_joiner_whose_transfer_takes_too_long_fails_with_what_it_has_received(self) -> None:
        book = self.slow_joiner()
        assert self.transfer(book, 19) == []
        (failed,) = self.transfer(book, 3)
        assert failed.worker_id == "b"
        assert re.fullmatch(r"no answer in attempt 2 within 20 s \([\d,]+ bytes received\)", failed.reason)
        assert list(book.coordinator.members) == ["a"]

    def test_joiner_fails_before_a_survivor_that_is_not_ready_either(self) -> None:
        book = formed("a", "c", rescale_timeout_ms=20_000, rescale_silence_ms=10_000, **PATIENT)
        book.join("b")
        book.wait(WINDOW_S)
        for name, step in (("a", 30), ("c", 29)):
            book.stop(name, stop=StopReport(step, holds_state=True))
        book.stop("b", stop=StopReport(0, holds_state=False))
        for second in range(25):
            for name in {"b", "c"} & book.coordinator.members.keys():
                book.receive_state(name, state=(second + 1) * 10 * RECEIVED_BYTES_MIN)
            book.wait(1.0)
        assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == ["b"]

    def test_world_that_has_not_stopped_yet_is_not_bounded(self) -> None:
        book = formed("a", "b", rescale_timeout_ms=5_000, rescale_silence_ms=0, **PATIENT)
        book.join("c")
        book.wait(WINDOW_S)
        book.new_facts()
        assert [fact for fact in book.wait(60.0, still=True) if isinstance(fact, WorkerFailed)] == []

    def test_member_that_waits_for_lost_data_does_not_fail(self) -> None:
        book = self.slow_joiner()
        book.coordinator.members["b"].with_data = True
        for _ in range(60):
            book.receive_state("b", waits=True)
            book.wait(1.0)
        assert "b" in book.coordinator.members

    def test_without_a_limit_a_transfer_that_progresses_goes_on(self) -> None:
        book = formed("a", rescale_timeout_ms=0, rescale_silence_ms=10_000, **PATIENT)
        book.join("b")
        book.wait(WINDOW_S)
        book.stop("a", stop=StopReport(30, holds_state=True))
        book.stop("b", stop=StopReport(0, holds_state=False))
        assert self.transfer(book, 90) == []


class TestOverdueDrain:
    def told(self, *names: str) -> Playbook:
        book = formed("a", *names, leave_timeout_ms=60_000, **PATIENT)
        book.coordinator.drain("a", book.now, "its host is needed")
        book.new_facts()
        return book

    def failed(self, book: Playbook) -> list[str]:
        return [fact.reason for fact in book.facts if isinstance(fact, WorkerFailed)]

    def test_overdue_worker_is_kept_while_it_sends_heartbeats(self) -> None:
        book = self.told("b")
        book.wait(600.0)
        assert self.failed(book) == []

    def test_is_evicted_when_its_library_has_been_silent_for_so_long(self) -> None:
        book = self.told("b")
        for _ in range(58):
            book.wait(1.0, silent="a")
            book.pulse("a")
        assert self.failed(book) == []
        while "a" in book.coordinator.members:
            book.pulse("a")
            book.wait(1.0, silent="a")
        (reason,) = self.failed(book)
        assert reason.startswith("draining for 60.")

    def test_is_evicted_when_no_worker_has_taken_it_in(self) -> None:
        book = formed("a", leave_timeout_ms=60_000, **PATIENT)
        book.join("b")
        book.coordinator.drain("b", book.now, "it is not wanted after all")
        book.wait(59.0)
        assert self.failed(book) == []
        book.wait(2.0)
        assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == ["b"]

    def test_member_is_not_failed_for_silence_during_a_daemon_stall(self) -> None:
        book = self.told("b")
        book.wait(50.0)
        book.stall_daemon(30.0)
        book.wait(5.0)
        assert self.failed(book) == []

    @pytest.mark.parametrize("timeout_ms", [0, 1, 2000])
    def test_overdue_worker_is_kept_at_its_heartbeat_interval_with_a_short_timeout(self, timeout_ms: int) -> None:
        book = formed("a", "b", leave_timeout_ms=timeout_ms, **PATIENT)
        book.coordinator.drain("a", book.now, "its host is needed")
        for _ in range(20):
            book.wait(3.3, silent="a")
            book.heartbeat("a")
        assert self.failed(book) == []


def test_a_timeout_of_nothing_lets_a_rescale_take_as_long_as_it_does() -> None:
    book = formed("a", rescale_silence_ms=0)
    book.coordinator.rescale(book.now, "a test")
    book.new_facts()
    assert book.wait(10_000.0) == []


def test_worker_that_joins_in_the_middle_of_a_rescale_waits_for_the_next_one() -> None:
    book = formed("a")
    book.coordinator.rescale(book.now, "a test")
    book.join("b")
    book.complete_attempt()
    assert book.world == ["a"]
    book.wait(WINDOW_S)
    book.complete_attempt()
    assert book.world == ["a", "b"]


def test_in_asynchronous_mode_the_topology_changes_and_no_worker_stops() -> None:
    book = formed("a", "b", use_synchronous_rescaling=False)
    book.heartbeat("a", "b", step=12)
    book.die("b")
    _, completed = book.wait(0.1)
    assert isinstance(completed, RescaleCompleted)
    assert (completed.removed, book.world) == (["b"], ["a"])
    assert (completed.step, completed.epoch) == (None, None), "a worker that did not stop did not say where"
    assert (book.coordinator.generation, book.coordinator.phase) == (2, Phase.RUNNING)
    assert book.coordinator.attempt is None
    assert book.coordinator.training.current_step == 12


@pytest.mark.parametrize("synchronous", [True, False])
def test_process_that_leaves_and_registers_again_keeps_its_rank(synchronous: bool) -> None:
    book = formed("a", "b", "c", use_synchronous_rescaling=synchronous)
    book.leave("b")
    book.join("b")
    book.wait(0.1)
    if synchronous:
        book.complete_attempt()
    assert (book.world, book.coordinator.generation, book.coordinator.phase) == (["a", "b", "c"], 2, Phase.RUNNING)


def test_process_that_was_alone_and_registers_again_forms_the_next_world() -> None:
    book = formed("a")
    book.leave("a")
    book.wait(1.0)
    assert book.coordinator.phase is Phase.WAITING
    book.join("a")
    book.complete_attempt()
    assert (book.world, book.coordinator.generation, book.coordinator.phase) == (["a"], 2, Phase.RUNNING)


def test_where_no_worker_trains_yet_all_say_where_they_begin_in_asynchronous_mode_too() -> None:
    book = Playbook(use_synchronous_rescaling=False)
    book.join("a", "b")
    assert kinds(book.wait(WINDOW_S)) == ["RescaleStarted"]
    book.stop("a", "b", stop=StopReport(7, holds_state=False, epoch=2))
    assert kinds(book.ready("b")) == ["RescaleCompleted"]
    completed = book.last(RescaleCompleted)
    assert (completed.step, completed.epoch) == (7, 2)


def test_worker_that_comes_when_no_worker_of_a_world_is_left_says_where_it_begins_in_asynchronous_mode_too() -> None:
    book = formed("a", use_synchronous_rescaling=False, **PATIENT)
    book.heartbeat("a", step=100)
    book.die("a")
    book.wait(0.1)
    book.join("b")
    assert kinds(book.stop("b", stop=StopReport(90, holds_state=False))) == ["ProgressLost", "RescaleCompleted"]
    assert (book.last(RescaleCompleted).step, book.coordinator.training.current_step) == (90, 90)


def test_worker_that_is_left_and_may_never_have_met_former_state_holder_says_where_it_begins() -> None:
    """It would start anew, alone, and the steps of all other workers would be lost silently."""
    book = formed("a", use_synchronous_rescaling=False, **PATIENT)
    book.heartbeat("a", step=30)
    book.join("b")
    book.wait(WINDOW_S)
    assert (book.world, book.last(RescaleCompleted).step) == (["a", "b"], None)
    book.die("a")
    (started,) = book.wait(0.1)
    assert isinstance(started, RescaleStarted)
    assert started.reason.endswith("no remaining worker of world 2 is known to hold the state")
    assert kinds(book.stop("b", stop=StopReport(0, holds_state=False))) == ["ProgressLost", "RescaleCompleted"]
    assert (book.world, book.last(RescaleCompleted).step, book.coordinator.training.current_step) == (
        ["b"],
        0,
        0,
    )


def test_worker_that_has_said_where_it_begins_is_known_to_have_the_state_from_then_on() -> None:
    book = formed("a", use_synchronous_rescaling=False, **PATIENT)
    book.join("b")
    book.wait(WINDOW_S)
    book.die("a")
    book.wait(0.1)
    book.stop("b", stop=StopReport(30, holds_state=True))
    assert book.last(RescaleCompleted).step == 30
    book.join("c")
    assert kinds(book.wait(WINDOW_S)) == ["RescaleStarted", "RescaleCompleted"]
    book.die("c")
    assert kinds(book.wait(0.1)) == ["RescaleStarted", "RescaleCompleted"]
    assert (book.world, book.last(RescaleCompleted).step) == (["b"], None)


def test_worker_that_has_met_other_workers_has_the_state() -> None:
    book = formed("a", use_synchronous_rescaling=False, **PATIENT)
    book.join("b")
    book.wait(WINDOW_S)
    book.heartbeat("a", collective_seq=2 * COLLECTIVES_PER_WORLD)
    assert book.coordinator.membership.state_holders == {"a"}, "it may wait there for its peers"
    book.heartbeat("b", collective_seq=COLLECTIVES_PER_WORLD + 9)
    assert book.coordinator.membership.state_holders == {"a"}, "it is on its way from the world before"
    book.heartbeat("b", collective_seq=2 * COLLECTIVES_PER_WORLD + 1)
    assert book.coordinator.membership.state_holders == {"a"}, (
        "a worker that may not have the state cannot vouch for itself"
    )
    book.heartbeat("a", collective_seq=2 * COLLECTIVES_PER_WORLD + 1)
    book.restart()
    book.reconnect("a", "b")
    assert book.coordinator.membership.state_holders == {"a", "b"}
    book.die("a")
    assert kinds(book.wait(0.1)) == ["RescaleStarted", "RescaleCompleted"]
    assert (book.world, book.last(RescaleCompleted).step) == (["b"], None)


def test_worker_that_comes_under_the_name_of_one_former_state_holder_is_another() -> None:
    book = formed("a", "b", use_synchronous_rescaling=False, **PATIENT)
    book.die("a")
    book.join("a", life=2)
    book.wait(0.1)
    assert (sorted(book.world), book.last(RescaleCompleted).step) == (["a", "b"], None)
    book.die("b")
    assert kinds(book.wait(0.1)) == ["RescaleStarted"]
    book.stop("a", stop=StopReport(0, holds_state=False))
    assert (book.world, book.last(RescaleCompleted).step) == (["a"], 0)


def test_state_holder_is_known_after_a_restart() -> None:
    book = formed("a", use_synchronous_rescaling=False, **PATIENT)
    book.join("b")
    book.wait(WINDOW_S)
    book.restart()
    book.reconnect("a", "b")
    book.join("c")
    book.wait(WINDOW_S)
    assert (book.world, book.last(RescaleCompleted).step) == (["a", "b", "c"], None)
    book.restart()
    book.reconnect("b", "c")
    book.die("a")
    assert kinds(book.wait(0.1)) == ["RescaleStarted"]


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_rate_and_batch_scale_from_the_values_of_the_first_world(synchronous: bool, restarted: bool) -> None:
    book = Playbook(use_synchronous_rescaling=synchronous, scale_batch_with_world=True)
    first = book.form_world("a", "b", learning_rate=0.1, global_batch_size=32)
    assert (first.learning_rate, first.global_batch_size) == (0.1, 32)
    if restarted:
        book.restart()
        book.reconnect("a", "b")
    book.join("c", "d")
    book.wait(WINDOW_S)
    if synchronous:
        book.complete_attempt(learning_rate=0.1, global_batch_size=32)
    grown = book.last(RescaleCompleted)
    assert (book.world, grown.learning_rate, grown.global_batch_size) == (["a", "b", "c", "d"], 0.2, 64)


def test_unscaled_rate_is_not_sent_unless_a_stop_report_names_it() -> None:
    """The script may have changed it since the first world began."""
    book = Playbook(use_synchronous_rescaling=False, base_learning_rate=0.5)
    assert book.form_world("a", learning_rate=0.1, global_batch_size=32).learning_rate == 0.1
    book.join("b")
    book.wait(WINDOW_S)
    grown = book.last(RescaleCompleted)
    assert (book.world, grown.learning_rate, grown.global_batch_size) == (["a", "b"], None, 0)
    assert (book.coordinator.training.learning_rate, book.coordinator.training.global_batch_size) == (0.0, 0)


def test_the_whole_world_may_be_replaced_and_says_so() -> None:
    book = formed("a", **PATIENT)
    book.heartbeat("a", step=100)
    book.die("a")
    assert kinds(book.wait(0.1)) == ["JobWaiting"]
    book.join("b")
    book.stop("b", stop=StopReport(90, holds_state=True))
    completed = book.last(RescaleCompleted)
    assert (completed.step, completed.removed, completed.added) == (90, ["a"], ["b"])
    assert book.coordinator.training.current_step == 90


# Failures.


def test_as_many_as_are_tolerated_may_fail_and_one_more_aborts_the_job() -> None:
    book = formed(*"abcdefghij", failure_tolerance_percentage=20, max_consecutive_failures=100)
    assert kinds(book.die("a", "b")) == ["WorkerFailed", "WorkerFailed"]
    _, aborted = book.die("c")
    assert isinstance(aborted, JobAborted)
    assert aborted.reason == "3 of 10 workers failed; limit 2"
    assert book.coordinator.phase is Phase.ABORTED


def test_one_may_fail_however_small_the_world() -> None:
    book = formed("a", "b", failure_tolerance_percentage=0)
    assert kinds(book.die("a")) == ["WorkerFailed"]
    assert kinds(book.wait(0.1)) == ["RescaleStarted"]


def test_failures_are_counted_since_the_last_commit() -> None:
    book = formed("a", "b", "c", "d", failure_tolerance_percentage=0, max_consecutive_failures=100)
    for name in "abc":
        book.die(name)
        book.wait(0.1)
        book.complete_attempt()
    assert (book.world, book.coordinator.failure_budget.in_world, book.coordinator.over) == (["d"], 0, False)


def test_so_many_failures_without_a_committed_step_in_between_abort_the_job() -> None:
    book = formed("a", "b", "c", "d", max_consecutive_failures=3)
    for name in "ab":
        book.die(name)
        book.wait(0.1)
        book.complete_attempt()
    aborted = book.die("c")[-1]
    assert isinstance(aborted, JobAborted)
    assert aborted.reason == "3 failures without a committed step in between"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_committed_step_in_between_begins_the_count_anew(restarted: bool) -> None:
    book = formed("a", "b", "c", "d", max_consecutive_failures=3)
    for step, name in enumerate("abc", 1):
        book.die(name)
        book.wait(0.1)
        book.complete_attempt(step)
        book.heartbeat("d", step=step + 1)
        if restarted:
            book.restart()
            book.reconnect(*book.coordinator.members)
    assert (book.coordinator.over, book.coordinator.failure_budget.in_a_row) == (False, 0)


def test_steps_that_are_done_again_from_an_older_state_count_as_steps_in_between() -> None:
    """All died, and a worker came that holds the state of long ago."""
    book = formed("a", max_consecutive_failures=3)
    book.heartbeat("a", step=1_000)
    book.die("a")
    book.wait(0.1)
    book.join("b")
    book.stop("b", stop=StopReport(500, holds_state=True))
    book.heartbeat("b", step=501)
    assert (book.coordinator.training.current_step, book.coordinator.failure_budget.in_a_row) == (501, 0)


def test_a_restart_does_not_forget_failures() -> None:
    book = formed("a", "b", "c", "d", max_consecutive_failures=3)
    for name in "ab":
        book.die(name)
        book.wait(0.1)
        book.complete_attempt()
        book.restart()
        book.reconnect(*book.coordinator.members)
    assert kinds(book.die("c")) == ["WorkerFailed", "JobAborted"]


def test_an_aborted_job_keeps_its_state_and_its_world() -> None:
    book = formed("a", "b")
    book.heartbeat("a", "b", step=7)
    book.coordinator.abort(book.now, "enough")
    assert book.new_facts() == [JobAborted("enough", 7)]
    book.restart()
    assert (book.world, book.coordinator.phase, book.coordinator.reason) == (["a", "b"], Phase.ABORTED, "enough")


def test_a_rescale_ends_with_the_job() -> None:
    book = formed("a", "b")
    book.coordinator.rescale(book.now, "a test")
    book.new_facts()
    book.coordinator.abort(book.now, "enough")
    assert book.new_facts() == [RescaleAborted(2, "enough"), JobAborted("enough", 0)]
    with pytest.raises(RequestRefused):
        book.stop("a", stop=StopReport(1, holds_state=True))


def test_nothing_is_decided_when_a_job_is_over() -> None:
    book = formed("a", "b")
    book.join("c")
    book.coordinator.abort(book.now, "enough")
    book.new_facts()
    assert kinds(book.die("a")) == ["WorkerFailed"]
    assert kinds(book.leave("c")) == ["WorkerLeft"]
    assert book.wait(1_000.0) == []
    book.coordinator.abort(book.now, "again")
    assert book.new_facts() == []
    for act in (book.coordinator.pause, book.coordinator.resume, book.coordinator.rescale):
        with pytest.raises(RequestRefused) as error:
            act(book.now, "a test")
        assert refusal(error) == "job_over"


# Reopening.


def aborted(*names: str, **settings: Any) -> Playbook:
    """A job of which more workers have failed than it tolerates, after its seventh step."""
    book = formed(*names, failure_tolerance_percentage=0, **settings)
    book.heartbeat(*names, step=7)
    book.die(*names[:2])
    assert book.coordinator.phase is Phase.ABORTED
    return book


def test_reopened_job_takes_new_workers_into_its_next_world() -> None:
    book = aborted("a", "b")
    with pytest.raises(RequestRefused) as refused:
        book.join("c")
    assert refusal(refused) == "job_over"
    assert "`forgectl jobs reopen run`" in refused.value.fix
    book.coordinator.reopen(book.now, "spare hosts")
    assert book.new_facts() == [JobReopened("spare hosts", 7)]
    assert (book.coordinator.phase, book.coordinator.generation) == (Phase.FORMING, 1)
    book.join("c", "d")
    assert kinds(book.wait(WINDOW_S)) == ["RescaleStarted"], "it waits for all that are started, as a new job does"
    completed = book.complete_attempt()
    assert (book.world, completed.attempt, completed.delta.generation) == (["c", "d"], 2, 2)
    assert (completed.removed, completed.added) == (["a", "b"], ["c", "d"])


def test_workers_of_a_reopened_job_bring_the_state_of_a_checkpoint() -> None:
    book = aborted("a", "b")
    book.coordinator.reopen(book.now, "")
    book.join("c")
    book.wait(WINDOW_S)
    book.stop("c", stop=StopReport(5, holds_state=True))
    assert book.last(RescaleCompleted).step == 5
    assert book.last(ProgressLost) == ProgressLost(2, 5, "no remaining worker holds them")


def test_reopened_job_counts_failures_anew() -> None:
    book = aborted("a", "b", max_consecutive_failures=2)
    book.coordinator.reopen(book.now, "")
    book.join("c", "d", "e")
    book.wait(WINDOW_S)
    book.complete_attempt()
    assert kinds(book.die("c")) == ["WorkerFailed"]
    assert kinds(book.wait(1.0)) == ["RescaleStarted"]


@pytest.mark.parametrize("restarted", [False, True])
def test_former_workers_of_a_reopened_job_are_fenced_off(restarted: bool) -> None:
    book = aborted("a", "b", "c")
    assert list(book.coordinator.members) == ["c"]
    book.coordinator.reopen(book.now, "")
    assert book.join("c", life=2)[-1] == WorkerJoined(worker_of("c"))
    if restarted:
        book.restart()
        book.reconnect("c")
    book.new_facts()
    old = incarnation("c", 1)
    book.coordinator.heartbeat(Heartbeat(JOB, "c", old, 99, 99), book.now)
    book.coordinator.pulse(Pulse(JOB, "c", old, 1.0, 99, 99), book.now)
    book.coordinator.peer_report("c", old, 1, book.now, peer="", reason="")
    assert book.leave("c", done=True, step=99) == []
    assert book.die("c") == []
    with pytest.raises(RequestRefused):
        book.coordinator.stopped("c", old, 1, StopReport(99, holds_state=True), book.now)
    assert (list(book.coordinator.members), book.coordinator.step) == (["c"], 7)


def test_reopened_job_survives_a_restart_and_waits_for_its_first_worker() -> None:
    book = aborted("a", "b", "c", min_workers_timeout_ms=60_000)
    book.coordinator.reopen(book.now, "")
    book.restart()
    assert (book.coordinator.phase, book.coordinator.rescale_reasons) == (Phase.FORMING, [])
    assert book.coordinator.due_at() == float("inf")
    book.join("d")
    assert kinds(book.wait(WINDOW_S)) == ["RescaleStarted"]


def test_paused_job_is_reopened_as_it_was_paused() -> None:
    book = formed("a", "b")
    book.coordinator.pause(book.now, "night")
    book.coordinator.abort(book.now, "enough")
    book.coordinator.reopen(book.now, "")
    assert (book.coordinator.paused, book.coordinator.pause_reason) == (True, "night")


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ABORTED])
def test_only_an_aborted_job_is_reopened(phase: Phase) -> None:
    book = formed("a", "b")
    book.coordinator.phase = phase
    book.new_facts()
    with pytest.raises(RequestRefused) as refused:
        book.coordinator.reopen(book.now, "")
    assert refusal(refused) == "job_not_aborted"
    assert refused.value.message == f"phase of job run must be aborted, got {phase}"
    assert ("forgectl jobs rm run" in refused.value.fix) == (phase is Phase.COMPLETED)
    assert (book.new_facts(), list(book.coordinator.members)) == ([], ["a", "b"])


def test_worker_that_goes_from_a_job_that_is_over_is_forgotten() -> None:
    book = formed("a", "b")
    book.coordinator.abort(book.now, "enough")
    book.lose("a")
    assert list(book.coordinator.members) == ["b"]
    book.restart()
    book.wait(20.0)
    assert (book.coordinator.members, book.coordinator.due_at()) == ({}, float("inf"))
    assert not [key for key in book.stored if "/member/" in key]


# Too few.


def test_below_min_workers_the_job_waits() -> None:
    book = formed("a", "b", min_workers=2)
    book.die("b")
    (waiting,) = book.wait(0.1)
    assert waiting == JobWaiting(1, 2)
    assert (book.coordinator.phase, book.coordinator.reason) == (Phase.WAITING, "1 worker left; min_workers is 2")
    assert book.wait(300.0) == []


def test_a_job_that_waits_goes_on_as_soon_as_there_are_enough() -> None:
    book = formed("a", "b", min_workers=2)
    book.die("b")
    book.wait(0.1)
    _, started = book.join("c")
    assert isinstance(started, RescaleStarted)
    assert started.reason == "b failed: its process has ended; c joined"
    book.complete_attempt(4)
    assert (book.world, book.coordinator.phase) == (["a", "c"], Phase.RUNNING)


def test_a_job_that_has_waited_for_too_long_is_aborted() -> None:
    book = formed("a", "b", min_workers=2, min_workers_timeout_ms=60_000)
    book.die("b")
    assert kinds(book.wait(59.0)) == ["JobWaiting"]
    (aborted,) = book.wait(2.0)
    assert aborted == JobAborted("fewer than 2 workers for 60 s", 0)


def test_a_job_may_wait_for_ever() -> None:
    book = formed("a", "b", min_workers=2, min_workers_timeout_ms=None)
    book.die("b")
    book.wait(1.0)
    assert book.wait(10_000.0) == []


def test_all_may_be_gone_while_it_waits_and_the_time_runs() -> None:
    book = formed("a", min_workers_timeout_ms=60_000)
    book.leave("a")
    assert kinds(book.wait(0.1)) == ["JobWaiting"]
    assert kinds(book.wait(60.0)) == ["JobAborted"]


def test_it_begins_to_wait_anew_behind_each_world() -> None:
    book = formed("a", "b", min_workers=2, min_workers_timeout_ms=60_000, **PATIENT)
    book.die("b")
    book.wait(50.0)
    book.join("c")
    book.complete_attempt()
    book.wait(50.0)
    book.die("c")
    assert kinds(book.wait(50.0)) == ["JobWaiting"]


def test_a_restart_does_not_let_a_job_wait_for_ever() -> None:
    book = formed("a", "b", min_workers=2, min_workers_timeout_ms=60_000)
    book.die("b")
    book.wait(1.0)
    book.restart()
    book.reconnect("a")
    book.new_facts()
    assert kinds(book.wait(61.0)) == ["JobAborted"]


def test_a_job_that_never_had_enough_is_aborted_as_well() -> None:
    book = Playbook(min_workers=2, min_workers_timeout_ms=60_000)
    book.join("a")
    assert book.wait(59.0) == []
    assert kinds(book.wait(2.0)) == ["JobAborted"]


def test_a_job_without_a_worker_waits_for_its_first_one_as_long_as_that_takes() -> None:
    book = Playbook(min_workers=2, min_workers_timeout_ms=60_000)
    book.join("a")
    book.leave("a")
    assert book.coordinator.due_at() == float("inf")
    book.time += 1_000
    assert kinds(book.join("b")) == ["WorkerJoined"]
    assert book.wait(59.0) == []


def test_enough_workers_that_wait_for_the_window_have_nothing_to_fear_from_a_shorter_timeout() -> None:
    book = Playbook(min_workers=2, min_workers_timeout_ms=5_000)
    book.join("a", "b")
    assert kinds(book.wait(WINDOW_S)) == ["RescaleStarted"]


def test_a_job_that_waits_goes_on_when_fewer_are_needed() -> None:
    book = formed("a", "b", min_workers=2)
    book.die("b")
    book.wait(1.0)
    book.coordinator.configure({"min_workers": 1})
    assert kinds(book.wait(0.3)) == ["RescaleStarted"]
    assert book.complete_attempt().reason == "b failed: its process has ended"


# Leaving.


def test_worker_that_leaves_in_good_order_is_no_failure() -> None:
    book = formed("a", "b", failure_tolerance_percentage=0, max_consecutive_failures=1)
    assert book.leave("b", reason="lunch") == [WorkerLeft("b", "lunch")]
    (started,) = book.wait(0.1)
    assert isinstance(started, RescaleStarted)
    assert started.reason == "b left: lunch"
    assert (book.coordinator.failure_budget.in_world, book.coordinator.failure_budget.in_a_row) == (0, 0)


def test_a_joiner_may_go_again() -> None:
    book = formed("a")
    book.join("b")
    assert book.leave("b") == [WorkerLeft("b", "its own request")]
    assert book.wait(100.0) == []


def test_the_first_that_is_done_completes_the_job_if_the_other_members_say_that_they_are_done() -> None:
    book = formed("a", "b")
    book.heartbeat("a", step=100, is_done=True)
    assert book.leave("b", done=True, step=100) == [WorkerLeft("b", "training completed"), JobCompleted(100)]
    assert book.coordinator.phase is Phase.COMPLETED
    assert book.leave("a", done=True, step=100) == [WorkerLeft("a", "training completed")]


def test_job_is_complete_when_the_last_member_says_that_it_is_done_after_the_same_step() -> None:
    book = formed("a", "b", "c")
    book.heartbeat("b", step=100, is_done=True)
    assert book.leave("a", done=True, step=100) == [WorkerLeft("a", "training completed")]
    assert book.heartbeat("c", step=99) == []
    assert book.heartbeat("c", step=100) == []
    assert book.heartbeat("c", step=100, is_done=True) == [JobCompleted(100)]


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_one_member_does_not_complete_a_job_whose_other_members_want_further_steps(ahead: int) -> None:
    book = formed("a", "b")
    book.heartbeat("b", step=100)
    book.leave("a", done=True, step=100 + ahead)
    for step in range(100, 106):
        book.heartbeat("b", step=step)
        book.pulse("b", step=step)
    assert book.coordinator.phase is Phase.RUNNING


def test_failures_of_the_other_members_do_not_confirm_that_training_is_complete() -> None:
    book = formed("a", "b")
    book.leave("a", done=True, step=100)
    book.join("c")
    book.die("b")
    book.heartbeat("c", step=100, is_done=True)
    assert book.coordinator.phase is not Phase.COMPLETED


def test_last_member_of_a_world_completes_the_job_alone() -> None:
    book = formed("a", "b")
    book.die("b")
    assert book.leave("a", done=True, step=100)[-1] == JobCompleted(100)


def test_last_member_that_may_not_step_completes_the_job_by_its_heartbeat() -> None:
    book = formed("a", "b", min_workers=2)
    book.die("b")
    book.wait(1.0)
    assert book.coordinator.phase is Phase.WAITING
    assert book.heartbeat("a", step=100, is_done=True) == [JobCompleted(100)]


def test_members_that_are_done_complete_the_job_once_another_has_failed() -> None:
    book = formed("a", "b", "c", min_workers=3)
    book.heartbeat("a", step=100, is_done=True)
    assert book.heartbeat("b", step=100, is_done=True) == []
    assert JobCompleted(100) in book.die("c")


def test_members_that_are_done_complete_the_job_although_late_members_exceed_the_failure_limit() -> None:
    book = formed("a", "b", "c", "d")
    book.coordinator.rescale(book.now, "a test")
    for name in ("a", "b"):
        book.stop(name, stop=StopReport(100, holds_state=True))
        book.heartbeat(name, step=100, is_done=True)
    while "d" in book.coordinator.members:
        book.wait(2.0, silent=("a", "b"))
        for name in list(book.coordinator.members):
            book.heartbeat(name, step=100, is_done=name in ("a", "b"))
    assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == ["c", "d"]
    assert book.coordinator.phase is Phase.COMPLETED


def test_members_confirm_after_a_restart_of_the_daemon_that_training_is_complete() -> None:
    book = formed("a", "b", "c", min_workers=3)
    book.leave("a", done=True, step=100)
    book.restart()
    book.reconnect("b", "c")
    book.wait(1.0)
    assert book.coordinator.phase is Phase.WAITING
    assert book.heartbeat("b", step=100, is_done=True) == []
    assert book.heartbeat("c", step=100, is_done=True) == [JobCompleted(100)]


def test_members_of_a_complete_world_do_not_complete_the_job_before_one_leaves() -> None:
    book = formed("a", "b")
    book.heartbeat("a", step=100, is_done=True)
    assert book.heartbeat("b", step=100, is_done=True) == []


def test_members_that_are_done_after_different_steps_do_not_complete_the_job() -> None:
    book = formed("a", "b", "c")
    book.heartbeat("b", step=101, is_done=True)
    book.heartbeat("c", step=100, is_done=True)
    book.leave("a", done=True, step=100)
    assert book.coordinator.phase is Phase.RUNNING


def test_step_that_a_member_names_when_it_leaves_does_not_keep_the_others_from_confirming_theirs() -> None:
    book = formed("a", "b", "c", min_workers=3)
    book.leave("a", done=True, step=7)
    book.wait(20.0)
    assert book.coordinator.phase is Phase.WAITING
    book.heartbeat("b", step=100, is_done=True)
    assert book.heartbeat("c", step=100, is_done=True) == [JobCompleted(100)]


def test_job_is_complete_when_the_other_members_leave_in_good_order_after_the_same_step() -> None:
    book = formed("a", "b")
    assert book.leave("a", done=True, step=100) == [WorkerLeft("a", "training completed")]
    assert book.leave("b", done=True, step=100) == [WorkerLeft("b", "training completed"), JobCompleted(100)]


def test_member_that_has_not_heard_of_the_last_commit_completes_the_job_in_a_world_of_its_own() -> None:
    book = formed("a", "b")
    book.leave("a", done=True, step=100)
    book.heartbeat("b", step=99)
    book.wait(8.0)
    (started,) = [fact for fact in book.facts if isinstance(fact, RescaleStarted)][-1:]
    assert started.attempt == 2
    book.stop("b", stop=StopReport(99, holds_state=True, finished=True))
    assert (book.world, book.last(RescaleCompleted).step) == (["b"], 100)
    assert book.leave("b", done=True, step=100)[-1] == JobCompleted(100)


def test_training_goes_on_without_a_member_that_is_done_alone() -> None:
    book = formed("a", "b")
    book.heartbeat("a", step=5)
    book.heartbeat("b", step=5)
    book.leave("a", done=True, step=9)
    book.wait(60.0)
    book.stop("b", stop=StopReport(5, holds_state=True))
    assert (book.coordinator.phase, book.world, book.coordinator.training.current_step) == (Phase.RUNNING, ["b"], 5)
    book.heartbeat("b", step=9)
    assert book.coordinator.phase is Phase.RUNNING


def test_step_that_the_world_cannot_have_reached_is_refused_and_changes_nothing() -> None:
    book = formed("a", "b")
    book.heartbeat("a", step=5)
    book.heartbeat("b", step=5)
    book.new_facts()
    for done in (True, False):
        with pytest.raises(RequestRefused) as error:
            book.leave("a", done=done, step=10**6)
        assert refusal(error) == "step_impossible"
    book.coordinator.rescale(book.now, "a test")
    with pytest.raises(RequestRefused) as error:
        book.stop("a", stop=StopReport(10**6, holds_state=True))
    assert refusal(error) == "step_impossible"
    assert (book.coordinator.step, book.coordinator.members["a"].step) == (5, 5)


def test_heartbeat_and_pulse_with_an_impossible_step_show_life_and_no_progress() -> None:
    book = formed("a")
    book.heartbeat("a", step=10**6)
    book.pulse("a", step=10**6)
    assert (book.coordinator.training.current_step, book.coordinator.members["a"].step) == (0, 0)
    book.heartbeat("a", step=7)
    assert book.coordinator.training.current_step == 7


def test_steps_made_while_no_daemon_ran_are_possible() -> None:
    book = formed("a", "b")
    book.restart()
    book.time += 3_600.0
    book.reconnect("a", "b")
    book.heartbeat("a", step=10**6)
    book.heartbeat("b", step=10**6)
    assert book.coordinator.training.current_step == 10**6


def test_worker_that_is_not_in_the_world_cannot_complete_the_job() -> None:
    book = formed("a")
    book.join("b")
    assert book.leave("b", done=True, step=10**9) == [WorkerLeft("b", "training completed")]
    assert (book.coordinator.phase, book.coordinator.training.current_step) == (Phase.RUNNING, 0)


def test_evictions_are_no_failures_that_abort_a_job() -> None:
    book = formed("a", "b", "c", "d", max_consecutive_failures=1, failure_tolerance_percentage=0)
    for name in "bcd":
        book.coordinator.evict(name, book.now, "its host is needed")
    assert "JobAborted" not in kinds(book.wait(1.0))
    assert (book.coordinator.failure_budget.in_world, book.coordinator.failure_budget.in_a_row) == (0, 0)
    book.complete_attempt()
    assert book.world == ["a"]
    assert "JobAborted" in kinds(book.die("a")), "a death counts as before"


def test_silent_draining_worker_fails_without_failure_budget() -> None:
    book = Playbook(rescale_silence_ms=5_000)
    book.form_world("a", "b", "c")
    book.coordinator.drain("b", book.now, "the night")
    book.die("c")
    book.wait(0.2)
    book.stop("a", stop=StopReport(5, True))
    book.wait(8.0)
    assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == ["c", "b"]
    assert book.coordinator.phase is Phase.RESCALING
    assert book.complete_attempt(5).removed == ["b", "c"]


def test_an_evicted_worker_has_failed() -> None:
    book = formed("a", "b")
    book.coordinator.evict("b", book.now, "it smells")
    assert book.new_facts() == [WorkerFailed("b", 1, "evicted: it smells")]
    assert kinds(book.wait(0.1)) == ["RescaleStarted"]


# Operators.


def test_training_rests_and_goes_on_again() -> None:
    book = formed("a")
    book.coordinator.pause(book.now, "lunch")
    book.coordinator.pause(book.now, "more lunch")
    assert book.new_facts() == [JobPaused("lunch")]
    book.restart()
    assert book.coordinator.paused
    book.coordinator.resume(book.now, "coffee")
    book.coordinator.resume(book.now, "more coffee")
    assert book.new_facts() == [JobResumed("coffee")]
    assert not book.coordinator.paused


def test_an_operator_may_have_a_rescale_at_once() -> None:
    book = formed("a")
    book.join("b")
    book.coordinator.rescale(book.now, "now please")
    started = book.new_facts()[-1]
    assert started == RescaleStarted(2, RescaleType.SCALE_UP, 2, ["b"], [], "now please; b joined")


def test_a_rescale_that_is_wanted_twice_begins_anew() -> None:
    book = formed("a")
    book.coordinator.rescale(book.now, "once")
    book.new_facts()
    book.coordinator.rescale(book.now, "twice")
    assert kinds(book.new_facts()) == ["RescaleAborted", "RescaleStarted"]


def test_a_rescale_without_workers_is_refused() -> None:
    with pytest.raises(RequestRefused) as error:
        Playbook().coordinator.rescale(Moment(WALL_S, START_S), "a test")
    assert refusal(error) == "workers_none"


def test_a_completed_job_cannot_be_aborted() -> None:
    book = formed("a")
    book.leave("a", done=True)
    with pytest.raises(RequestRefused) as error:
        book.coordinator.abort(book.now, "a test")
    assert refusal(error) == "job_over"
    assert error.value.message == "job run is completed: training completed"
    assert book.new_facts() == []


@pytest.mark.parametrize("act", ["drain", "evict", "pause", "abort", "rescale"])
@pytest.mark.parametrize("reason", ["", " \n", "x" * 100_000])
def test_every_decision_has_a_reason_in_words_that_can_be_kept(act: str, reason: str) -> None:
    book = formed("a", "b")
    arguments = ("b", book.now, reason) if act in {"drain", "evict"} else (book.now, reason)
    getattr(book.coordinator, act)(*arguments)
    for fact in book.new_facts():
        said = getattr(fact, "reason", "nothing to say")
        assert 0 < len(said.strip()) <= REASON_CHARS_MAX + 50
    assert book.coordinator.reason or act in {"drain", "evict"}


def test_rescale_reason_names_the_first_of_many_reasons() -> None:
    names = [f"w{number:03}" for number in range(300)]
    book = formed(*names, **PATIENT)
    book.die(*names[:200])
    (started,) = book.wait(0.1)
    assert isinstance(started, RescaleStarted)
    assert started.reason.count("failed") == REASONS_MAX
    book.join(*[f"n{number}" for number in range(100)])
    book.coordinator.rescale(book.now, "more")
    assert book.last(RescaleStarted).reason.endswith("n7 and 92 more joined")


# Peer reports.


def test_peer_report_leads_to_another_world_of_the_same_workers() -> None:
    book = formed("a", "b")
    book.report_peer("a", "b", why="it closed the connection")
    (started,) = book.wait(1.1)
    assert isinstance(started, RescaleStarted)
    assert (started.type, started.reason) == (RescaleType.REPLACE, "a cannot continue: it closed the connection")
    book.complete_attempt(3)
    assert (book.world, book.coordinator.generation) == (["a", "b"], 2)


def test_peer_report_about_an_older_world_or_by_an_outsider_is_ignored() -> None:
    book = formed("a", "b")
    book.join("c")
    assert book.report_peer("a", "b", back=1) + book.report_peer("c", "a") == []
    assert book.wait(1.0) == []


def test_acknowledged_peer_report_survives_a_daemon_restart() -> None:
    book = formed("a", "b")
    book.report_peer("a", "b")
    book.restart()
    book.reconnect("a", "b")
    started = book.wait(0.3)[-1]
    assert isinstance(started, RescaleStarted)
    assert started.reason == "a cannot continue: it got no answer"


def test_standstill_is_recorded_for_the_reporter_and_proves_nothing_about_the_peer() -> None:
    book = formed("a", "b", "c", **PATIENT)
    book.restart()
    book.reconnect("a", "b", "c")
    assert book.report_standstill("a", "b") == [WorkerStoodStill("a", 1, "b", 12.3)]
    assert book.wait(3.0) == []
    assert book.world == ["a", "b", "c"]


def test_standstill_after_an_older_world_is_recorded_and_one_that_cannot_have_been_is_not() -> None:
    book = formed("a", "b", **PATIENT)
    book.die("b")
    book.wait(1.0)
    book.complete_attempt(3)
    assert book.report_standstill("a", generation=1) == [WorkerStoodStill("a", 1, "", 12.3)]
    assert book.report_standstill("a", generation=0) + book.report_standstill("a", generation=3) == []


def test_standstill_of_an_outsider_or_another_incarnation_is_ignored() -> None:
    book = formed("a", "b")
    assert book.report_standstill("c", "b") + book.report_standstill("a", "b", life=2) == []


def test_peer_report_explained_by_a_failure_is_not_a_second_reason() -> None:
    book = formed("a", "b", "c", **PATIENT)
    book.report_peer("a", "c", why="it closed the connection")
    book.die("c")
    book.report_peer("b", "c", why="it closed the connection")
    book.wait(1.0)
    assert book.last(RescaleStarted).reason == "c failed: its process has ended"


def test_peer_report_delays_the_rescale_for_further_evidence() -> None:
    """A host that is gone is known to be when the daemon's own connection breaks, too."""
    book = formed("a", "b", "c", **PATIENT)
    book.report_peer("a", "c")
    assert book.wait(0.9) == []
    book.lose("c")
    book.wait(CONFIRM_S + 0.1)
    assert book.last(WorkerFailed) == WorkerFailed("c", 2, "unreachable from the daemon and from a")
    assert book.last(RescaleStarted).removed == ["c"]


def test_peer_reports_with_steps_in_between_evict_no_worker() -> None:
    """That there were steps is often known only when all say where they have stopped."""
    book = formed("a", "b", **PATIENT)
    for step in range(1, 6):
        book.report_peer("a", "b")
        book.wait(1.1)
        book.stop("a", "b", stop=StopReport(step, holds_state=True))
        assert book.world == ["a", "b"]
    assert book.coordinator.generation == 6


def test_where_no_worker_is_left_of_a_world_the_reason_says_so() -> None:
    book = formed("a", "b", **PATIENT)
    book.join("c")
    book.die("a", "b")
    book.wait(WINDOW_S)
    reason = book.last(RescaleStarted).reason
    assert "no worker of world 1 remains" in reason
    assert reason.endswith("c joined")


def test_deaths_that_peers_notice_first_leave_no_peer_reports() -> None:
    """Without a stop it may not be known that there were steps in between."""
    book = formed("a", "b", "c", "d", "e", use_synchronous_rescaling=False, **PATIENT)
    for victim in "abc":
        book.report_peer("d", victim)
        book.die(victim)
        book.wait(1.0, still=True)
    assert book.world == ["d", "e"]
    assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)] == ["a", "b", "c"]


def test_voided_steps_evict_no_worker_and_form_a_world_of_the_same_members_each_time() -> None:
    book = formed("a", "b", "c", **PATIENT)
    for _ in range(5):
        for worker in "abc":
            assert not [fact for fact in book.report_peer(worker, why="b voided it", voided=True) if is_failure(fact)]
        book.wait(0.1)
        assert book.last(RescaleStarted).reason == "b voided it"
        book.complete_attempt()
        assert book.world == ["a", "b", "c"]
    assert not any(map(is_failure, book.facts))


def test_voided_step_of_an_older_world_is_ignored() -> None:
    book = formed("a", "b", **PATIENT)
    assert book.report_peer("a", voided=True, back=1) == []
    book.wait(0.1)
    assert not book.last(RescaleStarted).reason.startswith("it got")


def is_failure(fact: object) -> bool:
    return isinstance(fact, WorkerFailed)


def test_workers_that_reach_each_other_in_no_world_are_parted() -> None:
    book = formed("a", "b", "c", **PATIENT)
    for _ in range(2):
        book.report_peer("b", "c")
        book.report_peer("c", "b")
        book.wait(1.1)
        book.complete_attempt()
    assert book.report_peer("b", "c") == [WorkerFailed("c", 2, "most peer reports in 3 consecutive worlds")]
    book.wait(1.1)
    book.complete_attempt()
    assert book.world == ["a", "b"]


def test_a_hub_that_no_worker_reaches_is_the_one_to_go() -> None:
    book = formed("a", "b", "c", **PATIENT)
    for _ in range(2):
        book.report_peer("b", "a")
        book.report_peer("c", "a")
        book.wait(1.1)
        book.complete_attempt()
    (failed,) = book.report_peer("c", "a")
    assert isinstance(failed, WorkerFailed)
    assert failed.worker_id == "a"


def test_a_step_in_between_is_proof_that_they_do_reach_each_other() -> None:
    book = formed("a", "b", **PATIENT)
    for step in range(10):
        book.report_peer("a", "b")
        book.wait(1.1)
        book.complete_attempt(step)
        book.heartbeat("a", "b", step=step + 1)
    assert "WorkerFailed" not in kinds(book.facts)


# Learning rate and batch.


def test_with_a_fixed_batch_the_rate_stays() -> None:
    book = Playbook()
    book.form_world("a", "b", learning_rate=0.1, global_batch_size=64)
    book.join("c", "d")
    book.wait(WINDOW_S)
    completed = book.complete_attempt(learning_rate=0.1, global_batch_size=64)
    assert (completed.learning_rate, completed.global_batch_size) == (0.1, 64)


def test_a_schedule_of_the_script_is_kept_with_a_fixed_batch() -> None:
    book = Playbook()
    book.form_world("a", "b", learning_rate=0.1, global_batch_size=64)
    book.die("b")
    book.wait(0.1)
    assert book.complete_attempt(9, learning_rate=0.01, global_batch_size=64).learning_rate == 0.01


def test_the_settings_stand_in_for_a_worker_that_says_nothing() -> None:
    book = Playbook(base_learning_rate=0.3, global_batch_size=128)
    completed = book.form_world("a")
    assert (completed.learning_rate, completed.global_batch_size) == (0.3, 128)


@pytest.mark.parametrize(("strategy", "rate"), [("linear", 0.2), ("square_root", 0.1 * 2**0.5), ("none", 0.1)])
def test_with_a_batch_that_grows_the_rate_follows_from_the_base(strategy: str, rate: float) -> None:
    book = Playbook(scale_batch_with_world=True, lr_adaptation_strategy=strategy)
    book.form_world("a", "b", learning_rate=0.1, global_batch_size=64)
    book.join("c", "d")
    book.wait(WINDOW_S)
    completed = book.complete_attempt(learning_rate=0.1, global_batch_size=64)
    assert completed.learning_rate == pytest.approx(rate)
    assert completed.global_batch_size == 128


def test_a_hundred_rescales_do_not_drift() -> None:
    book = Playbook(
        scale_batch_with_world=True, lr_adaptation_strategy="square_root", stability_window_ms=500, **PATIENT
    )
    book.form_world("a", "b", "c", learning_rate=0.1, global_batch_size=100)
    for number in range(100):
        book.join(f"n{number}")
        book.wait(0.5)
        book.complete_attempt(number)
        book.leave(f"n{number}")
        book.wait(0.1)
        book.complete_attempt(number)
    assert book.last(RescaleCompleted).delta.generation == 201
    assert (book.coordinator.training.learning_rate, book.coordinator.training.global_batch_size) == (0.1, 100)


def test_a_base_in_the_settings_goes_before_that_of_the_first_world() -> None:
    book = Playbook(scale_batch_with_world=True, base_world_size=4, base_learning_rate=0.4, global_batch_size=400)
    completed = book.form_world("a", "b", learning_rate=9.0, global_batch_size=9)
    assert (completed.learning_rate, completed.global_batch_size) == (0.2, 200)


def test_the_base_outlives_the_daemon() -> None:
    book = Playbook(scale_batch_with_world=True)
    book.form_world("a", "b", learning_rate=0.1, global_batch_size=64)
    book.restart()
    book.reconnect("a", "b")
    book.join("c")
    book.wait(WINDOW_S)
    assert book.complete_attempt(learning_rate=7.0).learning_rate == pytest.approx(0.15)


# Settings.


def test_invalid_settings_change_nothing() -> None:
    book = formed("a")
    with pytest.raises(ConfigError):
        book.coordinator.configure({"min_workers": 0})
    assert book.coordinator.config.min_workers == 1


def test_a_spare_is_taken_in_when_there_may_be_more() -> None:
    book = Playbook(max_workers=1)
    book.join("a", "b")
    book.complete_attempt()
    book.wait(100.0)
    book.coordinator.configure({"max_workers": 2})
    assert kinds(book.wait(0.3)) == ["RescaleStarted"]


# A daemon that dies, in each stage.


def test_workers_come_back_to_a_new_daemon_with_the_same_ranks_and_without_a_rescale() -> None:
    book = formed("a", "b", "c")
    book.restart()
    assert book.wait(5.0) == []
    assert book.reconnect("c", "a", "b") == []
    assert book.wait(100.0) == []
    assert (book.world, book.coordinator.generation) == (["a", "b", "c"], 1)


def test_worker_that_does_not_come_back_to_a_new_daemon_within_the_grace_has_failed() -> None:
    book = formed("a", "b", "c")
    book.restart()
    book.reconnect("a", "c")
    assert book.wait(14.0) == [], "silence alone is to be expected"
    failed, started = book.wait(2.0)
    assert isinstance(failed, WorkerFailed)
    assert failed.worker_id == "b"
    assert isinstance(started, RescaleStarted)


def test_a_daemon_that_dies_over_the_first_workers_lets_them_wait_again_in_their_order() -> None:
    book = Playbook()
    book.join("z")
    book.wait(1.0)
    book.join("a")
    book.restart()
    book.reconnect("a", "z")
    book.wait(WINDOW_S)
    assert book.complete_attempt().added == ["z", "a"]


@pytest.mark.parametrize("stage", Stage)
def test_a_daemon_that_dies_over_a_rescale_begins_it_again_when_all_are_back(stage: Stage) -> None:
    book = formed("a", "b")
    book.join("c")
    book.wait(WINDOW_S)
    if stage is Stage.SYNCHRONISING:
        book.stop("a", "b", stop=StopReport(3, holds_state=True))
        book.stop("c", stop=StopReport(0, holds_state=False))
    book.restart()
    book.reconnect("a", "b")
    assert book.coordinator.attempt is None
    with pytest.raises(RequestRefused):
        book.stop("a", stop=StopReport(3, holds_state=True), number=2)
    book.wait(1.0)
    assert book.coordinator.attempt is None
    book.new_facts()
    (started,) = book.reconnect("c")
    assert isinstance(started, RescaleStarted)
    assert (started.attempt, started.added, started.reason) == (3, ["c"], "c joined")
    assert (book.complete_attempt(3).step, book.coordinator.generation) == (3, 2)


def test_worker_that_does_not_come_back_to_a_rescale_is_left_out_of_it() -> None:
    book = formed("a", "b")
    book.join("c")
    book.wait(WINDOW_S)
    book.restart()
    book.reconnect("a", "c")
    started = book.wait(16.0)[-1]
    assert isinstance(started, RescaleStarted)
    assert (started.added, started.removed) == (["c"], ["b"])


def test_a_daemon_that_dies_between_a_failure_and_its_rescale_goes_on_with_it() -> None:
    book = formed("a", "b", "c")
    book.die("b")
    book.restart()
    book.reconnect("a", "c")
    started = book.wait(0.3)[-1]
    assert isinstance(started, RescaleStarted)
    assert (started.removed, started.reason) == (["b"], "b failed: its process has ended")


def test_member_without_a_record_is_missing_after_a_restart() -> None:
    book = formed("a", "b")
    book.settle()
    del book.stored["elastic/run/member/b"]
    book.restart()
    book.reconnect("a")
    started = book.wait(0.3)[-1]
    assert isinstance(started, RescaleStarted)
    assert (started.removed, started.reason) == (["b"], "b is missing")


def test_all_may_die_while_the_daemon_is_down() -> None:
    book = formed("a", "b", **PATIENT)
    book.restart()
    assert kinds(book.wait(16.0)) == ["WorkerFailed", "WorkerFailed", "JobWaiting"]
    book.join("c")
    book.complete_attempt()
    assert book.world == ["c"]


def test_generations_and_attempts_go_on_where_they_were() -> None:
    book = formed("a")
    for number in range(2, 6):
        book.restart()
        book.reconnect("a")
        book.coordinator.rescale(book.now, "a test")
        completed = book.complete_attempt()
        delta = completed.delta
        assert (completed.attempt, delta.base_generation, delta.generation) == (number, number - 1, number)


# Newcomers that die of being taken in.


def _crash_in_turn(book: Playbook, for_s: float) -> float:
    """Two joiners die in every attempt, one after the other, and come back; returns how long training stood still."""
    lives, asked, stood_s = {"x": 1, "y": 1}, {"x": 0, "y": 0}, 0.0
    dies_at, back_at = dict.fromkeys("xy", NEVER), dict.fromkeys("xy", NEVER)
    book.join("x", "y")
    end = book.time + for_s
    while book.time < end:
        book.wait(0.1)
        attempt = book.coordinator.attempt
        stood_s += 0.1 if attempt else 0.0
        if attempt is not None and attempt.stage is Stage.STOPPING:
            book.stop(*(name for name in "abc" if name not in attempt.stops), stop=StopReport(1, holds_state=True))
        attempt = book.coordinator.attempt
        for name in lives:
            if attempt is not None and name in attempt and asked[name] != attempt.number:
                asked[name], dies_at[name] = attempt.number, book.time + (3.0 if name == "x" else 5.0)
            if book.time >= dies_at[name]:
                dies_at[name], back_at[name] = NEVER, book.time + 1.0
                book.die(name, life=lives[name])
            if book.time >= back_at[name]:
                back_at[name], lives[name] = NEVER, lives[name] + 1
                book.join(name, life=lives[name])
    return stood_s


@pytest.mark.parametrize("window_ms", [0, 1_000, 30_000])
def test_joiners_that_die_in_turn_while_they_are_taken_in_do_not_keep_other_workers_from_training(
    window_ms: int,
) -> None:
    book = formed("a", "b", "c", stability_window_ms=window_ms)
    assert _crash_in_turn(book, 1_200.0) < 240.0
    assert book.coordinator.phase is not Phase.ABORTED


def test_where_a_joiner_dies_in_an_attempt_other_workers_in_it_come_in_and_worker_that_came_later_waits() -> None:
    book = formed("a")
    book.join("b", "x")
    book.wait(31.0)
    book.join("y")
    book.die("x")
    book.wait(0.1)
    assert book.last(RescaleStarted).added == ["b"]
    book.complete_attempt(3)
    assert book.world == ["a", "b"]
    book.wait(31.0, still=True)
    book.complete_attempt(4)
    assert book.world == ["a", "b", "y"]


def test_where_a_member_dies_too_any_worker_that_waits_takes_its_place() -> None:
    book = formed("a", "b")
    book.join("x")
    book.wait(31.0)
    book.join("y")
    book.die("x", "b")
    book.wait(0.1)
    assert book.last(RescaleStarted).added == ["y"]


# Worlds that come to nothing.


def test_reporter_is_evicted_when_worlds_fail_and_no_report_names_a_peer() -> None:
    book = formed("a", "b", "c")
    for _ in range(REPORTED_WORLDS_MAX):
        assert "b" in book.world
        book.report_peer("b", why="it has no memory for it")
        book.wait(0.1)
        book.complete_attempt(0)
    assert book.world == ["a", "c"]
    assert book.last(WorkerFailed).reason == "most peer reports in 3 consecutive worlds"


def test_worker_that_cannot_go_on_because_other_workers_went_is_not_evicted_for_that() -> None:
    book = formed("a", "b", "c", "d", "e", failure_tolerance_percentage=100, max_consecutive_failures=100)
    for name in "bcd":
        book.report_peer("a", why=f"{name} left the world in good order")
        book.leave(name)
        book.wait(0.1)
        book.complete_attempt(0)
    assert book.world == ["a", "e"]


def test_peer_reports_about_a_former_member_are_dropped() -> None:
    book = formed("a", "b", "x", failure_tolerance_percentage=100)
    for _ in range(2):
        book.report_peer("a", "x")
        book.wait(1.2)
        book.complete_attempt(0)
    book.coordinator.drain("x", book.now, "the night")
    book.wait(0.1)
    book.complete_attempt(0)
    assert (book.world, "x" in book.coordinator.members) == (["a", "b"], True)
    book.report_peer("a", "b")
    book.wait(1.2)
    assert book.coordinator.phase is Phase.RESCALING


# Time in which the daemon was stalled, or the job was paused.


def test_a_job_that_waits_is_not_given_up_for_the_time_in_which_the_daemon_did_not_get_its_turn() -> None:
    book = formed("a", "b", min_workers=2)
    book.die("b")
    book.wait(1.0)
    book.stall_daemon(3_000.0)
    assert not book.coordinator.over
    book.wait(700.0)
    assert book.coordinator.over


def test_a_job_that_was_laid_to_rest_is_not_given_up_for_too_few_workers() -> None:
    book = formed("a", "b", min_workers=2)
    book.coordinator.pause(book.now, "maintenance")
    book.die("b")
    book.wait(3_000.0)
    book.coordinator.resume(book.now, "")
    book.wait(590.0)
    assert not book.coordinator.over
    book.wait(11.0)
    assert book.coordinator.over


def test_worker_that_is_stalled_already_goes_when_the_policy_becomes_so() -> None:
    book = formed("a", "b", stall_timeout_ms=5_000)
    first = book.coordinator.generation * COLLECTIVES_PER_WORLD
    for second in range(1, 10):
        book.heartbeat("a", collective_seq=first + second)
        book.heartbeat("b", collective_seq=first + 1)
        book.wait(1.0, still=True)
    assert "WorkerStalled" in kinds(book.facts)
    book.coordinator.configure({**book.coordinator.settings, "evict_stalled": True})
    book.wait(1.0, still=True)
    assert book.last(WorkerFailed).worker_id == "b"


# What happened while there was no daemon.


@pytest.mark.parametrize("how", ["refused", "out of its grace"])
def test_worker_that_went_while_there_was_no_daemon_may_have_left_in_good_order_and_does_not_count(how: str) -> None:
    book = formed("a", "b", "c", "d", failure_tolerance_percentage=0)
    book.restart()
    book.reconnect("a", "d")
    if how == "refused":
        book.wait(2.5, silent="bc")
        book.refuse_probe("b")
        book.refuse_probe("c")
    book.wait(16.0, silent="bc")
    failed = [fact for fact in book.facts if isinstance(fact, WorkerFailed)]
    assert [fact.worker_id for fact in failed] == ["b", "c"]
    assert all("; not counted as a failure: it disappeared while the daemon was down" in fact.reason for fact in failed)
    book.complete_attempt(7)
    assert book.world == ["d", "a"] or book.world == ["a", "d"]


def test_reported_death_counts_though_the_daemon_was_down() -> None:
    book = formed("a", "b", "c", "d")
    book.restart()
    book.reconnect("a", "d")
    book.die("b", "c")
    assert book.coordinator.phase is Phase.ABORTED


def test_worker_that_was_back_and_is_lost_again_counts() -> None:
    book = formed("a", "b", "c", "d")
    book.restart()
    book.reconnect("a", "b", "c", "d")
    book.lose("b", "c")
    book.refuse_probe("b")
    book.refuse_probe("c")
    assert book.coordinator.phase is Phase.ABORTED


def test_attempt_interrupted_by_a_restart_is_aborted_once() -> None:
    book = formed("a", "b")
    book.coordinator.rescale(book.now, "a test")
    book.settle()
    for _ in range(2):
        book.restart()
        book.settle()
    book.reconnect("a", "b")
    book.wait(0.1)
    aborted = [fact for fact in book.facts if isinstance(fact, RescaleAborted)]
    assert aborted == [RescaleAborted(2, "the daemon restarted")]
    assert book.last(RescaleStarted).attempt == 3


# Steps that are lost with the last worker that holds them.


@pytest.mark.parametrize("said", ["in its stop", "in its goodbye"])
def test_steps_reported_only_in_the_attempt_count_as_lost_progress(said: str) -> None:
    book = formed("a", "b", rescale_silence_ms=60_000, **PATIENT)
    book.join("c")
    book.wait(31.0)
    book.stop("b", stop=StopReport(9, holds_state=True))
    if said == "in its stop":
        book.stop("a", stop=StopReport(9, holds_state=True))
        book.die("a", "b")
    else:
        book.die("b")
        book.leave("a", step=9)
    book.wait(WINDOW_S)
    book.complete_attempt(0)
    assert book.last(ProgressLost) == ProgressLost(9, 0, "no remaining worker holds them")


def test_aborted_job_ends_after_the_last_reported_step() -> None:
    book = formed("a", "b", min_workers=2)
    book.coordinator.rescale(book.now, "a test")
    book.stop("a", "b", stop=StopReport(9, holds_state=True, finished=True))
    book.coordinator.rescale(book.now, "once more")
    book.stop("a", stop=StopReport(12, holds_state=True))
    book.coordinator.abort(book.now, "")
    book.settle()
    assert book.last(JobAborted).step == 12


@pytest.mark.parametrize("heard", ["its library", "its pulse"])
def test_worker_seen_since_the_restart_is_not_taken_for_gone_before_it(heard: str) -> None:
    book = formed("a", "b", "c", "d")
    book.restart()
    book.reconnect("a", "d")
    book.heartbeat("b", "c") if heard == "its library" else book.pulse("b", "c")
    book.wait(20.0, silent="bc")
    assert book.coordinator.phase is Phase.ABORTED


def test_however_many_joiners_have_died_the_next_one_is_taken_in_within_a_minute_or_so() -> None:
    book = formed("a")
    book.coordinator.failed_join_attempts = 100_000
    book.join("b")
    book.wait(30.0 + 2.0**FAILED_JOINS_DOUBLED_MAX + 1.0, still=True)
    assert book.last(RescaleStarted).added == ["b"]


def test_an_attempt_that_its_own_world_breaks_keeps_no_joiner_out() -> None:
    book = formed("a", "b", use_synchronous_rescaling=False, max_workers=4)
    for member in book.coordinator.members.values():
        member.with_data = True
    book.join("x")
    book.wait(31.0)
    assert book.last(RescaleStarted).in_background
    book.join("y")
    book.report_peer("a", why="it is a bad day")
    book.wait(0.1)
    assert book.last(RescaleStarted).added == ["x", "y"]
