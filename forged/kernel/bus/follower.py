"""A follower: a handler that reads facts from the journal at its own pace.

Invariants:
- A follower holds a position in the journal and no queue, so a slow follower costs the bus nothing.
- Facts are delivered in id order and at least once: the position is stored after delivery and used after a restart.
- A failed delivery is retried, never skipped. Facts that the journal has dropped meanwhile are delivered as a gap, in
  their place and at least once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from forged.errors import ForgedError, Unavailable, describe
from forged.kernel.bus.cancellation import is_cancelled
from forged.kernel.bus.statistics import HandlerStatistics
from forged.kernel.journal import Journal
from forged.kernel.messages import Fact, Gap, Record
from forged.retry import Random, RetryPolicy

SCAN_MAX = 1_000
"""The number of facts that are examined before other tasks run."""
DELIVERY_RETRY = RetryPolicy(attempts=None, delay_s=0.2, exponential=True, delay_max_s=30.0, jitter=0.25)

Deliver = Callable[[Sequence[Record]], Awaitable[None]]
TellGap = Callable[[Gap], Awaitable[None] | None]


class FactSource(Protocol):
    """The part of the ledger that a follower reads."""

    journal: Journal
    published: int


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    """What a follower receives. Empty `types` or `jobs` mean all; facts without a job have the job `""`."""

    name: str
    deliver: Deliver
    types: frozenset[type[Fact]] = frozenset()
    jobs: frozenset[str] = frozenset()
    batch_max: int = 100
    on_gap: TellGap | None = None


class Follower:
    """The position and task of one follower."""

    def __init__(
        self,
        options: FollowerOptions,
        *,
        now: Callable[[], float],
        random: Random,
        sleep: Callable[[float], Awaitable[None]],
        report: Callable[[Follower, str], None],
        on_bug: Callable[[str, BaseException], None] = lambda owner, error: None,
    ) -> None:
        self.options = options
        self.statistics = HandlerStatistics()
        self.position = 0
        """Everything up to here was delivered or filtered out."""
        self.failures_in_a_row = 0
        self.waiting_for: str | None = None
        """Why the next delivery failed; None if the last one succeeded."""
        self.retry_at: float | None = None
        """When the failed delivery is retried, by the monotonic clock."""
        self.paused = False
        self._types = frozenset(fact_type.__name__ for fact_type in options.types)
        self._now = now
        self._random = random
        self._sleep = sleep
        self._report = report
        self._on_bug = on_bug
        self._source: FactSource | None = None
        self._idle = False
        self._wanted: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def idle(self) -> bool:
        """Whether everything that was published has been delivered."""
        return self._idle

    @property
    def behind(self) -> int:
        """The number of journal facts after the position, before filtering."""
        return 0 if self._source is None or self._idle else self._source.journal.count_after(self.position)

    def begin(self, source: FactSource, position: int) -> None:
        """Start after `position`."""
        self._source, self.position = source, position

    def put(self, records: Sequence[Record]) -> None:
        """New facts are in the journal. Never blocks and never calls the handler."""
        if self._idle:
            # Facts in between did not match the types, or `put` would have been called.
            self.position = max(self.position, records[0].id - 1)
            self._idle = False
        self._wake()

    def pause(self) -> None:
        """Stop delivering until `resume`; the position stays."""
        self.paused = True

    def resume(self) -> None:
        """Continue at the position."""
        self.paused, self.failures_in_a_row, self.waiting_for = False, 0, None
        self._wake()

    async def run(self) -> None:
        """Deliver until cancelled."""
        pauses = DELIVERY_RETRY.delays(self._random)
        while True:
            if self.paused:
                await self._wait()
                continue
            reached, deliver = self._next()
            if deliver is None:
                await self._move_on(reached)
            elif await self._try_delivery(deliver):
                self.position = reached
                pauses = DELIVERY_RETRY.delays(self._random)
                # Let other tasks run between two batches.
                await asyncio.sleep(0)
            elif not self.paused:
                await self._wait_before_retry(next(pauses))

    def _next(self) -> tuple[int, Callable[[], Awaitable[None]] | None]:
        """The next position, and the call that delivers the batch or gap up to it; None without matching facts."""
        assert self._source is not None, "a follower begins before it runs"
        journal = self._source.journal
        floor = journal.floor_of(self.options.jobs or None) if self.position < journal.floor else 0
        scanned = journal.after(self.position, SCAN_MAX)
        missed = 0 if scanned else floor
        batch: list[Record] = []
        reached = self.position
        for record in scanned:
            if record.id > self._source.published or len(batch) >= self.options.batch_max:
                break
            dropped = min(journal.dropped_before(record.id), floor) if reached < floor else 0
            if dropped > reached:
                if batch:
                    break
                missed = dropped
            if self._wants(record):
                if missed:
                    break
                batch.append(record)
            reached = record.id
        if missed > self.position:
            gap = Gap(self.position + 1, missed, "the journal no longer holds them")
            return max(reached, missed), partial(self._deliver_gap, gap)
        return reached, partial(self.options.deliver, batch) if batch else None

    def _wants(self, record: Record) -> bool:
        jobs = self.options.jobs
        return (not self._types or record.type in self._types) and (not jobs or record.job in jobs)

    async def _move_on(self, reached: int) -> None:
        if reached > self.position:
            self.position = reached
            await asyncio.sleep(0)
        else:
            self._idle = True
            await self._wait()

    async def _wait_before_retry(self, pause_s: float) -> None:
        self.retry_at = self._now() + pause_s
        await self._sleep(pause_s)
        self.retry_at = None

    async def _try_delivery(self, deliver: Callable[[], Awaitable[None]]) -> bool:
        started = self._now()
        try:
            await deliver()
        except Unavailable as error:
            # The receiver is unavailable: retried without limit, not counted as a failure.
            self.waiting_for = describe(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._failed("raised CancelledError without being cancelled")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a handler's bug must not end the daemon
            if not isinstance(error, ForgedError):
                self._on_bug(self.name, error)
            self._failed(describe(error))
        else:
            self.waiting_for, self.failures_in_a_row = None, 0
            self.statistics.latency.observe(self._now() - started)
            return True
        self.statistics.latency.observe(self._now() - started)
        return False

    def _failed(self, reason: str) -> None:
        self.waiting_for = reason
        self.statistics.failed += 1
        self.failures_in_a_row += 1
        self._report(self, reason)

    async def _deliver_gap(self, gap: Gap) -> None:
        told = None if self.options.on_gap is None else self.options.on_gap(gap)
        if told is not None:
            await told
        self.statistics.dropped += 1

    async def _wait(self) -> None:
        self._wanted = asyncio.get_running_loop().create_future()
        await self._wanted

    def _wake(self) -> None:
        wanted, self._wanted = self._wanted, None
        if wanted is not None and not wanted.done():
            wanted.set_result(None)
