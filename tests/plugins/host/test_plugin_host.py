from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from forged.auth.model import Principal, Role
from forged.errors import ConfigError, ForgedError, RequestRefused, Unavailable
from forged.kernel.bus.model import HandlerFailed
from forged.kernel.messages import Call
from forged.plugins.alarm_guard import AlarmGuard
from forged.plugins.context import PluginContext
from forged.plugins.host.call_limits import GRACE_S
from forged.plugins.host.plugin import RECENT_S, PluginLimits
from forged.plugins.host.plugin_host import BURST_S, COMMAND_TIMEOUT_S, STOP_TIMEOUT_S, PluginSource
from forged.plugins.model import (
    CommandView,
    PluginDisabled,
    PluginEnabled,
    PluginQuarantined,
    PluginRefused,
    PluginState,
    RunPluginCommand,
)
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import Add, Added, Kernel, ReadTotal, call, on_virtual_time, running
from tests.plugins.plugin_fixture import (
    FAILURES_MAX,
    Contexts,
    Guess,
    ReportException,
    Said,
    on,
    running_plugins,
    source,
)


def quiet(context: PluginContext) -> None:
    """Registers nothing."""


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise error

    return act


async def hang(*_: Any) -> Any:
    await asyncio.Event().wait()


async def stubborn(*_: Any) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def refused(work: Any) -> ForgedError:
    """The error that something ends with."""
    with pytest.raises(ForgedError) as caught:
        await work
    return caught.value


def fails_at(error: BaseException) -> PluginSource:
    def load() -> Any:
        raise error

    return PluginSource("one", "a test", load)


# Loading.


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (source(quiet, name="Bad Name"), "plugin name must match"),
        (source(quiet, name="x" * 65), "plugin name must match"),
        (source(quiet, API_VERSION=None), "does not define API_VERSION; this daemon supports 1"),
        (source(quiet, API_VERSION=2), "has API_VERSION = 2"),
        (source(quiet, API_VERSION="1"), "has API_VERSION = '1'"),
        (source(None), "it has no register function"),
        (source(7), "it has no register function"),  # type: ignore[arg-type]
        (source(hang), "register must be a plain function"),
        (source(raising(ValueError("boom"))), "ValueError: boom"),
        (source(raising(SystemExit(1))), "raised SystemExit"),
        (source(raising(KeyboardInterrupt())), "raised KeyboardInterrupt"),
        (source(raising(asyncio.CancelledError())), "raised CancelledError"),
        (source(raising(StopIteration())), "StopIteration"),
        (source(raising(ValueError("caf\udce9"))), "caf\\udce9"),
        (fails_at(SyntaxError("what?")), "SyntaxError: what?"),
        (fails_at(SystemExit("bye")), "raised SystemExit: bye"),
        (
            fails_at(ConfigError("plugin_mode", "not yours: caf\udce9", "chmod go-w")),
            "not yours: caf\\udce9 (chmod go-w)",
        ),
    ],
)
@on_virtual_time
async def test_plugin_that_cannot_be_loaded_is_recorded_with_the_reason_and_the_daemon_starts(
    found: PluginSource, reason: str
) -> None:
    async with running_plugins(found) as plugins:
        (fact,) = plugins.kernel.facts(PluginRefused)
        assert (fact.plugin, reason in fact.reason) == (found.name, True)
        view = await plugins.view(found.name)
        assert (view.state, view.reason) == (PluginState.REFUSED, fact.reason)
        assert await plugins.kernel.add() == 1
        assert (await refused(plugins.enable(found.name))).code == "plugin_not_loaded"
        await plugins.disable(found.name)
        assert [plugin.name for plugin in plugins.host.refused] == [found.name]


