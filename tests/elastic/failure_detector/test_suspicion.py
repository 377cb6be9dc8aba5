from __future__ import annotations

import pytest

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.failure_detector.detector import NEVER, FailureDetector
from forged.elastic.failure_detector.suspicion import REPORTED_WORLDS_MAX, Suspicions
from forged.elastic.membership.world_membership import WorldMembership
from forged.elastic.outbox import Outbox
from tests.elastic.coordinator_playbook import START_S, newcomer

NOW = START_S + 10.0


class Scene:
    """A world of `a`, `b` and `c`, and the joiner `d`."""

    def __init__(self, holders: str = "abc") -> None:
        self.membership, self.watch = WorldMembership("run", ElasticTrainingConfig()), FailureDetector(Outbox())
        for name in "abcd":
            self.membership.add(newcomer(name))
        for _ in range(REPORTED_WORLDS_MAX):
            self.begin_another(holders)
        self.suspicions = Suspicions(self.membership, self.watch)

    def begin_another(self, holders: str = "abc") -> None:
        """Another world holds, of the same workers."""
        self.membership.commit("abc", (), NOW, all_have_stopped=True)
        self.membership.state_holders = frozenset(holders)

    def lose(self, name: str) -> None:
        self.membership.members[name].lost_at = NOW
        self.suspicions.connection_lost(self.membership.members[name], NOW)

    def report_peer(self, name: str, peer: str) -> None:
        self.suspicions.report_unreachable(self.membership.members[name], peer, NOW)

    @property
    def doubts(self) -> bool:
        """Whether a worker is suspected."""
        return self.watch.due_at() < NEVER and bool(self.watch._suspicions)


def test_worker_that_neither_daemon_nor_peer_reaches_is_suspected_in_either_order() -> None:
    first, second = Scene(), Scene()
    first.lose("b")
    assert not first.doubts
    first.report_peer("a", "b")
    second.report_peer("a", "b")
    assert not second.doubts
    second.lose("b")
    assert first.doubts
    assert second.doubts


def test_peer_report_of_an_earlier_world_suspects_no_worker() -> None:
    scene = Scene()
    scene.report_peer("a", "b")
    scene.begin_another()
    scene.lose("b")
    assert not scene.doubts


def test_worker_that_is_not_in_the_world_has_nothing_to_say_of_it() -> None:
    scene = Scene()
    scene.lose("b")
    scene.report_peer("d", "b")
    assert not scene.doubts
    assert scene.suspicions.peer_reports.worlds == 0


def test_only_state_holder_is_given_its_whole_grace() -> None:
    scene = Scene(holders="b")
    scene.lose("b")
    scene.report_peer("a", "b")
    assert not scene.doubts


def test_no_worker_has_to_go_before_so_many_worlds_have_come_to_nothing() -> None:
    scene = Scene()
    for _ in range(REPORTED_WORLDS_MAX):
        assert scene.suspicions.worker_to_evict() is None
        scene.begin_another()
        scene.report_peer("a", "c")
        scene.report_peer("b", "c")
    assert scene.suspicions.worker_to_evict() == "c"


def test_of_two_that_report_each_other_the_state_holder_stays() -> None:
    scene = Scene(holders="c")
    for _ in range(REPORTED_WORLDS_MAX):
        scene.begin_another(holders="c")
        scene.report_peer("a", "c")
    assert scene.suspicions.worker_to_evict() == "a"


def test_state_holder_is_evicted_if_another_one_remains() -> None:
    scene = Scene(holders="bc")
    for _ in range(REPORTED_WORLDS_MAX):
        scene.begin_another(holders="bc")
        scene.report_peer("a", "c")
        scene.report_peer("b", "c")
    assert scene.suspicions.worker_to_evict() == "c"


@pytest.mark.parametrize("peer", ["", "b", "d", "x"], ids=["nobody", "itself", "an outsider", "a worker that is gone"])
def test_reporter_is_evicted_if_no_report_names_a_peer(peer: str) -> None:
    scene = Scene()
    for _ in range(REPORTED_WORLDS_MAX):
        scene.begin_another()
        scene.suspicions.report_without_peer(scene.membership.members["b"], peer)
    assert scene.suspicions.worker_to_evict() == "b"


def test_only_state_holder_is_evicted_if_the_reports_concern_no_other_worker() -> None:
    scene = Scene(holders="b")
    for _ in range(REPORTED_WORLDS_MAX):
        scene.begin_another(holders="b")
        scene.suspicions.report_without_peer(scene.membership.members["b"], "")
    assert scene.suspicions.worker_to_evict() == "b"


def test_worker_that_names_another_of_the_world_is_not_held_against_itself() -> None:
    scene = Scene()
    scene.suspicions.report_without_peer(scene.membership.members["b"], "a")
    assert scene.suspicions.peer_reports.worlds == 0
