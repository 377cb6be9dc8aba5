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
from tests.spine import Add, Added, Echoed, Level, ReadTotal, Spine, Tick, call, ids, running, task_group, virtual
from tests.troubled_store import TroubledStore, full

ECHOES_KEY = "echo/count"


class Echo:
    """A durable handler with state: it answers every `Added` with an `Echoed`, and counts."""

    def __init__(self, spine: Spine, **terms: Any) -> None:
        self.count = 0
        self.seen: list[int] = []
        self.before_deciding: Callable[[Record], Any] = lambda record: None
        spine.ledger.join(self)
        spine.bus.on(Added, self, name="echo", durable=True, **terms)

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


class Built:
    """What a test registered, for its later reference."""

    echo: Echo

    def with_echo(self, spine: Spine) -> None:
        self.echo = Echo(spine)


def echoes(spine: Spine) -> list[int]:
    """Which facts were answered, in the order of the answers."""
    return [fact.of for fact in spine.facts(Echoed)]


def additions(spine: Spine) -> list[int]:
    return [record.id for record in spine.journal.after(0, 100_000) if record.type == "Added"]


def failing(_: Record) -> None:
    raise ValueError("boom")


# Facts.


@virtual
async def test_a_handler_gets_the_facts_that_it_asked_for() -> None:
    added: list[Record] = []
    either: list[Record] = []
    everything: list[Record] = []

    def register(spine: Spine) -> None:
        spine.bus.on(Added, added.append, name="added")
        spine.bus.on([Added, Echoed], either.append, name="either")
        spine.bus.on(Fact, everything.append, name="everything")

    async with running(register=register) as spine:
        facts = (Echoed(0), Added(1, 1), HandlerReadmitted("x"), Added(2, 3))
        await spine.ledger.append(Decision(None, facts)).wait()
        await spine.settle()
    assert [record.fact for record in added] == [Added(1, 1), Added(2, 3)]
    assert [record.fact for record in either] == [Echoed(0), Added(1, 1), Added(2, 3)]
    assert [record.fact for record in everything] == list(facts)


@virtual
async def test_each_handler_has_its_own_pace_and_all_have_the_same_order() -> None:
    fast: list[Record] = []
    slow: list[Record] = []

    async def take_time(record: Record) -> None:
        await anyio.sleep(0.1)
        slow.append(record)

    def register(spine: Spine) -> None:
        spine.bus.on(Added, fast.append, name="fast")
        spine.bus.on(Added, take_time, name="slow")

    async with running(register=register) as spine:
        for _ in range(20):
            await spine.add()
        assert len(fast) > len(slow)
        await spine.settle()
        assert ids(fast) == ids(slow) == additions(spine)


@virtual
async def test_nobody_hears_a_fact_before_it_is_durable() -> None:
    store = TroubledStore()
    heard: list[Record] = []
    async with running(store, lambda spine: spine.bus.on(Added, heard.append, name="ear")) as spine:
        store.block()
        spine.submit()
        await anyio.sleep(10)
        assert heard == []
        store.unblock()
        await spine.settle()
        assert len(heard) == 1
        assert heard[0].id <= store.revision


@virtual
async def test_publishing_inside_a_handler_queues_and_never_recurses() -> None:
    depth = deepest = 0

    async def decide_again(record: Record) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        if len(spine.facts(Added)) < 50:
            await spine.add()
        depth -= 1

    async with running(register=lambda spine: spine.bus.on(Added, decide_again, name="echo")) as spine:
        await spine.add()
        await spine.settle()
        assert len(spine.facts(Added)) == 50
    assert deepest == 1


@virtual
async def test_a_storm_of_one_handler_s_own_facts_leaves_the_others_their_turn() -> None:
    def register(spine: Spine) -> None:
        spine.bus.on(Echoed, lambda record: Decision(None, (Echoed(record.id),)), name="storm", durable=True)

    async with running(MemoryStore("a history"), register) as spine:
        await spine.ledger.append(Decision(None, (Echoed(0),))).wait()
        for total in range(1, 51):
            assert await spine.add() == total
        assert len(spine.facts(Echoed)) > 10
        spine.bus.mailboxes["storm"].quarantine()


