from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import RequestRefused, Unavailable
from forged.kernel.bus.bus import CURSOR_INTERVAL_S
from forged.kernel.bus.follower import DELIVERY_RETRY, SCAN_MAX, Deliver, Follower, FollowerOptions
from forged.kernel.bus.model import HandlerFailed
from forged.kernel.journal import Journal
from forged.kernel.ledger import CURSOR_PREFIX
from forged.kernel.messages import Decision, Fact, Gap, Record
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import Added, Echoed, Kernel, ids, on_virtual_time, running, task_group

DOWN = Unavailable("receiver_down", "the receiver is down", "")


class Receiver:
    """A receiver of facts that records them and misbehaves on request."""

    def __init__(self, **terms: Any) -> None:
        self.batches: list[list[int]] = []
        self.gaps: list[Gap] = []
        self.does: Callable[[Sequence[Record]], Any] = lambda records: None
        self.terms = {"on_gap": self.gaps.append} | terms
        self.follower: Follower

    async def __call__(self, records: Sequence[Record]) -> None:
        self.batches.append(ids(records))
        result = self.does(records)
        if isinstance(result, Awaitable):
            await result

    @property
    def ids(self) -> list[int]:
        return [fact_id for batch in self.batches for fact_id in batch]

    def register(self, kernel: Kernel) -> None:
        terms = dict(self.terms)
        self.follower = kernel.bus.follow(terms.pop("types", Added), self, name="receiver", **terms)


def raising(error: BaseException) -> Callable[[Sequence[Record]], None]:
    def act(_: Sequence[Record]) -> None:
        raise error

    return act


async def hang(_: Sequence[Record]) -> None:
    await asyncio.Event().wait()


def additions(kernel: Kernel) -> list[int]:
    return [record.id for record in kernel.journal.after(0, 100_000) if record.type == "Added"]


async def delivered(receiver: Receiver) -> None:
    """Wait until the follower has delivered everything."""
    while not receiver.follower.idle:
        await anyio.sleep(0.1)


async def echo(kernel: Kernel, job: str = "", count: int = 1) -> None:
    await kernel.ledger.append(Decision(None, tuple(Echoed(0) for _ in range(count)), job=job)).wait()


# Delivering.


@on_virtual_time
async def test_facts_are_delivered_in_the_order_of_their_ids() -> None:
    receiver = Receiver()
    async with running(register=receiver.register) as kernel:
        for _ in range(20):
            await kernel.add()
        await delivered(receiver)
        assert receiver.ids == additions(kernel)


@on_virtual_time
async def test_only_durable_facts_are_delivered() -> None:
    store, receiver = FaultyStore(), Receiver()
    async with running(store, receiver.register) as kernel:
        store.block()
        kernel.submit()
        await anyio.sleep(10)
        assert receiver.ids == []
        store.unblock()
        await kernel.settle()
        await delivered(receiver)
        assert receiver.ids == additions(kernel)
        assert receiver.ids[-1] <= store.revision


@on_virtual_time
async def test_new_follower_gets_only_later_facts() -> None:
    store, receiver = FaultyStore(), Receiver()
    async with running(store) as kernel:
        await kernel.add()
    async with running(store, receiver.register) as kernel:
        await kernel.add()
        await delivered(receiver)
        assert receiver.ids == additions(kernel)[1:]


@on_virtual_time
async def test_follower_can_be_added_at_run_time() -> None:
    receiver = Receiver()
    async with running() as kernel:
        await kernel.add()
        receiver.register(kernel)
        await kernel.add()
        await delivered(receiver)
        assert receiver.ids == additions(kernel)[1:]


@on_virtual_time
async def test_queued_facts_are_delivered_in_bounded_batches() -> None:
    receiver = Receiver(batch_max=4)
    release = asyncio.Event()
    receiver.does = lambda _: release.wait()
    async with running(register=receiver.register) as kernel:
        for _ in range(10):
            await kernel.add()
        release.set()
        await delivered(receiver)
        assert [len(batch) for batch in receiver.batches] == [1, 4, 4, 1]
        assert receiver.ids == additions(kernel)


