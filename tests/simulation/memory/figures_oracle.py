"""What the oracle of the memory simulation judges by figures: shortages, pressure, lists, and the book at the end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from forged.memory.forecast import HYSTERESIS, SAMPLES_MAX, THRESHOLDS
from forged.memory.messages import (
    Allocated,
    AllocateMemory,
    BlockPage,
    DevicePage,
    DeviceView,
    FindFit,
    FitPlace,
    HeldBlock,
    ListBlocks,
    ListDevices,
    MemoryPressure,
    OutOfMemory,
    Shortage,
)
from forged.memory.model import AllocationRequest, BlockStatus
from tests.simulation.memory.book_oracle import EPSILON_S, BookOracle
from tests.simulation.memory.known_device import (
    Key,
    KnownDevice,
    has_room,
    rounded,
)
from tests.simulation.memory.promises import Promise


class FiguresOracle(BookOracle):
    """Compares figures with the blocks that are known."""

    # Shortages.

    def _judge_shortages(self, device: KnownDevice, request: AllocateMemory, replies: Sequence[Allocated]) -> None:
        fact = self._shortages.pop((device.job, device.name, request.worker_id), None)
        for wanted, reply in zip(request.wanted, replies, strict=True):
            told = reply.shortage
            if reply.handle is not None or told is None:
                continue
            self.met("a request has no room")
            if fact is not None and _figures(fact) != _figures(told):
                self.violated(Promise.SHORTAGE, f"{told} is told as {fact}")
            # Only the first one is told as a fact.
            fact = None
            self._judge_shortage(device, wanted.request, told)
            if len(request.wanted) == 1 and not device.waiters and not self._unsettled(device):
                self._judge_room(device, request, told)

    def _judge_shortage(self, device: KnownDevice, wanted: AllocationRequest, told: Shortage) -> None:
        if told.size != rounded(wanted.size, wanted.alignment):
            self.violated(Promise.SHORTAGE, f"{told} is of {wanted}")
        if not told.largest_hole <= told.largest_obtainable <= told.total_free + told.evictable_bytes:
            self.violated(Promise.SHORTAGE, f"{told} has holes that are too large")
        if not self._is_exact(device):
            return
        # While a plan is open, what it keeps is free, and no hole.
        largest = max((end - begin for begin, end in device.gaps()), default=0)
        figures = device.total - device.used(), device.cached(), told.largest_hole if device.plan else largest
        if (told.total_free, told.evictable_bytes, told.largest_hole) != figures:
            self._violated_unless_served(Promise.SHORTAGE, device, f"{told} is told, and is {figures}")

    def _judge_room(self, device: KnownDevice, request: AllocateMemory, told: Shortage) -> None:
        """A single request that waits behind no other one fails only without room, also by eviction."""
        wanted, may_evict = request.wanted[0].request, request.evict and request.wait_s <= 0
        if device.plan is not None or not self._is_exact(device):
            return
        if has_room(device.gaps(evicting=may_evict), wanted.size, wanted.alignment):
            self._violated_unless_served(Promise.SHORTAGE, device, f"{told} is told, and there is room")

    # Pressure.

    def _pressed(self, device: KnownDevice, fact: MemoryPressure) -> None:
        self.met("the pressure rises" if fact.rising else "the pressure falls")
        number = THRESHOLDS.index(fact.threshold)
        if fact.rising:
            is_due = fact.pressure >= fact.threshold and number + 1 > device.level
        else:
            is_due = fact.pressure + HYSTERESIS < fact.threshold and number < device.level
        if not is_due:
            self.violated(Promise.FACTS, f"{fact} comes at level {device.level}")
        device.level = number + fact.rising
        held = device.used() - device.cached()
        if self._is_exact(device) and abs(fact.pressure - held / device.total) > EPSILON_S:
            self._violated_unless_served(Promise.FACTS, device, f"{fact} is told of {held} bytes of {device.total}")

    # Questions.

    def _listed_devices(self, request: ListDevices, page: DevicePage) -> None:
        for view in page.devices:
            device = self.devices.get((request.job, view.name))
            if device is None or view.job != request.job:
                self.violated(Promise.LISTED, f"{view} is listed in {request.job}")
                continue
            self._judge_view(device, view)

    def _judge_view(self, device: KnownDevice, view: DeviceView) -> None:
        stats, forecast = view.stats, view.forecast
        if (
            stats.total_bytes != device.total
            or stats.allocated_bytes + stats.free_bytes != stats.total_bytes
            or stats.pinned_bytes + stats.cached_bytes > stats.allocated_bytes
            or stats.largest_free_block > stats.free_bytes
            or view.evictable_bytes != stats.cached_bytes
        ):
            self.violated(Promise.LISTED, f"{view.name} has {stats}")
        if forecast.samples > SAMPLES_MAX or not stats.largest_free_block <= forecast.obtainable_bytes <= device.total:
            self.violated(Promise.LISTED, f"{view.name} has {forecast}")
        if forecast.seconds is not None:
            self.met("a device runs out of memory by its forecast")
            known = (
                forecast.low_s or 0.0,
                forecast.seconds,
                forecast.seconds if forecast.high_s is None else forecast.high_s,
            )
            if list(known) != sorted(known) or (
                abs(forecast.seconds * forecast.rate_bytes_per_s - forecast.obtainable_bytes) > 1
            ):
                self.violated(Promise.LISTED, f"{view.name} has {forecast}")
        sums = device.used(), device.cached(), len(device.blocks)
        told = stats.allocated_bytes, stats.cached_bytes, stats.allocation_count
        if self._is_exact(device) and told != sums:
            self._violated_unless_served(Promise.LISTED, device, f"{view.name} has {told}, and was told as {sums}")

    def _listed_blocks(self, request: ListBlocks, page: BlockPage) -> None:
        device = self._device(request)
        if device is None or request.start or page.more:
            return
        places = [(0, 0), *((one.block.offset, one.block.size) for one in page.blocks), (device.total, 0)]
        if any(offset + size != following for (offset, size), (following, _) in pairwise(places)):
            self.violated(Promise.LISTED, f"the blocks of {device.name} do not cover it: {places}")
        if not self._is_exact(device):
            return
        told = {
            one.block.block_id: (one.block.offset, one.block.size, one.handle.version, one.block.status)
            for one in page.blocks
            if one.worker_id
        }
        known = {one.id: (one.offset, one.size, one.version, one.status) for one in device.blocks.values()}
        if told != known:
            what = f"{sorted(told.items() - known.items())} for {sorted(known.items() - told.items())}"
            self._violated_unless_served(Promise.LISTED, device, f"{device.name} lists {what}")

    def _found_fit(self, request: FindFit, places: list[FitPlace]) -> None:
        for place in places:
            device = self.devices.get((request.job, place.device))
            if device is None:
                self.violated(Promise.LISTED, f"{place} is on no device of {request.job}")
                continue
            end = place.offset + rounded(request.size, request.alignment)
            if end > device.total or place.offset % request.alignment:
                self.violated(Promise.LISTED, f"{place} has no room for {request}")
            if place.evicted_bytes or place.moved_bytes or not self._is_exact(device):
                continue
            if in_the_way := device.overlapping(place.offset, end):
                self._violated_unless_served(Promise.LISTED, device, f"{place} is where {in_the_way} are")

    # The end.

    def check_end(self, job: str, view: DeviceView, page: BlockPage) -> None:
        """No request is under way any more."""
        device = self.devices.get((job, view.name))
        if device is None:
            self.broken(Promise.LISTED, f"{view} is listed in {job}")
        if device.waiters or view.waiting or view.is_asserting:
            self.broken(Promise.DEADLINE, f"requests wait for {view}")
        for held in page.blocks:
            known = device.blocks.get(held.block.block_id) if held.worker_id else None
            if held.worker_id and (not device.may_have_more() if known is None else self._is_gone(known.key)):
                self.broken(Promise.GONE, f"{held} is listed, and is {known}")
        risen, fallen = (bisect_right(THRESHOLDS, view.pressure + more) for more in (0.0, HYSTERESIS))
        if not risen <= device.level <= fallen:
            self.broken(Promise.FACTS, f"{view} is told to be at level {device.level}")

    def check_held(self, key: Key, held: Mapping[tuple[str, str], HeldBlock], *, hears_facts: bool) -> None:
        """What a worker has at the end, it has in the book too; without facts it does not hear what gave way."""
        is_told = hears_facts and not self._facts_are_limited
        for (name, _), one in held.items():
            device = self.devices.get((key[0], name))
            known = device.blocks.get(f"{key[1]}:{one.handle.name}") if device is not None else None
            if (is_told or one.block.status is not BlockStatus.CACHED) and (known is None or not known.is_held_as(one)):
                self.broken(Promise.KEPT, f"{key} has {one}, and in the book it is {known}")


def _figures(told: OutOfMemory | Shortage) -> tuple[int, int, int, int]:
    return told.size, told.total_free, told.largest_hole, told.evictable_bytes
