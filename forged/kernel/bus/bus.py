"""The in-process bus: registration of handlers, and delivery of facts, requests and signals.

Invariants:
- The daemon's services know message types, not each other.
- Facts are delivered after they are durable, to each handler in id order. Publishing queues; it never calls a handler.
- A request passes authorisation, wrappers, remembered replies, fence and handler (`dispatcher`). Its reply is released
  when the revision that it rests on is durable.
- A handler that does not await costs no task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from random import Random
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

from forged.auth.model import Principal, Role
from forged.clock import Clock
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.bus.dispatcher import RequestDispatcher
from forged.kernel.bus.follower import Deliver, Follower, FollowerOptions
from forged.kernel.bus.mailbox import CANCELS_MAX, Mailbox
from forged.kernel.bus.model import HandlerFailed, HandlerQuarantined, HandlerReadmitted
from forged.kernel.bus.requests import RequestHandler, RequestTable, Wrapper
from forged.kernel.bus.signals import SignalHandler, SignalSlot
from forged.kernel.bus.subscription import FactHandler, Subscription
from forged.kernel.ledger import Ledger
from forged.kernel.messages import Call, Decision, Fact, Gap, Nothing, Record, Request, Signal
from forged.kernel.pending import Pending

R = TypeVar("R")

SUPERVISION_INTERVAL_S = 0.25
CURSOR_INTERVAL_S = 1.0
DRAIN_INTERVAL_S = 0.01
REPORTS_MAX = 1_000
"""The maximum number of `HandlerFailed` facts that wait while the store takes no writes; the oldest are dropped."""
BACKLOG_MAX = 50_000
"""The number of facts in built-in mailboxes at which connections stop admitting requests."""
REQUESTS_IN_FLIGHT_MAX = 4096

_Report = tuple[Decision[None], int, str]

_type = attrgetter("type")

DAEMON = Principal("daemon", Role.OPERATOR)


class Bus:
    """The registered handlers and their tasks."""

    def __init__(self, clock: Clock, *, backlog_max: int = BACKLOG_MAX, source: Random | None = None) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        self.followers: dict[str, Follower] = {}
        self.slots: dict[str, SignalSlot] = {}
        self.owners: dict[str, str] = {}
        """The plugin of each plugin handler, by handler name."""
        self.requests = RequestTable()
        self.dispatcher = RequestDispatcher(self.requests, clock)
        self.published = 0
        self.on_publish: list[Callable[[Sequence[Record]], None]] = []
        """Called with each published batch, before the mailboxes; for connections that stream facts."""
        self.on_failure: list[Callable[[Mailbox | Follower, str], None]] = []
        """Called with the mailbox or follower and the reason whenever a handler fails."""
        self.on_handler_bug: Callable[[str, BaseException], None] = lambda owner, error: None
        """Called with the handler's name when it raises something other than `ForgedError`: a bug."""
        self.dispatcher.on_handler_bug = self._report_bug
        self.backlog_max = backlog_max
        self._clock = clock
        self._random = source or Random()
        self._full = False
        self._listeners: dict[str, list[Mailbox | Follower]] = {}
        self._listeners_to_all: list[Mailbox | Follower] = []
        self._slots_by_type: dict[type[Signal], list[SignalSlot]] = {}
        self._ledger: Ledger | None = None
        self._tasks: TaskGroup | None = None
        self._reports: deque[_Report] = deque(maxlen=REPORTS_MAX)
        self._failed_reports: list[_Report] = []
        """Reports that could not be committed."""

    # Registration: before the bus runs; for plugins also later.

    def on(
        self,
        types: type[Fact] | Iterable[type[Fact]],
        handler: FactHandler,
        *,
        name: str,
        **options: Any,
    ) -> Mailbox:
        """Deliver facts of these types (`Fact` for all) to a handler; `options` as in `Subscription`."""
        subscription = Subscription(name, handler, self._checked(types, name), **options)
        mailbox = Mailbox(
            subscription,
            now=self._clock.monotonic,
            commit=self._commit_reaction,
            reload=self._reload,
            report=self._report,
            writable=self._writable,
            on_bug=self._report_bug,
        )
        self.mailboxes[name] = mailbox
        self._listen(mailbox, subscription.types)
        if self._tasks is not None:
            self._start_mailbox(mailbox)
        return mailbox

    def follow(
        self, types: type[Fact] | Iterable[type[Fact]], deliver: Deliver, *, name: str, **options: Any
    ) -> Follower:
        """Deliver facts of these types (`Fact` for all) from the journal; `options` as in `FollowerOptions`."""
        terms = FollowerOptions(name, deliver, self._checked(types, name), **options)
        follower = Follower(
            terms,
            now=self._clock.monotonic,
            random=self._random.random,
            sleep=anyio.sleep,
            report=self._report_delivery_failure,
            on_bug=self._report_bug,
        )
        self.followers[name] = follower
        self._listen(follower, terms.types)
        if self._tasks is not None:
            self._start_follower(follower)
        return follower

    def on_signal(self, signal: type[Signal], handler: SignalHandler, *, name: str) -> None:
        """Deliver the latest signals of this type to a handler; one handler may serve several types."""
        slot = self.slots.get(name)
        if slot is None:
            slot = self.slots[name] = SignalSlot(name, handler, self._clock.monotonic, self._report_bug)
            if self._tasks is not None:
                self._tasks.start_soon(slot.run)
        elif slot.handler != handler:
            raise ValueError(f"signal handler {name} exists already with another function")
        self._slots_by_type.setdefault(signal, []).append(slot)

    def serve(self, request: type[Request[Any]], handler: RequestHandler, *, owner: str) -> None:
        """Register the handler of a request type."""
        self.requests.serve(request, handler, owner)

    def replace(self, request: type[Request[Any]], handler: RequestHandler, *, owner: str) -> None:
        """Register a handler that replaces the built-in one."""
        self.requests.replace(request, handler, owner)

    def wrap(self, request: type[Request[Any]], wrapper: Wrapper, *, owner: str) -> None:
        """Register a wrapper around the handler of a request type."""
        self.requests.wrap(request, wrapper, owner)

    def seal(self, expected: Iterable[type[Request[Any]]], ledger: Ledger) -> None:
        """Raise `ConfigError` unless each request type has exactly one handler."""
        self.requests.seal(expected)
        self._ledger = ledger
        self.dispatcher.open(ledger)

    # Running.

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run all handlers until cancelled. The ledger must have started."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.dispatcher.run)
            self._tasks = tasks
            for mailbox in self.mailboxes.values():
                self._start_mailbox(mailbox)
            for follower in self.followers.values():
                self._start_follower(follower)
            for slot in self.slots.values():
                tasks.start_soon(slot.run)
            tasks.start_soon(self._supervise)
            tasks.start_soon(self._store_periodically)
            task_status.started()

    @property
    def ledger(self) -> Ledger:
        assert self._ledger is not None, "the bus is sealed before it is used"
        return self._ledger

    @property
    def backlog(self) -> int:
        """The number of facts in lossless mailboxes."""
        return sum(len(mailbox.queue) for mailbox in self.mailboxes.values() if mailbox.subscription.lossless)

    @property
    def congested(self) -> bool:
        """Whether connections should stop admitting requests for now."""
        # Called for every message: the mailboxes are counted only if the last publication found them full.
        if self._full:
            self._full = self.backlog >= self.backlog_max
        return self._full or self.dispatcher.in_flight >= REQUESTS_IN_FLIGHT_MAX

    async def drain(self) -> None:
        """Wait until all requests in flight are answered and lossless mailboxes are empty."""
        while True:
            while self._busy:
                await anyio.sleep(DRAIN_INTERVAL_S)
            await self.ledger.flush()
            if not self._busy:
                return

    @property
    def _busy(self) -> bool:
        """Whether requests are in flight or lossless mailboxes have work."""
        lossless = (mailbox for mailbox in self.mailboxes.values() if mailbox.subscription.lossless)
        return self.dispatcher.in_flight > 0 or not all(mailbox.idle for mailbox in lossless)

    # Facts.

    def publish(self, records: Sequence[Record]) -> None:
        """Queue durable facts for their handlers."""
        self.published += len(records)
        for hook in self.on_publish:
            hook(records)
        for mailbox in self._listeners_to_all:
            mailbox.put(records)
        # A busy daemon publishes runs of one fact type; each run is queued as a whole.
        for fact_type, run in groupby(records, _type):
            listeners = self._listeners.get(fact_type)
            if listeners:
                together = list(run)
                for mailbox in listeners:
                    mailbox.put(together)
        self._full = self.backlog >= self.backlog_max

    def rewind(self, handler: str, position: int) -> None:
        """Deliver the facts after `position` to a durable handler again."""
        mailbox = self.mailboxes.get(handler)
        if mailbox is not None and position < mailbox.position:
            self._resume(mailbox, position)

    def readmit(self, handler: str) -> Decision[Nothing]:
        """Deliver facts to a quarantined handler again; to a durable one from its position on."""
        mailbox = self.mailboxes.get(handler)
        if mailbox is None or not mailbox.quarantined:
            raise RequestRefused("not_quarantined", f"handler {handler} is not quarantined", "see `forgectl handlers`")
        if owner := self.owners.get(handler):
            reason = f"handler {handler} belongs to plugin {owner}"
            raise RequestRefused("plugins_handler", reason, f"forgectl plugins enable {owner}")
        if mailbox.stuck:
            reason = f"handler {handler} did not stop after {CANCELS_MAX} cancellations and still runs"
            raise RequestRefused("handler_stuck", reason, "fix the handler and restart the daemon")
        mailbox.readmit()
        if mailbox.subscription.durable:
            self._resume(mailbox, mailbox.position)
        return Decision(Nothing(), (HandlerReadmitted(handler),))

    # Signals.

    def signal(self, signal: Signal, call: Call) -> None:
        """Deliver a signal to its handlers."""
        for slot in self._slots_by_type.get(type(signal), ()):
            slot.put(signal, call)

    # Requests.

    async def ask(self, request: Request[R], call: Call | None = None) -> R:
        """Execute a request and wait until its reply is durable."""
        reply: R = await self.submit(request, call or Call(DAEMON, "daemon")).wait()
        return reply

    def submit(self, request: Request[Any], call: Call) -> Pending:
        """Execute a request; the pending reply is resolved when it is durable or has failed."""
        return self.dispatcher.submit(request, call)

    def record_later(self, decision: Decision[None], *, cause: int = 0, origin: str = "") -> None:
        """Journal facts as soon as the store takes writes; at most `REPORTS_MAX` wait, the oldest are dropped."""
        self._reports.append((decision, cause, origin))
        self._commit_reports()

    # Inside.

    def _checked(self, types: type[Fact] | Iterable[type[Fact]], name: str) -> frozenset[type[Fact]]:
        """The types that a handler subscribes to; empty for all."""
        wanted = frozenset([types] if isinstance(types, type) else types)
        if name in self.mailboxes or name in self.followers:
            raise ValueError(f"handler {name} exists already")
        if not wanted:
            raise ValueError(f"handler {name} subscribes to no fact types; use bus.on(Fact, ...) for all")
        return frozenset() if Fact in wanted else wanted

    def _listen(self, listener: Mailbox | Follower, types: Iterable[type[Fact]]) -> None:
        for fact_type in types:
            self._listeners.setdefault(fact_type.__name__, []).append(listener)
        if not types:
            self._listeners_to_all.append(listener)

    def _start_follower(self, follower: Follower) -> None:
        assert self._tasks is not None
        follower.begin(self.ledger, self._position(follower))
        self._tasks.start_soon(follower.run)

    def _start_mailbox(self, mailbox: Mailbox) -> None:
        assert self._tasks is not None
        if mailbox.subscription.durable and mailbox.position == 0:
            self._resume(mailbox, self._position(mailbox))
        self._tasks.start_soon(mailbox.run)

    def _position(self, handler: Mailbox | Follower) -> int:
        """The stored position of a durable handler; a new handler starts with the next fact."""
        position = self.ledger.cursors.get(handler.name)
        if position is None:
            # Stored at once: after a crash before its first fact, the handler must not start later than here.
            position = self.ledger.published
            self.ledger.begin_cursor(handler.name, position)
        return position

    def _resume(self, mailbox: Mailbox, position: int) -> None:
        journal, published = self.ledger.journal, self.ledger.published
        # Facts that are not published yet will be published later and must not be delivered twice.
        published_records = (record for record in journal.after(position, len(journal)) if record.id <= published)
        mailbox.rewind(published_records, position)
        if position < journal.floor:
            mailbox.add_gap(Gap(position + 1, journal.floor, "the journal no longer holds them"))

    async def _writable(self) -> None:
        await self.ledger.writable()

    def _commit_reaction(self, mailbox: Mailbox, record: Record, decision: Decision[Any]) -> None:
        self.ledger.append(
            decision, cause=record.id, origin=f"handler {mailbox.name}", cursor=(mailbox.name, record.id)
        )

    def report_service_bug(self, owner: str, error: BaseException) -> None:
        """A service raised a bug outside of a request: report it and reload all state from the store."""
        self._report_bug(owner, error)
        self._reload()

    def _reload(self) -> None:
        self.ledger.reload(
            Unavailable("reloading", "the daemon reloads its state from the store, after an error", "try again")
        )

    def _report_bug(self, owner: str, error: BaseException) -> None:
        self.on_handler_bug(owner, error)

    def _report(self, mailbox: Mailbox, record: Record, reason: str) -> None:
        """Journal a handler's failure, unless it failed on a fact about a failure."""
        for hook in self.on_failure:
            hook(mailbox, reason)
        if record.type in _REPORTS:
            return
        facts: tuple[Fact, ...] = (HandlerFailed(mailbox.name, record.id, reason),)
        # A plugin is quarantined as a whole, which the plugin host reports.
        if mailbox.quarantined and mailbox.name not in self.owners:
            facts += (HandlerQuarantined(mailbox.name, mailbox.failures_in_a_row, reason),)
        self.record_later(Decision(None, facts), cause=record.id, origin=f"handler {mailbox.name}")

    def _report_delivery_failure(self, follower: Follower, reason: str) -> None:
        for hook in self.on_failure:
            hook(follower, reason)
        fact = HandlerFailed(follower.name, follower.position, reason)
        self.record_later(Decision(None, (fact,)), origin=f"handler {follower.name}")

    def _commit_reports(self) -> None:
        if self._failed_reports:
            self._reports = deque([*self._failed_reports, *self._reports], maxlen=REPORTS_MAX)
            self._failed_reports = []
        while self._reports and self._can_decide():
            report = self._reports.popleft()
            decision, cause, origin = report
            self.ledger.append(decision, cause=cause, origin=origin).when_done(partial(self._report_committed, report))

    def _report_committed(self, report: _Report, pending: Pending) -> None:
        if pending.error is not None:
            self._failed_reports.append(report)

    def _can_decide(self) -> bool:
        try:
            self.ledger.require_writable()
        except ForgedError:
            return False
        return True

    async def _supervise(self) -> None:
        while True:
            await anyio.sleep(SUPERVISION_INTERVAL_S)
            now = self._clock.monotonic()
            for mailbox in self.mailboxes.values():
                if mailbox.overdue(now):
                    mailbox.interrupt()

    async def _store_periodically(self) -> None:
        """Commit waiting reports and handler positions once per interval."""
        while True:
            await anyio.sleep(CURSOR_INTERVAL_S)
            await self.ledger.writable()
            self._commit_reports()
            self.save_cursors()

    def save_cursors(self) -> None:
        """Store the positions of durable handlers that have advanced without a decision."""
        for mailbox in self.mailboxes.values():
            if mailbox.subscription.durable:
                self._catch_up(mailbox, stopped=mailbox.quarantined)
                self._save_cursor(mailbox)
        for follower in self.followers.values():
            self._catch_up(follower, stopped=follower.paused)
            self._save_cursor(follower)

    def _catch_up(self, handler: Mailbox | Follower, *, stopped: bool) -> None:
        """Advance the position of a handler that gets few facts, before the journal drops facts beyond it."""
        ledger = self.ledger
        journal = ledger.journal
        kept_ids = min(journal.facts_max, ledger.published - journal.floor) if journal.floor else journal.facts_max
        far_behind = ledger.published - handler.position > kept_ids // 2
        if far_behind and handler.idle and not stopped:
            handler.position = ledger.published

    def _save_cursor(self, handler: Mailbox | Follower) -> None:
        name, position = handler.name, handler.position
        if position > self.ledger.cursors.get(name, -1) and self._can_decide():
            self.ledger.save_cursor(name, position)


_REPORTS = frozenset(fact.__name__ for fact in (HandlerFailed, HandlerQuarantined))
