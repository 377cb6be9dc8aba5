"""Keeps the ownership of all jobs durable: datasets, the plans of attempts, committed assignments, suspect copies.

Invariants:
- The plan of an attempt is stored before any member is told of it, so a daemon that restarts around the commit knows
  what was agreed. It is deleted when its commit can no longer arrive.
- Stored data that cannot be read is dropped, because workers offer anew what they hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from forged.data.messages import DatasetDefined, DatasetSpec
from forged.data.ownership.attempt import Assignment
from forged.data.ownership.ownership import ShardOwnership
from forged.data.ownership.records import (
    PREFIX,
    Restored,
    dataset_write,
    holders_write,
    job_of,
    keys_of,
    piece_writes,
    restored,
    suspect_writes,
)
from forged.errors import PeerError, RequestRefused
from forged.kernel.bus import Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Decision
from forged.kernel.store.port import Store
from forged.log import Log

OWNER = "data"
KEYS_PER_WRITE_MAX = 40
"""A transaction has a limited number of operations."""


class OwnershipStore:
    """The ownership of all jobs, in memory and in the store."""

    def __init__(self, bus: Bus, log: Log) -> None:
        self.jobs: dict[str, ShardOwnership] = {}
        self._bus = bus
        self._log = log
        self._committed: dict[str, int] = {}
        """The attempt behind the current assignment, by job."""
        self._newest_commit: dict[str, int] = {}
        """The newest generation whose commit was processed, by job."""
        self._planned: defaultdict[str, dict[int, Assignment]] = defaultdict(dict)
        """The stored plans that may yet be committed."""
        self._unused: dict[str, None] = {}
        """Keys that are to be deleted."""

    async def load(self, store: Store) -> None:
        """Become what the store holds."""
        entries: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        for entry in await read_all(store, PREFIX):
            entries[job_of(entry.key)].append((entry.key, entry.value))
        for table in (self.jobs, self._committed, self._newest_commit, self._planned, self._unused):
            table.clear()
        for job, found in entries.items():
            known = self._restored(job, found)
            if known is None:
                self._unused.update(dict.fromkeys(key for key, _ in found))
                continue
            self.jobs[job], self._planned[job] = known.ownership, dict(known.planned)
            self._unused.update(dict.fromkeys(known.unused))
            self._newest_commit[job] = known.ownership.assignment.generation
            if known.attempt:
                self._committed[job] = known.attempt

    def _restored(self, job: str, entries: list[tuple[str, bytes]]) -> Restored | None:
        try:
            return restored(job, entries)
        except PeerError as error:
            self._log.error("stored shard assignment is unreadable and was discarded", job=job, reason=error.message)
            return None

    def ownership(self, job: str) -> ShardOwnership:
        """The ownership of a job; refused if the job or its dataset does not exist."""
        ownership = self.jobs.get(job)
        if ownership is not None:
            return ownership
        self._bus.dispatcher.require_job(job)
        raise RequestRefused(
            "job_without_data", f"job {job[:80]!r} has no dataset", "start its workers with `data=` (docs/data.md)"
        )

    def define(self, job: str, dataset: DatasetSpec, attempt: int, generation: int, cause: int) -> ShardOwnership:
        """Give a job its first dataset, or another one if no world has used the first."""
        ownership, former = ShardOwnership(job, dataset), self.jobs.get(job)
        if former is not None:
            ownership.inherit(former)
            self.write(self.suspect_changes(former))
            self._forget_plans(job, attempt)
        self.jobs[job] = ownership
        defined = Decision(
            None, (DatasetDefined(dataset),), dataset_write(job, dataset), job, generation=generation, cause=cause
        )
        self._bus.ledger.append(defined, origin=OWNER)
        return ownership

    def keep_plan(self, job: str, attempt: int, assignment: Assignment, generation: int) -> None:
        """Store the plan of an attempt; `generation` is that of the world before it.

        Older plans are deleted, unless the commit that led to that world was not processed here yet.
        """
        if self._newest_commit.get(job, 0) >= generation:
            self._forget_plans(job, attempt)
        self._planned[job][attempt] = assignment
        pieces = piece_writes(job, attempt, assignment)
        while part := dict(islice(pieces, KEYS_PER_WRITE_MAX)):
            self.write(dict(part))
        self.write(holders_write(job, attempt, assignment))

    def commit(self, job: str, attempt: int, generation: int) -> dict[str, bytes | None]:
        """Make the plan of an attempt the current assignment; returns the writes for the caller's decision."""
        ownership = self.jobs.get(job)
        if ownership is None:
            return {}
        self._newest_commit[job] = max(generation, self._newest_commit.get(job, 0))
        planned = self._planned[job].pop(attempt, None)
        if planned is None:
            return {}
        self._forget_plans(job, attempt)
        held = replace(planned, generation=generation)
        before, former = self._committed.get(job), ownership.assignment
        ownership.assignment, self._committed[job] = held, attempt
        ownership.full.clear()
        if before is not None and before != attempt:
            self._forget(job, before, former)
        return holders_write(job, attempt, held)

    def remove(self, job: str) -> None:
        """Delete everything that is stored of a job."""
        ownership = self.jobs.pop(job, None)
        if ownership is None:
            return
        self.write(dict.fromkeys(dataset_write(job, ownership.dataset)))
        plans = self._planned.pop(job, {})
        self._newest_commit.pop(job, None)
        committed = self._committed.pop(job, None)
        if committed is not None:
            plans[committed] = ownership.assignment
        for attempt, assignment in plans.items():
            self._forget(job, attempt, assignment)
        ownership.suspects.keep_holders(())
        self.write(self.suspect_changes(ownership))
        self.delete_unused()

    def suspect_changes(self, ownership: ShardOwnership) -> dict[str, bytes | None]:
        """The unstored changes of suspect copies; all beyond one decision's limit are written at once."""
        writes = suspect_writes(ownership.job, ownership.suspects.take_changes())
        while len(writes) > KEYS_PER_WRITE_MAX:
            self.write({key: writes.pop(key) for key in list(islice(writes, KEYS_PER_WRITE_MAX))})
        return writes

    def write(self, writes: dict[str, bytes | None]) -> None:
        if writes:
            self._bus.ledger.append(Decision(None, writes=writes), origin=OWNER)

    def delete_unused(self) -> None:
        """Delete the keys that no record names."""
        unused, self._unused = list(self._unused), {}
        self._delete(unused)

    def _forget_plans(self, job: str, before: int) -> None:
        planned = self._planned[job]
        for older in [number for number in planned if number < before]:
            self._forget(job, older, planned.pop(older))

    def _forget(self, job: str, attempt: int, assignment: Assignment) -> None:
        self._delete(keys_of(job, attempt, assignment.owners.size, 1 + len(assignment.replicas)))

    def _delete(self, keys: list[str]) -> None:
        for part in _parts(keys):
            self.write(dict.fromkeys(part))


def _parts(keys: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(keys), KEYS_PER_WRITE_MAX):
        yield keys[start : start + KEYS_PER_WRITE_MAX]
