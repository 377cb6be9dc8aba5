"""Mutants: deliberate bugs in the catalogue that its simulation must catch.

Each mutant changes one behaviour for one seed, and breaks the promise that is named for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from forged.catalog import retention, selection
from forged.catalog.book.changes import Change, decided, in_decisions
from forged.catalog.book.checkpoint_table import CheckpointTable
from forged.catalog.book.collection import REQUESTED_RULE, CheckpointCollection
from forged.catalog.book.holds import Holds
from forged.catalog.book.saves import Saves
from forged.catalog.catalog_index import CatalogIndex
from forged.catalog.files.file_work import FileWork
from forged.catalog.messages import (
    CheckpointCollected,
    CheckpointCompleted,
    CollectedFiles,
    CompleteCheckpoint,
    CompletedCheckpoint,
    ConfirmDeleted,
    DeleteCheckpoint,
    ReleaseCheckpoint,
)
from forged.catalog.model import CheckpointMeta, CheckpointState, RestoreCriteria
from forged.catalog.ports import FoundCheckpoint
from forged.catalog.records import CheckpointRecord, Moment, decoded
from forged.catalog.retention import RetentionRule
from forged.catalog.run_index import IndexEntry, RunIndex, by_step
from forged.catalog.service import CatalogService
from forged.catalog.settings import JobRetention, retention_of
from forged.elastic.messages import ProgressLost
from forged.errors import RequestRefused
from forged.kernel.messages import Decision, Nothing, Record
from tests.simulation.catalog.oracle import Promise
from tests.simulation.catalog.slot_mutants import SLOT_MUTANTS

Mutant = Callable[[], Any]
_INFINITY = float("inf")


@contextmanager
def delete_before_the_tombstone_is_durable() -> Iterator[None]:
    """Files are deleted as soon as the record in memory is a tombstone."""
    last = CatalogService._last

    def hasty(self: CatalogService, decisions: Sequence[Decision[Any]], job: str) -> Decision[Any]:
        for record in self.book.table.tombstones():
            self.work.delete(record)
        return last(self, decisions, job)

    with patch.object(CatalogService, "_last", hasty):
        yield


@contextmanager
def forget_a_tombstone_before_its_files() -> Iterator[None]:
    """The record is removed first, and then the files are deleted."""
    delete = FileWork._delete

    async def hasty(self: FileWork, record: CheckpointRecord) -> None:
        if record.is_deleted:
            await self._decide(self._book.collection.deleted([record.id])[0]).wait()
            await self._files.delete(self._book.table.location(record))
        else:
            await delete(self, record)

    with patch.object(FileWork, "_delete", hasty):
        yield


@contextmanager
def forget_tombstones_at_restart() -> Iterator[None]:
    """A new daemon does not continue the deletions of the previous one."""
    with patch.object(FileWork, "reload", lambda self: self._queue.clear()):
        yield


@contextmanager
def collect_without_tombstones() -> Iterator[None]:
    """The record of a collected checkpoint is removed at once."""

    def hasty(self: CheckpointCollection, meta: CheckpointMeta, rule: str, reason: str) -> Change:
        fact = CheckpointCollected(meta.checkpoint_id, meta.step, meta.size_bytes, rule, reason)
        return self._table.forget(self._table.records[meta.checkpoint_id])._replace(fact=fact)

    with patch.object(CheckpointCollection, "_tombstone", hasty):
        yield


@contextmanager
def trust_every_path() -> Iterator[None]:
    """The daemon deletes what any worker has named."""
    with patch.object(CheckpointTable, "is_managed", lambda self, record: True):
        yield


def _without_rule(ignored: RetentionRule) -> Any:
    protection = retention.RunVerdicts._protection

    def careless(self: Any, entry: IndexEntry) -> RetentionRule | None:
        rule = protection(self, entry)
        return None if rule is ignored else rule

    return patch.object(retention.RunVerdicts, "_protection", careless)


@contextmanager
def ignore_pins() -> Iterator[None]:
    """A collection deletes pinned checkpoints."""
    with _without_rule(RetentionRule.PINNED):
        yield


@contextmanager
def ignore_holds() -> Iterator[None]:
    """A collection deletes checkpoints that are read."""
    with _without_rule(RetentionRule.HELD):
        yield


@contextmanager
def ignore_models() -> Iterator[None]:
    """A collection deletes checkpoints that models refer to."""
    with patch.object(RunIndex, "is_used", lambda self, entry: bool(entry.meta.holders)):
        yield


@contextmanager
def forget_holds_at_restart() -> Iterator[None]:
    """A new daemon does not know who reads."""

    def forgetful(value: bytes) -> CheckpointRecord:
        record = decoded(value)
        return msgspec.structs.replace(record, holds={}, meta=msgspec.structs.replace(record.meta, holders=()))

    with patch("forged.catalog.book.checkpoint_table.decoded", forgetful):
        yield


@contextmanager
def release_for_all_readers() -> Iterator[None]:
    """The first reader that is done releases the checkpoint for the others too."""
    release = Holds.release

    def careless(self: Holds, request: ReleaseCheckpoint) -> Decision[Nothing]:
        record = self._table.record(request.job, request.checkpoint_id)
        for holder in [one for one in record.holds if one != request.holder]:
            self._release(self._table.records[record.id], holder)
        return release(self, request)

    with patch.object(Holds, "release", careless):
        yield


@contextmanager
def forget_the_parents() -> Iterator[None]:
    """A collection deletes checkpoints that others build on."""
    with patch.object(retention.RunVerdicts, "_keep_parents", lambda self: None):
        yield


@contextmanager
def forget_the_verified_one() -> Iterator[None]:
    """A collection deletes the last verified checkpoint."""
    with _without_rule(RetentionRule.VERIFIED):
        yield


@contextmanager
def forget_the_newest_one() -> Iterator[None]:
    """A collection deletes the newest restorable checkpoint if it is old."""
    with patch.object(RunIndex, "latest_restorable", lambda self: None):
        yield


@contextmanager
def count_nan_as_best() -> Iterator[None]:
    """A metric that is no number is better than all numbers."""
    metric_of = RunIndex._metric_of

    def generous(self: RunIndex, meta: CheckpointMeta) -> float | None:
        metric = metric_of(self, meta)
        return -_INFINITY if metric is None and self.policy.metric_key in meta.metrics else metric

    with patch.object(RunIndex, "_metric_of", generous):
        yield


@contextmanager
def collect_after_the_clock_went_back() -> Iterator[None]:
    """A time before the newest checkpoint's stops no collection."""
    with patch.object(retention, "_is_clock_behind", lambda run, now: False):
        yield