@on_virtual_time
async def test_only_facts_of_the_types_and_jobs_asked_for_are_delivered() -> None:
    receiver = Receiver(types=[Echoed], jobs=frozenset({"a", "b"}))
    async with running(register=receiver.register) as kernel:
        for job in ("a", "", "b", "c", "a"):
            await echo(kernel, job)
            await kernel.add()
        await delivered(receiver)
        found = [kernel.journal.get(fact_id) for fact_id in receiver.ids]
        assert [(one.type, one.job) for one in found if one] == [("Echoed", "a"), ("Echoed", "b"), ("Echoed", "a")]


@on_virtual_time
async def test_a_follower_of_all_facts_has_all_of_them() -> None:
    receiver = Receiver(types=Fact)
    async with running(register=receiver.register) as kernel:
        await kernel.add()
        await echo(kernel, count=3)
        await delivered(receiver)
        assert receiver.ids == ids(kernel.journal.after(0, 100))


@on_virtual_time
async def test_a_fact_that_a_delivery_leads_to_is_delivered_too() -> None:
    receiver = Receiver()
    async with running(register=receiver.register) as kernel:
        receiver.does = lambda _: kernel.add() if len(kernel.facts(Added)) < 5 else None
        await kernel.add()
        await delivered(receiver)
        assert receiver.ids == additions(kernel)
        assert len(receiver.ids) == 5


@pytest.mark.parametrize(("types", "name"), [((), "new"), (Added, "taken")])
@on_virtual_time
async def test_duplicate_name_or_missing_types_is_an_error(types: Any, name: str) -> None:
    async with running(register=lambda kernel: kernel.bus.on(Added, lambda _: None, name="taken")) as kernel:
        with pytest.raises(ValueError, match=name):
            kernel.bus.follow(types, Receiver(), name=name)
        assert kernel.bus.followers == {}


# Failing.


@on_virtual_time
async def test_a_delivery_that_fails_is_tried_again_with_growing_pauses() -> None:
    receiver, moments = Receiver(), list[float]()
    async with running(register=receiver.register) as kernel:

        def refuse(_: Sequence[Record]) -> None:
            moments.append(kernel.clock.monotonic())
            raise ValueError("boom")

        receiver.does = refuse
        await kernel.add()
        await anyio.sleep(600)
        pauses = [later - earlier for earlier, later in pairwise(moments)]
        assert pauses[0] <= DELIVERY_RETRY.delay_s
        assert all(later >= 1.4 * earlier for earlier, later in pairwise(pauses[:6]))
        assert max(pauses) <= DELIVERY_RETRY.delay_max_s
        assert {tuple(batch) for batch in receiver.batches} == {tuple(additions(kernel))}


@on_virtual_time
async def test_after_a_success_the_pauses_begin_anew() -> None:
    receiver, moments = Receiver(), list[float]()
    async with running(register=receiver.register) as kernel:

        def refuse(_: Sequence[Record]) -> None:
            moments.append(kernel.clock.monotonic())
            if len(moments) not in (8, 10):
                raise DOWN

        receiver.does = refuse
        for _ in range(2):
            await kernel.add()
            await anyio.sleep(100)
        assert moments[9] - moments[8] <= DELIVERY_RETRY.delay_s


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), RequestRefused("no", "boom", "")])
@on_virtual_time
async def test_failure_is_recorded_and_reported(error: BaseException) -> None:
    receiver, told = Receiver(), list[tuple[str, str]]()
    receiver.does = raising(error)
    async with running(register=receiver.register) as kernel:
        kernel.bus.on_failure.append(lambda handler, reason: told.append((handler.name, reason)))
        await kernel.add()
        await anyio.sleep(0.1)
        receiver.does = lambda _: None
        await delivered(receiver)
        (failed,) = kernel.facts(HandlerFailed)
        assert (failed.handler, "boom" in failed.reason or "SystemExit" in failed.reason) == ("receiver", True)
        assert told == [("receiver", failed.reason)]
        assert (receiver.follower.statistics.failed, receiver.follower.failures_in_a_row) == (1, 0)


@on_virtual_time
async def test_unexpected_exception_is_reported_with_traceback_and_a_forged_error_is_not() -> None:
    receiver, told = Receiver(), list[BaseException]()
    mistake, refusal = ValueError("boom"), RequestRefused("no", "no", "")
    async with running(register=receiver.register) as kernel:
        kernel.bus.on_handler_bug = lambda _, error: told.append(error)
        for error in (mistake, refusal):
            receiver.does = raising(error)
            await kernel.add()
            await anyio.sleep(0.05)
            receiver.does = lambda _: None
            await delivered(receiver)
        assert told == [mistake]


