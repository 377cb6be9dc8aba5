from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import to_thread

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.worker.collectives.arrays import pack_array
from forged.worker.collectives.endpoints import MemberEndpoint
from forged.worker.collectives.world import World
from forged.worker.errors import CollectiveAborted, CollectiveMismatch
from forged.worker.transport.peer_messages import COLLECTIVE_BYTES_MAX, Contribution, Form, Result, Value
from tests.worker.meshes import each, failures, open_meshes, open_world, until

SIZES = [1, 2, 5]
Act = Callable[[World], Awaitable[Any]]

ACTS: dict[str, Act] = {
    "barrier": lambda world: world.barrier(),
    "gather": lambda world: world.gather(b"x", world.size - 1),
    "broadcast": lambda world: world.broadcast(b"x", world.size - 1),
    "all_gather": lambda world: world.all_gather(np.arange(3)),
    "all_reduce": lambda world: world.all_reduce(np.arange(3.0)),
    "end_step": lambda world: world.end_step(1),
}


async def codes_of(worlds: list[World], act: Act) -> set[str]:
    errors = await failures(*(act(world) for world in worlds))
    assert all(isinstance(error, ForgedError) for error in errors), errors
    return {error.code for error in errors if isinstance(error, ForgedError)}


@pytest.mark.parametrize("size", SIZES)
async def test_no_rank_passes_a_barrier_before_the_last_has_called(size: int) -> None:
    passed: list[int] = []

    async def pass_through(world: World) -> None:
        await world.barrier()
        passed.append(world.rank)

    async with open_world(size) as worlds, anyio.create_task_group() as tasks:
        for world in worlds[:-1]:
            tasks.start_soon(pass_through, world)
        await anyio.wait_all_tasks_blocked()
        assert passed == []
        tasks.start_soon(pass_through, worlds[-1])
        await until(lambda: len(passed) == size)


@pytest.mark.parametrize("size", SIZES)
async def test_gather_delivers_values_to_the_root_in_rank_order(size: int) -> None:
    async with open_world(size) as worlds:
        for root in range(size):
            outcomes = await asyncio.gather(*(world.gather(b"%d" % world.rank, root) for world in worlds))
            assert outcomes[root] == [b"%d" % rank for rank in range(size)]
            assert [outcome for rank, outcome in enumerate(outcomes) if rank != root] == [None] * (size - 1)


async def test_arrays_of_different_shapes_and_types_can_be_gathered() -> None:
    async with open_world(3) as worlds:
        outcomes = await each(
            worlds, lambda world: world.all_gather(np.ones((world.rank,), f"<f{2 ** (world.rank + 1)}"))
        )
        for gathered in outcomes:
            assert [(one.dtype.str, one.shape) for one in gathered] == [("<f2", (0,)), ("<f4", (1,)), ("<f8", (2,))]


@pytest.mark.parametrize("size", SIZES)
async def test_broadcast_delivers_the_value_of_the_root(size: int) -> None:
    async with open_world(size) as worlds:
        for root in range(size):
            given = np.arange(4, dtype=np.int16) + root
            offers = [given if world.rank == root else None for world in worlds]
            outcomes = await asyncio.gather(
                *(world.broadcast(offer, root) for world, offer in zip(worlds, offers, strict=True))
            )
            assert all(one.dtype == given.dtype and one.tolist() == given.tolist() for one in outcomes)
            outcomes[0][0] = 99
            assert given[0] == root


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("operation", "expected"), [("sum", sum), ("min", min), ("max", max)])
async def test_all_ranks_get_the_same_reduction(size: int, operation: str, expected: Callable[..., int]) -> None:
    async with open_world(size) as worlds:
        outcomes = await each(worlds, lambda world: world.all_reduce(np.array([world.rank, -world.rank]), operation))
        ranks = range(size)
        assert [one.tolist() for one in outcomes] == [[expected(ranks), expected([-rank for rank in ranks])]] * size


async def test_reduction_is_bitwise_equal_at_every_rank_and_run() -> None:
    source = np.random.default_rng(1)
    given = [(source.standard_normal(1000) * 10.0 ** source.integers(-8, 8, 1000)).astype(np.float32) for _ in range(5)]
    seen: set[bytes] = set()
    for hurry in (0, 4, 2):
        async with open_world(5) as worlds, anyio.create_task_group() as tasks:

            async def reduce(world: World) -> None:
                seen.add((await world.all_reduce(given[world.rank], "mean")).tobytes())

            tasks.start_soon(reduce, worlds[hurry])
            await anyio.wait_all_tasks_blocked()
            for world in worlds:
                if world.rank != hurry:
                    tasks.start_soon(reduce, world)
    assert len(seen) == 1


