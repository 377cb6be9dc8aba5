"""Workers, topologies and what is said of them: frozen, exact, the same after every journey."""

from __future__ import annotations

import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.elastic.model import (
    HOSTNAME_LENGTH_MAX,
    RANK_NONE,
    AdaptationStrategy,
    ClusterTopology,
    GlobalTrainingState,
    RedistributionType,
    RescaleType,
    RescalingEvent,
    TopologyDelta,
    WorkerId,
    WorkerMetadata,
    WorkerStatus,
    check_worker,
)
from forged.errors import PeerError, RequestRefused
from tests.elastic.values import TOPOLOGIES, WORKERS, topology, worker

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,30}[A-Za-z0-9])?", fullmatch=True)
HOSTS = NAMES | st.ip_addresses().map(str)
WORKER_IDS = st.builds(WorkerId, NAMES, HOSTS, st.integers(0, 65_535))
STATE = GlobalTrainingState(2, 150, 0.1, 256, 4, 12.5, b"\x00\xffmoments")


def sent(value: Any) -> Any:
    """The value as the other end of a connection, or the store's next reader, has it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


# The enums.


@pytest.mark.parametrize(
    ("enum", "values"),
    [
        (AdaptationStrategy, ["linear", "square_root", "none"]),
        (RedistributionType, ["full_reshuffle", "incremental"]),
        (RescaleType, ["scale_up", "scale_down", "replace"]),
        (WorkerStatus, ["joining", "active", "rescaling", "leaving", "failed"]),
    ],
)
def test_the_enums_have_the_values_of_the_seed_in_their_order(enum: type[StrEnum], values: list[str]) -> None:
    assert [member.value for member in enum] == values
    assert [member.name.lower() for member in enum] == values
    assert [sent(member) for member in enum] == list(enum)


def test_a_status_that_no_worker_knows_is_refused_when_it_arrives() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode("asleep"), type=WorkerStatus)


# Which worker.


def test_a_worker_is_its_id_hostname_and_port() -> None:
    one = WorkerId("a", "node1", 7000)
    assert (one.id, one.hostname, one.port) == ("a", "node1", 7000)
    assert one == WorkerId(id="a", hostname="node1", port=7000)
    assert one != WorkerId("a", "node2", 7000)


def test_a_worker_is_written_as_its_id_at_its_address() -> None:
    assert str(WorkerId("a", "node1", 7000)) == "a@node1:7000"
    assert str(WorkerId("a", "fe80::1", 7000)) == "a@fe80::1:7000"


@given(WORKER_IDS)
def test_worker_id_is_parsed_from_its_text(one: WorkerId) -> None:
    assert WorkerId.parse(str(one)) == one


def test_an_ipv6_address_may_stand_in_brackets() -> None:
    assert WorkerId.parse("a@[fe80::1]:7000") == WorkerId.parse("a@fe80::1:7000") == WorkerId("a", "fe80::1", 7000)


@pytest.mark.parametrize(
    "text",
    [
        "", "a", ":", "@", "a@:1", "a@h", "a@h:", "a@h:-1", "a@h:+1", "a@h:65536", "a@h:1e3", "a@h: 1", "a@h:1_0",
        "a@h h:1", "a@h/h:1", "a@[]:1", "a@[h:1", "a@h\n:1", "a@h\0:1", f"a@{'h' * (HOSTNAME_LENGTH_MAX + 1)}:1",
        f"a@h:{'9' * 5000}", "a@\ud800:1", "a@h:٣",
    ],
)  # fmt: skip
def test_a_text_that_has_no_address_is_refused(text: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        WorkerId.parse(text)
    assert caught.value.code == "worker_id_invalid"
    assert caught.value.fix
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("text", ["h:1", "@h:1", "a b@h:1", "a@b@h:1", f"{'a' * 200}@h:1"])
def test_a_text_that_has_no_name_for_an_id_is_refused(text: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        WorkerId.parse(text)
    assert caught.value.code == "name_invalid"


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        one = WorkerId.parse(text)
    except RequestRefused:
        return
    assert WorkerId.parse(str(one)) == one


def test_a_worker_that_can_be_addressed_is_itself_and_another_refused_by_field() -> None:
    one = WorkerId("a", "node1", 0)
    assert check_worker("worker", one) is one
    with pytest.raises(RequestRefused, match=r"source = 'a@:1'"):
        check_worker("source", WorkerId("a", "", 1))


@pytest.mark.parametrize("port", [-1, 65_536, "7000", 70.5, True, None])
def test_a_port_that_is_none_is_refused_when_it_arrives(port: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"id": "a", "hostname": "h", "port": port}, WorkerId)


def test_workers_have_an_order() -> None:
    assert sorted([worker(2), worker(0), worker(1)]) == [worker(0), worker(1), worker(2)]


# Frozen, and the same after every journey.

EVERY_VALUE = [
    worker(1),
    WorkerMetadata(worker(1), WorkerStatus.ACTIVE, 1.0, 2.0, 3, 2, {"zone": "b"}),
    topology(1, 2, epoch=4, at=8.0),
    topology(1, 2).delta_to(topology(2, 3)),
    STATE,
    RescalingEvent.between(topology(1, 2), topology(1, 3), 5.0, "w2 died"),
]


@pytest.mark.parametrize("value", EVERY_VALUE, ids=lambda value: type(value).__name__)
def test_every_value_is_frozen(value: Any) -> None:
    for field in value.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(value, field, getattr(value, field))


@pytest.mark.parametrize("value", EVERY_VALUE, ids=lambda value: type(value).__name__)
def test_every_value_is_the_same_after_a_journey(value: Any) -> None:
    assert sent(value) == value
    assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    "value",
    [value for value in EVERY_VALUE if not isinstance(value, WorkerMetadata)],
    ids=lambda value: type(value).__name__,
)
def test_equal_values_are_one_key(value: Any) -> None:
    assert len({value, sent(value)}) == 1


def test_values_copy_their_mutable_arguments() -> None:
    workers: Any = [worker(1)]
    attributes = {"zone": "b"}
    together = ClusterTopology(workers)
    event = RescalingEvent(RescaleType.SCALE_UP, together, together, workers, workers)
    known = WorkerMetadata(worker(1), WorkerStatus.ACTIVE, 0.0, 0.0, custom_attributes=attributes)
    workers.append(worker(2))
    attributes["zone"] = "c"
    assert together.workers == event.added_workers == event.removed_workers == (worker(1),)
    assert known.custom_attributes == {"zone": "b"}


# What is known of a worker.


def test_a_worker_that_has_just_come_has_no_rank_and_stands_for_one_process() -> None:
    known = WorkerMetadata(worker(1), WorkerStatus.JOINING, 10.0, 11.0)
    assert (known.worker_id, known.status, known.join_time, known.last_heartbeat) == (worker(1), "joining", 10.0, 11.0)
    assert (known.rank, known.local_world_size, known.custom_attributes) == (-1, 1, {})


def test_two_workers_do_not_share_their_attributes() -> None:
    one, other = (WorkerMetadata(worker(1), WorkerStatus.JOINING, 0.0, 0.0) for _ in range(2))
    assert one.custom_attributes is not other.custom_attributes


@pytest.mark.parametrize(
    ("now", "healthy"), [(100.0, True), (109.99, True), (110.0, False), (111.0, False), (99, True)]
)
def test_a_worker_is_healthy_for_less_than_the_timeout_after_its_heartbeat(now: float, healthy: bool) -> None:
    """At the timeout exactly it is not; a clock that was set back makes no worker unhealthy."""
    known = WorkerMetadata(worker(1), WorkerStatus.ACTIVE, 0.0, 100.0)
    assert known.is_healthy(10.0, now) is healthy


def test_with_a_timeout_of_nothing_no_worker_is_healthy() -> None:
    assert not WorkerMetadata(worker(1), WorkerStatus.ACTIVE, 0.0, 100.0).is_healthy(0.0, 100.0)


# Topologies.


def test_at_first_no_worker_does() -> None:
    nobody = ClusterTopology()
    assert (nobody.workers, nobody.world_size, nobody.epoch, nobody.last_updated) == ((), 0, 0, 0.0)


def test_worker_that_comes_is_last_and_makes_the_next_topology() -> None:
    before = topology(1, 2, epoch=4, at=8.0)
    after = before.add_worker(worker(3), 9.0)
    assert (after.workers, after.world_size) == ((worker(1), worker(2), worker(3)), 3)
    assert (after.epoch, after.last_updated) == (5, 9.0)
    assert before == topology(1, 2, epoch=4, at=8.0)


def test_worker_that_goes_leaves_other_workers_in_their_order_and_makes_the_next_topology() -> None:
    before = topology(1, 2, 3, epoch=4, at=8.0)
    after = before.remove_worker(worker(2), 9.0)
    assert (after.workers, after.world_size) == ((worker(1), worker(3)), 2)
    assert (after.epoch, after.last_updated) == (5, 9.0)
    assert before == topology(1, 2, 3, epoch=4, at=8.0)


def test_where_there_is_nothing_to_do_the_topology_is_the_same_object() -> None:
    before = topology(1, 2, epoch=4, at=8.0)
    assert before.add_worker(worker(2), 9.0) is before
    assert before.remove_worker(worker(3), 9.0) is before
    assert ClusterTopology().remove_worker(worker(1), 9.0) == ClusterTopology()


def test_the_same_id_at_another_address_is_another_worker() -> None:
    moved = WorkerId(worker(1).id, "elsewhere", worker(1).port)
    assert moved not in topology(1)
    assert topology(1).add_worker(moved, 1.0).world_size == 2


def test_a_rank_is_a_place_and_worker_that_is_not_there_has_none() -> None:
    together = topology(5, 3, 4)
    assert [together.rank_of(worker(number)) for number in (5, 3, 4, 6)] == [0, 1, 2, RANK_NONE]
    assert worker(3) in together
    assert worker(6) not in together
    assert "w3" not in together


def test_no_worker_is_in_a_topology_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        topology(1, 2, 1)
    with pytest.raises(msgspec.ValidationError, match="twice"):
        msgspec.convert({"workers": [msgspec.to_builtins(worker(1))] * 2}, ClusterTopology)


@given(TOPOLOGIES)
def test_each_worker_has_its_place_as_rank(together: ClusterTopology) -> None:
    assert [together.rank_of(one) for one in together.workers] == list(range(together.world_size))


@given(st.lists(st.tuples(st.booleans(), WORKERS), max_size=60))
def test_whatever_happens_the_epoch_counts_the_changes_and_the_order_is_that_of_coming(
    history: list[tuple[bool, WorkerId]],
) -> None:
    together, expected, changes = ClusterTopology(), list[WorkerId](), 0
    for now, (comes, one) in enumerate(history):
        changes += comes != (one in expected)
        if comes and one not in expected:
            expected.append(one)
        elif not comes and one in expected:
            expected.remove(one)
        together = (together.add_worker if comes else together.remove_worker)(one, float(now))
    assert together.workers == tuple(expected)
    assert together.epoch == changes


def test_many_threads_may_read_one_topology_while_each_makes_its_own_next_one() -> None:
    together = topology(*range(50))

    def change(number: int) -> tuple[bool, bool]:
        grown, shrunk = together.add_worker(worker(100 + number), 1.0), together.remove_worker(worker(number), 1.0)
        kept = [one for one in together.workers if one != worker(number)]
        return grown.rank_of(worker(100 + number)) == 50, list(shrunk.workers) == kept

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(change, range(50))) == {(True, True)}
    assert together == topology(*range(50))


# The way from one topology to another.


@given(TOPOLOGIES, TOPOLOGIES)
def test_a_delta_leads_exactly_to_the_topology_that_it_was_made_of(old: ClusterTopology, new: ClusterTopology) -> None:
    delta = old.delta_to(new)
    assert old.apply(sent(delta)) == new
    assert msgspec.msgpack.encode(old.apply(delta)) == msgspec.msgpack.encode(new)


def test_a_delta_is_of_runs_that_stay_and_workers_that_are_new() -> None:
    old, new = topology(0, 1, 2, 3, 4, epoch=6), topology(0, 1, 9, 3, 4, 8, epoch=7, at=3.0)
    assert old.delta_to(new) == TopologyDelta(6, 7, 3.0, ((0, 2), worker(9), (3, 2), worker(8)))


def test_worker_that_changed_places_is_no_new_worker() -> None:
    assert topology(0, 1, 2, 3).delta_to(topology(2, 3, 0, 1)).pieces == ((2, 2), (0, 2))


def test_a_delta_is_small_when_few_of_a_thousand_changed() -> None:
    old = topology(*range(1000), epoch=10)
    replaced = list(range(1000))
    replaced[500] = 5000
    for new in (
        old.remove_worker(worker(500), 1.0),
        old.add_worker(worker(5000), 1.0),
        topology(*replaced, epoch=11, at=1.0),
    ):
        delta = old.delta_to(new)
        assert len(delta.pieces) <= 3
        assert len(msgspec.msgpack.encode(delta)) < len(msgspec.msgpack.encode(new)) / 100


@pytest.mark.parametrize("epoch", [0, 5, 7])
def test_a_delta_of_another_epoch_is_refused(epoch: int) -> None:
    delta = topology(1, epoch=6).delta_to(topology(1, 2, epoch=7))
    with pytest.raises(RequestRefused) as caught:
        topology(1, epoch=epoch).apply(delta)
    assert caught.value.code == "topology_generation"


@pytest.mark.parametrize(
    "pieces",
    [
        ((0, 3),),
        ((-1, 1),),
        ((-2, 2),),
        ((2, 1),),
        ((0, 0),),
        ((1, -1),),
        ((0, 1), (0, 1)),
        ((0, 2), (1, 1)),
        ((0, 2), worker(0)),
        (worker(7), worker(7)),
        ((0, 2),) * 100_000,
        ((0, 1 << 62),),
    ],
)
def test_a_delta_that_no_topology_made_is_the_peers_fault(pieces: tuple[tuple[int, int] | WorkerId, ...]) -> None:
    with pytest.raises(PeerError) as caught:
        topology(0, 1).apply(TopologyDelta(0, 1, 1.0, pieces))
    assert caught.value.code == "topology_delta_invalid"


def test_a_small_delta_cannot_be_made_to_fill_the_memory() -> None:
    old, bomb = topology(*range(1000)), TopologyDelta(0, 1, 1.0, ((0, 1000),) * 10_000)
    tracemalloc.start()
    with pytest.raises(PeerError, match="the delta has ranks beyond"):
        old.apply(bomb)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2_000_000, "ten million workers were put together before they were counted"


PIECES = st.lists(st.tuples(st.integers(-3, 25), st.integers(-3, 25)) | WORKERS, max_size=6).map(tuple)


@given(TOPOLOGIES, PIECES)
def test_any_delta_leads_to_a_topology_or_is_the_peers_fault(
    old: ClusterTopology, pieces: tuple[tuple[int, int] | WorkerId, ...]
) -> None:
    try:
        new = old.apply(TopologyDelta(old.epoch, old.epoch + 1, 1.0, pieces))
    except PeerError:
        return
    assert old.apply(old.delta_to(new)) == new


# How far training is.


def test_at_first_training_is_nowhere() -> None:
    assert GlobalTrainingState() == GlobalTrainingState(0, 0, 0.0, 0, 0, 0.0, None)


def test_the_state_says_epoch_step_rate_batch_workers_and_time() -> None:
    assert (STATE.current_epoch, STATE.current_step, STATE.learning_rate) == (2, 150, 0.1)
    assert (STATE.global_batch_size, STATE.active_worker_count, STATE.state_timestamp) == (256, 4, 12.5)
    assert STATE.optimizer_state == b"\x00\xffmoments"


def test_a_state_is_shown_without_the_optimizers_bytes() -> None:
    shown = repr(msgspec.structs.replace(STATE, optimizer_state=bytes(5_000_000)))
    assert "current_step=150" in shown
    assert "optimizer_state=<5000000 bytes>" in shown
    assert len(shown) < 300
    assert "optimizer_state=None" in repr(GlobalTrainingState())


# A rescale.


@pytest.mark.parametrize(
    ("old", "new", "kind", "added", "removed"),
    [
        ((), (1, 2), RescaleType.SCALE_UP, (1, 2), ()),
        ((1,), (1, 2), RescaleType.SCALE_UP, (2,), ()),
        ((1, 2), (1,), RescaleType.SCALE_DOWN, (), (2,)),
        ((1, 2), (), RescaleType.SCALE_DOWN, (), (1, 2)),
        ((1, 2, 3), (1, 4, 3), RescaleType.REPLACE, (4,), (2,)),
        ((1, 2), (1, 3, 4), RescaleType.SCALE_UP, (3, 4), (2,)),
        ((1, 2, 3), (1, 4), RescaleType.SCALE_DOWN, (4,), (2, 3)),
        ((1, 2), (2, 1), RescaleType.REPLACE, (), ()),
    ],
)
def test_rescaling_event_is_the_difference_of_two_topologies(
    old: tuple[int, ...], new: tuple[int, ...], kind: RescaleType, added: tuple[int, ...], removed: tuple[int, ...]
) -> None:
    event = RescalingEvent.between(topology(*old), topology(*new, epoch=1), 5.0, "because")
    assert (event.type, event.old_topology, event.new_topology) == (kind, topology(*old), topology(*new, epoch=1))
    assert event.added_workers == tuple(map(worker, added))
    assert event.removed_workers == tuple(map(worker, removed))
    assert (event.event_time, event.trigger_reason) == (5.0, "because")


def test_worker_that_died_and_came_again_under_the_same_id_was_removed_and_added() -> None:
    together = topology(1, 2)
    event = RescalingEvent.between(together, topology(1, 2, epoch=1), 5.0, "w2 died", replaced=[worker(2)])
    assert event.type is RescaleType.REPLACE
    assert event.added_workers == event.removed_workers == (worker(2),)


def test_worker_that_is_said_to_be_replaced_counts_only_where_it_is() -> None:
    event = RescalingEvent.between(
        topology(1, 2), topology(1, 3), 5.0, "w2 died", replaced=iter([worker(2), worker(9)])
    )
    assert (event.added_workers, event.removed_workers) == ((worker(3),), (worker(2),))


@given(TOPOLOGIES, TOPOLOGIES, st.lists(WORKERS))
def test_added_and_removed_explain_the_difference(
    old: ClusterTopology, new: ClusterTopology, replaced: list[WorkerId]
) -> None:
    event = RescalingEvent.between(old, new, 1.0, "", replaced)
    stayed = set(old.workers) - set(event.removed_workers)
    assert stayed | set(event.added_workers) == set(new.workers)
    assert stayed.isdisjoint(event.added_workers)
    assert new.world_size - old.world_size == len(event.added_workers) - len(event.removed_workers)


def test_a_rescale_has_no_reason_and_no_worker_added_unless_a_worker_says_so() -> None:
    event = RescalingEvent(RescaleType.REPLACE, ClusterTopology(), ClusterTopology())
    assert (event.added_workers, event.removed_workers, event.event_time, event.trigger_reason) == ((), (), 0.0, "")
