from __future__ import annotations

from forged.elastic.membership.member import COLLECTIVES_PER_WORLD
from forged.elastic.rescale.attempt import StopReport
from forged.elastic.status.stall_report import STALLED_SHOWN_MAX, describe_stall
from tests.elastic.coordinator_playbook import WINDOW_S, Playbook, formed

PAUSED = "paused: night (until `forgectl jobs resume run`)"


def said(book: Playbook) -> str:
    return describe_stall(book.coordinator, book.time)


def test_a_world_that_trains_stands_nowhere() -> None:
    assert said(formed("a", "b")) == ""


def test_finished_job_has_no_stall_report() -> None:
    book = formed("a", min_workers=1)
    book.coordinator.pause(book.now, "night")
    book.coordinator.abort(book.now, "enough")
    assert said(book) == ""


def test_pause_and_its_reason_are_shown_until_resume_and_after_a_restart() -> None:
    book = formed("a", "b")
    book.coordinator.pause(book.now, "night")
    assert said(book) == PAUSED
    book.die("b")
    book.wait(0.1)
    book.complete_attempt()
    book.restart()
    assert said(book) == PAUSED
    book.reconnect("a")
    book.coordinator.resume(book.now, "")
    assert said(book) == ""


def test_worker_that_is_stalled_is_named_with_how_long_and_where() -> None:
    book = formed("a", "s1", stall_timeout_ms=5_000)
    book.heartbeat("a", "s1", step=73, collective_seq=5_000)
    book.heartbeat("a", collective_seq=5_001)
    book.wait(12.0, still=True)
    assert said(book) == (
        "s1 stalled for 12 s after step 73, alive without progress: `forgectl workers stack s1` shows where, "
        "`forgectl workers evict s1` if it hangs"
    )


def hold_up(book: Playbook, name: str, seconds: float) -> None:
    for _ in range(round(seconds / 0.5)):
        book.pulse(name)
        book.wait(0.5, silent=[name], still=True)


def test_worker_that_is_blocked_is_named_long_before_it_is_stalled() -> None:
    book = formed("a", "b")
    hold_up(book, "b", 5.0)
    assert said(book) == "", "a heartbeat may be late"
    hold_up(book, "b", 3.0)
    assert said(book) == (
        "no step for 8 s; no heartbeat from b for 8 s, but its process lives: suspended, or the GIL is held: "
        "`forgectl workers stack b` shows where"
    )
    book.heartbeat("b", collective_seq=1)
    assert said(book) == ""


def test_worker_without_a_connection_whose_pulse_is_alive_is_not_called_suspended() -> None:
    book = formed("a", "b", reconnect_grace_ms=60_000)
    hold_up(book, "b", 1.0)
    book.lose("b")
    hold_up(book, "b", 2.0)
    assert said(book) == "no connection from b for 2 s, but its process lives"


def test_worker_that_is_blocked_in_a_rescale_is_named_too() -> None:
    book = formed("a", "b")
    book.coordinator.rescale(book.now, "")
    hold_up(book, "b", 8.0)
    attempt, silent = said(book).split("; ")
    assert attempt == (
        "attempt 2 waits for a, b to finish the current step and stop "
        "(8 s so far, without a limit while the step lasts: `forgectl workers evict WORKER` if it hangs)"
    )
    assert silent.startswith("no heartbeat from b for 8 s")


def test_meeting_to_which_a_stalled_or_late_worker_has_not_come_is_named() -> None:
    book = formed("a", "s1", stall_timeout_ms=20_000)
    book.heartbeat("a", "s1", step=73, collective_seq=5_000_000_000)
    book.heartbeat("a", step=73, collective_seq=5_000_000_001)
    book.wait(12.0, still=True)
    book.heartbeat("s1", step=73, collective_seq=5_000_000_000, meeting="forward")
    book.heartbeat("a", step=73, collective_seq=5_000_000_001, meeting="backward")
    behind = "all other workers are ahead of s1, not come to meeting 'backward'"
    assert said(book) == f"no step for 12 s, possibly a long step: {behind}"
    book.wait(12.0, still=True)
    book.heartbeat("a", step=73, collective_seq=5_000_000_001, meeting="backward")
    assert said(book) == (
        "s1 stalled for 24 s after step 73, alive without progress, not come to meeting 'backward':"
        " `forgectl workers stack s1` shows where, `forgectl workers evict s1` if it hangs"
    )


def test_while_training_is_paused_no_worker_holds_it_up() -> None:
    book = formed("a", "b")
    book.coordinator.pause(book.now, "night")
    hold_up(book, "b", 8.0)
    assert said(book) == PAUSED


def test_of_many_workers_that_are_stalled_the_first_are_named() -> None:
    book = formed(*(f"w{number}" for number in range(STALLED_SHOWN_MAX + 2)))
    for member in book.coordinator.members.values():
        member.stalled = True
    assert said(book).endswith("; 2 more stalled")
    assert said(book).count(" stalled for ") == STALLED_SHOWN_MAX


