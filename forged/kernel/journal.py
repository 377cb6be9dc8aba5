"""The journal: the most recent durable facts, in memory, in id order.

Invariants:
- Only durable facts are in the journal; ids ascend.
- The oldest facts are dropped first. `floor` is the newest dropped id, so readers can report which ids they missed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from forged.kernel.messages import Record

FACTS_MAX = 50_000
STORY_FACTS_MAX = 1_000


class Journal:
    """The most recent facts, indexed by id and by cause."""

    def __init__(self, facts_max: int = FACTS_MAX) -> None:
        self.facts_max = facts_max
        self.floor = 0
        """The id of the newest dropped fact; 0 if none was dropped."""
        self._ids: list[int] = []
        self._records: list[Record] = []
        self._start = 0

    def __len__(self) -> int:
        return len(self._ids) - self._start

    @property
    def last(self) -> int:
        """The id of the newest fact; 0 before the first."""
        return self._ids[-1] if self._ids else 0

    def extend(self, records: Sequence[Record]) -> None:
        """Append durable facts in id order."""
        ids = [record.id for record in records]
        assert not ids or ids[0] > self.last, "facts come in the order of their ids"
        self._ids += ids
        self._records += records
        self._drop_surplus()

    def reset(self, records: Sequence[Record], floor: int) -> None:
        """Replace the content with the facts of the store."""
        self._ids = [record.id for record in records]
        self._records = list(records)
        self._start = 0
        self.floor = floor
        self._drop_surplus()

    def get(self, fact_id: int) -> Record | None:
        """The fact with that id, or None if it was dropped or never existed."""
        index = bisect_right(self._ids, fact_id, lo=self._start) - 1
        found = index >= self._start and self._ids[index] == fact_id
        return self._records[index] if found else None

    def after(self, position: int, limit: int) -> Sequence[Record]:
        """At most `limit` facts with ids greater than `position`, oldest first."""
        index = bisect_right(self._ids, position, lo=self._start)
        return self._records[index : index + limit]

    def count_after(self, position: int) -> int:
        """The number of kept facts with ids greater than `position`."""
        return len(self._ids) - bisect_right(self._ids, position, lo=self._start)

    def story(self, fact_id: int) -> list[Record]:
        """The chain of causes of a fact, the fact, and its direct and indirect consequences, in id order.

        Empty if the fact is not in the journal. The chain ends at a dropped cause.
        """
        origin = self.get(fact_id)
        if origin is None:
            return []
        chain = [origin]
        while (cause := self.get(chain[-1].cause)) is not None and len(chain) < STORY_FACTS_MAX:
            chain.append(cause)
        return [*reversed(chain), *self._consequences(fact_id, STORY_FACTS_MAX - len(chain))]

    def _consequences(self, fact_id: int, limit: int) -> Iterator[Record]:
        known = {fact_id}
        index = bisect_right(self._ids, fact_id, lo=self._start)
        while index < len(self._ids) and limit > 0:
            record = self._records[index]
            if record.cause in known:
                known.add(record.id)
                limit -= 1
                yield record
            index += 1

    def _drop_surplus(self) -> None:
        surplus = len(self) - self.facts_max
        if surplus <= 0:
            return
        self.floor = self._ids[self._start + surplus - 1]
        self._start += surplus
        # Dropped records are deleted in large slices, so that dropping one fact costs O(1).
        if self._start > max(1024, len(self._ids) // 4):
            del self._ids[: self._start]
            del self._records[: self._start]
            self._start = 0
