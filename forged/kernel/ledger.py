"""Where decisions become history.

Law: one decision, one transaction. Its writes, its facts and its remembered reply become durable together, and the
revision is the id of its last fact. State has changed in memory before; replies, facts and reads wait until the
revision that they rest on is durable. While one batch is being written the next one gathers, so many decisions share
one fsync. When a batch fails, nothing of it and nothing that was built on it has happened: every owner of state reads
it anew from the store, callers are told `Unavailable`, and reading goes on while the ledger tries whether it can
write again.
"""

from __future__ import annotations

import asyncio
from collections import deque
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
from forged.kernel.replies import PREFIX as REPLY_PREFIX
from forged.kernel.replies import ReplyTable
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
"""How many transactions one fsync may carry."""
TRIM_MAX = 64
"""How many outgrown facts one transaction may delete, as far as its own operations leave room."""
PROBE_PAUSE_S = 0.5
TERM_KEY = "ledger/term"
FLOOR_KEY = "ledger/floor"

_RELOADING = Unavailable("reloading", "state is being read anew from the store", "try again")

_encode = msgspec.msgpack.Encoder().encode


def fact_key(fact_id: int) -> str:
    """Where a fact is stored; keys sort as ids do."""
    return f"{FACT_PREFIX}{fact_id:016x}"


async def read_all(store: Store, prefix: str) -> list[Entry]:
    """Every entry under a prefix, page by page."""
    entries: list[Entry] = []
    after = ""
    while page := await store.list(prefix, after=after):
        entries.extend(page)
        after = page[-1].key
    return entries


class Publisher(Protocol):
    """Who hears what has become durable."""

    def publish(self, records: Sequence[Record]) -> None:
        """These facts are true, in this order."""
        ...

    def rewind(self, handler: str, position: int) -> None:
        """What this durable handler decided after `position` has not happened; it must handle those facts again."""
        ...


class StateOwner(Protocol):
    """An owner of state: it can become what the store holds."""

    async def load(self, store: Store) -> None:
        """Forget everything and read it from the store."""
        ...