@virtual
async def test_a_handler_that_comes_while_the_bus_runs_hears_what_comes_after() -> None:
    heard: list[Record] = []
    async with running() as spine:
        await spine.add()
        spine.bus.on(Added, heard.append, name="late")
        await spine.add()
        await spine.settle()
        assert ids(heard) == additions(spine)[1:]


@pytest.mark.parametrize(("types", "name"), [((), "new"), (Added, "taken")])
@virtual
async def test_a_subscription_to_nothing_or_under_a_taken_name_is_a_mistake(types: Any, name: str) -> None:
    async with running(register=lambda spine: spine.bus.on(Added, failing, name="taken")) as spine:
        with pytest.raises(ValueError, match=name):
            spine.bus.on(types, failing, name=name)
        assert list(spine.bus.mailboxes) == ["taken"]


@virtual
async def test_facts_have_their_causes_so_that_a_story_can_be_told() -> None:
    built = Built()
    async with running(register=built.with_echo) as spine:
        await spine.add()
        await spine.add()
        await spine.settle()
        first, second = additions(spine)
        for cause in (first, second):
            assert [record.fact for record in spine.journal.story(cause)[1:]] == [Echoed(cause)]
        origins = {record.origin for record in spine.journal.after(0, 10) if record.type == "Echoed"}
        assert origins == {"handler echo"}


# Isolation.


@virtual
async def test_a_handler_that_raises_is_put_on_record_and_the_others_have_the_fact_all_the_same() -> None:
    heard: list[Record] = []

    def register(spine: Spine) -> None:
        spine.bus.on(Added, failing, name="failing")
        spine.bus.on(Added, heard.append, name="fine")

    async with running(register=register) as spine:
        await spine.add()
        await spine.settle()
        (fact_id,) = additions(spine)
        assert ids(heard) == [fact_id]
        assert spine.facts(HandlerFailed) == [HandlerFailed("failing", fact_id, "ValueError: boom")]
        (record,) = [record for record in spine.journal.after(0, 10) if record.type == "HandlerFailed"]
        assert (record.cause, record.origin) == (fact_id, "handler failing")


@virtual
async def test_a_handler_whose_error_cannot_be_stored_as_it_is_harms_nobody_else() -> None:
    def fail_oddly(_: Record) -> None:
        raise FileNotFoundError("caf\udce9")

    async with running(register=lambda spine: spine.bus.on(Added, fail_oddly, name="odd")) as spine:
        await spine.add()
        await spine.settle()
        assert [fact.reason for fact in spine.facts(HandlerFailed)] == ["FileNotFoundError: caf\\udce9"]


@virtual
async def test_a_handler_that_fails_over_a_failure_is_not_put_on_record_for_ever() -> None:
    def register(spine: Spine) -> None:
        spine.bus.on(Fact, failing, name="one")
        spine.bus.on(Fact, failing, name="two")

    async with running(register=register) as spine:
        await spine.add()
        await anyio.sleep(60)
        assert len(spine.facts(HandlerFailed)) == 2
        assert len(spine.journal) == 3


@virtual
async def test_a_handler_that_hangs_is_cancelled_and_put_on_record() -> None:
    async def hang(_: Record) -> None:
        await asyncio.Event().wait()

    async with running(register=lambda spine: spine.bus.on(Added, hang, name="hanging", deadline_s=5)) as spine:
        await spine.add()
        await spine.settle()
        (failed,) = spine.facts(HandlerFailed)
        assert failed.reason == "took longer than its deadline of 5 s"


