"""Replica groups: worlds of whole groups, broken groups, and where the state of each group rank comes from."""

from __future__ import annotations

import pytest

from forged.elastic.membership.member import Member
from forged.elastic.messages import (
    GroupBroken,
    JobAborted,
    ProgressLost,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    WorkerDraining,
    WorkerFailed,
)
from forged.elastic.rescale.attempt import StopReport, choose_sources
from forged.elastic.status.stall_report import describe_stall
from forged.elastic.status.views import cluster_view, worker_view
from forged.errors import RequestRefused, Unavailable
from forged.jobs.model import SettingValue
from tests.elastic.coordinator_playbook import WINDOW_S, Playbook, incarnation, kinds, newcomer

WINDOW = {"failure_tolerance_percentage": 100}


def member(name: str, life: int = 1, now: float = 0.0) -> Member:
    """The worker `a1` has group rank 1 of group `a`; what follows is only part of its id."""
    found = newcomer(name, life, now)
    found.group, found.group_rank = name[0], int(name[1])
    return found


class Groups(Playbook):
    """A coordinator of a job in groups."""

    def __init__(self, group_size: int = 2, **settings: SettingValue) -> None:
        super().__init__(**settings)
        self.coordinator.settle_group_size(group_size)

    def join(self, *names: str, life: int = 1) -> list[object]:  # type: ignore[override]
        for name in names:
            self.coordinator.join(member(name, life, self.time), self.now)
            self.settle()
        return list(self.new_facts())

    def report(self, **steps: tuple[int, bool]) -> None:
        """All members of the attempt report where they have stopped; those not named hold no state."""
        attempt = self.coordinator.attempt
        assert attempt is not None
        for name in attempt.members:
            step, holds = steps.get(name, (0, False))
            self.stop(name, stop=StopReport(step, holds))

    @property
    def sources(self) -> list[str]:
        return [worker.id for worker in self.last(RescaleSynchronising).sources]


def formed(*names: str, group_size: int = 2, step: int = 10, **settings: SettingValue) -> Groups:
    """A job whose first world has these workers."""
    book = Groups(group_size, **settings)
    book.form_world(*names, step=step)
    book.heartbeat(*names, step=step, collective_seq=(1 << 32) + 5)
    book.new_facts()
    return book


# Worlds.


def test_world_has_whole_groups_in_the_order_of_their_group_ranks() -> None:
    assert formed("b1", "a0", "a1", "b0").world == ["b0", "b1", "a0", "a1"]


def test_half_group_waits_until_it_is_whole() -> None:
    book = formed("a0", "a1")
    book.join("b1")
    book.wait(2 * WINDOW_S)
    assert book.world == ["a0", "a1"]
    assert "1 worker waits until group b is whole: rank 0 of 2 missing" in describe_stall(book.coordinator, book.time)
    book.join("b0")
    book.wait(WINDOW_S)
    book.complete_attempt(20)
    assert book.world == ["a0", "a1", "b0", "b1"]


def test_group_is_taken_in_as_a_whole_or_not_at_all() -> None:
    book = Groups(max_workers=3)
    book.join("a0", "a1")
    book.tick()
    book.complete_attempt()
    book.join("b0", "b1")
    book.wait(2 * WINDOW_S)
    assert book.world == ["a0", "a1"]


def test_joiner_that_completes_the_last_group_is_taken_in_at_once() -> None:
    book = formed("a0", "a1", max_workers=5)
    book.join("b0", "b1")
    book.tick()
    assert book.last(RescaleStarted).added == ["b0", "b1"]


def test_lost_group_is_replaced_at_its_ranks() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    book.join("c0", "c1")
    book.die("a0", "a1")
    book.wait(0.1)
    book.complete_attempt(10)
    assert book.world == ["c0", "c1", "b0", "b1"]


def test_worker_with_another_group_size_is_refused() -> None:
    book = formed("a0", "a1")
    with pytest.raises(RequestRefused, match="trains in groups of 2, this worker is of a group of 4") as error:
        book.coordinator.settle_group_size(4)
    assert error.value.code == "group_size_differs"


def test_group_larger_than_max_workers_is_refused() -> None:
    with pytest.raises(RequestRefused, match="group_size must be <= max_workers"):
        Groups(4, max_workers=3)


def test_second_process_of_a_group_rank_is_refused_while_the_first_lives() -> None:
    book = formed("a0", "a1")
    with pytest.raises(RequestRefused, match="worker a1 is rank 1 of group a of job run, and is alive") as error:
        book.join("a1x")
    assert error.value.code == "group_rank_taken"


