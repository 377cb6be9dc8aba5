"""The invariants of the memory simulation.

The oracle sees the requests in the order in which the daemon handles them, their answers and the facts; it never looks
into the pools. From these it knows what each worker was told, and judges every further answer by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forged.errors import ForgedError
from forged.kernel.messages import Fact
from forged.memory.messages import (
    Allocated,
    AllocateMemory,
    AssertBlocks,
    BlockEvicted,
    BlocksFreed,
    ChangeBlocks,
    CommitMove,
    CompactionEnded,
    CompactionPlanned,
    DeviceRegistered,
    DeviceRemoved,
    FindFit,
    FreeMemory,
    ListBlocks,
    ListDevices,
    MemoryPressure,
    OutOfMemory,
    PlanCompaction,
    RegisterDevice,
    Wanted,
)
from tests.simulation.memory.book_oracle import EPSILON_S, key_of
from tests.simulation.memory.figures_oracle import FiguresOracle
from tests.simulation.memory.known_device import (
    KnownBlock,
    KnownDevice,
    Waiter,
    first_status,
    has_room,
    id_of,
    rank,
    rounded,
)
from tests.simulation.memory.promises import Promise
from tests.simulation.memory.times import PASSED_S, PLAN_S, TICK_S
from tests.simulation.memory.trace_text import in_short

SERVED_WITHIN_S = 1.5
"""A waiting request for which there is room is served within this time."""


class MemoryOracle(FiguresOracle):
    """Sees all requests, answers and facts."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._waiters = 0
        self._handlers: Mapping[type[Any], tuple[Callable[..., None], Callable[..., None]]] = {
            RegisterDevice: (self._registered, self._ignored),
            AllocateMemory: (self._allocated, self._not_allocated),
            FreeMemory: (self._freed, self._not_changed),
            ChangeBlocks: (self._changed, self._not_changed),
            AssertBlocks: (self._asserted, self._not_asserted),
            PlanCompaction: (self._planned, self._ignored),
            CommitMove: (self._committed, self._not_committed),
            ListDevices: (self._listed_devices, self._ignored),
            ListBlocks: (self._listed_blocks, self._ignored),
            FindFit: (self._found_fit, self._ignored),
        }

    # What the daemon does.

    def asked(self, request: Any) -> None:
        """A handler begins: what it changes may have consequences before it answers."""
        self._claims.settle()
        self._changing = set()
        if isinstance(request, ChangeBlocks) and request.change == "cache":
            self._changing = {f"{request.worker_id}:{handle.name}" for handle in request.handles}
        elif isinstance(request, CommitMove) and (device := self._device(request)) is not None:
            self._changing = {id_of(move) for move in device.open_moves() if move.number == request.number}

    def handled(self, request: Any, reply: Any) -> None:
        """A handler has answered at once."""
        self._changing = set()
        self._note(f"handled {in_short(request)} -> {in_short(reply)}")
        self._require_registered(request)
        self._handlers[type(request)][0](request, reply)

    def refused(self, request: Any, error: ForgedError) -> None:
        """A handler has refused at once."""
        self._changing = set()
        self._note(f"handled {in_short(request)} -> {error.code}")
        self.met(f"refused: {error.code}")
        self._handlers[type(request)][1](request, error)

    def begins_to_wait(self, request: AllocateMemory) -> Waiter:
        self._claims.settle()
        self._require_registered(request)
        self._waiters += 1
        waiter = Waiter(request, key_of(request), self.now(), self._waiters)
        if (device := self._device(request)) is not None:
            device.waiters.append(waiter)
        self._note(f"waits {in_short(request)}")
        self.met("a request waits")
        return waiter

    def waited(self, waiter: Waiter, replies: Sequence[Allocated] | None, error: ForgedError | None) -> None:
        """A request waits no more; without an answer and an error its caller has given up."""
        self._claims.settle()
        self._note(f"waited {in_short(waiter.request)} -> {error.code if error is not None else in_short(replies)}")
        if waiter.ended_at is not None:
            self.violated(Promise.ONCE, f"{waiter.request} is answered twice")
        waiter.ended_at = self.now()
        device = self._device(waiter.request)
        if device is None or waiter not in device.waiters:
            device = None
        else:
            device.waiters.remove(waiter)
            device.answered_waiters_at = self.now()
        has_shortage = replies is not None and any(reply.handle is None for reply in replies)
        self._judge_wait(waiter, has_shortage=has_shortage)
        if error is not None:
            self._judge_error(waiter, device, error)
        elif device is None:
            if replies is not None:
                self.violated(Promise.GONE, f"{waiter.request} is answered, and its device is gone")
        elif replies is not None:
            self._allocated(waiter.request, replies, waiter)
        else:
            device.given_up.add(waiter.key)

    def told_fact(self, job: str, fact: Fact) -> None:
        """The service has a fact recorded."""
        self._claims.settle()
        self._note(f"fact of {job}: {fact}")
        name = getattr(fact, "device", None)
        if name is None:
            return
        device = self.devices.get((job, name))
        if isinstance(fact, DeviceRegistered):
            if device is not None:
                self.violated(Promise.FACTS, f"{name} is registered twice")
        elif device is None:
            self.violated(Promise.FACTS, f"{fact} is about a device that is not registered")
        else:
            self._judge_fact(device, fact)

    def _judge_fact(self, device: KnownDevice, fact: Fact) -> None:
        match fact:
            case DeviceRemoved():
                self._removed(device, fact)
            case BlocksFreed():
                self._gone(device, fact)
            case BlockEvicted():
                self._evicted(device, fact)
            case OutOfMemory():
                self._shortages[device.job, device.name, fact.worker_id] = fact
            case MemoryPressure():
                self._pressed(device, fact)
            case CompactionPlanned():
                self._plan_opened(device, fact)
            case CompactionEnded():
                self._plan_ended(device, fact)

    # Allocation.

    def _allocated(self, request: AllocateMemory, replies: Sequence[Allocated], waiter: Waiter | None = None) -> None:
        device = self._device(request)
        if device is None:
            self.violated(Promise.GONE, f"{request} is answered without a device")
            return
        if [reply.name for reply in replies] != [wanted.name for wanted in request.wanted]:
            self.violated(Promise.ONCE, f"{request} is answered by {replies}")
        new = 0
        for wanted, reply in zip(request.wanted, replies, strict=True):
            if self._facts_are_limited:
                self._give_way(device, reply.evicted)
            if reply.handle is not None:
                new += self._granted(device, request, wanted, reply)
        short = [reply for reply in replies if reply.handle is None]
        if short and new and request.all_or_none:
            self.violated(Promise.ONCE, f"{new} blocks of {request} are allocated, and not {short}")
        if new and not short:
            self._judge_order(device, request, waiter)
        if short:
            self._judge_shortages(device, request, replies)

    def _not_allocated(self, request: AllocateMemory, error: ForgedError) -> None:
        if error.code == "memory_name_taken" and (device := self._device(request)) is not None:
            ids = {f"{request.worker_id}:{wanted.name}" for wanted in request.wanted}
            if not (ids & device.blocks.keys()) and self._is_exact(device):
                self.violated(Promise.ONCE, f"none of {sorted(ids)} is there: {error.message}")

    def _granted(self, device: KnownDevice, request: AllocateMemory, wanted: Wanted, reply: Allocated) -> bool:
        """A worker is told that it has a block; returns whether it is a new one."""
        assert reply.handle is not None
        key, version = key_of(request), reply.handle.version
        known = device.blocks.get(f"{key[1]}:{wanted.name}")
        if known is not None and known.key == key:
            if known.is_at(reply.offset, reply.actual_size, version):
                self.met("a repeated request gets the same block")
                return False
            if not known.is_cached:
                self.violated(Promise.ONCE, f"{known} is told as {reply}")
        block = KnownBlock(key, wanted.name, reply.offset, reply.actual_size, version, first_status(wanted))
        device.has_allocated = True
        if self._gave_way_now(device, block.id):
            return True
        if self._is_asserting(device):
            self.violated(Promise.ASSERTED, f"{reply} is allocated while {device.name} waits for owners of blocks")
        needed = rounded(wanted.request.size, wanted.request.alignment)
        if reply.actual_size != needed or reply.offset % wanted.request.alignment:
            self.violated(Promise.APART, f"{reply} is not aligned as {wanted}")
        self._enter(device, block, "allocated")
        self._require_kept(device, block)
        if len(request.wanted) == 1 and request.wait_s <= 0:
            self.met("a block is allocated at once")
        return True

    # Waiting.

    def _judge_wait(self, waiter: Waiter, *, has_shortage: bool) -> None:
        took, allowed = self.now() - waiter.since, waiter.request.wait_s
        if took > allowed + EPSILON_S:
            self.violated(Promise.DEADLINE, f"{waiter.request} has waited {took} s")
        if has_shortage:
            self.met("a request waits in vain")
            if took < allowed - EPSILON_S:
                self.violated(Promise.DEADLINE, f"{waiter.request} is given up after {took} s")

    def _judge_error(self, waiter: Waiter, device: KnownDevice | None, error: ForgedError) -> None:
        self.met(f"a request that waits is refused: {error.code}")
        if error.code == "worker_gone" and not self._is_gone(waiter.key):
            self.violated(Promise.GONE, f"{waiter.request} is refused, and its worker is there")
        if error.code == "memory_device_unknown" and device is not None:
            self.violated(Promise.GONE, f"{waiter.request} is refused, and its device is there")

    def _judge_order(self, device: KnownDevice, request: AllocateMemory, waiter: Waiter | None) -> None:
        """No request that comes first waits while this one is served."""
        now = self.now()
        first = device.first_waiter(now)
        if first is None:
            return
        place = waiter.place if waiter is not None else (rank(request, now), self._waiters + 1)
        if place < first.place:
            return
        if waiter is not None:
            if request.worker_id in device.favoured:
                self.met("a request is served first that a plan was made for")
                return
        elif request.wait_s <= 0 and now < first.since + PASSED_S - EPSILON_S:
            self.met("a request passes one that waits")
            return
        if self._is_gone(first.key):
            return
        self._claims.add(
            Promise.ORDER,
            lambda: f"{request} is served before {first.request}, at {now}" if first.ended_at != now else "",
        )

    def check(self) -> None:
        """Raise the first violation, also of requests that wait too long; called about once a second."""
        self._claims.settle()
        now = self.now()
        for device in self.devices.values():
            for waiter in device.waiters:
                if now > waiter.since + waiter.request.wait_s + EPSILON_S:
                    self.violated(Promise.DEADLINE, f"{waiter.request} waits since {waiter.since}")
            if device.plan is not None and now > device.plan.opened_at + PLAN_S + 2 * TICK_S:
                self.violated(Promise.MOVES, f"{device.plan} does not expire")
            first = device.first_waiter(now)
            if first is not None:
                self._look_at(device, first)
        super().check()

    def _look_at(self, device: KnownDevice, first: Waiter) -> None:
        now, request = self.now(), first.request.wanted[0].request
        fits = (
            len(first.request.wanted) == 1
            and device.plan is None
            and not self._unsettled(device)
            and has_room(device.gaps(), request.size, request.alignment)
        )
        if not fits:
            first.fits_since = None
        elif first.fits_since is None:
            first.fits_since = now
        elif now - first.fits_since > SERVED_WITHIN_S:
            self.violated(Promise.ORDER, f"{first.request} waits since {first.since}, and fits")

    def _ignored(self, request: Any, error: ForgedError) -> None:
        """Only counted."""
