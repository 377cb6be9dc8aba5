from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from forged.errors import ForgedError, NotLeader, RequestRefused, Unavailable
from forged.kernel.journal import Journal
from forged.kernel.ledger import BATCH_MAX, PROBE_PAUSE_S, Ledger, fact_key, read_all
from forged.kernel.messages import Decision, Fact, Record
from forged.kernel.pending import Pending
from forged.kernel.replies import PREFIX as REPLY_PREFIX
from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import OPERATIONS_MAX, VALUE_BYTES_MAX, StoreCorrupt, StoreFenced, Transaction
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import TOTAL_KEY, Added, Kernel, Tally, call, ids, on_virtual_time, task_group
from tests.simulation.environment.loop import VirtualClock


class UnencodableFact(Fact, frozen=True):
    """A fact that cannot be encoded."""

    thing: Any


class RecordingPublisher:
    """A publisher that records the facts and the durable revision at that time."""

    def __init__(self) -> None:
        self.published: list[Record] = []
        self.durable_when_published: list[bool] = []
        self.rewound: list[tuple[str, int]] = []
        self.store: FaultyStore

    def publish(self, records: Sequence[Record]) -> None:
        self.published += records
        self.durable_when_published += [record.id <= self.store.revision for record in records]

    def rewind(self, handler: str, position: int) -> None:
        self.rewound.append((handler, position))


class RunningLedger:
    """A ledger with its store, publisher and one state owner."""

    def __init__(self, store: FaultyStore, facts_max: int) -> None:
        self.store = store
        self.publisher = RecordingPublisher()
        self.publisher.store = store
        self.tally = Tally()
        self.journal = Journal(facts_max)
        self.ledger = Ledger(store, self.journal, clock(), self.publisher)
        self.ledger.register(self.tally)

    def add(self, amount: int = 1, **more: Any) -> Pending:
        return self.ledger.append(self.tally.add(amount), **more)

    async def stored_total(self) -> int:
        entry = await self.store.memory.get(TOTAL_KEY)
        return int(entry.value) if entry else 0

    async def recovered(self) -> None:
        await self.ledger.writable()


def clock() -> VirtualClock:
    return VirtualClock(asyncio.get_running_loop())


@asynccontextmanager
async def running_ledger(store: FaultyStore | None = None, facts_max: int = 50_000) -> AsyncIterator[RunningLedger]:
    built = RunningLedger(store or FaultyStore(), facts_max)
    await built.ledger.start()
    async with task_group() as tasks:
        tasks.start_soon(built.ledger.run)
        yield built


# What waits for the commit.


@on_virtual_time
async def test_a_reply_waits_until_its_decision_is_durable() -> None:
    async with running_ledger() as it:
        it.store.block()
        pending = it.add(5)
        await it.store.entered.wait()
        assert not pending.done
        it.store.unblock()
        assert await pending.wait() == 5
        assert pending.revision <= it.store.revision


@on_virtual_time
async def test_facts_are_published_only_when_durable() -> None:
    async with running_ledger() as it:
        it.store.block()
        pending = it.add()
        await it.store.entered.wait()
        assert it.publisher.published == []
        assert it.journal.last == 0
        it.store.unblock()
        await pending.wait()
        assert [record.fact for record in it.publisher.published] == [Added(1, 1)]
        assert it.publisher.durable_when_published == [True]


@on_virtual_time
async def test_facts_are_published_before_the_reply() -> None:
    async with running_ledger() as it:
        published_when_answered: list[int] = []
        it.add().when_done(lambda _: published_when_answered.append(len(it.publisher.published)))
        await it.ledger.flush()
        assert published_when_answered == [1]


@on_virtual_time
async def test_state_changes_at_once() -> None:
    async with running_ledger() as it:
        it.store.block()
        it.add(2)
        it.add(3)
        assert it.tally.total == 5


