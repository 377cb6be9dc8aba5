"""Deliberate bugs, to show that the simulation finds bugs.

Law: a mutant changes one thing that the daemon or a client must do, by patching it for as long as a world lasts. Each
must be caught within the seeds that CI runs; one that survives says that an invariant is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from forged.bus.mailbox import Mailbox
from forged.client.stream import FactStream
from forged.ledger import Ledger
from forged.net.messages import Subscribe
from forged.net.streams import OutgoingStream
from forged.replies import ReplyBook
from tests.simulation.disk import SimulatedDisk

Mutant = Callable[[], Any]


@contextmanager
def acknowledge_before_commit() -> Iterator[None]:
    """Replies do not wait for the store."""
    append = Ledger.append

    def hasty(self: Ledger, *args: Any, **options: Any) -> Any:
        pending = append(self, *args, **options)
        pending.resolve()
        return pending

    with patch.object(Ledger, "append", hasty):
        yield


@contextmanager
def drop_the_sync() -> Iterator[None]:
    """The disk is told to write, never to have written."""

    async def forget(self: SimulatedDisk, name: str) -> None:
        return

    with patch.object(SimulatedDisk, "sync", forget):
        yield


@contextmanager
def forget_the_dedup() -> Iterator[None]:
    """A request that comes again is done again."""

    known = ReplyBook.recall

    def oblivious(self: ReplyBook, call: Any, now: float) -> None:
        known(self, call, now)

    with patch.object(ReplyBook, "recall", oblivious):
        yield


@contextmanager
def forget_replies_at_restart() -> Iterator[None]:
    """Replies are remembered in memory alone."""
    load = ReplyBook.load

    def load_nothing(self: ReplyBook, entries: Any, now: float) -> None:
        load(self, [], now)

    with patch.object(ReplyBook, "load", load_nothing):
        yield


@contextmanager
def reorder_a_mailbox() -> Iterator[None]:
    """A mailbox that holds several facts hands over the last two in the wrong order."""
    put = Mailbox.put

    def shuffle(self: Mailbox, records: Any) -> None:
        put(self, records)
        if len(self.queue) > 1:
            self.queue[-1], self.queue[-2] = self.queue[-2], self.queue[-1]

    with patch.object(Mailbox, "put", shuffle):
        yield


@contextmanager
def lose_a_resumed_subscription() -> Iterator[None]:
    """After a reconnection a stream begins with what is new."""
    subscribe = FactStream.subscribe

    def from_now_on(self: FactStream, history: str) -> Subscribe:
        asked = subscribe(self, history)
        since = asked.since if asked.since == -1 else None
        return Subscribe(asked.stream, since, asked.history, asked.types, asked.jobs, asked.credit)

    with patch.object(FactStream, "subscribe", from_now_on):
        yield


@contextmanager
def read_before_durable() -> Iterator[None]:
    """A read does not wait for what it rests on."""
    settled = Ledger.settled

    def hasty(self: Ledger, *args: Any) -> Any:
        pending = settled(self, *args)
        if not pending.done:
            pending.resolve()
        return pending

    with patch.object(Ledger, "settled", hasty):
        yield


@contextmanager
def keep_state_after_failed_commit() -> Iterator[None]:
    """When a commit fails, the owners of state are not told."""
    load = Ledger._load

    async def load_the_ledger_alone(self: Ledger) -> None:
        started = self.revision > 0
        participants = self._participants
        if started:
            self._participants = []
        try:
            await load(self)
        finally:
            self._participants = participants

    with patch.object(Ledger, "_load", load_the_ledger_alone):
        yield


@contextmanager
def hide_gaps() -> Iterator[None]:
    """A reader who comes too late is not told what it missed."""
    advance = OutgoingStream.advance

    def silent(self: OutgoingStream, journal: Any) -> Any:
        return [message for message in advance(self, journal) if type(message).__name__ != "GapMessage"]

    with patch.object(OutgoingStream, "advance", silent):
        yield


@contextmanager
def lose_a_cursor() -> Iterator[None]:
    """A durable handler begins after a restart with what is new."""
    load = Ledger._load

    async def without_cursors(self: Ledger) -> None:
        await load(self)
        self.cursors = {}

    with patch.object(Ledger, "_load", without_cursors):
        yield


MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        acknowledge_before_commit,
        drop_the_sync,
        forget_the_dedup,
        forget_replies_at_restart,
        reorder_a_mailbox,
        lose_a_resumed_subscription,
        read_before_durable,
        keep_state_after_failed_commit,
        hide_gaps,
        lose_a_cursor,
    )
}
