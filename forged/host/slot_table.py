"""The slots of all workers, with their owners, and which of them are no longer needed.

Invariants:
- Neither the number of all slots nor their bytes exceed the limits, nor those of one principal or job its share.
- A worker that is present keeps the slots that it has opened last.
- The newest save that all ranks have staged is kept, also when its workers are gone, until a newer one or a checkpoint
  on disk supersedes it, or `LEFT_S` after all of them have left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from forged.errors import RequestRefused
from forged.host.model import SlotContents, SlotOwner, SlotRecord, StagedCheckpoint
from forged.shares import Holder, Shares

SLOTS_PER_WORKER = 2
WORKER_SLOTS_MAX = 8
"""Those that a worker has replaced by larger ones are freed a little later."""
LEFT_S = 60.0
"""How long the slots of workers that have left are kept: their last save may still be asked for."""
BYTES, NUMBER = "bytes of slots", "slots"


class SlotLimits(NamedTuple):
    """The limits of all slots, and of those of one principal or job."""

    bytes_max: int
    principal_bytes_max: int
    slots_max: int
    principal_slots_max: int


class SlotTable:
    """The slots of all jobs."""

    def __init__(self, limits: SlotLimits) -> None:
        self.limits = limits
        self.load([])

    def set_limits(self, limits: SlotLimits) -> None:
        """Change the limits. Slots that exceed them stay until they are freed."""
        self.limits = limits
        self.shares.resize(limits.bytes_max, 0, limits.principal_bytes_max)
        self._numbers.resize(limits.slots_max, 0, limits.principal_slots_max)

    def load(self, records: Iterable[SlotRecord]) -> None:
        """Replace all slots."""
        self.records: dict[str, SlotRecord] = {}
        self.shares, self._numbers = Shares(BYTES, 0), Shares(NUMBER, 0)
        self.add(records)
        self.set_limits(self.limits)

    # Questions.

    def of_job(self, job: str) -> list[SlotRecord]:
        return [record for record in self.records.values() if record.job == job]

    def of_worker(self, job: str, worker_id: str, incarnation: bytes) -> list[SlotRecord]:
        """The slots of a worker, those that it has opened last at the end."""
        found = (one for one in self.of_job(job) if (one.worker_id, one.incarnation) == (worker_id, incarnation))
        return sorted(found, key=lambda record: record.opened_at)

    def newest_of(self, job: str, worker_id: str, incarnation: bytes) -> list[SlotRecord]:
        """The slots that a worker uses: those that it has opened last."""
        return self.of_worker(job, worker_id, incarnation)[-SLOTS_PER_WORKER:]

    def jobs_to_look_after(self) -> set[str]:
        """The jobs with slots that may have to be saved or freed: of workers that are gone, or replaced by others."""
        counts = Counter((one.job, one.worker_id, one.incarnation) for one in self.records.values())
        ended = {record.job for record in self.records.values() if record.owner is not SlotOwner.PRESENT}
        return ended | {job for (job, _, _), count in counts.items() if count > SLOTS_PER_WORKER}

    # Changes.

    def require_room(self, holder: Holder, size_bytes: int) -> None:
        """Refuse slots that do not fit into the limits."""
        if not self._numbers.fits(holder, SLOTS_PER_WORKER):
            is_full = self._numbers.used + SLOTS_PER_WORKER > self.limits.slots_max
            setting = "slots_max" if is_full else "principal_slots_max"
            raise RequestRefused(
                "slots_full",
                f"two more slots do not fit; {self._numbers.shortage(holder)}",
                f"raise {setting}; until then the worker stages into its own memory",
            )
        wanted = SLOTS_PER_WORKER * size_bytes
        if not self.shares.fits(holder, wanted):
            raise RequestRefused(
                "slots_full",
                f"two slots of {size_bytes} bytes do not fit; {self.shares.shortage(holder)}",
                "raise slot_bytes_max or principal_slot_bytes_max; until then the worker stages into its own memory",
            )

    def require_few(self, job: str, worker_id: str, incarnation: bytes) -> None:
        """Refuse further slots of a worker that opens them faster than those it has replaced are freed."""
        count = len(self.of_worker(job, worker_id, incarnation))
        if count + SLOTS_PER_WORKER > WORKER_SLOTS_MAX:
            raise RequestRefused(
                "slots_full",
                f"worker {worker_id} of job {job} has {count} slots; limit {WORKER_SLOTS_MAX}",
                "wait until the slots that it has replaced are freed, or open larger ones at once (size_bytes)",
            )

    def add(self, records: Iterable[SlotRecord]) -> None:
        for record in records:
            self.records[record.slot_id] = record
            self.shares.charge(record.holder, record.size_bytes)
            self._numbers.charge(record.holder, 1)

    def remove(self, slot_ids: Iterable[str]) -> None:
        """Forget slots; ignores unknown ones."""
        for slot_id in slot_ids:
            record = self.records.pop(slot_id, None)
            if record is not None:
                self.shares.give_back(record.holder, record.size_bytes)
                self._numbers.give_back(record.holder)

    def end(
        self, job: str, owner: SlotOwner, at: float, cause: int, is_ended: Callable[[SlotRecord], bool]
    ) -> list[SlotRecord]:
        """Record that owners of slots have failed or left; returns the changed records."""
        changed = [
            replace(record, owner=owner, ended_at=at, cause=cause)
            for record in self.of_job(job)
            if record.owner is SlotOwner.PRESENT and is_ended(record)
        ]
        self.records.update((record.slot_id, record) for record in changed)
        return changed

    def superseded(
        self, job: str, contents: Sequence[SlotContents], durable_step: int | None, now: float
    ) -> Iterator[SlotRecord]:
        """The slots of a job that are needed no more."""
        records = self.of_job(job)
        used = {
            one.slot_id
            for record in records
            if record.owner is SlotOwner.PRESENT
            for one in self.newest_of(job, record.worker_id, record.incarnation)
        }
        sets = staged_checkpoints(contents)
        if sets and (durable_step is None or durable_step < sets[0].step):
            used |= self._kept(sets[0], now)
        return (record for record in records if record.slot_id not in used)

    def _kept(self, staged: StagedCheckpoint, now: float) -> set[str]:
        """The slots of the newest save, unless all their workers have left some time ago."""
        owners = [self.records[slot_id] for slot_id in staged.slot_ids if slot_id in self.records]
        has_left = all(record.owner is SlotOwner.LEFT and now - record.ended_at >= LEFT_S for record in owners)
        return set() if has_left else set(staged.slot_ids)


def staged_checkpoints(contents: Sequence[SlotContents]) -> list[StagedCheckpoint]:
    """The saves of one job of which the slots of all ranks are whole, newest first."""
    by_save: defaultdict[tuple[str, int, int], dict[int, SlotContents]] = defaultdict(dict)
    for one in contents:
        by_save[one.save_id, one.generation, one.world_size][one.rank] = one
    complete = [ranks for (_, _, world_size), ranks in by_save.items() if len(ranks) == world_size]
    complete.sort(key=lambda ranks: max(one.age for one in ranks.values()), reverse=True)
    return [
        StagedCheckpoint(
            ranks[0].save_id, ranks[0].step, ranks[0].epoch, tuple(ranks[rank].slot_id for rank in sorted(ranks))
        )
        for ranks in complete
    ]
