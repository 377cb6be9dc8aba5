"""Which fact the journal drops next: a pure decision by the shares of the jobs.

Invariants:
- Within the limits on facts and bytes nothing is dropped.
- Facts older than `AGED_S` are dropped first, the oldest of all first.
- Otherwise the job that has most of what is scarce, facts or bytes, loses its oldest fact. So a job that has no more
  than an equal share loses none of its younger facts to other jobs.
- The only fact of a job is dropped by age alone, and the newest fact of all never.
- A decision costs O(log jobs).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeAlias

AGED_S = 7 * 24 * 3600.0
"""The age up to which the facts of a job are protected from other jobs: what an operator may still have to explain."""
ROOM = 8
"""A job's rank is raised by one part in so many at once, so that it is seldom raised."""

ENTRIES_MIN = 64


_Kept: TypeAlias = tuple[int, int, float]
"""Id, size and time of a kept fact; a plain tuple, which the garbage collector does not visit."""


class _JobFacts:
    """The kept facts of one job, oldest first, and its ranks."""

    __slots__ = ("bytes", "bytes_rank", "facts", "facts_rank", "job", "oldest_rank")

    def __init__(self, job: str) -> None:
        self.job = job
        self.facts: deque[_Kept] = deque()
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

    def keep(self, job: str, fact_id: int, size: int, at: float) -> None:
        """Count a new fact, the newest of all."""
        kept = self._jobs.get(job)
        if kept is None:
            kept = self._jobs[job] = _JobFacts(job)
            self._by_age.put(kept, fact_id)
        kept.facts.append((fact_id, size, at))
        kept.bytes += size
        self.facts += 1
        self.bytes += size
        facts = len(kept.facts)
        if -facts < kept.facts_rank:
            self._by_facts.put(kept, -facts - facts // ROOM)
        if -kept.bytes < kept.bytes_rank:
            self._by_bytes.put(kept, -kept.bytes - kept.bytes // ROOM)

    def next_to_drop(self, facts_max: int, bytes_max: int, now: float) -> str | None:
        """The job that loses its oldest fact next; None if nothing has to be dropped."""
        if (self.facts <= facts_max and self.bytes <= bytes_max) or self.facts <= 1:
            return None
        if now > self._none_aged_until:
            oldest = self._by_age.first()
            self._none_aged_until = oldest.facts[0][2] + AGED_S
            if now > self._none_aged_until:
                return oldest.job
        largest = (self._by_facts if self.facts > facts_max else self._by_bytes).first()
        return largest.job if len(largest.facts) > 1 else self._by_age.first().job

    def drop(self, job: str) -> int:
        """Count the oldest fact of the job as dropped; returns its id."""
        kept = self._jobs[job]
        fact_id, size, _ = kept.facts.popleft()
        kept.bytes -= size
        self.facts -= 1
        self.bytes -= size
        if not kept.facts:
            del self._jobs[job]
        return fact_id


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
            if measure == rank or len(heap) == 1 or measure <= min(heap[1:3])[0]:
                return job
            setattr(job, self._rank, measure)
            heapreplace(heap, (measure, number, job))

    def _clean(self) -> None:
        """Leave one entry of each job that has facts."""
        live = {
            id(entry[2]): entry for entry in self._heap if entry[2].facts and getattr(entry[2], self._rank) == entry[0]
        }
        self._heap = list(live.values())
        heapify(self._heap)
        self._entries_max = 2 * len(self._heap) + ENTRIES_MIN
