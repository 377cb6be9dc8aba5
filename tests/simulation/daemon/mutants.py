"""Mutants: deliberate bugs that the service simulation must catch.

Each mutant patches one behaviour of the daemon or a client for one seed. Each must be caught within the seeds that CI
runs; a mutant that is not caught shows that an invariant is missing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from forged.client.stream import FactStream
from forged.kernel.bus.follower import Follower
from forged.kernel.bus.mailbox import Mailbox
from forged.kernel.ledger import Ledger
from forged.kernel.messages import Gap, Record
from forged.kernel.replies import ReplyTable
from forged.kernel.retention import Retention
from forged.net.protocol.messages import Subscribe
from forged.net.protocol.streams import OutgoingStream
from forged.plugins.host import plugin_host
from forged.plugins.host.installer import Installer
from forged.plugins.host.plugin import Plugin
from forged.shares import Holder, Shares
from tests.simulation.environment.disk import SimulatedDisk

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
    """The disk is never synced."""

    async def forget(self: SimulatedDisk, name: str) -> None:
        return

    with patch.object(SimulatedDisk, "sync", forget):
        yield


@contextmanager
def forget_the_dedup() -> Iterator[None]:
    """A repeated request is executed again."""
    known = ReplyTable.recall

    def oblivious(self: ReplyTable, call: Any, now: float) -> None:
        known(self, call, now)

    with patch.object(ReplyTable, "recall", oblivious):
        yield


@contextmanager
def forget_replies_at_restart() -> Iterator[None]:
    """Remembered replies are not loaded after a restart."""
    load = ReplyTable.load

    def load_nothing(self: ReplyTable, replies: Any, floors: Any, now: float) -> None:
        load(self, [], floors, now)

    with patch.object(ReplyTable, "load", load_nothing):
        yield


@contextmanager
def reorder_a_mailbox() -> Iterator[None]:
    """A mailbox delivers the last two of several facts in the wrong order."""
    put = Mailbox.put

    def shuffle(self: Mailbox, records: Any) -> None:
        put(self, records)
        if isinstance(self.queue, deque) and len(self.queue) > 1:
            self.queue[-1], self.queue[-2] = self.queue[-2], self.queue[-1]

    with patch.object(Mailbox, "put", shuffle):
        yield


@contextmanager
def lose_a_resumed_subscription() -> Iterator[None]:
    """After a reconnection a stream starts at the newest fact."""
    subscribe = FactStream.subscribe

    def from_now_on(self: FactStream, history: str) -> Subscribe:
        asked = subscribe(self, history)
        since = asked.since if asked.since == -1 else None
        return Subscribe(asked.stream, since, asked.history, asked.types, asked.jobs, asked.credit)

    with patch.object(FactStream, "subscribe", from_now_on):
        yield


@contextmanager
def read_before_durable() -> Iterator[None]:
    """A read does not wait until its revision is durable."""
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
    """After a failed commit the state owners are not reloaded."""
    load = Ledger._load

    async def load_the_ledger_alone(self: Ledger) -> None:
        started = self.revision > 0
        state_owners = self._state_owners
        if started:
            self._state_owners = []
        try:
            await load(self)
        finally:
            self._state_owners = state_owners

    with patch.object(Ledger, "_load", load_the_ledger_alone):
        yield


@contextmanager
def drop_the_oldest_facts_of_all_jobs() -> Iterator[None]:
    """The journal drops the oldest fact of all, whichever job has most."""
    choose = Retention.next_to_drop

    def oldest(self: Retention, facts_max: int, bytes_max: int, now: float) -> tuple[str, int] | None:
        chosen = choose(self, facts_max, bytes_max, now)
        return None if chosen is None else (self._by_age.first().job, 1)

    with patch.object(Retention, "next_to_drop", oldest):
        yield


@contextmanager
def hide_gaps() -> Iterator[None]:
    """Gaps are not sent to clients."""
    advance = OutgoingStream.advance

    def silent(self: OutgoingStream, journal: Any) -> Any:
        return [message for message in advance(self, journal) if type(message).__name__ != "GapMessage"]

    with patch.object(OutgoingStream, "advance", silent):
        yield


@contextmanager
def keep_no_reserve_for_operators() -> Iterator[None]:
    """Tenants may use what is left to operators."""
    fits = Shares.fits

    def generous(self: Shares, holder: Holder, amount: int = 1) -> bool:
        reserve, self._reserve = self._reserve, 0
        try:
            return fits(self, holder, amount)
        finally:
            self._reserve = reserve

    with patch.object(Shares, "fits", generous):
        yield


@contextmanager
def count_the_shares_of_all_tenants_as_one() -> Iterator[None]:
    """A tenant's share counts as used up when all tenants together have used so much."""

    def of_all(self: Shares, group: str) -> int:
        return self._tenants_used

    with patch.object(Shares, "of_group", of_all):
        yield