@contextmanager
def collect_half() -> Iterator[None]:
    """A collection deletes only the first of the checkpoints that are to go."""
    collect = CatalogIndex.collect_some

    def lazy(self: CatalogIndex, run_id: str, now: float, most: int) -> Any:
        return collect(self, run_id, now, 1)

    with patch.object(CatalogIndex, "collect_some", lazy):
        yield


@contextmanager
def offer_abandoned() -> Iterator[None]:
    """What training has gone back behind is offered."""

    def generous(run: RunIndex, criteria: RestoreCriteria) -> Iterator[CheckpointMeta]:
        yield from (one.meta for one in sorted(run.ranked, key=by_step, reverse=True) if one.is_restorable)

    with patch.object(selection, "restore_points", generous):
        yield


@contextmanager
def offer_broken_chains() -> Iterator[None]:
    """A complete checkpoint is offered, whatever its parents are."""

    def generous(run: RunIndex, criteria: RestoreCriteria) -> Iterator[CheckpointMeta]:
        complete = (one.meta for one in sorted(run.ranked, key=by_step, reverse=True))
        yield from (one for one in complete if one.state is CheckpointState.COMPLETE and not one.abandoned)

    with patch.object(selection, "restore_points", generous):
        yield


@contextmanager
def offer_the_latest_first() -> Iterator[None]:
    """Restore points come in the order of their creation."""
    restore_points = selection.restore_points

    def by_time(run: RunIndex, criteria: RestoreCriteria) -> Iterator[CheckpointMeta]:
        yield from sorted(restore_points(run, criteria), key=lambda one: one.created_at, reverse=True)

    with patch.object(selection, "restore_points", by_time):
        yield


@contextmanager
def abandon_nothing() -> Iterator[None]:
    """Going back abandons nothing."""
    with (
        patch.object(CatalogIndex, "abandon_after", lambda *_: []),
        patch.object(CatalogIndex, "abandon_beyond", lambda *_: []),
    ):
        yield


@contextmanager
def abandon_too_much() -> Iterator[None]:
    """Going back to a step abandons the checkpoint of that step too."""
    abandon = CatalogIndex.abandon_after

    def generous(self: CatalogIndex, run_id: str, step: int, *is_later: Any) -> list[CheckpointMeta]:
        return abandon(self, run_id, step - 1, *is_later)

    with patch.object(CatalogIndex, "abandon_after", generous):
        yield


@contextmanager
def abandon_by_the_clock() -> Iterator[None]:
    """What has a later time than the fact is spared, also if the clock went back after it was saved."""

    def trusting(self: CatalogService, record: Record) -> Decision[None] | None:
        fact, book = record.fact, self.book
        assert isinstance(fact, ProgressLost)

        def is_later(checkpoint_id: str) -> bool:
            return book.table.records[checkpoint_id].meta.created_at > record.at

        changed = {one.checkpoint_id: one for one in book.table.index.abandon_after(record.job, fact.step, is_later)}
        return self._last(in_decisions(None, record.job, book.restores._abandoned(fact.step, "", changed)), record.job)

    with patch.object(CatalogService, "_progress_lost", trusting):
        yield


