"""The devices of all jobs and the workers that own them and their blocks: registration, removal and limits.

Invariants:
- A device goes with its worker, and a worker's blocks go with it, also those on the devices of other workers.
- What a worker holds is counted when it is entered and given back when it is gone.
- Facts are collected in `facts`; the service records them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from forged.errors import ForgedError
from forged.kernel.messages import Fact
from forged.memory.book import refusals
from forged.memory.book.attempt import Attempt
from forged.memory.book.device import Device, Moment, Owner, WorkerKey, first_version
from forged.memory.book.offset_plan import OffsetPlan
from forged.memory.messages import (
    PLAN_PAGE_MAX,
    BlocksFreed,
    CompactionEnded,
    DeviceRegistered,
    DeviceRemoved,
    PlanOffsets,
    RegisterDevice,
)
from forged.memory.pool.blocks import Block
from forged.memory.pool.core import PoolCore
from forged.memory.pool.eviction import LRU, RoomPlan, eviction_order, find_room
from forged.memory.ports import EvictionPort
from forged.memory.settings import eviction_of
from forged.shares import Holder, Shares

SIZE_MAX = (1 << 63) - 1
ASSERT_S = 30.0
"""So long after a restart of the daemon the owners of blocks have to assert them."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What all workers together may have, and those of one principal or job."""

    devices_max: int = 4096
    principal_devices_max: int = 3072
    blocks_max: int = 1 << 19
    principal_blocks_max: int = 3 << 17
    waiting_max: int = 512
    principal_waiting_max: int = 384


@dataclass(slots=True)
class MemoryCounts:
    """What has happened to the blocks of all devices since the daemon started."""

    allocations: int = 0
    evictions: int = 0
    out_of_memory: int = 0
    """Requests that did not fit, also after their wait."""
    moves: int = 0
    """Of compactions, committed."""