@on_virtual_time
async def test_plugin_exception_is_reported_with_traceback_and_a_refusal_is_not() -> None:
    broken, mistake = ReportException(), ValueError("boom")

    def register(kernel: Kernel) -> None:
        kernel.bus.on_handler_bug = broken

    refusal = ConfigError("no", "no", "")
    async with running_plugins(raising(mistake), raising(refusal), register=register):
        assert broken.told == [("one", mistake)]


@on_virtual_time
async def test_refused_plugin_does_not_affect_other_plugins() -> None:
    async with running_plugins(raising(ValueError()), on(Added, lambda _: None), raising(SystemExit())) as plugins:
        assert [plugins.state(name) for name in ("one", "two", "three")] == [
            PluginState.REFUSED,
            PluginState.ACTIVE,
            PluginState.REFUSED,
        ]


@pytest.mark.parametrize("where", ["import", "register"])
async def test_plugin_over_the_load_timeout_is_refused(where: str) -> None:
    def spin(*_: Any) -> Any:
        while True:
            time.sleep(0.001)

    found = PluginSource("one", "a test", spin) if where == "import" else source(spin)
    guard = AlarmGuard()
    try:
        async with running_plugins(found, guard=guard, load_timeout_s=0.05) as plugins:
            assert "blocked the daemon for more than 0.05 s" in str(plugins.plugin().reason)
            assert await plugins.kernel.add() == 1
    finally:
        guard.close()


@on_virtual_time
async def test_a_module_that_answers_for_its_attributes_does_so_as_a_plugin() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise SystemExit(name)

    async with running_plugins(PluginSource("one", "a test", lambda: Odd())) as plugins:  # type: ignore[arg-type, return-value]
        assert "raised SystemExit: API_VERSION" in str(plugins.plugin().reason)


@on_virtual_time
async def test_the_version_is_the_package_s_or_the_module_s() -> None:
    sources = (
        source(quiet, "one", __version__="1.2"),
        PluginSource("two", "a package", source(quiet, __version__="1.2").load, "3.4"),
        source(quiet, "three", __version__="\udce9" * 100),
    )
    async with running_plugins(*sources) as plugins:
        versions = [(await plugins.view(name)).version for name in ("one", "two", "three")]
        assert versions == ["1.2", "3.4", ("\\udce9" * 100)[:64]]


@on_virtual_time
async def test_the_settings_of_a_plugin_reach_it_without_the_key_that_is_the_daemon_s() -> None:
    contexts = Contexts()
    async with running_plugins(contexts, settings={"one": {"enabled": True, "url": "x"}}):
        assert contexts.context.config == {"url": "x"}


@on_virtual_time
async def test_a_plugin_that_is_disabled_in_the_settings_is_not_even_loaded() -> None:
    async with running_plugins(fails_at(AssertionError()), settings={"one": {"enabled": False}}) as plugins:
        view = await plugins.view()
        assert (view.state, view.reason) == (PluginState.DISABLED, "enabled = false in the settings")
        assert plugins.kernel.facts(PluginRefused) == []
        assert (await refused(plugins.enable())).code == "plugin_not_loaded"
        await plugins.disable()
        assert plugins.kernel.facts(PluginDisabled) == []


@on_virtual_time
async def test_settings_of_a_missing_plugin_are_shown_as_refused() -> None:
    async with running_plugins(quiet, settings={"one": {}, "webhok": {}}) as plugins:
        view = await plugins.view("webhok")
        assert (view.state, view.reason, view.origin) == (
            PluginState.REFUSED,
            "no plugin of this name was found",
            "the settings",
        )


class Settings(msgspec.Struct):
    url: str
    times: int = 3


@on_virtual_time
async def test_all_invalid_plugin_settings_are_reported_at_once() -> None:
    settings = {"one": {"ulr": "x", "times": "many"}}
    async with running_plugins(lambda context: context.settings(Settings), settings=settings) as plugins:
        plugin = plugins.plugin()
        assert [problem.key for problem in plugin.problems] == [
            "plugins.one.ulr",
            "plugins.one.times",
            "plugins.one.url",
        ]
        assert all(key in str(plugin.reason) for key in ("ulr", "times", "url"))


