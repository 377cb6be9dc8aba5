from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import msgspec
import pytest

from forged.auth.model import Principal, Role
from forged.config.messages import (
    REQUESTS,
    ConfigRefused,
    ConfigReloaded,
    ConfigView,
    ReloadConfig,
    Reloaded,
    Setting,
    ShowConfig,
)
from forged.config.model import Config
from forged.config.redaction import HIDDEN
from forged.config.service import ConfigService, SettingsPort
from forged.errors import ConfigError, Problem, RequestRefused, Unavailable
from forged.kernel.messages import Call, Decision
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import Added, Kernel, call, on_virtual_time, running

AT_START = Config(data_dir="/d", socket="/s", plugins={"webhook": {"url": "u", "secret": "hush", "list": [{"a": 1}]}})


class RecordingSettings:
    """A settings port that records what is applied."""

    def __init__(self) -> None:
        self.wanted = AT_START
        self.error: Exception | None = None
        self.applied: list[Config] = []
        self.reading = 0
        self.reads = 0
        self.gate = anyio.Event()
        self.gate.set()
        self.asked = anyio.Event()

    def register(self, kernel: Kernel) -> None:
        port = SettingsPort(reload=self.read, defaults=replace(AT_START, plugins={}), source="/f.toml")
        self.service = ConfigService(kernel.bus, port, self.applied.append, AT_START)

    async def read(self) -> Config:
        assert self.reading == 0, "two are read at once"
        self.reading += 1
        self.reads += 1
        self.asked.set()
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return self.wanted
        finally:
            self.reading -= 1


async def setting(kernel: Kernel, key: str) -> Setting:
    view: ConfigView = await kernel.bus.ask(ShowConfig())
    return next(setting for setting in view.settings if setting.key == key)


Test = Callable[[Kernel, RecordingSettings], Awaitable[None]]


def with_config_service(test: Test) -> Callable[[], None]:
    async def prepared() -> None:
        settings = RecordingSettings()
        async with running(register=settings.register, requests=REQUESTS) as kernel:
            await test(kernel, settings)

    prepared.__name__ = test.__name__
    return on_virtual_time(prepared)


# What is shown.


@with_config_service
async def test_every_setting_is_shown_with_its_default(kernel: Kernel, settings: RecordingSettings) -> None:
    view = await kernel.bus.ask(ShowConfig())
    assert view.source == "/f.toml"
    assert [one.key for one in view.settings] == list(Config.__slots__)
    assert await setting(kernel, "drain_timeout_s") == Setting(
        key="drain_timeout_s", value=10.0, default=10.0, live=True
    )
    assert await setting(kernel, "data_dir") == Setting(key="data_dir", value="/d", default="/d", live=False)
    assert (await setting(kernel, "listen")).value == ["tcp://127.0.0.1:7433"]


@with_config_service
async def test_show_config_hides_possible_secrets(kernel: Kernel, settings: RecordingSettings) -> None:
    shown = await setting(kernel, "plugins")
    assert shown.value == {"webhook": {"url": "u", "secret": HIDDEN, "list": [{"a": 1}]}}
    settings.wanted = replace(AT_START, plugins={"webhook": {"secret": "psst"}})
    await kernel.bus.ask(ReloadConfig())
    view = await kernel.bus.ask(ShowConfig())
    encoded = msgspec.msgpack.encode(view)
    assert b"hush" not in encoded
    assert b"psst" not in encoded


@pytest.mark.parametrize("request_", [ShowConfig(), ReloadConfig()])
@pytest.mark.parametrize("principal", [Principal("v", Role.VIEWER), Principal("o", Role.OPERATOR, frozenset({"a"}))])
@on_virtual_time
async def test_config_requests_of_non_operators_are_refused(request_: Any, principal: Principal) -> None:
    settings = RecordingSettings()
    async with running(register=settings.register) as kernel:
        with pytest.raises(RequestRefused) as caught:
            await kernel.bus.ask(request_, Call(principal, "a test"))
        assert caught.value.code == "forbidden"
        assert settings.reads == 0


# What a reload does.


@with_config_service
async def test_reload_applies_reloadable_settings_and_reports_pending_ones(
    kernel: Kernel, settings: RecordingSettings
) -> None:
    settings.wanted = replace(AT_START, drain_timeout_s=3.0, log_level="debug", http="127.0.0.1:1", plugins={})
    reloaded = await kernel.bus.ask(ReloadConfig())
    assert reloaded == Reloaded(["drain_timeout_s", "log_level"], ["http", "plugins"])
    assert settings.applied == [replace(AT_START, drain_timeout_s=3.0, log_level="debug")]
    assert settings.service.running == settings.applied[0]
    assert await setting(kernel, "drain_timeout_s") == Setting(
        key="drain_timeout_s", value=3.0, default=10.0, live=True
    )
    waiting = await setting(kernel, "http")
    assert (waiting.value, waiting.wanted, waiting.live) == ("", "127.0.0.1:1", False)
    assert (await setting(kernel, "plugins")).wanted == {}
    assert (await setting(kernel, "socket")).wanted is None


