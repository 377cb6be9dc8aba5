"""Decisions of a rank group: all ranks get the same outcome in time, also if one rank fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forged.checkpoint import thread_calls
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.ports import CancelToken, Coordinator
from forged.checkpoint.rank_group import (
    BlockingCoordinator,
    OutcomeUnknown,
    RankFailure,
    RankGroup,
    SingleProcess,
    as_coordinator,
)
from forged.errors import ForgedError, RequestRefused
from forged.worker.errors import StepAborted
from tests.checkpoint.fixtures.rank_group import SimulatedRank, SimulatedRanks, all_ranks
from tests.checkpoint.fixtures.unreliable_ranks import UnreliableRank, after_event, answer_with, die, fail, group, hang

SOON_S = 0.2


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short grace periods."""
    monkeypatch.setattr(thread_calls, "RETURN_GRACE_S", 0.1)


def deciding(
    mine: Callable[[int], Awaitable[bytes]], decide: Callable[[list[bytes]], Awaitable[bytes]], timeout_s: float = 60
) -> Callable[[Coordinator], Awaitable[bytes]]:
    async def act(member: Coordinator) -> bytes:
        ranks = RankGroup(member, CancelToken(timeout_s), ExceptionType.SAVE_FAILED)
        ranks.prefix = "run/1"
        return await ranks.decide(lambda: mine(member.rank), decide)

    return act


async def number(rank: int) -> bytes:
    return b"%d" % rank


async def joined(said: list[bytes]) -> bytes:
    return b" ".join(said)


def failing_at(faulty: int, error: Exception) -> Callable[[int], Awaitable[bytes]]:
    async def mine(rank: int) -> bytes:
        if rank == faulty:
            raise error
        return await number(rank)

    return mine


def errors(outcomes: list[Any]) -> list[CheckpointException]:
    assert all(isinstance(one, CheckpointException) for one in outcomes), outcomes
    return outcomes


@pytest.mark.parametrize("world_size", [1, 2, 5])
async def test_root_decides_from_all_values_and_all_ranks_get_the_decision(world_size: int) -> None:
    assert (
        await group(world_size, deciding(number, joined))
        == [b" ".join(b"%d" % n for n in range(world_size))] * world_size
    )


@pytest.mark.parametrize("faulty", [0, 2, 3])
async def test_error_of_one_rank_is_raised_at_all_ranks(faulty: int) -> None:
    told = CheckpointException(
        "no room", "x", ExceptionType.STORAGE_ERROR, code="full", fix="make some", retryable=True
    )
    found = errors(await group(4, deciding(failing_at(faulty, told), joined)))
    for error in found:
        assert (error.message, error.checkpoint_path, error.type) == (f"rank {faulty}: no room", "run/1", told.type)
        assert (error.code, error.fix, error.retryable) == ("full", "make some", True)
        assert not isinstance(error, OutcomeUnknown)
    assert [error.__cause__ is told for error in found] == [rank == faulty for rank in range(4)]


@pytest.mark.parametrize(
    ("finder", "message"), [(0, "rank 0: rank 1 is gone"), (1, "rank 1 is gone"), (2, "rank 2: rank 1 is gone")]
)
async def test_error_names_the_failed_rank_once(finder: int, message: str) -> None:
    gone = CheckpointException("rank 1 is gone", ranks=(1,))
    for error in errors(await group(3, deciding(failing_at(finder, gone), joined))):
        assert (error.message, set(error.ranks)) == (message, {1, finder})


async def test_an_error_that_comes_by_the_same_rank_twice_names_it_once() -> None:
    first = errors(await group(2, deciding(failing_at(1, CheckpointException("no room")), joined)))[0]
    for error in errors(await group(2, deciding(failing_at(1, first), joined))):
        assert error.message == "rank 1: no room"


async def test_error_of_the_decision_is_raised_at_all_ranks() -> None:
    async def refuse(said: list[bytes]) -> bytes:
        raise RequestRefused("no", "not this time", "wait")

    for error in errors(await group(3, deciding(number, refuse))):
        assert (error.message, error.code, error.fix) == ("rank 0: not this time", "no", "wait")
        assert error.type is ExceptionType.SAVE_FAILED


async def test_of_several_errors_that_of_the_first_rank_is_raised() -> None:
    async def mine(rank: int) -> bytes:
        raise ValueError(str(rank)) if rank else CheckpointException("first")

    assert {error.message for error in errors(await group(3, deciding(mine, joined)))} == {"rank 0: first"}


