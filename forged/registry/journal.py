"""Reads from the store what the registry does not keep in memory: journals, validations, files and lineage.

Invariants:
- What is read rests on durable decisions only.
"""

from __future__ import annotations

from collections.abc import Sequence

from forged.errors import RequestRefused
from forged.kernel.ledger import Ledger
from forged.pagination import PAGE_ENTRIES_MAX, take_page
from forged.registry.book.model import Model
from forged.registry.messages import JournalEntry, JournalPage, ReadModelJournal, RecordedValidation
from forged.registry.model import ModelVersion
from forged.registry.records import (
    JOURNAL,
    VALIDATIONS_KEPT,
    StoredEntry,
    VersionDetails,
    VersionRecord,
    decoded_details,
    decoded_entry,
    decoded_validation,
    details_key,
    entry_key,
    validations_prefix,
)


class StoredJournal:
    """The part of the registry that is in the store only."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def details(self, model: Model, record: VersionRecord) -> VersionDetails:
        """The files and the lineage of a version; none if it has been deleted meanwhile."""
        if not record.details_bytes:
            return VersionDetails()
        await self._settled()
        found = await self._ledger.store.get(details_key(model.digest, record.version))
        return VersionDetails() if found is None else decoded_details(found.value)

    async def validations(self, model: Model, version: ModelVersion) -> list[RecordedValidation]:
        """The kept validations of a version, the newest first."""
        await self._settled()
        prefix = validations_prefix(model.digest, version)
        found = await self._ledger.store.list(prefix, limit=VALIDATIONS_KEPT)
        return [decoded_validation(entry.value) for entry in reversed(found)]

    async def page(self, model: Model, request: ReadModelJournal) -> JournalPage:
        """Some entries of a model's journal, the newest first."""
        if request.limit < 1:
            raise RequestRefused("page_invalid", f"limit must be >= 1, got {request.limit}", "use 1 or more")
        limit = min(request.limit, PAGE_ENTRIES_MAX)
        last = min(request.before - 1 if request.before else model.entries, model.entries)
        version = request.version
        newest = 0 if version is None else _newest(model, version)
        await self._settled()
        if version is None:
            entries = await self._up_to(model, last, limit + 1)
        else:
            entries = await self._about(model, version, newest, last, limit + 1)
        return JournalPage(*take_page(iter(entries), limit))

    async def _settled(self) -> None:
        await self._ledger.settled(None).wait()

    async def _up_to(self, model: Model, last: int, most: int) -> Sequence[JournalEntry]:
        """The entries up to a number, the newest first: numbers have no gaps."""
        first = max(1, last - most + 1)
        if last < first:
            return []
        found = await self._ledger.store.list(
            f"{JOURNAL}{model.digest}/", after=entry_key(model.digest, first - 1), limit=last - first + 1
        )
        return [decoded_entry(entry.value).entry for entry in reversed(found)]

    async def _about(
        self, model: Model, version: ModelVersion, newest: int, last: int, most: int
    ) -> Sequence[JournalEntry]:
        """The entries about one version up to a number, the newest first: each names the one before it."""
        number = newest
        if 0 < last + 1 <= newest:
            # A page ends with an entry about the version, and the next page begins before it.
            named = await self._entry(model, last + 1)
            number = named.previous if named.entry.version == version else newest
        entries: list[JournalEntry] = []
        while number and len(entries) < most:
            stored = await self._entry(model, number)
            if number <= last:
                entries.append(stored.entry)
            number = stored.previous
        return entries

    async def _entry(self, model: Model, number: int) -> StoredEntry:
        found = await self._ledger.store.get(entry_key(model.digest, number))
        assert found is not None, f"entry {number} of {model.model_id} is missing"
        return decoded_entry(found.value)


def _newest(model: Model, version: ModelVersion) -> int:
    """The newest entry about a version, also of a deleted one."""
    return model.deleted[version] if version in model.deleted else model.record(version).last_entry