@with_config_service
async def test_pending_settings_are_reported_at_each_reload_until_reverted(
    kernel: Kernel, settings: RecordingSettings
) -> None:
    settings.wanted = replace(AT_START, http="127.0.0.1:1")
    assert (await kernel.bus.ask(ReloadConfig())).needs_restart == ["http"]
    assert (await kernel.bus.ask(ReloadConfig())).needs_restart == ["http"]
    settings.wanted = AT_START
    assert await kernel.bus.ask(ReloadConfig()) == Reloaded([], [])
    assert (await setting(kernel, "http")).wanted is None


@with_config_service
async def test_reload_without_changes_applies_nothing(kernel: Kernel, settings: RecordingSettings) -> None:
    settings.wanted = replace(AT_START, http="127.0.0.1:1")
    await kernel.bus.ask(ReloadConfig())
    assert settings.applied == []


@with_config_service
async def test_reload_fact_records_principal_and_cause(kernel: Kernel, settings: RecordingSettings) -> None:
    await kernel.add()
    settings.wanted = replace(AT_START, drain_timeout_s=3.0)
    cause = kernel.journal.last
    await kernel.bus.ask(ReloadConfig(), replace(call(), cause=cause))
    record = kernel.journal.after(cause, 1)[0]
    assert (record.fact, record.cause, record.origin) == (ConfigReloaded(["drain_timeout_s"], []), cause, "a test")


@with_config_service
async def test_sighup_reloads_like_a_request(kernel: Kernel, settings: RecordingSettings) -> None:
    settings.wanted = replace(AT_START, drain_timeout_s=3.0)
    outcome = await settings.service.reload("SIGHUP")
    await kernel.settle()
    assert outcome == ConfigReloaded(["drain_timeout_s"], []) == kernel.facts(ConfigReloaded)[0]
    assert kernel.journal.after(0, 1)[0].origin == "SIGHUP"


@on_virtual_time
async def test_reload_without_a_file_changes_nothing() -> None:
    def register(kernel: Kernel) -> None:
        ConfigService(kernel.bus, SettingsPort(), lambda _: pytest.fail("nothing is new"), AT_START)

    async with running(register=register, requests=REQUESTS) as kernel:
        assert await kernel.bus.ask(ReloadConfig()) == Reloaded([], [])
        assert (await kernel.bus.ask(ShowConfig())).source is None


# What goes wrong.

BAD = ConfigError("config_invalid", "f is not valid", "mend these", [Problem("a", 1, "2", line=3)])


@with_config_service
async def test_invalid_file_refuses_the_reload_with_its_problems(kernel: Kernel, settings: RecordingSettings) -> None:
    settings.wanted = replace(AT_START, drain_timeout_s=3.0, http="127.0.0.1:1")
    await kernel.bus.ask(ReloadConfig())
    settings.error = BAD
    with pytest.raises(RequestRefused) as caught:
        await kernel.bus.ask(ReloadConfig())
    assert (caught.value.code, caught.value.message) == ("config_refused", str(BAD))
    await kernel.settle()
    assert kernel.facts(ConfigRefused) == [ConfigRefused(str(BAD))]
    assert len(settings.applied) == 1
    assert (await setting(kernel, "drain_timeout_s")).value == 3.0
    assert (await setting(kernel, "http")).wanted == "127.0.0.1:1"


@pytest.mark.parametrize("error", [BAD, OSError(5, "broken"), RuntimeError("a bug"), Unavailable("x", "y")])
@on_virtual_time
async def test_failed_reload_by_sighup_does_not_raise(error: Exception) -> None:
    settings = RecordingSettings()
    async with running(register=settings.register) as kernel:
        settings.error = error
        outcome = await settings.service.reload("SIGHUP")
        await kernel.settle()
        assert isinstance(outcome, ConfigRefused)
        assert kernel.facts(ConfigRefused) == [outcome]


@on_virtual_time
async def test_settings_that_cannot_be_applied_are_refused_and_retried_at_the_next_reload() -> None:
    tries: list[Config] = []

    def apply(config: Config) -> None:
        tries.append(config)
        if len(tries) == 1:
            raise ValueError("boom")

    wanted = replace(AT_START, drain_timeout_s=3.0)

    async def read() -> Config:
        return wanted

    services: list[ConfigService] = []

    def register(kernel: Kernel) -> None:
        services.append(ConfigService(kernel.bus, SettingsPort(reload=read), apply, AT_START))

    async with running(register=register) as kernel:
        assert await services[0].reload("SIGHUP") == ConfigRefused("ValueError: boom")
        assert services[0].running == AT_START
        assert await kernel.bus.ask(ReloadConfig()) == Reloaded(["drain_timeout_s"], [])
        assert tries == [wanted, wanted]


