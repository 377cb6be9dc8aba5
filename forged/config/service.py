"""The settings on the bus.

Law: a reload takes hold as a whole or not at all, one after the other, and needs no store: it is put on record where
that can be done, and holds all the same where it cannot. A refused one leaves those that hold untouched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields

import anyio

from forged.config.messages import (
    ConfigRefused,
    ConfigReloaded,
    ConfigView,
    ReloadConfig,
    Reloaded,
    Setting,
    ShowConfig,
)
from forged.config.model import DEFAULTS, Config
from forged.config.redaction import shown
from forged.config.reload import LIVE, plan_reload
from forged.errors import RequestRefused, describe
from forged.kernel.bus import Bus
from forged.kernel.messages import Call, Decision

OWNER = "config"


@dataclass(frozen=True, slots=True)
class SettingsPort:
    """Where the settings come from. `reload` reads them anew; None where there is nothing to read."""

    reload: Callable[[], Awaitable[Config]] | None = None
    applied: Callable[[Config], None] = lambda config: None
    """Called with what holds from now on, for what is not the daemon's own."""
    defaults: Config = DEFAULTS
    source: str | None = None


class ConfigService:
    """Knows the settings that hold, and those that are wanted."""

    def __init__(self, bus: Bus, settings: SettingsPort, apply: Callable[[Config], None], running: Config) -> None:
        self.running = running
        """What holds now."""
        self._wanted = running
        self._bus = bus
        self._settings = settings
        self._apply = apply
        self._one_at_a_time = anyio.Lock()
        bus.serve(ShowConfig, lambda *_: self._view(), owner=OWNER)
        bus.serve(ReloadConfig, self._reload, owner=OWNER)

    async def reload(self, origin: str, cause: int = 0) -> ConfigReloaded | ConfigRefused:
        """Read the settings anew and let those hold that may; whatever goes wrong is told and raises nothing."""
        async with self._one_at_a_time:
            outcome: ConfigReloaded | ConfigRefused
            try:
                outcome = self._accept(await self._read())
            except Exception as error:  # noqa: BLE001 - a signal's reload must not be the daemon's end
                outcome = ConfigRefused(describe(error))
            self._put_on_record(outcome, origin, cause)
            return outcome

    async def _read(self) -> Config:
        return await self._settings.reload() if self._settings.reload else self.running

    def _accept(self, wanted: Config) -> ConfigReloaded:
        plan = plan_reload(self.running, wanted)
        if plan.changed:
            self._apply(plan.config)
            self._settings.applied(plan.config)
        self.running, self._wanted = plan.config, wanted
        return ConfigReloaded(list(plan.changed), list(plan.needs_restart))

    def _put_on_record(self, outcome: ConfigReloaded | ConfigRefused, origin: str, cause: int) -> None:
        ledger = self._bus.ledger
        if ledger.writable_now:
            # What was read anew from the store meanwhile may be without the cause.
            known = cause if cause <= ledger.revision else 0
            ledger.append(Decision(None, (outcome,)), cause=known, origin=origin)

    async def _reload(self, request: ReloadConfig, call: Call) -> Reloaded:
        outcome = await self.reload(call.origin, call.cause)
        if isinstance(outcome, ConfigRefused):
            fix = "mend it and reload again; `forged check-config` tells all that is wrong"
            raise RequestRefused("config_refused", outcome.reason, fix)
        return Reloaded(outcome.changed, outcome.needs_restart)

    def _view(self) -> ConfigView:
        waiting = plan_reload(self.running, self._wanted).needs_restart
        return ConfigView(
            self._settings.source, [self._setting(field.name, field.name in waiting) for field in fields(Config)]
        )

    def _setting(self, key: str, waits: bool) -> Setting:
        return Setting(
            key=key,
            value=shown(getattr(self.running, key)),
            default=shown(getattr(self._settings.defaults, key)),
            live=key in LIVE,
            wanted=shown(getattr(self._wanted, key)) if waits else None,
        )
