"""Draining workers: each leaves when a world without it is committed, or when no world needs it."""

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
from tests.elastic.coordinator_playbook import Playbook, formed, incarnation, kinds

WISH = "the night"
SOON_S = 0.1
"""A little longer than the window in which further drains may follow."""
ALL_MAY_FAIL: dict[str, SettingValue] = {"failure_tolerance_percentage": 100, "max_consecutive_failures": 1_000}


def of_size(least: int, *names: str, **settings: SettingValue) -> Playbook:
    """A world of which so many are needed."""
    book = Playbook(min_workers=least, **settings)
    book.form_world(*names)
    return book


def drain(book: Playbook, *names: str) -> None:
    for name in names:
        book.coordinator.drain(name, book.now, WISH)


def with_a_spare() -> Playbook:
    """An attempt in which `c` must still take the state of survivor `a` or draining `b`."""
    book = formed("a", "b")
    book.join("c")
    drain(book, "b")
    book.wait(SOON_S)
    book.stop("c", stop=StopReport(0, holds_state=False))
    book.stop("a", "b", stop=StopReport(5, holds_state=True))
    return book


def may_go(book: Playbook, name: str) -> bool:
    return book.coordinator.may_leave(book.coordinator.members[name])


def failed(book: Playbook) -> list[str]:
    return [fact.worker_id for fact in book.facts if isinstance(fact, WorkerFailed)]


# The next world is without it.


def test_other_workers_form_a_world_without_draining_worker() -> None:
    book = formed("a", "b", "c")
    drain(book, "b")
    assert book.new_facts() == [WorkerDraining("b", WISH)]
    (started,) = book.wait(SOON_S)
    assert isinstance(started, RescaleStarted)
    assert (started.world_size, started.removed, started.draining) == (2, ["b"], ["b"])
    assert started.reason == "draining b: the night"
    completed = book.complete_attempt(5)
    assert (book.world, completed.removed, completed.step) == (["a", "c"], ["b"], 5)
    assert "b" in book.coordinator.members, "it may take its time to save what it has"
    book.new_facts()
    assert kinds(book.leave("b")) == ["WorkerLeft"]
    assert book.wait(10.0) == []


def test_second_drain_of_a_worker_changes_nothing() -> None:
    book = formed("a", "b")
    drain(book, "b", "b")
    assert kinds(book.new_facts()) == ["WorkerDraining"]


def test_drains_within_the_window_leave_in_one_rescale() -> None:
    book = formed("a", "b", "c", "d", "e")
    drain(book, "b")
    book.wait(SOON_S / 4)
    drain(book, "c", "d")
    book.wait(SOON_S)
    book.complete_attempt()
    assert (book.world, book.coordinator.generation) == (["a", "e"], 2)


def test_joiner_takes_the_rank_of_draining_worker() -> None:
    book = formed("a", "b", "c")
    book.join("d")
    drain(book, "a")
    book.wait(SOON_S)
    book.complete_attempt()
    assert book.world == ["d", "b", "c"]


def test_joiner_finds_room_in_a_full_world_in_which_a_worker_drains() -> None:
    book = Playbook(max_workers=1)
    book.join("a")
    book.complete_attempt(0)
    book.join("b")
    drain(book, "a")
    book.wait(SOON_S)
    assert book.complete_attempt(7).step == 7
    assert book.world == ["b"]


def test_a_joiner_that_is_to_go_is_not_taken_in() -> None:
    book = formed("a")
    book.join("b")
    drain(book, "b")
    book.new_facts()
    assert book.wait(100.0) == []


def test_a_joiner_that_is_to_go_while_it_is_taken_in_is_left_out() -> None:
    book = formed("a")
    book.join("b", "c")
    book.wait(30.0)
    drain(book, "b")
    book.wait(SOON_S)
    book.complete_attempt()
    assert book.world == ["a", "c"]


def test_the_next_daemon_forms_the_world_without_it() -> None:
    book = formed("a", "b")
    drain(book, "b")
    book.restart()
    book.reconnect("a", "b")
    book.wait(SOON_S)
    book.complete_attempt()
    assert book.world == ["a"]