class DeviceTable:
    """All devices, by job and name."""

    def __init__(self, limits: MemoryLimits, eviction: EvictionPort, default_eviction: str = LRU) -> None:
        self.last_epoch = 0
        """Compaction plans of new devices have later epochs: a plan of a device that is gone is never taken for one."""
        self.jobs: dict[str, dict[str, Device]] = {}
        self.owners: dict[tuple[str, str], Owner] = {}
        self.facts: list[tuple[str, Fact]] = []
        """Of which jobs, in order; to be recorded."""
        self.counts = MemoryCounts()
        self.block_shares = Shares("blocks of GPU memory", 0)
        self.device_shares = Shares("GPU devices", 0)
        self.waiting_shares = Shares("requests that wait for GPU memory", 0)
        self.default_eviction = default_eviction
        """The eviction policy of jobs whose settings name none."""
        self._eviction = eviction
        self.set_limits(limits)
        self._at_start: dict[str, set[WorkerKey]] = {}
        """The workers that were registered when the daemon started, and are not gone."""
        self._unsettled: dict[str, dict[WorkerKey, frozenset[str] | None]] = {}
        """Those of them that have still to assert, and on which devices of other workers.

        None: on any, as they have asserted on no device of their own yet.
        """
        self.on_room: Callable[[Device, Moment], None] = lambda device, now: None
        """Called when a device has got room, or its waiting requests may be served for another reason."""

    def set_limits(self, limits: MemoryLimits) -> None:
        self.limits = limits
        for shares, most, each in (
            (self.block_shares, limits.blocks_max, limits.principal_blocks_max),
            (self.device_shares, limits.devices_max, limits.principal_devices_max),
            (self.waiting_shares, limits.waiting_max, limits.principal_waiting_max),
        ):
            shares.resize(most, most // 8, each)

    def begin(self, workers: Mapping[str, Iterable[WorkerKey]]) -> None:
        """The daemon starts: these workers of each job may hold blocks that it does not know."""
        self._at_start = {job: set(keys) for job, keys in workers.items()}
        self._unsettled = {job: dict.fromkeys(keys) for job, keys in self._at_start.items()}

    # Eviction.

    def eviction_of(self, job: str) -> str:
        """The eviction policy of the job's devices."""
        return eviction_of(self._eviction.settings(job), self.default_eviction)

    def find_room(self, device: Device, size: int, alignment: int, blocks_max: int | None = None) -> RoomPlan | None:
        """How eviction makes room on a device by the policy of its job, or None; changes nothing.

        With `blocks_max` by last use, and only among so many least recently used blocks.
        """
        job = device.owner.job
        policy = self.eviction_of(job) if blocks_max is None else LRU
        return find_room(device.core, size, alignment, policy, partial(self._eviction.is_saved, job), blocks_max)

    def eviction_order(self, device: Device) -> Iterable[Block]:
        """The blocks that may be evicted from a device, by the policy of its job."""
        job = device.owner.job
        return eviction_order(device.core, self.eviction_of(job), partial(self._eviction.is_saved, job))

    # Workers.

    def owner(self, job: str, worker_id: str, incarnation: bytes, holder: Holder, now: Moment) -> Owner:
        """The registered worker; an earlier process of its name is gone."""
        owner = self.owners.get((job, worker_id))
        if owner is not None and owner.incarnation != incarnation:
            self.remove_worker(owner, "another process has its name", now)
            owner = None
        if owner is None:
            owner = self.owners[job, worker_id] = Owner(job, worker_id, incarnation, holder)
        return owner

    def remove_worker(self, owner: Owner, reason: str, now: Moment) -> None:
        """Free the worker's devices and blocks, and end its waiting requests."""
        del self.owners[owner.job, owner.worker_id]
        for device in list(owner.devices.values()):
            self._remove_device(device, reason, now)
        changed = set(owner.blocks)
        for device in list(owner.blocks):
            self._free_all(device, owner, reason)
        for device in self.jobs.get(owner.job, {}).values():
            if self.end_waiting(device, refusals.worker_gone(owner.job, owner.worker_id), owner):
                changed.add(device)
        self._await_no_more(owner.job, owner.key, now)
        for device in sorted(changed, key=attrgetter("name")):
            self.changed(device, now)

    def remove_job(self, job: str, now: Moment) -> None:
        for owner in [one for one in self.owners.values() if one.job == job]:
            self.remove_worker(owner, "its job is removed", now)
        self._at_start.pop(job, None)
        self._unsettled.pop(job, None)

    def _free_all(self, device: Device, owner: Owner, reason: str) -> None:
        """Free a worker's blocks on the device of another one."""
        blocks = [device.core.get(block_id) for block_id in owner.blocks[device]]
        size = sum(block.size for block in blocks)
        for block in blocks:
            device.core.free(block.block_id)
            self.gone(device, block, owner)
        fact = BlocksFreed(device.name, owner.worker_id, len(blocks), size, reason)
        self.facts.append((owner.job, fact))

    def end_waiting(self, device: Device, error: ForgedError, owner: Owner | None = None) -> bool:
        """End all requests that wait for the device, or those of one worker; whether there were any."""
        ended = [one for one in device.queue if owner is None or one.request.owner is owner]
        for waiting in ended:
            device.queue.remove(waiting)
            attempt: Attempt = waiting.request
            attempt.error = error
            attempt.wake()
        return bool(ended)

    # Devices.

    def device(self, job: str, name: str) -> Device:
        found = self.jobs.get(job, {}).get(name)
        if found is None:
            raise refusals.device_unknown(job, name)
        return found

    def devices(self) -> Iterable[Device]:
        for devices in self.jobs.values():
            yield from devices.values()

    def register(self, request: RegisterDevice, owner: Owner, now: Moment) -> Device:
        """Enter a device; the same again changes nothing, and another size only a device without blocks."""
        described = request.device
        refusals.require_name("device_id", described.device_id)
        refusals.require_between("total_memory", described.total_memory, 1, SIZE_MAX)
        name = f"{owner.worker_id}/{described.device_id}"
        known = owner.devices.get(name)
        if known is not None:
            if known.core.total != described.total_memory:
                if len(known.core):
                    raise refusals.device_changed(name, known.core.total, described.total_memory, len(known.core))
                self.last_epoch = max(self.last_epoch, known.plan_epoch)
                self._drop_offset_plan(known)
                known.core = PoolCore(described.total_memory, self.last_epoch, known.core.first_version)
                self.changed(known, now)
            known.device = described
            return known
        if not self.device_shares.take(owner.holder):
            raise refusals.devices_full(self.device_shares.shortage(owner.holder))
        core = PoolCore(described.total_memory, self.last_epoch, first_version(owner.incarnation))
        device = Device(owner, name, described, core)
        if self._is_awaiting(device):
            device.assert_until = now.monotonic + ASSERT_S
        owner.devices[name] = device
        self.jobs.setdefault(owner.job, {})[name] = device
        self.facts.append((owner.job, DeviceRegistered(name, described.total_memory)))
        return device

    def _remove_device(self, device: Device, reason: str, now: Moment) -> None:
        owner, core = device.owner, device.core
        del owner.devices[device.name]
        devices = self.jobs[owner.job]
        del devices[device.name]
        if not devices:
            del self.jobs[owner.job]
        self.device_shares.give_back(owner.holder)
        self._drop_offset_plan(device)
        self.last_epoch = max(self.last_epoch, device.plan_epoch)
        fact = DeviceRemoved(device.name, reason, len(core), device.used_bytes)
        self.facts.append((owner.job, fact))
        for worker_id in {block.owner for block in core.stretches() if block.block_id}:
            # The owner of the device is in the table no more.
            other = self.owners.get((owner.job, worker_id), owner)
            self.block_shares.give_back(other.holder, len(other.blocks.pop(device)))
        self.end_waiting(device, refusals.device_unknown(owner.job, device.name))

    def plan_offsets(self, request: PlanOffsets, owner: Owner) -> OffsetPlan:
        """Plan the offsets of the owner's blocks: a page of a plan. What is refused changes nothing."""
        device = self.device(request.job, request.device)
        if device.owner is not owner:
            raise refusals.device_of_another(device.name, owner.worker_id)
        plan = device.offset_plan if request.start and device.offset_plan is not None else OffsetPlan()
        refusals.require_between("blocks", len(request.blocks), 0, PLAN_PAGE_MAX)
        refusals.require_between("start", request.start, 0, len(plan.places))
        for block in request.blocks:
            refusals.require_name("name", block.name)
            refusals.require_between(f"size of {block.name}", block.size, 1, device.core.total)
            refusals.require_between(f"offset of {block.name}", block.offset, 0, device.core.total - block.size)
        ids = [owner.block_id(block.name) for block in request.blocks]
        added = len({block_id for block_id in ids if block_id not in plan.places})
        replaced = 0 if plan is device.offset_plan or device.offset_plan is None else len(device.offset_plan.places)
        if added > replaced and not self.block_shares.fits(owner.holder, added - replaced):
            raise refusals.blocks_full(self.block_shares.shortage(owner.holder))
        if replaced:
            self._drop_offset_plan(device)
        if added:
            self.block_shares.charge(owner.holder, added)
        plan.add(ids, request.blocks)
        device.offset_plan = plan if plan.places else None
        return plan

    def _drop_offset_plan(self, device: Device) -> None:
        if device.offset_plan is not None:
            self.block_shares.give_back(device.owner.holder, len(device.offset_plan.places))
            device.offset_plan = None

    def changed(self, device: Device, now: Moment) -> None:
        """Note that a device has changed: its plan may have ended, and waiting requests may fit."""
        self.note_plan_end(device)
        self.on_room(device, now)

    def note_plan_end(self, device: Device, expired: int = 0) -> None:
        """Tell that the open plan has ended, once; also when its last block was freed."""
        if device.plan_until and device.core.plan is None:
            fact = CompactionEnded(device.name, device.plan_epoch, len(device.committed), expired)
            self.facts.append((device.owner.job, fact))
            device.plan_until = 0.0

    # Blocks.

    def entered(self, device: Device, entered: Sequence[Block], owner: Owner) -> None:
        """Count blocks, for which there is room in the limits."""
        if not entered:
            return
        self.block_shares.charge(owner.holder, len(entered))
        blocks = owner.blocks.get(device)
        if blocks is None:
            blocks = owner.blocks[device] = {}
        for block in entered:
            blocks[block.block_id] = None
            if device.offset_plan is not None:
                device.offset_plan.note(block)

    def gone(self, device: Device, block: Block, owner: Owner | None = None) -> None:
        """Count a block no more that was freed."""
        owner = owner or self.owners[device.owner.job, block.owner]
        blocks = owner.blocks[device]
        del blocks[block.block_id]
        if not blocks:
            del owner.blocks[device]
        self.block_shares.give_back(owner.holder)

    # After a restart.

    def may_assert(self, device: Device, owner: Owner) -> bool:
        """Whether the worker may hold blocks that the daemon has forgotten.

        Both it and the owner of the device are older, and it has not asserted yet; and nothing was allocated
        meanwhile, perhaps where its blocks are.
        """
        at_start = self._at_start.get(owner.job, set())
        is_older = owner.key in at_start and device.owner.key in at_start
        return is_older and owner.key not in device.asserted and not device.has_allocated

    def _is_awaiting(self, device: Device) -> bool:
        """Whether the device's owner, or a worker that has not asserted all that it has elsewhere, may do so here."""
        job, owner = device.owner.job, device.owner
        if owner.key not in self._at_start.get(job, ()):
            return False
        return self.may_assert(device, owner) or any(
            key not in device.asserted and (elsewhere is None or device.name in elsewhere)
            for key, elsewhere in self._unsettled.get(job, {}).items()
        )

    def asserted(self, device: Device, owner: Owner, elsewhere: Iterable[str], now: Moment) -> None:
        """The worker has asserted all of its blocks on the device.

        On one of its own: on those of other workers too, except `elsewhere`.
        """
        device.asserted.add(owner.key)
        if device.owner is owner:
            unsettled = self._unsettled.get(owner.job, {})
            if owner.key in unsettled:
                unsettled[owner.key] = frozenset(elsewhere)
        self._settle(self.jobs[owner.job].values() if device.owner is owner else [device], now)

    def settle_gone(
        self, job: str, worker_id: str, is_registered: Callable[[str, str, bytes], bool], now: Moment
    ) -> None:
        """A worker that was registered at the start and had no devices or blocks here yet is gone."""
        for key in list(self._unsettled.get(job, ())):
            if key[0] == worker_id and not is_registered(job, *key):
                self._await_no_more(job, key, now)

    def _await_no_more(self, job: str, key: WorkerKey, now: Moment) -> None:
        """The worker is gone."""
        self._at_start.get(job, set()).discard(key)
        self._unsettled.get(job, {}).pop(key, None)
        self._settle(self.jobs.get(job, {}).values(), now)

    def _settle(self, devices: Iterable[Device], now: Moment) -> None:
        """Allocate from those of the devices on which no worker is awaited any more."""
        for device in list(devices):
            if device.assert_until is not None and not self._is_awaiting(device):
                self.settle_device(device, now)

    def settle_device(self, device: Device, now: Moment) -> None:
        """Allocate from the device from now on."""
        device.assert_until = None
        self.on_room(device, now)