@on_virtual_time
async def test_second_plugin_with_the_same_name_is_reported_and_not_loaded() -> None:
    second = PluginSource("one", "elsewhere", source(raising(AssertionError())).load)
    async with running_plugins(source(quiet), second) as plugins:
        assert plugins.plugin().active
        assert "elsewhere has a plugin of the same name" in str((await plugins.view()).reason)


@on_virtual_time
async def test_list_shows_plugins_and_their_parts() -> None:
    def register(context: PluginContext) -> None:
        context.on(Added, lambda _: None, name="ears")
        context.follow([Added, Said], lambda _: None, name="feet")
        context.serve(Guess, lambda *_: 1)
        context.replace(ReadTotal, lambda *_: 1)
        context.wrap(Add, hang)
        context.every(2, lambda: None, name="pulse")
        context.command("status", lambda _: None, help="how it is")

    async with running_plugins(register) as plugins:
        view = await plugins.view()
        assert (view.name, view.origin, view.state, view.reason) == ("one", "a test", PluginState.ACTIVE, None)
        assert view.parts == [
            "observes Added",
            "follows Added, Said",
            "serves Guess",
            "replaces ReadTotal",
            "wraps Add",
            "every 2 s",
        ]
        assert view.commands == [CommandView("status", "how it is")]
        assert plugins.host.views == [view]


@on_virtual_time
async def test_registering_is_over_when_register_has_returned() -> None:
    contexts = Contexts()
    async with running_plugins(contexts):
        with pytest.raises(RuntimeError, match=r"only in register\(\)"):
            contexts.context.on(Added, lambda _: None, name="late")
        with pytest.raises(RuntimeError):
            contexts.context.command("late", lambda _: None)


@on_virtual_time
async def test_plugin_context_has_the_history_of_the_facts() -> None:
    contexts, heard = Contexts(), list[str]()

    def register(context: PluginContext) -> None:
        contexts(context)
        heard.append(context.history)
        context.on(Added, lambda _: heard.append(context.history), name="part")

    async with running_plugins(register) as plugins:
        await plugins.kernel.add()
        await plugins.kernel.settle()
        assert heard == ["", "a history"]


# Quarantine.


@on_virtual_time
async def test_quarantine_covers_all_parts_of_a_plugin() -> None:
    beats: list[float] = []
    heard: list[int] = []

    def register(context: PluginContext) -> None:
        context.on(Added, lambda record: heard.append(record.id), name="ears")
        context.follow(Added, lambda records: heard.extend(record.id for record in records), name="feet")
        context.every(1.0, lambda: beats.append(context.clock.monotonic()), name="pulse")
        context.serve(Guess, lambda *_: 1)
        context.replace(ReadTotal, lambda *_: 99)
        context.wrap(Add, hang, deadline_s=1.0)
        context.command("break", raising(ValueError("boom")))

    async with running_plugins(register) as plugins:
        for _ in range(FAILURES_MAX):
            assert (await refused(plugins.run("break"))).code == "plugin_broken"
        assert plugins.state() is PluginState.QUARANTINED
        beats.clear()
        assert await plugins.kernel.add(2) == 2
        await anyio.sleep(30)
        assert (heard, beats) == ([], [])
        assert await plugins.kernel.bus.ask(ReadTotal()) == 2
        for request in (Guess(), RunPluginCommand("one", "break")):
            assert (await refused(plugins.kernel.bus.ask(request, call()))).code == "plugin_left_out"
        assert plugins.quarantines() == [PluginQuarantined("one", "one/break", FAILURES_MAX, "ValueError: boom")]
        assert (await plugins.view()).reason == "one/break: ValueError: boom"


