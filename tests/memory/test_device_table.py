"""Random histories of many workers against a model that knows only names: what each worker holds, and where."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forged.errors import ForgedError
from forged.memory.book.allocation import Allocation
from forged.memory.book.assertion import Assertion
from forged.memory.book.attempt import Attempt
from forged.memory.book.compactions import PLAN_S, Compactions
from forged.memory.book.device import Moment, Owner, held_block
from forged.memory.book.device_table import DeviceTable, MemoryLimits
from forged.memory.messages import (
    AllocateMemory,
    AssertBlocks,
    BlockEvicted,
    ChangeBlocks,
    CommitMove,
    FreeMemory,
    Handle,
    HeldBlock,
    PlanCompaction,
    RegisterDevice,
    Wanted,
)
from forged.memory.model import AllocationRequest, BlockStatus, GpuDevice
from forged.memory.pool.validation import validate
from forged.memory.ports import EvictionPort
from forged.memory.waiting import Waiting
from forged.shares import Holder

JOB = "run"
TOTAL = 4096
WORKERS = ("w0", "w1", "w2")
DEVICES = ("w0/gpu", "w1/gpu")
NAMES = tuple("abcdef")
INCARNATION = b"1" * 16
WAIT_S = 30.0

workers = st.sampled_from(WORKERS)
devices = st.sampled_from(DEVICES)
names = st.sampled_from(NAMES)


class Tenants(RuleBasedStateMachine):
    """The table with all that decides over it, and what the workers believe to hold."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.believed: dict[tuple[str, str, str], HeldBlock] = {}
        """By device, worker and name: as the worker was told."""
        self.waiting: list[Waiting[Attempt]] = []
        """Each has the deadline `since + WAIT_S`."""
        self._start(frozenset())

    def _start(self, at_start: frozenset[tuple[str, bytes]]) -> None:
        self.table = DeviceTable(MemoryLimits(8, 8, 64, 20, 8, 8), EvictionPort())
        self.allocation = Allocation(self.table)
        self.assertion = Assertion(self.table)
        self.compactions = Compactions(self.table, self.allocation)
        self.table.begin({JOB: at_start})
        for name in DEVICES:
            self._register(name.partition("/")[0])

    def _register(self, worker: str) -> None:
        request = RegisterDevice(JOB, worker, INCARNATION, GpuDevice("gpu", TOTAL))
        self.table.register(request, self._owner(worker), self._moment())

    def _moment(self) -> Moment:
        return Moment(self.now, self.now)

    def _owner(self, worker: str) -> Owner:
        return self.table.owner(JOB, worker, INCARNATION, Holder(JOB, worker), self._moment())

    def _present(self, device: str) -> bool:
        return device in self.table.jobs.get(JOB, {})

    def _learn(self) -> None:
        """What was evicted is known to its owner, and those that waited have their blocks."""
        for _, fact in self.table.facts:
            if isinstance(fact, BlockEvicted):
                for block_id in fact.blocks:
                    worker, _, name = block_id.partition(":")
                    del self.believed[fact.device, worker, name]
        self.table.facts.clear()
        for waiting in [one for one in self.waiting if one.request.is_done]:
            self.waiting.remove(waiting)
            self.allocation.end_wait(waiting, self._moment())
        self._believe()

    def _believe(self) -> None:
        """Blocks that were given to requests that wait are new to the model; no other one is."""
        for device in self.table.devices():
            for block in device.core.stretches():
                if block.block_id:
                    key = device.name, block.owner, block.block_id.partition(":")[2]
                    self.believed.setdefault(key, held_block(block))

    @rule(worker=workers, device=devices)
    def fill_with_cached_blocks(self, worker: str, device: str) -> None:
        self._allocate(worker, device, dict.fromkeys(NAMES, TOTAL // 4), cached=True)

    @rule(worker=workers, device=devices, sizes=st.dictionaries(names, st.integers(1, TOTAL), min_size=1, max_size=3))
    def allocate(self, worker: str, device: str, sizes: dict[str, int]) -> None:
        self._allocate(worker, device, sizes)

    @rule(
        worker=workers,
        device=devices,
        sizes=st.dictionaries(names, st.integers(1, TOTAL // 2), min_size=1, max_size=3),
        cached=st.booleans(),
        all_or_none=st.booleans(),
        priority=st.integers(-20, 20),
        waits=st.booleans(),
    )
    def allocate_somehow(self, worker: str, device: str, sizes: dict[str, int], waits: bool, **more: Any) -> None:
        self._allocate(worker, device, sizes, wait_s=WAIT_S if waits else 0.0, **more)

    def _allocate(
        self,
        worker: str,
        device: str,
        sizes: dict[str, int],
        *,
        cached: bool = False,
        all_or_none: bool = False,
        priority: int = 0,
        wait_s: float = 0.0,
    ) -> None:
        wanted = [
            Wanted(name, AllocationRequest("t", size, 64, priority=priority), cached=cached)
            for name, size in sizes.items()
        ]
        request = AllocateMemory(JOB, worker, INCARNATION, device, wanted, all_or_none=all_or_none, wait_s=wait_s)
        before = self._held_on(device)
        missing = {name for name in sizes if (device, worker, name) not in self.believed}
        try:
            attempt = self.allocation.allocate(request, self._owner(worker), self._moment())
            if not attempt.is_done and wait_s:
                self.waiting.append(self.allocation.wait(attempt, self._moment()))
                self._learn()
                return
            self.allocation.explain(attempt, self._moment())
        except ForgedError:
            return
        self._learn()
        got = [reply for reply in attempt.replies() if reply.handle is not None]
        for reply in got:
            held = self.believed[device, worker, reply.name]
            assert (held.handle, held.block.offset) == (reply.handle, reply.offset)
        if all_or_none and len(got) < len(wanted):
            assert missing.isdisjoint(reply.name for reply in got)
            assert self._held_on(device) == before

    @rule(worker=workers, device=devices, name=names, size=st.integers(1, TOTAL))
    def allocate_none_of_two(self, worker: str, device: str, name: str, size: int) -> None:
        """The first of two blocks may evict others; the second one fits only into an empty device."""
        self._allocate(worker, device, {name: size, "whole": TOTAL}, all_or_none=True)

    def _held_on(self, device: str) -> list[HeldBlock]:
        found = self.table.jobs.get(JOB, {}).get(device)
        return [] if found is None else [held_block(block) for block in found.core.stretches() if block.block_id]

    @rule(worker=workers, device=devices, name=names, version=st.integers(0, 1))
    def free(self, worker: str, device: str, name: str, version: int) -> None:
        known = self.believed.get((device, worker, name))
        handle = Handle(name, (known.handle.version if known else 1) + version)
        try:
            self.allocation.free(
                FreeMemory(JOB, worker, INCARNATION, device, [handle]), self._owner(worker), self._moment()
            )
        except ForgedError:
            assert known is None or version or not self._present(device)
            return
        assert known is not None
        assert not version
        del self.believed[device, worker, name]
        self._learn()

    @rule(worker=workers, device=devices, name=names, change=st.sampled_from(["pin", "unpin", "cache", "use", "touch"]))
    def change(self, worker: str, device: str, name: str, change: str) -> None:
        known = self.believed.get((device, worker, name))
        handle = known.handle if known else Handle(name, 1)
        request = ChangeBlocks(JOB, worker, INCARNATION, device, [handle], change)
        try:
            self.allocation.change(request, self._owner(worker), self._moment())
        except ForgedError:
            return
        assert known is not None
        self._learn()

    @rule(device=devices, hole=st.integers(0, TOTAL))
    def plan(self, device: str, hole: int) -> None:
        try:
            self.compactions.plan(PlanCompaction(JOB, device, hole), self._moment())
        except ForgedError:
            return

    @rule(device=devices, which=st.integers(0, 5))
    def commit(self, device: str, which: int) -> None:
        if not self._present(device):
            return
        core = self.table.device(JOB, device).core
        ready = core.ready_moves
        if core.plan is None or not ready:
            return
        move = ready[which % len(ready)]
        worker, _, name = move.block_id.partition(":")
        request = CommitMove(JOB, worker, INCARNATION, device, core.plan.epoch, move.number)
        block = self.compactions.commit(request, self._owner(worker), self._moment())
        before = self.believed[device, worker, name]
        assert (block.offset, block.version) == (move.destination, before.handle.version + 1)
        self.believed[device, worker, name] = held_block(block)
        self._learn()

    @rule(seconds=st.sampled_from([0.5, 5.0, PLAN_S + 1]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for device in list(self.table.devices()):
            if device.assert_until is not None and self.now >= device.assert_until:
                self.table.settle_device(device, self._moment())
            self.compactions.expire(device, self._moment())
            self.compactions.plan_for_waiting(device, self._moment())
            self.allocation.search_if_due(device, self._moment())
        for waiting in [one for one in self.waiting if one.since + WAIT_S <= self.now]:
            self.waiting.remove(waiting)
            self.allocation.end_wait(waiting, self._moment())
        self._learn()

    @rule(worker=workers)
    def fail(self, worker: str) -> None:
        owner = self.table.owners.get((JOB, worker))
        if owner is None:
            return
        self.table.remove_worker(owner, "killed", self._moment())
        for key in list(self.believed):
            if key[1] == worker or key[0].partition("/")[0] == worker:
                del self.believed[key]
        self._learn()
        if f"{worker}/gpu" in DEVICES:
            self._register(worker)

    @rule(dishonest=st.booleans())
    def restart(self, dishonest: bool) -> None:
        """The daemon forgets everything, and the workers assert what they hold; one lies first."""
        self.waiting.clear()
        known, self.believed = self.believed, {}
        cached = {key for key, held in known.items() if held.block.status is BlockStatus.CACHED}
        self._start(frozenset((worker, INCARNATION) for worker in WORKERS))
        for worker in reversed(WORKERS):
            for device in sorted(DEVICES, key=lambda one: one.startswith(worker)):
                mine = [held for key, held in known.items() if key[:2] == (device, worker)]
                if dishonest and known:
                    lie = [*mine, *(held for key, held in known.items() if key[0] == device and key[1] != worker)]
                    self._assert_lie(worker, device, lie, len(mine))
                request = AssertBlocks(JOB, worker, INCARNATION, device, mine)
                handles = self.assertion.assert_blocks(request, self._owner(worker), self._moment())
                assert handles == [held.handle for held in mine if held.block.status is not BlockStatus.CACHED]
        self.table.facts.clear()
        self.believed = {key: held for key, held in known.items() if key not in cached}
        assert all(device.assert_until is None for device in self.table.devices())

    def _assert_lie(self, worker: str, device: str, lie: list[HeldBlock], own: int) -> None:
        """The blocks of others as one's own: refused, and nothing of the page is entered."""
        if len(lie) == own:
            return
        before = len(self.table.device(JOB, device).core)
        request = AssertBlocks(JOB, worker, INCARNATION, device, lie, True)
        try:
            self.assertion.assert_blocks(request, self._owner(worker), self._moment())
        except ForgedError:
            assert len(self.table.device(JOB, device).core) == before
        else:
            raise AssertionError("a lie was believed")

    @invariant()
    def holds_what_is_believed(self) -> None:
        if not hasattr(self, "table"):
            return
        found: dict[tuple[str, str, str], tuple[Handle, int, int]] = {}
        for device in self.table.devices():
            validate(device.core)
            for block in device.core.stretches():
                if block.block_id:
                    held = held_block(block)
                    key = device.name, block.owner, held.handle.name
                    found[key] = held.handle, block.offset, block.size
                    assert block.status is not BlockStatus.FREE
        assert found == {key: (held.handle, held.block.offset, held.block.size) for key, held in self.believed.items()}
        assert self.table.block_shares.used == len(found)
        assert sum(len(of) for owner in self.table.owners.values() for of in owner.blocks.values()) == len(found)
        assert self.table.waiting_shares.used == len(self.waiting)


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
