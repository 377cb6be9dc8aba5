from __future__ import annotations

from forged.elastic.coordinator.cluster import Cluster
from forged.elastic.coordinator.records import changed_records, job_of, restore
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import StopReport
from tests.elastic.play import JOB, WINDOW_S, Play, formed, incarnation, newcomer, worker_of


def changed(play: Play) -> set[str]:
    """What is about to be written, without what is common to all keys."""
    return {key.removeprefix(f"elastic/{JOB}/") for key in changed_records(play.cluster)}


def test_a_key_says_whose_it_is() -> None:
    assert job_of("elastic/run/member/w1") == "run"
    assert job_of("elastic/my.job-2/cluster") == "my.job-2"


def test_what_changes_nothing_writes_nothing() -> None:
    play = formed("a", "b")
    play.cluster.heartbeat("a", incarnation("a"), 5, 50, play.now)
    play.cluster.pulse("a", incarnation("a"), 5, 50, 1.0, play.now)
    play.cluster.tick(play.now)
    assert not play.cluster.outbox
    assert changed_records(play.cluster) == {}


def test_the_first_worker_writes_the_cluster_and_itself_and_the_next_one_only_itself() -> None:
    play = Play()
    play.cluster.join(newcomer("a"), play.now)
    assert changed(play) == {"cluster", "member/a"}
    play.settle()
    play.cluster.join(newcomer("b"), play.now)
    assert changed(play) == {"member/b"}


def test_a_commit_writes_the_world_and_no_member() -> None:
    play = Play()
    play.join("a")
    play.wait(WINDOW_S)
    play.cluster.stopped("a", incarnation("a"), 1, StopReport(0, holds_state=False), play.now)
    assert changed(play) == {"cluster", "world"}


def test_who_goes_is_deleted() -> None:
    play = formed("a", "b")
    play.cluster.leave("b", incarnation("b"), play.now, reason="", done=False, step=0)
    assert changed_records(play.cluster)["elastic/run/member/b"] is None


def test_what_comes_back_is_what_was_there() -> None:
    play = Play(min_workers=2, lr_adaptation_strategy="square_root", base_learning_rate=0.5, note="mine")
    member = newcomer("c")
    member.pid, member.host, member.local_world_size, member.attributes = 77, "host-c", 4, {"gpu": "8"}
    play.cluster.join(member, play.now)
    play.form("a", "b", step=3, learning_rate=0.1, global_batch_size=64)
    play.cluster.drain("b", play.now, "maintenance")
    play.cluster.pause(play.now, "lunch")
    play.cluster.adopt_shared_config({"dataset": {"samples": 100}})
    play.die("c")
    play.settle()
    before, known = play.cluster, dict(play.cluster.members)
    play.restart()
    after = play.cluster
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


def test_what_is_known_by_evidence_has_to_come_back_as_evidence() -> None:
    play = formed("a")
    play.pulse("a", step=9, collective_seq=90)
    play.restart()
    member = play.cluster.members["a"]
    assert (member.step, member.collective_seq, member.heard_at, member.pulse_at, member.cpu_s) == (
        0,
        0,
        None,
        None,
        None,
    )
    assert (member.lost_at, member.seen_at, member.progress_at) == (play.time, play.time, play.time)


def test_entries_come_in_any_order() -> None:
    play = formed("a", "b")
    for entries in (sorted(play.stored.items()), sorted(play.stored.items(), reverse=True)):
        found = restore(JOB, entries, play.now)
        assert found is not None
        assert list(found.membership.world) == ["a", "b"]


def test_what_is_left_of_a_job_that_was_removed_is_no_cluster() -> None:
    play = formed("a")
    left = [(key, value) for key, value in play.stored.items() if not key.endswith("/cluster")]
    assert restore(JOB, left, play.now) is None
    assert restore(JOB, [], play.now) is None


def test_a_job_without_a_world_has_none_afterwards() -> None:
    play = Play()
    play.join("a")
    play.restart()
    assert (play.cluster.phase, play.cluster.membership.world, play.cluster.generation) == (Phase.FORMING, {}, 0)
    assert play.cluster.members["a"].worker == worker_of("a")


def test_a_cluster_that_is_new_is_not_known_to_the_store() -> None:
    assert not Cluster(JOB, {}).is_stored
    play = formed("a")
    play.restart()
    assert play.cluster.is_stored
