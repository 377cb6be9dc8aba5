"""The invariants of the catalogue's simulation.

The oracle sees every durable transaction of the store, every file that the daemon deletes, and what callers were told.
It keeps the stored records, and a model from the facts alone, which must agree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from forged.catalog.messages import (
    CheckpointCollected,
    CheckpointCompacted,
    CheckpointFailed,
    CheckpointReinstated,
    CheckpointRepaired,
    CheckpointRestored,
    CheckpointsAbandoned,
    CheckpointsAdopted,
    CheckpointStarted,
    EmergencyCheckpointSaved,
    ReportRestore,
    RestorePoints,
)
from forged.catalog.model import CheckpointMeta, CheckpointState
from forged.catalog.records import PREFIX, CheckpointRecord, decoded
from forged.elastic.messages import ProgressLost, WorkerFailed
from forged.jobs.model import JobChanged, JobCreated, JobRemoved
from forged.kernel.ledger import FACT_PREFIX
from forged.kernel.messages import Record
from forged.kernel.store.port import Transaction
from tests.simulation.catalog.fact_model import FactModel, ToldCheckpoint
from tests.simulation.catalog.retention_model import Policies, rank, restorable, why_kept
from tests.simulation.catalog.slot_oracle import SlotOracle
from tests.simulation.catalog.slots import HostMemory
from tests.simulation.catalog.storage import SaveName, SimulatedStorage, StoredFile
from tests.simulation.oracle import StoreOracle

HOSTILE = "hostile"
"""A job whose worker reports whatever it likes."""
SLACK_S = 0.2


class Promise(Enum):
    """What the catalogue promises."""

    KEPT = "nothing is deleted that a pin, a reader, a child or the policy needs; who holds it reads all of it"
    TOMBSTONE = "a tombstone is durable before the first file goes, and forgotten after the last one"
    OWN_FILES = "the daemon deletes files of its own tombstones only"
    RECORDED = "the record of a checkpoint is not lost"
    FACTS = "facts and records say the same"
    OFFERED = "exactly the restorable checkpoints that are not abandoned are offered, the best first"
    ABANDONED = "what was saved beyond the step that a job goes back to is abandoned, and nothing else"
    COMPLETE = "a complete checkpoint was there as a whole"
    ENDS = "each checkpoint is completed, or fails when its writer is gone, within a bounded time"
    ORPHANS = "of deleted checkpoints and failed saves no file remains"
    SETTLED = "a second collection deletes nothing"
    STAGED = "what all ranks have staged is in slots until it is on disk, and on disk after a failure or an answer"
    ONE_SAVE = "a checkpoint from slots has the parts of all ranks of one save"
    REFUSED = "a tenant cannot touch the checkpoints of another job"
    NAMED = "a tenant keeps no checkpoint of another job out of the catalogue"


@dataclass(slots=True)
class Writer:
    """A worker that saves checkpoints, as the failure detector sees it."""

    gone_at: float = math.inf
    """Since when it is not registered any more."""


@dataclass
class CatalogOracle(StoreOracle):
    """Collects what happens and checks the promises."""

    prefixes = (PREFIX,)
    now: Callable[[], float]
    storage: SimulatedStorage
    memory: HostMemory
    met: Callable[[str], None]
    is_managed: Callable[[CheckpointRecord], bool]
    writer_gone_s: float
    writing_s_max: float
    records: dict[str, CheckpointRecord] = field(default_factory=dict)
    """The stored records, by id."""
    writers: dict[tuple[str, str, bytes], Writer] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    """The checkpoints with an acknowledged pin that nobody has begun to take back."""
    unpinned: set[str] = field(default_factory=set)
    """Those with a removal of the pin that was not acknowledged, and may come late."""
    referenced: set[str] = field(default_factory=set)
    """The checkpoints that a registered model refers to."""
    held: dict[tuple[str, str], float] = field(default_factory=dict)
    """Until when each acknowledged hold lasts at least, by checkpoint and holder."""
    deletion_wanted: set[str] = field(default_factory=set)
    failure_reported: set[str] = field(default_factory=set)
    superseded: tuple[float, float] = (math.inf, math.inf)
    """Since when and until when a daemon runs on whose store a second one was started."""
    lied_about: set[str] = field(default_factory=set)
    """The checkpoints that a tenant of another job says to have deleted."""
    started_at: dict[str, float] = field(default_factory=dict)
    removed_jobs: set[str] = field(default_factory=set)
    saves: dict[str, SaveName] = field(default_factory=dict)
    """What was saved under each id that the catalogue ever had, and was to delete; not of the hostile job."""
    swept: set[SaveName] = field(default_factory=set)
    """The saves whose files were deleted; a worker's late report of one that was adopted does not bring them back."""

    def __post_init__(self) -> None:
        self.policies = Policies(self.now)
        self.slots = SlotOracle(
            self.now,
            self.memory,
            lambda what: self.violated(Promise.STAGED, what),
            lambda what: self.violated(Promise.ONE_SAVE, what),
            lambda worker: worker in self.writers and self.now() < self.writers[worker].gone_at,
            self.removed_jobs,
        )
        self.told = FactModel(lambda what: self.violated(Promise.FACTS, what))
        self._offers: defaultdict[str, list[tuple[float, list[str]]]] = defaultdict(list)
        """The ids that a job is offered, from each time on."""
        self._lost: list[tuple[ProgressLost, str, list[str]]] = []
        self._restored: set[str] = set()
        """The checkpoints that are no longer abandoned."""
        self._started_by: dict[str, int] = {}
        """The number of the fact with which each checkpoint came into the catalogue."""

    # What becomes durable.

    def committed(self, transaction: Transaction) -> None:
        puts = {key: value for key, value in transaction.puts.items() if key.startswith((PREFIX, FACT_PREFIX))}
        gone = [key.rpartition("/")[2] for key in transaction.deletes if key.startswith(PREFIX)]
        if puts or gone:
            facts = [Record.read(value) for key, value in puts.items() if key.startswith(FACT_PREFIX)]
            records = [decoded(value) for key, value in puts.items() if key.startswith(PREFIX)]
            self._changed(facts, {one.id: one for one in records}, gone, is_one_decision=True)

    def loaded(self, facts: Sequence[Record], entries: Mapping[str, bytes]) -> None:
        self.slots.loaded_at = self.now()
        found = {one.id: one for one in map(decoded, entries.values())}
        changed = {key: one for key, one in found.items() if self.records.get(key) != one}
        gone = [key for key in self.records if key not in found]
        if facts or changed or gone:
            self._changed(facts, changed, gone, is_one_decision=False)

    def _changed(
        self,
        facts: Sequence[Record],
        records: Mapping[str, CheckpointRecord],
        gone: Sequence[str],
        *,
        is_one_decision: bool,
    ) -> None:
        before = dict(self.records)
        self.saves |= {one.id: SaveName(one.path, one.save_id) for one in records.values() if one.job != HOSTILE}
        for fact in facts:
            self.facts[fact.id] = fact
            self._hear(fact)
            self.told.hear(fact)
        self.records |= records
        for checkpoint_id in gone:
            self.records.pop(checkpoint_id, None)
        for checkpoint_id, record in records.items():
            self._check_change(before.get(checkpoint_id), record, facts)
        for checkpoint_id in gone:
            self._check_forgotten(before.get(checkpoint_id))
        if is_one_decision:
            self._check_collected(facts, before)
            self._check_abandoned(facts, before, records)
        for job in sorted({one.job for one in records.values()} | {before[one].job for one in gone if one in before}):
            offered = self.offered(job)
            self._offers[job].append((self.now(), offered))
            self.slots.offered(job, self.records[offered[0]].meta.step if offered else -1)

    def _hear(self, record: Record) -> None:
        match record.fact:
            case JobCreated(settings=settings) | JobChanged(settings=settings):
                self.policies.set(record.job, settings)
            case CheckpointRepaired():
                self.met("a checkpoint is repaired, or was not damaged")
            case JobRemoved():
                self.removed_jobs.add(record.job)
            case WorkerFailed():
                self.slots.worker_failed(record.job)
            case EmergencyCheckpointSaved():
                self.met("an emergency checkpoint is saved")
            case ProgressLost() as lost:
                beyond = [
                    one.id for one in self.live(record.job) if one.meta.step > lost.step and not one.meta.abandoned
                ]
                self._lost.append((lost, record.job, beyond))
            case CheckpointReinstated(checkpoint_id=checkpoint_id):
                self.met("a checkpoint is reinstated")
                self._restored.add(checkpoint_id)
            case CheckpointStarted(checkpoint_id=checkpoint_id):
                self._started_by[checkpoint_id] = record.id
            case _:
                pass

    def _check_change(self, before: CheckpointRecord | None, after: CheckpointRecord, facts: Sequence[Record]) -> None:
        told = self.told.checkpoints.get(after.id)
        if before is None:
            self.started_at[after.id] = self.now()
            self.policies.set_kept_by_script(after.job, after.keep)
            adopted = next((one for one in facts if isinstance(one.fact, CheckpointsAdopted)), None)
            if told is None and adopted is not None:
                told = self.told.checkpoints[after.id] = ToldCheckpoint.of(after)
                self._started_by[after.id] = adopted.id
        if told is None or not told.agrees(after):
            self.violated(Promise.FACTS, f"the record says {after.meta}, and the facts {told}")
        state_before = CheckpointState.CREATING if before is None else before.meta.state
        if after.meta.state is CheckpointState.COMPLETE and state_before is not CheckpointState.COMPLETE:
            self._check_completed(after)
            if before is not None and (before.is_being_written or before.meta.is_failed_save):
                self._check_parent(after)
        if any(isinstance(one.fact, CheckpointCompacted) and one.fact.checkpoint_id == after.id for one in facts):
            self._check_compacted(after)
        is_failed = after.meta.is_failed_save and state_before is CheckpointState.CREATING
        if is_failed and any(isinstance(one.fact, CheckpointFailed) for one in facts):
            self._check_failed(after)

    def _check_completed(self, record: CheckpointRecord) -> None:
        save = SaveName(record.path, record.save_id)
        self.slots.completed(record.job, save)
        if record.job != HOSTILE and not self.storage.is_whole(save) and not self.is_excused(save):
            self.violated(Promise.COMPLETE, f"{record.id} is complete, and {save} is not there as a whole")

    def _check_parent(self, record: CheckpointRecord) -> None:
        """What a save builds on is known when it ends, and its manifest says it."""
        manifest = self.storage.manifest(SaveName(record.path, record.save_id))
        if record.job == HOSTILE or manifest is None:
            return
        of_job = (one for one in self.records.values() if one.job == record.job)
        known = {
            SaveName(one.path, one.save_id): one.id for one in of_job if not one.is_deleted or one.meta.storage_path
        }
        # It may have been made full before its completion was durable; then that is recorded next.
        parent = manifest.parent or manifest.compacted_from
        expected = None if parent is None else known.get(parent)
        is_full = manifest.parent is None and record.meta.parent_id is None
        if record.meta.parent_id != expected and not is_full:
            self.violated(Promise.COMPLETE, f"{record.meta} does not build on {expected}, as its manifest says")

    def _check_compacted(self, record: CheckpointRecord) -> None:
        self.met("a checkpoint is compacted")
        save = SaveName(record.path, record.save_id)
        manifest = self.storage.manifest(save)
        if (manifest is None or manifest.parent is not None) and not self.is_excused(save):
            self.violated(Promise.COMPLETE, f"{record.id} is said to be a full one, and its manifest is {manifest}")

    def is_excused(self, save: SaveName) -> bool:
        """Whether files of the save may be missing."""
        return save in self.storage.harmed or save in self.swept

    def _check_failed(self, record: CheckpointRecord) -> None:
        self.met("a save fails")
        if SaveName(record.path, record.save_id) in self.slots.failed_saves:
            self.met("a save from slots fails")
            return
        if record.id in self.failure_reported:
            return
        writer = self.writers.get((record.job, record.worker_id, record.incarnation))
        gone_s = self.now() - (math.inf if writer is None else writer.gone_at)
        age_s = self.now() - self.started_at[record.id]
        if max(gone_s + self.writing_s_max - self.writer_gone_s, age_s) < self.writing_s_max - SLACK_S:
            self.violated(Promise.ENDS, f"{record.id} failed after {age_s:g} s, and its writer is there: {record.note}")
        self.met("a save is given up")

    def _check_forgotten(self, record: CheckpointRecord | None) -> None:
        if record is None:
            return
        self.told.checkpoints.pop(record.id, None)
        if record.is_deleted and record.job != HOSTILE:
            self.swept.add(SaveName(record.path, record.save_id))
            self.slots.deleted(SaveName(record.path, record.save_id))
        if record.job == HOSTILE:
            # It is not a save of this job.
            self.saves.pop(record.id, None)
        needs = [one.id for one in self.live(record.job) if one.meta.parent_id == record.id]
        if not record.is_deleted:
            if record.job not in self.removed_jobs:
                self.violated(Promise.RECORDED, f"the record of {record.id} is gone: {record.meta}")
            self.saves.pop(record.id, None)
            if self.protected(record.id) or needs:
                self.violated(Promise.KEPT, f"{record.id} is forgotten with its job, and needed by {needs}")
        else:
            self._check_files_forgotten(record)

    def _check_files_forgotten(self, record: CheckpointRecord) -> None:
        """The files of a tombstone that is forgotten are gone, if it was the daemon's to see to that."""
        save = SaveName(record.path, record.save_id)
        left = self.storage.of_save(save)
        if not left or save in self.slots.crossed:
            return
        if self.is_managed(record):
            self.violated(Promise.TOMBSTONE, f"{record.id} is forgotten, and {left} is still there")
        elif record.id in self.lied_about and record.job != HOSTILE:
            self.violated(Promise.REFUSED, f"{record.id} is forgotten, as {HOSTILE} has asked, and {left} is there")

    # Collection.

    def protected(self, checkpoint_id: str) -> bool:
        """Whether a caller was told that a checkpoint is kept."""
        is_held = any(one == checkpoint_id and until > self.now() for (one, _), until in self.held.items())
        return is_held or checkpoint_id in self.pinned or checkpoint_id in self.referenced

    def _check_collected(self, facts: Sequence[Record], before: Mapping[str, CheckpointRecord]) -> None:
        for record in facts:
            fact = record.fact
            if isinstance(fact, CheckpointCollected) and fact.checkpoint_id in before:
                known = before[fact.checkpoint_id]
                why = self._why_needed(known, fact, before, record.at)
                if why:
                    self.violated(Promise.KEPT, f"{known.id} ({known.meta}) is deleted as {fact.rule}, and is {why}")
                self.met(f"a checkpoint goes: {fact.rule}")
                if fact.rule == "surplus" and self.policies.is_of_script(known.job):
                    self.met("a checkpoint goes as its script keeps them")

    def _why_needed(
        self, known: CheckpointRecord, fact: CheckpointCollected, before: Mapping[str, CheckpointRecord], at: float
    ) -> str:
        if self.protected(known.id):
            return "pinned or held, as callers were told"
        if known.meta.pinned or known.meta.holders:
            return "pinned or held"
        children = [one.id for one in self.live(known.job) if one.meta.parent_id == known.id]
        if fact.rule == "failed":
            return "" if known.meta.is_failed_save else "no failed save"
        if children:
            return f"needed by {children}"
        if fact.rule == "requested":
            return "" if known.id in self.deletion_wanted else "not to be deleted for any operator"
        of_job = [one.meta for one in before.values() if one.job == known.job and not one.is_deleted]
        reasons = [why_kept(known.meta, fact.rule, of_job, policy, at) for policy in self.policies.recent(known.job)]
        return reasons[0] if all(reasons) else ""

    def deletes(self, file: StoredFile) -> None:
        """The daemon is about to delete a file."""
        self.slots.deleted(file.save)
        files = file.save.path, file.save.save_id, file.job
        named = [one for one in self.records.values() if (one.path, one.save_id, one.files_job) == files]
        for record in named:
            if not record.is_deleted:
                self.violated(Promise.TOMBSTONE, f"files of {record.id} go, whose stored state is {record.meta.state}")
            if not self.is_managed(record):
                self.violated(Promise.OWN_FILES, f"the daemon deletes {file} for {record.id} of {record.job}")
        if not named:
            self.violated(Promise.OWN_FILES, f"the daemon deletes {file}, and has no record of it")
        self.met("the daemon deletes files")

    # Restore points.

    def live(self, job: str) -> list[CheckpointRecord]:
        """The records of a job that are not deleted."""
        return [one for one in self.records.values() if one.job == job and not one.is_deleted]

    def offered(self, job: str) -> list[str]:
        """The ids that the job must be offered now, in this order."""
        metas = [one.meta for one in self.live(job)]
        sound = restorable(metas)
        offered = [one for one in metas if one.checkpoint_id in sound and not one.abandoned]
        offered.sort(key=lambda one: (one.step, one.created_at, one.checkpoint_id), reverse=True)
        return [one.checkpoint_id for one in offered]

    def found(self, job: str, points: RestorePoints, asked_at: float) -> None:
        """A caller has asked for restore points: they are right at some moment since it asked.

        A daemon that another one has superseded answers from its memory until its next write.
        """
        began, ended = self.superseded
        if began <= self.now() and asked_at <= ended:
            asked_at = min(asked_at, began)
        answer = [one.meta.checkpoint_id for one in points.points]
        known = self._offers[job]
        right = [ids for at, ids in known if at >= asked_at]
        right.append(next((ids for at, ids in reversed(known) if at < asked_at), []))
        if answer not in right:
            self.broken(Promise.OFFERED, f"{job} is offered {answer}, and not one of {right}")

    def _check_abandoned(
        self, facts: Sequence[Record], before: Mapping[str, CheckpointRecord], after: Mapping[str, CheckpointRecord]
    ) -> None:
        turned = {
            key for key, one in after.items() if one.meta.abandoned and key in before and not before[key].meta.abandoned
        }
        taken_back = {
            key for key, one in after.items() if not one.meta.abandoned and key in before and before[key].meta.abandoned
        }
        why = [one.fact for one in facts if isinstance(one.fact, CheckpointReinstated | CheckpointRestored)]
        if taken_back - {one.checkpoint_id for one in why}:
            self.violated(Promise.ABANDONED, f"no fact says that {sorted(taken_back)} are no longer abandoned")
        told = next((one for one in facts if isinstance(one.fact, CheckpointsAbandoned)), None)
        if told is None:
            if turned:
                self.violated(Promise.ABANDONED, f"no fact says that {sorted(turned)} are abandoned")
            return
        fact = told.fact
        assert isinstance(fact, CheckpointsAbandoned)
        self.met("checkpoints are abandoned")
        if fact.checkpoint_id:
            self._restored.add(fact.checkpoint_id)
        due = {
            one.id
            for one in before.values()
            if one.job == told.job and not one.is_deleted and not one.meta.abandoned and self._is_beyond(one, fact)
        }
        cause = self.facts.get(told.cause)
        if cause is not None and isinstance(cause.fact, ProgressLost):
            # What came into the catalogue after the fact that training has gone back is not lost.
            due = {one for one in due if self._started_by.get(one, 0) < cause.id}
        if turned != due or len(turned) != fact.count:
            self.violated(Promise.ABANDONED, f"{fact} of {told.job} abandons {sorted(turned)}, and not {sorted(due)}")

    def _is_beyond(self, record: CheckpointRecord, fact: CheckpointsAbandoned) -> bool:
        if record.meta.step > fact.step:
            return True
        restored = self.records.get(fact.checkpoint_id)
        if restored is None or restored.is_deleted or restored.meta.step != fact.step or record.id == restored.id:
            return False
        return rank(record.meta)[1:] > rank(restored.meta)[1:]

    def restored(self, request: ReportRestore, known_before: Iterable[str]) -> None:
        """A worker's report of a restore was acknowledged; `known_before` were stored before it was sent."""
        left = [
            one
            for one in known_before
            if one in self.records
            and not self.records[one].is_deleted
            and self.records[one].meta.step > request.step
            and not self.records[one].meta.abandoned
        ]
        if left:
            self.violated(Promise.ABANDONED, f"{request.job} continues after step {request.step}, and keeps {left}")

    # In the end.

    def unsettled(self) -> list[str]:
        """What the daemon still has to do."""
        return [*self.slots.unsettled().values(), *self._unsettled_records()]

    def _unsettled_records(self) -> list[str]:
        return [
            f"{one.id} is {one.meta.state}, held by {one.meta.holders}, {'failed' if one.meta.is_failed_save else ''}"
            for one in self.records.values()
            if one.is_being_written
            or one.meta.is_failed_save
            or one.meta.holders
            or one.is_to_compact
            or (one.is_deleted and self.is_managed(one) and not self.storage.is_needed(SaveName(one.path, one.save_id)))
        ]

    def is_clock_behind(self, job: str, now: float) -> bool:
        """Whether a checkpoint of the job was created after the daemon's present time."""
        return any(one.meta.created_at > now for one in self.live(job))

    def changed_at(self, job: str) -> float:
        """When a record of the job was last changed."""
        return self._offers[job][-1][0] if self._offers[job] else 0.0

    def check_list(self, job: str, listed: Sequence[CheckpointMeta]) -> None:
        """Compare what a job lists with its records and its facts."""
        expected = sorted((one.meta for one in self.live(job)), key=rank, reverse=True)
        shown = [replace(one, holders=_without_models(one.holders)) for one in listed]
        # As text: NaN does not equal itself.
        if str(shown) != str(expected):
            self.violated(Promise.RECORDED, f"{job} lists {listed}, and its records are {expected}")
        told = {key for key, one in self.told.checkpoints.items() if one.job == job}
        if told != {key for key, one in self.records.items() if one.job == job}:
            self.violated(Promise.FACTS, f"by its facts {job} has {sorted(told)}, and its records are {expected}")

    def check_end(self) -> None:
        """Compare what is offered with the lost progress, and the files with the records."""
        for lost, job, ids in self._lost:
            left = [one for one in ids if one in self.offered(job) and one not in self._restored]
            if left:
                self.violated(Promise.ABANDONED, f"{job} has gone back to step {lost.step}, and is offered {left}")
        self._check_files()

    def _is_whole_and_unknown(self, save: SaveName) -> bool:
        return save in self.slots.crossed and self.storage.is_whole(save)

    def _check_files(self) -> None:
        # What has failed and was deleted may have been saved again from slots.
        known = {SaveName(one.path, one.save_id) for one in self.records.values() if not one.is_deleted}
        for checkpoint_id, save in self.saves.items():
            record = self.records.get(checkpoint_id)
            left = self.storage.of_save(save)
            if record is None and left and save not in known and not self._is_whole_and_unknown(save):
                self.violated(Promise.ORPHANS, f"{checkpoint_id} is deleted, and {left} is left")
            is_live = record is not None and not record.is_deleted
            if record is not None and is_live and not self.storage.is_whole(save) and not self.is_excused(save):
                self.violated(
                    Promise.KEPT, f"{checkpoint_id} is {record.meta.state}, and of {save} only {left} is there"
                )


def _without_models(holders: Sequence[str]) -> tuple[str, ...]:
    """The holders that are stored: models are shown among them, and stored in the registry."""
    return tuple(one for one in holders if not one.startswith("model "))