def test_in_asynchronous_mode_the_next_world_holds_at_once() -> None:
    book = formed("a", "b", use_synchronous_rescaling=False)
    drain(book, "b")
    started, completed = book.wait(SOON_S)[-2:]
    assert isinstance(started, RescaleStarted)
    assert isinstance(completed, RescaleCompleted)
    assert (started.draining, completed.step, book.world) == (["b"], None, ["a"])


# It takes part until then.


def test_the_state_of_draining_worker_is_taken_over() -> None:
    book = formed("a", "b")
    book.join("c", "d")
    drain(book, "a", "b")
    book.wait(SOON_S)
    book.stop("a", stop=StopReport(7, holds_state=True))
    book.stop("b", stop=StopReport(8, holds_state=True))
    book.stop("c", "d", stop=StopReport(0, holds_state=False))
    settled = book.last(RescaleSynchronising)
    assert (settled.source.id, settled.step, settled.behind) == ("b", 8, 2)
    book.ready("c", "d")
    assert book.last(RescaleCompleted).step == 8
    assert book.world == ["c", "d"]


def test_in_asynchronous_mode_workers_that_alone_have_the_state_are_asked_for_it() -> None:
    book = formed("a", use_synchronous_rescaling=False)
    book.join("b")
    drain(book, "a")
    book.wait(SOON_S)
    assert book.complete_attempt(9).step == 9
    assert (book.world, book.coordinator.membership.state_holders) == (["b"], frozenset("b"))


def test_no_worker_goes_on_before_draining_worker_has_said_where_it_has_stopped() -> None:
    book = formed("a", "b")
    drain(book, "b")
    book.wait(SOON_S)
    book.stop("a", stop=StopReport(5, holds_state=True, finished=True))
    assert book.world == ["a", "b"]
    book.stop("b", stop=StopReport(6, holds_state=True))
    assert book.last(RescaleCompleted).step == 6


def test_of_two_with_the_same_state_survivor_gives_it() -> None:
    book = formed("a", "b")
    book.join("c")
    drain(book, "a")
    book.wait(SOON_S)
    book.complete_attempt(5)
    assert book.last(RescaleSynchronising).source.id == "b"


def test_dispensable_draining_worker_leaves_during_the_state_transfer() -> None:
    book = formed("a", "b")
    book.join("c")
    drain(book, "b")
    book.wait(SOON_S)
    book.stop("c", stop=StopReport(0, holds_state=False))
    book.stop("b", stop=StopReport(5, holds_state=True))
    assert not may_go(book, "b"), "a may be dead"
    book.stop("a", stop=StopReport(5, holds_state=True))
    assert may_go(book, "b")
    book.leave("b")
    book.wait(SOON_S)
    book.ready("c")
    assert (book.world, book.coordinator.attempts) == (["a", "c"], 2), "its leaving has disturbed no worker"


def test_worker_that_was_of_no_use_any_more_is_when_the_one_fails_worker_that_was_to_stay() -> None:
    book = with_a_spare()
    book.die("a")
    assert not may_go(book, "b"), "c has nothing yet"
    book.wait(SOON_S)
    assert book.complete_attempt(5).step == 5
    assert (book.world, may_go(book, "b")) == (["c"], True)


def test_where_none_survivor_has_the_state_all_workers_that_have_it_wait_until_it_is_taken() -> None:
    book = formed("a", "b")
    book.join("c")
    drain(book, "a", "b")
    book.wait(SOON_S)
    book.stop("c", stop=StopReport(0, holds_state=False))
    book.stop("a", "b", stop=StopReport(5, holds_state=True))
    assert (may_go(book, "a"), may_go(book, "b")) == (False, False)
    book.die("a")
    book.wait(SOON_S)
    book.complete_attempt(5)
    assert (book.world, book.coordinator.training.current_step) == (["c"], 5)


def test_worker_that_was_of_no_use_any_more_is_while_the_worker_that_was_to_stay_is_lost() -> None:
    book = with_a_spare()
    book.lose("a")
    assert not may_go(book, "b"), "a may be dead, and c has nothing yet"
    book.reconnect("a")
    assert may_go(book, "b")


