"""What becomes of who is to go: it leaves a world when the next one holds without it, or is of no use to one."""

from __future__ import annotations

import pytest

from forged.elastic.membership.member import COLLECTIVES_PER_WORLD
from forged.elastic.messages import (
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerDraining,
    WorkerFailed,
)
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import StopReport
from forged.jobs.model import SettingValue
from tests.elastic.play import Play, formed, incarnation, kinds

WISH = "the night"
SOON_S = 0.1
"""A little longer than others may follow who are told to go."""
ALL_MAY_FAIL: dict[str, SettingValue] = {"failure_tolerance_percentage": 100, "max_consecutive_failures": 1_000}


def of_size(least: int, *names: str, **settings: SettingValue) -> Play:
    """A world of which so many are needed."""
    play = Play(min_workers=least, **settings)
    play.form(*names)
    return play


def drain(play: Play, *names: str) -> None:
    for name in names:
        play.cluster.drain(name, play.now, WISH)


def with_a_spare() -> Play:
    """An attempt in which `c` has yet to take what `a` has, who stays, and `b`, who is to go."""
    play = formed("a", "b")
    play.join("c")
    drain(play, "b")
    play.wait(SOON_S)
    play.stop("c", stop=StopReport(0, holds_state=False))
    play.stop("a", "b", stop=StopReport(5, holds_state=True))
    return play


def may_go(play: Play, name: str) -> bool:
    return play.cluster.may_leave(play.cluster.members[name])


def failed(play: Play) -> list[str]:
    return [fact.worker_id for fact in play.facts if isinstance(fact, WorkerFailed)]


# The next world is without it.


def test_the_others_form_a_world_without_who_is_to_go() -> None:
    play = formed("a", "b", "c")
    drain(play, "b")
    assert play.news() == [WorkerDraining("b", WISH)]
    (started,) = play.wait(SOON_S)
    assert isinstance(started, RescaleStarted)
    assert (started.world_size, started.removed, started.leaving) == (2, ["b"], ["b"])
    assert started.reason == "draining b: the night"
    completed = play.agree(5)
    assert (play.world, completed.removed, completed.step) == (["a", "c"], ["b"], 5)
    assert "b" in play.cluster.members, "it may take its time to save what it has"
    play.news()
    assert kinds(play.leave("b")) == ["WorkerLeft"]
    assert play.wait(10.0) == []


def test_who_is_told_to_go_twice_is_so_once() -> None:
    play = formed("a", "b")
    drain(play, "b", "b")
    assert kinds(play.news()) == ["WorkerDraining"]


def test_those_who_are_told_to_go_at_once_are_let_go_of_together() -> None:
    play = formed("a", "b", "c", "d", "e")
    drain(play, "b")
    play.wait(SOON_S / 4)
    drain(play, "c", "d")
    play.wait(SOON_S)
    play.agree()
    assert (play.world, play.cluster.generation) == (["a", "e"], 2)


def test_who_waits_takes_the_rank_of_who_is_to_go() -> None:
    play = formed("a", "b", "c")
    play.join("d")
    drain(play, "a")
    play.wait(SOON_S)
    play.agree()
    assert play.world == ["d", "b", "c"]


def test_who_waits_finds_room_in_a_full_world_in_which_somebody_is_to_go() -> None:
    play = Play(max_workers=1)
    play.join("a")
    play.agree(0)
    play.join("b")
    drain(play, "a")
    play.wait(SOON_S)
    assert play.agree(7).step == 7
    assert play.world == ["b"]


def test_a_joiner_that_is_to_go_is_not_taken_in() -> None:
    play = formed("a")
    play.join("b")
    drain(play, "b")
    play.news()
    assert play.wait(100.0) == []


def test_a_joiner_that_is_to_go_while_it_is_taken_in_is_left_out() -> None:
    play = formed("a")
    play.join("b", "c")
    play.wait(30.0)
    drain(play, "b")
    play.wait(SOON_S)
    play.agree()
    assert play.world == ["a", "c"]


