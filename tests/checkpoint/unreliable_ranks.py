"""Simulated ranks that die, hang, raise, come late, or send wrong values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from tests.checkpoint.rank_group import SimulatedRank, SimulatedRanks

T = TypeVar("T")

RankFault = Callable[[Any], Awaitable[Any]]
"""What a rank does at a call instead of just giving its value: returns the one that it gives, if it does."""


class UnreliableRank(SimulatedRank):
    """A rank with which something may go wrong at some of its calls, which are counted from 1.

    A decision is two calls: what all say is gathered, and what the root says is broadcast.
    """

    def __init__(self, together: SimulatedRanks, rank: int, faults: Mapping[int, RankFault]) -> None:
        super().__init__(together, rank)
        self._faults = faults

    async def _meet(self, value: Any) -> dict[int, Any]:
        fault = self._faults.get(self._calls + 1)
        return await super()._meet(value if fault is None else await fault(value))


async def group(
    world_size: int,
    act: Callable[[UnreliableRank], Awaitable[T]],
    faults: Mapping[int, Mapping[int, RankFault]] | None = None,
) -> list[T | BaseException]:
    """Have every rank do it; what each of them returns or raises. `faults` are by rank, then by call."""
    together = SimulatedRanks(world_size)
    members = [UnreliableRank(together, rank, (faults or {}).get(rank, {})) for rank in range(world_size)]
    return await asyncio.gather(*map(act, members), return_exceptions=True)


async def hang(value: Any) -> Any:
    """Never come."""
    await asyncio.get_running_loop().create_future()


async def die(value: Any) -> Any:
    """Be cancelled, like a rank of an ending process."""
    raise asyncio.CancelledError


def fail(error: Exception) -> RankFault:
    """Have the call itself fail, as a connection does that breaks."""

    async def fault(value: Any) -> Any:
        raise error

    return fault


def answer_with(other: Any) -> RankFault:
    """Say something else."""

    async def fault(value: Any) -> Any:
        return other

    return fault


def after_event(event: asyncio.Event) -> RankFault:
    """Come late."""

    async def fault(value: Any) -> Any:
        await event.wait()
        return value

    return fault