@pytest.mark.parametrize(
    "error", [ValueError("foreign"), MemoryError(), OSError(28, "full"), ExceptionGroup("two", [ValueError()])]
)
async def test_foreign_errors_arrive_as_errors_of_checkpoints(error: Exception) -> None:
    for found in errors(await group(2, deciding(failing_at(1, error), joined))):
        assert found.type is ExceptionType.SAVE_FAILED
        assert found.code in {"checkpoint_failed", "checkpoint_memory"}


async def test_single_rank_is_not_named() -> None:
    (error,) = errors(await group(1, deciding(failing_at(0, CheckpointException("no room")), joined)))
    assert error.message == "no room"


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("call", [1, 2])
async def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_operation_may_take(faulty: int, call: int) -> None:
    outcomes = await asyncio.wait_for(group(3, deciding(number, joined, SOON_S), {faulty: {call: hang}}), 20)
    for error in errors(outcomes):
        assert isinstance(error, OutcomeUnknown)
        assert (error.type, error.checkpoint_path) == (ExceptionType.TIMEOUT, "run/1")


@pytest.mark.parametrize("faulty", [0, 1])
async def test_a_rank_that_dies_is_not_waited_for_for_ever(faulty: int) -> None:
    outcomes = await asyncio.wait_for(group(3, deciding(number, joined, SOON_S), {faulty: {1: die}}), 20)
    assert isinstance(outcomes.pop(faulty), asyncio.CancelledError)
    assert all(error.type is ExceptionType.TIMEOUT for error in errors(outcomes))


async def test_a_rank_that_comes_late_is_waited_for() -> None:
    come = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, come.set)
    assert await group(2, deciding(number, joined), {1: {1: after_event(come)}}) == [b"0 1"] * 2


async def test_timed_out_rank_still_reports_to_the_other_ranks() -> None:
    """A rank that has found out that it is too late has a moment to say so."""

    async def mine(rank: int) -> bytes:
        if rank == 1:
            CancelToken(1.0, monotonic=iter([0.0, 9.0, 9.0]).__next__).check()
        return b""

    async def act(member: UnreliableRank) -> bytes:
        token = CancelToken(1.0, monotonic=iter([0.0, *[9.0] * 9]).__next__)
        return await RankGroup(member, token, ExceptionType.SAVE_FAILED).decide(lambda: mine(member.rank), joined)

    for error in errors(await group(2, act)):
        assert not isinstance(error, OutcomeUnknown)
        assert error.message.startswith("rank 1: the operation did not finish within 1 s")


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), TimeoutError(), RuntimeError("closed")])
async def test_calls_that_fail_leave_it_undecided(error: Exception) -> None:
    outcomes = await group(2, deciding(number, joined, SOON_S), {0: {1: fail(error)}})
    assert all(isinstance(one, OutcomeUnknown) for one in outcomes)
    assert outcomes[0].__cause__ is error  # type: ignore[union-attr]


async def test_aborted_collective_is_reported() -> None:
    """The training loop repeats it; it is no failure of the checkpoint."""
    outcomes = await group(2, deciding(number, joined, SOON_S), {0: {1: fail(StepAborted("a worker is lost"))}})
    assert isinstance(outcomes[0], StepAborted)


@pytest.mark.parametrize("call", [1, 2])
async def test_local_results_of_an_aborted_step_are_not_taken_for_a_decision(call: int) -> None:
    """Outside `with step:` a worker's gather gives back the own value alone, and its broadcast what was put in."""

    class Parted(UnreliableRank):
        async def gather(self, value: Any, root: int = 0) -> list[Any] | None:
            return [value] if call == 1 else await super().gather(value, root)

        async def broadcast(self, value: Any, root: int = 0) -> Any:
            return value

    async def act(member: UnreliableRank) -> bytes:
        parted = Parted(member._together, member.rank, {})
        return await deciding(number, joined)(parted)

    outcomes = await group(3, act)
    assert all(isinstance(one, OutcomeUnknown) for one in outcomes[1:])
    assert isinstance(outcomes[0], OutcomeUnknown) if call == 1 else outcomes[0] == b"0 1 2"


@pytest.mark.parametrize("other", [b"", b"\xc1", b"\x00garbage", b"\x93\x01", None])
async def test_a_rank_that_says_something_else_is_an_error_at_all(other: bytes | None) -> None:
    outcomes = await asyncio.wait_for(group(3, deciding(number, joined, SOON_S), {2: {1: answer_with(other)}}), 20)
    assert {(error.code, error.message[:7]) for error in errors(outcomes)} == {("checkpoint_ranks_differ", "rank 2:")}


