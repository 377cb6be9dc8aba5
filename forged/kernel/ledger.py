"""The ledger: numbers decisions, commits them in batches, and publishes their facts.

Invariants:
- One decision, one transaction: its writes, facts and remembered reply become durable together. The transaction's
  revision is the id of its last fact.
- State in memory changes before the commit; replies, facts and reads wait until the revision they rest on is durable.
- While one batch is being written, the next one collects, so many decisions share one fsync.
- After a failed commit, nothing of the batch and of later decisions has happened: all state owners reload from the
  store, callers get `Unavailable`, and reads continue while the ledger probes whether it can write again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import anyio
import msgspec

from forged.clock import Clock
from forged.errors import ForgedError, NotLeader, PeerError, Unavailable, describe, without_traceback
from forged.kernel.journal import Journal
from forged.kernel.messages import Call, Decision, Record
from forged.kernel.pending import Pending
from forged.kernel.replies import FLOOR_PREFIX, ReplyTable
from forged.kernel.replies import PREFIX as REPLY_PREFIX
from forged.kernel.store.port import (
    ABSENT,
    OPERATIONS_MAX,
    Conflict,
    Entry,
    Store,
    StoreCorrupt,
    StoreFenced,
    Transaction,
    check,
)

FACT_PREFIX = "fact/"
CURSOR_PREFIX = "cursor/"
BATCH_MAX = 1024
"""The maximum number of transactions in one commit."""
TRIM_MAX = 64
"""The maximum number of facts dropped by the journal that one transaction deletes."""
PROBE_PAUSE_S = 0.5
TERM_KEY = "ledger/term"
FLOOR_KEY = "ledger/floor"
"""The newest dropped id of all jobs of which no fact is kept."""
JOB_FLOOR_PREFIX = "ledger/floor/"
"""The newest dropped id of a job."""

_RELOADING = Unavailable("reloading", "state is being reloaded from the store", "try again")

_encode = msgspec.msgpack.Encoder().encode


def fact_key(fact_id: int) -> str:
    """The key of a fact; keys sort like ids."""
    return f"{FACT_PREFIX}{fact_id:016x}"


async def read_all(store: Store, prefix: str) -> list[Entry]:
    """All entries under a prefix, read in pages."""
    entries: list[Entry] = []
    after = ""
    while page := await store.list(prefix, after=after):
        entries.extend(page)
        after = page[-1].key
    return entries


class Publisher(Protocol):
    """Receives durable facts: the bus."""

    def publish(self, records: Sequence[Record]) -> None:
        """Deliver these durable facts, in id order."""
        ...

    def rewind(self, handler: str, position: int) -> None:
        """Deliver the facts after `position` to a durable handler again: its decisions on them were not committed."""
        ...


class StateOwner(Protocol):
    """An object that keeps state in memory and can reload it from the store."""

    async def load(self, store: Store) -> None:
        """Replace all state with the content of the store."""
        ...


class _QueuedDecision:
    """One decision that waits for its commit."""

    __slots__ = ("call", "cursor", "pending", "records", "transaction")

    def __init__(
        self,
        transaction: Transaction,
        records: list[Record],
        pending: Pending,
        call: Call | None,
        cursor: tuple[str, int] | None,
    ) -> None:
        self.transaction = transaction
        self.records = records
        self.pending = pending
        self.call = call
        self.cursor = cursor


class Ledger:
    """The only writer of the store."""

    def __init__(self, store: Store, journal: Journal, clock: Clock, publisher: Publisher) -> None:
        self.store = store
        self.journal = journal
        self.replies = ReplyTable()
        self.cursors: dict[str, int] = {}
        self.term = 0
        """This daemon's term: the number of starts on this store."""
        self.revision = 0
        self.durable = 0
        self.published = 0
        """The id of the newest published fact."""
        self.batches = 0
        self.decisions = 0
        self.failures = 0
        self.reloads = 0
        """The number of reloads. State seen before the last reload may have been rolled back."""
        self.unavailable: ForgedError | None = Unavailable("starting", "the daemon is starting", "try again")
        """Why reads and decisions are refused now; None if they are allowed."""
        self.read_only: ForgedError | None = None
        """Why decisions are refused while reads are allowed; None if decisions are allowed."""
        self.on_commit: Callable[[float, int], None] = lambda seconds, decisions: None
        """Called after each commit with its duration in seconds and its number of decisions."""
        self._clock = clock
        self._publisher = publisher
        self._state_owners: list[StateOwner] = []
        self._queue: list[_QueuedDecision] = []
        self._in_flight: list[_QueuedDecision] = []
        self._fence: dict[str, int] = {}
        self._new_cursors: dict[str, int] = {}
        self._reload_wanted = False
        self._wanted: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()

    def register(self, owner: StateOwner) -> None:
        """Load this owner at start, and again after a failed commit."""
        self._state_owners.append(owner)

    async def start(self) -> None:
        """Load all state and begin a new term. If the store cannot be written, reads are allowed until it can.

        Facts of earlier terms are not published again.
        """
        await self._load()
        self.unavailable = None
        self.published = self.journal.last
        await self._begin_term()
        if self.read_only is None:
            self._writable.set()
        else:
            self.reload(self.read_only)
            self.unavailable = None

    def require_readable(self) -> None:
        """Raise unless state in memory equals the store plus the decisions under way."""
        if self.unavailable is not None:
            raise without_traceback(self.unavailable)

    def require_writable(self) -> None:
        """Raise unless decisions are allowed."""
        self.require_readable()
        if self.read_only is not None:
            raise without_traceback(self.read_only)

    @property
    def writable_now(self) -> bool:
        """Whether decisions are allowed."""
        return self.unavailable is None and self.read_only is None

    async def writable(self) -> None:
        """Wait until decisions are allowed."""
        while not self._writable.is_set():
            await self._writable.wait()

    def reload(self, error: ForgedError) -> None:
        """State in memory may be wrong: refuse reads and decisions with `error` until it is reloaded from the store."""
        self._close(error)
        self._reload_wanted = True
        self._wake()

    def recall(self, call: Call) -> Pending | bytes | None:
        """The remembered reply of a repeated request, or None."""
        self.require_readable()
        return self.replies.recall(call, self._clock.monotonic())

    def settled(self, reply: Any, encoded: bytes = b"") -> Pending:
        """A reply that is released when everything decided so far is durable."""
        self.require_readable()
        pending = Pending(self.revision, reply, encoded)
        last = self._queue[-1] if self._queue else self._in_flight[-1] if self._in_flight else None
        if last is None:
            pending.resolve()
        else:
            last.pending.when_done(lambda outcome: pending.resolve(outcome.error))
        return pending

    def append(
        self,
        decision: Decision[Any],
        *,
        cause: int = 0,
        origin: str = "",
        call: Call | None = None,
        cursor: tuple[str, int] | None = None,
    ) -> Pending:
        """Queue a decision whose state change is in memory already; the reply is done when it is durable.

        `call` is the client's request if its reply is to be remembered. `cursor` is a durable handler and the id of
        the fact that it handled with this decision.
        """
        try:
            self.require_writable()
            entry = self._compose(decision, cause, origin, call, cursor)
            check(entry.transaction)
        except Exception as error:
            # The owner has changed its state in memory, and that change will not be committed.
            self.reload(_RELOADING)
            if isinstance(error, ForgedError):
                raise
            raise _unfit(error) from error
        self.revision = entry.transaction.revision
        if call is not None:
            self.replies.remember(call, entry.pending, len(entry.pending.encoded))
        self._queue.append(entry)
        self.decisions += 1
        self._wake()
        return entry.pending

    def begin_cursor(self, handler: str, position: int) -> None:
        """Store the start position of a new durable handler, now or before the next decision."""
        self._new_cursors[handler] = position
        if self.writable_now:
            self.save_cursor(handler, position)

    def save_cursor(self, handler: str, position: int) -> Pending:
        """Store a durable handler's position without a decision. If this commit fails, the handler is not rewound."""
        self.cursors[handler] = position
        return self.append(Decision(None, writes={CURSOR_PREFIX + handler: b"%d" % position}))

    async def run(self) -> None:
        """Commit batches until cancelled."""
        while True:
            if not self._queue and not self._reload_wanted:
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted
            if self._reload_wanted:
                await self._recover(self.unavailable or _RELOADING)
            else:
                await self._write_batch()

    async def flush(self) -> None:
        """Wait until every queued decision is durable or has failed."""
        last = self._queue[-1] if self._queue else self._in_flight[-1] if self._in_flight else None
        if last is not None:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            last.pending.when_done(lambda _: None if done.done() else done.set_result(None))
            await done

    def _compose(
        self,
        decision: Decision[Any],
        cause: int,
        origin: str,
        call: Call | None,
        cursor: tuple[str, int] | None,
    ) -> _QueuedDecision:
        at = self._clock.wall()
        revision = self.revision + max(1, len(decision.facts))
        puts: dict[str, bytes] = {}
        deletes: list[str] = []
        for key, value in decision.writes.items():
            if value is None:
                deletes.append(key)
            else:
                puts[key] = value
        records = self._record(decision, decision.cause or cause, origin, at, puts)
        pending = Pending(revision, decision.reply)
        if call is not None:
            pending.encoded = _encode(decision.reply)
            key, value = self.replies.write(call, pending.encoded, at)
            puts[key] = value
        if cursor is not None:
            name, position = cursor
            puts[CURSOR_PREFIX + name] = b"%d" % position
            self.cursors[name] = position
        self._trim(puts, deletes)
        return _QueuedDecision(Transaction(revision, puts, deletes, self._fence), records, pending, call, cursor)

    def _record(
        self, decision: Decision[Any], cause: int, origin: str, at: float, puts: dict[str, bytes]
    ) -> list[Record]:
        assert cause <= self.revision, "a cause is an earlier fact"
        records = [
            Record.of(
                fact,
                fact_id=self.revision + 1 + index,
                at=at,
                job=decision.job,
                generation=decision.generation,
                cause=cause,
                origin=origin,
            )
            for index, fact in enumerate(decision.facts)
        ]
        for record in records:
            puts[fact_key(record.id)] = record.data
        self.journal.plan(records)
        return records

    def _trim(self, puts: dict[str, bytes], deletes: list[str]) -> None:
        """Delete dropped replies and facts, as far as the transaction has room."""
        room = OPERATIONS_MAX - len(puts) - len(deletes) - len(self._fence)
        floors = self.replies.take_floors(room)
        puts |= floors
        room -= len(floors)
        forgotten = self.replies.take_forgotten(room)
        deletes += forgotten
        dropped = self.journal.take_dropped(TRIM_MAX, room - len(forgotten), self.revision)
        deletes += map(fact_key, dropped.ids)
        for job, floor in dropped.floors.items():
            if floor is None:
                deletes.append(JOB_FLOOR_PREFIX + job)
                puts[FLOOR_KEY] = b"%d" % dropped.floor_of_others
            else:
                puts[JOB_FLOOR_PREFIX + job] = b"%d" % floor

    async def _write_batch(self) -> None:
        batch, self._queue = self._queue[:BATCH_MAX], self._queue[BATCH_MAX:]
        self._in_flight = batch
        began = self._clock.monotonic()
        try:
            outcomes = await self.store.commit([entry.transaction for entry in batch])
        except ForgedError as error:
            self.read_only = _translated(error)
            await self._recover(self.read_only)
            return
        for outcome in outcomes:
            if outcome is not None:
                self.read_only = _superseded(outcome)
                await self._recover(self.read_only)
                return
        self.batches += 1
        self.on_commit(self._clock.monotonic() - began, len(batch))
        self._in_flight = []
        self.durable = batch[-1].transaction.revision
        records = [record for entry in batch for record in entry.records]
        self.journal.extend(records)
        self._publish(records)
        for entry in batch:
            entry.pending.resolve()

    def _publish(self, records: Sequence[Record]) -> None:
        if records:
            self.published = records[-1].id
            self._publisher.publish(records)

    async def _recover(self, error: ForgedError) -> None:
        """Reload state, fail the waiting replies with `error`, and wait until the store takes writes."""
        self.failures += 1
        self._close(error)
        await self._reload_until_readable(error)
        while self.read_only is not None:
            await anyio.sleep(PROBE_PAUSE_S)
            if self._reload_wanted or self.store.revision != self.durable:
                await self._reload_until_readable(self.read_only)
            await self._begin_term()
        for handler, position in self._new_cursors.items():
            if handler not in self.cursors:
                self.save_cursor(handler, position)
        self._writable.set()

    async def _reload_until_readable(self, error: ForgedError) -> None:
        while True:
            lost, self._in_flight, self._queue = self._in_flight + self._queue, [], []
            self._reload_wanted = False
            try:
                await self._load()
            except ForgedError as again:
                self.unavailable = again
            else:
                # A reload that was requested while this one ran needs another pass.
                self.unavailable = self.unavailable if self._reload_wanted else None
            for entry in lost:
                self._undo(entry, error)
            if self.unavailable is None:
                self._publish(self.journal.after(self.published, len(self.journal)))
                return
            await anyio.sleep(PROBE_PAUSE_S)

    def _undo(self, entry: _QueuedDecision, error: ForgedError) -> None:
        if entry.cursor is not None:
            handler, position = entry.cursor
            self._publisher.rewind(handler, position - 1)
        entry.pending.resolve(error)

    async def _begin_term(self) -> None:
        """Commit the next term. That fences every other writer, and shows whether the store takes writes."""
        revision = self.revision + 1
        try:
            held = await self.store.get(TERM_KEY)
            term = int(held.value) + 1 if held else 1
            expected = self._fence or {TERM_KEY: held.revision if held else ABSENT}
            (superseded,) = await self.store.commit([Transaction(revision, {TERM_KEY: b"%d" % term}, (), expected)])
        except ForgedError as error:
            self.read_only = _translated(error)
            return
        if superseded is not None:
            self.read_only = _superseded(superseded)
            return
        self.read_only = None
        self.term, self.revision, self.durable, self._fence = term, revision, revision, {TERM_KEY: revision}

    async def _load(self) -> None:
        self.reloads += 1
        # Read the revision first: a write by another daemon during the load then fences this ledger.
        self.revision = self.durable = self.store.revision
        with _readable("a fact"):
            facts = [Record.read(entry.value) for entry in await read_all(self.store, FACT_PREFIX)]
            floor_of_others = await self.store.get(FLOOR_KEY)
            floors = await read_all(self.store, JOB_FLOOR_PREFIX)
            self.journal.reset(
                facts,
                int(floor_of_others.value) if floor_of_others else 0,
                {entry.key.removeprefix(JOB_FLOOR_PREFIX): int(entry.value) for entry in floors},
            )
        with _readable("a cursor"):
            cursors = await read_all(self.store, CURSOR_PREFIX)
            self.cursors = {entry.key.removeprefix(CURSOR_PREFIX): int(entry.value) for entry in cursors}
        with _readable("a remembered reply"):
            replies, floors = await read_all(self.store, REPLY_PREFIX), await read_all(self.store, FLOOR_PREFIX)
            self.replies.load(replies, floors, self._clock.monotonic())
        for owner in self._state_owners:
            with _readable(f"the state of {type(owner).__name__}"):
                await owner.load(self.store)

    def _close(self, error: ForgedError) -> None:
        self.unavailable = error
        self._writable.clear()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


def _translated(error: ForgedError) -> ForgedError:
    """The error that callers get for a failed commit."""
    return _not_leader(error.message) if isinstance(error, StoreFenced) else error


def _unfit(error: Exception) -> ForgedError:
    return ForgedError("decision_unfit", f"a decision cannot be stored: {describe(error)}", "report it as a bug")


def _superseded(conflict: Conflict) -> NotLeader:
    return _not_leader(f"{conflict.key} is at {conflict.found}, not at {conflict.expected}")


def _not_leader(reason: str) -> NotLeader:
    return NotLeader("not_leader", f"another daemon writes to the store: {reason}", "run one daemon per data directory")


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Translate a decoding error: the ledger writes only decodable values, so the store is corrupt."""
    try:
        yield
    except (msgspec.MsgspecError, PeerError, ValueError) as error:
        raise StoreCorrupt(
            "store_undecodable", f"{what} in the store cannot be read: {error}", "restore a backup into a new directory"
        ) from error
