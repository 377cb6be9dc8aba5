from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import ConfigError, ForgedError, RequestRefused, Unavailable
from forged.kernel.bus.bus import CURSOR_INTERVAL_S, REPORTS_MAX
from forged.kernel.bus.model import HandlerFailed, HandlerQuarantined, HandlerReadmitted
from forged.kernel.ledger import CURSOR_PREFIX
from forged.kernel.messages import Decision, Fact, Gap, Record
from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import Store
from forged.status.model import PingDaemon
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import (
    Add,
    Added,
    Echoed,
    Kernel,
    Level,
    ReadTotal,
    Tick,
    call,
    ids,
    on_virtual_time,
    running,
    task_group,
)

ECHOES_KEY = "echo/count"


class Echo:
    """A durable handler with state: decides an `Echoed` for every `Added`, and counts."""

    def __init__(self, kernel: Kernel, **terms: Any) -> None:
        self.count = 0
        self.seen: list[int] = []
        self.before_deciding: Callable[[Record], Any] = lambda record: None
        kernel.ledger.register(self)
        kernel.bus.on(Added, self, name="echo", durable=True, **terms)

    async def load(self, store: Store) -> None:
        entry = await store.get(ECHOES_KEY)
        self.count = int(entry.value) if entry else 0

    async def __call__(self, record: Record) -> Decision[None]:
        self.seen.append(record.id)
        waited = self.before_deciding(record)
        if waited is not None:
            await waited
        self.count += 1
        return Decision(None, (Echoed(record.id),), {ECHOES_KEY: b"%d" % self.count})


class RegisteredHandlers:
    """The handlers that a test registered."""

    echo: Echo

    def with_echo(self, kernel: Kernel) -> None:
        self.echo = Echo(kernel)


def echoes(kernel: Kernel) -> list[int]:
    """The facts that were handled, in order."""
    return [fact.of for fact in kernel.facts(Echoed)]


def additions(kernel: Kernel) -> list[int]:
    return [record.id for record in kernel.journal.after(0, 100_000) if record.type == "Added"]


def failing(_: Record) -> None:
    raise ValueError("boom")


# Facts.


@on_virtual_time
async def test_handler_gets_the_facts_of_its_types() -> None:
    added: list[Record] = []
    either: list[Record] = []
    everything: list[Record] = []

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, added.append, name="added")
        kernel.bus.on([Added, Echoed], either.append, name="either")
        kernel.bus.on(Fact, everything.append, name="everything")

    async with running(register=register) as kernel:
        facts = (Echoed(0), Added(1, 1), HandlerReadmitted("x"), Added(2, 3))
        await kernel.ledger.append(Decision(None, facts)).wait()
        await kernel.settle()
    assert [record.fact for record in added] == [Added(1, 1), Added(2, 3)]
    assert [record.fact for record in either] == [Echoed(0), Added(1, 1), Added(2, 3)]
    assert [record.fact for record in everything] == list(facts)


@on_virtual_time
async def test_handlers_run_independently_in_the_same_order() -> None:
    fast: list[Record] = []
    slow: list[Record] = []

    async def take_time(record: Record) -> None:
        await anyio.sleep(0.1)
        slow.append(record)

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, fast.append, name="fast")
        kernel.bus.on(Added, take_time, name="slow")

    async with running(register=register) as kernel:
        for _ in range(20):
            await kernel.add()
        assert len(fast) > len(slow)
        await kernel.settle()
        assert ids(fast) == ids(slow) == additions(kernel)


@on_virtual_time
async def test_no_handler_gets_a_fact_before_it_is_durable() -> None:
    store = FaultyStore()
    heard: list[Record] = []
    async with running(store, lambda kernel: kernel.bus.on(Added, heard.append, name="ear")) as kernel:
        store.block()
        kernel.submit()
        await anyio.sleep(10)
        assert heard == []
        store.unblock()
        await kernel.settle()
        assert len(heard) == 1
        assert heard[0].id <= store.revision


@on_virtual_time
async def test_publishing_inside_a_handler_queues_and_never_recurses() -> None:
    depth = deepest = 0

    async def decide_again(record: Record) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        if len(kernel.facts(Added)) < 50:
            await kernel.add()
        depth -= 1

    async with running(register=lambda kernel: kernel.bus.on(Added, decide_again, name="echo")) as kernel:
        await kernel.add()
        await kernel.settle()
        assert len(kernel.facts(Added)) == 50
    assert deepest == 1


