"""A mailbox: the queue and task of one handler of facts.

Invariants:
- The handler gets one fact at a time, in id order.
- A handler's failure or delay affects no other handler: it is counted and reported. A plugin's handler is quarantined
  after too many failures in a row, or if it ignores its cancellations.
- A lossless mailbox drops nothing; its growth is bounded because connections stop admitting requests. When a plugin's
  mailbox is full, the job that has most facts in it loses its oldest, which is reported to the handler as a gap.
- A durable handler continues at its stored position after a restart. Its decisions are committed together with the
  position, so each is made once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from inspect import isawaitable
from itertools import repeat
from math import frexp
from types import CoroutineType
from typing import Any

import anyio

from forged.errors import ForgedError, Unavailable, describe
from forged.kernel.bus.cancellation import is_cancelled
from forged.kernel.bus.lossy_queue import LossyQueue
from forged.kernel.bus.statistics import TINY_S, HandlerStatistics
from forged.kernel.bus.subscription import Subscription
from forged.kernel.messages import Decision, Gap, Record

FACTS_PER_TURN = 256
"""The number of facts that a handler gets before other tasks run."""
RETRY_PAUSE_S = 0.2
"""The pause before a durable handler gets the same fact again after `Unavailable`."""
CANCELS_MAX = 8
"""How often a handler beyond its deadline is cancelled before it is quarantined as stuck."""

_RAISED = (Exception, SystemExit)
"""Exceptions that are isolated as failures of the handler."""


class Mailbox:
    """The queue and the task of one subscription."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        now: Callable[[], float],
        commit: Callable[[Mailbox, Record, Decision[Any]], None],
        reload: Callable[[], None],
        report: Callable[[Mailbox, Record, str], None],
        writable: Callable[[], Awaitable[None]],
        on_bug: Callable[[str, BaseException], None] = lambda name, error: None,
    ) -> None:
        self.subscription = subscription
        self.statistics = HandlerStatistics()
        self.queue: deque[Record] | LossyQueue = (
            deque() if subscription.lossless else LossyQueue(subscription.mailbox_max)
        )
        self.position = 0
        """The id of the last fact that was handled or failed; maintained for durable handlers and plugins."""
        self.failures_in_a_row = 0
        """Maintained for durable handlers and plugins."""
        self.quarantined = False
        self.stuck = False
        """Whether the handler ignored its cancellations and still runs."""
        self._current: Record | None = None
        self._watched: Record | None = None
        self._watched_since = 0.0
        self._needs_checks = subscription.needs_checks
        self._types = frozenset(fact_type.__name__ for fact_type in subscription.types)
        self._now = now
        self._commit = commit
        self._reload = reload
        self._report = report
        self._writable = writable
        self._on_bug = on_bug
        self._task: asyncio.Task[Any] | None = None
        self._cancels = 0
        """How often the current handler call was cancelled."""
        self._wanted: asyncio.Future[None] | None = None
        self._gap: Gap | None = None

    @property
    def name(self) -> str:
        return self.subscription.name

    @property
    def idle(self) -> bool:
        """Whether the queue is empty and no handler call runs."""
        return not self.queue and self._current is None

    def put(self, records: Sequence[Record]) -> None:
        """Queue facts. Never blocks and never calls the handler."""
        if self.quarantined:
            self._drop(records, f"handler {self.name} was quarantined")
            return
        if isinstance(self.queue, LossyQueue):
            self.statistics.dropped += self.queue.extend(records)
        else:
            self.queue.extend(records)
        if self._wanted is not None:
            self._wake()

    async def run(self) -> None:
        """Call the handler with queued facts until the task is cancelled."""
        self._task = asyncio.current_task()
        while True:
            await self._handle_queued()
            if self.queue:
                await asyncio.sleep(0)
            else:
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted

    def overdue(self, now: float) -> bool:
        """Whether the current call exceeds its deadline, measured from the first `overdue` that saw its fact."""
        deadline_s = self.subscription.deadline_s
        if self._current is not self._watched:
            self._watched, self._watched_since = self._current, now
        return deadline_s is not None and self._watched is not None and now - self._watched_since > deadline_s

    def interrupt(self) -> None:
        """Cancel the current call; after `CANCELS_MAX` cancellations quarantine the handler as stuck."""
        record = self._current
        if record is None:
            return
        if self._cancels < CANCELS_MAX:
            self._cancel()
            return
        self.stuck = True
        self.quarantine()
        self._failed(record, f"still runs after {CANCELS_MAX} cancellations")

    def quarantine(self) -> None:
        """Drop all facts until `readmit`."""
        self.quarantined = True
        self._take_gap()
        if self.queue:
            self._drop(tuple(self.queue), f"handler {self.name} was quarantined")
            self.queue.clear()

    def readmit(self) -> None:
        """Take facts again, from the next one on."""
        self.quarantined = False
        self.failures_in_a_row = 0
        self._wake()

    def wants(self, record: Record) -> bool:
        """Whether the subscription includes this fact's type."""
        return not self._types or record.type in self._types

    def rewind(self, records: Iterable[Record], position: int) -> None:
        """Handle these facts, all after `position`, again, because the decisions on them were not committed."""
        self.position = position
        self.queue.clear()
        if not self.quarantined:
            self.queue.extend(filter(self.wants, records))
            self._gap = None
        if self._current is not None:
            self._current = None
            self._cancel()
        self._wake()

    def add_gap(self, gap: Gap) -> None:
        """Report this gap to the handler before its next fact."""
        self._extend_gap(gap)
        self._wake()

    async def _handle_queued(self) -> None:
        # The hottest loop of the daemon: rare conditions are checked outside of it.
        queue, handler, now = self.queue, self.subscription.handler, self._now
        latencies = self.statistics.latency.counts
        needs_checks = self._needs_checks
        started = now()
        for _ in repeat(None, FACTS_PER_TURN):
            if needs_checks:
                await self._prepare()
                started = now()
            if not queue:
                break
            record = self._current = queue.popleft()
            try:
                result = handler(record)
                if type(result) is CoroutineType:
                    result = await result
                if result is not None:
                    await self._conclude(record, result)
            except BaseException as error:
                if not await self._isolates(record, error):
                    raise
            else:
                if needs_checks:
                    self._handled(record)
            ended = now()
            latencies[frexp(ended - started + TINY_S)[1]] += 1
            started = ended
        self._current = None

    async def _prepare(self) -> None:
        self._current = None
        self._take_gap()
        if self._gap is not None and not self.quarantined:
            self._report_gap()
        if self.subscription.durable:
            await self._writable()

    async def _conclude(self, record: Record, result: Any) -> None:
        decision = await result if isawaitable(result) else result
        if decision is None:
            return
        if not isinstance(decision, Decision):
            raise TypeError(f"handler {self.name} must return a Decision or None, got {type(decision).__name__}")
        if self._current is not record:
            # The fact will be handled again, or counts as failed: undo the handler's changes to its state.
            self._reload()
        elif self.subscription.durable:
            self._commit(self, record, decision)
        else:
            self._reload()
            raise TypeError(
                f"handler {self.name} returned a decision, so it must be durable: bus.on(..., durable=True)"
            )

    def _handled(self, record: Record) -> None:
        if self._clear_cancellations():
            self._failed(record, self._deadline_reason)
        elif self._current is record:
            self.position = record.id
            self.failures_in_a_row = 0

    async def _isolates(self, record: Record, error: BaseException) -> bool:
        """Handle an exception of the handler; False if the mailbox's own task was cancelled or must end."""
        if isinstance(error, asyncio.CancelledError):
            return self._isolates_cancellation(record)
        self._clear_cancellations()
        if not isinstance(error, _RAISED):
            return False
        if isinstance(error, ForgedError):
            if self.subscription.durable and isinstance(error, Unavailable):
                await self._try_again(record)
            else:
                self._failed(record, describe(error))
        else:
            self._on_bug(self.name, error)
            self._undo_changes(record)
            self._failed(record, describe(error))
        return True

    def _isolates_cancellation(self, record: Record) -> bool:
        cancelled = self._clear_cancellations()
        if is_cancelled():
            return False
        self._undo_changes(record)
        self._failed(record, self._deadline_reason if cancelled else "raised CancelledError without being cancelled")
        return True

    def _undo_changes(self, record: Record) -> None:
        # A durable handler has state and may have changed it before it raised.
        if self.subscription.durable and self._current is record:
            self._reload()

    @property
    def _deadline_reason(self) -> str:
        return f"exceeded its deadline of {self.subscription.deadline_s} s"

    async def _try_again(self, record: Record) -> None:
        # A durable handler gets the same fact until it succeeds; later facts wait.
        if self._current is record:
            assert isinstance(self.queue, deque), "durable handlers are lossless"
            self.queue.appendleft(record)
            self._current = self._watched = None
        await anyio.sleep(RETRY_PAUSE_S)

    def _failed(self, record: Record, reason: str) -> None:
        if self._current is not record:
            return
        self._current = None
        self.position = record.id
        self.statistics.failed += 1
        self.failures_in_a_row += 1
        limit = self.subscription.failures_max
        if limit is not None and self.failures_in_a_row >= limit:
            self.quarantine()
        self._report(self, record, reason)

    def _cancel(self) -> None:
        if self._task is not None:
            self._cancels += 1
            self._task.cancel()

    def _clear_cancellations(self) -> bool:
        """Undo the cancellations of the finished call; returns whether there were any."""
        cancels, self._cancels = self._cancels, 0
        self.stuck = False
        for _ in range(cancels):
            assert self._task is not None
            self._task.uncancel()
        return cancels > 0

    def _wake(self) -> None:
        wanted, self._wanted = self._wanted, None
        if wanted is not None and not wanted.done():
            wanted.set_result(None)

    def _take_gap(self) -> None:
        """Let the facts that were dropped before the next one be reported."""
        gap = self.queue.take_gap() if isinstance(self.queue, LossyQueue) else None
        if gap is not None:
            limit = self.subscription.mailbox_max
            self._extend_gap(Gap(*gap, f"the mailbox of handler {self.name} was full ({limit} facts)"))

    def _drop(self, records: Sequence[Record], reason: str) -> None:
        self.statistics.dropped += len(records)
        self._extend_gap(Gap(records[0].id, records[-1].id, reason))

    def _extend_gap(self, gap: Gap) -> None:
        self._gap = gap if self._gap is None else Gap(self._gap.first, gap.last, gap.reason)

    def _report_gap(self) -> None:
        gap, self._gap = self._gap, None
        if gap is None or self.subscription.on_gap is None:
            return
        try:
            self.subscription.on_gap(gap)
        except _RAISED as error:
            self.statistics.failed += 1
            if not isinstance(error, ForgedError):
                self._on_bug(self.name, error)
