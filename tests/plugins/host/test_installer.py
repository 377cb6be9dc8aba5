from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest

from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.kernel.bus.bus import CURSOR_INTERVAL_S
from forged.kernel.bus.model import HandlerFailed
from forged.kernel.messages import Call, Decision, Fact, Gap, Record
from forged.plugins.alarm_guard import AlarmGuard
from forged.plugins.context import PluginContext
from forged.plugins.host.call_limits import GRACE_S
from forged.plugins.model import (
    REQUESTS,
    DisablePlugin,
    EnablePlugin,
    ListPlugins,
    PluginState,
    RunPluginCommand,
)
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import Add, Added, Kernel, ReadTotal, Tick, call, ids, on_virtual_time, running
from tests.plugins.plugin_fixture import (
    FAILURES_MAX,
    Contexts,
    Guess,
    Knock,
    ReportException,
    Said,
    Vote,
    on,
    running_plugins,
)

DOWN = Unavailable("receiver_down", "the receiver is down", "")


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise error

    return act


async def hang(*_: Any) -> Any:
    await asyncio.Event().wait()


class Stubborn:
    """Awaits on, however often it is cancelled, until it is let go."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.released = asyncio.Event()

    async def __call__(self, *_: Any) -> Any:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancelled += 1


def additions(kernel: Kernel) -> list[int]:
    return [record.id for record in kernel.journal.after(0, 100_000) if record.type == "Added"]


async def refused(work: Any) -> ForgedError:
    """The error that a request ends with."""
    with pytest.raises(ForgedError) as caught:
        await work
    return caught.value


# Observing.


@on_virtual_time
async def test_observer_gets_the_facts_of_its_types_in_order() -> None:
    heard: list[Record] = []
    async with running_plugins(on(Added, heard.append)) as plugins:
        for _ in range(5):
            await plugins.kernel.add()
        await plugins.kernel.settle()
        assert ids(heard) == additions(plugins.kernel)
        assert plugins.plugin().handled == 5


@on_virtual_time
async def test_an_observer_may_be_a_coroutine() -> None:
    heard: list[int] = []

    async def take_time(record: Record) -> None:
        await anyio.sleep(1)
        heard.append(record.id)

    async with running_plugins(on(Added, take_time)) as plugins:
        await plugins.kernel.add()
        await anyio.sleep(2)
        assert (heard, plugins.plugin().handled) == (additions(plugins.kernel), 1)


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), RequestRefused("no", "no", "")])
@on_virtual_time
async def test_observer_failures_are_recorded_and_quarantine_the_plugin(
    error: BaseException,
) -> None:
    async with running_plugins(on(Added, raising(error))) as plugins:
        for number in range(1, FAILURES_MAX + 3):
            await plugins.kernel.add()
            await anyio.sleep(0.1)
            assert plugins.plugin().active == (number < FAILURES_MAX)
        assert len(plugins.failures()) == FAILURES_MAX
        (quarantined,) = plugins.quarantines()
        assert (quarantined.plugin, quarantined.part, quarantined.failures) == ("one", "one/part", FAILURES_MAX)


@on_virtual_time
async def test_a_success_in_between_forgives_the_failures_before() -> None:
    async def alternate(record: Record) -> None:
        assert isinstance(record.fact, Added)
        if record.fact.total % FAILURES_MAX:
            raise ValueError("boom")

    async with running_plugins(on(Added, alternate)) as plugins:
        for _ in range(5 * FAILURES_MAX):
            await plugins.kernel.add()
            await anyio.sleep(60)
        assert plugins.plugin().active
        assert plugins.plugin().failed == 10


@on_virtual_time
async def test_unavailable_error_is_no_failure_of_an_observer() -> None:
    async def fail(_: Record) -> None:
        raise DOWN

    for handler in (raising(DOWN), fail):
        async with running_plugins(on(Added, handler)) as plugins:
            for _ in range(2 * FAILURES_MAX):
                await plugins.kernel.add()
            await plugins.kernel.settle()
            assert (plugins.plugin().active, plugins.plugin().failed, plugins.failures()) == (True, 0, [])


@on_virtual_time
async def test_observer_that_publishes_while_the_disk_is_full_is_not_quarantined() -> None:
    store, contexts = FaultyStore(), Contexts()

    async def say(record: Record) -> None:
        await contexts.context.publish(Said("so"), cause=record.id)

    def register(context: PluginContext) -> None:
        contexts(context)
        context.on(Added, say)

    async with running_plugins(register, store=store) as plugins:
        for _ in range(2 * FAILURES_MAX):
            await plugins.kernel.add()
            store.commit_error = full()
            await anyio.sleep(5)
            store.commit_error = None
            await plugins.kernel.ledger.writable()
        assert plugins.plugin().active


@on_virtual_time
async def test_observer_that_returns_a_decision_is_quarantined_with_the_reason() -> None:
    decide = [lambda _: Decision(None, (Said("x"),))]

    async def decide_later(record: Record) -> Any:
        return decide[0](record)

    for handler in (decide[0], decide_later):
        async with running_plugins(on(Added, handler)) as plugins:
            await plugins.kernel.add()
            await plugins.kernel.settle()
            await anyio.sleep(1)
            (reason,) = plugins.failures()
            assert "an observer may publish facts" in reason
            assert plugins.kernel.ledger.reloads == 1


@on_virtual_time
async def test_an_observer_that_hangs_is_cancelled_and_the_next_fact_has_its_turn() -> None:
    async with running_plugins(on(Added, hang, deadline_s=1.0), failures_max=100) as plugins:
        for _ in range(3):
            await plugins.kernel.add()
        await anyio.sleep(3.5)
        assert [reason.split(": ")[-1] for reason in plugins.failures()] == ["took longer than its 1 s"] * 3


@on_virtual_time
async def test_an_observer_that_ignores_its_cancellation_is_stepped_no_further() -> None:
    stubborn = Stubborn()
    async with running_plugins(on(Added, stubborn, deadline_s=1.0)) as plugins:
        await plugins.kernel.add()
        await anyio.sleep(1.0 + GRACE_S + 0.1)
        assert stubborn.cancelled == 1
        (reason,) = plugins.failures()
        assert "ignored its cancellation" in reason
        await plugins.kernel.bus.drain()
        for _ in range(FAILURES_MAX - 1):
            await plugins.kernel.add()
        await anyio.sleep(20)
        assert plugins.state() is PluginState.QUARANTINED
        await plugins.enable()
        stubborn.released.set()
        await plugins.kernel.add()
        await anyio.sleep(1)
        assert plugins.plugin().handled == 1


@on_virtual_time
async def test_slow_observer_loses_the_oldest_facts_and_gets_a_gap() -> None:
    heard: list[int] = []
    gaps: list[Gap] = []
    release = asyncio.Event()

    async def wait(record: Record) -> None:
        heard.append(record.id)
        await release.wait()

    async with running_plugins(on(Added, wait, mailbox_max=2, on_gap=gaps.append, deadline_s=100.0)) as plugins:
        for _ in range(6):
            await plugins.kernel.add()
        release.set()
        await anyio.sleep(1)
        all_of_them = additions(plugins.kernel)
        assert heard == [all_of_them[0], *all_of_them[-2:]]
        assert [(gap.first, gap.last) for gap in gaps] == [(all_of_them[1], all_of_them[3])]


@on_virtual_time
async def test_slow_observer_does_not_delay_other_handlers() -> None:
    async with running_plugins(on(Added, hang)) as plugins:
        plugins.kernel.bus.backlog_max = 2
        for _ in range(10):
            await plugins.kernel.add()
        assert not plugins.kernel.bus.congested
        await plugins.kernel.bus.drain()


@on_virtual_time
async def test_observer_of_a_disabled_plugin_is_stopped_at_once_and_gets_no_facts() -> None:
    heard: list[int] = []
    ended: list[str] = []

    async def wait(record: Record) -> None:
        heard.append(record.id)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("stopped")
            raise ValueError("on the way out")

    async with running_plugins(on(Added, wait, deadline_s=100.0)) as plugins:
        await plugins.kernel.add()
        await plugins.kernel.add()
        await anyio.sleep(0.1)
        await plugins.disable()
        await anyio.sleep(0.1)
        await plugins.kernel.add()
        await anyio.sleep(100)
        assert (heard, ended) == (additions(plugins.kernel)[:1], ["stopped"])
        assert (await plugins.view()).reason == "disabled by an operator"


# Following.


@on_virtual_time
async def test_a_follower_goes_on_where_it_was_when_its_plugin_is_enabled_again() -> None:
    taken: list[int] = []
    broken = True

    async def deliver(records: Sequence[Record]) -> None:
        if broken:
            raise ValueError("boom")
        taken.extend(ids(records))

    async with running_plugins(lambda context: context.follow(Added, deliver)) as plugins:
        await plugins.kernel.add()
        await anyio.sleep(60)
        assert plugins.state() is PluginState.QUARANTINED
        await plugins.kernel.add()
        broken = False
        await anyio.sleep(60)
        assert taken == []
        await plugins.enable()
        await anyio.sleep(60)
        assert taken == additions(plugins.kernel)
        assert plugins.plugin().active


@on_virtual_time
async def test_follower_with_an_unavailable_receiver_shows_it_and_is_not_quarantined() -> None:
    async def deliver(_: Sequence[Record]) -> None:
        raise DOWN

    async with running_plugins(lambda context: context.follow(Added, deliver)) as plugins:
        await plugins.kernel.add()
        await anyio.sleep(3600 / 2)
        assert plugins.plugin().active
        assert (await plugins.view()).reason == "the receiver is down"


@on_virtual_time
async def test_a_delivery_that_hangs_is_cancelled_and_tried_again() -> None:
    taken: list[list[int]] = []

    async def deliver(records: Sequence[Record]) -> None:
        taken.append(ids(records))
        if len(taken) == 1:
            await asyncio.Event().wait()

    async with running_plugins(lambda context: context.follow(Added, deliver, deadline_s=5.0)) as plugins:
        await plugins.kernel.add()
        await anyio.sleep(10)
        assert taken == [additions(plugins.kernel)] * 2
        assert plugins.plugin().failed == 1


@on_virtual_time
async def test_a_delivery_may_be_a_plain_function() -> None:
    taken: list[int] = []
    async with running_plugins(
        lambda context: context.follow(Added, lambda records: taken.extend(ids(records)), name="f")
    ) as it:
        await it.kernel.add()
        await anyio.sleep(1)
        assert taken == additions(it.kernel)


@on_virtual_time
async def test_delivery_interrupted_by_disabling_the_plugin_is_repeated() -> None:
    taken: list[list[int]] = []

    async def deliver(records: Sequence[Record]) -> None:
        taken.append(ids(records))
        if len(taken) == 1:
            await asyncio.Event().wait()

    async with running_plugins(lambda context: context.follow(Added, deliver)) as plugins:
        await plugins.kernel.add()
        await anyio.sleep(1)
        await plugins.disable()
        await anyio.sleep(1)
        assert (await plugins.view()).reason == "disabled by an operator"
        await plugins.enable()
        assert (await plugins.view()).reason is None
        await anyio.sleep(60)
        assert taken == [additions(plugins.kernel)] * 2
        assert plugins.plugin().failed == 0


@on_virtual_time
async def test_the_position_of_a_follower_is_kept_over_a_restart() -> None:
    store, taken = FaultyStore(), list[int]()
    register = lambda context: context.follow(Added, lambda records: taken.extend(ids(records)), name="f")  # noqa: E731
    async with running_plugins(register, store=store) as plugins:
        await plugins.kernel.add()
        await anyio.sleep(2 * CURSOR_INTERVAL_S)
    async with running(store) as kernel:
        await kernel.add()
    async with running_plugins(register, store=store) as plugins:
        await anyio.sleep(1)
        assert taken == additions(plugins.kernel)


# Listening.


@on_virtual_time
async def test_listener_gets_signals_and_is_quarantined_after_failures() -> None:
    heard: list[float] = []

    def listen(tick: Tick, _: Call) -> None:
        heard.append(tick.at)
        if tick.at:
            raise ValueError("boom")

    async with running_plugins(lambda context: context.on_signal(Tick, listen)) as plugins:
        for number in range(FAILURES_MAX + 3):
            plugins.kernel.bus.signal(Tick(float(number)), call())
            await anyio.sleep(1)
        assert heard == [0.0, *map(float, range(1, FAILURES_MAX + 1))]
        assert plugins.state() is PluginState.QUARANTINED


@on_virtual_time
async def test_a_plugin_may_listen_for_its_own_signals() -> None:
    heard: list[object] = []
    async with running_plugins(
        lambda context: context.on_signal(Knock, lambda knock, _: heard.append(knock), name="k")
    ) as it:
        it.kernel.bus.signal(Knock(), call())
        await anyio.sleep(1)
        assert heard == [Knock()]


# Serving.


def serving(request: type[Any], handler: Any, **terms: Any) -> Callable[[PluginContext], None]:
    return lambda context: context.serve(request, handler, **terms)


def plus_one(guess: Guess, _: Call) -> int:
    return guess.number + 1


@on_virtual_time
async def test_a_plugin_answers_its_own_requests() -> None:
    async def later(guess: Guess, call: Call) -> int:
        await anyio.sleep(1)
        return plus_one(guess, call)

    for handler in (plus_one, later):
        async with running_plugins(serving(Guess, handler)) as plugins:
            assert await plugins.kernel.bus.ask(Guess(2)) == 3


@on_virtual_time
async def test_requests_to_a_disabled_plugin_are_refused_with_the_reason() -> None:
    async with running_plugins(serving(Guess, plus_one)) as plugins:
        await plugins.disable()
        error = await refused(plugins.kernel.bus.ask(Guess()))
        assert (type(error), error.code, error.fix) == (Unavailable, "plugin_left_out", "forgectl plugins enable one")
        await plugins.enable()
        assert await plugins.kernel.bus.ask(Guess()) == 1


@on_virtual_time
async def test_plugin_decision_is_durable_with_the_reply() -> None:
    def vote(request: Vote, _: Call) -> Decision[str]:
        return Decision("counted", (Said(request.text),))

    async with running_plugins(serving(Vote, vote)) as plugins:
        for _ in range(2):
            assert await plugins.kernel.bus.ask(Vote("aye"), call(1)) == "counted"
        assert plugins.kernel.facts(Said) == [Said("aye")]


@pytest.mark.parametrize(
    ("decision", "code"),
    [
        (Decision("x", (HandlerFailed("x", 1, "x"),)), "fact_foreign"),
        (Decision("x", (Said("x", object()),)), "fact_unfit"),
        (Decision("x", (Said("x" * 100_000),)), "fact_too_large"),
        (Decision("x", writes={"tally/total": b"7"}), "writes_foreign"),
        (Decision(object()), "reply_unfit"),
        (Decision("x" * 1_000_000), "reply_too_large"),
        (Decision("x", (Said("x"),), job=5), "fact_unfit"),  # type: ignore[arg-type]
        (Decision("x", (Said("x"),), generation="late"), "fact_unfit"),  # type: ignore[arg-type]
    ],
)
@on_virtual_time
async def test_forbidden_decision_is_refused_without_a_state_reload(decision: Decision[Any], code: str) -> None:
    async def later(*_: Any) -> Decision[Any]:
        return decision

    for handler in (lambda *_: decision, later):
        async with running_plugins(serving(Vote, handler)) as plugins:
            loads = plugins.kernel.tally.loads
            error = await refused(plugins.kernel.bus.ask(Vote(), call(1)))
            assert error.code == code
            assert plugins.kernel.tally.loads == loads


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), asyncio.CancelledError(), StopIteration()])
@on_virtual_time
async def test_a_handler_that_breaks_is_an_answer_to_the_caller_and_a_failure_of_the_plugin(
    error: BaseException,
) -> None:
    async def later(*_: Any) -> Any:
        raise error

    for handler in (raising(error), later):
        async with running_plugins(serving(Vote, handler)) as plugins:
            broken = ReportException()
            plugins.kernel.bus.on_handler_bug = broken
            for _ in range(FAILURES_MAX):
                answer = await refused(plugins.kernel.bus.ask(Vote()))
                assert (type(answer), answer.code) == (ForgedError, "plugin_broken")
            assert (await refused(plugins.kernel.bus.ask(Vote()))).code == "plugin_left_out"
            await plugins.kernel.settle()
            assert len(plugins.quarantines()) == 1
            assert plugins.kernel.ledger.reloads == 1
            assert {part for part, _ in broken.told} <= {"one/Vote"}


@on_virtual_time
async def test_refusal_by_a_plugin_handler_is_no_failure() -> None:
    async def later(*_: Any) -> Any:
        raise DOWN

    for handler in (raising(RequestRefused("no", "no", "")), later):
        async with running_plugins(serving(Guess, handler)) as plugins:
            for _ in range(2 * FAILURES_MAX):
                assert (await refused(plugins.kernel.bus.ask(Guess()))).code in ("no", "receiver_down")
            assert (plugins.plugin().active, plugins.plugin().failed) == (True, 0)


@on_virtual_time
async def test_a_handler_that_hangs_is_an_error_in_time() -> None:
    async with running_plugins(serving(Guess, hang, deadline_s=2.0)) as plugins:
        began = plugins.kernel.clock.monotonic()
        error = await refused(plugins.kernel.bus.ask(Guess()))
        assert "took longer than its 2 s" in error.message
        assert plugins.kernel.clock.monotonic() - began == pytest.approx(2.0)


@on_virtual_time
async def test_reply_after_deadline_counts_as_failure() -> None:
    async def late(*_: Any) -> int:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 1

    async with running_plugins(serving(Guess, late, deadline_s=2.0)) as plugins:
        assert "took longer than its 2 s" in (await refused(plugins.kernel.bus.ask(Guess()))).message
        assert (plugins.plugin().failed, plugins.plugin().handled) == (1, 0)


@on_virtual_time
async def test_a_handler_that_ignores_its_cancellation_is_an_error_in_time_too() -> None:
    stubborn = Stubborn()
    async with running_plugins(serving(Guess, stubborn, deadline_s=2.0)) as plugins:
        began = plugins.kernel.clock.monotonic()
        error = await refused(plugins.kernel.bus.ask(Guess()))
        assert "ignored its cancellation" in error.message
        assert plugins.kernel.clock.monotonic() - began == pytest.approx(2.0 + GRACE_S)
        assert (stubborn.cancelled, plugins.kernel.bus.dispatcher.in_flight, plugins.plugin().turns) == (1, 0, {})


@on_virtual_time
async def test_a_caller_s_deadline_and_cancellation_are_no_failure_of_the_plugin() -> None:
    async with running_plugins(serving(Guess, hang, deadline_s=60.0)) as plugins:
        assert (await refused(plugins.kernel.bus.ask(Guess(), call(timeout_s=1.0)))).code == "deadline_exceeded"
        pending = plugins.kernel.bus.submit(Guess(), call(1))
        await anyio.sleep(1)
        plugins.kernel.bus.dispatcher.cancel(call(1).client, 1)
        assert (await refused(pending.wait())).code == "cancelled"
        assert (plugins.plugin().failed, plugins.plugin().turns) == (0, {})


@on_virtual_time
async def test_a_handler_that_ignores_its_caller_s_deadline_keeps_neither_the_caller_nor_the_loop() -> None:
    stubborn = Stubborn()
    async with running_plugins(serving(Guess, stubborn, deadline_s=60.0)) as plugins:
        assert (await refused(plugins.kernel.bus.ask(Guess(), call(timeout_s=1.0)))).code == "deadline_exceeded"
        assert plugins.kernel.clock.monotonic() == pytest.approx(1.0, abs=0.1)


# Replacing.


@on_virtual_time
async def test_replacement_answers_until_its_plugin_is_disabled() -> None:
    async with running_plugins(lambda context: context.replace(ReadTotal, lambda *_: 99)) as plugins:
        await plugins.kernel.add(3)
        assert await plugins.kernel.bus.ask(ReadTotal()) == 99
        await plugins.disable()
        assert await plugins.kernel.bus.ask(ReadTotal()) == 3
        await plugins.enable()
        assert await plugins.kernel.bus.ask(ReadTotal()) == 99


@on_virtual_time
async def test_a_replacement_that_breaks_falls_back_to_the_daemon_s_handler() -> None:
    async with running_plugins(lambda context: context.replace(Add, raising(ValueError("boom")))) as plugins:
        for _ in range(FAILURES_MAX):
            await refused(plugins.kernel.add())
        assert await plugins.kernel.add(5) == 5
        assert plugins.kernel.ledger.reloads == 1


@on_virtual_time
async def test_replacement_may_publish_a_fact_of_the_daemon() -> None:
    async with running_plugins(
        lambda context: context.replace(Add, lambda add, _: Decision(1, (Added(1, 1),)))
    ) as plugins:
        assert await plugins.kernel.add() == 1
        assert plugins.kernel.facts(Added) == [Added(1, 1)]


# Wrapping.


async def pass_on(request: Any, _: Call, proceed: Any) -> Any:
    return await proceed(request)


def wrapping(request: type[Any], wrapper: Any, **terms: Any) -> Callable[[PluginContext], None]:
    return lambda context: context.wrap(request, wrapper, **terms)


@on_virtual_time
async def test_a_wrapper_may_change_the_request_and_the_reply() -> None:
    async def double(request: Add, _: Call, proceed: Any) -> int:
        total: int = await proceed(Add(request.amount * 2))
        return total + 1000

    async with running_plugins(wrapping(Add, double)) as plugins:
        assert await plugins.kernel.add(2) == 1004
        assert plugins.plugin().handled == 1


@on_virtual_time
async def test_a_wrapper_may_refuse_or_answer_by_itself() -> None:
    async def judge(request: Add, _: Call, proceed: Any) -> int:
        if request.amount < 0:
            raise RequestRefused("negative", "no", "")
        return 7

    async with running_plugins(wrapping(Add, judge)) as plugins:
        for _ in range(2 * FAILURES_MAX):
            assert (await refused(plugins.kernel.add(-1))).code == "negative"
        assert (await plugins.kernel.add(1), plugins.plugin().failed, plugins.kernel.facts(Added)) == (7, 0, [])


@on_virtual_time
async def test_refusal_of_the_handler_is_no_failure_of_the_wrapper() -> None:
    def refuse(*_: Any) -> Any:
        raise RequestRefused("no", "no", "")

    async with running_plugins(
        wrapping(Guess, pass_on), register=lambda kernel: kernel.bus.serve(Guess, refuse, owner="x")
    ) as it:
        for _ in range(2 * FAILURES_MAX):
            assert (await refused(it.kernel.bus.ask(Guess()))).code == "no"
        assert it.plugin().failed == 0


@pytest.mark.parametrize("required", [False, True])
@on_virtual_time
async def test_requests_bypass_a_disabled_wrapper_unless_it_is_required(required: bool) -> None:
    async def fail(*_: Any) -> Any:
        raise ValueError("boom")

    async with running_plugins(wrapping(Add, fail, required=required)) as plugins:
        for _ in range(FAILURES_MAX):
            assert (await refused(plugins.kernel.add())).code == "plugin_broken"
        assert plugins.state() is PluginState.QUARANTINED
        if required:
            assert (await refused(plugins.kernel.add())).code == "plugin_left_out"
        else:
            assert await plugins.kernel.add(4) == 4


@pytest.mark.parametrize("before", [True, False])
@on_virtual_time
async def test_a_wrapper_that_hangs_before_or_behind_the_handler_is_an_error_in_time(before: bool) -> None:
    async def wrap(request: Any, _: Call, proceed: Any) -> Any:
        if before:
            await hang()
        reply = await proceed(request)
        await hang()
        return reply

    async with running_plugins(wrapping(Add, wrap, deadline_s=2.0)) as plugins:
        assert (await refused(plugins.kernel.add())).code == "plugin_broken"
        assert plugins.kernel.clock.monotonic() == pytest.approx(2.0, abs=0.1)
        assert len(plugins.kernel.facts(Added)) == (0 if before else 1)


async def slow(*_: Any) -> int:
    await anyio.sleep(60)
    return 1


@pytest.mark.parametrize(("behind_s", "well"), [(0.4, True), (0.6, False)])
@on_virtual_time
async def test_the_handler_s_time_is_not_the_wrapper_s(behind_s: float, well: bool) -> None:
    async def wrap(request: Any, _: Call, proceed: Any) -> Any:
        await anyio.sleep(1.5)
        reply = await proceed(request)
        await anyio.sleep(behind_s)
        return reply

    serve = lambda kernel: kernel.bus.serve(Guess, slow, owner="slow")  # noqa: E731
    async with running_plugins(wrapping(Guess, wrap, deadline_s=2.0), register=serve) as plugins:
        if well:
            assert await plugins.kernel.bus.ask(Guess()) == 1
        else:
            await refused(plugins.kernel.bus.ask(Guess()))
        assert plugins.plugin().failed == (0 if well else 1)


@pytest.mark.parametrize(("behind_s", "well"), [(1.5, True), (2.5, False)])
@on_virtual_time
async def test_a_wrapper_may_proceed_twice_at_once(behind_s: float, well: bool) -> None:
    async def wrap(request: Any, _: Call, proceed: Any) -> Any:
        both = await asyncio.gather(proceed(request), proceed(request))
        await anyio.sleep(behind_s)
        return sum(both)

    serve = lambda kernel: kernel.bus.serve(Guess, slow, owner="slow")  # noqa: E731
    async with running_plugins(wrapping(Guess, wrap, deadline_s=2.0), register=serve) as plugins:
        if well:
            assert await plugins.kernel.bus.ask(Guess()) == 2
        else:
            await refused(plugins.kernel.bus.ask(Guess()))
        assert plugins.plugin().failed == (0 if well else 1)


@on_virtual_time
async def test_disabling_a_plugin_does_not_cancel_the_wrapped_handler() -> None:
    async with running_plugins(
        wrapping(Guess, pass_on), register=lambda kernel: kernel.bus.serve(Guess, slow, owner="slow")
    ) as plugins:
        pending = plugins.kernel.bus.submit(Guess(), call())
        await anyio.sleep(1)
        await plugins.disable()
        assert await pending.wait() == 1


@on_virtual_time
async def test_disabling_a_plugin_ends_its_running_wrapper() -> None:
    async with running_plugins(wrapping(Add, hang, deadline_s=60.0)) as plugins:
        pending = plugins.kernel.submit()
        await anyio.sleep(1)
        await plugins.disable()
        assert (await refused(pending.wait())).code == "plugin_left_out"
        assert (plugins.plugin().failed, plugins.kernel.clock.monotonic() < 2) == (0, True)


@on_virtual_time
async def test_callers_deadline_applies_to_wrapper_and_handler() -> None:
    async with running_plugins(
        wrapping(Guess, pass_on), register=lambda kernel: kernel.bus.serve(Guess, slow, owner="slow")
    ) as plugins:
        assert (await refused(plugins.kernel.bus.ask(Guess(), call(timeout_s=1.0)))).code == "deadline_exceeded"
        assert (plugins.plugin().failed, plugins.kernel.bus.dispatcher.in_flight) == (0, 0)


@on_virtual_time
async def test_wrappers_are_within_each_other_the_last_outermost() -> None:
    def adding(text: str) -> Any:
        async def wrap(request: Any, _: Call, proceed: Any) -> str:
            return f"{text}{await proceed(request)}"

        return wrap

    def serve(kernel: Kernel) -> None:
        kernel.bus.serve(Vote, lambda *_: "c", owner="x")

    async with running_plugins(wrapping(Vote, adding("b")), wrapping(Vote, adding("a")), register=serve) as plugins:
        assert await plugins.kernel.bus.ask(Vote()) == "abc"
        await plugins.disable("two")
        assert await plugins.kernel.bus.ask(Vote()) == "bc"


async def test_a_wrapper_that_holds_up_the_loop_is_interrupted_and_the_handler_within_it_is_not() -> None:
    guard = AlarmGuard()
    try:
        await hold_up(guard)
    finally:
        guard.close()


async def hold_up(guard: AlarmGuard) -> None:
    def spin() -> None:
        while True:
            pass

    async def wrap(request: Guess, _: Call, proceed: Any) -> Any:
        if request.number:
            spin()
        return await proceed(request)

    def long(*_: Any) -> int:
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            pass
        return 1

    def serve(kernel: Kernel) -> None:
        kernel.bus.serve(Guess, long, owner="long")

    async with running_plugins(wrapping(Guess, wrap), register=serve, guard=guard, block_max_s=0.2) as plugins:
        assert await plugins.kernel.bus.ask(Guess(0)) == 1
        for _ in range(FAILURES_MAX):
            assert "blocked the daemon" in (await refused(plugins.kernel.bus.ask(Guess(1)))).message
        assert plugins.state() is PluginState.QUARANTINED
        assert await plugins.kernel.bus.ask(Guess(1)) == 1


# Invalid registrations.


def twice(context: PluginContext) -> None:
    context.serve(Guess, plus_one)
    context.serve(Guess, plus_one)


def replace_twice(context: PluginContext) -> None:
    context.replace(Add, plus_one)
    context.replace(Add, plus_one)


def serve_and_replace(context: PluginContext) -> None:
    context.serve(Guess, plus_one)
    context.replace(Guess, plus_one)


@pytest.mark.parametrize(
    ("register", "reason"),
    [
        (lambda context: context.serve(Add, plus_one), "tally serves Add already"),
        (lambda context: context.replace(Guess, plus_one), "Guess has no handler"),
        (lambda context: context.wrap(Guess, pass_on), "Guess has no handler"),
        (twice, "more than once"),
        (replace_twice, "more than once"),
        (serve_and_replace, "more than once"),
        *(
            (lambda context, request=request: context.replace(request, plus_one), "manages plugins")
            for request in REQUESTS
        ),
        *((lambda context, request=request: context.wrap(request, pass_on), "manages plugins") for request in REQUESTS),
    ],
)
@on_virtual_time
async def test_invalid_registration_is_refused_as_a_whole_and_the_daemon_starts(
    register: Callable[[PluginContext], None], reason: str
) -> None:
    def greedy(context: PluginContext) -> None:
        context.on(Fact, raising(ValueError()), name="ears")
        context.follow(Fact, raising(ValueError()), name="feet")
        context.on_signal(Tick, raising(ValueError()), name="nose")
        context.every(0.1, raising(ValueError()), name="pulse")
        context.wrap(ReadTotal, hang)
        context.command("cut", raising(ValueError()))
        context.on_stop(raising(ValueError()))
        register(context)

    async with running_plugins(greedy) as plugins:
        bus = plugins.kernel.bus
        assert plugins.state() is PluginState.REFUSED
        assert reason in str(plugins.plugin().reason)
        assert (bus.mailboxes, bus.followers, bus.slots, bus.owners) == ({}, {}, {}, {})
        assert set(bus.requests.routes) == {Add, ReadTotal, *REQUESTS}
        assert await plugins.kernel.add() == 1
        await anyio.sleep(1)
        await plugins.host.stop()
        view = await plugins.view()
        assert (view.parts, view.commands, view.failed) == ([], [], 0)


@on_virtual_time
async def test_first_of_two_replacements_of_a_request_is_loaded() -> None:
    replaces = [lambda context, number=number: context.replace(ReadTotal, lambda *_: number) for number in (1, 2)]
    async with running_plugins(*replaces) as plugins:
        assert await plugins.kernel.bus.ask(ReadTotal()) == 1
        assert "another plugin replaces the handler of ReadTotal" in str(plugins.plugin("two").reason)


@on_virtual_time
async def test_plugin_may_wrap_the_handler_of_another_plugin() -> None:
    async with running_plugins(lambda context: context.serve(Guess, plus_one), wrapping(Guess, pass_on)) as plugins:
        assert await plugins.kernel.bus.ask(Guess(1)) == 2


def test_plugin_management_requests_cannot_be_wrapped_or_replaced() -> None:
    assert set(REQUESTS) == {ListPlugins, EnablePlugin, DisablePlugin, RunPluginCommand}
