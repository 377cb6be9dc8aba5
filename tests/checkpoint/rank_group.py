"""Simulated ranks in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Round:
    """One call of all."""

    values: dict[int, Any] = field(default_factory=dict)
    is_full: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedRanks:
    """What the ranks share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._rounds: dict[int, _Round] = {}

    async def meet(self, number: int, rank: int, value: Any) -> dict[int, Any]:
        """Give a value, and wait for those of all."""
        meeting = self._rounds.setdefault(number, _Round())
        meeting.values[rank] = value
        if len(meeting.values) == self.world_size:
            meeting.is_full.set()
        await meeting.is_full.wait()
        return meeting.values


class SimulatedRank:
    """One of them; a `ports.Coordinator`."""

    def __init__(self, together: SimulatedRanks, rank: int) -> None:
        self._together = together
        self._calls = 0
        self.rank = rank

    @property
    def world_size(self) -> int:
        return self._together.world_size

    async def barrier(self) -> None:
        await self._meet(None)

    async def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        values = await self._meet(value)
        return [values[rank] for rank in range(self.world_size)] if self.rank == root else None

    async def broadcast(self, value: Any, root: int = 0) -> Any:
        return (await self._meet(value))[root]

    async def _meet(self, value: Any) -> dict[int, Any]:
        self._calls += 1
        return await self._together.meet(self._calls, self.rank, value)


async def all_ranks(world_size: int, act: Callable[[SimulatedRank], Awaitable[T]]) -> list[T | BaseException]:
    """Have every rank do it; what each of them returns or raises."""
    together = SimulatedRanks(world_size)
    return await asyncio.gather(
        *(act(SimulatedRank(together, rank)) for rank in range(world_size)), return_exceptions=True
    )
