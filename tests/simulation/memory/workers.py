"""The workers of simulated jobs: they hold blocks, write to them, move them, and die in the middle.

Invariants:
- A worker writes to a block when it is told that it has it, and finds there what it has written as long as it has it.
- A worker is registered until the fact of its end is durable, or another process takes its name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from forged.client import DeviceMemory, ForgedClient
from forged.elastic.messages import WorkerFailed, WorkerLeft
from forged.errors import RequestRefused, Unavailable
from forged.memory.book.device import first_version
from forged.memory.messages import (
    Allocated,
    AssertBlocks,
    Handle,
    HeldBlock,
    ListBlocks,
    Move,
    Wanted,
)
from forged.memory.model import AllocationRequest, BlockStatus, GpuDevice, MemoryBlock
from tests.simulation.memory.book_oracle import STATUS_AFTER
from tests.simulation.memory.known_device import first_status
from tests.simulation.memory.promises import Promise
from tests.simulation.memory.times import ASSERT_S

if TYPE_CHECKING:
    from tests.simulation.memory.simulation import MemorySimulation

Place = tuple[str, str]
"""A device and the name of a block."""
UNIT = 256
NAMES = 14
LIFE_S = (2.0, 10.0)
PAUSE_S = (0.02, 0.5)
NOTICED_AFTER_S = 1.5
"""Within this time a dead worker counts as failed."""
IN_TOUCH_S = 1.0
"""An answer that took longer may be older than what the worker has lost meanwhile."""
PATIENCE_S = 0.2
EXPECTED_REFUSALS = frozenset(
    {
        "worker_gone",
        "memory_block_unknown",
        "memory_block_moving",
        "memory_device_changed",
        "memory_device_unknown",
        "memory_handle_stale",
        "memory_move_early",
        "memory_move_of_another",
        "memory_move_unknown",
        "memory_name_taken",
        "memory_plan_impossible",
        "memory_plan_unknown",
        "memory_size_beyond_device",
        "memory_status_refused",
    }
)
"""Refusals that a correct worker may get at any time."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's name in a job, and what the processes of that name do."""

    job: str
    worker_id: str
    units: int
    """Of its device; 0: it has none."""
    is_guest: bool = False
    """Whether it has blocks on the devices of other workers, by plain requests."""

    @property
    def device_name(self) -> str:
        return f"{self.worker_id}/gpu0"

    @property
    def host(self) -> str:
        return f"{self.job}-{self.worker_id}"