def fail_world(book: Playbook, *pairs: tuple[str, str]) -> None:
    """Another world comes to nothing, because these do not reach each other."""
    for one, other in pairs:
        book.report_peer(one, other)
    book.wait(2.0)
    book.complete_attempt()


class TestPeerReports:
    def test_peer_reports_are_shown_until_a_step_is_committed(self) -> None:
        book = formed("a", "b", "c")
        fail_world(book, ("c", "b"))
        assert said(book) == "c cannot reach b, in 1 world so far; one worker is evicted after 3 such worlds"
        fail_world(book, ("b", "c"))
        assert (
            said(book)
            == "b and c cannot reach each other, in 2 worlds so far; one worker is evicted after 3 such worlds"
        )
        book.heartbeat("a", "b", step=1, collective_seq=1)
        assert said(book) == ""

    def test_peer_report_is_shown_while_it_awaits_evidence(self) -> None:
        book = formed("a", "b", "c")
        book.report_peer("c", "b", why="it got no answer")
        begins, reports = said(book).split("; ", 1)
        assert begins == "attempt 2 is about to start: c cannot continue: it got no answer"
        assert reports.startswith("c cannot reach b, in 1 world so far")

    def test_stall_is_reported_during_a_rescale_without_a_reported_problem(self) -> None:
        book = formed("a", "b", "c")
        book.report_peer("c", "b")
        book.wait(2.0)
        assert said(book).split("; ")[1] == "c cannot reach b, in 1 world so far"
        book.stop("a", "b", stop=StopReport(1, holds_state=True))
        book.stop("c", stop=StopReport(0, holds_state=True))
        book.receive_state("c", problem="a gives it nothing")
        assert said(book).split("; ")[1:] == ["c: a gives it nothing"]

    def test_tells_of_no_long_step_beside_it(self) -> None:
        book = formed("a", "b", "c")
        fail_world(book, ("c", "b"))
        book.wait(12.0, still=True)
        assert said(book).endswith("one worker is evicted after 3 such worlds; no step for 12 s")

    def test_may_name_no_peer(self) -> None:
        book = formed("a", "b")
        fail_world(book, ("b", ""))
        assert said(book).startswith("b cannot continue, in 1 world so far")

    def test_is_shown_whole_where_three_workers_report(self) -> None:
        book = formed(*"abcdef")
        fail_world(book, *((one, "f") for one in "abc"))
        assert said(book).startswith("a cannot reach f, b cannot reach f, c cannot reach f, in 1 world")

    def test_is_counted_where_they_are_many(self) -> None:
        book = formed(*"abcdef")
        fail_world(book, *((one, "f") for one in "abcd"))
        few = "a cannot reach f, b cannot reach f, c cannot reach f, "
        assert said(book).startswith(f"{few}1 more reports problems, in 1 world")
        fail_world(book, ("e", "f"))
        assert said(book).startswith(f"{few}2 more report problems, in 2 worlds")


class TestIncompleteWorld:
    def test_failure_is_shown_until_the_next_attempt_starts(self) -> None:
        book = formed("a", "b")
        book.die("b")
        assert said(book) == "attempt 2 is about to start: b failed: its process has ended"

    def test_waits_for_more_where_too_few_are_left(self) -> None:
        book = formed("a", "b", min_workers=2)
        book.die("b")
        why, waits = said(book).split("; ")
        assert why == "b failed: its process has ended"
        assert waits == "1 worker waits for 1 more to join: min_workers is 2"


class TestNoStep:
    def test_long_step_is_shown_although_all_members_send_heartbeats(self) -> None:
        book = formed("a", "b")
        book.wait(9.0, still=True)
        assert said(book) == "", "a step may last"
        book.wait(3.0, still=True)
        assert said(book) == "no step for 12 s, possibly a long step"
        book.heartbeat("a", collective_seq=COLLECTIVES_PER_WORLD)
        assert said(book) == "", "a worker has come further"

    def test_long_step_names_the_member_that_the_collective_waits_for(self) -> None:
        book = formed("a", "b", "c")
        book.heartbeat("a", "b", collective_seq=5_000)
        book.wait(12.0, still=True)
        assert said(book) == "no step for 12 s, possibly a long step", "that was another world"
        book.heartbeat("a", "b", collective_seq=COLLECTIVES_PER_WORLD + 1)
        book.wait(12.0, still=True)
        assert said(book) == "no step for 12 s, possibly a long step: all other workers are ahead of c"

    def test_is_no_matter_while_it_rests_nor_counted_from_before(self) -> None:
        book = formed("a", "b")
        book.coordinator.pause(book.now, "night")
        book.wait(60.0, still=True)
        assert said(book) == PAUSED
        book.coordinator.resume(book.now, "")
        assert said(book) == ""

    def test_waits_for_worker_that_has_no_connection_as_long_as_it_may_come_back(self) -> None:
        book = formed("a", "b", worker_heartbeat_timeout_ms=4_000)
        book.lose("b")
        book.wait(5.0, still=True)
        assert said(book) == "no step for 5 s: no connection to b (10 s left to reconnect)"
        book.time += 60.0
        assert said(book) == "no step for 65 s: no connection to b", "nothing can be decided, or that is about to be"

    def test_single_lost_member_is_no_stall_of_the_world(self) -> None:
        book = formed("a", "b", "c")
        book.lose("b")
        book.wait(12.0)
        assert said(book) == ""

    def test_long_step_is_not_shown_earlier_with_short_heartbeats(self) -> None:
        book = formed("a", "b", worker_heartbeat_timeout_ms=200)
        book.wait(4.0, still=True)
        assert said(book) == ""

    def test_counts_from_its_beginning_and_from_when_the_daemon_is_back(self) -> None:
        book = formed("a", "b")
        book.wait(8.0, still=True)
        book.restart()
        book.reconnect("a", "b")
        book.wait(8.0, still=True)
        assert said(book) == ""