@contextmanager
def forget_that_progress_was_lost() -> Iterator[None]:
    """Only restores abandon checkpoints."""

    def deaf(self: CatalogService, record: Record) -> None:
        return

    with patch.object(CatalogService, "_progress_lost", deaf):
        yield


@contextmanager
def complete_without_looking() -> Iterator[None]:
    """A checkpoint whose writer is gone is completed, whether or not its manifest is there."""

    async def trusting(self: FileWork, record: CheckpointRecord) -> None:
        if record.is_being_written:
            for decision in self._book.saves.found(record.id, FoundCheckpoint(1, ""), self._now()):
                await self._decide(decision).wait()

    with patch.object(FileWork, "_find", trusting):
        yield


@contextmanager
def complete_with_the_base_as_parent() -> Iterator[None]:
    """A checkpoint whose writer is gone builds on what was said at its start, whatever its manifest says."""
    with patch.object(CheckpointTable, "with_parent", lambda self, record, parent_path: record):
        yield


@contextmanager
def complete_twice() -> Iterator[None]:
    """A repeated report of a completion is recorded again."""
    complete = Saves.complete

    def eager(self: Saves, request: CompleteCheckpoint) -> list[Decision[CompletedCheckpoint]]:
        decisions = complete(self, request)
        if decisions[-1].facts:
            return decisions
        record = self._table.record(request.job, request.checkpoint_id)
        fact = CheckpointCompleted(record.id, record.meta.step, record.meta.size_bytes, request.seconds)
        return [decided(decisions[-1].reply, request.job, self._table.put(record, fact))]

    with patch.object(Saves, "complete", eager):
        yield


@contextmanager
def tell_no_failure() -> Iterator[None]:
    """A failed save is recorded without a fact."""
    fail = Saves._fail

    def silent(self: Saves, record: CheckpointRecord, reason: str, now: Moment) -> Change:
        return fail(self, record, reason, now)._replace(fact=None)

    with patch.object(Saves, "_fail", silent):
        yield


@contextmanager
def give_up_a_save_whose_writer_lives() -> Iterator[None]:
    """Every writer counts as gone."""
    unsettled = Saves.unsettled

    def hasty(self: Saves, is_registered: Any, now: Moment) -> Any:
        return unsettled(self, lambda *_: False, now)

    with patch.object(Saves, "unsettled", hasty):
        yield


@contextmanager
def never_sweep_failed_saves() -> Iterator[None]:
    """What a failed save has left stays."""
    unsettled = Saves.unsettled

    def lazy(self: Saves, is_registered: Any, now: Moment) -> Any:
        return ((one, reason) for one, reason in unsettled(self, is_registered, now) if one.is_being_written)

    with patch.object(Saves, "unsettled", lazy):
        yield


@contextmanager
def tell_workers_nothing_to_delete() -> Iterator[None]:
    """Workers are not told which files they are to delete."""

    def silent(self: Saves, record: CheckpointRecord) -> CompletedCheckpoint:
        return CompletedCheckpoint(record.meta, list[CollectedFiles]())

    with patch.object(Saves, "_completed", silent):
        yield


@contextmanager
def share_checkpoints_between_jobs() -> Iterator[None]:
    """A caller may name the checkpoint of any job."""
    record_of = CheckpointTable.record

    def careless(self: CheckpointTable, job: str, checkpoint_id: str) -> CheckpointRecord:
        known = self.records.get(checkpoint_id)
        return record_of(self, job if known is None else known.job, checkpoint_id)

    with patch.object(CheckpointTable, "record", careless):
        yield


@contextmanager
def share_paths_between_jobs() -> Iterator[None]:
    """The same path and save id are the same checkpoint for every job."""

    def careless(self: CheckpointTable, job: str, path: str, save_id: str, files_job: str) -> CheckpointRecord | None:
        return next((self.records[one] for one in self._named.get((path, save_id), {}).values()), None)

    with patch.object(CheckpointTable, "known", careless):
        yield


@contextmanager
def give_a_path_to_the_job_that_names_it_first() -> Iterator[None]:
    """A path that another job has named is refused."""
    known = CheckpointTable.known

    def jealous(self: CheckpointTable, job: str, path: str, save_id: str, files_job: str) -> CheckpointRecord | None:
        if any(one.path == path and one.job != job for one in self.records.values()):
            raise RequestRefused("checkpoint_path_taken", f"{path} belongs to another job", "")
        return known(self, job, path, save_id, files_job)

    with patch.object(CheckpointTable, "known", jealous):
        yield