@on_virtual_time
async def test_read_waits_for_the_decision_that_it_depends_on() -> None:
    async with running_ledger() as it:
        it.store.block()
        it.add(7)
        read = it.ledger.settled(it.tally.total)
        await it.store.entered.wait()
        assert not read.done
        it.store.unblock()
        assert await read.wait() == 7


@on_virtual_time
async def test_read_waits_for_the_batch_that_is_being_written() -> None:
    async with running_ledger() as it:
        it.store.block()
        it.add(7)
        await it.store.entered.wait()
        read = it.ledger.settled(it.tally.total)
        assert not read.done
        it.store.unblock()
        assert await read.wait() == 7


@on_virtual_time
async def test_read_fails_with_the_decision_that_it_depends_on() -> None:
    async with running_ledger() as it:
        it.store.commit_error = full()
        it.add(7)
        read = it.ledger.settled(it.tally.total)
        with pytest.raises(Unavailable):
            await read.wait()


@on_virtual_time
async def test_read_of_durable_state_is_answered_at_once() -> None:
    async with running_ledger() as it:
        await it.add().wait()
        assert it.ledger.settled("x").done


@on_virtual_time
async def test_a_fact_s_id_is_the_revision_that_made_it_durable() -> None:
    async with running_ledger() as it:
        pending = it.ledger.append(Decision(None, (Added(1, 1), Added(2, 3), Added(3, 6))))
        await pending.wait()
        first, second, third = ids(it.publisher.published)
        assert (second, third) == (first + 1, first + 2)
        assert pending.revision == third == it.store.revision == it.ledger.durable
        entry = await it.store.get(fact_key(third))
        assert entry is not None
        assert (entry.revision, entry.value) == (third, it.publisher.published[-1].data)


@on_virtual_time
async def test_record_has_job_generation_cause_and_origin() -> None:
    async with running_ledger() as it:
        await it.ledger.append(Decision(None, (Added(1, 1),), job="a", generation=4), cause=1, origin="test").wait()
        (record,) = it.publisher.published
        assert (record.job, record.generation, record.cause, record.origin) == ("a", 4, 1, "test")


@on_virtual_time
async def test_writes_facts_and_reply_are_one_transaction() -> None:
    async with running_ledger() as it:
        request = call(1)
        it.ledger.recall(request)
        await it.add(3, call=request).wait()
        (transaction,) = it.store.batches[-1]
        kinds = {key.split("/")[0] for key in transaction.puts}
        assert kinds == {"tally", "fact", "reply"}


# Batches.


@on_virtual_time
async def test_decisions_during_a_commit_share_the_next_batch() -> None:
    async with running_ledger() as it:
        it.store.block()
        first = it.add()
        await it.store.entered.wait()
        later = [it.add() for _ in range(50)]
        it.store.unblock()
        assert [await pending.wait() for pending in (first, *later)] == list(range(1, 52))
        assert [len(batch) for batch in it.store.batches[1:]] == [1, 50]
        assert (it.ledger.batches, it.ledger.decisions) == (2, 51)


@on_virtual_time
async def test_decisions_of_one_loop_turn_share_one_batch() -> None:
    async with running_ledger() as it:
        for _ in range(10):
            it.add()
        await it.ledger.flush()
        assert len(it.store.batches[-1]) == 10


@on_virtual_time
async def test_a_batch_is_bounded() -> None:
    async with running_ledger() as it:
        pendings = [it.add() for _ in range(BATCH_MAX + 10)]
        assert [await pending.wait() for pending in pendings] == list(range(1, BATCH_MAX + 11))
        assert [len(batch) for batch in it.store.batches[1:]] == [BATCH_MAX, 10]


@on_virtual_time
async def test_flush_waits_for_everything_decided() -> None:
    async with running_ledger() as it:
        it.add()
        it.store.block()
        it.add()
        with anyio.move_on_after(1) as waiting:
            await it.ledger.flush()
        assert waiting.cancelled_caught
        it.store.unblock()
        await it.ledger.flush()
        assert await it.stored_total() == 2