@on_virtual_time
async def test_handler_that_keeps_publishing_does_not_starve_other_handlers() -> None:
    def register(kernel: Kernel) -> None:
        kernel.bus.on(Echoed, lambda record: Decision(None, (Echoed(record.id),)), name="storm", durable=True)

    async with running(MemoryStore("a history"), register) as kernel:
        await kernel.ledger.append(Decision(None, (Echoed(0),))).wait()
        for total in range(1, 51):
            assert await kernel.add() == total
        assert len(kernel.facts(Echoed)) > 10
        kernel.bus.mailboxes["storm"].quarantine()


@on_virtual_time
async def test_handler_added_at_run_time_gets_later_facts() -> None:
    heard: list[Record] = []
    async with running() as kernel:
        await kernel.add()
        kernel.bus.on(Added, heard.append, name="late")
        await kernel.add()
        await kernel.settle()
        assert ids(heard) == additions(kernel)[1:]


@pytest.mark.parametrize(("types", "name"), [((), "new"), (Added, "taken")])
@on_virtual_time
async def test_subscription_without_types_or_with_a_used_name_is_an_error(types: Any, name: str) -> None:
    async with running(register=lambda kernel: kernel.bus.on(Added, failing, name="taken")) as kernel:
        with pytest.raises(ValueError, match=name):
            kernel.bus.on(types, failing, name=name)
        assert list(kernel.bus.mailboxes) == ["taken"]


@on_virtual_time
async def test_facts_record_their_causes() -> None:
    built = RegisteredHandlers()
    async with running(register=built.with_echo) as kernel:
        await kernel.add()
        await kernel.add()
        await kernel.settle()
        first, second = additions(kernel)
        for cause in (first, second):
            assert [record.fact for record in kernel.journal.story(cause)[1:]] == [Echoed(cause)]
        origins = {record.origin for record in kernel.journal.after(0, 10) if record.type == "Echoed"}
        assert origins == {"handler echo"}


# Isolation.


@on_virtual_time
async def test_handler_exception_is_recorded_and_other_handlers_get_the_fact() -> None:
    heard: list[Record] = []

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, failing, name="failing")
        kernel.bus.on(Added, heard.append, name="fine")

    async with running(register=register) as kernel:
        await kernel.add()
        await kernel.settle()
        (fact_id,) = additions(kernel)
        assert ids(heard) == [fact_id]
        assert kernel.facts(HandlerFailed) == [HandlerFailed("failing", fact_id, "ValueError: boom")]
        (record,) = [record for record in kernel.journal.after(0, 10) if record.type == "HandlerFailed"]
        assert (record.cause, record.origin) == (fact_id, "handler failing")


@on_virtual_time
async def test_handler_error_that_cannot_be_stored_does_not_affect_other_handlers() -> None:
    def fail_oddly(_: Record) -> None:
        raise FileNotFoundError("caf\udce9")

    async with running(register=lambda kernel: kernel.bus.on(Added, fail_oddly, name="odd")) as kernel:
        await kernel.add()
        await kernel.settle()
        assert [fact.reason for fact in kernel.facts(HandlerFailed)] == ["FileNotFoundError: caf\\udce9"]


@on_virtual_time
async def test_handler_failing_on_failure_facts_is_not_recorded_endlessly() -> None:
    def register(kernel: Kernel) -> None:
        kernel.bus.on(Fact, failing, name="one")
        kernel.bus.on(Fact, failing, name="two")

    async with running(register=register) as kernel:
        await kernel.add()
        await anyio.sleep(60)
        assert len(kernel.facts(HandlerFailed)) == 2
        assert len(kernel.journal) == 3


@on_virtual_time
async def test_hanging_handler_is_cancelled_and_recorded() -> None:
    async def hang(_: Record) -> None:
        await asyncio.Event().wait()

    async with running(register=lambda kernel: kernel.bus.on(Added, hang, name="hanging", deadline_s=5)) as kernel:
        await kernel.add()
        await kernel.settle()
        (failed,) = kernel.facts(HandlerFailed)
        assert failed.reason == "exceeded its deadline of 5 s"