async def test_numbers_can_be_reduced_too() -> None:
    async with open_world(2) as worlds:
        assert await each(worlds, lambda world: world.all_reduce(world.rank + 1)) == [3, 3]
        assert await each(worlds, lambda world: world.all_reduce(world.rank + 1, "mean")) == [1.5, 1.5]
        assert await each(worlds, lambda world: world.all_reduce(world.rank * 0.5, "max")) == [0.5, 0.5]


async def test_result_can_overwrite_the_operand() -> None:
    async with open_world(3) as worlds:
        operands = [np.full(3, rank, np.float32) for rank in range(3)]
        outcomes = await each(worlds, lambda world: world.all_reduce(operands[world.rank], out=operands[world.rank]))
        assert all(outcome is operand for outcome, operand in zip(outcomes, operands, strict=True))
        assert [operand.tolist() for operand in operands] == [[3.0] * 3] * 3


async def test_large_arrays_are_reduced_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    apart: list[int] = []
    run_sync = to_thread.run_sync

    async def watched(*args: Any, **options: Any) -> Any:
        apart.append(1)
        return await run_sync(*args, **options)

    monkeypatch.setattr("forged.worker.collectives.endpoints.to_thread.run_sync", watched)
    async with open_world(2) as worlds:
        outcomes = await each(worlds, lambda world: world.all_reduce(np.full((1 << 20) + 1, world.rank + 1.0)))
        assert all((outcome == 3.0).all() for outcome in outcomes)
        assert apart == [1]
        await each(worlds, lambda world: world.all_reduce(np.ones(10)))
        assert apart == [1]


async def test_reduction_error_at_the_hub_reaches_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("no memory")

    async with open_world(3) as worlds:
        monkeypatch.setattr("forged.worker.collectives.arrays.reduce", refuse)
        monkeypatch.setattr("forged.worker.collectives.arrays.check_operation", lambda *_: None)
        errors = await failures(*(world.all_reduce(1.0) for world in worlds))
        assert all("no memory" in str(error) for error in errors)


async def test_step_is_committed_when_all_ranks_have_finished_it() -> None:
    async with open_world(3) as worlds:
        assert await each(worlds, lambda world: world.end_step(5)) == [0, 0, 0]


async def test_all_ranks_stop_after_the_step_when_one_requests_it() -> None:
    async with open_world(3) as worlds:
        wishes = await each(worlds, lambda world: world.end_step(5, stop_wanted=40 + world.rank if world.rank else 0))
        assert wishes == [42, 42, 42]


async def test_mismatched_calls_raise_an_error_that_names_both_at_every_rank() -> None:
    async with open_world(3) as worlds:
        errors = await failures(worlds[0].barrier(), worlds[1].end_step(3), worlds[2].barrier())
        for error in errors:
            assert isinstance(error, CollectiveMismatch)
            assert "barrier()" in error.message
            assert "end_step(step=3) " in f"{error.message} "
        assert await codes_of(worlds, ACTS["barrier"]) == {"collective_mismatch"}


