"""The journal: the most recent durable facts of each job, in memory, in id order.

Invariants:
- Only durable facts are in the journal; ids ascend.
- When it is full, `Retention` decides which job loses its oldest fact, so that no job displaces the facts of another.
- Readers can tell which facts they missed: `floor_of` is the newest dropped id of a job, `dropped_before` the newest
  dropped id between a kept fact and the kept fact before it.
- To append a fact and to drop one costs O(log facts), however many there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from forged.kernel.messages import Record
from forged.kernel.retention import Retention

FACTS_MAX = 50_000
BYTES_MAX = 64 << 20
STORY_FACTS_MAX = 1_000
BLOCK_FACTS_MAX = 512
FLOORS_SLACK = 1024
"""So many floors of jobs without facts are kept at least."""

_id = attrgetter("id")
_job = attrgetter("job")


@dataclass(slots=True)
class Dropped:
    """What a transaction changes in the store because facts were dropped."""

    ids: list[int] = field(default_factory=list)
    floors: dict[str, int | None] = field(default_factory=dict)
    """The newest dropped id of a job; None for a job without kept facts, which shares `floor_of_others`."""
    floor_of_others: int = 0


class Journal:
    """The kept facts, indexed by id and by cause."""

    def __init__(self, facts_max: int = FACTS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.facts_max = facts_max
        self.bytes_max = bytes_max
        self._clear()

    def _clear(self) -> None:
        self.last = 0
        """The id of the newest fact; 0 before the first."""
        self.floor = 0
        """The newest id that was dropped; 0 if none was dropped. Older facts may be kept."""
        self._floors: dict[str, int] = {}
        """The newest dropped id of each job that has lost facts and has kept ones."""
        self._floor_of_others = 0
        """The newest dropped id of all jobs without kept facts."""
        self._blocks: list[list[Record]] = []
        """The kept facts, in short lists, so that one of them is deleted at a small cost."""
        self._first_ids: list[int] = []
        """The smallest id that each block may hold."""
        self.drops = 0
        """How many facts were dropped since the journal was loaded."""
        self._holes: dict[int, tuple[int, int]] = {}
        """For a kept fact that follows dropped ones directly: the newest of them, and `drops` after the last drop."""
        self._count = 0
        self._retention = Retention()
        """The facts that are kept once all planned facts are durable."""
        self._planned = 0
        """The newest fact that was planned."""
        self._drops: deque[tuple[int, list[int], str]] = deque()
        """Facts that are dropped when a planned fact arrives: the id of that fact, the own ids, the job."""
        self._undeleted: deque[tuple[int, str]] = deque()
        """Dropped facts that the store still has, with their jobs."""
        self._unused_floors: deque[str] = deque()
        """Jobs whose floor the store still has, and need not have."""

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> int:
        """The encoded size of the kept facts, those that are not durable yet included."""
        return self._retention.bytes

    @property
    def first(self) -> Record | None:
        """The oldest kept fact."""
        return self._blocks[0][0] if self._blocks else None

    def plan(self, records: Sequence[Record]) -> None:
        """Decide what is dropped when these facts, which are not durable yet, are appended."""
        retention = self._retention
        for job, of_job in groupby(records, _job):
            facts = [(record.id, len(record.data), record.at) for record in of_job]
            if 0 < self._floor_of_others < facts[0][0] and job not in retention:
                # The job may be one of those that have lost all their facts.
                self._floors.setdefault(job, self._floor_of_others)
            retention.keep(job, facts)
        if records:
            self._planned = records[-1].id
            self._plan_drops(records[-1].at)

    def extend(self, records: Sequence[Record]) -> None:
        """Append durable facts in id order, and drop older facts as planned."""
        if records and records[-1].id > self._planned:
            self.plan([record for record in records if record.id > self._planned])
        self._append(records)
        self._drop_planned()

    def reset(self, records: Sequence[Record], floor_of_others: int, floors: Mapping[str, int] | None = None) -> None:
        """Replace the content with the facts and floors of the store."""
        self._clear()
        self._floors = dict(floors or {})
        self._floor_of_others = floor_of_others
        self.floor = max([floor_of_others, *self._floors.values()])
        last = 0
        for record in records:
            # Which ids between two facts were dropped is no longer known, so all of them may have been.
            if last + 1 < record.id and last < self.floor:
                self._holes[record.id] = min(record.id - 1, self.floor), 0
            last = record.id
        self._append(records)
        self.plan(records)
        self._drop_planned()
        self._forget_floors()

    def get(self, fact_id: int) -> Record | None:
        """The fact with that id, or None if it was dropped or never existed."""
        record = next(self._from(fact_id), None)
        return record if record is not None and record.id == fact_id else None

    def after(self, position: int, limit: int) -> Sequence[Record]:
        """At most `limit` facts with ids greater than `position`, oldest first."""
        found: list[Record] = []
        number, index = self._find(position + 1)
        while number < len(self._blocks) and len(found) < limit:
            found += self._blocks[number][index : index + limit - len(found)]
            number, index = number + 1, 0
        return found

    def count_after(self, position: int) -> int:
        """The number of kept facts with ids greater than `position`."""
        number, index = self._find(position + 1)
        return sum(map(len, self._blocks[number:])) - index

    def floor_of(self, jobs: Collection[str] | None) -> int:
        """The newest dropped id of these jobs, or of all; 0 if they have lost none."""
        return self.floor if jobs is None else max(map(self._floor_of, jobs), default=0)

    def dropped_before(self, fact_id: int) -> int:
        """The newest dropped id between this kept fact and the kept one before it; 0 if none was dropped there."""
        return self._holes[fact_id][0] if fact_id in self._holes else 0

    def drops_before(self, fact_id: int) -> int:
        """What `drops` was after the last drop between this kept fact and the kept one before it."""
        return self._holes[fact_id][1] if fact_id in self._holes else 0

    def take_dropped(self, facts_max: int, operations_max: int, newest_id: int) -> Dropped:
        """The next changes that the store needs because facts were dropped, in so many operations at most.

        Facts with ids greater than `newest_id` are in the same transaction and stay until a later one.
        """
        dropped = Dropped(floor_of_others=self._floor_of_others)
        ids, floors = dropped.ids, dropped.floors
        # The next fact may belong to another job, whose floor is written too, besides that of the other jobs.
        while self._undeleted and len(ids) < facts_max and len(ids) + len(floors) + 3 <= operations_max:
            if self._undeleted[0][0] > newest_id:
                break
            fact_id, job = self._undeleted.popleft()
            ids.append(fact_id)
            floors[job] = fact_id
        while self._unused_floors and len(ids) + len(floors) + 2 <= operations_max:
            floors.setdefault(self._unused_floors.popleft(), None)
        return dropped

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
        for record in self._from(fact_id + 1):
            if limit <= 0:
                return
            if record.cause in known:
                known.add(record.id)
                limit -= 1
                yield record

    def _from(self, fact_id: int) -> Iterator[Record]:
        """The facts with this and greater ids."""
        number, index = self._find(fact_id)
        while number < len(self._blocks):
            yield from self._blocks[number][index:]
            number, index = number + 1, 0

    def _find(self, fact_id: int) -> tuple[int, int]:
        """The block and the index in it of the first fact with this or a greater id."""
        number = max(0, bisect_right(self._first_ids, fact_id) - 1)
        if number == len(self._blocks):
            return number, 0
        index = bisect_left(self._blocks[number], fact_id, key=_id)
        return (number, index) if index < len(self._blocks[number]) else (number + 1, 0)

    def _floor_of(self, job: str) -> int:
        return self._floors.get(job, 0 if job in self._retention else self._floor_of_others)

    def _append(self, records: Sequence[Record]) -> None:
        start = 0
        while start < len(records):
            if not self._blocks or len(self._blocks[-1]) >= BLOCK_FACTS_MAX:
                self._blocks.append([])
                self._first_ids.append(records[start].id)
            block = self._blocks[-1]
            end = start + BLOCK_FACTS_MAX - len(block)
            block += records[start:end]
            start = end
        for record in records:
            assert record.id > self.last, "facts come in the order of their ids"
            self.last = record.id
        self._count += len(records)

    def _plan_drops(self, now: float) -> None:
        retention = self._retention
        while (found := retention.next_to_drop(self.facts_max, self.bytes_max, now)) is not None:
            job, count = found
            ids = retention.drop(job, count)
            self._drops.append((self._planned, ids, job))
            self._undeleted.extend((fact_id, job) for fact_id in ids)

    def _drop_planned(self) -> None:
        while self._drops and self._drops[0][0] <= self.last:
            _, ids, job = self._drops.popleft()
            self._drop(ids, job)

    def _drop(self, ids: list[int], job: str) -> None:
        """Drop facts of a job that have no other facts of the job between them."""
        done = 0
        while done < len(ids):
            head = self._blocks[0]
            count = min(len(head), len(ids) - done)
            # Mostly the oldest facts of all go: as many facts between the same two ids are the same facts.
            if head[0].id == ids[done] and head[count - 1].id == ids[done + count - 1]:
                self._delete(0, 0, count)
            else:
                count = 1
                self._delete(*self._find(ids[done]), 1)
            done += count
        self._count -= len(ids)
        self._floors[job] = ids[-1]
        self.floor = max(self.floor, ids[-1])
        if len(self._floors) > 2 * len(self._retention) + FLOORS_SLACK:
            self._forget_floors()

    def _delete(self, number: int, index: int, count: int) -> None:
        """Delete facts that follow each other in a block, and note that they are missing before the next fact."""
        block = self._blocks[number]
        dropped = block[index : index + count]
        del block[index : index + count]
        if len(block) <= BLOCK_FACTS_MAX // 4 and self._join(number):
            number, index = self._find(dropped[-1].id)
        elif index == len(block):
            number, index = number + 1, 0
        for record in dropped if self._holes else ():
            self._holes.pop(record.id, None)
        # The newest fact of all is never dropped, so one follows.
        following_id = self._blocks[number][index].id
        self.drops += count
        self._holes[following_id] = max(self.dropped_before(following_id), dropped[-1].id), self.drops

    def _forget_floors(self) -> None:
        """Keep one floor for all jobs without facts."""
        for job in [job for job in self._floors if job not in self._retention]:
            self._floor_of_others = max(self._floor_of_others, self._floors.pop(job))
            self._unused_floors.append(job)

    def _join(self, number: int) -> bool:
        """Delete the block if it is empty, or join it with the next one if both are small; returns whether it did."""
        blocks = self._blocks
        if not blocks[number]:
            del blocks[number], self._first_ids[number]
            return True
        if number + 1 < len(blocks) and len(blocks[number]) + len(blocks[number + 1]) <= BLOCK_FACTS_MAX // 2:
            blocks[number] += blocks[number + 1]
            del blocks[number + 1], self._first_ids[number + 1]
            return True
        return False