def test_second_process_of_a_group_rank_waits_for_the_fate_of_a_lost_one() -> None:
    book = formed("a0", "a1")
    book.lose("a1")
    with pytest.raises(Unavailable, match="may still be alive"):
        book.join("a1x")


# Broken groups.


def test_failure_breaks_the_group_once() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    assert kinds(book.die("a1")) == ["WorkerFailed", "GroupBroken"]
    assert book.last(GroupBroken) == GroupBroken("a", "a1", ["a0"])
    assert kinds(book.die("a0")) == ["WorkerFailed"]


def test_broken_group_takes_part_in_the_attempt_and_then_waits() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    book.die("a1")
    book.wait(0.1)
    started = book.last(RescaleStarted)
    assert (started.removed, started.draining, started.world_size) == (["a0", "a1"], ["a0"], 2)
    book.report(a0=(10, True), b0=(10, True), b1=(10, True))
    assert book.world == ["b0", "b1"]
    shown = worker_view(book.coordinator, book.coordinator.members["a0"], book.time)
    assert (shown.status, shown.group, shown.group_rank) == ("joining", "a", 0)
    assert cluster_view(book.coordinator, book.time).group_size == 2


def test_group_that_is_refilled_before_the_next_world_stays() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    book.die("a1")
    book.join("a1x")
    book.wait(0.1)
    assert (book.last(RescaleStarted).added, book.last(RescaleStarted).removed) == (["a1x"], ["a1"])
    book.report(a0=(10, True), b0=(10, True), b1=(10, True))
    assert (book.sources, book.last(RescaleSynchronising).behind) == (["a0", "b1"], 1)
    book.ready("a1x")
    assert book.world == ["a0", "a1x", "b0", "b1"]


def test_broken_group_joins_again_when_it_is_whole() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    book.die("a1")
    book.wait(0.1)
    book.report(a0=(10, True), b0=(10, True), b1=(10, True))
    book.join("a1x")
    book.wait(WINDOW_S)
    assert book.last(RescaleStarted).added == ["a0", "a1x"]
    book.report(a0=(10, False), b0=(20, True), b1=(20, True))
    assert (book.sources, book.last(RescaleSynchronising).behind) == (["b0", "b1"], 2)


def test_broken_group_is_known_after_a_restart() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    book.die("a1")
    book.restart()
    book.reconnect("a0", "b0", "b1")
    book.wait(0.1)
    book.report(a0=(10, True), b0=(10, True), b1=(10, True))
    assert (book.world, book.coordinator.membership.group_size) == (["b0", "b1"], 2)


def test_drain_of_one_process_drains_its_group() -> None:
    book = formed("a0", "a1", "b0", "b1")
    book.coordinator.drain("b1", book.now, "maintenance")
    facts = [fact for fact in book.new_facts() if isinstance(fact, WorkerDraining)]
    assert [(fact.worker_id, fact.reason) for fact in facts] == [
        ("b1", "maintenance"),
        ("b0", "maintenance (with b1, group b)"),
    ]
    book.wait(0.1)
    book.complete_attempt(10)
    assert book.world == ["a0", "a1"]
    assert kinds(book.leave("b0") + book.leave("b1")) == ["WorkerLeft", "WorkerLeft"]


def test_min_workers_keeps_whole_draining_groups() -> None:
    book = formed("a0", "a1", "b0", "b1", min_workers=3)
    book.coordinator.drain("b0", book.now, "maintenance")
    assert book.coordinator.membership.next_survivors(()) == {"a0", "a1", "b0", "b1"}
    book.join("c0", "c1")
    assert book.coordinator.membership.next_survivors(("c0", "c1")) == {"a0", "a1"}


# The failure budget.


def test_group_counts_as_one_failure() -> None:
    book = formed("a0", "a1", "b0", "b1", "c0", "c1", failure_tolerance_percentage=34)
    book.die("a0", "a1")
    assert book.coordinator.failure_budget.in_world == 1
    book.die("b0")
    book.wait(0.1)
    assert book.last(JobAborted).reason == "2 of 3 groups failed; limit 1"


def test_failure_in_a_group_that_an_eviction_broke_does_not_count() -> None:
    book = formed("a0", "a1", "b0", "b1")
    book.coordinator.evict("a0", book.now, "")
    book.die("a1")
    assert book.coordinator.failure_budget.in_world == 0


# The state.