def test_worker_that_gives_its_state_stays_though_a_joiner_has_it_already() -> None:
    book = formed("a")
    book.join("c", "d")
    drain(book, "a")
    book.wait(SOON_S)
    book.stop("c", stop=StopReport(5, holds_state=True))
    book.stop("d", stop=StopReport(0, holds_state=False))
    book.stop("a", stop=StopReport(5, holds_state=True))
    assert book.last(RescaleSynchronising).source.id == "a"
    assert not may_go(book, "a"), "d has been told to take it there"


def test_draining_worker_and_is_behind_takes_nothing() -> None:
    book = formed("a", "b")
    drain(book, "b")
    book.wait(SOON_S)
    book.stop("b", stop=StopReport(5, holds_state=True))
    book.stop("a", stop=StopReport(6, holds_state=True))
    assert book.world == ["a"]


def test_draining_worker_and_dies_is_done_without_and_counts_towards_no_limit() -> None:
    book = formed("a", "b", "c", failure_tolerance_percentage=0, max_consecutive_failures=1)
    drain(book, "b")
    book.wait(SOON_S)
    book.die("b")
    book.wait(SOON_S)
    book.complete_attempt()
    assert (book.world, book.coordinator.failure_budget.in_world) == (["a", "c"], 0)


def test_draining_worker_and_does_not_answer_fails() -> None:
    book = formed("a", "b", rescale_silence_ms=5_000)
    drain(book, "b")
    book.wait(SOON_S)
    book.stop("a", stop=StopReport(5, holds_state=True))
    book.wait(8.0)
    assert failed(book) == ["b"]
    book.complete_attempt(5)
    assert book.world == ["a"]


def test_that_its_connection_is_lost_does_not_end_draining_worker() -> None:
    book = formed("a", "b")
    drain(book, "b")
    book.lose("b")
    book.wait(SOON_S)
    book.reconnect("b")
    book.complete_attempt()
    assert (book.world, failed(book)) == (["a"], [])


def test_worker_that_has_gone_out_of_a_world_is_kept_until_all_of_the_next_one_have_the_state() -> None:
    book = formed("a", "b", use_synchronous_rescaling=False)
    book.join("c")
    drain(book, "a")
    book.wait(SOON_S)
    assert (book.world, book.coordinator.membership.state_holders) == (["c", "b"], frozenset("b"))
    assert not may_go(book, "a"), "c has nothing yet, and b may die"
    book.heartbeat("b", collective_seq=book.coordinator.generation * COLLECTIVES_PER_WORLD + 1)
    assert may_go(book, "a")


def test_worker_that_has_gone_out_of_a_world_is_asked_for_the_state_when_no_other_worker_has_it() -> None:
    book = formed("a", "b", use_synchronous_rescaling=False)
    book.join("c")
    drain(book, "a")
    book.wait(SOON_S)
    book.die("b")
    book.wait(SOON_S)
    started = book.last(RescaleStarted)
    assert (started.draining, started.removed) == (["a"], ["b"])
    book.stop("a", stop=StopReport(9, holds_state=True))
    book.stop("c", stop=StopReport(0, holds_state=False))
    book.ready("c")
    assert book.last(RescaleCompleted).step == 9
    assert (book.world, may_go(book, "a")) == (["c"], True)


def test_worker_that_has_gone_out_of_a_world_and_died_is_asked_for_nothing() -> None:
    book = formed("a", "b", use_synchronous_rescaling=False)
    book.join("c")
    drain(book, "a")
    book.wait(SOON_S)
    book.die("a")
    assert book.wait(1.0) == [], "no world needs it"
    book.die("b")
    book.wait(SOON_S)
    assert book.last(RescaleStarted).draining == []
    book.complete_attempt(0)
    assert book.world == ["c"]


def test_the_next_daemon_keeps_worker_that_has_gone_out_of_a_world_that_may_not_have_the_state() -> None:
    book = formed("a", "b", use_synchronous_rescaling=False)
    book.join("c")
    drain(book, "a")
    book.wait(SOON_S)
    book.restart()
    book.reconnect("a", "b", "c")
    assert not may_go(book, "a")
    book.heartbeat("b", collective_seq=book.coordinator.generation * COLLECTIVES_PER_WORLD + 1)
    assert may_go(book, "a")
    book.restart()
    assert not may_go(book, "a"), "while no state holder can be reached"
    book.reconnect("a", "b", "c")
    assert may_go(book, "a"), "it is not kept once more"


