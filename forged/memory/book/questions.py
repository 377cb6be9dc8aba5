"""Questions about devices, blocks, and where a request would go; they change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from forged.memory.book import refusals
from forged.memory.book.device import Device, Moment, held_block
from forged.memory.book.device_table import SIZE_MAX, DeviceTable
from forged.memory.book.job_budgets import JobBudgets
from forged.memory.errors import SizeBeyondDevice
from forged.memory.messages import BlockPage, DevicePage, FindFit, FitPlace, ListBlocks, ListDevices
from forged.memory.pool.compaction import plan_hole
from forged.pagination import PAGE_ENTRIES_MAX, ascending, take_page

EVICTIONS_MAX, PLANS_MAX = 64, 8
"""On so many devices without a hole it is found out what would have to be evicted, or moved."""
BLOCKS_MAX = 20_000
"""On devices with so many blocks together this is found out: a plan takes about 8 us for each."""
FIT_BLOCKS_PER_S, FIT_BLOCKS_MAX = 20_000, 100_000
"""Of so many blocks of each job in a second, and at once."""


class MemoryQuestions:
    """What viewers ask."""

    def __init__(self, table: DeviceTable) -> None:
        self._table = table
        self._searching = JobBudgets(FIT_BLOCKS_PER_S, FIT_BLOCKS_MAX)

    def forget(self, job: str) -> None:
        """The job is removed."""
        self._searching.forget(job)

    def devices(self, request: ListDevices, now: Moment) -> DevicePage:
        devices = self._table.jobs.get(request.job, {})
        eviction = self._table.eviction_of(request.job)
        views = (devices[name].view(eviction, now.monotonic) for name in ascending(devices, request.after))
        return DevicePage(*take_page(views, request.limit))

    def blocks(self, request: ListBlocks) -> BlockPage:
        device = self._table.device(request.job, request.device)
        refusals.require_between("start", request.start, 0, SIZE_MAX)
        blocks = device.core.stretches(request.start, device.last_listed)
        page, more = take_page(map(held_block, blocks), request.limit)
        device.last_listed = next((held.block.block_id for held in reversed(page) if held.worker_id), "")
        return BlockPage(page, more)

    def fit(self, request: FindFit, now: Moment) -> list[FitPlace]:
        refusals.require_between("size", request.size, 1, SIZE_MAX)
        refusals.require_between("limit", request.limit, 1, PAGE_ENTRIES_MAX)
        devices = [one for _, one in sorted(self._table.jobs.get(request.job, {}).items())]
        places = sorted(self._holes(devices, request))[: request.limit]
        found = [place for _, place in places]
        if len(found) < request.limit:
            left = _candidates(devices, {place.device for place in found}, request)
            if self._searching.take(request.job, sum(len(device.core) for device in left), now.monotonic):
                found += self._costly(left, request)[: request.limit - len(found)]
            elif not found:
                raise refusals.fit_busy(request.job)
        return found

    def _holes(self, devices: list[Device], request: FindFit) -> Iterator[tuple[tuple[int, str], FitPlace]]:
        """The devices that have a hole, the tightest one first."""
        for device in devices:
            try:
                needed, alignment = device.core.needed(request.size, request.alignment)
            except SizeBeyondDevice:
                continue
            hole = device.core.holes.best_fit(needed, alignment)
            if hole is not None:
                offset = (hole.offset + alignment - 1) & -alignment
                reason = f"a hole of {hole.size} bytes"
                yield (hole.size, device.name), FitPlace(device.name, offset, 0, 0, 0.0, reason)

    def _costly(self, left: list[Device], request: FindFit) -> list[FitPlace]:
        """Places that eviction or moves would make, by the bytes that this takes."""
        found = [place for device in left if (place := self._by_eviction(device, request)) is not None]
        evicting = {place.device for place in found}
        movable = (one for one in left if one.name not in evicting)
        for device in islice(movable, PLANS_MAX):
            place = _by_moves(device, request)
            if place is not None:
                found.append(place)
        return sorted(found, key=lambda one: (one.evicted_bytes + one.moved_bytes, one.device))

    def _by_eviction(self, device: Device, request: FindFit) -> FitPlace | None:
        try:
            room = self._table.find_room(device, request.size, request.alignment)
        except SizeBeyondDevice:
            return None
        if room is None:
            return None
        evicted = sum(block.size for block in room.victims)
        reload_s = sum(block.reload_s or 0.0 for block in room.victims)
        return FitPlace(device.name, room.offset, evicted, 0, reload_s, f"{len(room.victims)} cached blocks give way")


def _candidates(devices: list[Device], known: set[str], request: FindFit) -> list[Device]:
    """The devices without a known place that may have one, within the bounds."""
    left: list[Device] = []
    blocks = 0
    for device in devices:
        if device.name in known or request.size > device.core.free_bytes + device.core.cached_bytes:
            continue
        blocks += len(device.core)
        if blocks > BLOCKS_MAX or len(left) == EVICTIONS_MAX:
            break
        left.append(device)
    return left


def _by_moves(device: Device, request: FindFit) -> FitPlace | None:
    try:
        plan = plan_hole(device.core, request.size, request.alignment, overlaps=False)
    except SizeBeyondDevice:
        return None
    if plan is None or plan.hole is None:
        return None
    return FitPlace(device.name, plan.hole[0], 0, plan.bytes, 0.0, f"{len(plan.moves)} blocks are moved")
