"""Decides which shard is transferred next, and from which source.

Invariants:
- The ready shard with the highest priority starts as soon as a slot is free; there are no batches.
- A shard tries its sources in order. It moves to the next source at once when the source cannot give the shard, and
  after some attempts when the source does not answer.
- Every attempt without progress counts, so each shard is moved or given up in the end, with all failures listed.
- After a connection failure all shards leave the source alone for a pause. Shards that fail in the same outage count as
  one failure. A source is given up only when more than one shard failed there: a single shard may break every
  connection by itself.
- A source that hangs on a shard is not asked for that shard again. When two shards have hung there and no other has
  succeeded meanwhile, it is asked for none, until one succeeds.
- Time and randomness are arguments.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from forged.data.model import DataShard
from forged.elastic.model import WorkerId
from forged.retry import Random, RetryPolicy

Source = WorkerId | None
"""A worker; None is the dataset's origin."""

CORRUPT_MAX = 2
"""How many corrupt copies of a shard one source may send: the first may have been damaged in transit."""


GIVEN_UP = "not tried: other shards failed at this source"


class Fault(Enum):
    """Why an attempt failed, as far as the next attempt depends on it."""

    BROKEN = auto()
    """The source did not answer or the connection broke; it may recover."""
    REFUSED = auto()
    """The source cannot give this shard."""
    CORRUPT = auto()
    """The source sent wrong bytes."""
    CORRUPT_MIXED = auto()
    """The bytes are wrong, and came from several sources, so none can be blamed."""
    SILENT = auto()
    """The source sent no byte within the timeout."""
    STUCK = auto()
    """Earlier attempts still hang at the source, so it was not asked."""
    OWN = auto()
    """This worker's own store failed."""


class Wanted(NamedTuple):
    """A shard to fetch, and its sources, the best first."""

    shard: DataShard
    priority: int
    sources: tuple[Source, ...]


class Start(NamedTuple):
    """The scheduler's instruction to fetch a shard from a source."""

    shard: DataShard
    source: Source
    may_be_at_a_worker: bool = False
    """Whether a worker that was named as a source was not reached."""


class FetchFailure(NamedTuple):
    """A failed attempt to fetch a shard from a source."""

    source: Source
    reason: str
    fault: Fault


@dataclass(slots=True)
class _SourceHealth:
    """The outages of one source."""

    policy: RetryPolicy
    random: Random
    pauses: Iterator[float] = field(init=False)
    began_at: float = field(init=False)
    """When the latest outage was noticed."""
    ready_at: float = field(init=False)
    """When the source may be tried again; infinity after too many outages."""
    failed_shards: set[int] = field(default_factory=set)
    """Shards whose transfers broke since the last success."""
    hung_shards: set[int] = field(default_factory=set)
    """Shards that hung since the last success."""
    successes: int = 0

    def __post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.pauses = self.policy.delays(self.random)
        self.began_at = self.ready_at = -math.inf

    def broke(self, shard_id: int, started_at: float, now: float) -> None:
        self.failed_shards.add(shard_id)
        if started_at <= self.began_at:
            return
        pause_s = next(self.pauses, math.inf)
        if pause_s == math.inf and len(self.failed_shards) == 1:
            self._reset()
        else:
            self.began_at, self.ready_at = now, now + pause_s

    def hung(self, shard_id: int, successes_before: int) -> None:
        """The source sent no byte of the shard; `successes_before` is the success count when it was asked."""
        if self.successes == successes_before:
            self.hung_shards.add(shard_id)

    def succeeded(self) -> None:
        self.successes += 1
        self.failed_shards.clear()
        self.hung_shards.clear()
        if self.ready_at < math.inf:
            self._reset()

    @property
    def is_given_up(self) -> bool:
        """Whether no shard asks the source; after hangs alone, the next success lifts this."""
        return self.ready_at == math.inf or len(self.hung_shards) > 1


@dataclass(slots=True)
class _Candidate:
    source: Source
    attempts: int = 0
    corrupt: int = 0


@dataclass(slots=True)
class _Shard:
    wanted: Wanted
    candidates: list[_Candidate]
    started_at: float = -math.inf
    successes_before: int = 0
    """The success count of its source when the attempt started."""
    own_failures: int = 0
    failures: list[FetchFailure] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return -self.wanted.priority, self.wanted.shard.shard_id

    @property
    def may_be_at_a_worker(self) -> bool:
        """Whether a worker was not reached; one that refused the shard or sent bad bytes does not have it."""
        return any(one.source is not None and one.fault is Fault.BROKEN for one in self.failures)


