"""Which shard is moved next, and from where.

Law: of the shards that can be moved now, the one with the highest priority is, as soon as there is room for another;
no shard waits for the end of others. A shard has its sources in the order in which they are to be asked, and goes on
to the next when the one before has been given up: at once when that cannot give it, after some attempts when it does
not answer. Every attempt that gains nothing counts, so each shard is moved or given up in the end, and then all that
went wrong is told. Time and randomness are arguments.

A source that breaks off is left alone for a while by all shards, and one outage is one failure, however many shards
were on their way from it. It is given up when more than one shard speaks against it: a single one may break every
connection by itself. One that gives nothing for so long that it counts as hanging is not asked for that shard again,
and for no other when two have waited for it in vain while nothing else came of it, until something does.
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
"""A worker, or the dataset's origin."""

CORRUPT_MAX = 2
"""How many copies from one source may turn out wrong: the first may have been damaged on its way."""


class Fault(Enum):
    """Why an attempt failed, as far as it matters for the next."""

    BROKEN = auto()
    """The source does not answer, or broke off; it may come back."""
    REFUSED = auto()
    """The source cannot give this shard."""
    CORRUPT = auto()
    """What came from this source was wrong."""
    DOUBTFUL = auto()
    """What came was wrong, and part of it was there before; nobody knows who is to blame."""
    SILENT = auto()
    """The source gave nothing for as long as there was patience; it may in the next try."""
    STUCK = auto()
    """Earlier attempts at this shard still hang at the source, and it is not asked once more."""
    OURS = auto()
    """This worker could not take it."""


class Wanted(NamedTuple):
    """A shard to be moved here, and where it may come from, the best first."""

    shard: DataShard
    priority: int
    sources: tuple[Source, ...]


class Start(NamedTuple):
    """Move this shard from there now."""

    shard: DataShard
    source: Source
    is_elsewhere: bool = False
    """Whether a worker was to have it who was not reached."""


class Complaint(NamedTuple):
    """What went wrong with a shard at a source."""

    source: Source
    reason: str
    fault: Fault


@dataclass(slots=True)
class _Outages:
    """Of one source."""

    policy: RetryPolicy
    random: Random
    pauses: Iterator[float] = field(init=False)
    began_at: float = field(init=False)
    """When the newest outage was noticed."""
    ready_at: float = field(init=False)
    """When it may be tried again; infinity: it has broken off too often."""
    failed_shards: set[int] = field(default_factory=set)
    """Which have broken off since it worked."""
    hung_shards: set[int] = field(default_factory=set)
    """Which have waited in vain since it worked."""
    successes: int = 0

    def __post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.pauses = self.policy.delays(self.random)
        self.began_at = self.ready_at = -math.inf

    def failed(self, shard_id: int, started_at: float, now: float) -> None:
        self.failed_shards.add(shard_id)
        if started_at <= self.began_at:
            return
        pause_s = next(self.pauses, math.inf)
        if pause_s == math.inf and len(self.failed_shards) == 1:
            self._forget()
        else:
            self.began_at, self.ready_at = now, now + pause_s

    def hung(self, shard_id: int, successes_before: int) -> None:
        """It gave nothing of the shard in the time in which it had had so many successes at first."""
        if self.successes == successes_before:
            self.hung_shards.add(shard_id)

    def worked(self) -> None:
        self.successes += 1
        self.failed_shards.clear()
        self.hung_shards.clear()
        if self.ready_at < math.inf:
            self._forget()

    @property
    def is_lost(self) -> bool:
        """Whether it was given up; for hanging alone it is no longer when something comes of it after all."""
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
    """How often its source had worked when it was asked."""
    own_failures: int = 0
    complaints: list[Complaint] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return -self.wanted.priority, self.wanted.shard.shard_id

    @property
    def is_elsewhere(self) -> bool:
        """Whether a worker may have it who was not reached; one that refused it, or gave bad bytes, has it not."""
        return any(one.source is not None and one.fault is Fault.BROKEN for one in self.complaints)