def test_the_next_daemon_forms_the_world_without_it() -> None:
    play = formed("a", "b")
    drain(play, "b")
    play.restart()
    play.come_back("a", "b")
    play.wait(SOON_S)
    play.agree()
    assert play.world == ["a"]


def test_without_synchronising_the_next_world_holds_at_once() -> None:
    play = formed("a", "b", use_synchronous_rescaling=False)
    drain(play, "b")
    started, completed = play.wait(SOON_S)[-2:]
    assert isinstance(started, RescaleStarted)
    assert isinstance(completed, RescaleCompleted)
    assert (started.leaving, completed.step, play.world) == (["b"], None, ["a"])


# It takes part until then.


def test_the_state_of_who_is_to_go_is_taken_over() -> None:
    play = formed("a", "b")
    play.join("c", "d")
    drain(play, "a", "b")
    play.wait(SOON_S)
    play.stop("a", stop=StopReport(7, holds_state=True))
    play.stop("b", stop=StopReport(8, holds_state=True))
    play.stop("c", "d", stop=StopReport(0, holds_state=False))
    settled = play.last(RescaleSynchronising)
    assert (settled.source.id, settled.step, settled.behind) == ("b", 8, 2)
    play.ready("c", "d")
    assert play.last(RescaleCompleted).step == 8
    assert play.world == ["c", "d"]


def test_without_synchronising_those_who_alone_have_the_state_are_asked_for_it() -> None:
    play = formed("a", use_synchronous_rescaling=False)
    play.join("b")
    drain(play, "a")
    play.wait(SOON_S)
    assert play.agree(9).step == 9
    assert (play.world, play.cluster.membership.state_holders) == (["b"], frozenset("b"))


def test_nobody_goes_on_before_who_is_to_go_has_said_where_it_has_stopped() -> None:
    play = formed("a", "b")
    drain(play, "b")
    play.wait(SOON_S)
    play.stop("a", stop=StopReport(5, holds_state=True, finished=True))
    assert play.world == ["a", "b"]
    play.stop("b", stop=StopReport(6, holds_state=True))
    assert play.last(RescaleCompleted).step == 6


def test_of_two_with_the_same_state_who_stays_gives_it() -> None:
    play = formed("a", "b")
    play.join("c")
    drain(play, "a")
    play.wait(SOON_S)
    play.agree(5)
    assert play.last(RescaleSynchronising).source.id == "b"


def test_who_is_of_no_use_any_more_need_not_wait_until_others_have_taken_what_they_need() -> None:
    play = formed("a", "b")
    play.join("c")
    drain(play, "b")
    play.wait(SOON_S)
    play.stop("c", stop=StopReport(0, holds_state=False))
    play.stop("b", stop=StopReport(5, holds_state=True))
    assert not may_go(play, "b"), "a may be dead"
    play.stop("a", stop=StopReport(5, holds_state=True))
    assert may_go(play, "b")
    play.leave("b")
    play.wait(SOON_S)
    play.ready("c")
    assert (play.world, play.cluster.attempts) == (["a", "c"], 2), "that it went has disturbed nobody"


def test_who_was_of_no_use_any_more_is_when_the_one_fails_who_was_to_stay() -> None:
    play = with_a_spare()
    play.die("a")
    assert not may_go(play, "b"), "c has nothing yet"
    play.wait(SOON_S)
    assert play.agree(5).step == 5
    assert (play.world, may_go(play, "b")) == (["c"], True)


def test_where_none_who_stays_has_the_state_all_who_have_it_wait_until_it_is_taken() -> None:
    play = formed("a", "b")
    play.join("c")
    drain(play, "a", "b")
    play.wait(SOON_S)
    play.stop("c", stop=StopReport(0, holds_state=False))
    play.stop("a", "b", stop=StopReport(5, holds_state=True))
    assert (may_go(play, "a"), may_go(play, "b")) == (False, False)
    play.die("a")
    play.wait(SOON_S)
    play.agree(5)
    assert (play.world, play.cluster.training.current_step) == (["c"], 5)