class TransferSchedule:
    """Is told how each attempt ended, and decides what starts next."""

    def __init__(self, wanted: Iterable[Wanted], concurrency: int, retry: RetryPolicy, random: Random) -> None:
        self.given_up: dict[int, tuple[FetchFailure, ...]] = {}
        self._concurrency = concurrency
        self._retry = retry
        self._random = random
        self._shards: dict[int, _Shard] = {}
        self._sources: dict[Source, _SourceHealth] = {}
        self._under_way: set[int] = set()
        self._ready: list[tuple[int, int]] = []
        self._parked: list[tuple[float, tuple[int, int]]] = []
        for one in wanted:
            self._admit(one)
        heapq.heapify(self._ready)

    def _admit(self, wanted: Wanted) -> None:
        candidates = [_Candidate(source) for source in dict.fromkeys(wanted.sources)]
        shard = self._shards.setdefault(wanted.shard.shard_id, _Shard(wanted, candidates))
        if shard.wanted is not wanted:
            return
        for source in wanted.sources:
            if source not in self._sources:
                self._sources[source] = _SourceHealth(self._retry, self._random)
        if candidates:
            self._ready.append(shard.key)
        else:
            self._give_up(shard)

    @property
    def is_over(self) -> bool:
        """Whether every shard is moved or given up."""
        return not self._shards

    def next(self, now: float) -> Start | None:
        """The next transfer to start; None if none can start now."""
        while self._parked and self._parked[0][0] <= now:
            heapq.heappush(self._ready, heapq.heappop(self._parked)[1])
        while self._ready and len(self._under_way) < self._concurrency:
            shard = self._shards[heapq.heappop(self._ready)[1]]
            if (source := self._source_for(shard, now)) is not None:
                return self._start(shard, source, now)
        return None

    def next_at(self) -> float | None:
        """When a paused shard becomes ready; None if the next start depends on the end of a running transfer."""
        is_full = len(self._under_way) >= self._concurrency
        return None if is_full or not self._parked else self._parked[0][0]

    def succeeded(self, shard_id: int) -> None:
        """The shard is held."""
        shard = self._shards.pop(shard_id)
        self._under_way.remove(shard_id)
        self._sources[shard.candidates[0].source].succeeded()

    def failed(self, shard_id: int, fault: Fault, reason: str, now: float, *, progressed: bool = False) -> None:
        """The attempt failed; `progressed` if the next one can start further on than this one did."""
        shard = self._shards[shard_id]
        self._under_way.remove(shard_id)
        candidate = shard.candidates[0]
        shard.failures.append(FetchFailure(candidate.source, reason, fault))
        if progressed:
            candidate.attempts = 0
            self._sources[candidate.source].succeeded()
        ready_at = self._apply_fault(shard, candidate, fault, now)
        if not shard.candidates:
            self._give_up(shard)
        elif ready_at > now:
            heapq.heappush(self._parked, (ready_at, shard.key))
        else:
            heapq.heappush(self._ready, shard.key)

    def _start(self, shard: _Shard, candidate: _Candidate, now: float) -> Start:
        shard.started_at = now
        shard.successes_before = self._sources[candidate.source].successes
        self._under_way.add(shard.wanted.shard.shard_id)
        return Start(shard.wanted.shard, candidate.source, shard.may_be_at_a_worker)

    def _source_for(self, shard: _Shard, now: float) -> _Candidate | None:
        """The source to ask now; if None, the shard is parked or given up."""
        while shard.candidates:
            candidate = shard.candidates[0]
            health = self._sources[candidate.source]
            if health.is_given_up:
                shard.failures.append(FetchFailure(candidate.source, GIVEN_UP, Fault.BROKEN))
                shard.candidates.pop(0)
            elif health.ready_at <= now:
                return candidate
            else:
                heapq.heappush(self._parked, (health.ready_at, shard.key))
                return None
        self._give_up(shard)
        return None

    def _apply_fault(self, shard: _Shard, candidate: _Candidate, fault: Fault, now: float) -> float:
        """Update the shard's sources after a failure; returns when its next attempt may start."""
        match fault:
            case Fault.BROKEN:
                return self._apply_broken(shard, candidate, now)
            case Fault.REFUSED | Fault.STUCK:
                shard.candidates.pop(0)
            case Fault.SILENT:
                shard.candidates.pop(0)
                self._sources[candidate.source].hung(shard.wanted.shard.shard_id, shard.successes_before)
            case Fault.CORRUPT | Fault.CORRUPT_MIXED:
                candidate.corrupt += 1
                shard.candidates.pop(0)
                if candidate.corrupt < CORRUPT_MAX or fault is Fault.CORRUPT_MIXED:
                    self._put_last(shard, candidate)
            case Fault.OWN:
                shard.own_failures += 1
                pause_s = self._nth_pause(shard.own_failures)
                if pause_s is None:
                    shard.candidates.clear()
                return now + (pause_s or 0.0)
        return now

    def _apply_broken(self, shard: _Shard, candidate: _Candidate, now: float) -> float:
        health = self._sources[candidate.source]
        health.broke(shard.wanted.shard.shard_id, shard.started_at, now)
        candidate.attempts += 1
        if health.is_given_up or self._nth_pause(candidate.attempts) is None:
            shard.candidates.pop(0)
            return now
        return max(now, health.ready_at)

    def _put_last(self, shard: _Shard, candidate: _Candidate) -> None:
        """Try the source again after the others, a limited number of times."""
        candidate.attempts += 1
        if self._nth_pause(candidate.attempts) is not None:
            shard.candidates.append(candidate)

    def _nth_pause(self, number: int) -> float | None:
        """The policy's pause after so many failures; None when it gives up."""
        for count, pause_s in enumerate(self._retry.delays(self._random), 1):
            if count == number:
                return pause_s
        return None

    def _give_up(self, shard: _Shard) -> None:
        shard_id = shard.wanted.shard.shard_id
        del self._shards[shard_id]
        self.given_up[shard_id] = tuple(shard.failures)