@on_virtual_time
async def test_receiver_outage_of_an_hour_is_no_failure_and_does_not_load_the_bus() -> None:
    receiver = Receiver()
    receiver.does = raising(DOWN)
    async with running(register=receiver.register) as kernel:
        kernel.bus.backlog_max = 10
        for _ in range(300):
            await kernel.add()
            await anyio.sleep(10)
            assert not kernel.bus.congested
        await kernel.bus.drain()
        assert kernel.facts(HandlerFailed) == []
        assert (receiver.follower.statistics.failed, receiver.follower.failures_in_a_row) == (0, 0)
        assert (receiver.follower.behind, receiver.follower.waiting_for) == (300, "the receiver is down")
        assert not any(isinstance(value, list | dict | set) and value for value in vars(receiver.follower).values())
        receiver.batches.clear()
        receiver.does = lambda _: None
        await delivered(receiver)
        assert receiver.ids == additions(kernel)
        assert (receiver.follower.behind, receiver.follower.waiting_for) == (0, None)


@on_virtual_time
async def test_when_it_is_tried_again_can_be_seen() -> None:
    receiver = Receiver()
    receiver.does = raising(DOWN)
    async with running(register=receiver.register) as kernel:
        await kernel.add()
        await anyio.sleep(0.01)
        retry_at = receiver.follower.retry_at
        assert retry_at is not None
        assert 0 < retry_at - kernel.clock.monotonic() <= DELIVERY_RETRY.delay_s
        receiver.does = lambda _: None
        await delivered(receiver)
        assert receiver.follower.retry_at is None


@on_virtual_time
async def test_a_delivery_that_is_cancelled_from_within_is_a_failure_and_not_the_end() -> None:
    receiver = Receiver()
    receiver.does = raising(asyncio.CancelledError())
    async with running(register=receiver.register) as kernel:
        await kernel.add()
        await anyio.sleep(0.1)
        receiver.does = lambda _: None
        await delivered(receiver)
        assert receiver.ids[-1:] == additions(kernel)
        assert [fact.reason for fact in kernel.facts(HandlerFailed)] == [
            "raised CancelledError without being cancelled"
        ]


@on_virtual_time
async def test_a_failure_while_nothing_can_be_written_is_put_on_record_later() -> None:
    store, receiver = FaultyStore(), Receiver()
    async with running(store, receiver.register) as kernel:
        receiver.does = hang
        await kernel.add()
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await kernel.add()
        kernel.bus.followers["receiver"].pause()
        kernel.bus.record_later(Decision(None, (HandlerFailed("receiver", 1, "boom"),)))
        await anyio.sleep(10)
        assert kernel.facts(HandlerFailed) == []
        store.commit_error = None
        await anyio.sleep(10)
        assert len(kernel.facts(HandlerFailed)) == 1


# The position.


@on_virtual_time
async def test_a_follower_goes_on_after_a_restart_where_it_was() -> None:
    store, receiver = FaultyStore(), Receiver()
    async with running(store, receiver.register) as kernel:
        await kernel.add()
        await kernel.add()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
        receiver.does = raising(DOWN)
        await kernel.add()
        await kernel.add()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
    again = Receiver()
    async with running(store, again.register) as kernel:
        await delivered(again)
        assert again.ids == additions(kernel)[2:]


@on_virtual_time
async def test_crash_may_repeat_a_delivery_but_loses_none() -> None:
    store, receiver, again = FaultyStore(), Receiver(), Receiver()
    async with running(store, receiver.register) as kernel:
        await kernel.add()
        await anyio.sleep(CURSOR_INTERVAL_S / 2)
        assert len(receiver.ids) == 1
    async with running(store, again.register) as kernel:
        await delivered(again)
        assert again.ids == additions(kernel)


@on_virtual_time
async def test_position_is_stored_under_the_follower_name() -> None:
    receiver = Receiver()
    async with running(register=receiver.register) as kernel:
        await kernel.add()
        await delivered(receiver)
        kernel.bus.save_cursors()
        await kernel.ledger.flush()
        entry = await kernel.store.get(CURSOR_PREFIX + "receiver")
        assert entry is not None
        assert [int(entry.value)] == additions(kernel)


