"""Facts and requests of the GPU memory service.

Invariants:
- A device belongs to a worker of a job, and is named `WORKER/DEVICE` within the job.
- Blocks are not durable: the daemon forgets them when it restarts, and each worker asserts its own again.
- A caller names each block it wants; the same name again gets the same block, so that a repeated request allocates
  nothing twice.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import Fact, Nothing, Request
from forged.memory.model import AllocationRequest, GpuDevice, MemoryBlock, PlannedBlock, PoolStats
from forged.pagination import PAGE_ENTRIES_MAX

BATCH_MAX = 256
"""Blocks in one request."""
PLAN_PAGE_MAX = 4096
"""Planned blocks in one request."""


class Handle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block as its owner knows it. A handle of an older version is refused.

    The version grows when the block moves, is greater when a block that was evicted is allocated again, and tells which
    process had the device.
    """

    name: str
    """Chosen by the owner; unique among its blocks on a device."""
    version: int


class HeldBlock(msgspec.Struct, frozen=True):
    """A block of a device."""

    handle: Handle
    worker_id: str
    """Its owner."""
    block: MemoryBlock
    content: str = ""
    """The checkpoint, by its id or storage path, that has this content, if one has.

    If the catalogue has it as complete, the eviction is nearly free.
    """
    reload_s: float | None = None
    """What it costs to bring the content back, by the owner's estimate."""


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """A block that is wanted."""

    name: str
    request: AllocationRequest
    content: str = ""
    reload_s: float | None = None
    cached: bool = False
    """Whether it may be evicted from the beginning."""


class Shortage(msgspec.Struct, frozen=True):
    """Why a request does not fit, and the smallest change that would make it fit."""

    reason: str
    size: int
    total_free: int
    largest_hole: int
    evictable_bytes: int
    largest_obtainable: int
    """The largest hole after eviction and compaction; at least so large if it was not looked for."""
    blocking: list[str]
    """The blocks that stand in the way of the cheapest hole, as `WORKER:NAME`; at most 20."""
    fix: str


class Allocated(msgspec.Struct, frozen=True, gc=False):
    """The outcome for one wanted block."""

    name: str
    handle: Handle | None = None
    offset: int = -1
    actual_size: int = 0
    evicted: list[str] = []
    """The names of the blocks that gave way, as `WORKER:NAME`."""
    shortage: Shortage | None = None
    """Why there is no block."""


class Move(msgspec.Struct, frozen=True):
    """One block that its owner copies and commits. With overlap it is copied in the order of addresses."""

    number: int
    worker_id: str
    handle: Handle
    source: int
    destination: int
    size: int
    overlaps: bool
    after: int = -1
    """The move that must be committed before this copy begins; -1: none."""


class CompactionPlan(msgspec.Struct, frozen=True):
    epoch: int
    moves: list[Move]
    bytes: int
    opens: int
    """The largest hole after all moves."""
    expires_in_s: float


class Forecast(msgspec.Struct, frozen=True):
    """When a device runs out of memory at the present rate."""

    rate_bytes_per_s: float
    seconds: float | None
    """Until out of memory; None: not at this rate."""
    low_s: float | None
    high_s: float | None
    obtainable_bytes: int
    samples: int


class OffsetPlanView(msgspec.Struct, frozen=True):
    """The planned offsets of a device, and how well they were met."""

    blocks: int
    height: int
    """The highest end of a planned block."""
    placed: int
    """How many blocks got their planned offsets."""
    missed: int
    """How many planned blocks went elsewhere: larger than planned, or their place was taken."""


class DeviceView(msgspec.Struct, frozen=True):
    """A device with what is known of its memory."""

    name: str
    job: str
    worker_id: str
    device: GpuDevice
    stats: PoolStats
    pressure: float
    evictable_bytes: int
    waiting: int
    forecast: Forecast
    is_asserting: bool
    """Whether the daemon has restarted and waits for the owners of blocks."""
    eviction: str
    """By which policy cached blocks give way: `lru` or `cost`."""
    offset_plan: OffsetPlanView | None = None


class FitPlace(msgspec.Struct, frozen=True):
    """Where a request would go."""

    device: str
    offset: int
    evicted_bytes: int
    moved_bytes: int
    reload_s: float
    reason: str


class DevicePage(msgspec.Struct, frozen=True):
    devices: list[DeviceView]
    more: bool


class BlockPage(msgspec.Struct, frozen=True):
    blocks: list[HeldBlock]
    """Free ones have an empty name and worker."""
    more: bool


# Facts.


class DeviceRegistered(Fact, frozen=True):
    device: str
    total_memory: int


class DeviceRemoved(Fact, frozen=True):
    """A device is gone, with its blocks: its worker has left or failed."""

    device: str
    reason: str
    blocks: int
    bytes: int


class BlocksFreed(Fact, frozen=True):
    """The blocks that a worker held on the devices of other workers are free: it has left or failed."""

    device: str
    worker_id: str
    blocks: int
    bytes: int
    reason: str


class MemoryPressure(Fact, frozen=True):
    """A device has crossed a threshold; `rising` or falling (with hysteresis)."""

    level: ClassVar[str] = "warning"

    device: str
    pressure: float
    threshold: float
    rising: bool
    seconds_to_oom: float | None


