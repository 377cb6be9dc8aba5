"""The catalogue of all jobs: answers requests with decisions, without I/O.

Invariants:
- A refusal changes nothing; every change is in the decisions' writes. A decision has at most `CHANGES_MAX` changes.
- Each part owns its state, and calls the table and the policies only; the collection calls the holds too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from forged.catalog.book.adoption import Adoptions
from forged.catalog.book.changes import in_decisions
from forged.catalog.book.checkpoint_table import CheckpointTable
from forged.catalog.book.collection import CheckpointCollection
from forged.catalog.book.compaction import Compaction
from forged.catalog.book.holds import Holds
from forged.catalog.book.policies import NO_SETTINGS, RetentionPolicies
from forged.catalog.book.restores import Restores
from forged.catalog.book.saves import Saves
from forged.catalog.catalog_index import CatalogIndex
from forged.catalog.records import CheckpointRecord, Moment
from forged.catalog.settings import retention_of
from forged.jobs.model import SettingValue
from forged.kernel.messages import Decision

CATALOG_BYTES_MAX = 512 << 20


class CatalogBook:
    """All checkpoints of all jobs."""

    def __init__(
        self,
        settings_of: Callable[[str], Mapping[str, SettingValue] | None] = lambda job: NO_SETTINGS,
        *,
        defaults: Mapping[str, SettingValue] = NO_SETTINGS,
        roots: tuple[str, ...] = (),
        bytes_max: int = CATALOG_BYTES_MAX,
        models_of: Callable[[CheckpointRecord], Iterator[str]] = lambda record: iter(()),
    ) -> None:
        """`models_of`: the names of the models that refer to a checkpoint, and keep it."""
        index = CatalogIndex(
            retention_of(NO_SETTINGS, defaults).policy,
            lambda checkpoint_id: models_of(self.table.records[checkpoint_id]),
        )
        self.table = CheckpointTable(index, roots, bytes_max)
        self.policies = RetentionPolicies(index, settings_of, defaults)
        self.saves = Saves(self.table, self.policies)
        self.compaction = Compaction(self.table, self.policies)
        self.restores = Restores(self.table)
        self.holds = Holds(self.table)
        self.collection = CheckpointCollection(self.table, self.policies, self.holds)
        self.adoptions = Adoptions(self.table, self.policies)

    def load(self, values: Iterable[bytes], restores: Mapping[str, bytes], now: Moment) -> None:
        """Replace everything by what the store holds."""
        self.table.load(values)
        records = self.table.records.values()
        self.policies.load(records)
        self.table.index.load(record.meta for record in records)
        self.saves.load(now)
        self.holds.load(now)
        self.restores.load(restores)

    def remove_job(self, job: str) -> list[Decision[None]]:
        """Forget a removed job, except its checkpoints that are kept."""
        changes = [*self.collection.remove_job(job), *self.restores.forget(job)]
        self.policies.forget(job)
        return in_decisions(None, job, changes)