@on_virtual_time
async def test_a_plugin_that_is_enabled_again_has_a_clean_record_and_all_its_work() -> None:
    heard: list[int] = []
    broken = True

    def hear(record: Any) -> None:
        heard.append(record.id)
        if broken:
            raise ValueError("boom")

    async with running_plugins(on(Added, hear)) as plugins:
        for _ in range(FAILURES_MAX):
            await plugins.kernel.add()
            await plugins.kernel.settle()
        assert not plugins.plugin().active
        await plugins.enable()
        for _ in range(FAILURES_MAX - 1):
            await plugins.kernel.add()
            await anyio.sleep(0.1)
        assert plugins.plugin().active
        broken = False
        await plugins.kernel.add()
        await plugins.kernel.settle()
        assert len(heard) == 2 * FAILURES_MAX
        assert len(plugins.quarantines()) == 1
        assert plugins.kernel.facts(PluginEnabled) == [PluginEnabled("one")]


@on_virtual_time
async def test_enabling_and_disabling_twice_is_no_error_and_one_fact() -> None:
    async with running_plugins(quiet) as plugins:
        await plugins.enable()
        for _ in range(2):
            await plugins.disable()
        assert (await plugins.view()).reason == "disabled by an operator"
        for _ in range(2):
            await plugins.enable()
        await plugins.kernel.settle()
        assert plugins.kernel.facts(PluginDisabled) == [PluginDisabled("one")]
        assert plugins.kernel.facts(PluginEnabled) == [PluginEnabled("one")]


@on_virtual_time
async def test_a_plugin_in_quarantine_may_be_disabled() -> None:
    async with running_plugins(lambda context: context.command("break", raising(ValueError()))) as plugins:
        for _ in range(FAILURES_MAX):
            await refused(plugins.run("break"))
        await plugins.disable()
        assert plugins.state() is PluginState.DISABLED
        await plugins.enable()
        assert plugins.plugin().active


@on_virtual_time
async def test_plugins_can_be_disabled_and_enabled_while_nothing_can_be_written() -> None:
    store = FaultyStore()
    async with running_plugins(quiet, store=store) as plugins:
        store.commit_error = full()
        await refused(plugins.kernel.add())
        await plugins.disable()
        assert plugins.state() is PluginState.DISABLED
        await plugins.enable()
        assert plugins.plugin().active
        store.commit_error = None
        await anyio.sleep(10)
        facts = [*plugins.kernel.facts(PluginDisabled), *plugins.kernel.facts(PluginEnabled)]
        assert facts == [PluginDisabled("one"), PluginEnabled("one")]


@on_virtual_time
async def test_unknown_plugin_cannot_be_enabled_or_disabled() -> None:
    async with running_plugins() as plugins:
        for work in (plugins.enable("nobody"), plugins.disable("nobody"), plugins.run("x", "nobody")):
            assert (await refused(work)).code == "plugin_unknown"


@on_virtual_time
async def test_a_refusal_before_the_store_takes_writes_is_put_on_record_once_it_does() -> None:
    store = FaultyStore()
    store.commit_error = full()
    async with running_plugins(raising(ValueError("boom")), store=store) as plugins:
        await anyio.sleep(5)
        assert plugins.kernel.facts(PluginRefused) == []
        store.commit_error = None
        await anyio.sleep(5)
        assert plugins.kernel.facts(PluginRefused) == [PluginRefused("one", "ValueError: boom")]


@on_virtual_time
async def test_plugin_that_fails_every_second_time_is_quarantined() -> None:
    async def flap(record: Any) -> None:
        if record.fact.total % 2:
            raise ValueError("boom")

    async with running_plugins(on(Added, flap), failures_max=5) as plugins:
        for _ in range(60):
            await plugins.kernel.add()
            await anyio.sleep(RECENT_S / 60)
        assert plugins.state() is PluginState.QUARANTINED


