"""What it means for a cluster that its workers hold training data."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forged.elastic.messages import (
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
from tests.elastic.play import Play, incarnation, newcomer

SOON: dict[str, SettingValue] = {"stability_window_ms": 0, "failure_window_ms": 0}


def join(play: Play, *names: str, with_data: bool = True) -> None:
    for name in names:
        member = newcomer(name, now=play.time)
        member.with_data = with_data
        play.cluster.join(member, play.now)
        play.settle()


def formed(*names: str, least: int = 0, **settings: SettingValue) -> Play:
    """A world in which all hold data; `least` are needed from then on, or all of them."""
    play = Play(**{**SOON, "min_workers": len(names), **settings})
    join(play, *names)
    play.wait(0.1)
    play.agree()
    play.news()
    play.cluster.configure({**play.cluster.settings, "min_workers": least or len(names)})
    return play


def stop(play: Play, *names: str) -> None:
    play.stop(*names, stop=StopReport(0, holds_state=True))


def members(play: Play, name: str) -> tuple[list[str], list[str]]:
    """Who is to hold data in the attempt, and who goes, as a worker is told."""
    found = play.cluster.attempt_members(name, incarnation(name))
    return [worker.id for worker in found.target], [worker.id for worker in found.leaving]


def say(play: Play, *names: str, state: int = 0, data: int = 0, waits: bool = False, trouble: str = "") -> None:
    for name in names:
        number = play.cluster.attempts
        play.cluster.attempt_progress(
            name, incarnation(name), number, (state, data), play.now, is_waiting=waits, problem=trouble
        )


def failed(play: Play) -> list[str]:
    return [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)]


def wait_saying(play: Play, seconds: int, *names: str, silent: Sequence[str] = ()) -> None:
    """Time passes, and these say every second that they wait for others."""
    for _ in range(seconds):
        say(play, *names, waits=True)
        play.wait(1.0, silent=silent)


class TestACommit:
    def test_waits_for_all_who_hold_data_though_they_have_the_state(self) -> None:
        play = formed("a", "b")
        play.cluster.rescale(play.now, "a wish")
        stop(play, "a", "b")
        attempt = play.cluster.attempt
        assert attempt is not None
        assert (attempt.stage, attempt.waiting_for) == (Stage.SYNCHRONISING, ["a", "b"])
        play.ready("a")
        assert play.cluster.attempt is attempt
        play.ready("b")
        assert play.last(RescaleCompleted).attempt == attempt.number

    def test_waits_for_nobody_without_data_who_has_the_state(self) -> None:
        play = Play(**SOON, min_workers=2)
        join(play, "a")
        join(play, "b", with_data=False)
        play.wait(0.1)
        play.agree()
        play.cluster.rescale(play.now, "a wish")
        stop(play, "a", "b")
        attempt = play.cluster.attempt
        assert attempt is not None
        assert attempt.waiting_for == ["a"]

    def test_does_not_go_ahead_of_data_though_nobody_is_to_stop(self) -> None:
        play = formed("a", use_synchronous_rescaling=False)
        before = play.cluster.generation
        play.cluster.rescale(play.now, "a wish")
        assert play.cluster.attempt is not None
        assert play.cluster.generation == before
        play.ready("a")
        assert play.cluster.generation == before + 1


def trains_on(*names: str, **settings: SettingValue) -> Play:
    """A world in which all hold data, and nobody stops for a rescale; some of them may go."""
    play = formed(*names, use_synchronous_rescaling=False)
    play.cluster.configure({**play.cluster.settings, "min_workers": 1, **settings})
    return play


def under_way(play: Play) -> Attempt:
    attempt = play.cluster.attempt
    assert attempt is not None
    return attempt


class TestTheBackground:
    """Where nobody stops for a rescale, data moves while training goes on."""

    def test_is_where_data_moves_for_who_joins(self) -> None:
        play = trains_on("a", "b")
        join(play, "c")
        play.wait(0.1)
        started = play.last(RescaleStarted)
        assert (started.in_background, started.added) == (True, ["c"])
        attempt = under_way(play)
        assert (attempt.stage, attempt.waiting_for) == (Stage.TRANSFERRING, ["a", "b", "c"])
        assert play.cluster.synchronising is None

    def test_ends_with_the_commit_when_all_have_answered(self) -> None:
        play = trains_on("a", "b")
        join(play, "c")
        play.wait(0.1)
        for name in "ca":
            play.ready(name)
            assert play.world == ["a", "b"]
        play.ready("b")
        completed = play.last(RescaleCompleted)
        assert play.world == ["a", "b", "c"]
        assert (completed.step, completed.epoch, completed.attempt) == (None, None, play.cluster.attempts)

    def test_has_steps_in_it_that_are_known_of(self) -> None:
        play = trains_on("a", "b")
        play.cluster.rescale(play.now, "a wish")
        play.pulse("a", "b", step=7)
        assert play.cluster.training.current_step == 7
        assert play.cluster.trains

    def test_has_stalled_workers_in_it_who_are_told(self) -> None:
        play = trains_on("a", "b", stall_timeout_ms=5_000, rescale_timeout_ms=60_000)
        play.cluster.rescale(play.now, "a wish")
        play.beat("a", "b", collective_seq=5_000)
        play.beat("a", collective_seq=5_001)
        play.wait(10.0, still=True)
        assert [fact.worker_id for fact in play.facts if isinstance(fact, WorkerStalled)] == ["b"]
        assert describe_stall(play.cluster, play.time) == (
            "attempt 2 waits for a, b to receive training data (training continues) (10 s); "
            "b stalled for 10 s after step 0"
        )

    def test_takes_no_word_that_somebody_has_stopped(self) -> None:
        play = trains_on("a", "b")
        play.cluster.rescale(play.now, "a wish")
        stop(play, "a", "b")
        assert under_way(play).stops == {}
        assert play.world == ["a", "b"]
        assert under_way(play).waiting_for == ["a", "b"]

    def test_waits_for_nobody_without_data(self) -> None:
        play = trains_on("a")
        join(play, "b", with_data=False)
        play.wait(0.1)
        assert under_way(play).waiting_for == ["a"]
        play.ready("a")
        assert play.world == ["a", "b"]

    def test_lets_who_comes_meanwhile_wait_for_the_commit(self) -> None:
        play = trains_on("a")
        join(play, "b")
        play.wait(0.1)
        number = play.cluster.attempts
        join(play, "c")
        play.wait(5.0)
        assert play.cluster.attempts == number
        play.ready("a", "b")
        play.wait(0.1)
        assert (under_way(play).added, under_way(play).in_background) == (("c",), True)

    def test_goes_on_without_the_one_who_was_to_be_taken_in(self) -> None:
        play = trains_on("a", "b")
        join(play, "c")
        play.wait(0.1)
        play.die("c")
        play.wait(0.1)
        assert play.last(RescaleAborted).attempt == under_way(play).number - 1
        assert (under_way(play).target, under_way(play).in_background) == (("a", "b"), True)

    def test_takes_over_what_who_is_to_go_holds(self) -> None:
        play = trains_on("a", "b")
        play.cluster.drain("b", play.now, "the spot price")
        assert under_way(play).in_background
        assert members(play, "a") == (["a"], ["b"])
        play.ready("a", "b")
        assert play.last(RescaleCompleted).reason == "draining b: the spot price"

    def test_does_not_outlast_a_member_of_the_world(self) -> None:
        play = trains_on("a", "b", "c")
        play.cluster.rescale(play.now, "a wish")
        play.die("b")
        play.wait(0.1)
        started = play.last(RescaleStarted)
        assert (started.in_background, started.removed) == (False, ["b"])
        assert under_way(play).stage is Stage.STOPPING
        play.agree(step=3)
        assert play.last(RescaleCompleted).step == 3
        assert play.world == ["a", "c"]

    def test_does_not_outlast_a_world_that_cannot_go_on(self) -> None:
        play = trains_on("a", "b")
        join(play, "c")
        play.wait(0.1)
        play.complain("a", why="the line is cut")
        play.wait(0.1)
        assert not play.last(RescaleStarted).in_background
        assert under_way(play).added == ("c",)

    def test_does_not_begin_in_a_world_that_cannot_go_on_until_another_holds(self) -> None:
        play = trains_on("a", "b")
        play.complain("a", why="the line is cut")
        play.wait(0.1)
        assert not under_way(play).in_background
        play.cluster.rescale(play.now, "a wish")
        assert not under_way(play).in_background
        play.agree()
        play.cluster.rescale(play.now, "a wish")
        assert under_way(play).in_background

    def test_is_not_where_somebody_wishes_that_all_stop(self) -> None:
        play = trains_on("a", "b")
        play.cluster.rescale(play.now, "a wish", synchronous=True)
        assert not under_way(play).in_background
        play.agree()
        play.cluster.rescale(play.now, "a wish")
        assert under_way(play).in_background

    def test_is_not_where_nobody_trains_yet(self) -> None:
        play = Play(**SOON, use_synchronous_rescaling=False)
        join(play, "a")
        play.wait(0.1)
        assert not under_way(play).in_background

    def test_is_not_where_too_few_are_left(self) -> None:
        play = trains_on("a", "b", min_workers=2)
        play.cluster.rescale(play.now, "a wish")
        play.die("b")
        play.wait(0.1)
        assert play.cluster.phase is Phase.WAITING
        assert not play.cluster.trains
        join(play, "c")
        play.wait(0.1)
        assert not under_way(play).in_background

    def test_is_left_by_a_daemon_that_comes_back_and_does_not_know(self) -> None:
        play = trains_on("a", "b")
        play.cluster.rescale(play.now, "a wish")
        play.restart()
        play.come_back("a", "b")
        play.wait(0.1)
        assert not under_way(play).in_background
        play.agree()
        assert play.world == ["a", "b"]

    def test_ends_with_the_job(self) -> None:
        play = trains_on("a", "b")
        play.cluster.rescale(play.now, "a wish")
        play.leave("a", done=True, step=9)
        assert play.cluster.phase is Phase.COMPLETED
        assert play.last(JobCompleted).step == 9
        assert play.last(RescaleAborted).attempt == 2

    def test_fails_who_neither_fetches_nor_waits(self) -> None:
        play = trains_on("a", "b", rescale_timeout_ms=2_000)
        join(play, "c")
        play.wait(0.1)
        for second in range(10):
            say(play, "a", waits=True)
            say(play, "b", data=second * RECEIVED_BYTES_MIN)
            play.wait(1.0)
        assert failed(play) == []
        wait_saying(play, 3, "a", "b")
        assert failed(play) == ["c"]

    def test_fails_whom_all_wait_for_however_far_it_has_come_in_training(self) -> None:
        play = trains_on("a", "b", rescale_timeout_ms=2_000)
        play.cluster.rescale(play.now, "a wish")
        play.beat("b", collective_seq=1_000_000)
        wait_saying(play, 3, "a")
        assert failed(play) == ["b"]


class TestTheMembersOfAnAttempt:
    def test_are_those_who_hold_data_by_rank(self) -> None:
        play = Play(**SOON, min_workers=3)
        join(play, "a")
        join(play, "b", with_data=False)
        join(play, "c")
        play.wait(0.1)
        assert members(play, "c") == (["a", "c"], [])

    @pytest.mark.parametrize("least", [1, 3], ids=["enough stay", "too few stay"])
    def test_are_told_apart_from_those_who_go_however_few_stay(self, least: int) -> None:
        play = formed("a", "b", "c", least=least)
        play.cluster.drain("b", play.now, "")
        play.wait(0.1)
        assert members(play, "a") == (["a", "c"], ["b"])

    @pytest.mark.parametrize("name", ["a", "z"])
    def test_are_told_to_members_of_the_present_one_only(self, name: str) -> None:
        play = formed("a")
        with pytest.raises(RequestRefused) as error:
            members(play, name)
        assert error.value.code == "attempt_over"


class TestWhoIsToGo:
    def test_has_its_data_taken_over_at_once(self) -> None:
        play = formed("a", "b", least=1)
        b = play.cluster.members["b"]
        play.cluster.drain("b", play.now, "the spot price")
        play.wait(0.1)
        assert play.last(RescaleStarted).reason == "draining b: the spot price"
        stop(play, "a", "b")
        play.ready("a")
        assert play.world == ["a", "b"]
        assert not play.cluster.may_leave(b), "it has said nothing of its own shards"
        play.ready("b")
        assert play.world == ["a"]
        assert play.cluster.may_leave(b)

    def test_from_too_few_has_its_data_taken_over_and_goes_then(self) -> None:
        play = formed("a", "b")
        b = play.cluster.members["b"]
        play.cluster.drain("b", play.now, "the spot price")
        assert not play.cluster.may_leave(b)
        play.wait(0.1)
        play.agree()
        assert play.world == ["a", "b"]
        assert play.cluster.may_leave(b)
        attempts = play.cluster.attempts
        play.wait(600.0)
        assert play.cluster.attempts == attempts, "once is enough"

    def test_has_others_go_on_meanwhile_where_nobody_stops(self) -> None:
        play = formed("a", "b", least=1, use_synchronous_rescaling=False)
        play.cluster.drain("b", play.now, "the spot price")
        play.wait(0.1)
        started = play.last(RescaleStarted)
        assert (started.in_background, started.removed, started.leaving) == (True, ["b"], ["b"])
        play.ready("a", "b")
        assert play.world == ["a"]

    def test_with_the_only_state_has_the_others_stop(self) -> None:
        play = formed("b", use_synchronous_rescaling=False)
        join(play, "a")
        play.cluster.drain("b", play.now, "the spot price")
        play.wait(0.1)
        assert not play.last(RescaleStarted).in_background
        play.agree(7)
        assert play.last(RescaleSynchronising).source.id == "b"
        assert (play.world, play.cluster.training.current_step) == (["a"], 7)

    def test_is_not_waited_for_anew_when_told_twice(self) -> None:
        play = formed("a", "b")
        play.cluster.drain("b", play.now, "")
        number = play.cluster.attempts
        play.cluster.drain("b", play.now, "")
        assert play.cluster.attempts == number

    @pytest.mark.parametrize("least", [1, 2], ids=["enough stay", "too few stay"])
    def test_and_takes_part_in_an_attempt_makes_it_begin_anew(self, least: int) -> None:
        play = formed("a", "b", least=least)
        play.cluster.rescale(play.now, "a wish")
        stop(play, "a", "b")
        number = play.cluster.attempts
        play.cluster.drain("b", play.now, "")
        play.wait(0.1)
        assert play.cluster.attempts == number + 1

    def test_and_was_about_to_be_taken_in_is_left_out(self) -> None:
        play = formed("a")
        join(play, "b")
        play.wait(0.1)
        number = play.cluster.attempts
        play.cluster.drain("b", play.now, "")
        attempt = play.cluster.attempt
        assert attempt is not None
        assert (attempt.number, attempt.target) == (number + 1, ("a",))

    def test_is_remembered_by_the_next_daemon(self) -> None:
        play = formed("a", "b", least=1)
        play.cluster.drain("b", play.now, "")
        play.restart()
        play.come_back("a", "b")
        play.wait(0.1)
        assert members(play, "a") == (["a"], ["b"])

    def test_from_too_few_and_has_no_data_goes_by_itself(self) -> None:
        play = Play(**SOON, min_workers=2)
        join(play, "a", "b", with_data=False)
        play.wait(0.1)
        play.agree()
        number = play.cluster.attempts
        play.cluster.drain("a", play.now, "")
        play.wait(1.0)
        assert (play.cluster.attempts, play.cluster.attempt) == (number, None)
        assert play.cluster.may_leave(play.cluster.members["a"])


class TestSilence:
    """Nobody fails for what another one has to do."""

    def begun(self) -> Play:
        play = formed("a", "b", rescale_timeout_ms=2_000)
        play.cluster.rescale(play.now, "a wish")
        stop(play, "a", "b")
        return play

    def test_of_who_fetches_and_gets_on_is_none(self) -> None:
        play = self.begun()
        for second in range(1, 20):
            say(play, "a", "b", state=1_000, data=second * RECEIVED_BYTES_MIN)
            play.wait(1.0)
        assert failed(play) == []

    def test_is_not_broken_by_saying_the_same_again(self) -> None:
        play = self.begun()
        play.ready("a")
        for _ in range(5):
            say(play, "b", state=1_000, data=7)
            play.wait(1.0)
        assert failed(play) == ["b"]

    def test_is_broken_by_data_though_more_bytes_of_state_have_come_before(self) -> None:
        play = self.begun()
        say(play, "b", state=100 * RECEIVED_BYTES_MIN)
        for second in range(1, 10):
            say(play, "a", "b", data=second * RECEIVED_BYTES_MIN)
            play.wait(1.0)
        assert failed(play) == []

    def test_of_all_who_wait_is_nobodys_fault(self) -> None:
        play = self.begun()
        number = play.cluster.attempts
        wait_saying(play, 60, "a", "b")
        assert (failed(play), play.cluster.attempts) == ([], number)

    def test_is_that_of_the_one_for_whom_the_others_wait(self) -> None:
        play = self.begun()
        wait_saying(play, 4, "a")
        assert failed(play) == ["b"]

    def test_begins_anew_when_somebody_waits_no_more(self) -> None:
        play = self.begun()
        wait_saying(play, 10, "a", "b")
        play.ready("a")
        say(play, "b")
        play.wait(4.0)
        assert failed(play) == ["b"]

    def test_of_who_said_long_ago_that_it_waits_is_its_own(self) -> None:
        play = self.begun()
        wait_saying(play, 3, "a", "b")
        play.wait(15.0)
        assert set(failed(play)) == {"a", "b"}

    def test_cannot_be_broken_by_who_is_another_or_in_another_attempt(self) -> None:
        play = self.begun()
        number = play.cluster.attempts
        for second in range(1, 5):
            play.cluster.attempt_progress("b", incarnation("b", 2), number, (0, second), play.now, is_waiting=True)
            play.cluster.attempt_progress("b", incarnation("b"), number - 1, (0, second), play.now, is_waiting=True)
            say(play, "a", waits=True)
            play.wait(1.0)
        assert failed(play) == ["b"]


class TestTrouble:
    def test_is_told_as_the_reason_for_which_somebody_has_failed(self) -> None:
        play = formed("a", "b", rescale_timeout_ms=2_000)
        play.cluster.rescale(play.now, "a wish")
        stop(play, "a", "b")
        play.ready("a")
        say(play, "b", trouble="  there is no room on the disk ")
        play.wait(3.0)
        assert play.last(WorkerFailed).reason == ("no answer in attempt 2 within 2 s: there is no room on the disk")

    def test_that_is_over_is_told_no_more(self) -> None:
        play = formed("a", "b", rescale_timeout_ms=2_000)
        play.cluster.rescale(play.now, "a wish")
        stop(play, "a", "b")
        play.ready("a")
        say(play, "b", trouble="there is no room on the disk")
        say(play, "b")
        play.wait(3.0)
        assert play.last(WorkerFailed).reason == "no answer in attempt 2 within 2 s"

    def test_stands_where_it_is_told_what_is_waited_for(self) -> None:
        names = [f"w{number}" for number in range(5)]
        play = formed(*names)
        play.cluster.rescale(play.now, "a wish")
        stop(play, *names)
        say(play, *names[1:], waits=True, trouble="shard 3 is missing")
        play.ready("w1")
        assert describe_stall(play.cluster, play.time) == (
            "attempt 2 waits for w0, w2, w3, w4 to receive state and data (0 s); w2, w3, w4: shard 3 is missing"
        )
        for name in names[2:]:
            say(play, name, waits=True, trouble=f"shard {name} is missing")
        say(play, "w0", trouble="x" * 10_000)
        told = describe_stall(play.cluster, play.time)
        assert told.endswith("; 1 more report problems")
        assert len(told) < 1_000


class TestWhoWaitsOutside:
    def test_is_counted_for_the_members_of_a_full_attempt(self) -> None:
        play = formed("a", "b", max_workers=2)
        join(play, "c", "d")
        play.cluster.rescale(play.now, "a wish")
        found = play.cluster.attempt_members("a", incarnation("a"))
        assert (found.has_room, found.waiting, found.generation) == (False, 2, 1)
        assert describe_stall(play.cluster, play.time).endswith("; 2 workers wait: max_workers is 2")

    def test_is_nobody_who_is_in_the_attempt(self) -> None:
        play = formed("a")
        join(play, "b")
        play.wait(0.1)
        found = play.cluster.attempt_members("a", incarnation("a"))
        assert (found.has_room, found.waiting) == (True, 0)
        join(play, "c")
        assert play.cluster.attempt_members("a", incarnation("a")).waiting == 1
        assert "max_workers" not in describe_stall(play.cluster, play.time)


def test_only_those_are_said_to_take_the_state_who_do() -> None:
    play = formed("a", "b")
    join(play, "c")
    play.wait(0.1)
    stop(play, "a", "b")
    play.stop("c", stop=StopReport(0, holds_state=False))
    assert play.last(RescaleSynchronising).behind == 1
    attempt = play.cluster.attempt
    assert attempt is not None
    assert attempt.unready == {"a", "b", "c"}