def test_worker_that_is_kept_after_its_last_world_is_not_evicted() -> None:
    book = formed("a", "b", use_synchronous_rescaling=False, leave_timeout_ms=20_000)
    book.join("c")
    drain(book, "a")
    book.wait(60.0)
    assert (may_go(book, "a"), failed(book)) == (False, [])


# When it is told while a world is formed.


def test_an_attempt_begins_anew_without_draining_worker() -> None:
    book = formed("a", "b", "c")
    book.die("c")
    book.wait(0.2)
    book.stop("a", stop=StopReport(5, holds_state=True))
    drain(book, "b")
    aborted, started = book.wait(SOON_S)[-2:]
    assert isinstance(aborted, RescaleAborted)
    assert isinstance(started, RescaleStarted)
    assert (started.draining, started.removed) == (["b"], ["b", "c"])
    assert not may_go(book, "b")
    assert book.complete_attempt(5).removed == ["b", "c"]
    assert may_go(book, "b")


def test_an_attempt_that_needs_draining_worker_comes_to_its_end() -> None:
    book = of_size(2, "a", "b", **ALL_MAY_FAIL)
    book.die("b")
    book.wait(SOON_S)
    book.join("c")
    assert book.coordinator.attempt is not None
    drain(book, "a")
    book.wait(1.0)
    assert not may_go(book, "a"), "it is the only one that has the state"
    assert book.complete_attempt(5).step == 5
    assert book.world == ["a", "c"]
    assert may_go(book, "a")
    book.leave("a")
    assert kinds(book.wait(SOON_S)) == ["JobWaiting"]
    assert book.coordinator.membership.state_holders & book.coordinator.members.keys() == {"c"}


def test_when_other_workers_come_an_attempt_does_without_draining_worker() -> None:
    book = of_size(2, "a", "b", **ALL_MAY_FAIL)
    book.die("b")
    book.wait(SOON_S)
    book.join("c")
    drain(book, "a")
    book.wait(1.0)
    book.join("d")
    book.wait(SOON_S)
    book.complete_attempt(5)
    assert book.world == ["c", "d"]


def test_leave_timeout_excludes_the_time_of_an_attempt() -> None:
    book = formed("a", "b", leave_timeout_ms=20_000, rescale_silence_ms=0)
    drain(book, "b")
    book.wait(30.0)
    book.complete_attempt(5)
    book.wait(1.0)
    assert failed(book) == [], "it has just heard that it may go"


# If no world can form without it.


def test_where_no_other_worker_is_draining_worker_may_go_at_once() -> None:
    book = formed("a", "b")
    drain(book, "a", "b")
    assert (may_go(book, "a"), may_go(book, "b")) == (True, True)
    assert book.wait(10.0)[2:] == []


def test_joiner_takes_the_state_of_a_world_that_drains_as_a_whole() -> None:
    book = formed("a", "b")
    drain(book, "a", "b")
    book.wait(10.0)
    assert "RescaleStarted" in kinds(book.join("c"))
    assert (may_go(book, "a"), may_go(book, "b")) == (False, False)
    assert book.complete_attempt(11).step == 11
    assert book.world == ["c"]
    assert may_go(book, "a")
    assert may_go(book, "b")


def test_where_too_few_would_be_left_workers_that_come_are_given_the_state_all_the_same() -> None:
    book = of_size(2, "a", "b", **ALL_MAY_FAIL)
    book.die("b")
    book.wait(SOON_S)
    drain(book, "a")
    book.join("c")
    book.wait(SOON_S)
    assert book.complete_attempt(11).step == 11
    assert (book.world, may_go(book, "a")) == (["a", "c"], True)


