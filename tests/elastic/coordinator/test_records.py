from __future__ import annotations

from forged.elastic.coordinator.job_coordinator import JobCoordinator
from forged.elastic.coordinator.records import changed_records, job_of, restore
from forged.elastic.messages import Heartbeat, Pulse
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import StopReport
from tests.elastic.coordinator_playbook import (
    JOB,
    WINDOW_S,
    Playbook,
    formed,
    incarnation,
    newcomer,
    worker_of,
)


def changed(book: Playbook) -> set[str]:
    """What is about to be written, without what is common to all keys."""
    return {key.removeprefix(f"elastic/{JOB}/") for key in changed_records(book.coordinator)}


def test_a_key_names_its_job() -> None:
    assert job_of("elastic/run/member/w1") == "run"
    assert job_of("elastic/my.job-2/cluster") == "my.job-2"


def test_inputs_without_a_change_write_nothing() -> None:
    book = formed("a", "b")
    book.coordinator.heartbeat(Heartbeat(JOB, "a", incarnation("a"), 5, 50), book.now)
    book.coordinator.pulse(Pulse(JOB, "a", incarnation("a"), 1.0, 5, 50), book.now)
    book.coordinator.tick(book.now)
    assert not book.coordinator.outbox
    assert changed_records(book.coordinator) == {}


def test_the_first_worker_writes_the_cluster_and_itself_and_the_next_one_only_itself() -> None:
    book = Playbook()
    book.coordinator.join(newcomer("a"), book.now)
    assert changed(book) == {"cluster", "member/a"}
    book.settle()
    book.coordinator.join(newcomer("b"), book.now)
    assert changed(book) == {"member/b"}


def test_a_commit_writes_the_world_and_no_member() -> None:
    book = Playbook()
    book.join("a")
    book.wait(WINDOW_S)
    book.coordinator.stopped("a", incarnation("a"), 1, StopReport(0, holds_state=False), book.now)
    assert changed(book) == {"cluster", "world"}


def test_worker_that_goes_is_deleted() -> None:
    book = formed("a", "b")
    book.coordinator.leave("b", incarnation("b"), book.now, reason="", done=False, step=0)
    assert changed_records(book.coordinator)["elastic/run/member/b"] is None


def test_restored_job_equals_the_stored_one() -> None:
    book = Playbook(min_workers=2, lr_adaptation_strategy="square_root", base_learning_rate=0.5, note="mine")
    member = newcomer("c")
    member.pid, member.host, member.local_world_size, member.attributes = 77, "host-c", 4, {"gpu": "8"}
    book.coordinator.join(member, book.now)
    book.form_world("a", "b", step=3, learning_rate=0.1, global_batch_size=64)
    book.coordinator.drain("b", book.now, "maintenance")
    book.coordinator.pause(book.now, "lunch")
    book.coordinator.adopt_shared_config({"dataset": {"samples": 100}})
    book.die("c")
    book.settle()
    before, known = book.coordinator, dict(book.coordinator.members)
    book.restart()
    after = book.coordinator
    for name in (
        "settings",
        "key",
        "phase",
        "paused",
        "training",
        "attempts",
        "failure_budget",
        "scaling_base",
        "reason",
        "rescale_reasons",
        "shared_config",
    ):
        assert getattr(after, name) == getattr(before, name), name
    for name in ("topology", "world", "state_holders"):
        assert getattr(after.membership, name) == getattr(before.membership, name), name
    assert after.membership.state_holders == {"a", "b", "c"}
    assert list(after.membership.world) == ["c", "a", "b"]
    assert after.members["b"].drain_reason == "maintenance"
    for name, member in after.members.items():
        assert (member.worker, member.incarnation, member.client) == (
            known[name].worker,
            known[name].incarnation,
            known[name].client,
        )
        assert (member.pid, member.host, member.attributes) == (known[name].pid, known[name].host, {})
        assert not member.connected


def test_liveness_evidence_is_not_restored_from_the_store() -> None:
    book = formed("a")
    book.pulse("a", step=9, collective_seq=90)
    book.restart()
    member = book.coordinator.members["a"]
    assert (member.step, member.collective_seq, member.heard_at, member.pulse_at, member.cpu_s) == (
        0,
        0,
        None,
        None,
        None,
    )
    assert (member.lost_at, member.seen_at, member.progress_at) == (book.time, book.time, book.time)


def test_entries_come_in_any_order() -> None:
    book = formed("a", "b")
    for entries in (sorted(book.stored.items()), sorted(book.stored.items(), reverse=True)):
        found = restore(JOB, entries, book.now)
        assert found is not None
        assert list(found.membership.world) == ["a", "b"]


def test_leftover_records_of_a_removed_job_restore_no_coordinator() -> None:
    book = formed("a")
    left = [(key, value) for key, value in book.stored.items() if not key.endswith("/cluster")]
    assert restore(JOB, left, book.now) is None
    assert restore(JOB, [], book.now) is None


def test_a_job_without_a_world_has_none_afterwards() -> None:
    book = Playbook()
    book.join("a")
    book.restart()
    assert (book.coordinator.phase, book.coordinator.membership.world, book.coordinator.generation) == (
        Phase.FORMING,
        {},
        0,
    )
    assert book.coordinator.members["a"].worker == worker_of("a")


def test_a_cluster_that_is_new_is_not_known_to_the_store() -> None:
    assert not JobCoordinator(JOB, {}).is_stored
    book = formed("a")
    book.restart()
    assert book.coordinator.is_stored
