from __future__ import annotations

import pytest

from forged.elastic.config import PULSE_INTERVAL_S, ElasticTrainingConfig
from forged.elastic.failure_detector.detector import (
    CONFIRM_S,
    CONFIRM_SEVERAL_HOSTS_S,
    DAEMON_STALL_S,
    LOST_SCAN_DELAY_S,
    PROBE_INTERVAL_S,
    PROBES_AT_ONCE_MAX,
    PROBES_PER_S_MAX,
    RESTART_GRACE_S,
    SCAN_INTERVAL_S,
    STEADY_S,
    FailureDetector,
)
from forged.elastic.membership.member import Member
from forged.elastic.messages import WorkerLost, WorkerReturned, WorkerStalled
from forged.elastic.model import WorkerId
from forged.elastic.outbox import Outbox
from tests.elastic.coordinator_playbook import newcomer


def member(name: str, *, collective_seq: int = 0, reported_at: float = 0.0, progress_at: float = 0.0) -> Member:
    found = newcomer(name)
    found.collective_seq, found.reported_at, found.heard_at, found.progress_at = (
        collective_seq,
        reported_at,
        reported_at,
        progress_at,
    )
    return found


def look(
    watch: FailureDetector, *members: Member, now: float, steps: bool = True, evict: bool = False
) -> list[tuple[str, str]]:
    config = ElasticTrainingConfig(stall_timeout_ms=5_000, evict_stalled=evict)
    known = {one.id: one for one in members}
    stepping = known if steps else ()
    return [(one.id, why) for one, why in watch.scan(known, known, (), config, now, stepping=stepping)]


def test_scan_is_due_every_scan_interval() -> None:
    watch = FailureDetector(Outbox())
    assert watch.due_at() < 0
    look(watch, now=7.0)
    assert watch.due_at() == 7.0 + SCAN_INTERVAL_S
    assert watch.daemon_stall_s(watch.due_at() + DAEMON_STALL_S / 2) == 0.0
    assert watch.daemon_stall_s(watch.due_at() + DAEMON_STALL_S) == DAEMON_STALL_S
    watch.reset()
    assert (watch.due_at() < 0, watch.daemon_stall_s(1_000.0)) == (True, 0.0)


def test_it_looks_soon_when_a_worker_is_lost() -> None:
    watch, lost = FailureDetector(Outbox()), member("a", reported_at=7.0, progress_at=7.0)
    look(watch, lost, now=7.0)
    lost.lost_at = 7.01
    watch.connection_lost(lost, 7.01)
    watch.connection_lost(lost, 7.02)
    assert watch.due_at() == 7.01 + LOST_SCAN_DELAY_S
    look(watch, lost, now=7.01 + LOST_SCAN_DELAY_S)
    assert watch.outbox.facts == [WorkerLost("a", "connection lost", 14.75)]
    assert watch.due_at() == 7.01 + LOST_SCAN_DELAY_S + SCAN_INTERVAL_S


def test_only_worker_that_keeps_other_workers_waiting_stalls() -> None:
    out = Outbox()
    assert (
        look(
            FailureDetector(out),
            member("a", collective_seq=3, reported_at=6.0),
            member("b", collective_seq=2, reported_at=6.0),
            now=6.0,
        )
        == []
    )
    assert out.facts == [WorkerStalled("b", 0, 6.0)]


def test_worker_that_has_waited_is_not_taken_for_the_one_that_did_not_get_on_when_that_one_does() -> None:
    """The report of the slow worker may arrive before those of the workers that waited for it."""
    out = Outbox()
    watch, waits, stalls = (
        FailureDetector(out),
        member("a", collective_seq=3, reported_at=6.0),
        member("b", collective_seq=2, reported_at=6.0),
    )
    look(watch, waits, stalls, now=6.0)
    waits.reported_at = 6.4
    stalls.collective_seq, stalls.reported_at, stalls.progress_at = 100, 6.5, 6.5
    look(watch, waits, stalls, now=6.5)
    assert out.facts == [WorkerStalled("b", 0, 6.0)]


def test_where_no_worker_can_make_steps_no_worker_stalls() -> None:
    out, there = Outbox(), member("a", reported_at=6.0)
    assert look(FailureDetector(out), there, now=6.0, steps=False) == []
    assert (out.facts, there.progress_at) == ([], 6.0)


def test_worker_that_stalls_goes_by_policy_only() -> None:
    watch, waits, stalls = (
        FailureDetector(Outbox()),
        member("a", collective_seq=3, reported_at=6.0),
        member("b", collective_seq=2, reported_at=6.0),
    )
    assert look(watch, waits, stalls, now=1.0) == []
    assert look(watch, waits, stalls, now=6.0) == []
    assert look(watch, waits, stalls, now=6.5, evict=True) == [("b", "alive, but no progress for 6.0 s")], (
        "also where the policy has changed since"
    )