def test_only_state_holder_waits_for_so_many_that_they_can_take_it() -> None:
    book = of_size(3, "a", "b", "c", **ALL_MAY_FAIL)
    book.die("b", "c")
    book.wait(SOON_S)
    drain(book, "a")
    assert may_go(book, "a"), "no worker is there that might wait for anything"
    book.join("d")
    assert not may_go(book, "a")
    book.join("e")
    book.wait(SOON_S)
    book.complete_attempt()
    assert book.world == ["a", "d", "e"]


def test_where_too_few_stay_and_have_the_state_draining_worker_may_go() -> None:
    book = of_size(3, "a", "b", "c")
    drain(book, "b")
    assert may_go(book, "b")
    assert book.wait(1.0)[1:] == [], "the rest trains on until it has left"
    book.leave("b")
    assert kinds(book.wait(SOON_S)) == ["JobWaiting"]


def test_where_too_few_stay_no_worker_counts_on_worker_that_makes_no_more_steps() -> None:
    book = of_size(3, "a", "b", "c")
    drain(book, "b")
    book.heartbeat("b", last_step_done=True)
    book.report_peer("a", why="b left the world in good order")
    assert kinds(book.wait(SOON_S)) == ["JobWaiting"]
    assert may_go(book, "b")
    book.join("d")
    assert book.complete_attempt(5).step == 5
    assert book.world == ["a", "d", "c"]


def test_worker_that_makes_no_more_steps_is_counted_on_for_its_state() -> None:
    book = of_size(2, "a", "b", **ALL_MAY_FAIL)
    drain(book, "a")
    book.die("b")
    book.wait(SOON_S)
    book.heartbeat("a", last_step_done=True)
    book.join("c")
    book.wait(SOON_S)
    assert book.complete_attempt(5).step == 5
    assert (book.world, may_go(book, "a")) == (["a", "c"], True)
    book.report_peer("c", why="a does not enter the world")
    assert kinds(book.wait(SOON_S)) == ["JobWaiting"], "another world with it would be like this one"


def test_in_asynchronous_mode_too_worker_that_is_counted_on_for_its_state_is_asked_for_it() -> None:
    book = of_size(2, "a", "b", use_synchronous_rescaling=False, **ALL_MAY_FAIL)
    drain(book, "a")
    book.die("b")
    book.wait(SOON_S)
    book.join("c")
    book.wait(SOON_S)
    assert book.complete_attempt(5).step == 5, "it may be saving something, and enters no world meanwhile"
    assert may_go(book, "a")


def test_where_too_few_stay_and_none_is_there_with_the_state_that_has_it_stays() -> None:
    book = of_size(3, "a", "b", "c")
    drain(book, "b")
    book.lose("a", "c")
    assert not may_go(book, "b")
    book.reconnect("c")
    assert may_go(book, "b")


def test_where_too_few_stay_worker_that_have_yet_to_meet_draining_worker_stays_until_they_have() -> None:
    book = of_size(2, "a", "b", use_synchronous_rescaling=False, **ALL_MAY_FAIL)
    book.die("b")
    book.join("c")
    book.wait(SOON_S)
    assert book.coordinator.generation == 2, "no worker has stopped for it"
    drain(book, "a")
    assert not may_go(book, "a")
    book.heartbeat("a", collective_seq=book.coordinator.generation * COLLECTIVES_PER_WORLD + 1)
    assert may_go(book, "a")


def test_where_too_few_stay_worker_that_holds_data_goes_when_that_has_been_taken_over() -> None:
    book = of_size(2, "a", "b")
    for member in book.coordinator.members.values():
        member.with_data = True
    drain(book, "b")
    assert not may_go(book, "b")
    book.wait(SOON_S)
    book.complete_attempt(5)
    assert (book.world, may_go(book, "b")) == (["a", "b"], True)


def test_worker_that_holds_data_stays_when_it_could_not_be_taken_over_because_too_few_were_left() -> None:
    book = of_size(3, "a", "b", "c", **ALL_MAY_FAIL)
    for member in book.coordinator.members.values():
        member.with_data = True
    drain(book, "b")
    book.wait(SOON_S)
    book.die("c")
    book.wait(SOON_S)
    assert book.coordinator.phase is Phase.WAITING
    assert not may_go(book, "b")


