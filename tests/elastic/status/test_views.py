from __future__ import annotations

import pytest

from forged.elastic.messages import PlannedWorker, RescaleView
from forged.elastic.model import WorkerStatus
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import StopReport
from forged.elastic.status.views import PLANNED_MAX, cluster_view, drain_remarks, plan, worker_view
from forged.errors import RequestRefused
from tests.elastic.coordinator_playbook import WINDOW_S, Playbook, formed


def status(book: Playbook, name: str) -> WorkerStatus:
    return worker_view(book.coordinator, book.coordinator.members[name], book.time).status


def test_worker_view_has_all_known_values() -> None:
    book = formed("a", "b")
    book.time += 2.0
    book.pulse("b", step=7, cpu_s=12.5)
    book.time += 0.5
    view = worker_view(book.coordinator, book.coordinator.members["b"], book.time)
    assert (view.id, view.job, view.rank, view.generation, view.step) == ("b", "run", 1, 1, 7)
    assert (view.status, view.last_heartbeat_age_s, view.cpu_s) == (WorkerStatus.ACTIVE, 0.5, 12.5)
    assert (view.address, view.connected, view.stalled) == ("host-b:7000", True, False)


def test_new_worker_has_no_heartbeat_age() -> None:
    book = Playbook()
    book.join("a")
    view = worker_view(book.coordinator, book.coordinator.members["a"], book.time)
    assert (view.rank, view.last_heartbeat_age_s, view.cpu_s) == (-1, None, None)


def test_a_worker_goes_through_its_statuses() -> None:
    book = formed("a")
    book.join("b")
    assert (status(book, "a"), status(book, "b")) == (WorkerStatus.ACTIVE, WorkerStatus.JOINING)
    book.wait(WINDOW_S)
    assert (status(book, "a"), status(book, "b")) == (WorkerStatus.RESCALING, WorkerStatus.RESCALING)
    book.complete_attempt()
    assert (status(book, "a"), status(book, "b")) == (WorkerStatus.ACTIVE, WorkerStatus.ACTIVE)
    book.coordinator.drain("b", book.now, "a test")
    assert status(book, "b") is WorkerStatus.LEAVING


def test_a_job_is_shown_as_it_stands() -> None:
    book = formed("a", "b", "c")
    book.join("d")
    book.die("b")
    view = cluster_view(book.coordinator, book.time)
    assert (view.job, view.phase, view.paused, view.generation) == ("run", Phase.RUNNING, False, 1)
    assert (view.world_size, view.joining, view.failures, view.rescale) == (2, 1, 1, None)
    assert view.reason == "attempt 2 is about to start: b failed: its process has ended", "not that of the last rescale"
    assert cluster_view(formed("a", "b", "c").coordinator, 0.0).reason == "a, b, c joined"


def test_reason_of_waiting_job_says_what_it_waits_for_after_a_pause() -> None:
    book = formed("a", "b", min_workers=2)
    book.die("b")
    book.wait(0.1)
    book.coordinator.pause(book.now, "night")
    book.coordinator.resume(book.now, "day")
    view = cluster_view(book.coordinator, book.time)
    assert (view.phase, view.reason) == (Phase.WAITING, view.stall_report)
    assert view.reason.startswith(
        "1 worker waits for 1 more to join: min_workers is 2, otherwise the job is aborted in "
    )


def test_a_rescale_is_shown_with_worker_that_is_waited_for() -> None:
    book = formed("a", "b")
    book.join("c")
    book.wait(WINDOW_S)
    book.time += 1.5
    book.stop("b", stop=StopReport(3, holds_state=True))
    rescale = cluster_view(book.coordinator, book.time).rescale
    assert isinstance(rescale, RescaleView)
    assert (rescale.attempt, rescale.stage, rescale.waiting_for) == (2, "stopping", ["a", "c"])
    assert (rescale.added, rescale.removed, rescale.reason) == (["c"], [], "c joined")
    assert rescale.for_s >= 1.5
    book.stop("a", stop=StopReport(3, holds_state=True))
    book.stop("c", stop=StopReport(0, holds_state=False))
    rescale = cluster_view(book.coordinator, book.time).rescale
    assert rescale is not None
    assert (rescale.stage, rescale.waiting_for) == ("synchronising", ["c"])


def test_a_rescale_in_the_background_is_shown_beside_workers_that_train() -> None:
    book = formed("a", use_synchronous_rescaling=False)
    book.coordinator.members["a"].with_data = True
    book.join("b")
    book.wait(WINDOW_S)
    view = cluster_view(book.coordinator, book.time)
    assert view.rescale is not None
    assert (view.phase, view.rescale.stage, view.rescale.waiting_for) == (Phase.RESCALING, "transferring", ["a"])
    assert view.stall_report == (
        "attempt 2 waits for a to receive training data while training continues "
        "(0 s so far, a will fail in 15 s if nothing changes)"
    )
    assert (status(book, "a"), status(book, "b")) == (WorkerStatus.ACTIVE, WorkerStatus.RESCALING)