@on_virtual_time
async def test_cursor_does_not_pass_a_fact_under_delivery() -> None:
    store, receiver, again = FaultyStore(), Receiver(), Receiver()
    receiver.does = hang
    async with running(store, receiver.register) as kernel:
        for _ in range(5):
            await kernel.add()
            await anyio.sleep(CURSOR_INTERVAL_S)
    async with running(store, again.register) as kernel:
        await delivered(again)
        assert again.ids == additions(kernel)


@on_virtual_time
async def test_facts_that_do_not_concern_it_move_its_position_when_one_comes_that_does() -> None:
    receiver = Receiver(types=Echoed)
    receiver.does = hang
    async with running(register=receiver.register) as kernel:
        await anyio.sleep(0.1)
        for _ in range(50):
            await kernel.add()
        assert receiver.follower.behind == 0
        await echo(kernel)
        await anyio.sleep(0.1)
        assert receiver.follower.position == additions(kernel)[-1]
        assert receiver.follower.behind == 1


@on_virtual_time
async def test_follower_of_rare_facts_gets_no_false_gap() -> None:
    store, receiver, again = FaultyStore(), Receiver(types=Echoed), Receiver(types=Echoed)
    async with running(store, receiver.register, facts_max=20) as kernel:
        for _ in range(50):
            await kernel.add()
            await anyio.sleep(CURSOR_INTERVAL_S / 5)
        await echo(kernel)
        await delivered(receiver)
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
    async with running(store, again.register, facts_max=20) as kernel:
        await delivered(again)
    assert (len(receiver.ids), again.ids, receiver.gaps, again.gaps) == (1, [], [], [])


@on_virtual_time
async def test_follower_without_a_delivery_keeps_its_position() -> None:
    store, receiver, again = FaultyStore(), Receiver(), Receiver()
    receiver.does = raising(DOWN)
    async with running(store, receiver.register, facts_max=20) as kernel:
        for _ in range(15):
            await kernel.add()
        await anyio.sleep(60)
    async with running(store, again.register, facts_max=20) as kernel:
        await delivered(again)
        assert again.ids == additions(kernel)
        assert len(again.ids) == 15


# Gaps.


@on_virtual_time
async def test_facts_dropped_by_the_journal_are_reported_as_a_gap_before_later_facts() -> None:
    receiver, order = Receiver(), list[object]()
    receiver.terms["on_gap"] = order.append
    receiver.does = raising(DOWN)
    async with running(register=receiver.register, facts_max=10) as kernel:
        for _ in range(30):
            await kernel.add()
        receiver.does = lambda records: order.append(ids(records))
        await delivered(receiver)
        gap, *batches = order
        assert isinstance(gap, Gap)
        assert (gap.first, gap.last) == (receiver.batches[0][0], kernel.journal.floor)
        assert batches == [additions(kernel)]


@on_virtual_time
async def test_follower_behind_the_journal_gets_a_gap() -> None:
    store, receiver, again = FaultyStore(), Receiver(), Receiver()
    async with running(store, receiver.register, facts_max=10) as kernel:
        began = kernel.ledger.published
    async with running(store, facts_max=10) as kernel:
        for _ in range(30):
            await kernel.add()
    async with running(store, again.register, facts_max=10) as kernel:
        await delivered(again)
        assert [(gap.first, gap.last) for gap in again.gaps] == [(began + 1, kernel.journal.floor)]
        assert again.ids == additions(kernel)


@on_virtual_time
async def test_follower_goes_on_after_a_gap_that_ends_just_before_a_kept_fact() -> None:
    """The journal has dropped fact 2 of the job with most facts, and keeps fact 1."""
    journal, receiver = Journal(facts_max=4), Receiver()
    journal.extend(
        [Record.of(Added(1, 1), fact_id=number, at=0.0, job="few" if number == 1 else "many") for number in range(1, 6)]
    )
    assert journal.dropped_before(3) == 2
    follower = Follower(
        FollowerOptions("receiver", receiver, on_gap=receiver.gaps.append),
        now=asyncio.get_running_loop().time,
        random=Random(1).random,
        sleep=asyncio.sleep,
        report=lambda follower, reason: None,
    )
    follower.begin(SimpleNamespace(journal=journal, published=5), 2)
    task = asyncio.create_task(follower.run())
    await asyncio.sleep(1.0)
    task.cancel()
    assert (receiver.ids, receiver.gaps) == ([3, 4, 5], [])