def test_who_was_of_no_use_any_more_is_while_the_one_who_was_to_stay_is_lost() -> None:
    play = with_a_spare()
    play.lose("a")
    assert not may_go(play, "b"), "a may be dead, and c has nothing yet"
    play.come_back("a")
    assert may_go(play, "b")


def test_who_gives_its_state_stays_though_a_newcomer_has_it_already() -> None:
    play = formed("a")
    play.join("c", "d")
    drain(play, "a")
    play.wait(SOON_S)
    play.stop("c", stop=StopReport(5, holds_state=True))
    play.stop("d", stop=StopReport(0, holds_state=False))
    play.stop("a", stop=StopReport(5, holds_state=True))
    assert play.last(RescaleSynchronising).source.id == "a"
    assert not may_go(play, "a"), "d has been told to take it there"


def test_who_is_to_go_and_is_behind_takes_nothing() -> None:
    play = formed("a", "b")
    drain(play, "b")
    play.wait(SOON_S)
    play.stop("b", stop=StopReport(5, holds_state=True))
    play.stop("a", stop=StopReport(6, holds_state=True))
    assert play.world == ["a"]


def test_who_is_to_go_and_dies_is_done_without_and_counts_towards_no_limit() -> None:
    play = formed("a", "b", "c", failure_tolerance_percentage=0, max_consecutive_failures=1)
    drain(play, "b")
    play.wait(SOON_S)
    play.die("b")
    play.wait(SOON_S)
    play.agree()
    assert (play.world, play.cluster.failure_budget.in_world) == (["a", "c"], 0)


def test_who_is_to_go_and_does_not_answer_fails() -> None:
    play = formed("a", "b", rescale_timeout_ms=5_000)
    drain(play, "b")
    play.wait(SOON_S)
    play.stop("a", stop=StopReport(5, holds_state=True))
    play.wait(8.0)
    assert failed(play) == ["b"]
    play.agree(5)
    assert play.world == ["a"]


def test_that_its_connection_is_lost_does_not_end_who_is_to_go() -> None:
    play = formed("a", "b")
    drain(play, "b")
    play.lose("b")
    play.wait(SOON_S)
    play.come_back("b")
    play.agree()
    assert (play.world, failed(play)) == (["a"], [])


def test_who_has_gone_out_of_a_world_is_kept_until_all_of_the_next_one_have_the_state() -> None:
    play = formed("a", "b", use_synchronous_rescaling=False)
    play.join("c")
    drain(play, "a")
    play.wait(SOON_S)
    assert (play.world, play.cluster.membership.state_holders) == (["c", "b"], frozenset("b"))
    assert not may_go(play, "a"), "c has nothing yet, and b may die"
    play.beat("b", collective_seq=play.cluster.generation * COLLECTIVES_PER_WORLD + 1)
    assert may_go(play, "a")


def test_who_has_gone_out_of_a_world_is_asked_for_the_state_when_nobody_else_has_it() -> None:
    play = formed("a", "b", use_synchronous_rescaling=False)
    play.join("c")
    drain(play, "a")
    play.wait(SOON_S)
    play.die("b")
    play.wait(SOON_S)
    started = play.last(RescaleStarted)
    assert (started.leaving, started.removed) == (["a"], ["b"])
    play.stop("a", stop=StopReport(9, holds_state=True))
    play.stop("c", stop=StopReport(0, holds_state=False))
    play.ready("c")
    assert play.last(RescaleCompleted).step == 9
    assert (play.world, may_go(play, "a")) == (["c"], True)


def test_who_has_gone_out_of_a_world_and_died_is_asked_for_nothing() -> None:
    play = formed("a", "b", use_synchronous_rescaling=False)
    play.join("c")
    drain(play, "a")
    play.wait(SOON_S)
    play.die("a")
    assert play.wait(1.0) == [], "no world needs it"
    play.die("b")
    play.wait(SOON_S)
    assert play.last(RescaleStarted).leaving == []
    play.agree(0)
    assert play.world == ["c"]