@on_virtual_time
async def test_flush_returns_when_the_commit_has_failed() -> None:
    async with running_ledger() as it:
        it.store.commit_error = full()
        it.add()
        await it.ledger.flush()
        assert it.ledger.failures == 1


# When a commit fails.


@on_virtual_time
async def test_all_waiters_of_a_failed_commit_get_its_error() -> None:
    async with running_ledger() as it:
        it.store.block()
        in_flight = it.add()
        await it.store.entered.wait()
        behind = [it.add() for _ in range(3)]
        it.store.commit_error = full()
        it.store.unblock()
        for pending in (in_flight, *behind):
            with pytest.raises(Unavailable) as caught:
                await pending.wait()
            assert caught.value.code == "store_full"


@on_virtual_time
async def test_state_is_reloaded_from_the_store_after_a_failed_commit() -> None:
    async with running_ledger() as it:
        await it.add(10).wait()
        it.store.commit_error = full()
        it.add(1)
        it.add(2)
        await it.ledger.flush()
        assert it.tally.total == 10
        assert it.journal.last == it.store.revision


@on_virtual_time
async def test_facts_of_a_failed_decision_are_not_published() -> None:
    async with running_ledger() as it:
        it.store.commit_error = full()
        it.add(1)
        await it.ledger.flush()
        it.store.commit_error = None
        await it.recovered()
        await it.add(5).wait()
        assert [record.fact for record in it.publisher.published] == [Added(5, 5)]


@on_virtual_time
async def test_reads_work_and_writes_are_unavailable_while_the_disk_is_full() -> None:
    async with running_ledger() as it:
        await it.add(10).wait()
        it.store.commit_error = full()
        with pytest.raises(Unavailable):
            await it.add(1).wait()
        for _ in range(5):
            await anyio.sleep(PROBE_PAUSE_S)
            assert await it.ledger.settled(it.tally.total).wait() == 10
            with pytest.raises(Unavailable) as caught:
                it.ledger.require_writable()
            assert caught.value.code == "store_full"


@on_virtual_time
async def test_writes_resume_when_the_disk_has_space_again() -> None:
    async with running_ledger() as it:
        await it.add(10).wait()
        it.store.commit_error = full()
        with pytest.raises(Unavailable):
            await it.add(1).wait()
        await anyio.sleep(10)
        it.store.commit_error = None
        await it.recovered()
        it.ledger.require_writable()
        assert await it.add(5).wait() == 15
        assert await it.stored_total() == 15
        assert ids(it.publisher.published) == ids(it.journal.after(0, 10))


@on_virtual_time
async def test_writing_is_closed_until_the_probe_has_succeeded() -> None:
    async with running_ledger() as it:
        it.store.commit_error = full()
        it.add()
        await it.ledger.flush()
        it.store.commit_error = None
        with pytest.raises(Unavailable):
            it.ledger.require_writable()
        await it.recovered()
        it.ledger.require_writable()


@on_virtual_time
async def test_decision_during_a_store_failure_is_undone() -> None:
    async with running_ledger() as it:
        await it.add(10).wait()
        it.store.commit_error = full()
        it.add()
        await it.ledger.flush()
        with pytest.raises(Unavailable):
            it.add(5)
        with pytest.raises(Unavailable):
            it.ledger.require_readable()
        it.store.commit_error = None
        await it.recovered()
        assert it.tally.total == 10


@on_virtual_time
async def test_nothing_is_answered_while_the_store_cannot_be_read() -> None:
    async with running_ledger() as it:
        await it.add(10).wait()
        it.store.commit_error = it.store.read_error = full()
        with pytest.raises(Unavailable):
            await it.add(1).wait()
        with pytest.raises(Unavailable):
            it.ledger.settled(it.tally.total)
        it.store.read_error = None
        await anyio.sleep(2 * PROBE_PAUSE_S)
        assert await it.ledger.settled(it.tally.total).wait() == 10
        it.store.commit_error = None
        await it.recovered()
        assert await it.add(1).wait() == 11