class OutOfMemory(Fact, frozen=True):
    """A request did not fit, also after eviction, a compaction plan and its wait."""

    level: ClassVar[str] = "error"

    device: str
    worker_id: str
    tensor_id: str
    size: int
    total_free: int
    largest_hole: int
    evictable_bytes: int
    blocking: list[str]
    fix: str


class BlockEvicted(Fact, frozen=True):
    """Cached blocks have given way to a request."""

    device: str
    blocks: list[str]
    """`WORKER:NAME`, the first 100."""
    count: int
    bytes: int
    tensor_id: str
    """What needed the room."""
    worker_id: str


class CompactionPlanned(Fact, frozen=True):
    device: str
    epoch: int
    moves: int
    bytes: int
    opens: int
    reason: str


class CompactionEnded(Fact, frozen=True):
    device: str
    epoch: int
    committed: int
    expired: int


# Requests of workers: none is durable. `worker_id` and `incarnation` must be a registered worker of the job.


class RegisterDevice(Request[DeviceView], frozen=True):
    """Register a device of a worker; the same again is no error; another size is refused while blocks are held."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    device: GpuDevice


class PlanOffsets(Request[OffsetPlanView], frozen=True):
    """Plan the offsets of blocks on a device of the worker's own, in pages: with `start` 0 a new plan begins.

    A block of a planned name gets its planned offset if that is free, and others stay above the plan while there is
    room; beyond that the best fit is taken. Planned blocks count as blocks against the limits. No blocks: no plan.
    """

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    device: str
    blocks: list[PlannedBlock]
    start: int = 0
    """How many blocks of the plan were in earlier pages."""


class AllocateMemory(Request[list[Allocated]], frozen=True):
    """Allocate blocks, all that fit or with `all_or_none` all or none. Of a name that exists the block is returned.

    What does not fit evicts cached blocks (`evict`), then waits up to `wait_s` (by priority, with aging), while a
    compaction plan is published to the owners if that helps.
    """

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    device: str
    wanted: list[Wanted]
    all_or_none: bool = False
    evict: bool = True
    wait_s: float = 0.0


class FreeMemory(Request[Nothing], frozen=True):
    """Free blocks: all or none. A stale or unknown handle, or one of another worker, is refused."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    device: str
    handles: list[Handle]


class ChangeBlocks(Request[Nothing], frozen=True):
    """Pin, unpin, mark as cached, or touch blocks: all or none."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    device: str
    handles: list[Handle]
    change: str
    """`pin`, `unpin`, `cache`, `use` (cached to allocated) or `touch`."""
    content: str | None = None
    """With `cache`: the checkpoint that has the content."""


class AssertBlocks(Request[list[Handle]], frozen=True):
    """The blocks that a worker holds on a device, after the daemon has restarted: all of them, in pages with `more`.

    Blocks that overlap others, lie outside of the device, are on the device of an earlier process, or that the daemon
    knows differently are refused, by name; nothing of the page is entered then. The answer has the handles of the
    blocks that the worker has from now on. Cached blocks that the daemon has forgotten are not among them: they may
    have given way before it restarted, and other workers may have written there.

    A worker asserts on the devices of other workers first: the last page for a device of its own ends its assertion on
    those, except on the devices that it names in `elsewhere`. Each device of its own waits for its own last page.
    """

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    device: str
    blocks: list[HeldBlock]
    more: bool = False
    elsewhere: list[str] = []  # noqa: RUF012 - msgspec copies it
    """The devices of other workers on which the worker has still to assert its blocks."""


class PlanCompaction(Request[CompactionPlan], frozen=True):
    """Plan moves that open a hole of so many bytes (0: the largest possible); an open plan is returned as it is."""

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    device: str
    hole: int = 0
    bytes_max: int = 1 << 30
    moves_max: int = 64
    dry_run: bool = False


class CommitMove(Request[Handle], frozen=True):
    """The owner has copied a block: it is at its destination from now on, under a new version.

    Ask until it is answered. If the daemon restarts before, the block may be here or there: its content is lost.
    """

    needs: ClassVar[Role] = Role.WORKER
    decides: ClassVar[bool] = False

    job: str
    worker_id: str
    incarnation: bytes
    device: str
    epoch: int
    number: int


# Questions.


class ListDevices(Request[DevicePage], frozen=True):
    """The devices of a job, by name, after `after`."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    after: str = ""
    limit: int = PAGE_ENTRIES_MAX


class ListBlocks(Request[BlockPage], frozen=True):
    """The blocks of a device by offset, free ones too, from the offset `start` on."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    device: str
    start: int = 0
    limit: int = PAGE_ENTRIES_MAX


class FindFit(Request[list[FitPlace]], frozen=True):
    """Where in the job's devices a request would go, the cheapest first; changes nothing."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False

    job: str
    size: int
    alignment: int = 256
    limit: int = 20


REQUESTS = (
    RegisterDevice,
    PlanOffsets,
    AllocateMemory,
    FreeMemory,
    ChangeBlocks,
    AssertBlocks,
    PlanCompaction,
    CommitMove,
    ListDevices,
    ListBlocks,
    FindFit,
)