async def test_too_large_total_is_refused_with_a_fix() -> None:
    half = np.zeros(COLLECTIVE_BYTES_MAX // 2 + 1, np.int8)
    async with open_world(2) as worlds:
        for error in await failures(*(world.gather(half) for world in worlds)):
            assert isinstance(error, CollectiveMismatch)
            assert (error.code, error.fix) == ("collective_too_large", "use several smaller collectives")


async def test_rank_that_calls_after_a_mismatch_gets_the_error() -> None:
    async with open_world(3) as worlds:
        await failures(worlds[0].all_reduce(1.0), worlds[1].all_reduce(1))
        with pytest.raises(CollectiveMismatch):
            await worlds[2].all_reduce(1.0)


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
async def test_aborted_world_ends_the_calls_of_all_ranks(act: Act) -> None:
    async with open_world(4) as worlds:
        waiting = asyncio.ensure_future(failures(*(act(world) for world in worlds[:3])))
        await anyio.wait_all_tasks_blocked()
        worlds[3].abort("the data is wrong")
        errors = await waiting
        assert all(isinstance(error, CollectiveAborted) and "the data is wrong" in error.message for error in errors)
        assert await codes_of(worlds, act) == {"collective_aborted"}


async def test_abort_by_the_hub_reaches_all_ranks() -> None:
    async with open_world(3) as worlds:
        waiting = asyncio.ensure_future(failures(*(world.barrier() for world in worlds[1:])))
        await anyio.wait_all_tasks_blocked()
        worlds[0].abort("enough", "w9")
        for error in await waiting:
            assert isinstance(error, CollectiveAborted)
            assert (error.message, error.peer) == ("enough", "w9")


@pytest.mark.parametrize("count", [3, 200_000], ids=["at once", "in a thread"])
async def test_hub_that_cannot_compute_is_blamed(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("there is no room")

    async with open_world(3) as worlds:
        # What can be summed at all is tried out once.
        await each(worlds, lambda world: world.all_reduce(np.zeros(1)))
        monkeypatch.setattr("forged.worker.collectives.arrays.reduce", fail)
        for error in await failures(*(world.all_reduce(np.zeros(count)) for world in worlds)):
            assert isinstance(error, CollectiveAborted)
            assert (error.peer, "there is no room" in error.message) == (worlds[0].names[0], True)


@pytest.mark.parametrize("late", [0, 2])
async def test_a_call_that_takes_too_long_ends_the_world_for_all(late: int) -> None:
    async with open_world(3) as worlds:
        errors = await failures(*(world.barrier(timeout_s=0.05) for world in worlds if world.rank != late))
        assert all(isinstance(error, CollectiveAborted) for error in errors)
        assert all("barrier() #1" in str(error) and "was not answered within 0.05 s" in str(error) for error in errors)
        with pytest.raises(CollectiveAborted, match="was not answered"):
            await worlds[late].barrier()


async def test_hub_that_times_out_names_the_missing_ranks() -> None:
    async with open_world(3) as worlds:
        waiting = asyncio.ensure_future(failures(worlds[1].barrier()))
        await anyio.wait_all_tasks_blocked()
        errors = await failures(worlds[0].barrier(timeout_s=0.05))
        assert all("waiting for w2 (rank 2)" in str(error) for error in [*errors, *await waiting])


async def test_a_cancelled_call_ends_the_world_for_all() -> None:
    async with open_world(3) as worlds:
        task = asyncio.ensure_future(worlds[1].barrier())
        waiting = asyncio.ensure_future(failures(worlds[2].barrier()))
        await anyio.wait_all_tasks_blocked()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (error,) = await waiting
        assert "was cancelled" in str(error)
        assert "w0 (rank 0) had not called" in str(error)


async def test_two_calls_at_once_on_one_rank_are_refused() -> None:
    async with open_world(2) as worlds:
        task = asyncio.ensure_future(worlds[0].barrier())
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RequestRefused) as raised:
            await worlds[0].barrier()
        assert raised.value.code == "collective_in_progress"
        await worlds[1].barrier()
        await task


async def test_locally_refused_call_keeps_the_world() -> None:
    async with open_world(2) as worlds:
        for act in (
            lambda: worlds[0].gather("text"),  # type: ignore[arg-type]
            lambda: worlds[0].gather(b"", 2),
            lambda: worlds[0].gather(b"", -1),
            lambda: worlds[0].broadcast(None),
            lambda: worlds[0].all_reduce(1, "product"),
            lambda: worlds[0].all_reduce(np.ones(2), out=np.ones(3)),
            lambda: worlds[0].all_reduce(np.zeros((64 << 20) + 1, np.uint8)),
            lambda: worlds[0].end_step(1, stop_wanted=-1),
        ):
            with pytest.raises(RequestRefused):
                await act()
        await each(worlds, ACTS["barrier"])


async def test_rank_that_leaves_does_not_revoke_a_delivered_result() -> None:
    async with open_world(3) as worlds:

        async def finish(world: World) -> int:
            stop_wanted = await world.end_step(9)
            await world.leave()
            return stop_wanted

        assert await each(worlds, finish) == [0] * 3


@pytest.mark.parametrize("who", [0, 2])
async def test_call_that_needs_a_rank_that_left_names_it_and_blames_no_worker(who: int) -> None:
    async with open_world(3) as worlds:
        await worlds[who].leave()
        others = [world for world in worlds if world.rank != who]
        errors = await failures(*(world.barrier() for world in others))
        for error in errors:
            assert isinstance(error, CollectiveAborted)
            assert f"w{who} (rank {who}) left the world in good order" in error.message
            assert error.peer == ""
        assert await codes_of(worlds, ACTS["barrier"]) == {"collective_aborted"}


async def test_leaving_twice_or_after_an_abort_is_no_error() -> None:
    async with open_world(2) as worlds:
        worlds[0].abort("enough")
        for world in (*worlds, *worlds):
            await world.leave()


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("who", [0, 1])
async def test_lost_rank_is_named_at_all_ranks(act: Act, who: int) -> None:
    async with open_meshes(4) as made:
        worlds = await made.enter(1)
        others = [world for world in worlds if world.rank != who]
        waiting = asyncio.ensure_future(failures(*(act(world) for world in others)))
        await anyio.wait_all_tasks_blocked()
        for link in list(made.meshes[who]._links):
            link.abort()
        errors = await waiting
        assert all(isinstance(error, CollectiveAborted) and error.peer == f"w{who}" for error in errors), errors
        assert all(f"w{who} (rank {who}) was lost" in str(error) for error in errors)


async def test_step_committed_before_the_hub_was_lost_stays_committed() -> None:
    async with open_meshes(3) as made:
        worlds = await made.enter(1)
        hub_links = list(made.meshes[0]._links)

        async def end(world: World) -> int:
            stop_wanted = await world.end_step(1)
            if world.rank == 0:
                for link in hub_links:
                    link.close()
            return stop_wanted

        assert await each(worlds, end) == [0] * 3
        assert await codes_of(worlds[1:], ACTS["barrier"]) == {"collective_aborted"}


async def test_thousand_calls_leak_nothing() -> None:
    async with open_meshes(2) as made:
        worlds = await made.enter(1)
        tasks = len(asyncio.all_tasks())

        async def many(world: World) -> None:
            for step in range(1000):
                await world.end_step(step)

        await each(worlds, many)
        assert not worlds[0].endpoint._hub._brought  # type: ignore[attr-defined]
        assert len(asyncio.all_tasks()) == tasks


async def test_world_of_one_yields_to_the_event_loop() -> None:
    turns: list[int] = []

    async def other() -> None:
        while len(turns) < 10:
            turns.append(1)
            await asyncio.sleep(0)

    async with open_world(1) as worlds, anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for step in range(20):
            await worlds[0].end_step(step)
        assert len(turns) == 10


NONSENSE: dict[str, tuple[Value, ...]] = {
    "too few": (),
    "too many": (Value(Form.NUMBER, memoryview(b"12345678"), "<f8"),) * 3,
    "no type": (Value(Form.ARRAY, memoryview(b"xx"), "f4,(", (1,)),) * 2,
}


class InvalidHubEndpoint(MemberEndpoint):
    """An endpoint whose hub answers everything with the same."""

    values: tuple[Value, ...] = ()

    def _contribute(self, contribution: Contribution) -> None:
        self._deliver(Result(contribution.number, self.values))


@asynccontextmanager
async def invalid_hub(*values: Value) -> AsyncIterator[World]:
    """The world of a member whose hub answers everything with these values."""
    async with anyio.create_task_group() as tasks:
        endpoint = InvalidHubEndpoint(1, 1, ["a", "b"], tasks)
        endpoint.values = values
        yield World(endpoint)


@pytest.mark.parametrize("values", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("act", ["gather", "broadcast", "all_gather", "all_reduce"])
async def test_invalid_reply_of_the_hub_is_reported_to_it(act: str, values: tuple[Value, ...]) -> None:
    root = {"gather": 1, "broadcast": 0}.get(act)
    async with invalid_hub(*values) as world:
        with pytest.raises(PeerError):
            await (getattr(world, act)(1.0) if root is None else getattr(world, act)(1.0, root))


async def test_array_reply_to_a_number_is_a_peer_error() -> None:
    async with invalid_hub(pack_array(np.zeros(2))) as world:
        with pytest.raises(PeerError):
            await world.all_reduce(1.0)
        with pytest.raises(PeerError):
            await world.all_reduce(np.zeros(3), out=np.zeros(3))


async def test_sixty_four_ranks_on_one_loop() -> None:
    async with open_world(64) as worlds:
        outcomes = await each(worlds, lambda world: world.all_reduce(np.arange(256) + world.rank))
        assert all((outcome == outcomes[0]).all() for outcome in outcomes)
        assert outcomes[0][0] == sum(range(64))


def test_the_error_of_an_abort_can_be_copied_and_pickled() -> None:
    error = CollectiveAborted("why", "w1")
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(twin, CollectiveAborted)
        assert isinstance(twin, Unavailable)
        assert (twin.message, twin.peer, twin.code) == ("why", "w1", "collective_aborted")
