"""The small values that the ranks of a world share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forged.errors import RequestRefused, Unavailable
from forged.worker.collectives.store import KEY_BYTES_MAX, STORE_BYTES_MAX, VALUE_BYTES_MAX, StoreCalls, StoreValues
from forged.worker.collectives.world import World
from forged.worker.errors import CollectiveAborted
from forged.worker.transport.peer_messages import STORE_CALLS_MAX, StoreAction, StoreAnswer, StoreCall
from tests.worker.meshes import PATIENCE_S, each, failures, open_world, until

SET, GET, ADD, DELETE, FORGET = StoreAction


def answers(values: StoreValues, rank: int, *call: Any, **more: Any) -> list[tuple[int, StoreAnswer]]:
    return list(values.take(rank, StoreCall(*call, **more)))


class TestValues:
    def test_value_is_read_by_every_rank_until_it_is_deleted(self) -> None:
        values = StoreValues()
        assert answers(values, 1, 1, GET, "port") == [(1, StoreAnswer(1))]
        assert answers(values, 2, 1, SET, "port", b"7") == [(2, StoreAnswer(1))]
        assert answers(values, 1, 2, GET, "port") == [(1, StoreAnswer(2, b"7"))]
        assert answers(values, 0, 1, DELETE, "port") == [(0, StoreAnswer(1, number_in=1))]
        assert answers(values, 0, 2, DELETE, "port") == [(0, StoreAnswer(2))]
        assert answers(values, 1, 3, GET, "port") == [(1, StoreAnswer(3))]

    def test_waiting_calls_are_answered_when_the_key_is_set(self) -> None:
        values = StoreValues()
        assert answers(values, 1, 1, GET, "port", waits=True) == []
        assert answers(values, 2, 5, GET, "port", waits=True) == []
        assert answers(values, 3, 2, GET, "port", waits=True) == []
        assert answers(values, 3, 2, FORGET, "port") == [(3, StoreAnswer(2))]
        told = [(1, StoreAnswer(1, b"7")), (2, StoreAnswer(5, b"7")), (0, StoreAnswer(9))]
        assert answers(values, 0, 9, SET, "port", b"7") == told
        assert answers(values, 1, 1, FORGET, "port") == [], "it was answered"
        assert values._waiting == {}

    def test_numbers_are_added_up_and_read_in_digits(self) -> None:
        values = StoreValues()
        assert answers(values, 1, 1, GET, "ready", waits=True) == []
        assert answers(values, 1, 2, ADD, "ready", delta=3) == [
            (1, StoreAnswer(1, b"3")),
            (1, StoreAnswer(2, number_in=3)),
        ]
        assert answers(values, 2, 1, ADD, "ready", delta=-5) == [(2, StoreAnswer(1, number_in=-2))]
        assert answers(values, 1, 3, GET, "ready") == [(1, StoreAnswer(3, b"-2"))]
        answers(values, 1, 4, SET, "ready", b"soon")
        [(_, refused)] = answers(values, 1, 5, ADD, "ready", delta=1)
        assert (refused.code, refused.number) == ("store_value_no_number", 5)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self) -> None:
        values = StoreValues()
        full = 0
        for number in range(STORE_BYTES_MAX // VALUE_BYTES_MAX):
            [(_, answer)] = answers(values, 1, number, SET, f"key {number}", bytes(VALUE_BYTES_MAX))
            full += answer.code == "store_full"
        assert full == 1
        [(_, again)] = answers(values, 1, 99, SET, "key 0", b"")
        [(_, fits)] = answers(values, 1, 99, SET, "last", bytes(VALUE_BYTES_MAX))
        assert (again.code, fits.code) == ("", "")
        for key, value, code in (
            ("", b"", "store_key_invalid"),
            ("ä" * KEY_BYTES_MAX, b"", "store_key_invalid"),
            ("key", bytes(VALUE_BYTES_MAX + 1), "store_value_too_large"),
        ):
            [(_, refused)] = answers(values, 1, 99, SET, key, value)
            assert refused.code == code
        for number in range(STORE_BYTES_MAX // VALUE_BYTES_MAX):
            answers(values, 1, number, DELETE, f"key {number}")
        answers(values, 1, 100, DELETE, "last")
        assert (values._values, values._bytes) == ({}, 0)


class TestCalls:
    async def test_ranks_share_values_while_a_collective_waits(self) -> None:
        async with asyncio.timeout(PATIENCE_S), open_world(3) as worlds:
            first, second, third = worlds
            waiting = [asyncio.ensure_future(world.barrier()) for world in (first, second)]
            reading = [
                asyncio.ensure_future(world.store_calls.call(GET, "port", waits=True)) for world in (first, second)
            ]
            await third.store_calls.call(SET, "port", b"7")
            assert [(await one).value for one in reading] == [b"7", b"7"]
            counts = [(await world.store_calls.call(ADD, "ready", delta=1)).number_in for world in worlds]
            assert counts == [1, 2, 3]
            await third.barrier()
            await asyncio.gather(*waiting)

    async def test_get_ends_after_its_timeout_and_the_key_may_be_set_later(self) -> None:
        async with asyncio.timeout(PATIENCE_S), open_world(2) as (first, second):
            for world in (first, second):
                with pytest.raises(Unavailable, match=r"'port' was not set within 0\.01 s") as raised:
                    await world.store_calls.call(GET, "port", waits=True, timeout_s=0.01)
                assert raised.value.code == "key_missing"
                await until(lambda world=world: not world.store_calls._pending)  # type: ignore[misc]
            await first.store_calls.call(SET, "port", b"7")
            assert (await second.store_calls.call(GET, "port", waits=True)).value == b"7"

    async def test_more_calls_than_may_be_unanswered_take_turns(self) -> None:
        async with asyncio.timeout(PATIENCE_S), open_world(2) as (first, second):
            calls = [second.store_calls.call(ADD, "many", delta=1) for _ in range(3 * STORE_CALLS_MAX)]
            sums = [answer.number_in for answer in await asyncio.gather(*calls)]
            assert sorted(sums) == list(range(1, 3 * STORE_CALLS_MAX + 1))
            assert first.ending is None

    async def test_cancelled_call_keeps_its_turn_until_it_is_answered(self) -> None:
        sent: list[StoreCall] = []
        calls = StoreCalls(sent.append)
        for _ in range(STORE_CALLS_MAX):
            waiting = asyncio.ensure_future(calls.call(GET, "port", waits=True))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        one_more = asyncio.ensure_future(calls.call(GET, "port"))
        await asyncio.sleep(0)
        assert [call.action for call in sent] == [GET, FORGET] * STORE_CALLS_MAX
        calls.take(StoreAnswer(1))
        await until(lambda: len(sent) > 2 * STORE_CALLS_MAX)
        calls.take(StoreAnswer(sent[-1].number, b"7"))
        assert (await one_more).value == b"7"

    async def test_refusal_of_the_hub_is_raised_at_the_rank_that_called(self) -> None:
        async with asyncio.timeout(PATIENCE_S), open_world(2) as (first, second):
            await second.store_calls.call(SET, "name", b"w1")
            for world in (first, second):
                with pytest.raises(RequestRefused, match="no number") as raised:
                    await world.store_calls.call(ADD, "name", delta=1)
                assert raised.value.fix
            with pytest.raises(RequestRefused, match="limit 1048576"):
                await second.store_calls.call(SET, "large", bytes(VALUE_BYTES_MAX + 1))

    async def test_end_of_the_world_ends_waiting_and_later_calls_at_every_rank(self) -> None:
        async with asyncio.timeout(PATIENCE_S), open_world(3) as worlds:

            async def get(world: World) -> StoreAnswer:
                return await world.store_calls.call(GET, "port", waits=True)

            waiting = [asyncio.ensure_future(get(world)) for world in worlds]
            await asyncio.sleep(0)
            worlds[1].abort("it was unplugged")
            errors = await failures(*waiting)
            errors += await failures(*map(get, worlds))
            assert all(isinstance(error, CollectiveAborted) for error in errors)
            assert all("unplugged" in str(error) for error in errors)
            assert await each(worlds, lambda world: asyncio.sleep(0, not world.store_calls._pending)) == [True] * 3
