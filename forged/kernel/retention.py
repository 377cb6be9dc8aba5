"""Which facts the journal drops next: a pure decision by the shares of the jobs.

Invariants:
- Within the limits on facts and bytes nothing is dropped.
- Facts older than `AGED_S` are dropped first, the oldest of all first.
- Otherwise the job that has most of what is scarce, facts or bytes, loses its oldest fact. So a job that has no more
  than an equal share loses none of its younger facts to other jobs.
- The only fact of a job is dropped by age alone, and the newest fact of all never.
- A decision costs O(log jobs), for all facts that one job loses in a row.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeAlias

AGED_S = 7 * 24 * 3600.0
"""The age up to which the facts of a job are protected from other jobs: what an operator may still have to explain."""
ROOM = 8
"""A job's rank is raised by one part in so many at once, so that it is seldom raised."""

ENTRIES_MIN = 64


KeptFact: TypeAlias = tuple[int, int, float]
"""Id, size and time of a kept fact; a plain tuple, which the garbage collector does not visit."""


class _JobFacts:
    """The kept facts of one job, oldest first, and its ranks."""

    __slots__ = ("bytes", "bytes_rank", "facts", "facts_rank", "job", "oldest_rank")

    def __init__(self, job: str) -> None:
        self.job = job
        self.facts: deque[KeptFact] = deque()
        self.bytes = 0
        self.facts_rank = self.bytes_rank = self.oldest_rank = 0


class Retention:
    """The kept facts by job, with their sizes and times."""

    def __init__(self) -> None:
        self.facts = 0
        self.bytes = 0
        self._jobs: dict[str, _JobFacts] = {}
        self._by_facts = _Ranking(lambda job: -len(job.facts), "facts_rank")
        self._by_bytes = _Ranking(lambda job: -job.bytes, "bytes_rank")
        self._by_age = _Ranking(lambda job: job.facts[0][0], "oldest_rank")
        self._none_aged_until = -math.inf

    def __contains__(self, job: str) -> bool:
        """Whether any fact of the job is kept."""
        return job in self._jobs

    def __len__(self) -> int:
        """The number of jobs with kept facts."""
        return len(self._jobs)

    def keep(self, job: str, facts: Sequence[KeptFact]) -> None:
        """Count new facts of a job, the newest of all."""
        kept = self._jobs.get(job)
        if kept is None:
            kept = self._jobs[job] = _JobFacts(job)
            self._by_age.put(kept, facts[0][0])
        kept.facts += facts
        size = sum([size for _, size, _ in facts])
        kept.bytes += size
        self.facts += len(facts)
        self.bytes += size
        count = len(kept.facts)
        if -count < kept.facts_rank:
            self._by_facts.put(kept, -count - count // ROOM)
        if -kept.bytes < kept.bytes_rank:
            self._by_bytes.put(kept, -kept.bytes - kept.bytes // ROOM)

    def next_to_drop(self, facts_max: int, bytes_max: int, now: float) -> tuple[str, int] | None:
        """The job that loses its oldest facts next, and how many; None if nothing has to be dropped."""
        if (self.facts <= facts_max and self.bytes <= bytes_max) or self.facts <= 1:
            return None
        if now > self._none_aged_until:
            oldest = self._by_age.first()
            self._none_aged_until = oldest.facts[0][2] + AGED_S
            if now > self._none_aged_until:
                return oldest.job, 1
        surplus = self.facts - facts_max
        largest = (self._by_facts if surplus > 0 else self._by_bytes).first()
        facts = len(largest.facts)
        if facts == 1:
            return self._by_age.first().job, 1
        # It has most until it has fewer facts than the second one.
        return largest.job, min(surplus, facts - 1, facts + self._by_facts.second_rank() + 1) if surplus > 0 else 1

    def drop(self, job: str, count: int) -> list[int]:
        """Count the oldest facts of the job as dropped; returns their ids."""
        kept = self._jobs[job]
        dropped = [kept.facts.popleft() for _ in range(count)]
        size = sum(size for _, size, _ in dropped)
        kept.bytes -= size
        self.facts -= count
        self.bytes -= size
        if not kept.facts:
            del self._jobs[job]
        return [fact_id for fact_id, _, _ in dropped]


class _Ranking:
    """The jobs by a measure, the smallest first, in a heap.

    A job's rank, by which the heap is ordered, is at most its measure. So growing measures need no change, and ranks
    are corrected only at the head. Entries with a former rank of a job, or of a job without facts, are skipped.
    """

    def __init__(self, measure: Callable[[_JobFacts], int], rank: str) -> None:
        self._measure = measure
        self._rank = rank
        self._heap: list[tuple[int, int, _JobFacts]] = []
        self._puts = 0
        """The number of entries ever made, which orders jobs of the same rank."""
        self._entries_max = ENTRIES_MIN

    def put(self, job: _JobFacts, rank: int) -> None:
        """Give the job this rank."""
        if len(self._heap) >= self._entries_max:
            self._clean()
        setattr(job, self._rank, rank)
        self._puts += 1
        heappush(self._heap, (rank, self._puts, job))

    def first(self) -> _JobFacts:
        """The job with the smallest measure."""
        heap = self._heap
        while True:
            rank, number, job = heap[0]
            if not job.facts or getattr(job, self._rank) != rank:
                heappop(heap)
                continue
            measure = self._measure(job)
            if measure == rank or measure <= self.second_rank():
                return job
            setattr(job, self._rank, measure)
            heapreplace(heap, (measure, number, job))

    def second_rank(self) -> int:
        """The smallest rank but that of the head: no other job has a smaller measure."""
        return min(self._heap[1:3])[0] if len(self._heap) > 1 else sys.maxsize

    def _clean(self) -> None:
        """Leave one entry of each job that has facts."""
        live = {
            id(entry[2]): entry for entry in self._heap if entry[2].facts and getattr(entry[2], self._rank) == entry[0]
        }
        self._heap = list(live.values())
        heapify(self._heap)
        self._entries_max = 2 * len(self._heap) + ENTRIES_MIN