class DeviceContent:
    """The bytes of the devices: for each unit the number of what was written there last."""

    def __init__(self) -> None:
        self._units: dict[tuple[str, str], list[int]] = {}
        self._processes: Counter[tuple[str, str]] = Counter()
        self._last = 0

    def replace(self, job: str, device: str, total: int) -> None:
        """A new process has the device."""
        self._units[job, device] = [0] * (total // UNIT)
        self.end(job, device)

    def end(self, job: str, device: str) -> None:
        """The process that had the device is gone, or counts as gone."""
        self._processes[job, device] += 1

    def process(self, job: str, device: str) -> int:
        """A number that changes when all blocks of the device are gone with its process."""
        return self._processes[job, device]

    def write(self, job: str, device: str, offset: int, size: int) -> int:
        """Write something that was never written before; returns its number."""
        self._last += 1
        first, count = offset // UNIT, size // UNIT
        self._units[job, device][first : first + count] = [self._last] * count
        return self._last

    def copy(self, job: str, device: str, move: Move) -> None:
        units, count = self._units[job, device], move.size // UNIT
        source, destination = move.source // UNIT, move.destination // UNIT
        units[destination : destination + count] = units[source : source + count]

    def has(self, job: str, device: str, offset: int, size: int, number: int) -> bool:
        first, count = offset // UNIT, size // UNIT
        return self._units[job, device][first : first + count] == [number] * count


class Worker:
    """The processes of one name, one after the other."""

    def __init__(self, simulation: MemorySimulation, seat: Seat) -> None:
        self.seat = seat
        self._simulation = simulation
        self._random = Random(f"worker {seat.host} {simulation.seed}")
        self.process: Process | None = None
        """The present one."""

    async def run(self) -> None:
        """Live until the faults end; the process that is there then stays."""
        async with anyio.create_task_group() as tasks:
            while self._simulation.faults_active:
                await self._live(tasks)

    async def _live(self, tasks: TaskGroup) -> None:
        simulation, seat, random = self._simulation, self.seat, self._random
        incarnation = random.randbytes(16)
        await simulation.join(seat, incarnation)
        kind = GuestProcess if seat.is_guest else DeviceProcess
        self.process = kind(simulation, seat, incarnation, random)
        if random.random() < 0.15:
            tasks.start_soon(self._fail_early, incarnation, random.uniform(0.5, LIFE_S[1]))
        with anyio.move_on_after(random.uniform(*LIFE_S)) as life:
            await self.process.run(life)
        self.process = None
        leaves = random.random() < 0.3
        end = WorkerLeft(seat.worker_id, "done") if leaves else WorkerFailed(seat.worker_id, 0, "killed")
        if not leaves:
            simulation.network.crash(seat.host)
            await anyio.sleep(random.uniform(0.0, NOTICED_AFTER_S))
        if random.random() < 0.3:
            # The next process may be heard of before the fact.
            simulation.meet("a process takes the name of one that is gone")
            tasks.start_soon(simulation.end_worker, seat, incarnation, end)
            return
        await simulation.end_worker(seat, incarnation, end)
        await anyio.sleep(random.uniform(0.0, 1.0))

    async def _fail_early(self, incarnation: bytes, after_s: float) -> None:
        await anyio.sleep(after_s)
        if self._simulation.faults_active:
            self._simulation.meet("a worker that counts as failed goes on")
            await self._simulation.end_worker(
                self.seat, incarnation, WorkerFailed(self.seat.worker_id, 0, "not heard of")
            )


class Process(ABC):
    """One process of a worker."""

    def __init__(self, simulation: MemorySimulation, seat: Seat, incarnation: bytes, random: Random) -> None:
        self.simulation = simulation
        self.seat = seat
        self.me = (seat.job, seat.worker_id, incarnation)
        self.random = random
        self.written: dict[Place, int] = {}
        """What the process has written to its blocks."""
        self._wanted: dict[Place, Wanted] = {}
        self._device_process: dict[Place, int] = {}
        """The process that had the device when the block was asked for."""

    @property
    def device(self) -> GpuDevice:
        return GpuDevice("gpu0", self.seat.units * UNIT)

    @abstractmethod
    def held(self) -> dict[Place, HeldBlock]:
        """The blocks that the process has, as far as it knows."""

    @abstractmethod
    def is_committing(self, place: Place) -> bool:
        """Whether the commit of the block's move is not answered: it may be here or there."""

    @abstractmethod
    def opened(self, client: ForgedClient) -> AbstractAsyncContextManager[None]:
        """Register and hold blocks inside the block."""

    @abstractmethod
    async def step(self) -> None:
        """Do something."""

    async def run(self, life: anyio.CancelScope) -> None:
        """Act until the faults end, then only keep what it has."""
        simulation = self.simulation
        with self.excused():
            async with simulation.client(self.seat.host, self.seat.job) as client, self.opened(client):
                while simulation.faults_active:
                    await anyio.sleep(self.random.uniform(*PAUSE_S))
                    with self.excused():
                        await self.step()
                life.deadline = math.inf
                await anyio.sleep_forever()

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Note refusals and errors, which are expected."""
        try:
            yield
        except RequestRefused as error:
            if error.code not in EXPECTED_REFUSALS:
                raise
            self.simulation.note(f"{self.seat.host} was refused: {error.code}")
        except Unavailable as error:
            self.simulation.note(f"{self.seat.host} got error {error.code}")

    # What it wants.

    def wanted(self, device: str, total: int) -> Wanted:
        """A block that it does not have, or a repeated wish."""
        random = self.random
        place = device, f"b{random.randrange(NAMES)}"
        if place not in self.held():
            self._device_process[place] = self.simulation.content.process(self.seat.job, device)
        known = self._wanted.get(place)
        if known is not None and (place in self.held() or random.random() < 0.5):
            return known
        units = total // UNIT
        size = UNIT * random.randint(1, max(1, units // random.choice((3, 6, 8, 12)))) - random.choice((0, 0, 100))
        request = AllocationRequest(
            f"tensor of {place[1]}",
            size,
            UNIT * random.choice((1, 1, 1, 2, 4)),
            random.random() < 0.1,
            random.randint(-3, 12),
        )
        wanted = Wanted(
            place[1],
            request,
            random.choice(("", "", "/checkpoints/step-1")),
            random.choice((None, 0.5)),
            not request.pinned and random.random() < 0.3,
        )
        self._wanted[place] = wanted
        return wanted

    def draw_wait_s(self) -> float:
        return self.random.choice((0.0, 0.0, 0.5, 2.0, 4.0))

    # What it writes.

    def got(self, device: str, wanted: Wanted, reply: Allocated, before: HeldBlock | None) -> None:
        """Write to a block that is told for the first time."""
        if reply.handle is None:
            return
        place = device, wanted.name
        is_same = before is not None and (before.handle, before.block.offset) == (reply.handle, reply.offset)
        if not is_same:
            self.lost(place)
            if not wanted.cached or wanted.request.pinned:
                self._write(place, reply.offset, reply.actual_size)

    def _write(self, place: Place, offset: int, size: int) -> None:
        self.written[place] = self.simulation.content.write(self.seat.job, place[0], offset, size)

    def is_there(self, place: Place) -> bool:
        """Whether the device is still that of the process which had it when the block was asked for."""
        return self._device_process.get(place) == self.simulation.content.process(self.seat.job, place[0])

    def lost(self, place: Place) -> None:
        self.written.pop(place, None)

    def verify(self, place: Place, before: HeldBlock, asked_at: float) -> None:
        """The daemon has just acknowledged the block: its content is what was written."""
        simulation, now = self.simulation, self.simulation.loop.time()
        after = self.held().get(place)
        if after is None or after.handle != before.handle or now - asked_at > IN_TOUCH_S or not self.is_there(place):
            return
        if self.is_committing(place) or after.block.status is BlockStatus.CACHED:
            return
        number, block = self.written.get(place), after.block
        if number is None:
            self._write(place, block.offset, block.size)
            return
        simulation.meet("a block has its content")
        if not simulation.content.has(self.seat.job, place[0], block.offset, block.size, number):
            simulation.oracle.broken(Promise.CONTENT, f"{place} of {self.seat.host} was overwritten: {after}")


class DeviceProcess(Process):
    """A process with a device of its own, by `DeviceMemory`."""

    memory: DeviceMemory

    def held(self) -> dict[Place, HeldBlock]:
        return {(self.seat.device_name, name): held for name, held in self.memory.blocks.items()}

    @asynccontextmanager
    async def opened(self, client: ForgedClient) -> AsyncIterator[None]:
        self.simulation.content.replace(self.seat.job, self.seat.device_name, self.device.total_memory)
        self.memory = DeviceMemory(
            client, *self.me, self.device, copy=self._copy, evicted=self._evicted, clock=self.simulation.clock
        )
        async with self.memory:
            yield

    async def step(self) -> None:
        random = self.random
        names = sorted(self.memory.blocks)
        if not names or random.random() < 0.5:
            await self._allocate()
        elif random.random() < 0.4:
            await self._free(*random.sample(names, min(len(names), random.choice((1, 1, 2, 6)))))
        else:
            await self._change(
                random.choice(("pin", "unpin", "cache", "cache", "use", "use", "touch")), random.choice(names)
            )

    async def _allocate(self) -> None:
        random, memory = self.random, self.memory
        wanted = {
            one.name: one
            for one in (
                self.wanted(self.seat.device_name, self.device.total_memory) for _ in range(random.choice((1, 1, 2, 4)))
            )
        }
        before = dict(memory.blocks)
        replies = await memory.allocate(
            *wanted.values(),
            all_or_none=random.random() < 0.25,
            evict=random.random() < 0.85,
            wait_s=self.draw_wait_s(),
        )
        for one, reply in zip(wanted.values(), replies, strict=True):
            # A block that is not among them any more has given way already.
            if one.name in memory.blocks:
                self.got(self.seat.device_name, one, reply, before.get(one.name))

    async def _free(self, *names: str) -> None:
        for name in names:
            self.lost((self.seat.device_name, name))
        await self.memory.free(*names)

    async def _change(self, change: str, name: str) -> None:
        place, asked_at = (self.seat.device_name, name), self.simulation.loop.time()
        before = self.memory.blocks[name]
        await self.memory.change(change, name)
        if change in ("use", "touch"):
            self.verify(place, before, asked_at)

    def is_committing(self, place: Place) -> bool:
        move = self.memory._committing
        return move is not None and move.handle.name == place[1]

    async def _copy(self, move: Move) -> None:
        await anyio.sleep(self.random.choice((0.0, 0.02, 0.2, 1.0)))
        if self.random.random() < 0.15:
            self.simulation.meet("a copy fails")
            raise OSError("the device does not answer")
        self.simulation.content.copy(self.seat.job, self.seat.device_name, move)

    def _evicted(self, held: HeldBlock) -> None:
        self.simulation.meet("an owner hears that its block gave way")
        self.lost((self.seat.device_name, held.handle.name))


class GuestProcess(Process):
    """A process with blocks on the devices of its job, by plain requests."""

    client: ForgedClient

    def __init__(self, simulation: MemorySimulation, seat: Seat, incarnation: bytes, random: Random) -> None:
        super().__init__(simulation, seat, incarnation, random)
        self._blocks: dict[Place, HeldBlock] = {}
        self._committing: Place | None = None
        self._lock = anyio.Lock()
        """Held while blocks are asserted, freed or moved."""
        self._connection_changed = anyio.Event()

    def held(self) -> dict[Place, HeldBlock]:
        return self._blocks

    def is_committing(self, place: Place) -> bool:
        return place == self._committing

    @asynccontextmanager
    async def opened(self, client: ForgedClient) -> AsyncIterator[None]:
        self.client = client
        if self.seat.units:
            self.simulation.content.replace(self.seat.job, self.seat.device_name, self.device.total_memory)
            await client.register_device(*self.me, self.device)
        client.connection_listeners.append(lambda: self._connection_changed.set())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._restore_after_reconnections)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    # After a restart of the daemon.

    async def _restore_after_reconnections(self) -> None:
        while True:
            await self._connection_changed.wait()
            self._connection_changed = anyio.Event()
            if not self.client.connected:
                continue
            with self.excused():
                try:
                    async with self._lock:
                        await self._restore()
                except Unavailable:
                    await anyio.sleep(PATIENCE_S)
                    self._connection_changed.set()
                    raise

    async def _restore(self) -> None:
        """Assert all blocks: first those on the devices of other workers."""
        if self.seat.units:
            await self.client.register_device(*self.me, self.device)
        devices = self.simulation.devices_of(self.seat.job)
        give_up_at = self.simulation.loop.time() + ASSERT_S / 2
        for device in [*(one for one in devices if one != self.seat.device_name), self.seat.device_name]:
            held = [one for (name, _), one in self._blocks.items() if name == device]
            while device != self.seat.device_name or self.seat.units:
                try:
                    if self.simulation.has_liar and self.random.random() < 0.5:
                        # Before its own assertion a lie can be accepted.
                        await self._lie(device)
                    await self._assert(device, held)
                except RequestRefused as refusal:
                    if refusal.code != "memory_device_unknown":
                        raise
                    # Its owner has not come back yet, and before it has the blocks cannot be asserted.
                    if held and self.simulation.loop.time() < give_up_at and self.client.connected:
                        await anyio.sleep(PATIENCE_S)
                        continue
                    for one in held:
                        self._forget((device, one.handle.name))
                break

    async def _assert(self, device: str, held: list[HeldBlock]) -> None:
        try:
            handles = await self.client.assert_blocks(*self.me, device, held)
        except RequestRefused as refusal:
            if refusal.code != "memory_assertion_refused":
                raise
            for one in held:
                try:
                    kept = await self.client.request(AssertBlocks(*self.me, device, [one], more=True))
                except RequestRefused as again:
                    if again.code != "memory_assertion_refused":
                        raise
                    self._forget((device, one.handle.name))
                else:
                    self._keep(device, [one], kept)
            await self.client.assert_blocks(*self.me, device, [])
        else:
            self._keep(device, held, handles)

    def _keep(self, device: str, asserted: list[HeldBlock], handles: list[Handle]) -> None:
        for one in asserted:
            held = self._blocks.get((device, one.handle.name))
            if held is not None and held.handle == one.handle and one.handle not in handles:
                self._forget((device, one.handle.name))

    def _forget(self, place: Place) -> None:
        self._blocks.pop(place, None)
        self.lost(place)

    # What it does.

    async def step(self) -> None:
        random, places = self.random, sorted(self._blocks)
        device = random.choice(self.simulation.devices_of(self.seat.job))
        chance = random.random()
        if chance < 0.2:
            await self._compact(device)
        elif chance < 0.25 and self.simulation.has_liar:
            async with self._lock:
                await self._lie(device)
        elif not places or chance < 0.6:
            await self._allocate(device)
        elif chance < 0.75:
            await self._free(random.choice(places))
        else:
            await self._change(
                random.choice(("pin", "unpin", "cache", "cache", "use", "use", "touch")), random.choice(places)
            )

    async def _allocate(self, device: str) -> None:
        random, total = self.random, self.simulation.total_of(self.seat.job, device)
        wanted = {one.name: one for one in (self.wanted(device, total) for _ in range(random.choice((1, 1, 2, 4))))}
        before = {name: self._blocks.get((device, name)) for name in wanted}
        async with self._lock:
            # Blocks that are being asserted come first.
            pass
        replies = await self.client.allocate_memory(
            *self.me,
            device,
            [*wanted.values()],
            all_or_none=random.random() < 0.25,
            evict=random.random() < 0.85,
            wait_s=self.draw_wait_s(),
        )
        for one, reply in zip(wanted.values(), replies, strict=True):
            if reply.handle is not None:
                self.got(device, one, reply, before[one.name])
                self._note(device, one, reply)

    def _note(self, device: str, wanted: Wanted, reply: Allocated) -> None:
        assert reply.handle is not None
        known = self._blocks.get((device, wanted.name))
        if known is not None and (known.handle, known.block.offset) == (reply.handle, reply.offset):
            return
        block = MemoryBlock(
            f"{self.seat.worker_id}:{wanted.name}",
            reply.offset,
            reply.actual_size,
            first_status(wanted),
            wanted.request.tensor_id,
            self.simulation.clock.wall(),
            self.simulation.clock.wall(),
            wanted.request.priority,
        )
        self._blocks[device, wanted.name] = HeldBlock(reply.handle, self.seat.worker_id, block)

    async def _free(self, place: Place) -> None:
        """Free a block, perhaps with a wrong handle first, and perhaps twice."""
        async with self._lock:
            held = self._blocks.get(place)
            if held is None:
                return
            device, handle = place[0], held.handle
            if self.random.random() < 0.3:
                other = Handle(handle.name, handle.version + self.random.choice((-1, 1)))
                with self.excused():
                    await self.client.free_memory(*self.me, device, [other])
                return
            self._forget(place)
            for _ in range(2 if self.random.random() < 0.3 else 1):
                with self.excused():
                    await self.client.free_memory(*self.me, device, [handle])

    async def _change(self, change: str, place: Place) -> None:
        before, asked_at = self._blocks[place], self.simulation.loop.time()
        if change == "cache":
            # From the request on the block may give way, whether it is answered or not.
            asked = replace(before, block=replace(before.block, status=BlockStatus.CACHED))
            self._blocks[place] = asked
        else:
            asked = before
        try:
            await self.client.change_blocks(*self.me, place[0], [before.handle], change)
        except RequestRefused as refusal:
            if self._blocks.get(place) is asked:
                self._blocks[place] = before
            if refusal.code == "memory_handle_stale" and self._blocks.get(place) is before:
                self.simulation.oracle.broken(Promise.MOVES, f"{self.seat.host} does not know where {before} is")
            has_given_way = refusal.code == "memory_block_unknown" and before.block.status is BlockStatus.CACHED
            if has_given_way and self._blocks.get(place) is before:
                self._forget(place)
            raise
        held = self._blocks.get(place)
        if held is not None and held.handle == before.handle:
            status = STATUS_AFTER.get(change, held.block.status)
            self._blocks[place] = replace(held, block=replace(held.block, status=status))
            if change in ("use", "touch"):
                self.verify(place, before, asked_at)

    async def _compact(self, device: str) -> None:
        """Ask for a hole, or take part in the plan that is open, not always to its end."""
        hole = self.random.choice((0, 0, self.simulation.total_of(self.seat.job, device) // 4))
        plan = await self.client.plan_compaction(self.seat.job, device, hole=hole)
        numbers = {move.number for move in plan.moves}
        for move in plan.moves if plan.expires_in_s > 0 else ():
            if move.worker_id != self.seat.worker_id or (device, move.handle.name) not in self._blocks:
                continue
            await anyio.sleep(self.random.choice((0.0, 0.0, 0.3)))
            if self.random.random() < 0.15:
                return
            is_early = move.after in numbers
            if not is_early or self.random.random() < 0.3:
                with self.excused():
                    await self._move(device, plan.epoch, move, is_early=is_early)
                    numbers.discard(move.number)
                if (device, move.handle.name) in self._blocks:
                    # Wherever it is now, its owner knows.
                    await self._change("touch", (device, move.handle.name))

    async def _move(self, device: str, epoch: int, move: Move, *, is_early: bool) -> None:
        """Copy and commit; an early move is refused, and nothing is copied to where another block is."""
        place = device, move.handle.name
        async with self._lock:
            held = self._blocks.get(place)
            if held is None or held.handle != move.handle:
                return
            if not is_early:
                self.simulation.content.copy(self.seat.job, device, move)
            self._committing = place
            try:
                handle = await self._committed(device, epoch, move)
            except RequestRefused:
                if not await self._is_at_source(device, move):
                    self._forget(place)
                raise
            finally:
                self._committing = None
            self._blocks[place] = replace(held, handle=handle, block=replace(held.block, offset=move.destination))
            if is_early:
                self.written.pop(place, None)

    async def _committed(self, device: str, epoch: int, move: Move) -> Handle:
        """Commit until it is answered: before, it is unknown where the block is."""
        while True:
            try:
                return await self.client.commit_move(*self.me, device, epoch, move.number)
            except Unavailable:
                await anyio.sleep(PATIENCE_S)

    async def _is_at_source(self, device: str, move: Move) -> bool:
        """Whether the daemon has the block where it was; an attempt without an answer may have been executed."""
        while True:
            try:
                page = await self.client.request(ListBlocks(self.seat.job, device, move.source, 1))
            except RequestRefused:
                return False
            except Unavailable:
                await anyio.sleep(PATIENCE_S)
            else:
                return any(
                    (one.worker_id, one.handle, one.block.offset) == (self.seat.worker_id, move.handle, move.source)
                    for one in page.blocks
                )

    async def _lie(self, device: str) -> None:
        """Assert a block that it never had."""
        random, total = self.random, self.simulation.total_of(self.seat.job, device)
        size = UNIT * random.randint(1, 6)
        offset = random.choice((UNIT * random.randrange(total // UNIT), total - UNIT, total, -UNIT))
        block = MemoryBlock("", offset, size, BlockStatus.ALLOCATED, "a lie")
        first = first_version(self.simulation.incarnation_of(self.seat.job, device.partition("/")[0]))
        handle = Handle("lie", random.choice((first, first, first + 6, 0)))
        owner = random.choice((self.seat.worker_id, "", "w0"))
        try:
            await self.client.request(AssertBlocks(*self.me, device, [HeldBlock(handle, owner, block)], more=True))
        except RequestRefused as refusal:
            if refusal.code not in ("memory_assertion_refused", *EXPECTED_REFUSALS):
                raise
        else:
            with self.excused():
                await self.client.free_memory(*self.me, device, [handle])