class _Entry:
    """One decision on its way to the store."""

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
    """The one writer of the store."""

    def __init__(self, store: Store, journal: Journal, clock: Clock, publisher: Publisher) -> None:
        self.store = store
        self.journal = journal
        self.replies = ReplyTable()
        self.cursors: dict[str, int] = {}
        self.term = 0
        """How many times a ledger has taken this store over; it grows with every start."""
        self.revision = 0
        self.durable = 0
        self.published = 0
        """The id of the newest fact that the publisher was given."""
        self.batches = 0
        self.decisions = 0
        self.failures = 0
        self.reloads = 0
        """How many times state was read anew; what was seen before the last time may not have happened."""
        self.unavailable: ForgedError | None = Unavailable("starting", "the daemon is starting", "try again")
        """Why nothing can be decided or read now; None while all is well."""
        self.read_only: ForgedError | None = None
        """Why nothing can be decided while reading goes on; None while all is well."""
        self.on_commit: Callable[[float, int], None] = lambda seconds, decisions: None
        """Called for every batch that became durable, with how long that took and how many decisions it held."""
        self._clock = clock
        self._publisher = publisher
        self._state_owners: list[StateOwner] = []
        self._queue: list[_Entry] = []
        self._in_flight: list[_Entry] = []
        self._kept: deque[int] = deque()
        self._fence: dict[str, int] = {}
        self._beginnings: dict[str, int] = {}
        self._reload_wanted = False
        self._wanted: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()

    def register(self, owner: StateOwner) -> None:
        """Let an owner of state be loaded at start, and again after a failed commit."""
        self._state_owners.append(owner)

    async def start(self) -> None:
        """Load, and take the store over; when it cannot be written to, reading goes on until it can.

        Facts that were published to an earlier process are not published again.
        """
        await self._load()
        self.unavailable = None
        self.published = self.journal.last
        await self._claim()
        if self.read_only is None:
            self._writable.set()
        else:
            self.reload(self.read_only)
            self.unavailable = None

    def require_sound(self) -> None:
        """Raise unless state in memory is what the store holds, or will hold."""
        if self.unavailable is not None:
            raise without_traceback(self.unavailable)

    def require_writable(self) -> None:
        """Raise unless something can be decided now."""
        self.require_sound()
        if self.read_only is not None:
            raise without_traceback(self.read_only)

    @property
    def writable_now(self) -> bool:
        """Whether something can be decided now."""
        return self.unavailable is None and self.read_only is None

    async def writable(self) -> None:
        """Wait until something can be decided."""
        while not self._writable.is_set():
            await self._writable.wait()

    def reload(self, error: ForgedError) -> None:
        """State in memory may be wrong: nothing more is decided on it, and it is read anew."""
        self._close(error)
        self._reload_wanted = True
        self._wake()

    def recall(self, call: Call) -> Pending | bytes | None:
        """The answer that this very request was given before, decided or encoded."""
        self.require_sound()
        return self.replies.recall(call, self._clock.monotonic())

    def settled(self, reply: Any, encoded: bytes = b"") -> Pending:
        """A reply that rests on everything decided so far, and waits for it."""
        self.require_sound()
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
        """Take a decision that has changed state in memory; it is history when the pending reply is done.

        `call` is the client's request if its reply is to be remembered; `cursor` names a durable handler and the fact
        that it handled with this decision.
        """
        try:
            self.require_writable()
            entry = self._compose(decision, cause, origin, call, cursor)
            check(entry.transaction)
        except Exception as error:
            # The owner has changed its state already, and that change will not happen.
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
        """Have a durable handler that is new go on from here after a restart.

        Where that cannot be stored now, it will be before anything else is decided.
        """
        self._beginnings[handler] = position
        if self.writable_now:
            self.save_cursor(handler, position)

    def save_cursor(self, handler: str, position: int) -> Pending:
        """Remember how far a durable handler has come without deciding; if that is lost, nobody is rewound."""
        self.cursors[handler] = position
        return self.append(Decision(None, writes={CURSOR_PREFIX + handler: b"%d" % position}))

    async def run(self) -> None:
        """Write batch after batch, for ever."""
        while True:
            if not self._queue and not self._reload_wanted:
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted
            if self._reload_wanted:
                await self._recover(self.unavailable or _RELOADING)
            else:
                await self._write_batch()

    async def flush(self) -> None:
        """Wait until everything decided so far is durable or has failed."""
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
    ) -> _Entry:
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
        self._tidy(puts, deletes)
        return _Entry(Transaction(revision, puts, deletes, self._fence), records, pending, call, cursor)

    def _record(
        self, decision: Decision[Any], cause: int, origin: str, at: float, puts: dict[str, bytes]
    ) -> list[Record]:
        assert cause <= self.revision, "a cause lies in the past"
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
            self._kept.append(record.id)
        return records

    def _tidy(self, puts: dict[str, bytes], deletes: list[str]) -> None:
        """Delete what is no longer kept, as far as the decision leaves room in its transaction."""
        room = OPERATIONS_MAX - len(puts) - len(deletes) - len(self._fence)
        forgotten = self.replies.take_forgotten(room)
        deletes += forgotten
        outgrown = min(len(self._kept) - self.journal.facts_max, room - len(forgotten) - 1, TRIM_MAX)
        if outgrown > 0:
            ids = [self._kept.popleft() for _ in range(outgrown)]
            puts[FLOOR_KEY] = b"%d" % ids[-1]
            deletes += map(fact_key, ids)

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
                self.read_only = _overtaken(outcome)
                await self._recover(self.read_only)
                return
        self.batches += 1
        self.on_commit(self._clock.monotonic() - began, len(batch))
        self._in_flight = []
        self.durable = batch[-1].transaction.revision
        records = [record for entry in batch for record in entry.records]
        self.journal.extend(records)
        self._tell(records)
        for entry in batch:
            entry.pending.resolve()

    def _tell(self, records: Sequence[Record]) -> None:
        if records:
            self.published = records[-1].id
            self._publisher.publish(records)

    async def _recover(self, error: ForgedError) -> None:
        """Undo in memory what is not in the store, tell everybody who waited, and wait until writing works."""
        self.failures += 1
        self._close(error)
        await self._reload_until_sound(error)
        while self.read_only is not None:
            await anyio.sleep(PROBE_PAUSE_S)
            if self._reload_wanted or self.store.revision != self.durable:
                await self._reload_until_sound(self.read_only)
            await self._claim()
        for handler, position in self._beginnings.items():
            if handler not in self.cursors:
                self.save_cursor(handler, position)
        self._writable.set()

    async def _reload_until_sound(self, error: ForgedError) -> None:
        while True:
            lost, self._in_flight, self._queue = self._in_flight + self._queue, [], []
            self._reload_wanted = False
            try:
                await self._load()
            except ForgedError as again:
                self.unavailable = again
            else:
                # State that was tainted while it was being read has to be read once more.
                self.unavailable = self.unavailable if self._reload_wanted else None
            for entry in lost:
                self._undo(entry, error)
            if self.unavailable is None:
                self._tell(self.journal.after(self.published, len(self.journal)))
                return
            await anyio.sleep(PROBE_PAUSE_S)

    def _undo(self, entry: _Entry, error: ForgedError) -> None:
        if entry.cursor is not None:
            handler, position = entry.cursor
            self._publisher.rewind(handler, position - 1)
        entry.pending.resolve(error)

    async def _claim(self) -> None:
        """Begin a new term, which fences every other writer, and so see whether the store takes writes."""
        revision = self.revision + 1
        try:
            held = await self.store.get(TERM_KEY)
            term = int(held.value) + 1 if held else 1
            expected = self._fence or {TERM_KEY: held.revision if held else ABSENT}
            (overtaken,) = await self.store.commit([Transaction(revision, {TERM_KEY: b"%d" % term}, (), expected)])
        except ForgedError as error:
            self.read_only = _translated(error)
            return
        if overtaken is not None:
            self.read_only = _overtaken(overtaken)
            return
        self.read_only = None
        self.term, self.revision, self.durable, self._fence = term, revision, revision, {TERM_KEY: revision}

    async def _load(self) -> None:
        self.reloads += 1
        # The revision comes first: what somebody else may write meanwhile then fences this ledger.
        self.revision = self.durable = self.store.revision
        with _readable("a fact"):
            facts = [Record.read(entry.value) for entry in await read_all(self.store, FACT_PREFIX)]
            floor = await self.store.get(FLOOR_KEY)
            self.journal.reset(facts, int(floor.value) if floor else 0)
        self._kept = deque(record.id for record in facts)
        with _readable("a cursor"):
            cursors = await read_all(self.store, CURSOR_PREFIX)
            self.cursors = {entry.key.removeprefix(CURSOR_PREFIX): int(entry.value) for entry in cursors}
        with _readable("a remembered reply"):
            self.replies.load(await read_all(self.store, REPLY_PREFIX), self._clock.monotonic())
        for owner in self._state_owners:
            with _readable(f"what belongs to {type(owner).__name__}"):
                await owner.load(self.store)

    def _close(self, error: ForgedError) -> None:
        self.unavailable = error
        self._writable.clear()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


def _translated(error: ForgedError) -> ForgedError:
    """What a failed commit means to those who wait for it."""
    return _not_leader(error.message) if isinstance(error, StoreFenced) else error


def _unfit(error: Exception) -> ForgedError:
    return ForgedError("decision_unfit", f"a decision cannot be stored: {describe(error)}", "report it as a bug")


def _overtaken(conflict: Conflict) -> NotLeader:
    return _not_leader(f"{conflict.key} is at {conflict.found}, not at {conflict.expected}")


def _not_leader(reason: str) -> NotLeader:
    return NotLeader(
        "not_leader", f"somebody else writes to the store: {reason}", "let one daemon use a data directory"
    )


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """What cannot be decoded was not written by a ledger: that is the store's damage, and is said so."""
    try:
        yield
    except (msgspec.MsgspecError, PeerError, ValueError) as error:
        raise StoreCorrupt(
            "store_undecodable", f"{what} in the store cannot be read: {error}", "restore a backup into a new directory"
        ) from error
