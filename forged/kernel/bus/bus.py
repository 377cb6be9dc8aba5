"""The one road between the parts of the daemon.

Law: parts know message types, never each other. Facts are delivered after they are durable, to each handler in the
order of their ids; publishing queues and never recurses. A request runs through authorisation, fence, memory of
replies, wrappers and its handler, and is answered when what it rests on is durable. A handler that decides without
awaiting anything costs no task.
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
from forged.kernel.bus.mailbox import Mailbox
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
"""Failures of handlers that wait to be put on record while the store takes no writes; the oldest are let go."""
BACKLOG_MAX = 50_000
"""Facts that wait in built-in mailboxes before the edges stop admitting requests."""
REQUESTS_IN_FLIGHT_MAX = 4096

_Report = tuple[Decision[None], int, str]

_type = attrgetter("type")

DAEMON = Principal("daemon", Role.OPERATOR)


class Bus:
    """Facts, requests and signals, and who handles them."""

    def __init__(self, clock: Clock, *, backlog_max: int = BACKLOG_MAX, source: Random | None = None) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        self.followers: dict[str, Follower] = {}
        self.slots: dict[str, SignalSlot] = {}
        self.owners: dict[str, str] = {}
        """The plugins that handlers belong to, by the handlers' names."""
        self.requests = RequestTable()
        self.dispatcher = RequestDispatcher(self.requests, clock)
        self.published = 0
        self.on_publish: list[Callable[[Sequence[Record]], None]] = []
        """Called with all facts of a batch at once, before the mailboxes; for the edges that stream them."""
        self.on_failure: list[Callable[[Mailbox | Follower, str], None]] = []
        """Called for every fact, or batch of them, that a handler failed on, with what is wrong."""
        self.on_handler_bug: Callable[[str, BaseException], None] = lambda owner, error: None
        """Called with what a handler raised that is no `ForgedError`: a mistake in its code."""
        self.dispatcher.on_handler_bug = self._tell_broken
        self.backlog_max = backlog_max
        self._clock = clock
        self._random = source or Random()
        self._full = False
        self._listeners: dict[str, list[Mailbox | Follower]] = {}
        self._for_all: list[Mailbox | Follower] = []
        self._slots_by_type: dict[type[Signal], list[SignalSlot]] = {}
        self._ledger: Ledger | None = None
        self._tasks: TaskGroup | None = None
        self._reports: deque[_Report] = deque(maxlen=REPORTS_MAX)
        self._undone: list[_Report] = []
        """Reports that were on their way when a commit failed."""

    # Registration: before the bus runs, and for plugins as they come.

    def on(
        self,
        types: type[Fact] | Iterable[type[Fact]],
        handler: FactHandler,
        *,
        name: str,
        **terms: Any,
    ) -> Mailbox:
        """Deliver facts of these types (`Fact` for all) to a handler; `terms` as in `Subscription`."""
        subscription = Subscription(name, handler, self._checked(types, name), **terms)
        mailbox = Mailbox(
            subscription,
            now=self._clock.monotonic,
            commit=self._commit_reaction,
            taint=self._taint,
            report=self._report,
            writable=self._writable,
            broken=self._tell_broken,
        )
        self.mailboxes[name] = mailbox
        self._listen(mailbox, subscription.types)
        if self._tasks is not None:
            self._start_mailbox(mailbox)
        return mailbox

    def follow(
        self, types: type[Fact] | Iterable[type[Fact]], deliver: Deliver, *, name: str, **terms: Any
    ) -> Follower:
        """Have facts of these types (`Fact` for all) fetched from the journal; `terms` as in `FollowerOptions`."""
        following = FollowerOptions(name, deliver, self._checked(types, name), **terms)
        follower = Follower(
            following,
            now=self._clock.monotonic,
            random=self._random.random,
            sleep=anyio.sleep,
            report=self._fell_short,
            broken=self._tell_broken,
        )
        self.followers[name] = follower
        self._listen(follower, following.types)
        if self._tasks is not None:
            self._start_follower(follower)
        return follower

    def on_signal(self, signal: type[Signal], handler: SignalHandler, *, name: str) -> None:
        """Deliver the latest signals of this type to a handler; one name may stand for several types."""
        slot = self.slots.get(name)
        if slot is None:
            slot = self.slots[name] = SignalSlot(name, handler, self._clock.monotonic, self._tell_broken)
            if self._tasks is not None:
                self._tasks.start_soon(slot.run)
        elif slot.handler != handler:
            raise ValueError(f"a handler of signals named {name} exists already")
        self._slots_by_type.setdefault(signal, []).append(slot)

    def serve(self, request: type[Request[Any]], handler: RequestHandler, *, owner: str) -> None:
        """Answer a type of request."""
        self.requests.serve(request, handler, owner)

    def replace(self, request: type[Request[Any]], handler: RequestHandler, *, owner: str) -> None:
        """Answer a type of request in the place of its handler."""
        self.requests.replace(request, handler, owner)

    def wrap(self, request: type[Request[Any]], wrapper: Wrapper, *, owner: str) -> None:
        """Run around the handler of a type of request."""
        self.requests.wrap(request, wrapper, owner)

    def seal(self, expected: Iterable[type[Request[Any]]], ledger: Ledger) -> None:
        """Refuse to start unless each type of request has exactly one handler."""
        self.requests.seal(expected)
        self._ledger = ledger
        self.dispatcher.open(ledger)

    # Running.

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Deliver for ever. The ledger must have started."""
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
            tasks.start_soon(self._keep_records)
            task_status.started()

    @property
    def ledger(self) -> Ledger:
        assert self._ledger is not None, "the bus is sealed before it is used"
        return self._ledger

    @property
    def backlog(self) -> int:
        """Facts that wait in the mailboxes that must not lose any."""
        return sum(len(mailbox.queue) for mailbox in self.mailboxes.values() if mailbox.subscription.lossless)

    @property
    def congested(self) -> bool:
        """Whether the edges should admit nothing more for now."""
        # Asked for every message: the mailboxes are counted only since the last publication found them full.
        if self._full:
            self._full = self.backlog >= self.backlog_max
        return self._full or self.dispatcher.in_flight >= REQUESTS_IN_FLIGHT_MAX

    async def drain(self) -> None:
        """Wait until the requests that are being done are done and the facts in the mailboxes are handled."""
        while True:
            while self._busy:
                await anyio.sleep(DRAIN_INTERVAL_S)
            await self.ledger.flush()
            if not self._busy:
                return

    @property
    def _busy(self) -> bool:
        """Whether something is being done that must not be lost."""
        lossless = (mailbox for mailbox in self.mailboxes.values() if mailbox.subscription.lossless)
        return self.dispatcher.in_flight > 0 or not all(mailbox.idle for mailbox in lossless)

    # Facts.

    def publish(self, records: Sequence[Record]) -> None:
        """Queue durable facts for their handlers."""
        self.published += len(records)
        for hook in self.on_publish:
            hook(records)
        for mailbox in self._for_all:
            mailbox.put(records)
        # Runs of facts of one type, which is what a busy daemon has, are handed over whole.
        for fact_type, run in groupby(records, _type):
            listeners = self._listeners.get(fact_type)
            if listeners:
                together = list(run)
                for mailbox in listeners:
                    mailbox.put(together)
        self._full = self.backlog >= self.backlog_max

    def rewind(self, handler: str, position: int) -> None:
        """Have a durable handler handle again what comes after `position`."""
        mailbox = self.mailboxes.get(handler)
        if mailbox is not None and position < mailbox.position:
            self._resume(mailbox, position)

    def readmit(self, handler: str) -> Decision[Nothing]:
        """Give a quarantined handler facts again; a durable one from where it was."""
        mailbox = self.mailboxes.get(handler)
        if mailbox is None or not mailbox.quarantined:
            raise RequestRefused("not_quarantined", f"{handler} is not in quarantine", "see `forgectl handlers`")
        if owner := self.owners.get(handler):
            reason = f"{handler} belongs to the plugin {owner}"
            raise RequestRefused("plugins_handler", reason, f"forgectl plugins enable {owner}")
        if mailbox.stuck:
            reason = f"{handler} still holds the fact over which it was given up"
            raise RequestRefused("handler_stuck", reason, "mend it and restart the daemon")
        mailbox.readmit()
        if mailbox.subscription.durable:
            self._resume(mailbox, mailbox.position)
        return Decision(Nothing(), (HandlerReadmitted(handler),))

    # Signals.

    def signal(self, signal: Signal, call: Call) -> None:
        """Let the handlers of a signal know; nothing is kept and nothing comes back."""
        for slot in self._slots_by_type.get(type(signal), ()):
            slot.put(signal, call)

    # Requests.

    async def ask(self, request: Request[R], call: Call | None = None) -> R:
        """Have a request done, and wait until what it did is durable."""
        reply: R = await self.submit(request, call or Call(DAEMON, "daemon")).wait()
        return reply

    def submit(self, request: Request[Any], call: Call) -> Pending:
        """Have a request done; the pending reply is done when it is, or has failed."""
        return self.dispatcher.submit(request, call)

    def record_later(self, decision: Decision[None], *, cause: int = 0, origin: str = "") -> None:
        """Put facts on record as soon as the store takes them; the oldest are let go if that takes too long."""
        self._reports.append((decision, cause, origin))
        self._put_on_record()

    # Inside.

    def _checked(self, types: type[Fact] | Iterable[type[Fact]], name: str) -> frozenset[type[Fact]]:
        """The types that a handler asks for; empty for all."""
        wanted = frozenset([types] if isinstance(types, type) else types)
        if name in self.mailboxes or name in self.followers:
            raise ValueError(f"a handler named {name} exists already")
        if not wanted:
            raise ValueError(f"{name} asks for no facts; for all of them it is bus.on(Fact, ...)")
        return frozenset() if Fact in wanted else wanted

    def _listen(self, listener: Mailbox | Follower, types: Iterable[type[Fact]]) -> None:
        for fact_type in types:
            self._listeners.setdefault(fact_type.__name__, []).append(listener)
        if not types:
            self._for_all.append(listener)

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
        """Where a durable handler goes on; a new one begins with what is new."""
        position = self.ledger.cursors.get(handler.name)
        if position is None:
            # Stored at once, so that a crash before it has handled anything does not let it begin anew behind that.
            position = self.ledger.published
            self.ledger.begin_cursor(handler.name, position)
        return position

    def _resume(self, mailbox: Mailbox, position: int) -> None:
        journal, published = self.ledger.journal, self.ledger.published
        # What is not published yet will be, and must not come twice.
        heard = (record for record in journal.after(position, len(journal)) if record.id <= published)
        mailbox.rewind(heard, position)
        if position < journal.floor:
            mailbox.miss(Gap(position + 1, journal.floor, "the journal no longer holds them"))

    async def _writable(self) -> None:
        await self.ledger.writable()

    def _commit_reaction(self, mailbox: Mailbox, record: Record, decision: Decision[Any]) -> None:
        self.ledger.append(
            decision, cause=record.id, origin=f"handler {mailbox.name}", cursor=(mailbox.name, record.id)
        )

    def report_service_bug(self, owner: str, error: BaseException) -> None:
        """A service broke in what nobody had asked it for: it is told, and what it did to its state is undone."""
        self._tell_broken(owner, error)
        self._taint()

    def _taint(self) -> None:
        self.ledger.reload(Unavailable("reloading", "state is being read anew from the store", "try again"))

    def _tell_broken(self, owner: str, error: BaseException) -> None:
        self.on_handler_bug(owner, error)

    def _report(self, mailbox: Mailbox, record: Record, reason: str) -> None:
        """Put a handler's failure on record, unless it failed over such a record."""
        for hook in self.on_failure:
            hook(mailbox, reason)
        if record.type in _REPORTS:
            return
        facts: tuple[Fact, ...] = (HandlerFailed(mailbox.name, record.id, reason),)
        # A plugin is left out as a whole, which is said of the plugin.
        if mailbox.quarantined and mailbox.name not in self.owners:
            facts += (HandlerQuarantined(mailbox.name, mailbox.failures_in_a_row, reason),)
        self.record_later(Decision(None, facts), cause=record.id, origin=f"handler {mailbox.name}")

    def _fell_short(self, follower: Follower, reason: str) -> None:
        for hook in self.on_failure:
            hook(follower, reason)
        fact = HandlerFailed(follower.name, follower.position, reason)
        self.record_later(Decision(None, (fact,)), origin=f"handler {follower.name}")

    def _put_on_record(self) -> None:
        if self._undone:
            self._reports = deque([*self._undone, *self._reports], maxlen=REPORTS_MAX)
            self._undone = []
        while self._reports and self._can_decide():
            report = self._reports.popleft()
            decision, cause, origin = report
            self.ledger.append(decision, cause=cause, origin=origin).when_done(partial(self._recorded, report))

    def _recorded(self, report: _Report, pending: Pending) -> None:
        if pending.error is not None:
            self._undone.append(report)

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

    async def _keep_records(self) -> None:
        """Store by and by what could not, or need not, be stored at once."""
        while True:
            await anyio.sleep(CURSOR_INTERVAL_S)
            await self.ledger.writable()
            self._put_on_record()
            self.save_cursors()

    def save_cursors(self) -> None:
        """Store how far the durable handlers have come, for those that have not said so in a decision."""
        for mailbox in self.mailboxes.values():
            if mailbox.subscription.durable:
                self._catch_up(mailbox, waits=mailbox.quarantined)
                self._save_cursor(mailbox)
        for follower in self.followers.values():
            self._catch_up(follower, waits=follower.paused)
            self._save_cursor(follower)

    def _catch_up(self, handler: Mailbox | Follower, *, waits: bool) -> None:
        """Let the position of one that is rarely concerned follow, before the journal's floor overtakes it."""
        ledger = self.ledger
        far_behind = ledger.published - handler.position > ledger.journal.facts_max // 2
        if far_behind and handler.idle and not waits:
            handler.position = ledger.published

    def _save_cursor(self, handler: Mailbox | Follower) -> None:
        name, position = handler.name, handler.position
        if position > self.ledger.cursors.get(name, -1) and self._can_decide():
            self.ledger.save_cursor(name, position)


_REPORTS = frozenset(fact.__name__ for fact in (HandlerFailed, HandlerQuarantined))