@with_config_service
async def test_long_refusal_is_recorded_truncated(kernel: Kernel, settings: RecordingSettings) -> None:
    settings.error = ConfigError("config_invalid", "x" * (2 << 20) + "\udce9")
    assert isinstance(await settings.service.reload("SIGHUP"), ConfigRefused)
    await kernel.settle()
    assert len(kernel.facts(ConfigRefused)) == 1
    assert kernel.ledger.failures == 0


# Several errors of all kinds at once.


@with_config_service
async def test_concurrent_reloads_run_one_after_the_other(kernel: Kernel, settings: RecordingSettings) -> None:
    settings.gate = anyio.Event()
    outcomes: list[object] = []

    async def reload(drain_timeout_s: float) -> None:
        outcomes.append(await settings.service.reload(f"{drain_timeout_s}"))

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(reload, number)
        await settings.asked.wait()
        settings.wanted = replace(AT_START, drain_timeout_s=3.0)
        settings.gate.set()
    assert outcomes == [ConfigReloaded(["drain_timeout_s"], []), ConfigReloaded([], []), ConfigReloaded([], [])]
    assert settings.reads == 3
    assert len(settings.applied) == 1


@with_config_service
async def test_cancelled_reload_changes_nothing_and_allows_the_next(
    kernel: Kernel, settings: RecordingSettings
) -> None:
    settings.gate = anyio.Event()
    settings.wanted = replace(AT_START, drain_timeout_s=3.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(settings.service.reload, "SIGHUP")
        await settings.asked.wait()
        tasks.cancel_scope.cancel()
    assert (settings.applied, settings.service.running) == ([], AT_START)
    settings.gate.set()
    assert await settings.service.reload("SIGHUP") == ConfigReloaded(["drain_timeout_s"], [])


async def break_disk(kernel: Kernel, store: FaultyStore) -> None:
    """Let the ledger find out that nothing can be written."""
    store.commit_error = full()
    with pytest.raises(Unavailable):
        await kernel.add()
    while kernel.ledger.read_only is None or kernel.ledger.unavailable is not None:
        await anyio.sleep(0.1)


@on_virtual_time
async def test_reload_on_a_full_disk_applies_without_a_fact() -> None:
    settings, store = RecordingSettings(), FaultyStore()
    async with running(store, settings.register) as kernel:
        await break_disk(kernel, store)
        settings.wanted = replace(AT_START, drain_timeout_s=3.0)
        assert await kernel.bus.ask(ReloadConfig()) == Reloaded(["drain_timeout_s"], [])
        assert await settings.service.reload("SIGHUP") == ConfigReloaded([], [])
        assert settings.applied == [settings.wanted]
        settings.error = BAD
        assert await settings.service.reload("SIGHUP") == ConfigRefused(str(BAD))
        assert (await setting(kernel, "drain_timeout_s")).value == 3.0
        store.commit_error = None
        await kernel.ledger.writable()
        assert kernel.facts() == []
        settings.error = None
        await settings.service.reload("SIGHUP")
        await kernel.settle()
        assert kernel.facts() == [ConfigReloaded([], [])]


@on_virtual_time
async def test_settings_stay_applied_when_recording_the_reload_fails() -> None:
    settings, store = RecordingSettings(), FaultyStore()
    async with running(store, settings.register) as kernel:
        store.commit_error = full()
        settings.wanted = replace(AT_START, drain_timeout_s=3.0)
        with pytest.raises(Unavailable):
            await kernel.bus.ask(ReloadConfig())
        assert settings.applied == [settings.wanted]
        store.commit_error = None
        await kernel.ledger.writable()
        assert await kernel.bus.ask(ReloadConfig()) == Reloaded([], [])


@on_virtual_time
async def test_reload_fact_omits_a_rolled_back_cause() -> None:
    settings, store = RecordingSettings(), FaultyStore()
    async with running(store, settings.register) as kernel:
        settings.gate = anyio.Event()
        store.block()
        kernel.submit()
        pending = kernel.ledger.append(Decision(None, (Added(1, 1),)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(settings.service.reload, "SIGHUP", pending.revision)
            await settings.asked.wait()
            store.commit_error = full()
            store.unblock()
            while kernel.ledger.read_only is None:
                await anyio.sleep(0.1)
            store.commit_error = None
            await kernel.ledger.writable()
            assert kernel.ledger.revision < pending.revision
            settings.gate.set()
        await kernel.settle()
        assert [record.cause for record in kernel.journal.after(0, 10)] == [0]
