"""The records of all checkpoints of all jobs, by id, path and folder, and what the daemon may touch.

Invariants:
- The files of a checkpoint are identified by their path, their save id and the job that their manifest names, and
  belong to one record. A job that names the path or the save of another job keeps that job from nothing.
- Every change of a record is a `Change`, for the decision that makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from forged.catalog import errors
from forged.catalog.book.changes import Change
from forged.catalog.catalog_index import CatalogIndex
from forged.catalog.messages import CheckpointOperationFailed, CheckpointRepaired
from forged.catalog.model import CheckpointMeta, CheckpointState
from forged.catalog.ports import CheckpointLocation
from forged.catalog.records import RECORD_OVERHEAD_BYTES, CheckpointRecord, Moment, decoded, encoded, root_of
from forged.errors import RequestRefused
from forged.kernel.messages import Fact
from forged.shares import Shares

PARTS = 16
"""One part of the catalogue is left to operators, and four to principals other than the largest."""
REFUSED_CHARS_MAX = 200
DELETING = "deleting"


class CheckpointTable:
    """The records of all checkpoints, and the index of them."""

    def __init__(self, index: CatalogIndex, roots: tuple[str, ...], bytes_max: int) -> None:
        self.roots = roots
        """Beneath these the daemon may touch files, also if an untrusted principal has named them."""
        self.index = index
        self.records: dict[str, CheckpointRecord] = {}
        """By id; tombstones too."""
        self._at: dict[tuple[str, str], dict[str, str]] = {}
        """The id of each checkpoint and tombstone, by job and path, and by save id."""
        self._named: dict[tuple[str, str], dict[str, str]] = {}
        """The same, by path and save id, and by job."""
        self._deleted_in: dict[str, dict[str, None]] = {}
        """The ids of the tombstones in each folder."""
        self._cost: dict[str, int] = {}
        self._shares = Shares("catalogue bytes", 0)
        self.set_bytes_max(bytes_max)

    def load(self, values: Iterable[bytes]) -> None:
        """Replace all records by what the store holds; the index is loaded when the policies are."""
        for checkpoint_id, cost in self._cost.items():
            self._shares.give_back(self.records[checkpoint_id].holder, cost)
        for table in (self.records, self._deleted_in, self._at, self._named, self._cost):
            table.clear()
        for value in values:
            self._remember(decoded(value), len(value))

    def set_bytes_max(self, bytes_max: int) -> None:
        part = bytes_max // PARTS
        self._shares.resize(bytes_max, part, bytes_max - 4 * part)

    def record(self, job: str, checkpoint_id: str) -> CheckpointRecord:
        """The record of a checkpoint or tombstone of the job, or a refusal."""
        record = self.records.get(checkpoint_id)
        if record is None or record.job != job:
            raise errors.unknown(checkpoint_id)
        return record

    def record_at(self, job: str, path: str, save_id: str = "") -> CheckpointRecord | None:
        """The checkpoint or tombstone of a job with this path and save id; without a save id the newest at the path."""
        if not save_id:
            return self.records.get(self.id_at(job, path) or "")
        meta = self.checkpoint_at(job, path, save_id)
        return None if meta is None else self.records[meta.checkpoint_id]

    def checkpoint_at(self, job: str, path: str, save_id: str) -> CheckpointMeta | None:
        """The checkpoint of a job with this path and save id."""
        record = self.records.get(self._at.get((job, path), {}).get(save_id, ""))
        return None if record is None else record.meta

    def has_complete(self, job: str, name: str) -> bool:
        """Whether a job has a complete checkpoint of this id or storage path."""
        record = self.records.get(name)
        if record is None or record.job != job:
            record = self.record_at(job, name)
        return record is not None and record.meta.state is CheckpointState.COMPLETE

    def known(self, job: str, path: str, save_id: str, files_job: str) -> CheckpointRecord | None:
        """The job's checkpoint of this path and save id; refused if the files are those of another job's."""
        named = self._named.get((path, save_id), {})
        if job in named:
            return self.records[named[job]]
        if any(self.records[other].files_job == files_job for other in named.values()):
            raise RequestRefused(
                "checkpoint_path_taken",
                f"checkpoint {path[:REFUSED_CHARS_MAX]!r} is in the catalogue of another job",
                "delete it there, or remove that job, first",
            )
        return None

    def id_at(self, job: str, path: str) -> str | None:
        """The newest checkpoint of a job at a path; none builds on a save that has failed and was deleted."""
        newest_first = map(self.records.__getitem__, reversed(self._at.get((job, path), {}).values()))
        return next((one.id for one in newest_first if not one.is_deleted or one.meta.storage_path), None)

    def tombstones(self) -> Iterator[CheckpointRecord]:
        """The deleted checkpoints whose files may still be there, in the order of deletion."""
        return (self.records[checkpoint_id] for checkpoint_id in self.index.tombstones)

    def tombstones_in(self, folder: str) -> Iterator[CheckpointRecord]:
        """The deleted checkpoints of a folder whose files may still be there."""
        return map(self.records.__getitem__, self._deleted_in.get(folder, ()))

    # What the daemon may touch.

    def is_managed(self, record: CheckpointRecord) -> bool:
        """Whether the daemon may read and delete its files."""
        return record.is_trusted or root_of(record.path, self.roots, record.job) is not None

    def location(self, record: CheckpointRecord) -> CheckpointLocation:
        """Where a managed checkpoint is, and what its manifest must say."""
        root = None if record.is_trusted else root_of(record.path, self.roots, record.job)
        return CheckpointLocation(record.path, record.save_id, record.files_job, root)

    def is_disputed(self, record: CheckpointRecord) -> bool:
        """Whether another job has a managed checkpoint of this path and save id: only a manifest says whose it is."""
        named = map(self.records.__getitem__, self._named.get((record.path, record.save_id), {}).values())
        return any(one.job != record.job and not one.is_deleted and self.is_managed(one) for one in named)

    # Changes that several parts make.

    def with_parent(self, record: CheckpointRecord, parent_path: str) -> CheckpointRecord:
        """The record of a checkpoint that builds on the one at this path; on none if the path is empty."""
        meta = self.index.set_parent(record.id, self.id_at(record.job, parent_path))
        return msgspec.structs.replace(record, meta=meta)

    def keep_parents(self, child: CheckpointMeta) -> list[Change]:
        """Take back the deletion of what a complete checkpoint builds on: no files go that a manifest names."""
        changes: list[Change] = []
        parent = self.records.get(child.parent_id or "")
        while parent is not None and parent.is_deleted:
            meta = self.index.revive(parent.id)
            why = f"{child.checkpoint_id} builds on it, and was saved meanwhile"
            fact = CheckpointOperationFailed(meta.checkpoint_id, meta.step, DELETING, why)
            changes.append(self.put(msgspec.structs.replace(parent, meta=meta), fact))
            child, parent = meta, self.records.get(meta.parent_id or "")
        return changes

    def repaired(self, record: CheckpointRecord, now: Moment) -> Change:
        """All bytes of a corrupted checkpoint are correct again."""
        meta = self.index.mark_repaired(record.id, now.wall)
        repaired = CheckpointRepaired(record.id, meta.step)
        return self.put(msgspec.structs.replace(record, meta=meta, note=""), repaired)

    # Records.

    def require_room(self, record: CheckpointRecord) -> None:
        cost = RECORD_OVERHEAD_BYTES + len(encoded(record))
        if not self._shares.fits(record.holder, cost):
            raise RequestRefused(
                "catalogue_full",
                self._shares.shortage(record.holder),
                "set a retention policy, remove jobs that are over, or raise catalog_bytes_max",
            )

    def put(self, record: CheckpointRecord, fact: Fact | None = None) -> Change:
        value = encoded(record)
        if record.id in self._cost:
            self._shares.give_back(record.holder, self._cost[record.id])
        self._remember(record, len(value))
        return Change(record.key, value, fact)

    def forget(self, record: CheckpointRecord) -> Change:
        del self.records[record.id]
        self._shares.give_back(record.holder, self._cost.pop(record.id))
        for table, key, place in (
            (self._at, (record.job, record.path), record.save_id),
            (self._named, (record.path, record.save_id), record.job),
        ):
            del table[key][place]
            if not table[key]:
                del table[key]
        self._forget_tombstone(record)
        self.index.forget(record.id)
        return Change(record.key, None)

    def _remember(self, record: CheckpointRecord, size: int) -> None:
        self.records[record.id] = record
        self._at.setdefault((record.job, record.path), {})[record.save_id] = record.id
        self._named.setdefault((record.path, record.save_id), {})[record.job] = record.id
        if record.is_deleted:
            self._deleted_in.setdefault(record.folder, {})[record.id] = None
        else:
            self._forget_tombstone(record)
        cost = self._cost[record.id] = RECORD_OVERHEAD_BYTES + size
        self._shares.charge(record.holder, cost)

    def _forget_tombstone(self, record: CheckpointRecord) -> None:
        in_folder = self._deleted_in.get(record.folder)
        if in_folder is not None:
            in_folder.pop(record.id, None)
            if not in_folder:
                del self._deleted_in[record.folder]
