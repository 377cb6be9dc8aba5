"""Facts and requests about the settings."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from forged.kernel.messages import Fact, Request


class ConfigReloaded(Fact, frozen=True):
    """The settings were reloaded: `changed` are applied, `needs_restart` wait for a restart."""

    changed: list[str]
    needs_restart: list[str]


class ConfigRefused(Fact, frozen=True):
    """Reloaded settings were invalid; the previous settings stay in force."""

    level: ClassVar[str] = "warning"

    reason: str


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting; `live` means that a reload can change it.

    `wanted` is the value of the last reload if it needs a restart, else None.
    """

    key: str
    value: Any
    default: Any
    live: bool
    wanted: Any = None


class ConfigView(msgspec.Struct, frozen=True):
    """All settings in force, and the file that they came from, if any."""

    source: str | None
    settings: list[Setting]


class Reloaded(msgspec.Struct, frozen=True):
    """The result of a reload."""

    changed: list[str]
    needs_restart: list[str]


class ShowConfig(Request[ConfigView], frozen=True):
    """Show all settings; secrets of plugins are hidden."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


class ReloadConfig(Request[Reloaded], frozen=True):
    """Reload the settings and apply those that may change while the daemon runs.

    Nothing is decided in the store, so it works while the store accepts no writes.
    """

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


REQUESTS = (ShowConfig, ReloadConfig)
