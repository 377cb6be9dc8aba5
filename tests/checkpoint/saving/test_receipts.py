"""What ranks tell each other through the storage, and for how long they listen."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Manifest, Part, Tensors, encode
from forged.checkpoint.format.states import States
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.rank_group import OutcomeUnknown, RankFailure
from forged.checkpoint.saving.agreement import SaveAgreement
from forged.checkpoint.saving.receipts import GONE_S, POLL_MAX_S, POLL_S, RankWaiter, ReceiptExchange
from forged.checkpoint.storage import listing
from tests.checkpoint.fixtures.memory_storage import MemoryStorage

FAILURE = RankFailure("no room", ExceptionType.STORAGE_ERROR, "full", "make some")


class Clock:
    """A clock that advances while a rank waits, and runs the given actions meanwhile."""

    def __init__(self, *meanwhile: Any) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self._meanwhile = list(meanwhile)

    def token(self, timeout_s: float | None = 1000.0) -> CancelToken:
        token = CancelToken(timeout_s, lambda: self.now)
        event: Any = SimpleNamespace(is_set=lambda: False, wait=self._wait, set=lambda: None)
        token._cancelled = event
        return token

    def _wait(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        if self._meanwhile:
            self._meanwhile.pop(0)()


def wait_to_the_end(waiter: RankWaiter, ranks: Iterable[int] = (1,)) -> None:
    while True:
        waiter.wait(ranks)


def part(rank: int) -> list[Part]:
    return [Part(f"run/0a1b2c3d.{rank:05d}-of-00003.safetensors", rank, 0, 0, [], [], [], "", "")]


def exchange(storage: MemoryStorage, rank: int, *meanwhile: Any, save_id: str = "0a1b2c3d") -> ReceiptExchange:
    work: Any = SimpleNamespace(
        rank=rank, world_size=3, is_root=rank == 0, agreement=SaveAgreement("run", save_id, 0.0, b"", True)
    )
    return ReceiptExchange(storage, work, RankWaiter(Clock(*meanwhile).token(), tuple))


def publish(storage: MemoryStorage, save_id: str = "0a1b2c3d") -> None:
    manifest = Manifest("run", 0.0, 1, Tensors([], [], []), States.of([{"d": {}}]), [], save_id=save_id)
    storage.publish(manifest.path, encode(manifest))


def test_root_collects_parts_by_rank() -> None:
    storage = MemoryStorage()
    later = [lambda: exchange(storage, 2).report(part(2)), lambda: None, lambda: exchange(storage, 1).report(part(1))]
    assert exchange(storage, 0, *later).collect() == part(1) + part(2)


def test_first_failed_rank_is_raised_before_all_ranks_have_reported() -> None:
    storage = MemoryStorage()
    with pytest.raises(CheckpointException, match="rank 2: no room") as caught:
        exchange(storage, 0, lambda: exchange(storage, 2).report(FAILURE)).collect()
    assert (caught.value.code, caught.value.checkpoint_path) == ("full", "run")


def test_other_ranks_wait_for_manifest_or_refusal() -> None:
    storage = MemoryStorage()
    assert exchange(storage, 1, lambda: publish(storage)).wait_for_outcome() is None
    refused = MemoryStorage()
    said = exchange(refused, 2, lambda: exchange(refused, 0).refuse(FAILURE)).wait_for_outcome()
    assert said == FAILURE


def test_unknown_outcome_stays_unknown_in_a_refusal() -> None:
    storage = MemoryStorage()
    exchange(storage, 0).refuse(RankFailure.of(OutcomeUnknown("the outcome is unknown")))
    said = exchange(storage, 1).wait_for_outcome()
    assert said is not None
    assert said.is_undecided


def test_manifest_of_another_save_does_not_end_the_wait() -> None:
    storage = MemoryStorage()
    publish(storage, "ffffffff")
    said = exchange(storage, 1, lambda: exchange(storage, 0).refuse(FAILURE)).wait_for_outcome()
    assert said == FAILURE


def test_a_manifest_that_is_being_deleted_is_no_answer() -> None:
    storage = MemoryStorage()
    publish(storage)
    storage.files["run.deleted.json"] = storage.files["run.metadata.json"]
    assert exchange(storage, 1, lambda: exchange(storage, 0).refuse(FAILURE)).wait_for_outcome() == FAILURE


NO_ROOM = CheckpointException("no room", type=ExceptionType.STORAGE_ERROR, code="full", fix="make some")


def test_refusal_of_the_host_is_the_outcome_if_the_root_is_silent() -> None:
    one = exchange(MemoryStorage(), 1)
    asked = list[None]()

    def refusal_of_host() -> CheckpointException | None:
        asked.append(None)
        return NO_ROOM if len(asked) > 3 else None

    assert one.wait_for_request(refusal_of_host) is False
    assert one.wait_for_outcome() == FAILURE
    assert len(asked) == 4, "it is not asked again"


def test_host_is_not_asked_about_a_save_that_ends_soon() -> None:
    storage = MemoryStorage()

    def refusal_of_host() -> CheckpointException | None:
        raise AssertionError

    said = exchange(storage, 1, lambda: None, lambda: publish(storage)).wait_for_request(refusal_of_host)
    assert said is False


@pytest.mark.parametrize("is_requested", [False, True])
def test_what_the_root_says_counts_more_than_the_refusal_of_the_host(is_requested: bool) -> None:
    """The root may have heard nothing from the host, and have the ranks write."""
    storage = MemoryStorage()
    root, other = exchange(storage, 0), RankFailure("other", ExceptionType.SAVE_FAILED, "other", "")
    is_refused = list[None]()

    def say() -> None:
        if is_refused:
            root.request_writing() if is_requested else root.refuse(other)

    def refusal_of_host() -> CheckpointException | None:
        is_refused.append(None)
        return NO_ROOM

    one = exchange(storage, 1, *[say] * 20)
    assert one.wait_for_request(refusal_of_host) is is_requested
    if is_requested:
        root.refuse(other)
    assert one.wait_for_outcome() == other


def test_reader_deletes_receipts_and_refusals() -> None:
    storage = MemoryStorage()
    for rank in (1, 2):
        exchange(storage, rank).report(part(rank))
    exchange(storage, 0).refuse(FAILURE)
    assert len(storage.files) == 4
    exchange(storage, 1).delete_read()
    assert sorted(storage.files) == ["run/0a1b2c3d.00002.receipt", "run/0a1b2c3d.00002.refusal"]
    exchange(storage, 0).delete_read()
    assert sorted(storage.files) == ["run/0a1b2c3d.00002.refusal"]
    assert listing.delete_unfinished(storage, "run") == ["run/0a1b2c3d.00002.refusal"]


def test_receipts_of_other_saves_are_ignored() -> None:
    storage = MemoryStorage()
    exchange(storage, 1, save_id="ffffffff").report(part(1))
    mine = exchange(
        storage, 0, lambda: exchange(storage, 1).report(part(1)), lambda: exchange(storage, 2).report(part(2))
    )
    assert len(mine.collect()) == 2
    mine.delete_read()
    assert sorted(storage.files) == ["run/ffffffff.00001.receipt"]


def test_one_looks_less_and_less_often_and_soon_again_when_something_has_come() -> None:
    clock = Clock()
    waiter = RankWaiter(clock.token(), tuple)
    for _ in range(12):
        waiter.wait([1])
    assert clock.pauses[:4] == [POLL_S, 2 * POLL_S, 4 * POLL_S, 8 * POLL_S]
    assert clock.pauses[-1] == POLL_MAX_S
    waiter.reset_pause()
    waiter.wait([1])
    assert clock.pauses[-1] == POLL_S


@pytest.mark.parametrize(("grace_s", "ends_at"), [(0.0, 10.0), (5.0, 15.0)])
def test_it_ends_with_the_time_that_there_is_and_some_grace(grace_s: float, ends_at: float) -> None:
    clock = Clock()
    waiter = RankWaiter(clock.token(10.0), tuple, grace_s)
    with pytest.raises(CheckpointException) as caught:
        wait_to_the_end(waiter)
    assert caught.value.type is ExceptionType.TIMEOUT
    assert clock.now == pytest.approx(ends_at)


@pytest.mark.parametrize(
    ("then", "is_hurried"), [("abc", False), ("cdab", False), ("ab", False), ("acd", True), ("", True)]
)
def test_it_ends_soon_when_a_rank_is_gone_that_it_waits_for(then: str, is_hurried: bool) -> None:
    clock, members = Clock(), ["abc"]
    waiter = RankWaiter(clock.token(100.0), lambda: tuple(members[-1]), 5.0)
    waiter.wait([1])
    members.append(then)
    with pytest.raises(CheckpointException) as caught:
        wait_to_the_end(waiter)
    assert clock.now == pytest.approx(POLL_S + GONE_S if is_hurried else 105.0)
    if is_hurried:
        assert caught.value.code == "checkpoint_rank_gone"
        assert caught.value.message == "rank 1 (b) left before the save was complete"
        assert caught.value.ranks == (1,)
    else:
        assert caught.value.type is ExceptionType.TIMEOUT


def test_of_many_that_are_gone_some_are_named() -> None:
    clock, members = Clock(), [f"w{number}" for number in range(40)]
    waiter = RankWaiter(clock.token(100.0), lambda: tuple(members), 5.0)
    del members[5:]
    with pytest.raises(
        CheckpointException, match=r"rank 5 \(w5\), .*rank 14 \(w14\) and 25 more left before"
    ) as caught:
        wait_to_the_end(waiter, range(1, 40))
    assert "rank 4" not in caught.value.message
    assert caught.value.ranks == tuple(range(5, 15))


def test_ranks_without_names_are_waited_for_until_the_deadline() -> None:
    clock = Clock()
    waiter = RankWaiter(clock.token(50.0), tuple)
    with pytest.raises(CheckpointException):
        wait_to_the_end(waiter)
    assert clock.now == pytest.approx(50.0)


def test_a_save_that_is_given_up_ends_at_once() -> None:
    for names in ([()], [("a", "b"), ("a",)]):
        token, members = CancelToken(100.0), iter(names)
        waiter = RankWaiter(token, lambda members=members: next(members, ()), 5.0)  # type: ignore[misc]
        token.cancel()
        with pytest.raises(CheckpointException, match="cancelled"):
            waiter.wait([1])