@on_virtual_time
async def test_refusal_by_the_store_is_a_failed_commit() -> None:
    async with running_ledger() as it:
        it.store.commit_error = RequestRefused("transaction_too_large", "too large")
        with pytest.raises(RequestRefused):
            await it.add(1).wait()
        it.store.commit_error = None
        await it.recovered()
        assert await it.add(2).wait() == 2


@on_virtual_time
async def test_error_of_a_long_store_failure_does_not_accumulate_tracebacks() -> None:
    async with running_ledger() as it:
        it.store.commit_error = full()
        waiting = [it.add() for _ in range(20)]
        for pending in waiting:
            with pytest.raises(Unavailable):
                await pending.wait()
        depths = set()
        for _ in range(5):
            with pytest.raises(Unavailable) as caught:
                it.ledger.require_writable()
            depths.add(len(caught.traceback))
        assert len(depths) == 1


@on_virtual_time
async def test_a_durable_handler_is_rewound_to_before_the_lost_decision() -> None:
    async with running_ledger() as it:
        await it.add(cursor=("h", 5)).wait()
        it.store.commit_error = full()
        it.add(cursor=("h", 8))
        it.add(cursor=("h", 9))
        await it.ledger.flush()
        assert it.publisher.rewound == [("h", 7), ("h", 8)]
        assert it.ledger.cursors == {"h": 5}


@on_virtual_time
async def test_lost_cursor_write_rewinds_no_handler() -> None:
    async with running_ledger() as it:
        it.ledger.save_cursor("h", 8)
        it.store.commit_error = full()
        it.ledger.save_cursor("h", 9)
        await it.ledger.flush()
        assert it.publisher.rewound == []


# Reloads.


@on_virtual_time
async def test_tainted_state_is_reloaded() -> None:
    async with running_ledger() as it:
        await it.add(10).wait()
        it.tally.total = 99
        it.ledger.reload(Unavailable("reloading", "state is being reloaded"))
        with pytest.raises(Unavailable):
            it.ledger.settled(it.tally.total)
        await it.recovered()
        assert it.tally.total == 10
        assert await it.add(1).wait() == 11


@on_virtual_time
async def test_batch_being_written_when_state_is_tainted_stays_committed() -> None:
    async with running_ledger() as it:
        it.store.block()
        before = it.add(10)
        await it.store.entered.wait()
        it.ledger.reload(Unavailable("reloading", "state is being reloaded"))
        it.store.unblock()
        assert await before.wait() == 10
        await it.recovered()
        assert it.tally.total == 10


@pytest.mark.parametrize("error", [None, full()], ids=["writable", "full"])
@on_virtual_time
async def test_state_tainted_during_a_reload_is_reloaded_again_before_use(
    error: ForgedError | None,
) -> None:
    async with running_ledger() as it:
        await it.add(10).wait()
        it.store.commit_error = error
        reading = anyio.Event()
        release = anyio.Event()

        class Slow:
            async def load(self, store: object) -> None:
                reading.set()
                await release.wait()

        it.ledger.register(Slow())
        if error is None:
            it.ledger.reload(Unavailable("reloading", "state is being reloaded"))
        else:
            it.add()
        await reading.wait()
        it.tally.total = 99
        it.ledger.reload(Unavailable("reloading", "state is being reloaded"))
        release.set()
        while it.tally.total == 99:
            with pytest.raises(Unavailable):
                it.ledger.settled(it.tally.total)
            await anyio.sleep(PROBE_PAUSE_S / 10)
        it.store.commit_error = None
        await it.recovered()
        assert await it.add(1).wait() == 11


