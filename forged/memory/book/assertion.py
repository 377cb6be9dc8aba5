"""Blocks that workers assert after a restart of the daemon.

Invariants:
- A page is entered whole or refused whole, and a refusal names every block that is refused, up to a limit.
- No cached block is entered: it may have given way before the restart, and its content be overwritten.
- Only blocks of the process that has the device are entered.
- Only a worker that was registered when the daemon started can assert blocks that the daemon does not know, and only as
  long as the daemon has given away nothing of the device.
"""

from __future__ import annotations

from msgspec.structs import replace

from forged.errors import ForgedError
from forged.memory.book import refusals
from forged.memory.book.allocation import require_content
from forged.memory.book.device import COUNT_BITS, PROCESS_BITS, Device, Moment, Owner, same_place
from forged.memory.book.device_table import SIZE_MAX, DeviceTable
from forged.memory.errors import argument_invalid
from forged.memory.messages import BATCH_MAX, AssertBlocks, Handle, HeldBlock
from forged.memory.model import ALIGNMENT_DEFAULT, BlockStatus, MemoryBlock
from forged.memory.pool.blocks import Block

VERSION_MAX = 1 << (PROCESS_BITS + COUNT_BITS)


class Assertion:
    """The blocks that the daemon has forgotten."""

    def __init__(self, table: DeviceTable) -> None:
        self._table = table

    def assert_blocks(self, request: AssertBlocks, owner: Owner, now: Moment) -> list[Handle]:
        """The handles of the blocks that the daemon has from now on: cached ones that it forgot have given way."""
        device = self._table.device(request.job, request.device)
        refusals.require_between("blocks", len(request.blocks), 0, BATCH_MAX)
        refusals.require_between("elsewhere", len(request.elsewhere), 0, self._table.limits.devices_max)
        entered, handles, reasons = list[Block](), list[Handle](), list[str]()
        for held in request.blocks:
            try:
                block, is_new = self._enter(device, owner, held, now)
            except ForgedError as error:
                reasons.append(f"{held.handle.name[: refusals.NAME_CHARS_MAX]}: {error.message}")
                continue
            if block is None:
                continue
            handles.append(owner.handle(block))
            if is_new:
                entered.append(block)
        holder = owner.holder
        if not reasons and not self._table.block_shares.fits(holder, len(entered)):
            reasons.append(self._table.block_shares.shortage(holder))
        if reasons:
            for block in entered:
                device.core.free(block.block_id)
            raise refusals.assertion_refused(device.name, reasons)
        self._table.entered(device, entered, owner)
        if not request.more:
            self._table.asserted(device, owner, request.elsewhere, now)
        return handles

    def _enter(self, device: Device, owner: Owner, held: HeldBlock, now: Moment) -> tuple[Block | None, bool]:
        """The block, and whether the daemon did not know it; None if it has given way."""
        name, asserted = held.handle.name, held.block
        refusals.require_name("name", name)
        require_content(held.content, held.reload_s)
        refusals.require_between("version", held.handle.version, 1, VERSION_MAX)
        refusals.require_between("size", asserted.size, 1, SIZE_MAX)
        if asserted.status is BlockStatus.FREE:
            raise argument_invalid("status", asserted.status, "that of a block that is held")
        known = device.core.find(owner.block_id(name))
        if known is not None:
            if not same_place(known, held):
                found = f"{known.size} bytes at {known.offset}, version {known.version}"
                raise argument_invalid("block", name, f"as the daemon knows it ({found})")
            return known, False
        if held.worker_id not in ("", owner.worker_id):
            raise argument_invalid("worker_id", held.worker_id, f"{owner.worker_id}, which asserts it")
        if not self._table.may_assert(device, owner):
            raise argument_invalid("block", name, "one that was allocated; the daemon has none of this name")
        if not device.is_version(held.handle.version):
            raise argument_invalid("version", held.handle.version, "that of a block of the process that has the device")
        if asserted.status is BlockStatus.CACHED:
            # A block that gets its name anew, perhaps at the same offset, has another handle.
            device.core.first_version = max(device.core.first_version, held.handle.version + 1)
            return None, False
        block = device.core.claim(
            _as_claimed(owner, held, now),
            version=held.handle.version,
            owner=owner.worker_id,
            alignment=min(asserted.offset & -asserted.offset or ALIGNMENT_DEFAULT, ALIGNMENT_DEFAULT),
            content=held.content,
            reload_s=held.reload_s,
        )
        return block, True


def _as_claimed(owner: Owner, held: HeldBlock, now: Moment) -> MemoryBlock:
    """The block as the worker has it; no time of it is later than now."""
    block = held.block
    return replace(
        block,
        block_id=owner.block_id(held.handle.name),
        allocated_at=min(block.allocated_at, now.wall),
        last_accessed=min(block.last_accessed, now.wall),
    )