def test_the_next_daemon_keeps_who_has_gone_out_of_a_world_that_may_not_have_the_state() -> None:
    play = formed("a", "b", use_synchronous_rescaling=False)
    play.join("c")
    drain(play, "a")
    play.wait(SOON_S)
    play.restart()
    play.come_back("a", "b", "c")
    assert not may_go(play, "a")
    play.beat("b", collective_seq=play.cluster.generation * COLLECTIVES_PER_WORLD + 1)
    assert may_go(play, "a")
    play.restart()
    assert not may_go(play, "a"), "while nobody can be reached who has the state"
    play.come_back("a", "b", "c")
    assert may_go(play, "a"), "it is not kept once more"


def test_who_is_kept_behind_its_last_world_is_not_put_out() -> None:
    play = formed("a", "b", use_synchronous_rescaling=False, leave_timeout_ms=20_000)
    play.join("c")
    drain(play, "a")
    play.wait(60.0)
    assert (may_go(play, "a"), failed(play)) == (False, [])


# When it is told while a world is formed.


def test_an_attempt_begins_anew_without_who_is_to_go() -> None:
    play = formed("a", "b", "c")
    play.die("c")
    play.wait(0.2)
    play.stop("a", stop=StopReport(5, holds_state=True))
    drain(play, "b")
    aborted, started = play.wait(SOON_S)[-2:]
    assert isinstance(aborted, RescaleAborted)
    assert isinstance(started, RescaleStarted)
    assert (started.leaving, started.removed) == (["b"], ["b", "c"])
    assert not may_go(play, "b")
    assert play.agree(5).removed == ["b", "c"]
    assert may_go(play, "b")


def test_an_attempt_that_needs_who_is_to_go_comes_to_its_end() -> None:
    play = of_size(2, "a", "b", **ALL_MAY_FAIL)
    play.die("b")
    play.wait(SOON_S)
    play.join("c")
    assert play.cluster.attempt is not None
    drain(play, "a")
    play.wait(1.0)
    assert not may_go(play, "a"), "it is the only one that has the state"
    assert play.agree(5).step == 5
    assert play.world == ["a", "c"]
    assert may_go(play, "a")
    play.leave("a")
    assert kinds(play.wait(SOON_S)) == ["JobWaiting"]
    assert play.cluster.membership.state_holders & play.cluster.members.keys() == {"c"}


def test_when_others_come_an_attempt_does_without_who_is_to_go() -> None:
    play = of_size(2, "a", "b", **ALL_MAY_FAIL)
    play.die("b")
    play.wait(SOON_S)
    play.join("c")
    drain(play, "a")
    play.wait(1.0)
    play.join("d")
    play.wait(SOON_S)
    play.agree(5)
    assert play.world == ["c", "d"]


def test_what_an_attempt_lasts_is_not_held_against_who_is_to_go() -> None:
    play = formed("a", "b", leave_timeout_ms=20_000, rescale_timeout_ms=0)
    drain(play, "b")
    play.wait(30.0)
    play.agree(5)
    play.wait(1.0)
    assert failed(play) == [], "it has just heard that it may go"


# When nobody can form a world without it.


def test_where_nobody_else_is_who_is_to_go_may_go_at_once() -> None:
    play = formed("a", "b")
    drain(play, "a", "b")
    assert (may_go(play, "a"), may_go(play, "b")) == (True, True)
    assert play.wait(10.0)[2:] == []


def test_who_comes_while_all_others_are_to_go_is_given_what_they_have() -> None:
    play = formed("a", "b")
    drain(play, "a", "b")
    play.wait(10.0)
    assert "RescaleStarted" in kinds(play.join("c"))
    assert (may_go(play, "a"), may_go(play, "b")) == (False, False)
    assert play.agree(11).step == 11
    assert play.world == ["c"]
    assert may_go(play, "a")
    assert may_go(play, "b")


def test_where_too_few_would_be_left_those_who_come_are_given_the_state_all_the_same() -> None:
    play = of_size(2, "a", "b", **ALL_MAY_FAIL)
    play.die("b")
    play.wait(SOON_S)
    drain(play, "a")
    play.join("c")
    play.wait(SOON_S)
    assert play.agree(11).step == 11
    assert (play.world, may_go(play, "a")) == (["a", "c"], True)