@pytest.mark.parametrize(
    "impossible",
    [
        Decision(None, writes={"k": b"x" * (VALUE_BYTES_MAX + 1)}),
        Decision(None, writes={f"k{index}": b"" for index in range(OPERATIONS_MAX + 1)}),
        Decision(None, writes={"k" * 1000: b""}),
        Decision(None, (UnencodableFact(object()),)),
        Decision(None, (UnencodableFact(1 << 70),)),
        Decision(None, (UnencodableFact("\ud800"),)),
        Decision(object()),
    ],
    ids=["value", "operations", "key", "no encoding", "too large an integer", "no text", "reply"],
)
@on_virtual_time
async def test_a_decision_that_cannot_be_stored_leaves_no_trace(impossible: Decision[Any]) -> None:
    async with running_ledger() as it:
        await it.add(10).wait()
        it.tally.total = 99
        request = call(1)
        it.ledger.recall(request)
        with pytest.raises(ForgedError):
            it.ledger.append(impossible, call=request, cursor=("h", 3))
        await it.recovered()
        assert it.tally.total == 10
        assert it.ledger.cursors == {}
        assert it.ledger.recall(request) is None
        assert await it.add(1).wait() == 11
        assert len(it.journal) == 2


# Restart and takeover.


@on_virtual_time
async def test_a_restarted_ledger_has_everything_that_was_acknowledged() -> None:
    store = FaultyStore()
    async with running_ledger(store) as it:
        await it.add(10).wait()
        await it.add(5, cursor=("h", 1)).wait()
        before = it.journal.after(0, 10)
    async with running_ledger(store) as it:
        assert it.tally.total == 15
        assert [record.data for record in it.journal.after(0, 10)] == [record.data for record in before]
        assert it.ledger.cursors == {"h": 1}


@on_virtual_time
async def test_facts_of_an_earlier_process_are_not_published_again() -> None:
    store = FaultyStore()
    async with running_ledger(store) as it:
        await it.add().wait()
    async with running_ledger(store) as it:
        await it.add().wait()
        assert [record.fact for record in it.publisher.published] == [Added(1, 2)]


@pytest.mark.parametrize("moment", ["before", "after"])
@on_virtual_time
async def test_decision_interrupted_at_its_commit_is_applied_completely_or_not_at_all(moment: str) -> None:
    store = FaultyStore()
    async with running_ledger(store) as it:
        await it.add(10).wait()
        store.dies = moment
        pending = it.add(5)
        await anyio.sleep(1)
        assert not pending.done
    store.dies = ""
    async with running_ledger(store) as it:
        assert it.tally.total == (15 if moment == "after" else 10)
        assert len(it.journal) == (2 if moment == "after" else 1)


@on_virtual_time
async def test_the_term_grows_with_every_start() -> None:
    store = FaultyStore()
    terms = []
    for _ in range(3):
        async with running_ledger(store) as it:
            terms.append(it.ledger.term)
    assert terms == [1, 2, 3]


@on_virtual_time
async def test_fenced_ledger_reports_lost_leadership() -> None:
    store = FaultyStore()
    async with running_ledger(store) as old:
        await old.add(10).wait()
        async with running_ledger(store) as new:
            with pytest.raises(NotLeader):
                await old.add(1).wait()
            with pytest.raises(NotLeader):
                old.ledger.require_writable()
            assert await new.add(5).wait() == 15


@on_virtual_time
async def test_fenced_ledger_never_writes_again() -> None:
    store = FaultyStore()
    async with running_ledger(store) as old, running_ledger(store) as new:
        await new.add(5).wait()
        with pytest.raises(NotLeader):
            await old.add(1).wait()
        for _ in range(10):
            await anyio.sleep(PROBE_PAUSE_S)
            with pytest.raises(NotLeader):
                old.ledger.require_writable()
        assert await new.add(5).wait() == 10


