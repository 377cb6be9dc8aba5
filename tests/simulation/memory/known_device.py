"""What the oracle knows of a device by answers and facts: its blocks, the requests that wait, the compaction plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from forged.memory.messages import AllocateMemory, Handle, HeldBlock, Move, Wanted
from forged.memory.model import BlockStatus
from tests.simulation.memory.times import AGING_S

PRIORITY_MAX = 10
Key = tuple[str, str, bytes]
"""The job, the worker and its incarnation."""
Stretch = tuple[int, int]
"""An offset and an end."""


@dataclass(slots=True)
class KnownBlock:
    """A block that a worker was told it has."""

    key: Key
    name: str
    offset: int
    size: int
    version: int
    status: BlockStatus

    def __str__(self) -> str:
        return (
            f"{self.id} of {self.key[0]} (at {self.offset}, {self.size} bytes, version {self.version}, {self.status})"
        )

    @property
    def id(self) -> str:
        return f"{self.key[1]}:{self.name}"

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def is_cached(self) -> bool:
        return self.status is BlockStatus.CACHED

    def is_at(self, offset: int, size: int, version: int) -> bool:
        return (self.offset, self.size, self.version) == (offset, size, version)

    def is_held_as(self, held: HeldBlock) -> bool:
        return self.is_at(held.block.offset, held.block.size, held.handle.version)


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits for memory."""

    request: AllocateMemory
    key: Key
    since: float
    number: int
    ended_at: float | None = None
    fits_since: float | None = None
    """Since when there is room for it, as far as is known."""

    @property
    def place(self) -> tuple[float, int]:
        """The lowest is served first."""
        return rank(self.request, self.since), self.number


@dataclass(eq=False, slots=True)
class KnownPlan:
    """An open compaction plan."""

    epoch: int
    opened_at: float
    moves: dict[int, Move] = field(default_factory=dict)
    """Those that callers were told of, by number."""
    done: dict[int, Handle] = field(default_factory=dict)
    """The committed ones."""


@dataclass(eq=False, slots=True)
class KnownDevice:
    """A device of the running daemon."""

    job: str
    name: str
    owner: Key
    total: int
    registered_at: float
    blocks: dict[str, KnownBlock] = field(default_factory=dict)
    asserted: set[Key] = field(default_factory=set)
    """The workers that have asserted all of their blocks here."""
    has_allocated: bool = False
    gave_way: dict[str, float] = field(default_factory=dict)
    """When blocks gave way: within the same instant a worker may still be told that it has one."""
    waiters: list[Waiter] = field(default_factory=list)
    given_up: set[Key] = field(default_factory=set)
    """The workers with requests that have waited and are not answered: they may have got blocks by them."""
    answered_waiters_at: float = -1.0
    """When a request that had waited was last answered: what it has got was another's no longer before."""
    plan: KnownPlan | None = None
    last_plan: KnownPlan | None = None
    favoured: list[str] = field(default_factory=list)
    """The workers for whose requests plans were made."""
    level: int = 0
    """The thresholds that the pressure is above, by its facts."""

    def may_have_more(self) -> bool:
        """Whether workers may have blocks that they are not told of: the first ones of a request that waits."""
        return bool(self.given_up) or any(
            len(one.request.wanted) > 1 and not one.request.all_or_none for one in self.waiters
        )

    def used(self) -> int:
        return sum(block.size for block in self.blocks.values())

    def cached(self) -> int:
        return sum(block.size for block in self.blocks.values() if block.is_cached)

    def overlapping(self, offset: int, end: int) -> list[KnownBlock]:
        return [one for one in self.blocks.values() if one.offset < end and offset < one.end]

    def gaps(self, *, evicting: bool = False) -> Iterator[Stretch]:
        """The stretches between blocks; with `evicting` also those that cached blocks have."""
        moving = self.moving()
        left = (one for one in self.blocks.values() if not (evicting and one.is_cached and one.id not in moving))
        at = 0
        for block in sorted(left, key=lambda one: one.offset):
            if at < block.offset:
                yield at, block.offset
            at = max(at, block.end)
        if at < self.total:
            yield at, self.total

    def open_moves(self) -> list[Move]:
        """The moves that are known, are not committed, and have a block."""
        plan = self.plan
        left = plan.moves.values() if plan is not None else ()
        return [
            move
            for move in left
            if (known := self.blocks.get(id_of(move))) is not None
            and known.is_at(move.source, move.size, move.handle.version)
        ]

    def moving(self) -> set[str]:
        """The blocks that are known to be moved now."""
        return {id_of(move) for move in self.open_moves()}

    def first_waiter(self, now: float) -> Waiter | None:
        """Of those that began to wait before."""
        return min((one for one in self.waiters if one.since < now), key=lambda one: one.place, default=None)


def first_status(wanted: Wanted) -> BlockStatus:
    """The status of a block that is allocated."""
    if wanted.request.pinned:
        return BlockStatus.PINNED
    return BlockStatus.CACHED if wanted.cached else BlockStatus.ALLOCATED


def rank(request: AllocateMemory, since: float) -> float:
    """The order of service of a request that waits since then: the lowest is first."""
    priority = max(wanted.request.priority for wanted in request.wanted)
    return since - AGING_S * min(max(priority, -PRIORITY_MAX), PRIORITY_MAX)


def rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def has_room(gaps: Iterable[Stretch], size: int, alignment: int) -> bool:
    needed = rounded(size, alignment)
    return any(rounded(offset, alignment) + needed <= end for offset, end in gaps)


def id_of(move: Move) -> str:
    """The block that is moved."""
    return f"{move.worker_id}:{move.handle.name}"