def test_where_too_few_stay_and_more_come_draining_worker_is_let_go_of() -> None:
    book = of_size(3, "a", "b", "c")
    drain(book, "b")
    book.wait(1.0)
    book.join("d")
    book.wait(SOON_S)
    book.complete_attempt()
    assert book.world == ["a", "d", "c"]


def test_of_several_draining_workers_no_more_stay_than_are_missing() -> None:
    book = of_size(3, "a", "b", "c", "d")
    drain(book, "b", "c", "d")
    book.join("e")
    book.wait(SOON_S)
    book.complete_attempt(5)
    assert book.world == ["a", "e", "d"]
    assert [may_go(book, name) for name in "bcd"] == [True, True, True]


def test_worker_that_comes_while_all_of_a_full_world_are_to_go_is_given_the_state() -> None:
    book = Playbook(min_workers=3, max_workers=3)
    book.join("a", "b", "c")
    book.complete_attempt(0)
    drain(book, "a", "b", "c")
    book.join("d")
    book.wait(SOON_S)
    assert not any(may_go(book, name) for name in "abc")
    assert book.complete_attempt(5).step == 5
    assert "d" in book.world
    assert [may_go(book, name) for name in "abc"] == [True, True, True]


def test_worker_that_holds_data_and_is_to_go_while_too_few_are_there_does_not_keep_the_daemon_busy() -> None:
    book = of_size(3, "a", "b", "c", **ALL_MAY_FAIL)
    for member in book.coordinator.members.values():
        member.with_data = True
    book.die("c")
    book.wait(SOON_S)
    drain(book, "b")
    book.wait(1.0)
    assert book.coordinator.due_at() > book.time
    assert book.coordinator.phase is Phase.WAITING


def test_only_state_holder_waits_for_worker_that_is_on_the_way_back() -> None:
    book = formed("a")
    book.join("b")
    drain(book, "a")
    book.restart()
    book.reconnect("a")
    assert not may_go(book, "a"), "b has lost its connection with the daemon before"
    book.reconnect("b")
    book.wait(SOON_S)
    book.complete_attempt(5)
    assert (book.world, may_go(book, "a")) == (["b"], True)


def test_only_state_holder_does_not_wait_for_worker_that_does_not_come_back() -> None:
    book = formed("a")
    book.join("b")
    drain(book, "a")
    book.restart()
    book.reconnect("a")
    book.wait(book.coordinator.config.reconnect_grace_s + 1.0)
    assert may_go(book, "a")


def test_when_the_training_is_over_no_worker_is_kept() -> None:
    book = formed("a", "b")
    drain(book, "a")
    book.coordinator.abort(book.now, "enough")
    assert may_go(book, "a")


def test_worker_that_is_in_no_world_may_go() -> None:
    book = formed("a")
    book.join("b")
    drain(book, "b")
    assert may_go(book, "b")


def test_draining_workers_may_go_when_their_attempt_has_come_to_nothing() -> None:
    book = formed("a")
    book.join("b")
    drain(book, "a")
    book.wait(SOON_S)
    assert not may_go(book, "a")
    book.leave("b")
    assert kinds(book.wait(SOON_S))[-1] == "JobWaiting"
    assert (may_go(book, "a"), book.coordinator.phase) == (True, Phase.WAITING)


# How many it may be.


def test_a_thousand_draining_workers_make_one_world() -> None:
    names = [f"w{number}" for number in range(1_000)]
    book = formed(*names)
    drain(book, *names[1:])
    book.wait(SOON_S)
    book.complete_attempt()
    assert (book.world, book.coordinator.generation) == (["w0"], 2)


def test_worker_that_saves_for_long_after_its_last_world_is_not_evicted() -> None:
    book = formed("a", "b", leave_timeout_ms=20_000)
    drain(book, "b")
    book.wait(SOON_S)
    book.complete_attempt()
    book.heartbeat("b", last_step_done=True)
    book.wait(600.0)
    assert failed(book) == []