@pytest.mark.parametrize("size", [0, -1, PLANNED_MAX + 1])
def test_a_plan_for_an_impossible_number_is_refused(size: int) -> None:
    with pytest.raises(RequestRefused) as error:
        plan(formed("a").coordinator, size)
    assert error.value.code == "plan_invalid"


def test_a_plan_names_worker_that_would_have_which_rank_and_moves_no_worker() -> None:
    book = formed("a", "b", "c")
    book.join("d")
    smaller, larger = plan(book.coordinator, 2), plan(book.coordinator, 6)
    assert smaller.workers == [PlannedWorker("a", 0, 0), PlannedWorker("b", 1, 1), PlannedWorker("c", 2, -1)]
    assert [worker.id for worker in larger.workers] == ["a", "b", "c", "d", "new-1", "new-2"]
    assert [worker.new_rank for worker in larger.workers] == [0, 1, 2, 3, 4, 5]
    assert (smaller.ranks_changed, larger.ranks_changed) == (0, 0)
    assert larger.remarks == ["2 workers must still join"]
    assert plan(book.coordinator, 5).remarks == ["1 worker must still join"]


def test_draining_worker_is_in_no_planned_world() -> None:
    book = formed("a", "b", "c")
    book.join("d")
    book.coordinator.drain("a", book.now, "a test")
    planned = plan(book.coordinator, 3)
    assert {one.id: one.new_rank for one in planned.workers} == {"d": 0, "b": 1, "c": 2, "a": -1}
    book.wait(1.0)
    book.complete_attempt()
    assert "a" in book.coordinator.members
    assert [one.id for one in plan(book.coordinator, 4).workers] == ["d", "b", "c", "new-1"]


def test_worker_that_saves_after_its_last_world_does_not_join() -> None:
    book = formed("a", "b")
    book.coordinator.drain("a", book.now, "a test")
    book.wait(1.0)
    book.complete_attempt()
    view = cluster_view(book.coordinator, book.time)
    assert (view.world_size, view.joining) == (1, 0)


def test_a_plan_for_a_job_that_is_over_is_refused() -> None:
    book = formed("a")
    book.coordinator.abort(book.now, "enough")
    with pytest.raises(RequestRefused) as error:
        plan(book.coordinator, 2)
    assert (error.value.code, error.value.message) == ("job_over", "job run is aborted: enough")


class TestPlanWithMissingMembers:
    def test_goes_by_how_many_are_there_and_names_worker_that_is_not(self) -> None:
        book = formed("a", "b", "c", "d", min_workers=3, failure_tolerance_percentage=80)
        book.die("b", "d")
        book.wait(0.1)
        planned = plan(book.coordinator, 4)
        assert (planned.world_size, planned.new_world_size, planned.missing, planned.gone) == (2, 4, 2, ["b", "d"])
        assert planned.remarks == ["b, d of world 1 are gone", "2 workers must still join"]
        assert plan(book.coordinator, 5).remarks[-1] == "3 workers must still join"

    def test_gives_their_ranks_to_workers_that_come_and_none_to_them(self) -> None:
        book = formed("a", "b", "c", "d", min_workers=3, failure_tolerance_percentage=80)
        book.die("b", "c")
        book.join("e")
        planned = plan(book.coordinator, 4)
        ranks = {one.id: one.new_rank for one in planned.workers}
        assert ranks == {"a": 0, "e": 1, "new-1": 2, "d": 3, "b": -1, "c": -1}
        assert planned.ranks_changed == 0

    def test_while_a_rescale_is_under_way_goes_by_worker_that_is_there_too(self) -> None:
        book = formed("a", "b", "c", failure_tolerance_percentage=80)
        book.die("b")
        book.wait(0.1)
        assert book.coordinator.attempt is not None
        planned = plan(book.coordinator, 3)
        assert (planned.world_size, planned.remarks[-1]) == (2, "1 worker must still join")
        assert [one.id for one in planned.workers] == ["a", "new-1", "c", "b"]

    def test_tells_that_rate_and_batch_were_those_of_more(self) -> None:
        book = Playbook(scale_batch_with_world=True, failure_tolerance_percentage=80)
        book.form_world("a", "b", learning_rate=0.2, global_batch_size=64)
        book.die("b")
        planned = plan(book.coordinator, 1)
        assert (planned.learning_rate, planned.new_learning_rate) == (0.2, 0.1)
        assert planned.remarks == [
            "b of world 1 is gone",
            "current rate and batch are for a world of 2 workers",
        ]

    def test_counts_worker_that_may_come_back_and_says_so(self) -> None:
        book = formed("a", "b")
        book.lose("b")
        assert plan(book.coordinator, 2).remarks == ["b is included, without a connection"]

    def test_worker_that_is_back_as_another_is_not_gone(self) -> None:
        book = formed("a", "b")
        book.die("b")
        book.join("b", life=2)
        planned = plan(book.coordinator, 2)
        assert (planned.world_size, planned.gone, planned.missing) == (1, [], 0)
        assert planned.workers == [PlannedWorker("a", 0, 0), PlannedWorker("b", 1, 1)]


