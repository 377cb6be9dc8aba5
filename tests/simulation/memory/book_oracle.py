"""What the oracle of the memory simulation knows of devices and blocks, and what it judges by it.

Assertions, blocks that are freed, changed, moved or give way, and workers that are gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from forged.errors import ForgedError
from forged.kernel.ledger import FACT_PREFIX
from forged.kernel.messages import Record
from forged.kernel.store.port import Transaction
from forged.memory.book.device import COUNT_BITS, first_version
from forged.memory.messages import (
    AssertBlocks,
    BlockEvicted,
    BlocksFreed,
    ChangeBlocks,
    CommitMove,
    CompactionEnded,
    CompactionPlan,
    CompactionPlanned,
    DeviceRemoved,
    DeviceView,
    FreeMemory,
    Handle,
    HeldBlock,
    Move,
    OutOfMemory,
    PlanCompaction,
    RegisterDevice,
)
from forged.memory.model import BlockStatus, MemoryBlock
from tests.simulation.memory.known_device import (
    Key,
    KnownBlock,
    KnownDevice,
    KnownPlan,
    id_of,
)
from tests.simulation.memory.promises import Claims, Promise
from tests.simulation.memory.times import ASSERT_S, TICK_S
from tests.simulation.oracle import StoreOracle

EPSILON_S = 1e-6
STATUS_AFTER = {
    "pin": BlockStatus.PINNED,
    "unpin": BlockStatus.ALLOCATED,
    "cache": BlockStatus.CACHED,
    "use": BlockStatus.ALLOCATED,
}
UNKNOWN, STALE, MOVING, STATUS = (
    "memory_block_unknown",
    "memory_handle_stale",
    "memory_block_moving",
    "memory_status_refused",
)


class BookOracle(StoreOracle):
    """Knows what workers were told of their blocks."""

    def __init__(
        self,
        met: Callable[[str], None],
        note: Callable[[str], None],
        now: Callable[[], float],
        is_registered: Callable[[str, str, bytes], bool],
        *,
        facts_are_limited: bool,
    ) -> None:
        super().__init__()
        self.met = met
        self.now = now
        self._note = note
        self._claims = Claims(now, self.violated)
        self._is_registered = is_registered
        self._facts_are_limited = facts_are_limited
        """Whether blocks may give way without a fact."""
        self.devices: dict[tuple[str, str], KnownDevice] = {}
        self.told: defaultdict[tuple[str, str], dict[str, KnownBlock]] = defaultdict(dict)
        """By device: the blocks that workers had when the daemon started, and that are not asserted yet."""
        self.at_start: set[Key] = set()
        """The workers that were registered when the daemon started."""
        self._settled: set[Key] = set()
        """Those of them that have asserted all that they had."""
        self._changing: set[str] = set()
        """The blocks that the request which is being handled makes evictable."""
        self._waiters = 0
        self._shortages: dict[tuple[str, str, str], OutOfMemory] = {}

    # What becomes durable: facts only.

    prefixes = ()

    def committed(self, transaction: Transaction) -> None:
        records = [Record.read(value) for key, value in transaction.puts.items() if key.startswith(FACT_PREFIX)]
        self.facts.update((record.id, record) for record in records)

    def loaded(self, facts: Sequence[Record], entries: Mapping[str, bytes]) -> None:
        self.facts.update((record.id, record) for record in facts)

    def unsettled(self) -> list[str]:
        waiting = [str(waiter.request) for device in self.devices.values() for waiter in device.waiters]
        return waiting + [str(device.plan) for device in self.devices.values() if device.plan is not None]

    # What the daemon does.

    def stopped(self) -> None:
        """The daemon is killed: it answers nothing any more, and knows no blocks."""
        self._claims.settle()
        for place, device in self.devices.items():
            self.told[place] |= device.blocks
        self.devices.clear()
        self._shortages.clear()

    def started(self, workers: Mapping[str, Iterable[tuple[str, bytes]]]) -> None:
        """A daemon starts; these workers are registered by job."""
        self.at_start = {(job, *key) for job, keys in workers.items() for key in keys}
        self._settled = set()

    def _violated_unless_served(self, promise: Promise, device: KnownDevice, what: str) -> None:
        """Figures differ from what is known; so they do if a request that waited is answered later in this instant."""
        at = self.now()
        self._claims.add(promise, lambda: "" if device.answered_waiters_at == at else what)

    # Workers that are gone.

    def _is_gone(self, key: Key) -> bool:
        return not self._is_registered(*key)

    def _require_registered(self, request: Any) -> None:
        if hasattr(request, "incarnation") and self._is_gone(key_of(request)):
            self.violated(Promise.GONE, f"a worker that is gone is answered: {request}")

    def _removed(self, device: KnownDevice, fact: DeviceRemoved) -> None:
        self.met("a device is removed")
        if not self._is_gone(device.owner):
            self.violated(Promise.KEPT, f"{device.name} is removed, and its worker is there")
        had = len(device.blocks), device.used()
        if self._is_exact(device) and had != (fact.blocks, fact.bytes):
            self._violated_unless_served(Promise.GONE, device, f"{fact} had {had}")
        del self.devices[device.job, device.name]
        self.told.pop((device.job, device.name), None)

    def _gone(self, device: KnownDevice, fact: BlocksFreed) -> None:
        self.met("a gone worker's blocks are freed")
        gone = [one for one in device.blocks.values() if one.key[1] == fact.worker_id and self._is_gone(one.key)]
        for one in gone:
            del device.blocks[one.id]
        had = len(gone), sum(one.size for one in gone)
        if self._is_exact(device) and had != (fact.blocks, fact.bytes):
            self._violated_unless_served(Promise.GONE, device, f"{fact} had {had}")
        device.given_up = {key for key in device.given_up if not self._is_gone(key)}

    # Devices.

    def _registered(self, request: RegisterDevice, view: DeviceView) -> None:
        known = self._at(request.job, view.name)
        if known is not None and known.total == view.device.total_memory:
            return
        if known is not None and known.blocks:
            self.violated(Promise.KEPT, f"{view.name} has another size, and {len(known.blocks)} blocks")
        device = KnownDevice(request.job, view.name, key_of(request), view.device.total_memory, self.now())
        self.devices[request.job, view.name] = device
        told = self.told[request.job, view.name]
        for one in [one for one in told.values() if self._is_gone(one.key)]:
            del told[one.id]
        if self._is_asserting(device):
            self.met("a device waits for assertions")
            if not view.is_asserting:
                self.violated(Promise.ASSERTED, f"{view.name} does not wait for the owners of its blocks")

    def _at(self, job: str, name: str) -> KnownDevice | None:
        return self.devices.get((job, name))

    def _device(self, request: Any) -> KnownDevice | None:
        return self.devices.get((request.job, request.device))

    def _is_exact(self, device: KnownDevice) -> bool:
        """Whether the device has just the blocks that are known."""
        return not (
            any(self._is_gone(one.key) for one in device.blocks.values())
            or device.may_have_more()
            or device.answered_waiters_at == self.now()
            or (self._facts_are_limited and device.cached())
        )

    # Assertions.

    def _unsettled(self, device: KnownDevice) -> bool:
        """Whether a registered worker has not asserted what it had when the daemon started."""
        return device.owner in self.at_start and any(
            key[0] == device.job
            and (key == device.owner or key not in self._settled)
            and key not in device.asserted
            and not self._is_gone(key)
            for key in self.at_start
        )

    def _is_asserting(self, device: KnownDevice) -> bool:
        """Whether the device certainly waits for owners of blocks."""
        return self.now() < device.registered_at + ASSERT_S - EPSILON_S and self._unsettled(device)

    def _is_settled(self, device: KnownDevice) -> bool:
        """Whether the device certainly waits no more."""
        return self.now() > device.registered_at + ASSERT_S + 2 * TICK_S

    def _expected(self, device: KnownDevice, key: Key, held: HeldBlock, page: Sequence[KnownBlock]) -> bool | None:
        """Whether the block is to be accepted; None: the daemon may know better."""
        block, handle = held.block, held.handle
        is_block = block.status is not BlockStatus.FREE and handle.version >= 1 and block.size > 0
        is_of_process = handle.version - first_version(device.owner[2]) in range(1 << COUNT_BITS)
        known = device.blocks.get(f"{key[1]}:{handle.name}")
        if known is not None and not self._is_gone(known.key):
            if known.is_cached and self._facts_are_limited:
                return None
            return is_block and known.is_held_as(held)
        if device.may_have_more():
            return None
        if not is_block or not is_of_process or block.offset < 0 or block.offset + block.size > device.total:
            return False
        if held.worker_id not in ("", key[1]) or not {key, device.owner} <= self.at_start or key in device.asserted:
            return False
        if device.has_allocated:
            return False
        if not self._is_asserting(device):
            return None
        return block.status is BlockStatus.CACHED or self._is_place_free(device, block, page)

    def _is_place_free(self, device: KnownDevice, block: MemoryBlock, page: Sequence[KnownBlock]) -> bool | None:
        if any(one.offset < block.offset + block.size and block.offset < one.end for one in page):
            return None
        in_the_way = device.overlapping(block.offset, block.offset + block.size)
        if any((one.is_cached and self._facts_are_limited) or self._is_gone(one.key) for one in in_the_way):
            return None
        return not in_the_way

    def _asserted(self, request: AssertBlocks, handles: list[Handle]) -> None:
        device, key = self._device(request), key_of(request)
        if device is None:
            self.violated(Promise.ASSERTED, f"{request} is accepted without a device")
            return
        entered: list[KnownBlock] = []
        kept = [held.handle for held in request.blocks if held.handle in handles]
        if handles != kept:
            self.violated(Promise.ASSERTED, f"{handles} are asserted by {request}")
        for held in request.blocks:
            if self._expected(device, key, held, entered) is False:
                self.violated(Promise.ASSERTED, f"a lie is accepted on {device.name}: {held}")
            name, is_kept = f"{key[1]}:{held.handle.name}", held.handle in kept
            is_there = name in device.blocks or held.block.status is not BlockStatus.CACHED
            if is_kept != is_there and not device.may_have_more():
                self.violated(Promise.ASSERTED, f"{held} is {'' if is_kept else 'not '}entered on {device.name}")
            if name not in device.blocks and self._is_entered(device, name, is_kept=is_kept):
                entered.append(_as_known(key, held))
        for known in entered:
            self._enter(device, known, "asserted")
        if not request.more:
            self._settle_assertion(device, key)

    def _is_entered(self, device: KnownDevice, name: str, *, is_kept: bool) -> bool:
        """Whether an asserted block is one of the device from now on."""
        was = self.told[device.job, device.name].pop(name, None)
        if not is_kept:
            self.met("a cached block has given way when the daemon restarts")
            return False
        self.met("a block is asserted" if was is not None else "a lie about free memory is accepted")
        return not self._gave_way_now(device, name)

    def _settle_assertion(self, device: KnownDevice, key: Key) -> None:
        device.asserted.add(key)
        told = self.told[device.job, device.name]
        for one in [one for one in told.values() if one.key == key]:
            del told[one.id]
        if device.owner == key:
            self._settled.add(key)

    def _not_asserted(self, request: AssertBlocks, error: ForgedError) -> None:
        device, key = self._device(request), key_of(request)
        if error.code != "memory_assertion_refused" or device is None:
            return
        expected: list[bool | None] = []
        page: list[KnownBlock] = []
        for held in request.blocks:
            expected.append(self._expected(device, key, held, page))
            if held.block.status is not BlockStatus.CACHED:
                page.append(_as_known(key, held))
        if all(expected):
            self.violated(Promise.ASSERTED, f"a worker cannot assert what it has: {error.message}")
        if False in expected:
            self.met("a lie is refused")

    # Blocks.

    def _enter(self, device: KnownDevice, block: KnownBlock, how: str) -> None:
        """A block is where none was; what was cached there has given way."""
        if block.offset < 0 or block.end > device.total:
            self.violated(Promise.APART, f"{block} is beyond {device.name}")
        for other in device.overlapping(block.offset, block.end):
            if other.id == block.id or self._is_gone(other.key):
                pass
            elif not other.is_cached:
                self.violated(Promise.APART, f"{block} is {how} where {other} is")
            elif not self._facts_are_limited:
                self.violated(Promise.KEPT, f"{other} has given way to {block}, and no fact tells so")
            del device.blocks[other.id]
        device.blocks[block.id] = block

    def _require_kept(self, device: KnownDevice, block: KnownBlock) -> None:
        """No block is where a move of the open plan goes."""
        for move in device.open_moves():
            if move.destination < block.end and block.offset < move.destination + move.size:
                self.violated(Promise.MOVES, f"{block} is allocated where {move} goes")

    def _evicted(self, device: KnownDevice, fact: BlockEvicted) -> None:
        self.met("blocks give way")
        known = [device.blocks.get(name) for name in fact.blocks]
        size = sum(one.size for one in known if one is not None)
        if None not in known and len(known) == fact.count and size != fact.bytes:
            self.violated(Promise.FACTS, f"{fact} is of {size} bytes")
        self._give_way(device, fact.blocks)

    def _gave_way_now(self, device: KnownDevice, name: str) -> bool:
        return device.gave_way.get(name) == self.now()

    def _give_way(self, device: KnownDevice, names: Iterable[str]) -> None:
        for name in names:
            known = device.blocks.get(name)
            device.gave_way[name] = self.now()
            if known is None:
                continue
            if not known.is_cached and name not in self._changing:
                self.violated(Promise.PINNED, f"{known} has given way")
            elif name in device.moving() - self._changing:
                self.violated(Promise.MOVES, f"{known} has given way while it is moved")
            del device.blocks[name]

    # Freeing and changing.

    def _held(self, device: KnownDevice | None, request: FreeMemory | ChangeBlocks, what: str) -> list[KnownBlock]:
        """The blocks of the handles, which are those that the worker has."""
        found: list[KnownBlock] = []
        for handle in request.handles:
            known = None if device is None else device.blocks.get(f"{request.worker_id}:{handle.name}")
            if device is not None and self._gave_way_now(device, f"{request.worker_id}:{handle.name}"):
                continue
            if known is None or known.version != handle.version or known.key != key_of(request):
                if device is None or not device.may_have_more():
                    self.violated(Promise.HANDLES, f"{handle} of {request.worker_id} is {what}, and is {known}")
            else:
                found.append(known)
        return found

    def _freed(self, request: FreeMemory, _: object) -> None:
        device = self._device(request)
        for known in self._held(device, request, "freed"):
            assert device is not None
            if known.id in device.moving():
                self.met("a block is freed while it is moved")
            del device.blocks[known.id]

    def _changed(self, request: ChangeBlocks, _: object) -> None:
        device, change = self._device(request), request.change
        for known in self._held(device, request, f"changed by {change}"):
            assert device is not None
            if change == "pin" and known.id in device.moving():
                self.violated(Promise.PINNED, f"{known} is pinned while it is moved")
            if (change, known.status) == ("cache", BlockStatus.PINNED):
                self.violated(Promise.PINNED, f"{known} is marked as cached")
            if (change, known.status) != ("use", BlockStatus.PINNED):
                known.status = STATUS_AFTER.get(change, known.status)
            self.met(f"a block is changed: {change}")

    def _not_changed(self, request: FreeMemory | ChangeBlocks, error: ForgedError) -> None:
        device, name = self._device(request), getattr(error, "block_id", "")
        known = None if device is None else device.blocks.get(name)
        if device is None or known is None or known.key != key_of(request):
            return
        given = [handle.version for handle in request.handles if f"{request.worker_id}:{handle.name}" == name]
        if error.code == UNKNOWN and not (known.is_cached and self._facts_are_limited):
            self.violated(Promise.KEPT, f"{known} is unknown to {request}")
        elif error.code == STALE and known.version in given:
            self.violated(Promise.HANDLES, f"{known} is stale to {request}")
        elif error.code == STATUS and known.status is BlockStatus.ALLOCATED:
            self.violated(Promise.HANDLES, f"{known} cannot be changed by {request}")
        elif error.code == MOVING and device.plan is None:
            self.violated(Promise.MOVES, f"{known} moves without a plan, says {error.message}")

    # Compaction.

    def _plan_opened(self, device: KnownDevice, fact: CompactionPlanned) -> None:
        self.met("a compaction is planned")
        if device.plan is not None or (device.last_plan is not None and fact.epoch <= device.last_plan.epoch):
            self.violated(Promise.FACTS, f"{fact} is planned after {device.plan or device.last_plan}")
        device.plan = KnownPlan(fact.epoch, self.now())
        if " waits for " in fact.reason:
            self.met("a compaction is planned for a request that waits")
            device.favoured.append(fact.reason.partition(" ")[0])

    def _plan_ended(self, device: KnownDevice, fact: CompactionEnded) -> None:
        plan = device.plan
        if plan is None or plan.epoch != fact.epoch:
            self.violated(Promise.FACTS, f"{fact} ends {plan}")
            return
        device.plan, device.last_plan = None, plan
        if fact.expired:
            self.met("a plan expires partly executed" if fact.committed else "a plan expires")
        elif fact.committed:
            self.met("a plan is executed")
        self._claims.add(
            Promise.FACTS,
            lambda: f"{fact} ends {plan}" if fact.committed != len(plan.done) else "",
        )

    def _planned(self, request: PlanCompaction, plan: CompactionPlan) -> None:
        device = self._device(request)
        if device is None:
            return
        is_open = plan.expires_in_s > 0
        if is_open and (device.plan is None or device.plan.epoch != plan.epoch):
            self.violated(Promise.FACTS, f"{plan} is open, and by the facts {device.plan}")
            return
        if is_open and self._is_asserting(device):
            self.violated(Promise.ASSERTED, f"{plan} is open while {device.name} waits for owners of blocks")
        if plan.bytes != sum(move.size for move in plan.moves):
            self.violated(Promise.LISTED, f"{plan} has other bytes")
        for move in plan.moves:
            self._judge_move(device, move)
            if is_open and device.plan is not None:
                device.plan.moves[move.number] = move

    def _judge_move(self, device: KnownDevice, move: Move) -> None:
        known = device.blocks.get(id_of(move))
        if known is None:
            if self._is_exact(device):
                self.violated(Promise.MOVES, f"{move} is of no block")
        elif not known.is_at(move.source, move.size, move.handle.version):
            self.violated(Promise.MOVES, f"{move} is not of {known}")
        elif known.status is BlockStatus.PINNED:
            self.violated(Promise.PINNED, f"{move} is of {known}")
        if move.overlaps or abs(move.source - move.destination) < move.size:
            self.violated(Promise.MOVES, f"{move} overlaps its source")

    def _committed(self, request: CommitMove, handle: Handle) -> None:
        device = self._device(request)
        plan = None if device is None else device.plan or device.last_plan
        if device is None or plan is None or plan.epoch != request.epoch or request.number not in plan.moves:
            self.violated(Promise.MOVES, f"{request} commits nothing that was planned")
        elif request.number not in plan.done:
            move, first = plan.moves[request.number], plan.moves.get(plan.moves[request.number].after)
            if first in device.open_moves():
                self.violated(Promise.MOVES, f"{move} is committed before {first}")
            plan.done[request.number] = handle
            self._moved(device, move, handle)
        else:
            self.met("a move is committed again")
            if plan.done[request.number] != handle:
                self.violated(Promise.MOVES, f"{request} is answered by {handle}, and was by {plan.done}")

    def _not_committed(self, request: CommitMove, error: ForgedError) -> None:
        """A commit that was executed is answered again, until the next plan, as long as the block is where it moved."""
        device = self._device(request)
        plan = None if device is None else device.plan or device.last_plan
        if device is None or plan is None or plan.epoch != request.epoch or self._is_gone(key_of(request)):
            return
        handle = plan.done.get(request.number)
        known = None if handle is None else device.blocks.get(f"{request.worker_id}:{handle.name}")
        if known is None or handle is None or known.version != handle.version or known.key != key_of(request):
            return
        if not (known.is_cached and self._facts_are_limited):
            self.violated(Promise.MOVES, f"{request} is refused, and {known} has moved: {error.message}")

    def _moved(self, device: KnownDevice, move: Move, handle: Handle) -> None:
        known = device.blocks.get(id_of(move))
        if (known is None and device.may_have_more()) or self._gave_way_now(device, id_of(move)):
            return
        if known is None or not known.is_at(move.source, move.size, handle.version - 1):
            self.violated(Promise.MOVES, f"{move} is committed of {known}")
            return
        if known.status is BlockStatus.PINNED:
            self.violated(Promise.PINNED, f"{known} is moved")
        del device.blocks[known.id]
        known.offset, known.version = move.destination, handle.version
        self.met("a move is committed")
        self._enter(device, known, "moved to")


def _as_known(key: Key, held: HeldBlock) -> KnownBlock:
    block = held.block
    return KnownBlock(key, held.handle.name, block.offset, block.size, held.handle.version, block.status)


def key_of(request: Any) -> Key:
    """The worker in whose name a request is."""
    return request.job, request.worker_id, request.incarnation