def test_who_alone_has_the_state_waits_for_so_many_that_they_can_take_it() -> None:
    play = of_size(3, "a", "b", "c", **ALL_MAY_FAIL)
    play.die("b", "c")
    play.wait(SOON_S)
    drain(play, "a")
    assert may_go(play, "a"), "nobody is there who might wait for anything"
    play.join("d")
    assert not may_go(play, "a")
    play.join("e")
    play.wait(SOON_S)
    play.agree()
    assert play.world == ["a", "d", "e"]


def test_where_too_few_stay_and_have_the_state_who_is_to_go_may_go() -> None:
    play = of_size(3, "a", "b", "c")
    drain(play, "b")
    assert may_go(play, "b")
    assert play.wait(1.0)[1:] == [], "the others train on until it has gone"
    play.leave("b")
    assert kinds(play.wait(SOON_S)) == ["JobWaiting"]


def test_where_too_few_stay_nobody_counts_on_who_makes_no_more_steps() -> None:
    play = of_size(3, "a", "b", "c")
    drain(play, "b")
    play.beat("b", last_step_done=True)
    play.complain("a", why="b left the world in good order")
    assert kinds(play.wait(SOON_S)) == ["JobWaiting"]
    assert may_go(play, "b")
    play.join("d")
    assert play.agree(5).step == 5
    assert play.world == ["a", "d", "c"]


def test_who_makes_no_more_steps_is_counted_on_for_its_state() -> None:
    play = of_size(2, "a", "b", **ALL_MAY_FAIL)
    drain(play, "a")
    play.die("b")
    play.wait(SOON_S)
    play.beat("a", last_step_done=True)
    play.join("c")
    play.wait(SOON_S)
    assert play.agree(5).step == 5
    assert (play.world, may_go(play, "a")) == (["a", "c"], True)
    play.complain("c", why="a does not enter the world")
    assert kinds(play.wait(SOON_S)) == ["JobWaiting"], "another world with it would be like this one"


def test_without_synchronising_too_who_is_counted_on_for_its_state_is_asked_for_it() -> None:
    play = of_size(2, "a", "b", use_synchronous_rescaling=False, **ALL_MAY_FAIL)
    drain(play, "a")
    play.die("b")
    play.wait(SOON_S)
    play.join("c")
    play.wait(SOON_S)
    assert play.agree(5).step == 5, "it may be saving something, and enters no world meanwhile"
    assert may_go(play, "a")


def test_where_too_few_stay_and_none_is_there_with_the_state_who_has_it_stays() -> None:
    play = of_size(3, "a", "b", "c")
    drain(play, "b")
    play.lose("a", "c")
    assert not may_go(play, "b")
    play.come_back("c")
    assert may_go(play, "b")


def test_where_too_few_stay_who_have_yet_to_meet_who_is_to_go_stays_until_they_have() -> None:
    play = of_size(2, "a", "b", use_synchronous_rescaling=False, **ALL_MAY_FAIL)
    play.die("b")
    play.join("c")
    play.wait(SOON_S)
    assert play.cluster.generation == 2, "nobody has stopped for it"
    drain(play, "a")
    assert not may_go(play, "a")
    play.beat("a", collective_seq=play.cluster.generation * COLLECTIVES_PER_WORLD + 1)
    assert may_go(play, "a")


def test_where_too_few_stay_who_holds_data_goes_when_that_has_been_taken_over() -> None:
    play = of_size(2, "a", "b")
    for member in play.cluster.members.values():
        member.with_data = True
    drain(play, "b")
    assert not may_go(play, "b")
    play.wait(SOON_S)
    play.agree(5)
    assert (play.world, may_go(play, "b")) == (["a", "b"], True)


def test_who_holds_data_stays_when_it_could_not_be_taken_over_because_too_few_were_left() -> None:
    play = of_size(3, "a", "b", "c", **ALL_MAY_FAIL)
    for member in play.cluster.members.values():
        member.with_data = True
    drain(play, "b")
    play.wait(SOON_S)
    play.die("c")
    play.wait(SOON_S)
    assert play.cluster.phase is Phase.WAITING
    assert not may_go(play, "b")