def test_worker_that_is_a_little_behind_at_the_end_of_a_long_step_has_its_time_from_then_on() -> None:
    watch, first, second = (
        FailureDetector(Outbox()),
        member("a", collective_seq=2, reported_at=6.0),
        member("b", collective_seq=2, reported_at=6.0),
    )
    assert look(watch, first, second, now=6.0, evict=True) == []
    first.collective_seq, first.progress_at = 3, 6.3
    assert look(watch, first, second, now=6.5, evict=True) == []
    assert look(watch, first, second, now=11.4, evict=True) == []
    assert [name for name, _ in look(watch, first, second, now=11.5, evict=True)] == ["b"]


def test_members_stalled_at_one_step_are_reported_and_not_evicted() -> None:
    """They are in the same long step; evicting all of them would lose the state."""
    out = Outbox()
    assert (
        look(FailureDetector(out), member("a", reported_at=6.0), member("b", reported_at=6.0), now=6.0, evict=True)
        == []
    )
    assert out.facts == [WorkerStalled("a", 0, 6.0), WorkerStalled("b", 0, 6.0)]


def test_lost_worker_is_reported_once_and_probed_repeatedly() -> None:
    out = Outbox()
    watch, lost = FailureDetector(out), member("a", reported_at=9.0, progress_at=9.0)
    lost.lost_at = 9.5
    for now in (10.0, 10.1, 10.0 + PROBE_INTERVAL_S):
        assert look(watch, lost, now=now) == []
    assert [type(fact) for fact in out.facts] == [WorkerLost]
    assert len(out.probes) == 2
    watch.connection_restored(lost, 12.0)
    assert out.facts[1:] == [WorkerReturned("a", 2.5)]
    assert lost.connected


def test_probes_of_a_job_whose_workers_come_and_go_are_limited() -> None:
    out, now = Outbox(), 10.0
    detector = FailureDetector(out)
    for number in range(10 * PROBES_AT_ONCE_MAX):
        lost = member("a")
        lost.lost_at, lost.host = now, f"127.0.0.1:{number}"
        detector.probe(lost, now)
        detector.forget(lost)
        now += 0.001
    assert len(out.probes) <= PROBES_AT_ONCE_MAX + 10 * PROBES_PER_S_MAX * PROBES_AT_ONCE_MAX * 0.001 + 1
    assert out.probes[0].seen_at == "127.0.0.1:0"


def test_worker_with_a_live_pulse_is_not_probed() -> None:
    out = Outbox()
    lost = member("a")
    lost.lost_at, lost.pulse_at = 9.5, 10.0 - PULSE_INTERVAL_S
    look(FailureDetector(out), lost, now=10.0)
    assert out.probes == []


def test_return_before_the_loss_was_reported_is_not_reported() -> None:
    out = Outbox()
    lost = member("a")
    lost.lost_at = 1.0
    FailureDetector(out).connection_restored(lost, 1.2)
    assert out.facts == []


def test_loss_of_a_new_incarnation_is_reported_again() -> None:
    out = Outbox()
    watch, lost = FailureDetector(out), member("a", reported_at=9.0, progress_at=9.0)
    lost.lost_at = 9.5
    look(watch, lost, now=10.0)
    watch.forget(lost)
    look(watch, lost, now=10.1)
    assert len(out.facts) == len(out.probes) == 2


def test_lost_worker_with_a_live_pulse_is_reported_without_grace() -> None:
    out = Outbox()
    lost = member("a")
    lost.lost_at, lost.pulse_at = 10.0, 10.25
    look(FailureDetector(out), lost, now=10.5)
    reason = "connection lost; its pulse was heard 0.2 s ago"
    assert out.facts == [WorkerLost("a", reason, None)]


def test_worker_that_has_done_its_last_step_does_not_stall_while_it_saves() -> None:
    out = Outbox()
    saves, waits = member("a", collective_seq=2, reported_at=60.0), member("b", collective_seq=3, reported_at=60.0)
    saves.last_step_done = True
    assert look(FailureDetector(out), saves, waits, now=60.0, evict=True) == []
    assert out.facts == []


def lost_on(host: str, name: str) -> Member:
    found = member(name, reported_at=9.0, progress_at=9.0)
    found.worker = WorkerId(name, host, 7000)
    found.lost_at = 9.5
    return found


def witness(name: str = "b") -> Member:
    return member(name, reported_at=9.0, progress_at=9.0)


def test_suspected_worker_has_a_moment_to_reconnect() -> None:
    watch, lost, other = FailureDetector(Outbox()), lost_on("h1", "a"), witness()
    watch.suspect(lost, "b", 10.0)
    watch.suspect(lost, "c", 10.1)
    assert watch.due_at() <= 10.0 + CONFIRM_S
    assert look(watch, lost, other, now=10.1) == []
    assert watch.due_at() == 10.0 + CONFIRM_S
    assert look(watch, lost, other, now=10.0 + CONFIRM_S) == [("a", "unreachable from the daemon and from b")]