@on_virtual_time
async def test_a_part_that_runs_when_its_plugin_disables_itself_ends_well() -> None:
    contexts, went_on = Contexts(), list[str]()

    async def give_up(_: dict[str, Any]) -> str:
        await plugins.disable()
        await anyio.sleep(1)
        went_on.append("on")
        return "done"

    def register(context: PluginContext) -> None:
        contexts(context)
        context.command("quit", give_up)

    async with running_plugins(register) as plugins:
        assert (await refused(plugins.run("quit"))).code == "plugin_left_out"
        assert (went_on, plugins.plugin().failed) == ([], 0)
        assert await plugins.kernel.add() == 1


@on_virtual_time
async def test_limits_that_change_hold_at_once() -> None:
    async with running_plugins(lambda context: context.command("break", raising(ValueError()))) as plugins:
        await refused(plugins.run("break"))
        plugins.host.set_limits(PluginLimits(failures_max=2))
        await refused(plugins.run("break"))
        assert not plugins.plugin().active


# Publishing.


async def say(contexts: Contexts, count: int = 1, **more: Any) -> None:
    await contexts.context.publish(*(Said(str(number)) for number in range(count)), **more)


@on_virtual_time
async def test_published_fact_is_recorded_with_cause_job_and_plugin() -> None:
    contexts = Contexts()
    async with running_plugins(contexts) as plugins:
        await plugins.kernel.add()
        cause = plugins.kernel.journal.last
        await contexts.context.publish(Said("a"), Said("b"), job="j", cause=cause)
        records = plugins.kernel.journal.after(cause, 10)
        assert [(one.fact, one.job, one.cause, one.origin) for one in records] == [
            (Said("a"), "j", cause, "plugin one"),
            (Said("b"), "j", cause, "plugin one"),
        ]
        assert (await plugins.view()).published == 2


@on_virtual_time
async def test_publish_returns_when_the_fact_is_durable() -> None:
    store, contexts = FaultyStore(), Contexts()
    async with running_plugins(contexts, store=store) as plugins:
        store.block()
        with anyio.move_on_after(10) as scope:
            await say(contexts)
        assert scope.cancelled_caught
        store.unblock()
        await plugins.kernel.settle()
        assert len(plugins.kernel.facts(Said)) == 1


@on_virtual_time
async def test_plugin_that_publishes_too_fast_is_refused_and_then_quarantined() -> None:
    contexts = Contexts()
    async with running_plugins(contexts, facts_per_s_max=10.0) as plugins:
        for _ in range(int(BURST_S * 10)):
            await say(contexts)
        for _ in range(FAILURES_MAX):
            assert plugins.plugin().active
            assert (await refused(say(contexts))).code == "plugin_storm"
        assert (await refused(say(contexts))).code == "plugin_left_out"
        await plugins.kernel.settle()
        assert len(plugins.kernel.facts(Said)) == BURST_S * 10
        (quarantined,) = plugins.quarantines()
        assert quarantined.reason == "more than 10 facts per second"


@on_virtual_time
async def test_a_plugin_that_publishes_steadily_within_the_rate_is_never_refused() -> None:
    contexts = Contexts()
    async with running_plugins(contexts, facts_per_s_max=10.0) as plugins:
        for _ in range(200):
            await say(contexts)
            await anyio.sleep(0.1)
        assert len(plugins.kernel.facts(Said)) == 200