class Stubborn:
    """Ignores its cancellations until it is let go."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def __call__(self, _: Record) -> None:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                continue


@virtual
async def test_a_handler_that_cannot_be_cancelled_is_given_up_while_the_others_go_on() -> None:
    stubborn = Stubborn()
    heard: list[Record] = []

    def register(spine: Spine) -> None:
        spine.bus.on(Added, stubborn, name="stubborn", deadline_s=2)
        spine.bus.on(Added, heard.append, name="fine")

    async with running(register=register) as spine:
        await spine.add()
        await anyio.sleep(60)
        await spine.add()
        await spine.settle()
        assert len(heard) == 2
        assert [fact.handler for fact in spine.facts(HandlerQuarantined)] == ["stubborn"]
        with pytest.raises(RequestRefused) as caught:
            spine.bus.readmit("stubborn")
        assert caught.value.code == "handler_stuck"
        stubborn.released.set()
        await anyio.sleep(1)
        spine.bus.readmit("stubborn")
        await spine.add()
        await spine.settle()
        assert len(spine.facts(HandlerQuarantined)) == 1


@virtual
async def test_a_handler_that_fails_too_often_in_a_row_is_quarantined_on_record() -> None:
    async with running(register=lambda spine: spine.bus.on(Added, failing, name="plugin", failures_max=3)) as spine:
        for _ in range(5):
            await spine.add()
        await spine.settle()
        assert len(spine.facts(HandlerFailed)) == 3
        assert spine.facts(HandlerQuarantined) == [HandlerQuarantined("plugin", 3, "ValueError: boom")]


@virtual
async def test_a_readmitted_handler_hears_what_comes_next() -> None:
    heard: list[int] = []
    gaps: list[Gap] = []

    def once_bitten(record: Record) -> None:
        heard.append(record.id)
        if len(heard) == 1:
            raise ValueError("boom")

    def register(spine: Spine) -> None:
        spine.bus.on(Added, once_bitten, name="plugin", failures_max=1, on_gap=gaps.append)

    async with running(register=register) as spine:
        for _ in range(3):
            await spine.add()
            await spine.settle()
        await spine.ledger.append(spine.bus.readmit("plugin")).wait()
        await spine.add()
        await spine.settle()
        first, second, third, fourth = additions(spine)
        assert heard == [first, fourth]
        assert [(gap.first, gap.last) for gap in gaps] == [(second, third)]
        assert spine.facts(HandlerReadmitted) == [HandlerReadmitted("plugin")]


@virtual
async def test_a_readmitted_durable_handler_goes_on_where_it_was() -> None:
    heard: list[int] = []

    def once_bitten(record: Record) -> None:
        heard.append(record.id)
        if len(heard) == 1:
            raise ValueError("boom")

    def register(spine: Spine) -> None:
        spine.bus.on(Added, once_bitten, name="plugin", failures_max=1, durable=True)

    async with running(register=register) as spine:
        for _ in range(3):
            await spine.add()
            await spine.ledger.writable()
            await spine.settle()
        await spine.ledger.writable()
        await spine.ledger.append(spine.bus.readmit("plugin")).wait()
        await spine.settle()
        assert heard == additions(spine)


@pytest.mark.parametrize("name", ["fine", "nobody"])
@virtual
async def test_only_who_is_in_quarantine_can_be_readmitted(name: str) -> None:
    async with running(register=lambda spine: spine.bus.on(Added, failing, name="fine")) as spine:
        with pytest.raises(RequestRefused) as caught:
            spine.bus.readmit(name)
        assert caught.value.code == "not_quarantined"


@virtual
async def test_one_who_decides_without_being_durable_is_refused_and_leaves_no_trace() -> None:
    def register(spine: Spine) -> None:
        spine.bus.on(Added, lambda _: spine.tally.add(100), name="sneaky")

    async with running(register=register) as spine:
        await spine.add(1)
        await spine.settle()
        await spine.ledger.writable()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
        (failed,) = spine.facts(HandlerFailed)
        assert "must be durable" in failed.reason
        assert await spine.bus.ask(ReadTotal()) == 1


@virtual
async def test_a_failure_while_nothing_can_be_written_is_put_on_record_later() -> None:
    store = TroubledStore()
    release = asyncio.Event()

    async def fail_later(_: Record) -> None:
        await release.wait()
        raise ValueError("boom")

    async with running(store, lambda spine: spine.bus.on(Added, fail_later, name="failing")) as spine:
        await spine.add()
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await spine.add()
        release.set()
        await anyio.sleep(10)
        assert spine.facts(HandlerFailed) == []
        store.commit_error = None
        await anyio.sleep(10)
        assert spine.facts(HandlerFailed) == [HandlerFailed("failing", additions(spine)[0], "ValueError: boom")]


@virtual
async def test_every_failure_of_a_handler_is_told_to_who_asked_for_it() -> None:
    told: list[tuple[str, str]] = []

    def register(spine: Spine) -> None:
        spine.bus.on(Added, failing, name="failing")
        spine.bus.on(Fact, failing, name="failing for all")
        spine.bus.on_failure.append(lambda handler, reason: told.append((handler.name, reason)))

    async with running(register=register) as spine:
        await spine.add()
        await anyio.sleep(10)
        assert told.count(("failing", "ValueError: boom")) == 1
        # Also where the failure is over a failure, which is not put on record.
        assert told.count(("failing for all", "ValueError: boom")) == 3
        assert len(spine.facts(HandlerFailed)) == 2


@virtual
async def test_what_a_handler_raises_is_told_unless_it_is_an_error_of_ours() -> None:
    told: list[tuple[str, str]] = []

    def refuse(_: Record) -> None:
        raise RequestRefused("no", "no", "")

    def register(spine: Spine) -> None:
        spine.bus.on(Added, failing, name="failing")
        spine.bus.on(Added, refuse, name="refusing")
        spine.bus.on_signal(Tick, lambda *_: failing(record_of_nothing), name="listening")
        spine.bus.replace(ReadTotal, lambda *_: failing(record_of_nothing), owner="somebody")
        spine.bus.on_broken = lambda owner, error: told.append((owner, str(error)))

    record_of_nothing = Record.of(Echoed(0), fact_id=1, at=0.0)
    async with running(register=register) as spine:
        await spine.add()
        spine.bus.signal(Tick(1.0), call())
        with pytest.raises(ForgedError):
            await spine.bus.ask(ReadTotal())
        await spine.settle()
        await anyio.sleep(1)
        assert sorted(told) == [
            ("ReadTotal in somebody", "boom"),
            ("failing", "boom"),
            ("listening", "boom"),
        ]


@virtual
async def test_a_plugin_s_handler_is_readmitted_with_its_plugin_only() -> None:
    async with running(register=lambda spine: spine.bus.on(Added, failing, name="p/x", failures_max=1)) as spine:
        spine.bus.owners["p/x"] = "p"
        await spine.add()
        await spine.settle()
        with pytest.raises(RequestRefused) as caught:
            spine.bus.readmit("p/x")
        assert (caught.value.code, caught.value.fix) == ("plugins_handler", "forgectl plugins enable p")


@virtual
async def test_what_is_to_be_on_record_later_is_there_in_order_once_the_store_takes_writes() -> None:
    store = TroubledStore()
    async with running(store) as spine:
        spine.bus.record_later(Decision(None, (Echoed(1),)), origin="somebody")
        store.commit_error = full()
        await anyio.sleep(1)
        for number in (2, 3):
            spine.bus.record_later(Decision(None, (Echoed(number),)), origin="somebody")
        await anyio.sleep(10)
        assert spine.facts(Echoed) == []
        store.commit_error = None
        await anyio.sleep(10)
        assert [fact.of for fact in spine.facts(Echoed)] == [1, 2, 3]


@virtual
async def test_what_waits_to_be_on_record_is_bounded_and_the_newest_stay() -> None:
    store = TroubledStore()
    async with running(store) as spine:
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await spine.add()
        for number in range(REPORTS_MAX + 10):
            spine.bus.record_later(Decision(None, (Echoed(number),)))
        store.commit_error = None
        await anyio.sleep(10)
        assert [fact.of for fact in spine.facts(Echoed)] == list(range(10, REPORTS_MAX + 10))


@virtual
async def test_a_mailbox_that_nobody_bounds_holds_the_edges_back() -> None:
    async def hang(_: Record) -> None:
        await asyncio.Event().wait()

    def register(spine: Spine) -> None:
        spine.bus.on(Added, hang, name="built-in")
        spine.bus.on(Added, hang, name="plugin", lossless=False)

    async with running(register=register) as spine:
        spine.bus.backlog_max = 10
        for _ in range(11):
            assert not spine.bus.congested
            await spine.add()
        assert (spine.bus.backlog, spine.bus.congested) == (10, True)


# Durable handlers.


@virtual
async def test_a_durable_handler_goes_on_where_it_was_when_the_daemon_died() -> None:
    store, built = TroubledStore(), Built()
    async with running(store, built.with_echo) as spine:
        await spine.add()
        await spine.settle()
        built.echo.before_deciding = lambda _: asyncio.Event().wait()
        await spine.add()
        await spine.add()
        await anyio.sleep(1)
    async with running(store, built.with_echo) as spine:
        await spine.settle()
        assert echoes(spine) == additions(spine)
        assert built.echo.seen == additions(spine)[1:]


@virtual
async def test_a_durable_handler_that_died_before_its_first_fact_still_gets_it() -> None:
    store, built = TroubledStore(), Built()
    async with running(store) as spine:
        await spine.add()
    async with running(store, built.with_echo) as spine:
        built.echo.before_deciding = lambda _: asyncio.Event().wait()
        await spine.add()
        await anyio.sleep(CURSOR_INTERVAL_S / 2)
    async with running(store, built.with_echo) as spine:
        await spine.settle()
        assert echoes(spine) == additions(spine)[1:]


@virtual
async def test_a_new_durable_handler_begins_with_the_present() -> None:
    store, built = TroubledStore(), Built()
    async with running(store) as spine:
        await spine.add()
    async with running(store, built.with_echo) as spine:
        await spine.add()
        await spine.settle()
        assert echoes(spine) == additions(spine)[1:]


@virtual
async def test_how_far_a_durable_handler_has_come_is_saved_also_when_it_decides_nothing() -> None:
    store, heard = TroubledStore(), list[Record]()

    def register(spine: Spine) -> None:
        spine.bus.on(Added, heard.append, name="observer", durable=True)

    async with running(store, register) as spine:
        await spine.add()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
    async with running(store, register) as spine:
        await spine.settle()
        assert len(heard) == 1


@virtual
async def test_a_durable_handler_that_is_rarely_concerned_is_told_of_no_gap_that_is_none() -> None:
    store, gaps = TroubledStore(), list[Gap]()

    def register(spine: Spine) -> None:
        spine.bus.on(Echoed, lambda _: None, name="rare", durable=True, on_gap=gaps.append)

    async with running(store, register, facts_max=20) as spine:
        for _ in range(50):
            await spine.add()
            await anyio.sleep(CURSOR_INTERVAL_S / 5)
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
    async with running(store, register, facts_max=20) as spine:
        await spine.settle()
        assert gaps == []


@virtual
async def test_a_durable_handler_that_is_far_behind_stays_where_it_is() -> None:
    store, built = TroubledStore(), Built()
    async with running(store, built.with_echo, facts_max=20) as spine:
        built.echo.before_deciding = lambda _: asyncio.Event().wait()
        for _ in range(15):
            await spine.add()
        await anyio.sleep(3 * CURSOR_INTERVAL_S)
    async with running(store, built.with_echo, facts_max=20) as spine:
        await spine.settle()
        assert len(built.echo.seen) == 15


@virtual
async def test_a_durable_handler_in_quarantine_stays_where_it_is() -> None:
    store, heard = TroubledStore(), list[Record]()

    def register(spine: Spine) -> None:
        spine.bus.on(Added, failing, name="plugin", durable=True, failures_max=1)

    def register_mended(spine: Spine) -> None:
        spine.bus.on(Added, heard.append, name="plugin", durable=True, failures_max=1)

    async with running(store, register, facts_max=20) as spine:
        await spine.add()
        await anyio.sleep(CURSOR_INTERVAL_S)
        for _ in range(15):
            await spine.add()
        await anyio.sleep(3 * CURSOR_INTERVAL_S)
    async with running(store, register_mended, facts_max=20) as spine:
        await spine.settle()
        assert ids(heard) == additions(spine)[1:]


@virtual
async def test_a_durable_handler_that_was_away_for_longer_than_the_journal_is_told_what_it_missed() -> None:
    store, gaps, heard = TroubledStore(), list[Gap](), list[Record]()

    def register(spine: Spine) -> None:
        spine.bus.on(Added, heard.append, name="absent", durable=True, on_gap=gaps.append)

    async with running(store, register, facts_max=10):
        pass
    async with running(store, facts_max=10) as spine:
        for _ in range(30):
            await spine.add()
    async with running(store, register, facts_max=10) as spine:
        await spine.settle()
        assert ids(heard) == additions(spine)
        assert [(gap.first, gap.last) for gap in gaps] == [(1, spine.journal.floor)]


@pytest.mark.parametrize("moment", ["before", "after"])
@virtual
async def test_what_a_durable_handler_decides_happens_once_whenever_the_daemon_dies(moment: str) -> None:
    store, built = TroubledStore(), Built()
    async with running(store, built.with_echo) as spine:
        await spine.add()
        await spine.settle()

        def die(_: Record) -> None:
            store.dies = moment

        built.echo.before_deciding = die
        await spine.add()
        await anyio.sleep(1)
    store.dies = ""
    async with running(store, built.with_echo) as spine:
        await spine.settle()
        assert echoes(spine) == additions(spine)
        assert built.echo.count == 2


@virtual
async def test_what_a_durable_handler_decided_in_a_commit_that_failed_is_decided_again_once() -> None:
    store, built = TroubledStore(), Built()
    async with running(store, built.with_echo) as spine:

        def fill(_: Record) -> None:
            store.commit_error = full()

        built.echo.before_deciding = fill
        await spine.add()
        await anyio.sleep(5)
        assert (echoes(spine), built.echo.count) == ([], 0)
        built.echo.before_deciding = lambda _: None
        store.commit_error = None
        await spine.ledger.writable()
        await spine.settle()
        assert echoes(spine) == additions(spine)
        assert built.echo.count == 1


@virtual
async def test_facts_that_come_to_light_with_a_reload_reach_a_rewound_handler_once() -> None:
    store, built = TroubledStore(), Built()
    async with running(store, built.with_echo) as spine:
        store.block()
        built.echo.before_deciding = lambda _: store.block()
        store.unblock()
        await spine.add()
        await anyio.sleep(1)
        # Somebody else writes a fact, which fences the reaction that is being written.
        async with running(store.memory) as other:
            await other.add()
        store.unblock()
        await anyio.sleep(1)
        mailbox = spine.bus.mailboxes["echo"]
        assert ids(list(mailbox.queue)) == additions(spine)


@virtual
async def test_a_durable_handler_that_breaks_after_changing_its_state_leaves_no_trace() -> None:
    store, built = TroubledStore(), Built()
    async with running(store, built.with_echo) as spine:

        def break_off(record: Record) -> None:
            built.echo.count = 99
            built.echo.before_deciding = lambda _: None
            raise ValueError("boom")

        built.echo.before_deciding = break_off
        await spine.add()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
        await spine.add()
        await spine.settle()
        assert built.echo.count == 1
        assert echoes(spine) == additions(spine)[1:]
        assert [fact.fact_id for fact in spine.facts(HandlerFailed)] == additions(spine)[:1]


@given(steps=st.lists(st.sampled_from(["add", "settle", "wait", "fill", "free", "die", "restart"]), max_size=25))
@virtual
async def test_whatever_happens_each_fact_that_was_acknowledged_is_answered_once(steps: list[str]) -> None:
    store = TroubledStore()
    left = list(steps)
    acknowledged = 0
    while True:
        built = Built()
        store.commit_error, store.dies = None, ""
        async with running(store, built.with_echo) as spine:
            await spine.ledger.writable()
            while left and (step := left.pop(0)) != "restart":
                if step == "add":
                    with anyio.move_on_after(1), suppress(Unavailable):
                        await spine.add()
                        acknowledged += 1
                elif step == "settle":
                    with anyio.move_on_after(1):
                        await spine.settle()
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
    built = Built()
    async with running(store, built.with_echo) as spine:
        await spine.ledger.writable()
        await spine.settle()
        assert echoes(spine) == additions(spine)
        assert built.echo.count == len(additions(spine)) >= acknowledged
        assert spine.tally.total == len(additions(spine))


# Signals.


@virtual
async def test_a_signal_reaches_its_handlers_and_leaves_no_record() -> None:
    heights: list[int] = []
    ticks: list[float] = []

    def register(spine: Spine) -> None:
        spine.bus.on_signal(Level, lambda level, _: heights.append(level.height), name="gauge")
        spine.bus.on_signal(Tick, lambda tick, _: ticks.append(tick.at), name="clock")

    async with running(register=register) as spine:
        revision = spine.store.revision
        spine.bus.signal(Level("tank", 1), call())
        spine.bus.signal(Level("tank", 2), call())
        await anyio.sleep(1)
        assert (heights, ticks, spine.store.revision) == ([2], [], revision)


@virtual
async def test_a_signal_that_nobody_handles_is_nothing() -> None:
    async with running() as spine:
        spine.bus.signal(Level("tank", 1), call())


@virtual
async def test_one_name_may_stand_for_several_signals_but_not_for_two_handlers() -> None:
    seen: list[object] = []

    def handler(signal: object, _: object) -> None:
        seen.append(signal)

    def register(spine: Spine) -> None:
        spine.bus.on_signal(Level, handler, name="gauge")

    async with running(register=register) as spine:
        spine.bus.on_signal(Tick, handler, name="gauge")
        with pytest.raises(ValueError, match="gauge"):
            spine.bus.on_signal(Tick, lambda *_: None, name="gauge")
        spine.bus.signal(Level("tank", 1), call())
        spine.bus.signal(Tick(1.0), call())
        await anyio.sleep(1)
        assert seen == [Level("tank", 1), Tick(1.0)]


# Sealing and draining.


@virtual
async def test_a_bus_with_an_unanswered_request_does_not_start() -> None:
    with pytest.raises(ConfigError) as caught:
        async with running(requests=[Add, ReadTotal, PingDaemon]):
            pass
    assert [problem.key for problem in caught.value.problems] == ["PingDaemon"]


@virtual
async def test_draining_waits_for_the_handlers_and_for_what_they_decide() -> None:
    built = Built()
    heard: list[Record] = []

    async def take_time(record: Record) -> None:
        await anyio.sleep(5)
        heard.append(record)

    def register(spine: Spine) -> None:
        built.with_echo(spine)
        built.echo.before_deciding = lambda _: anyio.sleep(5)
        spine.bus.on(Echoed, take_time, name="listener")

    store = TroubledStore()
    async with running(store, register) as spine, task_group() as tasks:
        await spine.add()
        await spine.add()
        store.block()
        tasks.start_soon(unblock_later, store)
        await spine.bus.drain()
        assert [record.fact for record in heard] == [Echoed(fact_id) for fact_id in additions(spine)]
        assert spine.ledger.durable == spine.ledger.revision


async def unblock_later(store: TroubledStore) -> None:
    await anyio.sleep(60)
    store.unblock()


@virtual
async def test_a_durable_handler_may_ask_as_soon_as_it_runs() -> None:
    store, totals = TroubledStore(), list[int]()

    def register(spine: Spine) -> None:
        async def answer(*_: Any) -> int:
            await anyio.sleep(1)
            return 0

        async def ask(_: Record) -> None:
            totals.append(await spine.bus.ask(ReadTotal()))

        spine.bus.replace(ReadTotal, answer, owner="slow")
        spine.bus.on(Echoed, ask, name="asker", durable=True)

    async with running(store, register):
        pass
    async with running(store) as spine:
        await spine.ledger.append(Decision(None, (Echoed(0),))).wait()
    async with running(store, register) as spine:
        await spine.settle()
        assert (totals, spine.facts(HandlerFailed)) == ([0], [])


@virtual
async def test_cursors_are_stored_under_the_handler_s_name() -> None:
    built = Built()
    async with running(register=built.with_echo) as spine:
        await spine.add()
        await spine.settle()
        entry = await spine.store.get(CURSOR_PREFIX + "echo")
        assert entry is not None
        assert [int(entry.value)] == additions(spine)
