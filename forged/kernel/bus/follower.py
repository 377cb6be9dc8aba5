"""A handler that takes facts from the journal at its own pace.

Law: a follower holds a position in the journal and nothing else, so one that waits for an hour costs the bus nothing.
It delivers facts in order, at least once: its position is stored behind what was delivered, and after a restart it goes
on there. Nothing is skipped because delivering it failed; what the journal has forgotten meanwhile is told as a gap,
in its place and at least once, as facts are.
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
"""How many facts are looked through before the other tasks have their turn."""
DELIVERY_RETRY = RetryPolicy(attempts=None, delay_s=0.2, exponential=True, delay_max_s=30.0, jitter=0.25)

Deliver = Callable[[Sequence[Record]], Awaitable[None]]
TellGap = Callable[[Gap], Awaitable[None] | None]


class Source(Protocol):
    """What a follower reads from: the ledger."""

    journal: Journal
    published: int


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    """Which facts go where. Empty `types` or `jobs` mean all of them; facts about no job have the job `""`."""

    name: str
    deliver: Deliver
    types: frozenset[type[Fact]] = frozenset()
    jobs: frozenset[str] = frozenset()
    batch_max: int = 100
    on_gap: TellGap | None = None


class Follower:
    """The position and the task of one that follows."""

    def __init__(
        self,
        following: FollowerOptions,
        *,
        now: Callable[[], float],
        random: Random,
        sleep: Callable[[float], Awaitable[None]],
        report: Callable[[Follower, str], None],
        broken: Callable[[str, BaseException], None] = lambda owner, error: None,
    ) -> None:
        self.following = following
        self.statistics = HandlerStatistics()
        self.position = 0
        """Everything up to here was delivered, or did not concern it."""
        self.failures_in_a_row = 0
        self.waiting_for: str | None = None
        """Why what is next cannot be delivered now; None while all is well."""
        self.retry_at: float | None = None
        """Until when it rests after a failure, by the monotonic clock."""
        self.paused = False
        self._types = frozenset(fact_type.__name__ for fact_type in following.types)
        self._now = now
        self._random = random
        self._sleep = sleep
        self._report = report
        self._broken = broken
        self._source: Source | None = None
        self._idle = False
        self._wanted: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        return self.following.name

    @property
    def idle(self) -> bool:
        """Whether everything that was published has been delivered."""
        return self._idle

    @property
    def behind(self) -> int:
        """How many facts of the journal it has not looked at, those that do not concern it included."""
        return 0 if self._source is None or self._idle else self._source.journal.count_after(self.position)

    def begin(self, source: Source, position: int) -> None:
        """Take what comes behind `position`."""
        self._source, self.position = source, position

    def put(self, records: Sequence[Record]) -> None:
        """Know that there is something new. Never blocks and never calls the handler."""
        if self._idle:
            # What lies between did not concern it, or it would have been told.
            self.position = max(self.position, records[0].id - 1)
            self._idle = False
        self._wake()

    def pause(self) -> None:
        """Deliver nothing more until `resume`; the position stays."""
        self.paused = True

    def resume(self) -> None:
        """Go on where it was."""
        self.paused, self.failures_in_a_row, self.waiting_for = False, 0, None
        self._wake()

    async def run(self) -> None:
        """Deliver for ever."""
        pauses = DELIVERY_RETRY.delays(self._random)
        while True:
            if self.paused:
                await self._wait()
                continue
            reached, give = self._next()
            if give is None:
                await self._move_on(reached)
            elif await self._given(give):
                self.position = reached
                pauses = DELIVERY_RETRY.delays(self._random)
                # Others have their turn between two batches, however long the journal is.
                await asyncio.sleep(0)
            elif not self.paused:
                await self._rest(next(pauses))

    def _next(self) -> tuple[int, Callable[[], Awaitable[None]] | None]:
        """How far it comes with what it should give next, and how to give that; None where there is nothing."""
        assert self._source is not None, "a follower begins before it runs"
        journal = self._source.journal
        if self.position < journal.floor:
            gap = Gap(self.position + 1, journal.floor, "the journal no longer holds them")
            return gap.last, partial(self._miss, gap)
        batch: list[Record] = []
        reached = self.position
        for record in journal.after(self.position, SCAN_MAX):
            if record.id > self._source.published or len(batch) >= self.following.batch_max:
                break
            reached = record.id
            if self._wants(record):
                batch.append(record)
        return reached, partial(self.following.deliver, batch) if batch else None

    def _wants(self, record: Record) -> bool:
        jobs = self.following.jobs
        return (not self._types or record.type in self._types) and (not jobs or record.job in jobs)

    async def _move_on(self, reached: int) -> None:
        if reached > self.position:
            self.position = reached
            await asyncio.sleep(0)
        else:
            self._idle = True
            await self._wait()

    async def _rest(self, pause_s: float) -> None:
        self.retry_at = self._now() + pause_s
        await self._sleep(pause_s)
        self.retry_at = None

    async def _given(self, give: Callable[[], Awaitable[None]]) -> bool:
        started = self._now()
        try:
            await give()
        except Unavailable as error:
            # The world's fault: it is tried again for as long as it takes.
            self.waiting_for = describe(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._failed("was cancelled from within")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a handler's bug must not be the daemon's end
            if not isinstance(error, ForgedError):
                self._broken(self.name, error)
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

    async def _miss(self, gap: Gap) -> None:
        told = None if self.following.on_gap is None else self.following.on_gap(gap)
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
