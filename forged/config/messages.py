"""What is said of the settings."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from forged.kernel.messages import Fact, Request


class ConfigReloaded(Fact, frozen=True):
    """The settings were read anew: those in `changed` hold from now on, the others have to wait for a restart."""

    changed: list[str]
    needs_restart: list[str]


class ConfigRefused(Fact, frozen=True):
    """The settings were read anew and are not valid; those that held before hold."""

    level: ClassVar[str] = "warning"

    reason: str


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. `live` tells that it may change while the daemon runs.

    `wanted` is what was asked for at the last reload, where that needs a restart; None where it is what holds.
    """

    key: str
    value: Any
    default: Any
    live: bool
    wanted: Any = None


class ConfigView(msgspec.Struct, frozen=True):
    """All settings that hold, and the file that they came from, if any."""

    source: str | None
    settings: list[Setting]


class Reloaded(msgspec.Struct, frozen=True):
    """What became of new settings."""

    changed: list[str]
    needs_restart: list[str]


class ShowConfig(Request[ConfigView], frozen=True):
    """All settings; what a plugin may hold as a secret is hidden."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


class ReloadConfig(Request[Reloaded], frozen=True):
    """Read the settings anew, and let those hold that may change while the daemon runs.

    It decides nothing that is kept in the store, so it works when nothing can be written there; doing it twice is as
    good as once.
    """

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


REQUESTS = (ShowConfig, ReloadConfig)
