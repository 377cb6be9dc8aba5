"""A device of a worker, with its blocks, and the workers that own devices and blocks.

Invariants:
- A block's id is `WORKER:NAME`, so that no worker can free, change or assert a block of another one.
- A worker's blocks count against the principal that the worker first used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple
from zlib import crc32

from forged.memory.book.attempt import Attempt
from forged.memory.book.offset_plan import OffsetPlan
from forged.memory.forecast import PressureLevel, UsageWindow, seconds_left
from forged.memory.functions import memory_pressure
from forged.memory.messages import CompactionPlan, DeviceView, Forecast, Handle, HeldBlock, Move
from forged.memory.model import GpuDevice
from forged.memory.pool.blocks import Block
from forged.memory.pool.compaction import largest_hole
from forged.memory.pool.core import PoolCore
from forged.memory.pool.moves import MovePlan
from forged.memory.waiting import WaitingQueue
from forged.shares import Holder

OBTAINABLE_BLOCKS = 1000
OBTAINABLE_S_PER_BLOCK = 1e-5
"""Of devices with more blocks what can be obtained is looked for so often at most: it takes 0.2 us for each block."""
WorkerKey = tuple[str, bytes]
"""The id and the incarnation of a worker."""
PROCESS_BITS, COUNT_BITS = 21, 32
"""Of the version of a block: for the process that has the device, and for a count; together exact in JSON."""


class Moment(NamedTuple):
    """A time by both clocks."""

    wall: float
    monotonic: float


@dataclass(eq=False, slots=True)
class Owner:
    """A worker that owns devices or blocks."""

    job: str
    worker_id: str
    incarnation: bytes
    holder: Holder
    devices: dict[str, Device] = field(default_factory=dict)
    """Its own."""
    blocks: dict[Device, dict[str, None]] = field(default_factory=dict)
    """The ids of its blocks, on any device."""

    @property
    def key(self) -> WorkerKey:
        return self.worker_id, self.incarnation

    def block_id(self, name: str) -> str:
        return f"{self.worker_id}:{name}"

    def handle(self, block: Block) -> Handle:
        return Handle(block.block_id[len(self.worker_id) + 1 :], block.version)


@dataclass(eq=False, slots=True)
class Device:
    """A device with its pool, the requests that wait for it, and its compaction plan."""

    owner: Owner
    name: str
    """`WORKER/DEVICE`."""
    device: GpuDevice
    core: PoolCore
    usage: UsageWindow = field(default_factory=UsageWindow)
    level: PressureLevel = field(default_factory=PressureLevel)
    queue: WaitingQueue[Attempt] = field(default_factory=WaitingQueue)
    assert_until: float | None = None
    """None: the owners of blocks have asserted them."""
    asserted: set[WorkerKey] = field(default_factory=set)
    """The workers that have asserted their blocks here."""
    has_allocated: bool = False
    """Whether the daemon has given away memory: what is free now may have been another's since the daemon started."""
    plan_until: float = 0.0
    """When the open compaction plan expires; 0: there is none."""
    plan_epoch: int = 0
    plan_for: Attempt | None = None
    """The request that the open compaction plan makes room for."""
    committed: dict[int, tuple[str, int]] = field(default_factory=dict)
    """The moves of the last plan that are committed, by number: the id and the version of each block."""
    next_plan_at: float = 0.0
    is_search_due: bool = False
    """Whether cached blocks have not been searched for a request that waits, for want of time."""
    offset_plan: OffsetPlan | None = None
    last_listed: str = ""
    """The last block of the last page that was read: the next page begins near it."""
    _obtainable: int = 0
    _obtained_at: float = -inf

    def is_version(self, version: int) -> bool:
        """Whether a block of the process that has the device may have this version."""
        first = first_version(self.owner.incarnation)
        return version >= first and version >> COUNT_BITS == first >> COUNT_BITS

    @property
    def used_bytes(self) -> int:
        return self.core.total - self.core.free_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes that cannot be evicted."""
        return self.used_bytes - self.core.cached_bytes

    @property
    def pressure(self) -> float:
        return memory_pressure(self.held_bytes, self.core.total)

    def obtainable(self, now: float) -> int:
        """The largest hole that eviction and compaction can open; of a device with many blocks a little old."""
        count = len(self.core)
        if count <= OBTAINABLE_BLOCKS or now >= self._obtained_at + count * OBTAINABLE_S_PER_BLOCK:
            self._obtainable, self._obtained_at = largest_hole(self.core, evicting=True), now
        return self._obtainable

    def forecast(self, now: float) -> Forecast:
        obtainable = self.obtainable(now)
        rate = self.usage.rate()
        if rate is None:
            return Forecast(0.0, None, None, None, obtainable, len(self.usage))
        left = seconds_left(obtainable, rate)
        return Forecast(rate.middle, left.middle, left.low, left.high, obtainable, len(self.usage))

    def view(self, eviction: str, now: float) -> DeviceView:
        core = self.core
        return DeviceView(
            self.name,
            self.owner.job,
            self.owner.worker_id,
            self.device,
            core.stats(),
            self.pressure,
            core.cached_bytes,
            len(self.queue),
            self.forecast(now),
            self.assert_until is not None,
            eviction,
            None if self.offset_plan is None else self.offset_plan.view(),
        )

    def plan_view(self, plan: MovePlan, expires_in_s: float) -> CompactionPlan:
        """The plan's moves that are not committed yet."""
        open_moves = plan.moves if self.core.plan is None else self.core.open_moves
        moves = []
        for move in open_moves:
            block = self.core.get(move.block_id)
            name = move.block_id[len(block.owner) + 1 :]
            handle = Handle(name, block.version)
            moves.append(
                Move(
                    move.number,
                    block.owner,
                    handle,
                    move.source,
                    move.destination,
                    move.size,
                    move.overlaps,
                    move.after,
                )
            )
        return CompactionPlan(plan.epoch, moves, sum(move.size for move in moves), plan.opens, expires_in_s)


def first_version(incarnation: bytes) -> int:
    """The first version of blocks on the devices of a process: a handle tells which process had the device."""
    return (crc32(incarnation) >> (32 - PROCESS_BITS) << COUNT_BITS) + 1


def held_block(block: Block) -> HeldBlock:
    """A stretch as callers see it; a free one has no name."""
    name = block.block_id[len(block.owner) + 1 :] if block.owner else ""
    handle = Handle(name, block.version if block.owner else 0)
    return HeldBlock(handle, block.owner, block.as_value(), block.content, block.reload_s)


def same_place(block: Block, held: HeldBlock) -> bool:
    """Whether the asserted block is where the daemon has it."""
    asserted = held.block
    return (block.offset, block.size, block.version) == (asserted.offset, asserted.size, held.handle.version)