def test_where_too_few_stay_and_more_come_who_is_to_go_is_let_go_of() -> None:
    play = of_size(3, "a", "b", "c")
    drain(play, "b")
    play.wait(1.0)
    play.join("d")
    play.wait(SOON_S)
    play.agree()
    assert play.world == ["a", "d", "c"]


def test_of_several_who_are_to_go_no_more_stay_than_are_missing() -> None:
    play = of_size(3, "a", "b", "c", "d")
    drain(play, "b", "c", "d")
    play.join("e")
    play.wait(SOON_S)
    play.agree(5)
    assert play.world == ["a", "e", "d"]
    assert [may_go(play, name) for name in "bcd"] == [True, True, True]


def test_who_comes_while_all_of_a_full_world_are_to_go_is_given_the_state() -> None:
    play = Play(min_workers=3, max_workers=3)
    play.join("a", "b", "c")
    play.agree(0)
    drain(play, "a", "b", "c")
    play.join("d")
    play.wait(SOON_S)
    assert not any(may_go(play, name) for name in "abc")
    assert play.agree(5).step == 5
    assert "d" in play.world
    assert [may_go(play, name) for name in "abc"] == [True, True, True]


def test_who_holds_data_and_is_to_go_while_too_few_are_there_does_not_keep_the_daemon_busy() -> None:
    play = of_size(3, "a", "b", "c", **ALL_MAY_FAIL)
    for member in play.cluster.members.values():
        member.with_data = True
    play.die("c")
    play.wait(SOON_S)
    drain(play, "b")
    play.wait(1.0)
    assert play.cluster.due_at() > play.time
    assert play.cluster.phase is Phase.WAITING


def test_who_alone_has_the_state_waits_for_who_is_on_the_way_back() -> None:
    play = formed("a")
    play.join("b")
    drain(play, "a")
    play.restart()
    play.come_back("a")
    assert not may_go(play, "a"), "b has lost its connection with the daemon before"
    play.come_back("b")
    play.wait(SOON_S)
    play.agree(5)
    assert (play.world, may_go(play, "a")) == (["b"], True)


def test_who_alone_has_the_state_does_not_wait_for_who_does_not_come_back() -> None:
    play = formed("a")
    play.join("b")
    drain(play, "a")
    play.restart()
    play.come_back("a")
    play.wait(play.cluster.config.reconnect_grace_s + 1.0)
    assert may_go(play, "a")


def test_when_the_training_is_over_nobody_is_kept() -> None:
    play = formed("a", "b")
    drain(play, "a")
    play.cluster.abort(play.now, "enough")
    assert may_go(play, "a")


def test_who_is_in_no_world_may_go() -> None:
    play = formed("a")
    play.join("b")
    drain(play, "b")
    assert may_go(play, "b")


def test_all_who_are_to_go_may_go_when_their_attempt_has_come_to_nothing() -> None:
    play = formed("a")
    play.join("b")
    drain(play, "a")
    play.wait(SOON_S)
    assert not may_go(play, "a")
    play.leave("b")
    assert kinds(play.wait(SOON_S))[-1] == "JobWaiting"
    assert (may_go(play, "a"), play.cluster.phase) == (True, Phase.WAITING)


# How many it may be.


def test_a_thousand_who_are_to_go_make_one_world() -> None:
    names = [f"w{number}" for number in range(1_000)]
    play = formed(*names)
    drain(play, *names[1:])
    play.wait(SOON_S)
    play.agree()
    assert (play.world, play.cluster.generation) == (["w0"], 2)


def test_who_saves_for_long_behind_its_last_world_is_not_put_out() -> None:
    play = formed("a", "b", leave_timeout_ms=20_000)
    drain(play, "b")
    play.wait(SOON_S)
    play.agree()
    play.beat("b", last_step_done=True)
    play.wait(600.0)
    assert failed(play) == []