def test_missing_workers_and_remaining_wait_are_shown() -> None:
    book = formed("a", "b", "c", min_workers=3, min_workers_timeout_ms=10_000)
    book.die("c")
    book.wait(3.0)
    assert said(book) == "2 workers wait for 1 more to join: min_workers is 3, otherwise the job is aborted in 7 s"


def test_too_few_may_wait_for_ever() -> None:
    book = Playbook(min_workers=3, min_workers_timeout_ms=None)
    assert said(book) == "no worker is connected, 3 must join: min_workers is 3"
    book.join("a")
    assert said(book) == "1 worker waits for 2 more to join: min_workers is 3"


def test_a_job_that_no_worker_is_left_of_says_so() -> None:
    book = formed("a", min_workers_timeout_ms=10_000)
    book.die("a")
    book.wait(4.0)
    assert said(book) == "no worker is connected, 1 must join: min_workers is 1, otherwise the job is aborted in 6 s"


def test_workers_that_form_a_world_wait_until_no_worker_joins_any_more() -> None:
    book = Playbook()
    book.join("a", "b")
    book.wait(10.0)
    assert said(book) == (
        "2 workers wait until no worker has joined for 30 s (20 s left, at once with `forgectl jobs rescale run`)"
    )
    book.wait(19.9)
    assert said(book) == (
        "2 workers wait until no worker has joined for 30 s (1 s left, at once with `forgectl jobs rescale run`)"
    )


def test_waiting_worker_beyond_max_workers_is_shown() -> None:
    book = formed("a")
    book.coordinator.configure({"max_workers": 1})
    book.join("b")
    assert said(book) == "1 worker waits until another leaves: max_workers is 1"


def test_joiner_waits_for_more_after_min_workers_was_raised() -> None:
    """The limit was raised while they trained."""
    book = formed("a", "b")
    book.coordinator.configure({"min_workers": 5})
    book.join("c")
    assert said(book) == "1 worker waits for 2 more to join: min_workers is 5"


def test_attempt_report_names_awaited_workers_and_the_reason() -> None:
    book = formed("a", "b")
    book.join("c")
    book.wait(WINDOW_S)
    book.time += 12.0
    book.stop("a", stop=StopReport(3, holds_state=True))
    book.stop("c", stop=StopReport(0, holds_state=False))
    assert said(book) == "attempt 2 waits for b to stop (12 s so far, b will fail in 15 s if nothing changes)"
    book.stop("b", stop=StopReport(3, holds_state=True))
    assert said(book) == (
        "attempt 2 waits for c to receive state and data (12 s so far, c will fail in 15 s if nothing changes)"
    )


def test_attempt_report_names_what_a_joiner_outside_its_step_loop_must_do() -> None:
    book = Playbook()
    book.join("a", "b")
    book.wait(30.0)
    book.stop("a", stop=StopReport(0, holds_state=False))
    book.time += 5.0
    assert said(book) == (
        "attempt 1 waits for b to enter the step loop (5 s so far, b will fail in 10 s if nothing changes)"
    )


def test_failure_during_an_attempt_is_shown_until_the_next_one_starts() -> None:
    book = formed("a", "b")
    book.coordinator.rescale(book.now, "a wish")
    book.stop("a", stop=StopReport(1, holds_state=True))
    book.die("b")
    assert said(book) == "attempt 3 is about to start: a wish; b failed: its process has ended"


def test_an_attempt_over_which_the_daemon_died_waits_for_worker_that_is_not_back() -> None:
    book = formed("a", "b")
    book.join("c")
    book.wait(WINDOW_S)
    book.restart()
    book.reconnect("a", "c")
    assert said(book) == "attempt 3 starts when b has reconnected, in 15 s at the latest"


def test_stall_report_names_all_reasons() -> None:
    book = formed("a")
    book.coordinator.configure({"max_workers": 1})
    book.join("b", "c")
    book.coordinator.pause(book.now, "night")
    assert said(book) == f"{PAUSED}; 2 workers wait until another leaves: max_workers is 1"
