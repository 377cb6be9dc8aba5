"""Facts, requests and views of plugins."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Fact, Nothing, Request

API_VERSION = 1
"""The version of the plugin API; a plugin names the version that it uses."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


class PluginState(StrEnum):
    """The state of a plugin."""

    ACTIVE = "active"
    QUARANTINED = "quarantined"
    """Inactive after too many failures; an operator can enable it again."""
    DISABLED = "disabled"
    """Inactive by an operator's request or setting."""
    REFUSED = "refused"
    """Not loaded, because loading or registering failed."""


class CommandView(msgspec.Struct, frozen=True):
    """A command of a plugin."""

    name: str
    help: str


class PluginView(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin; `reason` says why it is inactive, or its last failure."""

    name: str
    version: str
    origin: str
    state: PluginState
    reason: str | None
    parts: list[str]
    commands: list[CommandView]
    handled: int
    failed: int
    published: int


class PluginRefused(Fact, frozen=True):
    """A plugin was refused when the daemon started."""

    level: ClassVar[str] = "warning"

    plugin: str
    reason: str


class PluginQuarantined(Fact, frozen=True):
    """A part of a plugin failed too often; the whole plugin is inactive until an operator enables it."""

    level: ClassVar[str] = "warning"

    plugin: str
    part: str
    failures: int
    reason: str


class PluginEnabled(Fact, frozen=True):
    """A plugin is active again."""

    plugin: str


class PluginDisabled(Fact, frozen=True):
    """A plugin is inactive until it is enabled or the daemon restarts."""

    plugin: str


class ListPlugins(Request[list[PluginView]], frozen=True):
    """List all plugins that were found."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class EnablePlugin(Request[Nothing], frozen=True):
    """Activate a plugin; no error if it is active."""

    # Not a decision, so that it works while the store accepts no writes.
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None

    plugin: str


class DisablePlugin(Request[Nothing], frozen=True):
    """Deactivate a plugin; no error if it is inactive."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None

    plugin: str


class RunPluginCommand(Request[Any], frozen=True):
    """Run a command of a plugin; the reply is the plugin's."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    plugin: str
    command: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


REQUESTS = (ListPlugins, EnablePlugin, DisablePlugin, RunPluginCommand)
