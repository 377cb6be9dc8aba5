"""Cancel tokens, and the checks of the ports."""

from __future__ import annotations

import math

import pytest

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import CancelToken, Coordinator, RemoteStorage, Storage, bounded
from tests.checkpoint.fixtures.memory_storage import MemoryStorage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def is_over(token: CancelToken) -> bool:
    try:
        token.check()
    except CheckpointException:
        return True
    return False


def test_it_is_over_when_its_time_is() -> None:
    clock = Clock()
    token = CancelToken(5.0, clock)
    assert (is_over(token), token.remaining_s()) == (False, 5.0)
    clock.now += 4.9
    assert not is_over(token)
    clock.now += 1.0
    assert token.remaining_s() == 0.0
    with pytest.raises(CheckpointException, match="not finish within 5 s") as caught:
        token.check()
    assert caught.value.type is ExceptionType.TIMEOUT


@pytest.mark.parametrize("timeout_s", [None, math.inf])
def test_it_may_have_no_end(timeout_s: float | None) -> None:
    clock = Clock()
    token = CancelToken(timeout_s, clock)
    clock.now += 1e9
    assert not is_over(token)
    assert token.remaining_s() in {None, math.inf}


def test_it_is_over_when_it_is_cancelled_and_says_so() -> None:
    token = CancelToken(None)
    token.cancel()
    with pytest.raises(CheckpointException) as caught:
        token.check()
    assert caught.value.code == "checkpoint_cancelled"
    with pytest.raises(CheckpointException):
        token.wait(1000.0)


@pytest.mark.parametrize(
    ("timeout_s", "hurry_s", "ends_after_s"), [(50.0, 5.0, 5.0), (5.0, 50.0, 5.0), (None, 5.0, 5.0)]
)
def test_it_can_be_hurried_and_not_slowed_down(timeout_s: float | None, hurry_s: float, ends_after_s: float) -> None:
    clock = Clock()
    token = CancelToken(timeout_s, clock)
    token.shorten(hurry_s)
    assert token.remaining_s() == ends_after_s


def test_hurrying_it_again_gives_it_no_more_time() -> None:
    clock = Clock()
    token = CancelToken(50.0, clock)
    token.shorten(5.0)
    clock.now += 4.0
    token.shorten(5.0)
    assert token.remaining_s() == 1.0


def test_a_later_one_has_more_time_and_is_cancelled_with_it() -> None:
    clock = Clock()
    token = CancelToken(5.0, clock)
    later = token.extended(2.0)
    clock.now += 6.0
    assert (is_over(token), is_over(later), later.remaining_s(), later.timeout_s) == (True, False, 1.0, 7.0)
    token.cancel()
    assert is_over(later)
    assert CancelToken(None).extended(2.0).remaining_s() is None


def test_hurrying_a_later_one_leaves_the_first_as_it_is() -> None:
    clock = Clock()
    token = CancelToken(50.0, clock)
    token.extended(5.0).shorten(1.0)
    assert token.remaining_s() == 50.0


def test_waiting_ends_with_the_time_that_there_is() -> None:
    times = iter([0.0, 4.0, 6.0, 6.0])
    with pytest.raises(CheckpointException, match="not finish within"):
        CancelToken(4.001, lambda: next(times)).wait(1000.0)


def test_local_storage_is_not_wrapped() -> None:
    storage = MemoryStorage()
    kept: Storage = bounded(storage, CancelToken(1.0))
    assert kept is storage
    assert not isinstance(storage, RemoteStorage)


def test_object_with_the_five_members_is_a_coordinator() -> None:
    class Mine:
        rank, world_size = 0, 1

        async def barrier(self) -> None: ...

        async def gather(self, value: bytes, root: int = 0) -> list[bytes] | None:
            return [value]

        async def broadcast(self, value: bytes, root: int = 0) -> bytes:
            return value

    assert isinstance(Mine(), Coordinator)
    assert not isinstance(object(), Coordinator)