@contextmanager
def lose_a_cursor() -> Iterator[None]:
    """A durable handler starts at the newest fact after a restart."""
    load = Ledger._load

    async def without_cursors(self: Ledger) -> None:
        await load(self)
        self.cursors = {}

    with patch.object(Ledger, "_load", without_cursors):
        yield


@contextmanager
def save_a_followers_position_too_early() -> Iterator[None]:
    """A follower's position is advanced before the delivery has finished."""
    following = Follower._next

    def early(self: Follower) -> Any:
        reached, give = following(self)

        async def give_and_hope() -> None:
            assert give is not None
            position, self.position = self.position, reached
            try:
                await give()
            except BaseException:
                self.position = position
                raise

        return reached, give_and_hope if give else None

    with patch.object(Follower, "_next", early):
        yield


@contextmanager
def skip_what_could_not_be_delivered() -> Iterator[None]:
    """A follower skips a failed delivery."""
    try_delivery = Follower._try_delivery

    async def careless(self: Follower, deliver: Any) -> bool:
        await try_delivery(self, deliver)
        return True

    with patch.object(Follower, "_try_delivery", careless):
        yield


class _Premature:
    """A ledger whose journal includes decisions that are not durable."""

    def __init__(self, ledger: Ledger) -> None:
        self.published = sys.maxsize
        self.journal: Any = self
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger.journal, name)

    def after(self, position: int, limit: int) -> list[Record]:
        entries = [*self._ledger._in_flight, *self._ledger._queue]
        undurable = [record for entry in entries for record in entry.records if record.id > position]
        return [*self._ledger.journal.after(position, limit), *undurable]


@contextmanager
def deliver_undurable_facts() -> Iterator[None]:
    """A follower delivers facts that are not durable."""
    begin = Follower.begin

    def hasty(self: Follower, source: Any, position: int) -> None:
        begin(self, _Premature(source), position)

    with patch.object(Follower, "begin", hasty):
        yield


@contextmanager
def hide_a_followers_gaps() -> Iterator[None]:
    """Gaps are not delivered to followers."""

    async def silent(self: Follower, gap: Gap) -> None:
        return

    with patch.object(Follower, "_deliver_gap", silent):
        yield


@contextmanager
def leave_followers_behind() -> Iterator[None]:
    """A re-enabled plugin's followers stay paused."""
    activate = Plugin.activate

    def without_followers(self: Plugin) -> None:
        followers, self.followers = self.followers, []
        activate(self)
        self.followers = followers

    with patch.object(Plugin, "activate", without_followers):
        yield


class _AlwaysActive:
    """A plugin that always looks active."""

    active = True

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugin, name)


@contextmanager
def go_through_the_wrapper_of_a_plugin_left_out() -> Iterator[None]:
    """The wrappers of a quarantined plugin stay in use."""
    wrap = Installer._wrap

    def forgetful(self: Installer, wrapping: Any) -> None:
        plugin: Any = _AlwaysActive(self._plugin)
        wrap(Installer(self._bus, self._caller, plugin), wrapping)

    with patch.object(Installer, "_wrap", forgetful):
        yield


@contextmanager
def let_a_plugin_say_anything() -> Iterator[None]:
    """Published facts of plugins are not checked."""

    def indulgent(facts: Any, *, own: bool) -> None:
        return

    with patch.object(plugin_host, "check_facts", indulgent):
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
        drop_the_oldest_facts_of_all_jobs,
        hide_gaps,
        keep_no_reserve_for_operators,
        count_the_shares_of_all_tenants_as_one,
        lose_a_cursor,
        save_a_followers_position_too_early,
        skip_what_could_not_be_delivered,
        deliver_undurable_facts,
        hide_a_followers_gaps,
        leave_followers_behind,
        go_through_the_wrapper_of_a_plugin_left_out,
        let_a_plugin_say_anything,
    )
}