def test_state_survives_in_ranks_of_different_broken_groups() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    book.die("a0", "b1")
    book.join("c0", "c1")
    book.wait(0.1)
    assert book.last(RescaleStarted).draining == ["a1", "b0"]
    book.report(a1=(10, True), b0=(10, True))
    assert (book.sources, book.last(RescaleSynchronising).step) == (["b0", "a1"], 10)
    book.ready("c0", "c1")
    assert (book.world, book.last(RescaleCompleted).step) == (["c0", "c1"], 10)


def test_survivor_that_was_left_out_makes_up_a_state_that_no_step_has_followed() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    book.die("a0")
    book.wait(0.1)
    book.report(a1=(10, True), b0=(10, True), b1=(10, True))
    book.join("c0", "c1")
    book.die("b1")
    book.wait(0.1)
    book.report(a1=(10, True), b0=(10, True))
    assert book.sources == ["b0", "a1"]


def test_new_group_begins_if_the_state_of_a_group_rank_is_lost() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    book.die("a0", "b0")
    book.join("c0", "c1")
    book.wait(0.1)
    book.report(a1=(10, True), b1=(10, True), c0=(8, False), c1=(8, False))
    assert (book.world, book.last(RescaleCompleted).step, book.last(ProgressLost).steps) == (["c0", "c1"], 8, 2)


def test_parts_of_a_lost_state_fail_uncounted_if_there_is_no_whole_group() -> None:
    book = formed("a0", "a1", "b0", "b1", **WINDOW)
    book.die("a0", "b0")
    book.join("a0x")
    book.wait(0.1)
    book.new_facts()
    book.stop("a0x", stop=StopReport(0, False))
    book.stop("a1", stop=StopReport(10, True))
    book.stop("b1", stop=StopReport(10, True))
    failed = [fact for fact in book.facts if isinstance(fact, WorkerFailed)][-2:]
    reason = "it has group rank 1 of the state after step 10, and other group ranks are lost; start its group again"
    assert [(fact.worker_id, fact.reason) for fact in failed] == [("a1", reason), ("b1", reason)]
    assert book.coordinator.failure_budget.in_world == 2
    book.join("a1x")
    book.wait(0.1)
    book.report()
    assert (book.world, book.last(ProgressLost).steps) == (["a0x", "a1x"], 10)


def test_groups_that_begin_after_different_steps_abort_the_job() -> None:
    book = Groups()
    book.join("a0", "a1")
    book.wait(WINDOW_S)
    book.report(a0=(100, False), a1=(0, False))
    assert book.last(JobAborted).reason.startswith(
        "no group starts after the same step at all its ranks (steps 0, 100)"
    )


RANKS = {"a0": 0, "a1": 1, "b0": 0, "b1": 1, "c0": 0, "c1": 1}


@pytest.mark.parametrize(
    ("stops", "sources"),
    [
        pytest.param({"a0": 5, "a1": 5, "b0": 5, "b1": 5}, ("a0", "a1"), id="all are at the same step"),
        pytest.param({"a0": 5, "a1": 6, "b0": 6, "b1": 6}, ("b0", "a1"), id="the highest committed step"),
        pytest.param({"b0": 5, "a1": 5}, ("b0", "a1"), id="ranks of different groups"),
        pytest.param({"a0": 5, "b0": 5}, (), id="a group rank is lost"),
        pytest.param({"a0": 5, "a1": 6}, (), id="no step that both have"),
        pytest.param({"a0": 5, "a1": 5.5, "b0": 5.5}, ("b0", "a1"), id="a step that rank 1 cannot repeat counts"),
        pytest.param({"a0": 5, "a1": 5.5, "b1": 5, "b0": 5.5}, ("a0", "b1"), id="a step that all can repeat does not"),
        pytest.param({"a0": 3, "a1": 3, "b0": 5}, ("a0", "a1"), id="an older state that is whole"),
    ],
)
def test_sources_are_at_one_step_for_all_group_ranks(stops: dict[str, float], sources: tuple[str, ...]) -> None:
    """A half step is one that is finished and not committed."""
    reports = {name: StopReport(int(step), True, step != int(step)) for name, step in stops.items()}
    assert choose_sources(sorted(stops), reports, (), RANKS, 2) == sources


def test_stale_state_is_no_source() -> None:
    stops = {"a0": StopReport(9, False, is_stale=True), "a1": StopReport(9, False)}
    assert choose_sources(("a0", "a1"), stops, (), RANKS, 2) == ()


def test_old_record_without_groups_is_of_a_job_without_groups() -> None:
    book = Playbook()
    book.form_world("w0", "w1")
    assert book.coordinator.members["w0"].incarnation == incarnation("w0")
    book.restart()
    assert (book.coordinator.membership.group_size, book.coordinator.members["w0"].group) == (1, "")