@contextmanager
def delete_what_is_being_written() -> Iterator[None]:
    """An operator may delete a checkpoint while its writer writes."""

    def hasty(self: CheckpointCollection, request: DeleteCheckpoint) -> Decision[Nothing]:
        record = self._table.record(request.job, request.checkpoint_id)
        if record.is_deleted:
            return Decision(Nothing())
        meta = self._table.index.delete(record.id)
        return decided(Nothing(), request.job, self._tombstone(meta, REQUESTED_RULE, "an operator has deleted it"))

    with patch.object(CheckpointCollection, "delete", hasty):
        yield


@contextmanager
def call_full_what_is_not() -> Iterator[None]:
    """A checkpoint counts as compacted although nothing was done with its files."""

    async def lazy(self: FileWork, record: CheckpointRecord) -> int:
        return record.meta.size_bytes

    with patch.object(FileWork, "_compact_files", lazy):
        yield


@contextmanager
def compact_what_is_deleted() -> Iterator[None]:
    """The files of a checkpoint are deleted while it is compacted."""

    async def compact(self: FileWork, record: CheckpointRecord) -> int:
        return await self._files.compact(self._book.table.location(record), lambda done, total: None)

    with patch.object(FileWork, "_compact_files", compact):
        yield


@contextmanager
def keep_as_the_script_does_against_the_settings() -> Iterator[None]:
    """What a script keeps counts also where the job's settings say something else."""

    def stubborn(settings: Mapping[str, Any], defaults: Mapping[str, Any], keep: int | None = None) -> JobRetention:
        return retention_of(settings if keep is None else {**settings, "checkpoint_keep": keep}, defaults)

    with patch("forged.catalog.book.policies.retention_of", stubborn):
        yield


@contextmanager
def believe_every_deletion() -> Iterator[None]:
    """A worker of any job may say that the files of a tombstone are gone."""

    def credulous(self: CheckpointCollection, request: ConfirmDeleted) -> list[Decision[Nothing]]:
        table = self._table
        named = [table.records[one] for one in request.checkpoint_ids if one in table.records]
        gone = [one for one in named if one.is_deleted and not table.is_managed(one)]
        return in_decisions(Nothing(), request.job, [table.forget(one) for one in gone])

    with patch.object(CheckpointCollection, "confirm_deleted", credulous):
        yield


MUTANTS: dict[str, Mutant] = {}
BREAKS: dict[str, Promise] = {}
"""The promise that each of them breaks."""

for mutant, promise in (
    (delete_before_the_tombstone_is_durable, Promise.TOMBSTONE),
    (forget_a_tombstone_before_its_files, Promise.TOMBSTONE),
    (forget_tombstones_at_restart, Promise.ENDS),
    (collect_without_tombstones, Promise.RECORDED),
    (trust_every_path, Promise.OWN_FILES),
    (ignore_pins, Promise.KEPT),
    (ignore_holds, Promise.KEPT),
    (ignore_models, Promise.KEPT),
    (forget_holds_at_restart, Promise.KEPT),
    (release_for_all_readers, Promise.KEPT),
    (forget_the_parents, Promise.KEPT),
    (forget_the_verified_one, Promise.KEPT),
    (forget_the_newest_one, Promise.KEPT),
    (count_nan_as_best, Promise.KEPT),
    (collect_after_the_clock_went_back, Promise.KEPT),
    (collect_half, Promise.SETTLED),
    (offer_abandoned, Promise.OFFERED),
    (offer_broken_chains, Promise.OFFERED),
    (offer_the_latest_first, Promise.OFFERED),
    (abandon_nothing, Promise.ABANDONED),
    (abandon_too_much, Promise.ABANDONED),
    (abandon_by_the_clock, Promise.ABANDONED),
    (forget_that_progress_was_lost, Promise.ABANDONED),
    (complete_without_looking, Promise.COMPLETE),
    (complete_with_the_base_as_parent, Promise.COMPLETE),
    (complete_twice, Promise.FACTS),
    (tell_no_failure, Promise.FACTS),
    (give_up_a_save_whose_writer_lives, Promise.ENDS),
    (never_sweep_failed_saves, Promise.ENDS),
    (tell_workers_nothing_to_delete, Promise.ORPHANS),
    (delete_what_is_being_written, Promise.TOMBSTONE),
    (call_full_what_is_not, Promise.COMPLETE),
    (compact_what_is_deleted, Promise.TOMBSTONE),
    (share_checkpoints_between_jobs, Promise.REFUSED),
    (share_paths_between_jobs, Promise.REFUSED),
    (give_a_path_to_the_job_that_names_it_first, Promise.NAMED),
    (keep_as_the_script_does_against_the_settings, Promise.KEPT),
    (believe_every_deletion, Promise.REFUSED),
    *SLOT_MUTANTS,
):
    MUTANTS[mutant.__name__] = mutant
    BREAKS[mutant.__name__] = promise