@on_virtual_time
async def test_an_overtaken_ledger_is_fenced_even_where_its_revision_is_ahead() -> None:
    store = FaultyStore()
    async with running_ledger(store) as old:
        old.ledger.revision += 1000
        async with running_ledger(store):
            with pytest.raises(NotLeader):
                await old.add(1).wait()


@on_virtual_time
async def test_ledger_takes_over_a_store_only_from_the_term_that_it_read() -> None:
    memory = MemoryStore("a history")
    first, second = (Ledger(memory, Journal(), clock(), RecordingPublisher()) for _ in range(2))
    await first.start()
    await second.start()
    assert (first.term, second.term) == (1, 2)


@on_virtual_time
async def test_a_ledger_that_starts_while_another_writes_takes_the_store_over_in_the_end() -> None:
    memory = MemoryStore("a history")
    async with running_ledger(FaultyStore(memory)) as old:
        await old.add(10).wait()
        slow = FaultyStore(memory)
        slow.block()
        new = RunningLedger(slow, 100)
        async with task_group() as tasks:
            tasks.start_soon(new.ledger.start)
            await slow.entered.wait()
            await old.add(1).wait()
            slow.unblock()
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(new.ledger.run)
            await anyio.sleep(PROBE_PAUSE_S / 2)
            await old.add(1).wait()
            await new.recovered()
            assert await new.add(5).wait() == 17
            with pytest.raises(NotLeader):
                await old.add(1).wait()


@on_virtual_time
async def test_store_full_at_the_start_serves_reads_until_there_is_space() -> None:
    store = FaultyStore()
    async with running_ledger(store) as it:
        await it.add(10).wait()
    store.commit_error = full()
    async with running_ledger(store) as it:
        assert await it.ledger.settled(it.tally.total).wait() == 10
        with pytest.raises(Unavailable):
            it.ledger.require_writable()
        store.commit_error = None
        await it.recovered()
        assert await it.add(1).wait() == 11


@on_virtual_time
async def test_requests_before_the_start_are_refused() -> None:
    ledger = Ledger(FaultyStore(), Journal(), clock(), RecordingPublisher())
    with pytest.raises(Unavailable) as caught:
        ledger.require_readable()
    assert caught.value.code == "starting"


# Dropping old facts.


@on_virtual_time
async def test_the_store_keeps_as_many_facts_as_the_journal() -> None:
    async with running_ledger(facts_max=10) as it:
        for _ in range(50):
            await it.add().wait()
        stored = await read_all(it.store, "fact/")
        assert [int(entry.key.removeprefix("fact/"), 16) for entry in stored] == ids(it.journal.after(0, 50))
        assert len(it.journal) == 10


@on_virtual_time
async def test_the_floor_survives_a_restart() -> None:
    store = FaultyStore()
    async with running_ledger(store, facts_max=10) as it:
        for _ in range(50):
            await it.add().wait()
        floor = it.journal.floor
    async with running_ledger(store, facts_max=10) as it:
        assert it.journal.floor == floor > 0


@on_virtual_time
async def test_lowered_limit_is_reached_gradually() -> None:
    store = FaultyStore()
    async with running_ledger(store, facts_max=200) as it:
        for _ in range(200):
            await it.add().wait()
    async with running_ledger(store, facts_max=10) as it:
        assert len(it.journal) == 10
        for _ in range(20):
            await it.add().wait()
        assert len(await read_all(store, "fact/")) == len(it.journal) == 10


@on_virtual_time
async def test_full_journal_accepts_the_largest_decision() -> None:
    async with running_ledger(facts_max=200) as it:
        large = Decision(None, tuple(Added(index, index) for index in range(100)))
        for _ in range(10):
            await it.ledger.append(large).wait()
        for _ in range(100):
            await it.add().wait()
        assert len(await read_all(it.store, "fact/")) == len(it.journal) == 200