class TransferSchedule:
    """Decides; who uses it tells it how each attempt ended."""

    def __init__(self, wanted: Iterable[Wanted], concurrency: int, retry: RetryPolicy, random: Random) -> None:
        self.given_up: dict[int, tuple[Complaint, ...]] = {}
        self._concurrency = concurrency
        self._retry = retry
        self._random = random
        self._shards: dict[int, _Shard] = {}
        self._sources: dict[Source, _Outages] = {}
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
                self._sources[source] = _Outages(self._retry, self._random)
        if candidates:
            self._ready.append(shard.key)
        else:
            self._give_up(shard)

    @property
    def is_over(self) -> bool:
        """Whether every shard was moved or given up."""
        return not self._shards

    def next(self, now: float) -> Start | None:
        """What to start, if anything can be."""
        while self._parked and self._parked[0][0] <= now:
            heapq.heappush(self._ready, heapq.heappop(self._parked)[1])
        while self._ready and len(self._under_way) < self._concurrency:
            shard = self._shards[heapq.heappop(self._ready)[1]]
            if (source := self._source_for(shard, now)) is not None:
                return self._start(shard, source, now)
        return None

    def next_at(self) -> float | None:
        """When something can be started that waits for its time; None: only when something else has ended."""
        is_full = len(self._under_way) >= self._concurrency
        return None if is_full or not self._parked else self._parked[0][0]

    def succeeded(self, shard_id: int) -> None:
        """The shard is here."""
        shard = self._shards.pop(shard_id)
        self._under_way.remove(shard_id)
        self._sources[shard.candidates[0].source].worked()

    def failed(self, shard_id: int, fault: Fault, reason: str, now: float, *, progressed: bool = False) -> None:
        """The attempt has failed; `progressed` if the next can go on further than this one began."""
        shard = self._shards[shard_id]
        self._under_way.remove(shard_id)
        candidate = shard.candidates[0]
        shard.complaints.append(Complaint(candidate.source, reason, fault))
        if progressed:
            candidate.attempts = 0
            self._sources[candidate.source].worked()
        ready_at = self._judge(shard, candidate, fault, now)
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
        return Start(shard.wanted.shard, candidate.source, shard.is_elsewhere)

    def _source_for(self, shard: _Shard, now: float) -> _Candidate | None:
        """Whom to ask now; if nobody, the shard is parked or given up."""
        while shard.candidates:
            candidate = shard.candidates[0]
            outages = self._sources[candidate.source]
            if outages.is_lost:
                shard.complaints.append(Complaint(candidate.source, "it was given up", Fault.BROKEN))
                shard.candidates.pop(0)
            elif outages.ready_at <= now:
                return candidate
            else:
                heapq.heappush(self._parked, (outages.ready_at, shard.key))
                return None
        self._give_up(shard)
        return None

    def _judge(self, shard: _Shard, candidate: _Candidate, fault: Fault, now: float) -> float:
        """Settle who is asked next, and say when."""
        match fault:
            case Fault.BROKEN:
                return self._judge_broken(shard, candidate, now)
            case Fault.REFUSED | Fault.STUCK:
                shard.candidates.pop(0)
            case Fault.SILENT:
                shard.candidates.pop(0)
                self._sources[candidate.source].hung(shard.wanted.shard.shard_id, shard.successes_before)
            case Fault.CORRUPT | Fault.DOUBTFUL:
                candidate.corrupt += 1
                shard.candidates.pop(0)
                if candidate.corrupt < CORRUPT_MAX or fault is Fault.DOUBTFUL:
                    self._put_last(shard, candidate)
            case Fault.OURS:
                shard.own_failures += 1
                pause_s = self._nth_pause(shard.own_failures)
                if pause_s is None:
                    shard.candidates.clear()
                return now + (pause_s or 0.0)
        return now

    def _judge_broken(self, shard: _Shard, candidate: _Candidate, now: float) -> float:
        outages = self._sources[candidate.source]
        outages.failed(shard.wanted.shard.shard_id, shard.started_at, now)
        candidate.attempts += 1
        if outages.is_lost or self._nth_pause(candidate.attempts) is None:
            shard.candidates.pop(0)
            return now
        return max(now, outages.ready_at)

    def _put_last(self, shard: _Shard, candidate: _Candidate) -> None:
        """After all others have had their turn; but a source whose bytes never fit is not asked for ever."""
        candidate.attempts += 1
        if self._nth_pause(candidate.attempts) is not None:
            shard.candidates.append(candidate)

    def _nth_pause(self, number: int) -> float | None:
        """How long the policy waits after so many failures; None: it gives up."""
        for count, pause_s in enumerate(self._retry.delays(self._random), 1):
            if count == number:
                return pause_s
        return None

    def _give_up(self, shard: _Shard) -> None:
        shard_id = shard.wanted.shard.shard_id
        del self._shards[shard_id]
        self.given_up[shard_id] = tuple(shard.complaints)
