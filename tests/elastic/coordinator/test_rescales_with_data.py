"""Rescales of jobs whose workers hold training data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from forged.elastic.messages import (
    AttemptProgress,
    JobCompleted,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerFailed,
    WorkerStalled,
)
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import RECEIVED_BYTES_MIN, Attempt, Stage, StopReport
from forged.elastic.status.stall_report import describe_stall
from forged.errors import RequestRefused
from forged.jobs.model import SettingValue
from tests.elastic.coordinator_playbook import JOB, Playbook, incarnation, newcomer

SOON: dict[str, SettingValue] = {"stability_window_ms": 0, "failure_window_ms": 0}


def join(book: Playbook, *names: str, with_data: bool = True) -> None:
    for name in names:
        member = newcomer(name, now=book.time)
        member.with_data = with_data
        book.coordinator.join(member, book.now)
        book.settle()


def formed(*names: str, least: int = 0, **settings: SettingValue) -> Playbook:
    """A world in which all hold data; `least` are needed from then on, or all of them."""
    book = Playbook(**{**SOON, "min_workers": len(names), **settings})
    join(book, *names)
    book.wait(0.1)
    book.complete_attempt()
    book.new_facts()
    book.coordinator.configure({**book.coordinator.settings, "min_workers": least or len(names)})
    return book


def stop(book: Playbook, *names: str) -> None:
    book.stop(*names, stop=StopReport(0, holds_state=True))


def members(book: Playbook, name: str) -> tuple[list[str], list[str]]:
    """The target and the draining members of the attempt, as a worker reads them."""
    found = book.coordinator.attempt_members(name, incarnation(name))
    return [worker.id for worker in found.target], [worker.id for worker in found.draining]


def progress_of(book: Playbook, name: str, state: int, data: int, **fields: Any) -> AttemptProgress:
    number = book.coordinator.attempts
    return AttemptProgress(JOB, name, incarnation(name), number, state, data_bytes=data, **fields)


def report_progress(
    book: Playbook, *names: str, state: int = 0, data: int = 0, waits: bool = False, problem: str = ""
) -> None:
    for name in names:
        signal = progress_of(book, name, state, data, is_waiting=waits, problem=problem)
        book.coordinator.attempt_progress(signal, book.now)


def failed(book: Playbook) -> list[str]:
    return [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)]


def wait_saying(book: Playbook, seconds: int, *names: str, silent: Sequence[str] = ()) -> None:
    """Time passes, and these workers report every second that they wait."""
    for _ in range(seconds):
        report_progress(book, *names, waits=True)
        book.wait(1.0, silent=silent)


class TestCommit:
    def test_waits_for_all_workers_that_hold_data_though_they_have_the_state(self) -> None:
        book = formed("a", "b")
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b")
        attempt = book.coordinator.attempt
        assert attempt is not None
        assert (attempt.stage, attempt.waiting_for) == (Stage.SYNCHRONISING, ["a", "b"])
        book.ready("a")
        assert book.coordinator.attempt is attempt
        book.ready("b")
        assert book.last(RescaleCompleted).attempt == attempt.number

    def test_waits_for_no_worker_without_data_state_holder(self) -> None:
        book = Playbook(**SOON, min_workers=2)
        join(book, "a")
        join(book, "b", with_data=False)
        book.wait(0.1)
        book.complete_attempt()
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b")
        attempt = book.coordinator.attempt
        assert attempt is not None
        assert attempt.waiting_for == ["a"]

    def test_does_not_go_ahead_of_data_though_no_worker_is_to_stop(self) -> None:
        book = formed("a", use_synchronous_rescaling=False)
        before = book.coordinator.generation
        book.coordinator.rescale(book.now, "a wish")
        assert book.coordinator.attempt is not None
        assert book.coordinator.generation == before
        book.ready("a")
        assert book.coordinator.generation == before + 1


def trains_on(*names: str, **settings: SettingValue) -> Playbook:
    """An asynchronous world in which all hold data; some of them may drain."""
    book = formed(*names, use_synchronous_rescaling=False)
    book.coordinator.configure({**book.coordinator.settings, "min_workers": 1, **settings})
    return book


def under_way(book: Playbook) -> Attempt:
    attempt = book.coordinator.attempt
    assert attempt is not None
    return attempt


class TestBackgroundRescale:
    """In asynchronous mode data moves while training continues."""

    def test_is_where_data_moves_for_worker_that_joins(self) -> None:
        book = trains_on("a", "b")
        join(book, "c")
        book.wait(0.1)
        started = book.last(RescaleStarted)
        assert (started.in_background, started.added) == (True, ["c"])
        attempt = under_way(book)
        assert (attempt.stage, attempt.waiting_for) == (Stage.TRANSFERRING, ["a", "b", "c"])
        assert book.coordinator.synchronising is None

    def test_ends_with_the_commit_when_all_have_answered(self) -> None:
        book = trains_on("a", "b")
        join(book, "c")
        book.wait(0.1)
        for name in "ca":
            book.ready(name)
            assert book.world == ["a", "b"]
        book.ready("b")
        completed = book.last(RescaleCompleted)
        assert book.world == ["a", "b", "c"]
        assert (completed.step, completed.epoch, completed.attempt) == (None, None, book.coordinator.attempts)

    def test_has_steps_in_it_that_are_known_of(self) -> None:
        book = trains_on("a", "b")
        book.coordinator.rescale(book.now, "a wish")
        book.pulse("a", "b", step=7)
        assert book.coordinator.training.current_step == 7
        assert book.coordinator.trains

    def test_stalled_worker_is_reported_during_a_background_attempt(self) -> None:
        book = trains_on("a", "b", stall_timeout_ms=5_000, rescale_silence_ms=60_000)
        book.coordinator.rescale(book.now, "a wish")
        book.heartbeat("a", "b", collective_seq=5_000)
        book.heartbeat("a", collective_seq=5_001)
        book.wait(10.0, still=True)
        assert [fact.worker_id for fact in book.facts if isinstance(fact, WorkerStalled)] == ["b"]
        assert describe_stall(book.coordinator, book.time) == (
            "attempt 2 waits for a, b to receive training data while training continues "
            "(10 s so far, a, b will fail in 50 s if nothing changes); "
            "b stalled for 10 s after step 0, alive without progress: `forgectl workers stack b` shows where, "
            "`forgectl workers evict b` if it hangs"
        )

    def test_takes_no_word_that_a_worker_has_stopped(self) -> None:
        book = trains_on("a", "b")
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b")
        assert under_way(book).stops == {}
        assert book.world == ["a", "b"]
        assert under_way(book).waiting_for == ["a", "b"]

    def test_waits_for_no_worker_without_data(self) -> None:
        book = trains_on("a")
        join(book, "b", with_data=False)
        book.wait(0.1)
        assert under_way(book).waiting_for == ["a"]
        book.ready("a")
        assert book.world == ["a", "b"]

    def test_lets_worker_that_comes_meanwhile_wait_for_the_commit(self) -> None:
        book = trains_on("a")
        join(book, "b")
        book.wait(0.1)
        number = book.coordinator.attempts
        join(book, "c")
        book.wait(5.0)
        assert book.coordinator.attempts == number
        book.ready("a", "b")
        book.wait(0.1)
        assert (under_way(book).added, under_way(book).in_background) == (("c",), True)

    def test_goes_on_without_the_worker_that_was_to_be_taken_in(self) -> None:
        book = trains_on("a", "b")
        join(book, "c")
        book.wait(0.1)
        book.die("c")
        book.wait(0.1)
        assert book.last(RescaleAborted).attempt == under_way(book).number - 1
        assert (under_way(book).target, under_way(book).in_background) == (("a", "b"), True)

    def test_background_attempt_takes_over_shards_of_a_draining_worker(self) -> None:
        book = trains_on("a", "b")
        book.coordinator.drain("b", book.now, "the spot price")
        assert under_way(book).in_background
        assert members(book, "a") == (["a"], ["b"])
        book.ready("a", "b")
        assert book.last(RescaleCompleted).reason == "draining b: the spot price"

    def test_does_not_outlast_a_member_of_the_world(self) -> None:
        book = trains_on("a", "b", "c")
        book.coordinator.rescale(book.now, "a wish")
        book.die("b")
        book.wait(0.1)
        started = book.last(RescaleStarted)
        assert (started.in_background, started.removed) == (False, ["b"])
        assert under_way(book).stage is Stage.STOPPING
        book.complete_attempt(step=3)
        assert book.last(RescaleCompleted).step == 3
        assert book.world == ["a", "c"]

    def test_does_not_outlast_a_world_that_cannot_go_on(self) -> None:
        book = trains_on("a", "b")
        join(book, "c")
        book.wait(0.1)
        book.report_peer("a", why="the line is cut")
        book.wait(0.1)
        assert not book.last(RescaleStarted).in_background
        assert under_way(book).added == ("c",)

    def test_does_not_begin_in_a_world_that_cannot_go_on_until_another_holds(self) -> None:
        book = trains_on("a", "b")
        book.report_peer("a", why="the line is cut")
        book.wait(0.1)
        assert not under_way(book).in_background
        book.coordinator.rescale(book.now, "a wish")
        assert not under_way(book).in_background
        book.complete_attempt()
        book.coordinator.rescale(book.now, "a wish")
        assert under_way(book).in_background

    def test_is_not_where_a_worker_wishes_that_all_stop(self) -> None:
        book = trains_on("a", "b")
        book.coordinator.rescale(book.now, "a wish", synchronous=True)
        assert not under_way(book).in_background
        book.complete_attempt()
        book.coordinator.rescale(book.now, "a wish")
        assert under_way(book).in_background

    def test_is_not_where_no_worker_trains_yet(self) -> None:
        book = Playbook(**SOON, use_synchronous_rescaling=False)
        join(book, "a")
        book.wait(0.1)
        assert not under_way(book).in_background

    def test_is_not_where_too_few_are_left(self) -> None:
        book = trains_on("a", "b", min_workers=2)
        book.coordinator.rescale(book.now, "a wish")
        book.die("b")
        book.wait(0.1)
        assert book.coordinator.phase is Phase.WAITING
        assert not book.coordinator.trains
        join(book, "c")
        book.wait(0.1)
        assert not under_way(book).in_background

    def test_is_left_by_a_daemon_that_comes_back_and_does_not_know(self) -> None:
        book = trains_on("a", "b")
        book.coordinator.rescale(book.now, "a wish")
        book.restart()
        book.reconnect("a", "b")
        book.wait(0.1)
        assert not under_way(book).in_background
        book.complete_attempt()
        assert book.world == ["a", "b"]

    def test_ends_with_the_job(self) -> None:
        book = trains_on("a", "b")
        book.coordinator.rescale(book.now, "a wish")
        book.heartbeat("b", step=9, is_done=True)
        book.leave("a", done=True, step=9)
        assert book.coordinator.phase is Phase.COMPLETED
        assert book.last(JobCompleted).step == 9
        assert book.last(RescaleAborted).attempt == 2

    def test_fails_worker_that_neither_fetches_nor_waits(self) -> None:
        book = trains_on("a", "b", rescale_silence_ms=2_000)
        join(book, "c")
        book.wait(0.1)
        for second in range(10):
            report_progress(book, "a", waits=True)
            report_progress(book, "b", data=second * RECEIVED_BYTES_MIN)
            book.wait(1.0)
        assert failed(book) == []
        wait_saying(book, 3, "a", "b")
        assert failed(book) == ["c"]

    def test_fails_worker_that_all_wait_for_however_far_it_has_come_in_training(self) -> None:
        book = trains_on("a", "b", rescale_silence_ms=2_000)
        book.coordinator.rescale(book.now, "a wish")
        book.heartbeat("b", collective_seq=1_000_000)
        wait_saying(book, 3, "a")
        assert failed(book) == ["b"]


class TestAttemptMembers:
    def test_are_workers_that_hold_data_by_rank(self) -> None:
        book = Playbook(**SOON, min_workers=3)
        join(book, "a")
        join(book, "b", with_data=False)
        join(book, "c")
        book.wait(0.1)
        assert members(book, "c") == (["a", "c"], [])

    @pytest.mark.parametrize("least", [1, 3], ids=["enough stay", "too few stay"])
    def test_attempt_members_list_draining_workers_apart(self, least: int) -> None:
        book = formed("a", "b", "c", least=least)
        book.coordinator.drain("b", book.now, "")
        book.wait(0.1)
        assert members(book, "a") == (["a", "c"], ["b"])

    @pytest.mark.parametrize("name", ["a", "z"])
    def test_attempt_members_are_shown_to_members_only(self, name: str) -> None:
        book = formed("a")
        with pytest.raises(RequestRefused) as error:
            members(book, name)
        assert error.value.code == "attempt_over"


class TestLeaver:
    def test_has_its_data_taken_over_at_once(self) -> None:
        book = formed("a", "b", least=1)
        b = book.coordinator.members["b"]
        book.coordinator.drain("b", book.now, "the spot price")
        book.wait(0.1)
        assert book.last(RescaleStarted).reason == "draining b: the spot price"
        stop(book, "a", "b")
        book.ready("a")
        assert book.world == ["a", "b"]
        assert not book.coordinator.may_leave(b), "it has said nothing of its own shards"
        book.ready("b")
        assert book.world == ["a"]
        assert book.coordinator.may_leave(b)

    def test_from_too_few_has_its_data_taken_over_and_goes_then(self) -> None:
        book = formed("a", "b")
        b = book.coordinator.members["b"]
        book.coordinator.drain("b", book.now, "the spot price")
        assert not book.coordinator.may_leave(b)
        book.wait(0.1)
        book.complete_attempt()
        assert book.world == ["a", "b"]
        assert book.coordinator.may_leave(b)
        attempts = book.coordinator.attempts
        book.wait(600.0)
        assert book.coordinator.attempts == attempts, "once is enough"

    def test_has_other_workers_go_on_meanwhile_where_no_worker_stops(self) -> None:
        book = formed("a", "b", least=1, use_synchronous_rescaling=False)
        book.coordinator.drain("b", book.now, "the spot price")
        book.wait(0.1)
        started = book.last(RescaleStarted)
        assert (started.in_background, started.removed, started.draining) == (True, ["b"], ["b"])
        book.ready("a", "b")
        assert book.world == ["a"]

    def test_with_the_only_state_has_other_workers_stop(self) -> None:
        book = formed("b", use_synchronous_rescaling=False)
        join(book, "a")
        book.coordinator.drain("b", book.now, "the spot price")
        book.wait(0.1)
        assert not book.last(RescaleStarted).in_background
        book.complete_attempt(7)
        assert book.last(RescaleSynchronising).source.id == "b"
        assert (book.world, book.coordinator.training.current_step) == (["a"], 7)

    def test_second_drain_starts_no_further_attempt(self) -> None:
        book = formed("a", "b")
        book.coordinator.drain("b", book.now, "")
        number = book.coordinator.attempts
        book.coordinator.drain("b", book.now, "")
        assert book.coordinator.attempts == number

    @pytest.mark.parametrize("least", [1, 2], ids=["enough stay", "too few stay"])
    def test_and_takes_part_in_an_attempt_makes_it_begin_anew(self, least: int) -> None:
        book = formed("a", "b", least=least)
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b")
        number = book.coordinator.attempts
        book.coordinator.drain("b", book.now, "")
        book.wait(0.1)
        assert book.coordinator.attempts == number + 1

    def test_and_was_about_to_be_taken_in_is_left_out(self) -> None:
        book = formed("a")
        join(book, "b")
        book.wait(0.1)
        number = book.coordinator.attempts
        book.coordinator.drain("b", book.now, "")
        attempt = book.coordinator.attempt
        assert attempt is not None
        assert (attempt.number, attempt.target) == (number + 1, ("a",))

    def test_is_remembered_by_the_next_daemon(self) -> None:
        book = formed("a", "b", least=1)
        book.coordinator.drain("b", book.now, "")
        book.restart()
        book.reconnect("a", "b")
        book.wait(0.1)
        assert members(book, "a") == (["a"], ["b"])

    def test_from_too_few_and_has_no_data_goes_by_itself(self) -> None:
        book = Playbook(**SOON, min_workers=2)
        join(book, "a", "b", with_data=False)
        book.wait(0.1)
        book.complete_attempt()
        number = book.coordinator.attempts
        book.coordinator.drain("a", book.now, "")
        book.wait(1.0)
        assert (book.coordinator.attempts, book.coordinator.attempt) == (number, None)
        assert book.coordinator.may_leave(book.coordinator.members["a"])


class TestSilence:
    """No worker fails for what another one has to do."""

    def begun(self) -> Playbook:
        book = formed("a", "b", rescale_silence_ms=2_000)
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b")
        return book

    def test_of_worker_that_fetches_and_gets_on_is_none(self) -> None:
        book = self.begun()
        for second in range(1, 20):
            report_progress(book, "a", "b", state=1_000, data=second * RECEIVED_BYTES_MIN)
            book.wait(1.0)
        assert failed(book) == []

    def test_is_not_broken_by_saying_the_same_again(self) -> None:
        book = self.begun()
        book.ready("a")
        for _ in range(5):
            report_progress(book, "b", state=1_000, data=7)
            book.wait(1.0)
        assert failed(book) == ["b"]

    def test_is_broken_by_data_though_more_bytes_of_state_have_come_before(self) -> None:
        book = self.begun()
        report_progress(book, "b", state=100 * RECEIVED_BYTES_MIN)
        for second in range(1, 10):
            report_progress(book, "a", "b", data=second * RECEIVED_BYTES_MIN)
            book.wait(1.0)
        assert failed(book) == []

    def test_of_all_workers_that_wait_is_no_workers_fault(self) -> None:
        book = self.begun()
        number = book.coordinator.attempts
        wait_saying(book, 60, "a", "b")
        assert (failed(book), book.coordinator.attempts) == ([], number)

    def test_is_that_of_the_one_for_worker_that_other_workers_wait(self) -> None:
        book = self.begun()
        wait_saying(book, 4, "a")
        assert failed(book) == ["b"]

    def test_begins_anew_when_a_worker_waits_no_more(self) -> None:
        book = self.begun()
        wait_saying(book, 10, "a", "b")
        book.ready("a")
        report_progress(book, "b")
        book.wait(4.0)
        assert failed(book) == ["b"]

    def test_of_worker_that_said_long_ago_that_it_waits_is_its_own(self) -> None:
        book = self.begun()
        wait_saying(book, 3, "a", "b")
        book.wait(15.0)
        assert set(failed(book)) == {"a", "b"}

    def test_cannot_be_broken_by_worker_that_is_another_or_in_another_attempt(self) -> None:
        book = self.begun()
        for second in range(1, 5):
            signal = progress_of(book, "b", 0, second, is_waiting=True)
            book.coordinator.attempt_progress(replace(signal, incarnation=incarnation("b", 2)), book.now)
            book.coordinator.attempt_progress(replace(signal, attempt=signal.attempt - 1), book.now)
            report_progress(book, "a", waits=True)
            book.wait(1.0)
        assert failed(book) == ["b"]


class TestReportedProblem:
    def test_reported_problem_is_the_reason_of_the_failure(self) -> None:
        book = formed("a", "b", rescale_silence_ms=2_000)
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b")
        book.ready("a")
        report_progress(book, "b", problem="  there is no room on the disk ")
        book.wait(3.0)
        assert book.last(WorkerFailed).reason == ("no answer in attempt 2 within 2 s: there is no room on the disk")

    def test_resolved_problem_is_not_in_the_reason_of_the_failure(self) -> None:
        book = formed("a", "b", rescale_silence_ms=2_000)
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b")
        book.ready("a")
        report_progress(book, "b", problem="there is no room on the disk")
        report_progress(book, "b")
        book.wait(3.0)
        assert book.last(WorkerFailed).reason == "no answer in attempt 2 within 2 s"

    def test_reported_problem_is_shown_in_the_stall_report(self) -> None:
        names = [f"w{number}" for number in range(5)]
        book = formed(*names)
        book.coordinator.rescale(book.now, "a wish")
        stop(book, *names)
        report_progress(book, *names[1:], waits=True, problem="shard 3 is missing")
        book.ready("w1")
        assert describe_stall(book.coordinator, book.time) == (
            "attempt 2 waits for w0, w2, w3, w4 to receive state and data "
            "(0 s so far, w0 will fail in 15 s if nothing changes); w2, w3, w4: shard 3 is missing"
        )
        for name in names[2:]:
            report_progress(book, name, waits=True, problem=f"shard {name} is missing")
        report_progress(book, "w0", problem="x" * 10_000)
        told = describe_stall(book.coordinator, book.time)
        assert told.endswith("; 1 more report problems")
        assert len(told) < 1_000


class TestFailingStore:
    """A worker whose shard store fails does not hold the world up anew in each attempt."""

    def begun(self, failing_s: float = 0.0) -> Playbook:
        book = formed("a", "b", "c", rescale_silence_ms=10_000)
        self.restart(book)
        self.report(book, failing_s)
        return book

    def restart(self, book: Playbook) -> None:
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b", "c")
        book.ready("a", "c")

    def report(self, book: Playbook, failing_s: float, problem: str = "cannot store shard 3") -> None:
        signal = progress_of(book, "b", 0, 0, problem=problem, store_failing_s=failing_s)
        book.coordinator.attempt_progress(signal, book.now)

    def test_store_that_fails_for_the_timeout_fails_its_worker(self) -> None:
        book = self.begun(4.0)
        book.wait(5.5)
        self.report(book, 9.5)
        book.wait(1.0)
        assert failed(book) == []
        self.report(book, 10.5)
        book.wait(0.1)
        assert failed(book) == ["b"]
        assert book.last(WorkerFailed).reason == "no shard stored for 10 s, in several attempts: cannot store shard 3"

    def test_new_attempt_does_not_start_the_time_of_a_failing_store_anew(self) -> None:
        book = self.begun()
        for failing_s in (3.0, 6.0, 9.0):
            book.wait(2.0)
            self.restart(book)
            self.report(book, failing_s)
            assert failed(book) == []
        book.wait(1.0)
        self.report(book, 10.0)
        book.wait(0.1)
        assert failed(book) == ["b"]

    def test_progress_of_other_workers_does_not_extend_the_time_of_a_failing_store(self) -> None:
        book = formed("a", "b", "c", rescale_silence_ms=10_000)
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b", "c")
        for second in range(1, 12):
            book.wait(1.0)
            self.report(book, second - 0.5)
            report_progress(book, "a", data=second * RECEIVED_BYTES_MIN)
        book.wait(0.1)
        assert failed(book) == ["b"]
        assert book.last(WorkerFailed).reason == "no answer in attempt 2 within 10 s: cannot store shard 3"

    def test_store_that_works_again_counts_no_more(self) -> None:
        book = self.begun(9.0)
        self.report(book, 0.0, problem="")
        book.wait(9.5)
        assert failed(book) == []
        book.ready("b")
        assert book.last(RescaleCompleted).attempt == 2
        book.wait(60.0)
        assert failed(book) == []

    def test_worker_that_is_ready_does_not_fail_for_its_store(self) -> None:
        book = self.begun(9.0)
        book.coordinator.rescale(book.now, "another wish")
        stop(book, "a", "b", "c")
        self.report(book, 9.0)
        book.ready("b")
        book.wait(5.0)
        assert failed(book) == []

    def test_timeout_of_none_waits_for_a_failing_store(self) -> None:
        book = formed("a", "b", rescale_silence_ms=0, rescale_timeout_ms=0)
        book.coordinator.rescale(book.now, "a wish")
        stop(book, "a", "b")
        book.ready("a")
        self.report(book, 1_000.0)
        book.wait(60.0)
        assert failed(book) == []


class TestWaitingJoiners:
    def test_is_counted_for_the_members_of_a_full_attempt(self) -> None:
        book = formed("a", "b", max_workers=2)
        join(book, "c", "d")
        book.coordinator.rescale(book.now, "a wish")
        found = book.coordinator.attempt_members("a", incarnation("a"))
        assert (found.has_room, found.waiting, found.generation) == (False, 2, 1)
        assert describe_stall(book.coordinator, book.time).endswith(
            "; 2 workers wait until another leaves: max_workers is 2"
        )

    def test_is_no_worker_that_is_in_the_attempt(self) -> None:
        book = formed("a")
        join(book, "b")
        book.wait(0.1)
        found = book.coordinator.attempt_members("a", incarnation("a"))
        assert (found.has_room, found.waiting) == (True, 0)
        join(book, "c")
        assert book.coordinator.attempt_members("a", incarnation("a")).waiting == 1
        assert "max_workers" not in describe_stall(book.coordinator, book.time)


def test_only_those_are_said_to_take_the_state_that_do() -> None:
    book = formed("a", "b")
    join(book, "c")
    book.wait(0.1)
    stop(book, "a", "b")
    book.stop("c", stop=StopReport(0, holds_state=False))
    assert book.last(RescaleSynchronising).behind == 1
    attempt = book.coordinator.attempt
    assert attempt is not None
    assert attempt.unready == {"a", "b", "c"}