def test_worker_that_does_not_go_though_it_is_in_no_world_any_more_is_evicted() -> None:
    book = formed("a", "b", leave_timeout_ms=20_000)
    drain(book, "b")
    book.wait(SOON_S)
    book.complete_attempt()
    book.wait(25.0)
    assert failed(book) == ["b"]


# A worker that saves after its last world, while that world ends.


@pytest.mark.parametrize("how", ["fails", "leaves"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_worker_that_saves_after_its_last_world_is_kept_for_any_worker_that_comes_when_no_worker_of_that_is_left(
    how: str, synchronous: bool
) -> None:
    book = formed("a", "b", use_synchronous_rescaling=synchronous, **ALL_MAY_FAIL)
    drain(book, "a")
    book.wait(SOON_S)
    if synchronous:
        book.complete_attempt(5)
    book.heartbeat("b", collective_seq=book.coordinator.generation * COLLECTIVES_PER_WORLD + 1)
    book.heartbeat("a", last_step_done=True)
    assert may_go(book, "a")
    book.join("c")
    book.die("b") if how == "fails" else book.leave("b")
    assert not may_go(book, "a"), "before the attempt at a world with the newcomer"
    book.wait(SOON_S)
    assert book.last(RescaleStarted).draining == ["a"]
    assert not may_go(book, "a"), "while it is asked where it is"
    book.stop("a", stop=StopReport(5, holds_state=True))
    book.stop("c", stop=StopReport(0, holds_state=False))
    assert book.last(RescaleSynchronising).source.id == "a"
    assert not may_go(book, "a"), "while it gives what it has"
    book.ready("c")
    assert (book.world, book.last(RescaleCompleted).step) == (["c"], 5)
    assert may_go(book, "a")


def test_no_worker_is_kept_for_workers_that_have_gone_again() -> None:
    book = formed("a", "b", **ALL_MAY_FAIL)
    drain(book, "a")
    book.wait(SOON_S)
    book.complete_attempt(5)
    book.heartbeat("a", last_step_done=True)
    book.join("c")
    book.die("b")
    book.leave("c")
    assert may_go(book, "a")


def test_worker_that_has_gone_out_takes_over_no_data_though_the_daemon_was_another_one_then() -> None:
    book = formed("a", "b", "c", use_synchronous_rescaling=False, **ALL_MAY_FAIL)
    for member in book.coordinator.members.values():
        member.with_data = True
        book.coordinator.outbox.members.add(member.id)
    drain(book, "a")
    book.wait(SOON_S)
    book.ready("a", "b", "c")
    assert sorted(book.world) == ["b", "c"]
    book.restart()
    book.reconnect("a", "b", "c")
    book.coordinator.membership.state_holders = frozenset("b")
    book.die("b")
    book.wait(SOON_S)
    assert book.last(RescaleStarted).draining == ["a"]
    seen = book.coordinator.attempt_members("c", incarnation("c"))
    assert [worker.id for worker in seen.target] == ["c"]
    assert [worker.id for worker in seen.draining] == ["a"]


@pytest.mark.parametrize("what", ["restarts", "blinks"])
def test_a_job_that_waits_forms_no_world_with_worker_that_makes_no_more_steps_where_the_other_is_on_its_way_back(
    what: str,
) -> None:
    book = of_size(2, "a", "b")
    drain(book, "b")
    book.heartbeat("b", last_step_done=True)
    book.report_peer("a", why="b left the world in good order")
    book.wait(SOON_S)
    assert book.coordinator.phase is Phase.WAITING
    book.restart() if what == "restarts" else book.lose("a")
    book.tick()
    assert book.coordinator.phase is Phase.WAITING
    book.reconnect(*("ab" if what == "restarts" else "a"))
    book.heartbeat("b", last_step_done=True)
    book.tick()
    assert book.coordinator.phase is Phase.WAITING


def test_last_drained_members_stay_required_in_the_next_world() -> None:
    book = of_size(2, "a", "b", "c")
    drain(book, "c")
    book.time += SOON_S / 2
    drain(book, "a")
    book.time += SOON_S / 2
    drain(book, "b")
    book.wait(SOON_S)
    book.complete_attempt(5)
    assert book.world == ["a", "b"]
    assert list(book.coordinator.membership.draining) == ["a", "b"]
