"""Serves and reloads the settings.

Invariants:
- A reload is applied as a whole or not at all; a refused reload changes nothing. Reloads run one at a time.
- A reload does not need the store: it is recorded if the store accepts writes, and applied in any case.
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
from forged.config.redaction import redacted
from forged.config.reload import LIVE, plan_reload
from forged.errors import RequestRefused, describe
from forged.kernel.bus import Bus
from forged.kernel.messages import Call, Decision

OWNER = "config"


@dataclass(frozen=True, slots=True)
class SettingsPort:
    """The source of the settings; `reload` reads them again, and is None without a source."""

    reload: Callable[[], Awaitable[Config]] | None = None
    applied: Callable[[Config], None] = lambda config: None
    """Called with the settings in force, for components outside the daemon."""
    defaults: Config = DEFAULTS
    source: str | None = None


class ConfigService:
    """Owns the settings in force and the wanted ones."""

    def __init__(self, bus: Bus, settings: SettingsPort, apply: Callable[[Config], None], running: Config) -> None:
        self.running = running
        """The settings in force."""
        self._wanted = running
        self._bus = bus
        self._settings = settings
        self._apply = apply
        self._one_at_a_time = anyio.Lock()
        bus.serve(ShowConfig, lambda *_: self._view(), owner=OWNER)
        bus.serve(ReloadConfig, self._reload, owner=OWNER)

    async def reload(self, origin: str, cause: int = 0) -> ConfigReloaded | ConfigRefused:
        """Reload the settings and record the outcome; never raises."""
        async with self._one_at_a_time:
            outcome: ConfigReloaded | ConfigRefused
            try:
                outcome = self._accept(await self._read())
            except Exception as error:  # noqa: BLE001 - a reload must not stop the daemon
                outcome = ConfigRefused(describe(error))
            self._record(outcome, origin, cause)
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

    def _record(self, outcome: ConfigReloaded | ConfigRefused, origin: str, cause: int) -> None:
        ledger = self._bus.ledger
        if ledger.writable_now:
            # After a reload of state from the store the cause may no longer exist.
            known = cause if cause <= ledger.revision else 0
            ledger.append(Decision(None, (outcome,)), cause=known, origin=origin)

    async def _reload(self, request: ReloadConfig, call: Call) -> Reloaded:
        outcome = await self.reload(call.origin, call.cause)
        if isinstance(outcome, ConfigRefused):
            fix = "fix it and reload again; `forged check-config` lists all problems"
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
            value=redacted(getattr(self.running, key)),
            default=redacted(getattr(self._settings.defaults, key)),
            live=key in LIVE,
            wanted=redacted(getattr(self._wanted, key)) if waits else None,
        )
