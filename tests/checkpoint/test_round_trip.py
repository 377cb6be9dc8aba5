"""A state saved by any ranks, in any parts and format, is loaded by any other ranks in any other parts, bit for bit."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, LoadOptions, SaveOptions, ShardedArray
from forged.checkpoint.verification.validator import CheckpointValidator
from tests.checkpoint.fixtures.layouts import (
    DTYPES,
    SHAPES,
    Array,
    array_of,
    bits,
    part_of,
    partitions,
    small_chunks,
    strided,
)
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.rank_group import SimulatedRank, all_ranks


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Array]:
    kinds = draw(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=4))
    return {f"t{seed}": array_of(seed, dtype, shape) for seed, (dtype, shape) in enumerate(kinds)}


@st.composite
def layouts(draw: st.DrawFn, arrays: dict[str, Array], ranks: int) -> dict[str, list[Box] | None]:
    """By tensor, the boxes of the ranks; None if all ranks have the whole tensor."""
    return {name: draw(st.none() | partitions(array.shape, ranks)) for name, array in arrays.items()}


def state_of(arrays: dict[str, Array], layout: dict[str, list[Box] | None], rank: int, how: int) -> dict[str, Any]:
    """The state of a rank: its parts, in any memory layout."""
    state: dict[str, Any] = {}
    for name, array in arrays.items():
        boxes = layout[name]
        source = array if boxes is None else part_of(array, boxes[rank])
        room = strided(source.shape, source.dtype, how)
        if room.itemsize:
            room[...] = source
        state[name] = room if boxes is None else ShardedArray(room, array.shape, boxes[rank].offset)
    return state


class TestRoundTrip:
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data())
    def test_any_saved_state_is_loaded_bit_for_bit(self, data: st.DataObject) -> None:
        draw = data.draw
        arrays = draw(tensors())
        saving, loading = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        saved, wanted = draw(layouts(arrays, saving)), draw(layouts(arrays, loading))
        options = SaveOptions(
            "a",
            draw(st.sampled_from(CheckpointFormat)),
            draw(st.sampled_from([CompressionLevel.NONE, CompressionLevel.FAST])),
            copies=draw(st.integers(1, 2)),
        )
        ways = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        storage = MemoryStorage()

        async def save(rank: SimulatedRank) -> None:
            async with DistributedCheckpoint(rank, storage) as checkpoint:
                await checkpoint.save(state_of(arrays, saved, rank.rank, ways[0]), None, options)

        async def load(rank: SimulatedRank) -> dict[str, Any]:
            into = state_of(arrays, wanted, rank.rank, ways[1])
            for one in into.values():
                room = one.local if isinstance(one, ShardedArray) else one
                if room.size and room.itemsize:
                    room[...] = np.zeros((), room.dtype)
            async with DistributedCheckpoint(rank, storage) as checkpoint:
                await checkpoint.load(into, None, LoadOptions("a"))
            return into

        with small_chunks(draw(st.sampled_from([32, 256, 1 << 17])), 1 << 12, draw(st.sampled_from([1, 64]))):
            for outcome in asyncio.run(all_ranks(saving, save)):
                assert outcome is None
            assert CheckpointValidator(storage).validate_checkpoint("a").is_valid
            for rank, into in enumerate(asyncio.run(all_ranks(loading, load))):
                assert isinstance(into, dict), into
                expected = state_of(arrays, wanted, rank, 0)
                for name, one in into.items():
                    if isinstance(one, ShardedArray):
                        assert bits(one.local) == bits(expected[name].local)
                    else:
                        assert bits(one) == bits(expected[name])