@pytest.mark.parametrize(
    ("facts", "more", "code"),
    [
        ([HandlerFailed("x", 1, "x")], {}, "fact_foreign"),
        (["text"], {}, "fact_type_invalid"),
        ([Said("x", object())], {}, "fact_unfit"),
        ([Said("caf\udce9")], {}, "fact_unfit"),
        ([Said(7)], {}, "fact_unfit"),  # type: ignore[arg-type]
        ([Said("x", 1 << 70)], {}, "fact_unfit"),
        ([Said("x" * 100_000)], {}, "fact_too_large"),
        ([Said("x")] * 65, {}, "facts_too_many"),
        ([Said("x")], {"cause": 99}, "cause_unknown"),
        ([Said("x")], {"cause": -1}, "cause_unknown"),
        ([Said("x")], {"cause": 1.0}, "cause_unknown"),
        ([Said("x")], {"cause": True}, "cause_unknown"),
        ([Said("x")], {"job": 5}, "fact_unfit"),
        ([Said("x")], {"job": "caf\udce9"}, "fact_unfit"),
    ],
)
@on_virtual_time
async def test_invalid_fact_is_refused_without_a_state_reload(
    facts: list[Any], more: dict[str, Any], code: str
) -> None:
    store, contexts = FaultyStore(), Contexts()
    async with running_plugins(contexts, store=store) as plugins:
        await plugins.kernel.add()
        assert (await refused(contexts.context.publish(*facts, **more))).code == code
        assert (plugins.kernel.ledger.reloads, plugins.kernel.facts(Said), plugins.plugin().failed) == (1, [], 0)
        assert await plugins.kernel.add() == 2
    async with running(store) as kernel:
        assert await kernel.add() == 3


@on_virtual_time
async def test_nothing_can_be_published_while_nothing_can_be_written() -> None:
    store, contexts = FaultyStore(), Contexts()
    async with running_plugins(contexts, store=store) as plugins:
        store.commit_error = full()
        await refused(plugins.kernel.add())
        for _ in range(2 * FAILURES_MAX):
            assert isinstance(await refused(say(contexts)), Unavailable)
        assert (plugins.plugin().active, plugins.plugin().failed) == (True, 0)
        store.commit_error = None
        await plugins.kernel.ledger.writable()
        await say(contexts)


@on_virtual_time
async def test_publishing_no_facts_is_allowed() -> None:
    contexts = Contexts()
    async with running_plugins(contexts) as plugins:
        await contexts.context.publish()
        assert (plugins.plugin().published, plugins.plugin().handled, len(plugins.kernel.journal)) == (0, 0, 0)


@on_virtual_time
async def test_inactive_plugin_cannot_publish_or_send_requests() -> None:
    contexts = Contexts()
    async with running_plugins(contexts) as plugins:
        await plugins.disable()
        assert (await refused(say(contexts))).code == "plugin_left_out"
        assert (await refused(contexts.context.ask(Add()))).code == "plugin_left_out"


# Requests.


@on_virtual_time
async def test_a_plugin_asks_in_its_own_name_with_a_cause() -> None:
    contexts = Contexts()
    async with running_plugins(contexts) as plugins:
        await plugins.kernel.add()
        assert await contexts.context.ask(Add(2), cause=1) == 3
        record = plugins.kernel.journal.get(plugins.kernel.journal.last)
        assert record is not None
        assert (record.cause, record.origin) == (1, "plugin one")
        assert (await refused(contexts.context.ask(Add(), cause=99))).code == "cause_unknown"
        assert plugins.kernel.ledger.reloads == 1


@on_virtual_time
async def test_a_plugin_waits_no_longer_for_an_answer_than_it_says() -> None:
    contexts = Contexts()
    async with running_plugins(contexts, register=lambda kernel: kernel.bus.serve(Guess, hang, owner="x")):
        assert (await refused(contexts.context.ask(Guess(), timeout_s=2.0))).code == "deadline_exceeded"


# Periodic work.


@on_virtual_time
async def test_periodic_work_never_overlaps_and_pauses_between_runs() -> None:
    began: list[float] = []
    running_now = 0

    async def take_time() -> None:
        nonlocal running_now
        assert not running_now
        running_now += 1
        began.append(asyncio.get_running_loop().time())
        await anyio.sleep(2.5)
        running_now -= 1

    async with running_plugins(lambda context: context.every(1.0, take_time)):
        await anyio.sleep(11)
        assert began == pytest.approx([1.0, 4.5, 8.0])


