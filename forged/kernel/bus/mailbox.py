"""One handler's facts, in order, away from everybody else's.

Law: a mailbox gives its handler one fact at a time, in the order in which they were published. What a handler raises,
or how long it takes, is its own affair: it is counted, reported, and after too many failures in a row a plugin's
mailbox is closed, as is that of a handler that cannot be cancelled. A built-in mailbox loses nothing (its growth is
bounded at the edges, which stop admitting); a plugin's forgets its oldest facts when full and tells its handler which.
A durable mailbox goes on where it was when the daemon died, and what it decides is kept together with how far it has
come, so that its decisions happen once.
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
from forged.kernel.bus.statistics import TINY_S, HandlerStatistics
from forged.kernel.bus.subscription import Subscription
from forged.kernel.messages import Decision, Gap, Record

DRAIN_MAX = 256
"""How many facts a handler may take before the other tasks have their turn."""
RETRY_PAUSE_S = 0.2
"""How long a durable handler rests after `Unavailable` before it is given the same fact again."""
CANCELS_MAX = 8
"""How often a handler over its deadline is cancelled before it is given up."""

_RAISED = (Exception, SystemExit)
"""What a handler may raise without ending more than its turn."""


class Mailbox:
    """The queue and the task of one subscription."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        now: Callable[[], float],
        commit: Callable[[Mailbox, Record, Decision[Any]], None],
        taint: Callable[[], None],
        report: Callable[[Mailbox, Record, str], None],
        writable: Callable[[], Awaitable[None]],
        broken: Callable[[str, BaseException], None] = lambda name, error: None,
    ) -> None:
        self.subscription = subscription
        self.statistics = HandlerStatistics()
        self.queue: deque[Record] = deque()
        self.position = 0
        """The id of the last fact that was handled or given up, where that matters: in a durable mailbox."""
        self.failures_in_a_row = 0
        """Counted where it has consequences: in a plugin's mailbox."""
        self.quarantined = False
        self.stuck = False
        """Whether the handler was given up and has not come back yet."""
        self._current: Record | None = None
        self._watched: Record | None = None
        self._watched_since = 0.0
        self._careful = subscription.careful
        self._types = frozenset(fact_type.__name__ for fact_type in subscription.types)
        self._now = now
        self._commit = commit
        self._taint = taint
        self._report = report
        self._writable = writable
        self._broken = broken
        self._task: asyncio.Task[Any] | None = None
        self._cancels = 0
        """How often the handler was told to stop what it is doing."""
        self._wanted: asyncio.Future[None] | None = None
        self._gap: Gap | None = None

    @property
    def name(self) -> str:
        return self.subscription.name

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, and nothing being done."""
        return not self.queue and self._current is None

    def put(self, records: Sequence[Record]) -> None:
        """Queue facts. Never blocks and never calls the handler."""
        if self.quarantined:
            self._lose(records, f"{self.name} was in quarantine")
            return
        self.queue.extend(records)
        if not self.subscription.lossless:
            self._drop_surplus()
        if self._wanted is not None:
            self._wake()

    async def run(self) -> None:
        """Hand facts to the handler for ever. One over its deadline is cancelled, and the next fact has its turn."""
        self._task = asyncio.current_task()
        while True:
            await self._drain()
            if self.queue:
                await asyncio.sleep(0)
            else:
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted

    def overdue(self, now: float) -> bool:
        """Whether the handler has held its present fact for longer than it may; asked at intervals, and measured so."""
        deadline_s = self.subscription.deadline_s
        if self._current is not self._watched:
            self._watched, self._watched_since = self._current, now
        return deadline_s is not None and self._watched is not None and now - self._watched_since > deadline_s

    def interrupt(self) -> None:
        """Cancel what the handler is doing. One that goes on all the same, again and again, is given up."""
        record = self._current
        if record is None:
            return
        if self._cancels < CANCELS_MAX:
            self._cancel()
            return
        self.stuck = True
        self.quarantine()
        self._failed(record, f"goes on after {CANCELS_MAX} cancellations")

    def quarantine(self) -> None:
        """Deliver nothing more until `readmit`."""
        self.quarantined = True
        if self.queue:
            self._lose(self.queue, f"{self.name} was in quarantine")
            self.queue.clear()

    def readmit(self) -> None:
        """Take facts again, from the next one on."""
        self.quarantined = False
        self.failures_in_a_row = 0
        self._wake()

    def wants(self, record: Record) -> bool:
        """Whether the subscription is for this fact."""
        return not self._types or record.type in self._types

    def rewind(self, records: Iterable[Record], position: int) -> None:
        """Handle these facts, all after `position`, again: what was decided on them has not happened."""
        self.position = position
        self.queue.clear()
        if not self.quarantined:
            self.queue.extend(filter(self.wants, records))
            self._gap = None
        if self._current is not None:
            self._current = None
            self._cancel()
        self._wake()

    def miss(self, gap: Gap) -> None:
        """Have the handler told of facts that it will not see, before the next one that it will."""
        self._note(gap)
        self._wake()

    async def _drain(self) -> None:
        # The hottest loop of the daemon: what is rare is asked first, once, and kept out of it.
        queue, handler, now = self.queue, self.subscription.handler, self._now
        latencies = self.statistics.latency.counts
        careful = self._careful
        started = now()
        for _ in repeat(None, DRAIN_MAX):
            if careful:
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
                if not await self._survives(record, error):
                    raise
            else:
                if careful:
                    self._handled(record)
            ended = now()
            latencies[frexp(ended - started + TINY_S)[1]] += 1
            started = ended
        self._current = None

    async def _prepare(self) -> None:
        self._current = None
        if self._gap is not None and not self.quarantined:
            self._tell_gap()
        if self.subscription.durable:
            await self._writable()

    async def _conclude(self, record: Record, result: Any) -> None:
        decision = await result if isawaitable(result) else result
        if decision is None:
            return
        if not isinstance(decision, Decision):
            raise TypeError(f"{self.name} returned {type(decision).__name__}, which is no decision")
        if self._current is not record:
            # The fact will be handled again, or was given up: what the handler has changed meanwhile is undone.
            self._taint()
        elif self.subscription.durable:
            self._commit(self, record, decision)
        else:
            self._taint()
            raise TypeError(f"{self.name} decides, so it must be durable: bus.on(..., durable=True)")

    def _handled(self, record: Record) -> None:
        if self._forgive():
            self._failed(record, self._lateness)
        elif self._current is record:
            self.position = record.id
            self.failures_in_a_row = 0

    async def _survives(self, record: Record, error: BaseException) -> bool:
        """Isolate what a handler raised; false for what is not the handler's but the mailbox's own end."""
        if isinstance(error, asyncio.CancelledError):
            return self._outlives(record)
        self._forgive()
        if not isinstance(error, _RAISED):
            return False
        if isinstance(error, ForgedError):
            if self.subscription.durable and isinstance(error, Unavailable):
                await self._try_again(record)
            else:
                self._failed(record, describe(error))
        else:
            self._broken(self.name, error)
            self._undo_changes(record)
            self._failed(record, describe(error))
        return True

    def _outlives(self, record: Record) -> bool:
        asked_for = self._forgive()
        if is_cancelled():
            return False
        self._undo_changes(record)
        self._failed(record, self._lateness if asked_for else "was cancelled from within")
        return True

    def _undo_changes(self, record: Record) -> None:
        # Whoever decides has state, and may have changed it before it broke off.
        if self.subscription.durable and self._current is record:
            self._taint()

    @property
    def _lateness(self) -> str:
        return f"took longer than its deadline of {self.subscription.deadline_s} s"

    async def _try_again(self, record: Record) -> None:
        # What is durable is tried again until it succeeds; nothing behind it overtakes it.
        if self._current is record:
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

    def _forgive(self) -> bool:
        """Take back what the handler was cancelled with; tells whether it was."""
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

    def _drop_surplus(self) -> None:
        surplus = len(self.queue) - self.subscription.mailbox_max
        if surplus > 0:
            dropped = [self.queue.popleft() for _ in range(surplus)]
            self._lose(dropped, f"the mailbox of {self.name} was full")

    def _lose(self, records: Sequence[Record], reason: str) -> None:
        self.statistics.dropped += len(records)
        self._note(Gap(records[0].id, records[-1].id, reason))

    def _note(self, gap: Gap) -> None:
        self._gap = gap if self._gap is None else Gap(self._gap.first, gap.last, gap.reason)

    def _tell_gap(self) -> None:
        gap, self._gap = self._gap, None
        if gap is None or self.subscription.on_gap is None:
            return
        try:
            self.subscription.on_gap(gap)
        except _RAISED as error:
            self.statistics.failed += 1
            if not isinstance(error, ForgedError):
                self._broken(self.name, error)
