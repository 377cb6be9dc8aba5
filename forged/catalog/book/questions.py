"""What callers ask of the catalogue: lists, restore points, what a collection would do.

Invariants:
- A question changes nothing.
- A reply fits into a frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from forged.catalog import selection
from forged.catalog.book.catalog_book import CatalogBook
from forged.catalog.book.changes import total
from forged.catalog.book.collection import as_message
from forged.catalog.book.estimates import bytes_read, seconds_per_step
from forged.catalog.messages import (
    CheckpointPage,
    CheckpointView,
    ExcludedCheckpoint,
    FindRestorePoints,
    ListCheckpoints,
    ReadRetention,
    RestoreEstimate,
    RestorePoint,
    RestorePoints,
    RetentionPage,
    ShowCheckpoint,
)
from forged.catalog.model import CheckpointMeta, CheckpointState, RestoreCriteria
from forged.catalog.records import Moment, checked_location, storage_kind
from forged.catalog.retention import RunVerdicts
from forged.catalog.run_index import IndexEntry, RunIndex, rank_of
from forged.pagination import PAGE_ENTRIES_MAX, take_page
from forged.phrases import counted

CHILDREN_SHOWN_MAX = 1000
SAVES_LOOKED_AT = 10


class CatalogQuestions:
    """Answers questions about the checkpoints in a book."""

    def __init__(self, book: CatalogBook) -> None:
        self._book = book
        self._table = book.table

    def find(self, request: FindRestorePoints, step: int | None) -> RestorePoints:
        """What the job can be restored from; `step` is the one that it has committed, None if there is none."""
        run = self._table.index.run(request.job) or RunIndex(self._table.index.policy)
        folder = request.folder and checked_location("folder", request.folder)
        criteria = RestoreCriteria(
            request.job, request.max_epoch, request.max_step, request.require_complete, request.prefer_full
        )

        def is_wanted(meta: CheckpointMeta) -> bool:
            return not folder or self._table.records[meta.checkpoint_id].path.startswith(f"{folder}/")

        matching = (meta for meta in selection.restore_points(run, criteria) if is_wanted(meta))
        step_s = self._seconds_per_step(run)
        found = (self._point(run, meta, place, step, step_s) for place, meta in enumerate(matching))
        points, _ = take_page(found, request.limit)
        offered = {point.meta.checkpoint_id for point in points}
        live = ((one.meta, one) for one in reversed(run.ranked) if not one.is_offered and one.id not in offered)
        deleted = ((one.meta, None) for one in self._table.tombstones() if one.job == request.job)
        excluded = (
            self._excluded(meta, entry)
            for meta, entry in chain(live, deleted)
            if selection.is_within(meta, criteria) and is_wanted(meta)
        )
        return RestorePoints(points, take_page(excluded, PAGE_ENTRIES_MAX)[0])

    def _point(self, run: RunIndex, meta: CheckpointMeta, place: int, step: int | None, step_s: float) -> RestorePoint:
        entry = run.entries[meta.checkpoint_id]
        links = entry.chain()
        lost = max(0, step - meta.step) if step is not None else 0
        return RestorePoint(
            meta,
            [one.id for one in links],
            self._estimate(links),
            lost,
            lost * step_s,
            _why_offered(entry, place, links),
        )

    def _excluded(self, meta: CheckpointMeta, entry: IndexEntry | None) -> ExcludedCheckpoint:
        record = self._table.records[meta.checkpoint_id]
        why = "it is deleted" if entry is None else _why_excluded(entry, record.note)
        return ExcludedCheckpoint(record.id, meta.step, record.path, why, meta.state, meta.abandoned)

    def _estimate(self, links: Sequence[IndexEntry]) -> RestoreEstimate:
        record = self._table.records[links[-1].id]
        size_bytes = bytes_read(one.meta.size_bytes for one in links)
        return self._book.restores.times.estimate(record.job, storage_kind(record.path), size_bytes)

    def _seconds_per_step(self, run: RunIndex) -> float:
        newest = list(islice((one.meta for one in reversed(run.offered)), SAVES_LOOKED_AT))
        return seconds_per_step([(meta.step, meta.created_at) for meta in reversed(newest)])

    def page(self, request: ListCheckpoints, cadence: str) -> CheckpointPage:
        """Some checkpoints of a job, newest first."""
        run = self._table.index.run(request.job)
        if run is None:
            return CheckpointPage([], more=False, count=0, size_bytes=0, cadence=cadence)
        entries = (run.shown(one) for one in self._after(run, request.job, request.after))
        metas, more = take_page(entries, request.limit)
        return CheckpointPage(metas, more, len(run.entries), total([run.size_bytes]), cadence)

    def show(self, request: ShowCheckpoint, now: Moment) -> CheckpointView:
        """One checkpoint; also one that is deleted and not forgotten."""
        record = self._table.record(request.job, request.checkpoint_id)
        is_managed = self._table.is_managed(record)
        run = self._table.index.run(request.job)
        entry = None if run is None else run.entries.get(record.id)
        if run is None or entry is None:
            by = "the daemon" if is_managed else "a worker of the job"
            kept = f"deleted; its files are being deleted by {by}"
            return CheckpointView(
                record.meta, [], [], is_restorable=False, is_managed=is_managed, is_kept=False, retention=kept
            )
        verdict = RunVerdicts(run, now.wall).verdict(entry)
        links = entry.chain()
        return CheckpointView(
            run.shown(entry),
            [one.id for one in links],
            [one.id for one in entry.children[:CHILDREN_SHOWN_MAX]],
            entry.is_restorable,
            is_managed,
            verdict.is_kept,
            verdict.reason,
            self._estimate(links) if entry.is_restorable else None,
        )

    def retention_page(self, request: ReadRetention, now: Moment) -> RetentionPage:
        """What a collection would do now with some checkpoints of a job, newest first."""
        run = self._table.index.run(request.job)
        if run is None:
            return RetentionPage([], more=False, regained_bytes=0)
        self._book.policies.of(request.job)
        run_verdicts = RunVerdicts(run, now.wall)
        following = (
            as_message(run_verdicts.verdict(one), one.meta.step) for one in self._after(run, request.job, request.after)
        )
        page, more = take_page(following, request.limit)
        return RetentionPage(page, more, total(one.meta.size_bytes for one in run_verdicts.going.values()))

    def _after(self, run: RunIndex, job: str, after: str) -> Iterator[IndexEntry]:
        """The checkpoints of a run, newest first, after this one, which may have been deleted meanwhile."""
        place = run.place_of(rank_of(self._table.record(job, after).meta)) if after else len(run.ranked)
        return (run.ranked[one] for one in range(place - 1, -1, -1))


def _why_offered(entry: IndexEntry, place: int, links: Sequence[IndexEntry]) -> str:
    if not entry.is_restorable:
        return f"{entry.meta.state}; none that can be restored is left"
    parts = "" if len(links) == 1 else f", restored through {counted(len(links), 'checkpoint')}"
    return f"{'the newest that can be restored' if place == 0 else 'the next newest that can be restored'}{parts}"


def _why_excluded(entry: IndexEntry, note: str) -> str:
    meta = entry.meta
    if meta.state is CheckpointState.CREATING:
        return "it is being written"
    if meta.state is CheckpointState.CORRUPTED:
        return f"{'its save failed' if meta.is_failed_save else 'it is corrupted'}: {note}"
    if meta.abandoned:
        return "it is abandoned: training has gone back to an older checkpoint since"
    broken = next((one for one in reversed(entry.chain()) if _breaks(one)), entry)
    if broken.meta.state is CheckpointState.COMPLETE:
        return f"its chain is broken: {broken.meta.parent_id} is deleted"
    return f"its chain is broken: {broken.id} is {broken.meta.state}"


def _breaks(entry: IndexEntry) -> bool:
    return entry.meta.state is not CheckpointState.COMPLETE or (
        entry.meta.parent_id is not None and entry.parent is None
    )
