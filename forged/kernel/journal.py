"""The facts that are kept: bounded, in order, and each with its reason.

Law: the journal holds durable facts only, in the order of their ids, and forgets the oldest first. What it has
forgotten it says: a reader who asks for facts from before `floor` learns which ids it missed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from forged.kernel.messages import Record

FACTS_MAX = 50_000
STORY_FACTS_MAX = 1_000


class Journal:
    """The most recent facts, found by position and by cause."""

    def __init__(self, facts_max: int = FACTS_MAX) -> None:
        self.facts_max = facts_max
        self.floor = 0
        """The id of the newest fact that was forgotten; 0 while there is none."""
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
        """Add facts that have become durable, in order."""
        ids = [record.id for record in records]
        assert not ids or ids[0] > self.last, "facts come in the order of their ids"
        self._ids += ids
        self._records += records
        self._forget_surplus()

    def reset(self, records: Sequence[Record], floor: int) -> None:
        """Become what the store holds."""
        self._ids = [record.id for record in records]
        self._records = list(records)
        self._start = 0
        self.floor = floor
        self._forget_surplus()

    def get(self, fact_id: int) -> Record | None:
        """The fact with that id, if it is still kept."""
        index = bisect_right(self._ids, fact_id, lo=self._start) - 1
        found = index >= self._start and self._ids[index] == fact_id
        return self._records[index] if found else None

    def after(self, position: int, limit: int) -> Sequence[Record]:
        """At most `limit` facts with ids greater than `position`, oldest first."""
        index = bisect_right(self._ids, position, lo=self._start)
        return self._records[index : index + limit]

    def count_after(self, position: int) -> int:
        """How many facts are kept with ids greater than `position`."""
        return len(self._ids) - bisect_right(self._ids, position, lo=self._start)

    def story(self, fact_id: int) -> list[Record]:
        """How a fact came about and what followed from it: its chain of causes and all its consequences, in order.

        Empty when the fact is not kept. A chain that leads to a forgotten fact ends there.
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

    def _forget_surplus(self) -> None:
        surplus = len(self) - self.facts_max
        if surplus <= 0:
            return
        self.floor = self._ids[self._start + surplus - 1]
        self._start += surplus
        # The forgotten head is cut off in large slices, so that forgetting one fact costs O(1).
        if self._start > max(1024, len(self._ids) // 4):
            del self._ids[: self._start]
            del self._records[: self._start]
            self._start = 0