def test_suspected_worker_with_a_live_pulse_is_not_dead() -> None:
    watch, lost, other = FailureDetector(Outbox()), lost_on("h1", "a"), witness()
    watch.suspect(lost, "b", 10.0)
    lost.pulse_at = 10.5
    assert look(watch, lost, other, now=10.6) == []
    assert [name for name, _ in look(watch, lost, other, now=13.0)] == ["a"], "until it is heard no more"


@pytest.mark.parametrize("how", ["is lost", "was lost", "is gone"])
def test_the_word_of_one_counts_only_as_long_as_it_is_well_itself(how: str) -> None:
    watch, lost, other = FailureDetector(Outbox()), lost_on("h1", "a"), witness()
    watch.suspect(lost, "b", 10.0)
    if how != "is gone":
        other.lost_at = 10.05
    if how == "was lost":
        watch.connection_restored(other, 10.1)
    assert look(watch, lost, *([] if how == "is gone" else [other]), now=14.0) == []
    assert look(watch, lost, witness(), now=14.1) == []


def test_suspicion_ends_when_the_worker_reconnects() -> None:
    watch, lost = FailureDetector(Outbox()), lost_on("h1", "a")
    watch.suspect(lost, "b", 10.0)
    watch.connection_restored(lost, 10.1)
    lost.lost_at = 10.2
    assert look(watch, lost, now=11.0) == []


def test_where_several_hosts_are_lost_they_have_longer_for_that() -> None:
    watch, one, other, third = FailureDetector(Outbox()), lost_on("h1", "a"), lost_on("h2", "b"), witness("c")
    watch.suspect(one, "c", 10.0)
    assert look(watch, one, other, third, now=12.0) == []
    third.heard_at = other.heard_at = one.heard_at = 12.9
    assert look(watch, one, other, third, now=10.0 + CONFIRM_SEVERAL_HOSTS_S - 0.1) == []
    assert watch.due_at() == 10.0 + CONFIRM_SEVERAL_HOSTS_S
    assert look(watch, one, other, third, now=10.0 + CONFIRM_SEVERAL_HOSTS_S)[0][0] == "a"


def test_the_word_of_one_that_was_away_itself_a_moment_ago_proves_nothing() -> None:
    watch, witness = FailureDetector(Outbox()), member("a", reported_at=10.0)
    look(watch, witness, now=10.0)
    assert watch.is_reliable_reporter(witness, 10.0)
    witness.lost_at = 10.1
    assert not watch.is_reliable_reporter(witness, 10.2)
    watch.connection_restored(witness, 10.3)
    look(watch, witness, now=15.2)
    assert not watch.is_reliable_reporter(witness, 15.2)
    assert watch.is_reliable_reporter(witness, 10.3 + STEADY_S)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_peer_report_counts_later_after_a_daemon_stall(when: str) -> None:
    watch, other, lost = FailureDetector(Outbox()), member("a", reported_at=10.0), lost_on("h1", "b")
    look(watch, other, lost, now=10.0)
    if when == "before":
        watch.suspect(lost, "a", 10.0)
    watch.extend_deadlines(14.0)
    other.heard_at = 14.0
    if when == "behind":
        watch.suspect(lost, "a", 14.0)
    assert look(watch, other, lost, now=14.0) == []
    assert look(watch, other, lost, now=14.0 + STEADY_S) == []
    assert [name for name, _ in look(watch, other, lost, now=14.0 + STEADY_S + CONFIRM_S)] == ["b"]


def test_worker_that_was_there_before_this_daemon_is_not_looked_for_at_once() -> None:
    out = Outbox()
    watch, awaited = FailureDetector(out), lost_on("h1", "a")
    awaited.seen_at = awaited.lost_at = 9.5
    awaited.is_unseen_since_restart = True
    look(watch, awaited, now=9.5 + RESTART_GRACE_S - 0.1)
    assert out.probes == []
    look(watch, awaited, now=9.5 + RESTART_GRACE_S)
    assert [probe.worker.id for probe in out.probes] == ["a"]


def test_short_daemon_stall_does_not_delay_a_peer_report() -> None:
    watch, other, lost = FailureDetector(Outbox()), member("a", reported_at=10.0), lost_on("h1", "b")
    look(watch, other, lost, now=10.0)
    now = 10.0 + SCAN_INTERVAL_S + DAEMON_STALL_S
    watch.extend_deadlines(now)
    watch.suspect(lost, "a", now)
    assert [name for name, _ in look(watch, other, lost, now=now + CONFIRM_S)] == ["b"]