def test_worker_that_has_yet_to_come_is_called_like_no_worker_that_is_there() -> None:
    book = formed("new-1")
    assert [one.id for one in plan(book.coordinator, 3).workers] == ["new-1", "new-2", "new-3"]


def test_joiner_and_cannot_be_reached_is_not_counted_on() -> None:
    book = formed("a")
    book.join("b")
    book.lose("b")
    assert plan(book.coordinator, 2).missing == 1


def test_a_world_is_as_large_as_those_of_it_that_are_there() -> None:
    book = formed("a", "b", min_workers=2, failure_tolerance_percentage=100)
    book.die("a", "b")
    book.wait(0.1)
    view = cluster_view(book.coordinator, book.time)
    assert (view.phase, view.world_size, view.stall_report[:18]) == (Phase.WAITING, 0, "no worker is conne")


def test_worker_that_waits_for_other_workers_to_come_is_not_active() -> None:
    book = formed("a", "b", min_workers=2)
    book.die("b")
    book.wait(0.1)
    assert book.coordinator.phase is Phase.WAITING
    assert status(book, "a") is WorkerStatus.RESCALING


class TestDrainRemarks:
    def test_worker_that_leaves_enough_behind_goes_without_a_remark(self) -> None:
        book = formed("a", "b")
        book.coordinator.drain("a", book.now, "")
        assert drain_remarks(book.coordinator, "a") == []

    def test_the_last_worker_takes_the_state_with_it(self) -> None:
        book = formed("a")
        book.coordinator.drain("a", book.now, "")
        assert drain_remarks(book.coordinator, "a") == [
            "training will stop: no worker left, min_workers is 1",
            "the training state is lost when it leaves: no other worker can take it;"
            " save a checkpoint in the script first, or start another worker",
        ]

    def test_the_last_of_several_draining_workers_takes_the_state_along(self) -> None:
        book = formed("a", "b")
        book.coordinator.drain("a", book.now, "")
        book.coordinator.drain("b", book.now, "")
        remarks = drain_remarks(book.coordinator, "b")
        assert any(remark.startswith("the training state is lost when it leaves") for remark in remarks)

    def test_a_worker_joiner_takes_the_state_over(self) -> None:
        book = formed("a")
        book.join("b")
        book.coordinator.drain("a", book.now, "")
        assert drain_remarks(book.coordinator, "a") == []

    def test_worker_that_cannot_hear_of_it_or_does_not_get_on_is_named(self) -> None:
        book = formed("a", "b")
        book.coordinator.members["a"].stalled = True
        book.lose("a")
        book.coordinator.drain("a", book.now, "")
        stalled, lost = drain_remarks(book.coordinator, "a")
        assert stalled == "a is stalled and leaves after its step; evict it if the step never ends"
        assert lost == "a has no connection and drains when it is back"

    def test_worker_that_is_not_trained_with_is_not_missed(self) -> None:
        book = formed("a")
        book.join("spare")
        book.coordinator.drain("spare", book.now, "")
        assert drain_remarks(book.coordinator, "spare") == []


def test_a_plan_tells_rate_and_batch_and_changes_nothing() -> None:
    book = Playbook(scale_batch_with_world=True, min_workers=2, max_workers=4)
    book.form_world("a", "b", learning_rate=0.1, global_batch_size=64)
    doubled = plan(book.coordinator, 4)
    assert (doubled.learning_rate, doubled.new_learning_rate) == (0.1, 0.2)
    assert (doubled.global_batch_size, doubled.new_global_batch_size) == (64, 128)
    assert plan(book.coordinator, 1).remarks == ["the job would wait: min_workers is 2"]
    assert plan(book.coordinator, 5).remarks[-1] == "no more than max_workers are taken in: max_workers is 4"
    assert not book.coordinator.outbox
    assert book.world == ["a", "b"]