class Stubborn:
    """Ignores cancellations until it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def __call__(self, _: Record) -> None:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                continue


@on_virtual_time
async def test_uncancellable_handler_is_abandoned_alone() -> None:
    stubborn = Stubborn()
    heard: list[Record] = []

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, stubborn, name="stubborn", deadline_s=2)
        kernel.bus.on(Added, heard.append, name="fine")

    async with running(register=register) as kernel:
        await kernel.add()
        await anyio.sleep(60)
        await kernel.add()
        await kernel.settle()
        assert len(heard) == 2
        assert [fact.handler for fact in kernel.facts(HandlerQuarantined)] == ["stubborn"]
        with pytest.raises(RequestRefused) as caught:
            kernel.bus.readmit("stubborn")
        assert caught.value.code == "handler_stuck"
        stubborn.released.set()
        await anyio.sleep(1)
        kernel.bus.readmit("stubborn")
        await kernel.add()
        await kernel.settle()
        assert len(kernel.facts(HandlerQuarantined)) == 1


@on_virtual_time
async def test_quarantine_after_repeated_failures_is_recorded() -> None:
    async with running(register=lambda kernel: kernel.bus.on(Added, failing, name="plugin", failures_max=3)) as kernel:
        for _ in range(5):
            await kernel.add()
        await kernel.settle()
        assert len(kernel.facts(HandlerFailed)) == 3
        assert kernel.facts(HandlerQuarantined) == [HandlerQuarantined("plugin", 3, "ValueError: boom")]


@on_virtual_time
async def test_re_enabled_handler_gets_later_facts() -> None:
    heard: list[int] = []
    gaps: list[Gap] = []

    def once_bitten(record: Record) -> None:
        heard.append(record.id)
        if len(heard) == 1:
            raise ValueError("boom")

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, once_bitten, name="plugin", failures_max=1, on_gap=gaps.append)

    async with running(register=register) as kernel:
        for _ in range(3):
            await kernel.add()
            await kernel.settle()
        await kernel.ledger.append(kernel.bus.readmit("plugin")).wait()
        await kernel.add()
        await kernel.settle()
        first, second, third, fourth = additions(kernel)
        assert heard == [first, fourth]
        assert [(gap.first, gap.last) for gap in gaps] == [(second, third)]
        assert kernel.facts(HandlerReadmitted) == [HandlerReadmitted("plugin")]


@on_virtual_time
async def test_re_enabled_durable_handler_continues_at_its_position() -> None:
    heard: list[int] = []

    def once_bitten(record: Record) -> None:
        heard.append(record.id)
        if len(heard) == 1:
            raise ValueError("boom")

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, once_bitten, name="plugin", failures_max=1, durable=True)

    async with running(register=register) as kernel:
        for _ in range(3):
            await kernel.add()
            await kernel.ledger.writable()
            await kernel.settle()
        await kernel.ledger.writable()
        await kernel.ledger.append(kernel.bus.readmit("plugin")).wait()
        await kernel.settle()
        assert heard == additions(kernel)


@pytest.mark.parametrize("name", ["fine", "unknown"])
@on_virtual_time
async def test_only_a_quarantined_handler_can_be_re_enabled(name: str) -> None:
    async with running(register=lambda kernel: kernel.bus.on(Added, failing, name="fine")) as kernel:
        with pytest.raises(RequestRefused) as caught:
            kernel.bus.readmit(name)
        assert caught.value.code == "not_quarantined"


@on_virtual_time
async def test_decision_of_a_handler_that_is_not_durable_is_refused_and_undone() -> None:
    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, lambda _: kernel.tally.add(100), name="sneaky")

    async with running(register=register) as kernel:
        await kernel.add(1)
        await kernel.settle()
        await kernel.ledger.writable()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
        (failed,) = kernel.facts(HandlerFailed)
        assert "must be durable" in failed.reason
        assert await kernel.bus.ask(ReadTotal()) == 1


@on_virtual_time
async def test_handler_failure_during_a_store_failure_is_recorded_later() -> None:
    store = FaultyStore()
    release = asyncio.Event()

    async def fail_later(_: Record) -> None:
        await release.wait()
        raise ValueError("boom")

    async with running(store, lambda kernel: kernel.bus.on(Added, fail_later, name="failing")) as kernel:
        await kernel.add()
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await kernel.add()
        release.set()
        await anyio.sleep(10)
        assert kernel.facts(HandlerFailed) == []
        store.commit_error = None
        await anyio.sleep(10)
        assert kernel.facts(HandlerFailed) == [HandlerFailed("failing", additions(kernel)[0], "ValueError: boom")]


@on_virtual_time
async def test_every_handler_failure_is_reported_to_its_callback() -> None:
    told: list[tuple[str, str]] = []

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, failing, name="failing")
        kernel.bus.on(Fact, failing, name="failing for all")
        kernel.bus.on_failure.append(lambda handler, reason: told.append((handler.name, reason)))

    async with running(register=register) as kernel:
        await kernel.add()
        await anyio.sleep(10)
        assert told.count(("failing", "ValueError: boom")) == 1
        # Also for a failure on a `HandlerFailed` fact, which is not journalled.
        assert told.count(("failing for all", "ValueError: boom")) == 3
        assert len(kernel.facts(HandlerFailed)) == 2


@on_virtual_time
async def test_handler_exception_is_reported_unless_it_is_a_forged_error() -> None:
    told: list[tuple[str, str]] = []

    def refuse(_: Record) -> None:
        raise RequestRefused("no", "no", "")

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, failing, name="failing")
        kernel.bus.on(Added, refuse, name="refusing")
        kernel.bus.on_signal(Tick, lambda *_: failing(record_of_nothing), name="listening")
        kernel.bus.replace(ReadTotal, lambda *_: failing(record_of_nothing), owner="plugin")
        kernel.bus.on_handler_bug = lambda owner, error: told.append((owner, str(error)))

    record_of_nothing = Record.of(Echoed(0), fact_id=1, at=0.0)
    async with running(register=register) as kernel:
        await kernel.add()
        kernel.bus.signal(Tick(1.0), call())
        with pytest.raises(ForgedError):
            await kernel.bus.ask(ReadTotal())
        await kernel.settle()
        await anyio.sleep(1)
        assert sorted(told) == [
            ("ReadTotal in plugin", "boom"),
            ("failing", "boom"),
            ("listening", "boom"),
        ]


@on_virtual_time
async def test_a_plugin_s_handler_is_readmitted_with_its_plugin_only() -> None:
    async with running(register=lambda kernel: kernel.bus.on(Added, failing, name="p/x", failures_max=1)) as kernel:
        kernel.bus.owners["p/x"] = "p"
        await kernel.add()
        await kernel.settle()
        with pytest.raises(RequestRefused) as caught:
            kernel.bus.readmit("p/x")
        assert (caught.value.code, caught.value.fix) == ("plugins_handler", "forgectl plugins enable p")


@on_virtual_time
async def test_deferred_facts_are_recorded_in_order_when_the_store_accepts_writes() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        kernel.bus.record_later(Decision(None, (Echoed(1),)), origin="test")
        store.commit_error = full()
        await anyio.sleep(1)
        for number in (2, 3):
            kernel.bus.record_later(Decision(None, (Echoed(number),)), origin="test")
        await anyio.sleep(10)
        assert kernel.facts(Echoed) == []
        store.commit_error = None
        await anyio.sleep(10)
        assert [fact.of for fact in kernel.facts(Echoed)] == [1, 2, 3]


@on_virtual_time
async def test_deferred_facts_are_bounded_and_the_newest_are_kept() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await kernel.add()
        for number in range(REPORTS_MAX + 10):
            kernel.bus.record_later(Decision(None, (Echoed(number),)))
        store.commit_error = None
        await anyio.sleep(10)
        assert [fact.of for fact in kernel.facts(Echoed)] == list(range(10, REPORTS_MAX + 10))


@on_virtual_time
async def test_lossless_mailbox_over_the_limit_makes_the_bus_congested() -> None:
    async def hang(_: Record) -> None:
        await asyncio.Event().wait()

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, hang, name="built-in")
        kernel.bus.on(Added, hang, name="plugin", lossless=False)

    async with running(register=register) as kernel:
        kernel.bus.backlog_max = 10
        for _ in range(11):
            assert not kernel.bus.congested
            await kernel.add()
        assert (kernel.bus.backlog, kernel.bus.congested) == (10, True)


# Durable handlers.


@on_virtual_time
async def test_durable_handler_continues_at_its_position_after_a_crash() -> None:
    store, built = FaultyStore(), RegisteredHandlers()
    async with running(store, built.with_echo) as kernel:
        await kernel.add()
        await kernel.settle()
        built.echo.before_deciding = lambda _: asyncio.Event().wait()
        await kernel.add()
        await kernel.add()
        await anyio.sleep(1)
    async with running(store, built.with_echo) as kernel:
        await kernel.settle()
        assert echoes(kernel) == additions(kernel)
        assert built.echo.seen == additions(kernel)[1:]


@on_virtual_time
async def test_durable_handler_gets_its_first_fact_after_a_crash() -> None:
    store, built = FaultyStore(), RegisteredHandlers()
    async with running(store) as kernel:
        await kernel.add()
    async with running(store, built.with_echo) as kernel:
        built.echo.before_deciding = lambda _: asyncio.Event().wait()
        await kernel.add()
        await anyio.sleep(CURSOR_INTERVAL_S / 2)
    async with running(store, built.with_echo) as kernel:
        await kernel.settle()
        assert echoes(kernel) == additions(kernel)[1:]


@on_virtual_time
async def test_a_new_durable_handler_begins_with_the_present() -> None:
    store, built = FaultyStore(), RegisteredHandlers()
    async with running(store) as kernel:
        await kernel.add()
    async with running(store, built.with_echo) as kernel:
        await kernel.add()
        await kernel.settle()
        assert echoes(kernel) == additions(kernel)[1:]


@on_virtual_time
async def test_position_of_a_durable_handler_is_saved_without_decisions() -> None:
    store, heard = FaultyStore(), list[Record]()

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, heard.append, name="observer", durable=True)

    async with running(store, register) as kernel:
        await kernel.add()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
    async with running(store, register) as kernel:
        await kernel.settle()
        assert len(heard) == 1


@on_virtual_time
async def test_durable_handler_of_rare_facts_gets_no_false_gap() -> None:
    store, gaps = FaultyStore(), list[Gap]()

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Echoed, lambda _: None, name="rare", durable=True, on_gap=gaps.append)

    async with running(store, register, facts_max=20) as kernel:
        for _ in range(50):
            await kernel.add()
            await anyio.sleep(CURSOR_INTERVAL_S / 5)
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
    async with running(store, register, facts_max=20) as kernel:
        await kernel.settle()
        assert gaps == []


@on_virtual_time
async def test_lagging_durable_handler_keeps_its_position() -> None:
    store, built = FaultyStore(), RegisteredHandlers()
    async with running(store, built.with_echo, facts_max=20) as kernel:
        built.echo.before_deciding = lambda _: asyncio.Event().wait()
        for _ in range(15):
            await kernel.add()
        await anyio.sleep(3 * CURSOR_INTERVAL_S)
    async with running(store, built.with_echo, facts_max=20) as kernel:
        await kernel.settle()
        assert len(built.echo.seen) == 15


@on_virtual_time
async def test_quarantined_durable_handler_keeps_its_position() -> None:
    store, heard = FaultyStore(), list[Record]()

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, failing, name="plugin", durable=True, failures_max=1)

    def register_mended(kernel: Kernel) -> None:
        kernel.bus.on(Added, heard.append, name="plugin", durable=True, failures_max=1)

    async with running(store, register, facts_max=20) as kernel:
        await kernel.add()
        await anyio.sleep(CURSOR_INTERVAL_S)
        for _ in range(15):
            await kernel.add()
        await anyio.sleep(3 * CURSOR_INTERVAL_S)
    async with running(store, register_mended, facts_max=20) as kernel:
        await kernel.settle()
        assert ids(heard) == additions(kernel)[1:]


@on_virtual_time
async def test_durable_handler_behind_the_journal_gets_a_gap() -> None:
    store, gaps, heard = FaultyStore(), list[Gap](), list[Record]()

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, heard.append, name="absent", durable=True, on_gap=gaps.append)

    async with running(store, register, facts_max=10):
        pass
    async with running(store, facts_max=10) as kernel:
        for _ in range(30):
            await kernel.add()
    async with running(store, register, facts_max=10) as kernel:
        await kernel.settle()
        assert ids(heard) == additions(kernel)
        assert [(gap.first, gap.last) for gap in gaps] == [(1, kernel.journal.floor)]


@pytest.mark.parametrize("moment", ["before", "after"])
@on_virtual_time
async def test_decision_of_a_durable_handler_happens_once_across_crashes(moment: str) -> None:
    store, built = FaultyStore(), RegisteredHandlers()
    async with running(store, built.with_echo) as kernel:
        await kernel.add()
        await kernel.settle()

        def die(_: Record) -> None:
            store.dies = moment

        built.echo.before_deciding = die
        await kernel.add()
        await anyio.sleep(1)
    store.dies = ""
    async with running(store, built.with_echo) as kernel:
        await kernel.settle()
        assert echoes(kernel) == additions(kernel)
        assert built.echo.count == 2


@on_virtual_time
async def test_decision_of_a_durable_handler_is_repeated_once_after_a_failed_commit() -> None:
    store, built = FaultyStore(), RegisteredHandlers()
    async with running(store, built.with_echo) as kernel:

        def fill(_: Record) -> None:
            store.commit_error = full()

        built.echo.before_deciding = fill
        await kernel.add()
        await anyio.sleep(5)
        assert (echoes(kernel), built.echo.count) == ([], 0)
        built.echo.before_deciding = lambda _: None
        store.commit_error = None
        await kernel.ledger.writable()
        await kernel.settle()
        assert echoes(kernel) == additions(kernel)
        assert built.echo.count == 1


@on_virtual_time
async def test_facts_found_by_a_reload_reach_a_rewound_handler_once() -> None:
    store, built = FaultyStore(), RegisteredHandlers()
    async with running(store, built.with_echo) as kernel:
        store.block()
        built.echo.before_deciding = lambda _: store.block()
        store.unblock()
        await kernel.add()
        await anyio.sleep(1)
        # Another writer commits a fact, which fences the pending decision.
        async with running(store.memory) as other:
            await other.add()
        store.unblock()
        await anyio.sleep(1)
        mailbox = kernel.bus.mailboxes["echo"]
        assert ids(list(mailbox.queue)) == additions(kernel)


@on_virtual_time
async def test_a_durable_handler_that_breaks_after_changing_its_state_leaves_no_trace() -> None:
    store, built = FaultyStore(), RegisteredHandlers()
    async with running(store, built.with_echo) as kernel:

        def break_off(record: Record) -> None:
            built.echo.count = 99
            built.echo.before_deciding = lambda _: None
            raise ValueError("boom")

        built.echo.before_deciding = break_off
        await kernel.add()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
        await kernel.add()
        await kernel.settle()
        assert built.echo.count == 1
        assert echoes(kernel) == additions(kernel)[1:]
        assert [fact.fact_id for fact in kernel.facts(HandlerFailed)] == additions(kernel)[:1]


@given(steps=st.lists(st.sampled_from(["add", "settle", "wait", "fill", "free", "die", "restart"]), max_size=25))
@on_virtual_time
async def test_each_acknowledged_fact_is_answered_once_under_any_faults(steps: list[str]) -> None:
    store = FaultyStore()
    left = list(steps)
    acknowledged = 0
    while True:
        built = RegisteredHandlers()
        store.commit_error, store.dies = None, ""
        async with running(store, built.with_echo) as kernel:
            await kernel.ledger.writable()
            while left and (step := left.pop(0)) != "restart":
                if step == "add":
                    with anyio.move_on_after(1), suppress(Unavailable):
                        await kernel.add()
                        acknowledged += 1
                elif step == "settle":
                    with anyio.move_on_after(1):
                        await kernel.settle()
                elif step == "wait":
                    await anyio.sleep(0.7)
                elif step == "fill":
                    store.commit_error = full()
                elif step == "free":
                    store.commit_error = None
                elif step == "die":
                    store.dies = "after" if len(left) % 2 else "before"
            if left:
                continue
        break
    store.commit_error, store.dies = None, ""
    built = RegisteredHandlers()
    async with running(store, built.with_echo) as kernel:
        await kernel.ledger.writable()
        await kernel.settle()
        assert echoes(kernel) == additions(kernel)
        assert built.echo.count == len(additions(kernel)) >= acknowledged
        assert kernel.tally.total == len(additions(kernel))


# Signals.


@on_virtual_time
async def test_a_signal_reaches_its_handlers_and_leaves_no_record() -> None:
    heights: list[int] = []
    ticks: list[float] = []

    def register(kernel: Kernel) -> None:
        kernel.bus.on_signal(Level, lambda level, _: heights.append(level.height), name="gauge")
        kernel.bus.on_signal(Tick, lambda tick, _: ticks.append(tick.at), name="clock")

    async with running(register=register) as kernel:
        revision = kernel.store.revision
        kernel.bus.signal(Level("tank", 1), call())
        kernel.bus.signal(Level("tank", 2), call())
        await anyio.sleep(1)
        assert (heights, ticks, kernel.store.revision) == ([2], [], revision)


@on_virtual_time
async def test_signal_without_handler_is_ignored() -> None:
    async with running() as kernel:
        kernel.bus.signal(Level("tank", 1), call())


@on_virtual_time
async def test_handler_name_may_cover_several_signals_but_not_two_handlers() -> None:
    seen: list[object] = []

    def handler(signal: object, _: object) -> None:
        seen.append(signal)

    def register(kernel: Kernel) -> None:
        kernel.bus.on_signal(Level, handler, name="gauge")

    async with running(register=register) as kernel:
        kernel.bus.on_signal(Tick, handler, name="gauge")
        with pytest.raises(ValueError, match="gauge"):
            kernel.bus.on_signal(Tick, lambda *_: None, name="gauge")
        kernel.bus.signal(Level("tank", 1), call())
        kernel.bus.signal(Tick(1.0), call())
        await anyio.sleep(1)
        assert seen == [Level("tank", 1), Tick(1.0)]


# Sealing and draining.


@on_virtual_time
async def test_a_bus_with_an_unanswered_request_does_not_start() -> None:
    with pytest.raises(ConfigError) as caught:
        async with running(requests=[Add, ReadTotal, PingDaemon]):
            pass
    assert [problem.key for problem in caught.value.problems] == ["PingDaemon"]


@on_virtual_time
async def test_drain_waits_for_handlers_and_their_decisions() -> None:
    built = RegisteredHandlers()
    heard: list[Record] = []

    async def take_time(record: Record) -> None:
        await anyio.sleep(5)
        heard.append(record)

    def register(kernel: Kernel) -> None:
        built.with_echo(kernel)
        built.echo.before_deciding = lambda _: anyio.sleep(5)
        kernel.bus.on(Echoed, take_time, name="listener")

    store = FaultyStore()
    async with running(store, register) as kernel, task_group() as tasks:
        await kernel.add()
        await kernel.add()
        store.block()
        tasks.start_soon(unblock_later, store)
        await kernel.bus.drain()
        assert [record.fact for record in heard] == [Echoed(fact_id) for fact_id in additions(kernel)]
        assert kernel.ledger.durable == kernel.ledger.revision


async def unblock_later(store: FaultyStore) -> None:
    await anyio.sleep(60)
    store.unblock()


@on_virtual_time
async def test_a_durable_handler_may_ask_as_soon_as_it_runs() -> None:
    store, totals = FaultyStore(), list[int]()

    def register(kernel: Kernel) -> None:
        async def answer(*_: Any) -> int:
            await anyio.sleep(1)
            return 0

        async def ask(_: Record) -> None:
            totals.append(await kernel.bus.ask(ReadTotal()))

        kernel.bus.replace(ReadTotal, answer, owner="slow")
        kernel.bus.on(Echoed, ask, name="asker", durable=True)

    async with running(store, register):
        pass
    async with running(store) as kernel:
        await kernel.ledger.append(Decision(None, (Echoed(0),))).wait()
    async with running(store, register) as kernel:
        await kernel.settle()
        assert (totals, kernel.facts(HandlerFailed)) == ([0], [])


@on_virtual_time
async def test_cursors_are_stored_under_the_handler_s_name() -> None:
    built = RegisteredHandlers()
    async with running(register=built.with_echo) as kernel:
        await kernel.add()
        await kernel.settle()
        entry = await kernel.store.get(CURSOR_PREFIX + "echo")
        assert entry is not None
        assert [int(entry.value)] == additions(kernel)
