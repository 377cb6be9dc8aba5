"""What keeps a checkpoint besides the retention policy."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from forged.catalog import errors
from forged.catalog.book.changes import Change, decided
from forged.catalog.book.checkpoint_table import CheckpointTable
from forged.catalog.messages import HoldCheckpoint, PinCheckpoint, ReleaseCheckpoint, UnpinCheckpoint
from forged.catalog.model import CheckpointMeta
from forged.catalog.records import HOLD_S_MAX, HOLDS_MAX, CheckpointRecord, Moment, checked_holder, checked_seconds
from forged.kernel.messages import Decision, Nothing


class Holds:
    """What keeps a checkpoint besides the retention policy: pins, and holds of readers, which end by themselves."""

    def __init__(self, table: CheckpointTable) -> None:
        self._table = table
        self._ends_at: dict[str, dict[str, float]] = {}
        """When each hold ends, by checkpoint and holder."""

    def load(self, now: Moment) -> None:
        """Keep what the table says: the times begin anew."""
        held = (one for one in self._table.records.values() if one.holds)
        self._ends_at = {one.id: {name: now.monotonic + held_s for name, held_s in one.holds.items()} for one in held}

    def pin(self, request: PinCheckpoint | UnpinCheckpoint, *, is_pinned: bool) -> Decision[CheckpointMeta]:
        record = self._table.record(request.job, request.checkpoint_id)
        meta = self._table.index.pin(record.id) if is_pinned else self._table.index.unpin(record.id)
        return decided(meta, request.job, self._table.put(msgspec.structs.replace(record, meta=meta)))

    def hold(self, request: HoldCheckpoint, now: Moment) -> Decision[Nothing]:
        """Keep a checkpoint while it is read, or keep it longer."""
        record = self._table.record(request.job, request.checkpoint_id)
        holder = checked_holder(request.holder)
        held_s = checked_seconds("seconds", request.seconds, HOLD_S_MAX)
        if holder not in record.holds and len(record.holds) >= HOLDS_MAX:
            raise errors.argument_invalid("holder", holder, f"one of at most {HOLDS_MAX} of a checkpoint")
        meta = self._table.index.hold(record.id, holder)
        self._ends_at.setdefault(record.id, {})[holder] = now.monotonic + held_s
        if record.holds.get(holder) == held_s:
            # Only extended: after a restart it counts anew in any case.
            return Decision(Nothing())
        held = msgspec.structs.replace(record, meta=meta, holds={**record.holds, holder: held_s})
        return decided(Nothing(), request.job, self._table.put(held))

    def release(self, request: ReleaseCheckpoint) -> Decision[Nothing]:
        record = self._table.record(request.job, request.checkpoint_id)
        if request.holder not in record.holds:
            return Decision(Nothing())
        return decided(Nothing(), request.job, self._release(record, request.holder))

    def release_expired(self, now: Moment) -> Iterator[Decision[None]]:
        """Release the holds whose time is over."""
        expired = [
            (checkpoint_id, holder)
            for checkpoint_id, holds in self._ends_at.items()
            for holder, ends_at in holds.items()
            if ends_at <= now.monotonic
        ]
        for checkpoint_id, holder in expired:
            record = self._table.records[checkpoint_id]
            yield decided(None, record.job, self._release(record, holder))

    def _release(self, record: CheckpointRecord, holder: str) -> Change:
        meta = self._table.index.release(record.id, holder)
        holds = self._ends_at.get(record.id, {})
        holds.pop(holder, None)
        if not holds:
            self._ends_at.pop(record.id, None)
        left = {one: held_s for one, held_s in record.holds.items() if one != holder}
        return self._table.put(msgspec.structs.replace(record, meta=meta, holds=left))

    def forget(self, checkpoint_id: str) -> None:
        """A deleted checkpoint is held by no reader."""
        self._ends_at.pop(checkpoint_id, None)
