"""Ranks in one event loop, some of which die, hang, raise, come late, or say something else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from tests.checkpoint.rank_group import SimulatedRank, SimulatedRanks

T = TypeVar("T")

Trouble = Callable[[Any], Awaitable[Any]]
"""What a rank does at a call instead of just giving its value: returns the one that it gives, if it does."""


class UnreliableRank(SimulatedRank):
    """A rank with which something may go wrong at some of its calls, which are counted from 1.

    A decision is two calls: what all say is gathered, and what the root says is broadcast.
    """

    def __init__(self, together: SimulatedRanks, rank: int, troubles: Mapping[int, Trouble]) -> None:
        super().__init__(together, rank)
        self._troubles = troubles

    async def _meet(self, value: Any) -> dict[int, Any]:
        trouble = self._troubles.get(self._calls + 1)
        return await super()._meet(value if trouble is None else await trouble(value))


async def group(
    world_size: int,
    act: Callable[[UnreliableRank], Awaitable[T]],
    troubles: Mapping[int, Mapping[int, Trouble]] | None = None,
) -> list[T | BaseException]:
    """Have every rank do it; what each of them returns or raises. `troubles` are by rank, then by call."""
    together = SimulatedRanks(world_size)
    members = [UnreliableRank(together, rank, (troubles or {}).get(rank, {})) for rank in range(world_size)]
    return await asyncio.gather(*map(act, members), return_exceptions=True)


async def hang(value: Any) -> Any:
    """Never come."""
    await asyncio.get_running_loop().create_future()


async def die(value: Any) -> Any:
    """Be cancelled, as a rank is whose process ends."""
    raise asyncio.CancelledError


def fail(error: Exception) -> Trouble:
    """Have the call itself fail, as a connection does that breaks."""

    async def trouble(value: Any) -> Any:
        raise error

    return trouble


def answer_with(other: Any) -> Trouble:
    """Say something else."""

    async def trouble(value: Any) -> Any:
        return other

    return trouble


def after_event(event: asyncio.Event) -> Trouble:
    """Come late."""

    async def trouble(value: Any) -> Any:
        await event.wait()
        return value

    return trouble