@pytest.mark.parametrize("error", [ValueError("boom"), DOWN])
@on_virtual_time
async def test_failed_gap_notice_is_repeated(error: Exception) -> None:
    receiver, tellings = Receiver(), list[Gap]()

    def tell(gap: Gap) -> None:
        tellings.append(gap)
        if len(tellings) < 3:
            raise error

    receiver.terms["on_gap"] = tell
    receiver.does = raising(DOWN)
    async with running(register=receiver.register, facts_max=10) as kernel:
        for _ in range(30):
            await kernel.add()
        receiver.does = lambda _: None
        await delivered(receiver)
        assert len(tellings) == 3
        assert receiver.batches[-1] == additions(kernel)
        assert len(kernel.facts(HandlerFailed)) == (0 if error is DOWN else 2)


@on_virtual_time
async def test_a_gap_is_awaited_where_telling_it_takes_time() -> None:
    receiver, told = Receiver(), list[Gap]()

    async def tell(gap: Gap) -> None:
        await anyio.sleep(5)
        assert receiver.batches[-1][0] <= gap.first
        told.append(gap)

    receiver.terms["on_gap"] = tell
    receiver.does = raising(DOWN)
    async with running(register=receiver.register, facts_max=10) as kernel:
        for _ in range(30):
            await kernel.add()
        receiver.does = lambda _: None
        await delivered(receiver)
        assert len(told) == 1
        assert receiver.follower.statistics.dropped == 1


# Pausing.


@on_virtual_time
async def test_paused_follower_delivers_nothing_and_continues_at_its_position() -> None:
    receiver = Receiver()
    async with running(register=receiver.register) as kernel:
        await kernel.add()
        await delivered(receiver)
        receiver.follower.pause()
        for _ in range(3):
            await kernel.add()
        await anyio.sleep(100)
        assert len(receiver.ids) == 1
        receiver.follower.resume()
        await delivered(receiver)
        assert receiver.ids == additions(kernel)


@on_virtual_time
async def test_paused_follower_keeps_its_position_across_a_restart() -> None:
    store, receiver, again = FaultyStore(), Receiver(), Receiver()
    async with running(store, receiver.register, facts_max=20) as kernel:
        await kernel.add()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
        receiver.follower.pause()
        for _ in range(15):
            await kernel.add()
        await anyio.sleep(3 * CURSOR_INTERVAL_S)
    async with running(store, again.register, facts_max=20) as kernel:
        await delivered(again)
        assert again.ids == additions(kernel)[1:]


@on_virtual_time
async def test_a_pause_while_it_fails_ends_the_attempts_until_it_is_resumed_with_a_clean_record() -> None:
    receiver = Receiver()
    receiver.does = raising(ValueError("boom"))
    async with running(register=receiver.register) as kernel:
        await kernel.add()
        await anyio.sleep(5)
        receiver.follower.pause()
        await anyio.sleep(100)
        attempts = len(receiver.batches)
        await anyio.sleep(1000)
        assert len(receiver.batches) == attempts
        receiver.does = lambda _: None
        receiver.follower.resume()
        assert (receiver.follower.failures_in_a_row, receiver.follower.waiting_for) == (0, None)
        await delivered(receiver)
        assert receiver.batches[-1] == additions(kernel)


@on_virtual_time
async def test_resumed_follower_retries_without_a_pause() -> None:
    receiver = Receiver()

    def fail(_: Sequence[Record]) -> None:
        receiver.follower.pause()
        raise DOWN

    receiver.does = fail
    async with running(register=receiver.register) as kernel:
        await kernel.add()
        await anyio.sleep(0.01)
        receiver.does = lambda _: None
        receiver.follower.resume()
        await asyncio.sleep(0)
        assert receiver.batches == [additions(kernel)] * 2


# The store fails.


@on_virtual_time
async def test_only_committed_facts_are_delivered_and_each_once() -> None:
    store, receiver = FaultyStore(), Receiver()
    async with running(store, receiver.register) as kernel:
        for round_ in range(6):
            store.commit_error = full() if round_ % 2 else None
            with suppress(Unavailable):
                await kernel.add()
            await anyio.sleep(0.1)
        store.commit_error = None
        await kernel.ledger.writable()
        await kernel.add()
        await delivered(receiver)
        assert receiver.ids == additions(kernel)
        assert kernel.ledger.reloads > 1


