"""The facts that wait for a plugin's handler: when there are too many, the job that has most loses its oldest.

Invariants:
- At most `facts_max` facts wait. A job within an equal part of them loses none to other jobs.
- Facts leave in the order of their ids. `take_gap` tells which were dropped directly before the next one.
- Adding a fact, taking and dropping one cost O(log jobs) on average.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from forged.kernel.messages import Record
from forged.kernel.retention import Retention

_Range: TypeAlias = tuple[int, int]
"""The first and the last id of dropped facts."""


class LossyQueue:
    """The waiting facts of one mailbox."""

    def __init__(self, facts_max: int) -> None:
        self._facts_max = facts_max
        self._records: deque[Record] = deque()
        """The waiting facts, and dropped ones that were not swept out yet."""
        self._waiting = Retention()
        self._dropped: set[int] = set()
        """The ids of the dropped facts in `_records`."""
        self._gaps: dict[int, _Range] = {}
        """For a fact in `_records`: the dropped facts before it that were swept out."""
        self._gap: _Range | None = None
        """The dropped facts before the first one."""

    def __len__(self) -> int:
        return self._waiting.facts

    def __iter__(self) -> Iterator[Record]:
        return (record for record in self._records if record.id not in self._dropped)

    def extend(self, records: Iterable[Record]) -> int:
        """Add facts; returns how many were dropped for them."""
        waiting, dropped = self._waiting, 0
        for record in records:
            self._records.append(record)
            waiting.keep(record.job, [(record.id, 0, record.at)])
            while (chosen := waiting.next_to_drop(self._facts_max, 0, record.at)) is not None:
                ids = waiting.drop(*chosen)
                self._dropped.update(ids)
                dropped += len(ids)
        if len(self._dropped) > self._facts_max:
            self._sweep()
        return dropped

    def popleft(self) -> Record:
        """Take the next fact."""
        self._skip_dropped()
        record = self._records.popleft()
        self._waiting.drop(record.job, 1)
        return record

    def take_gap(self) -> _Range | None:
        """The first and last id of the facts that were dropped before the next one; None without any."""
        self._skip_dropped()
        gap, self._gap = self._gap, None
        return gap

    def clear(self) -> None:
        """Forget all facts and gaps."""
        self._records.clear()
        self._waiting = Retention()
        self._dropped.clear()
        self._gaps.clear()
        self._gap = None

    def _skip_dropped(self) -> None:
        records, dropped = self._records, self._dropped
        while records:
            fact_id = records[0].id
            self._gap = _joined(self._gap, self._gaps.pop(fact_id, None))
            if fact_id not in dropped:
                return
            self._gap = _joined(self._gap, (fact_id, fact_id))
            dropped.discard(fact_id)
            records.popleft()

    def _sweep(self) -> None:
        """Replace the dropped facts in `_records` by gaps."""
        gap: _Range | None = None
        for record in self._records:
            gap = _joined(gap, self._gaps.pop(record.id, None))
            if record.id in self._dropped:
                gap = _joined(gap, (record.id, record.id))
            elif gap is not None:
                self._gaps[record.id], gap = gap, None
        self._records = deque(self)
        self._dropped.clear()


def _joined(before: _Range | None, after: _Range | None) -> _Range | None:
    if before is None or after is None:
        return before or after
    return before[0], after[1]