async def test_a_root_that_says_something_else_is_an_error() -> None:
    outcomes = await asyncio.wait_for(group(2, deciding(number, joined, SOON_S), {0: {2: answer_with(b"\xc1")}}), 20)
    assert all(isinstance(one, OutcomeUnknown) for one in outcomes), outcomes


def test_unknown_outcome_stays_unknown_at_other_ranks() -> None:
    error = RankFailure.of(OutcomeUnknown("the outcome is unknown")).error("run/1", ExceptionType.SAVE_FAILED, 0)
    assert isinstance(error, OutcomeUnknown)
    assert not isinstance(
        RankFailure.of(CheckpointException("no")).error("", ExceptionType.SAVE_FAILED, 0), OutcomeUnknown
    )


# Coordinators.


def test_none_is_one_process() -> None:
    assert isinstance(as_coordinator(None), SingleProcess)


@pytest.mark.parametrize("no_coordinator", [3, "ranks", SimpleNamespace(barrier=print, gather=print, broadcast=None)])
def test_coordinator_without_the_needed_methods_is_refused(no_coordinator: Any) -> None:
    with pytest.raises(CheckpointException, match=f"coordinator {type(no_coordinator).__name__} has no .*broadcast"):
        as_coordinator(no_coordinator)


async def test_single_process_does_not_wait() -> None:
    alone = SingleProcess()
    await alone.barrier()
    assert (await alone.gather(b"x"), await alone.broadcast(b"y")) == ([b"x"], b"y")
    assert isinstance(alone, Coordinator)


class Threads:
    """Ranks with blocking calls, each in a thread."""

    generation = 7

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._meeting = threading.Barrier(world_size)
        self._values: list[Any] = [None] * world_size

    def rank(self, rank: int) -> Any:
        outer = self

        class One:
            world_size = outer.world_size
            generation = outer.generation

            def __init__(self) -> None:
                self.rank = rank

            def barrier(self) -> None:
                outer._meeting.wait(20)

            def gather(self, value: Any, root: int = 0) -> list[Any] | None:
                found = self._exchange(value)
                return found if rank == root else None

            def broadcast(self, value: Any, root: int = 0) -> Any:
                return self._exchange(value)[root]

            def _exchange(self, value: Any) -> list[Any]:
                outer._values[rank] = value
                outer._meeting.wait(20)
                found = list(outer._values)
                outer._meeting.wait(20)
                return found

        return One()


async def test_blocking_ranks_get_the_same_decision() -> None:
    threads = Threads(3)
    acts = [deciding(number, joined)(as_coordinator(threads.rank(rank))) for rank in range(3)]
    assert await asyncio.gather(*acts) == [b"0 1 2"] * 3
    await asyncio.gather(*(as_coordinator(threads.rank(rank)).barrier() for rank in range(3)))


def test_blocking_coordinator_passes_attributes_through() -> None:
    coordinator = as_coordinator(Threads(2).rank(1))
    assert isinstance(coordinator, BlockingCoordinator)
    assert (coordinator.rank, coordinator.world_size, coordinator.generation) == (1, 2, 7)
    assert not hasattr(coordinator, "nothing_of_the_kind")


async def test_a_call_that_blocks_for_ever_is_given_up() -> None:
    released = threading.Event()

    class Hanging(SingleProcess):
        world_size = 2

        def gather(self, value: Any, root: int = 0) -> Any:
            released.wait(60)

    try:
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(deciding(number, joined, SOON_S)(as_coordinator(Hanging())), 20)
    finally:
        released.set()


def test_errors_that_are_not_of_checkpoints_keep_their_code() -> None:
    assert RankFailure.of(ForgedError("a_code", "a message")).code == "a_code"


async def test_announced_value_is_that_of_the_root() -> None:
    async def act(rank: SimulatedRank) -> bytes | None:
        ranks = RankGroup(rank, CancelToken(30.0), ExceptionType.SAVE_FAILED)
        return await ranks.announce(b"mine" if rank.rank == 0 else b"ignored")

    assert await all_ranks(3, act) == [b"mine"] * 3


async def test_aborted_announcement_has_no_value() -> None:
    class Aborted(SimulatedRank):
        """A rank of a script without `with step:`, which gets its own value from an aborted collective."""

        async def broadcast(self, value: Any, root: int = 0) -> Any:
            return value

    ranks = RankGroup(Aborted(SimulatedRanks(2), 1), CancelToken(30.0), ExceptionType.SAVE_FAILED)
    assert await ranks.announce(b"ignored") is None