@on_virtual_time
async def test_periodic_work_continues_after_a_failure_and_ends_after_many() -> None:
    count = 0

    def act() -> None:
        nonlocal count
        count += 1
        if count != 2:
            raise ValueError("boom")

    async with running_plugins(lambda context: context.every(1.0, act)) as plugins:
        await anyio.sleep(60)
        assert (count, plugins.state()) == (2 + FAILURES_MAX, PluginState.QUARANTINED)
        await plugins.enable()
        await anyio.sleep(60)
        assert count == 2 + 2 * FAILURES_MAX


@on_virtual_time
async def test_refused_request_is_a_failure_without_an_exception_report() -> None:
    broken = ReportException()

    def register(kernel: Kernel) -> None:
        kernel.bus.on_handler_bug = broken

    refusal = RequestRefused("no", "no", "")
    async with running_plugins(
        lambda context: context.every(1.0, raising(refusal), name="e"), register=register
    ) as plugins:
        await anyio.sleep(1.5)
        assert (plugins.plugin().failed, broken.told) == (1, [])


async def test_a_task_that_a_plugin_starts_may_not_hold_up_the_loop_either() -> None:
    async def spin() -> None:
        while True:
            pass

    async def start(_: dict[str, Any]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(spin())

    guard = AlarmGuard()
    try:
        async with running_plugins(
            lambda context: context.command("start", start), guard=guard, block_max_s=0.05
        ) as plugins:
            assert (await refused(plugins.run("start"))).code == "plugin_broken"
            assert await plugins.kernel.add() == 1
    finally:
        guard.close()


@pytest.mark.parametrize("act", [hang, stubborn])
@on_virtual_time
async def test_hanging_periodic_work_is_restarted_until_the_plugin_is_quarantined(act: Any) -> None:
    async with running_plugins(lambda context: context.every(1.0, act, deadline_s=2.0)) as plugins:
        await anyio.sleep(60)
        assert (plugins.state(), plugins.plugin().failed, plugins.plugin().turns) == (
            PluginState.QUARANTINED,
            FAILURES_MAX,
            {},
        )
        await plugins.enable()
        assert plugins.plugin().active


@on_virtual_time
async def test_periodic_work_of_a_disabled_plugin_does_not_run() -> None:
    beats: list[int] = []
    async with running_plugins(lambda context: context.every(1.0, lambda: beats.append(1), name="pulse")) as plugins:
        await plugins.disable()
        await anyio.sleep(60)
        assert beats == []
        await plugins.enable()
        await anyio.sleep(10.5)
        assert len(beats) == 11


# Commands.


@on_virtual_time
async def test_a_command_has_its_arguments_and_its_result() -> None:
    async def later(arguments: dict[str, Any]) -> Any:
        await anyio.sleep(1)
        return arguments | {"more": [1, b"raw", None]}

    def register(context: PluginContext) -> None:
        context.command("now", lambda arguments: len(arguments))
        context.command("later", later)

    async with running_plugins(register) as plugins:
        assert await plugins.run("now", a=1, b=2) == 2
        assert await plugins.run("later", a=1) == {"a": 1, "more": [1, b"raw", None]}
        assert (await refused(plugins.run("never"))).code == "command_unknown"


@on_virtual_time
async def test_command_result_is_converted_to_sendable_values() -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    results: dict[str, Any] = {
        "moment": moment,
        "path": Path("/x"),
        "struct": Said("x"),
        "set": {1},
        "number": math.inf,
    }
    async with running_plugins(lambda context: context.command("show", lambda _: results)) as plugins:
        shown = await plugins.run("show")
        msgspec.msgpack.encode(shown)
        assert shown == {
            "moment": "2026-01-02T00:00:00Z",
            "path": "/x",
            "struct": {"text": "x", "more": None},
            "set": [1],
            "number": math.inf,
        }


def endless() -> list[Any]:
    it: list[Any] = []
    it.append(it)
    return it


@pytest.mark.parametrize("result", ["caf\udce9", 1 << 70, endless()])
@on_virtual_time
async def test_unsendable_command_result_is_a_plugin_failure(result: Any) -> None:
    async with running_plugins(lambda context: context.command("show", lambda _: result)) as plugins:
        assert (await refused(plugins.run("show"))).code == "plugin_broken"
        assert plugins.plugin().failed == 1


@on_virtual_time
async def test_a_command_needs_the_role_that_it_says() -> None:
    def register(context: PluginContext) -> None:
        context.command("look", lambda _: "seen", needs=Role.VIEWER)
        context.command("touch", lambda _: "done")

    viewer = Call(Principal("a viewer", Role.VIEWER), "a test")
    async with running_plugins(register) as plugins:
        assert await plugins.kernel.bus.ask(RunPluginCommand("one", "look"), viewer) == "seen"
        error = await refused(plugins.kernel.bus.ask(RunPluginCommand("one", "touch"), viewer))
        assert (error.code, plugins.plugin().failed) == ("forbidden", 0)


@on_virtual_time
async def test_command_may_refuse_and_a_hanging_command_times_out() -> None:
    def register(context: PluginContext) -> None:
        context.command("refuse", raising(RequestRefused("no", "no", "")))
        context.command("hang", hang)

    async with running_plugins(register) as plugins:
        assert (await refused(plugins.run("refuse"))).code == "no"
        assert (await refused(plugins.run("hang"))).code == "plugin_broken"
        assert plugins.kernel.clock.monotonic() == pytest.approx(COMMAND_TIMEOUT_S, abs=0.1)
        assert plugins.plugin().failed == 1


# Stopping.


@on_virtual_time
async def test_every_plugin_is_stopped_even_if_another_fails() -> None:
    ended: list[str] = []

    async def end() -> None:
        await anyio.sleep(1)
        ended.append("async")

    def register(context: PluginContext) -> None:
        for action in (
            hang,
            stubborn,
            raising(ValueError()),
            raising(SystemExit()),
            end,
            lambda: ended.append("plain"),
        ):
            context.on_stop(action)

    async with running_plugins(register, failures_max=100) as plugins:
        await plugins.host.stop()
        assert sorted(ended) == ["async", "plain"]
        assert plugins.kernel.clock.monotonic() <= STOP_TIMEOUT_S + GRACE_S + 0.1


@on_virtual_time
async def test_inactive_plugin_is_stopped_too() -> None:
    ended: list[str] = []
    async with running_plugins(lambda context: context.on_stop(lambda: ended.append("it"))) as plugins:
        await plugins.disable()
        await plugins.host.stop()
        assert ended == ["it"]


@on_virtual_time
async def test_a_part_that_ignores_its_cancellation_does_not_keep_the_daemon_from_ending() -> None:
    def register(context: PluginContext) -> None:
        context.on(Added, stubborn, deadline_s=1e6)
        context.follow(Added, stubborn, name="f", deadline_s=1e6)
        context.every(1.0, stubborn, name="e", deadline_s=1e6)
        context.serve(Guess, stubborn, deadline_s=1e6)

    async with running_plugins(register) as plugins:
        await plugins.kernel.add()
        plugins.kernel.bus.submit(Guess(), call())
        await anyio.sleep(5)
        assert len(plugins.plugin().turns) == 4


@on_virtual_time
async def test_failures_that_were_counted_are_not_counted_twice() -> None:
    """One failure of an observer is one of the plugin, also where the observer failed because it was refused."""
    contexts = Contexts()

    async def hear(_: Any) -> None:
        await contexts.context.publish(Said("x", object()))

    def register(context: PluginContext) -> None:
        contexts(context)
        context.on(Added, hear)

    async with running_plugins(register) as plugins:
        await plugins.kernel.add()
        await plugins.kernel.settle()
        await anyio.sleep(1)
        assert plugins.plugin().failed == 1