@on_virtual_time
async def test_acknowledged_reply_is_deleted_from_the_store() -> None:
    async with running_ledger() as it:
        for number in range(1, 11):
            request = call(number, acknowledged=number - 1)
            assert it.ledger.recall(request) is None
            await it.add(call=request).wait()
        assert len(await read_all(it.store, REPLY_PREFIX)) == 1
        assert len(it.ledger.replies) == 1


@on_virtual_time
async def test_many_acknowledged_replies_are_deleted_in_small_steps() -> None:
    async with running_ledger() as it:
        for number in range(1, 101):
            request = call(number)
            it.ledger.recall(request)
            await it.add(call=request).wait()
        assert len(await read_all(it.store, REPLY_PREFIX)) == 100
        it.ledger.replies.acknowledge(request.client, 100)
        for _ in range(10):
            await it.add().wait()
        assert await read_all(it.store, REPLY_PREFIX) == []


@on_virtual_time
async def test_replies_acknowledged_before_a_failed_commit_are_deleted_after_it() -> None:
    async with running_ledger() as it:
        request = call(1)
        it.ledger.recall(request)
        await it.add(call=request).wait()
        it.store.commit_error = full()
        it.ledger.replies.acknowledge(request.client, 1)
        with pytest.raises(Unavailable):
            await it.add().wait()
        it.store.commit_error = None
        await it.recovered()
        await it.add().wait()
        assert await read_all(it.store, REPLY_PREFIX) == []


@on_virtual_time
async def test_a_reply_is_remembered_with_its_pending_before_and_its_bytes_after_a_restart() -> None:
    store = FaultyStore()
    request = call(1)
    async with running_ledger(store) as it:
        it.ledger.recall(request)
        pending = it.add(10, call=request)
        assert it.ledger.recall(request) is pending
        await pending.wait()
    async with running_ledger(store) as it:
        assert it.ledger.recall(request) == pending.encoded


@on_virtual_time
async def test_a_request_whose_commit_failed_may_be_sent_again() -> None:
    async with running_ledger() as it:
        request = call(1)
        it.ledger.recall(request)
        it.store.commit_error = full()
        with pytest.raises(Unavailable):
            await it.add(10, call=request).wait()
        it.store.commit_error = None
        await it.recovered()
        assert it.ledger.recall(request) is None


# Pending replies.


def test_pending_reply_calls_each_callback_once() -> None:
    pending = Pending(1, "reply")
    told: list[Callable[[], object]] = []
    pending.when_done(lambda one: told.append(lambda: one.reply))
    pending.resolve()
    pending.when_done(lambda one: told.append(lambda: one.reply))
    assert [tell() for tell in told] == ["reply", "reply"]


@on_virtual_time
async def test_cancelled_waiter_does_not_affect_later_waiters() -> None:
    async with running_ledger() as it:
        it.store.block()
        pending = it.add(3)
        with anyio.move_on_after(1):
            await pending.wait()
        it.store.unblock()
        assert await pending.wait() == 3


@on_virtual_time
async def test_a_fenced_store_is_named_as_lost_leadership() -> None:
    async with running_ledger() as it:
        it.store.commit_error = StoreFenced("store_fenced", "another process has written")
        with pytest.raises(NotLeader):
            await it.add().wait()


@on_virtual_time
async def test_cause_id_is_below_the_fact_id() -> None:
    async with running_ledger() as it:
        await it.add().wait()
        last = it.journal.last
        with pytest.raises(ForgedError):
            it.add(cause=last + 1)
        await it.recovered()
        assert it.tally.total == 1


@pytest.mark.parametrize("key", ["fact/0000000000000001", "cursor/x", "reply/00/01", "ledger/floor"])
@on_virtual_time
async def test_store_with_foreign_content_is_corrupt(key: str) -> None:
    store = FaultyStore()
    await store.commit([Transaction(1, {key: b"\xc1 garbage"})])
    with pytest.raises(StoreCorrupt) as damaged:
        await Kernel(store).ledger.start()
    assert damaged.value.code == "store_undecodable"