@on_virtual_time
async def test_facts_that_come_to_light_with_a_reload_are_delivered() -> None:
    store, receiver = FaultyStore(), Receiver()
    async with running(store, receiver.register) as kernel:
        await kernel.add()
        async with running(store.memory) as other:
            await other.add()
        with suppress(Unavailable):
            await kernel.add()
        await anyio.sleep(10)
        await delivered(receiver)
        assert receiver.ids == additions(kernel)
        assert len(receiver.ids) >= 2


@on_virtual_time
async def test_follower_delivers_while_the_store_refuses_writes() -> None:
    store, receiver = FaultyStore(), Receiver()
    receiver.does = raising(DOWN)
    async with running(store, receiver.register) as kernel:
        await kernel.add()
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await kernel.add()
        receiver.does = lambda _: None
        await anyio.sleep(60)
        assert receiver.batches[-1] == additions(kernel)
        assert receiver.follower.idle


@given(
    steps=st.lists(
        st.sampled_from(["add", "down", "raise", "up", "fill", "free", "wait", "pause", "resume", "die"]), max_size=25
    ),
    batch_max=st.integers(1, 4),
)
def test_every_durable_fact_is_delivered_in_order_under_any_faults(steps: list[str], batch_max: int) -> None:
    replay(steps, batch_max)


@on_virtual_time
async def replay(steps: list[str], batch_max: int) -> None:
    store, heard = FaultyStore(), list[int]()
    lives: list[list[str]] = [[]]
    for step in steps:
        lives[-1].append(step)
        if step == "die":
            lives.append([])
    for life in [*lives, ["free", "up"]]:
        receiver = Receiver(batch_max=batch_max)

        def take(records: Sequence[Record]) -> None:
            assert all(record.id <= store.revision for record in records)
            heard.extend(ids(records))

        manners = {"up": take, "down": raising(DOWN), "raise": raising(ValueError("boom"))}
        receiver.does = take
        async with running(store, receiver.register) as kernel:
            for step in life:
                if step == "add":
                    with suppress(Unavailable):
                        await kernel.add()
                elif step in manners:
                    receiver.does = manners[step]
                elif step == "pause":
                    receiver.follower.pause()
                elif step == "resume":
                    receiver.follower.resume()
                else:
                    store.commit_error = {"fill": full(), "free": None}.get(step, store.commit_error)
                await anyio.sleep(0.7)
    async with running(store, (last := Receiver()).register) as kernel:
        await kernel.ledger.writable()
        await delivered(last)
        firsts = list(dict.fromkeys([*heard, *last.ids]))
        assert firsts == additions(kernel)


# Fairness.


def journal_of(count: int) -> Journal:
    journal = Journal(count)
    journal.extend([Record.of(Echoed(0), fact_id=fact_id, at=0.0) for fact_id in range(1, count + 1)])
    return journal


def follower_of(deliver: Deliver, types: frozenset[type[Fact]]) -> Follower:
    return Follower(
        FollowerOptions("reader", deliver, types),
        now=asyncio.get_running_loop().time,
        random=Random(1).random,
        sleep=anyio.sleep,
        report=lambda *_: None,
    )


class PublishedJournal:
    """A journal with only published facts."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.published = journal.last


@on_virtual_time
async def test_unpublished_facts_are_not_delivered() -> None:
    taken: list[int] = []

    async def deliver(records: Sequence[Record]) -> None:
        taken.extend(ids(records))

    published = PublishedJournal(journal_of(10))
    published.published = 7
    follower = follower_of(deliver, frozenset())
    follower.begin(published, 5)
    async with task_group() as tasks:
        tasks.start_soon(follower.run)
        await anyio.sleep(1)
    assert (taken, follower.position) == ([6, 7], 7)


@pytest.mark.parametrize(("types", "batches"), [(frozenset({Added}), 0), (frozenset({Echoed}), 1000)])
@on_virtual_time
async def test_scan_of_a_long_journal_yields_to_other_tasks(types: frozenset[type[Fact]], batches: int) -> None:
    journal, taken = journal_of(100_000), list[int]()

    async def deliver(records: Sequence[Record]) -> None:
        taken.append(len(records))

    follower = follower_of(deliver, types)
    follower.begin(PublishedJournal(journal), 0)
    turns = 0
    async with task_group() as tasks:
        tasks.start_soon(follower.run)
        while not follower.idle:
            await asyncio.sleep(0)
            turns += 1
    assert (len(taken), follower.position, follower.behind) == (batches, 100_000, 0)
    assert turns >= max(len(journal) // SCAN_MAX, batches)