def test_who_does_not_go_though_it_is_in_no_world_any_more_is_put_out() -> None:
    play = formed("a", "b", leave_timeout_ms=20_000)
    drain(play, "b")
    play.wait(SOON_S)
    play.agree()
    play.wait(25.0)
    assert failed(play) == ["b"]


# Who saves behind its last world, while that comes to its end.


@pytest.mark.parametrize("how", ["fails", "leaves"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_who_saves_behind_its_last_world_is_kept_for_whoever_comes_when_nobody_of_that_is_left(
    how: str, synchronous: bool
) -> None:
    play = formed("a", "b", use_synchronous_rescaling=synchronous, **ALL_MAY_FAIL)
    drain(play, "a")
    play.wait(SOON_S)
    if synchronous:
        play.agree(5)
    play.beat("b", collective_seq=play.cluster.generation * COLLECTIVES_PER_WORLD + 1)
    play.beat("a", last_step_done=True)
    assert may_go(play, "a")
    play.join("c")
    play.die("b") if how == "fails" else play.leave("b")
    assert not may_go(play, "a"), "before the attempt at a world with the newcomer"
    play.wait(SOON_S)
    assert play.last(RescaleStarted).leaving == ["a"]
    assert not may_go(play, "a"), "while it is asked where it is"
    play.stop("a", stop=StopReport(5, holds_state=True))
    play.stop("c", stop=StopReport(0, holds_state=False))
    assert play.last(RescaleSynchronising).source.id == "a"
    assert not may_go(play, "a"), "while it gives what it has"
    play.ready("c")
    assert (play.world, play.last(RescaleCompleted).step) == (["c"], 5)
    assert may_go(play, "a")


def test_nobody_is_kept_for_those_who_have_gone_again() -> None:
    play = formed("a", "b", **ALL_MAY_FAIL)
    drain(play, "a")
    play.wait(SOON_S)
    play.agree(5)
    play.beat("a", last_step_done=True)
    play.join("c")
    play.die("b")
    play.leave("c")
    assert may_go(play, "a")


def test_who_has_gone_out_takes_over_no_data_though_the_daemon_was_another_one_then() -> None:
    play = formed("a", "b", "c", use_synchronous_rescaling=False, **ALL_MAY_FAIL)
    for member in play.cluster.members.values():
        member.with_data = True
        play.cluster.outbox.members.add(member.id)
    drain(play, "a")
    play.wait(SOON_S)
    play.ready("a", "b", "c")
    assert sorted(play.world) == ["b", "c"]
    play.restart()
    play.come_back("a", "b", "c")
    play.cluster.membership.state_holders = frozenset("b")
    play.die("b")
    play.wait(SOON_S)
    assert play.last(RescaleStarted).leaving == ["a"]
    seen = play.cluster.attempt_members("c", incarnation("c"))
    assert [worker.id for worker in seen.target] == ["c"]
    assert [worker.id for worker in seen.leaving] == ["a"]


@pytest.mark.parametrize("what", ["restarts", "blinks"])
def test_a_job_that_waits_forms_no_world_with_who_makes_no_more_steps_where_the_other_is_on_its_way_back(
    what: str,
) -> None:
    play = of_size(2, "a", "b")
    drain(play, "b")
    play.beat("b", last_step_done=True)
    play.complain("a", why="b left the world in good order")
    play.wait(SOON_S)
    assert play.cluster.phase is Phase.WAITING
    play.restart() if what == "restarts" else play.lose("a")
    play.tick()
    assert play.cluster.phase is Phase.WAITING
    play.come_back(*("ab" if what == "restarts" else "a"))
    play.beat("b", last_step_done=True)
    play.tick()
    assert play.cluster.phase is Phase.WAITING


def test_the_last_who_were_told_stay_also_behind_another_world() -> None:
    play = of_size(2, "a", "b", "c")
    drain(play, "c")
    play.time += SOON_S / 2
    drain(play, "a")
    play.time += SOON_S / 2
    drain(play, "b")
    play.wait(SOON_S)
    play.agree(5)
    assert play.world == ["a", "b"]
    assert list(play.cluster.membership.leavers) == ["a", "b"]
