"""What is said of plugins, and asked about them."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from forged.auth.model import Role
from forged.kernel.messages import ANY_JOB, Fact, Nothing, Request

API_VERSION = 1
"""What a plugin says that it was written for."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


class PluginState(StrEnum):
    """What has become of a plugin."""

    ACTIVE = "active"
    QUARANTINED = "quarantined"
    """Given up after too many failures in a row; it can be enabled again."""
    DISABLED = "disabled"
    """An operator wants it so."""
    REFUSED = "refused"
    """It was not taken in, and nothing of it is there."""


class CommandView(msgspec.Struct, frozen=True):
    """A command that a plugin brings."""

    name: str
    help: str


class PluginView(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin; `reason` says why it is not active, or what went wrong last."""

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
    """A plugin was not taken in when the daemon started."""

    level: ClassVar[str] = "warning"

    plugin: str
    reason: str


class PluginQuarantined(Fact, frozen=True):
    """A part of a plugin failed too many times in a row; all of the plugin is left out until it is enabled again."""

    level: ClassVar[str] = "warning"

    plugin: str
    part: str
    failures: int
    reason: str


class PluginEnabled(Fact, frozen=True):
    """A plugin takes part again."""

    plugin: str


class PluginDisabled(Fact, frozen=True):
    """A plugin takes no part until it is enabled, or the daemon starts anew."""

    plugin: str


class ListPlugins(Request[list[PluginView]], frozen=True):
    """Every plugin that was found."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB


class EnablePlugin(Request[Nothing], frozen=True):
    """Let a plugin take part again; no error where it does."""

    # Not a decision, so that it can be done while the store takes no writes.
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None

    plugin: str


class DisablePlugin(Request[Nothing], frozen=True):
    """Leave a plugin out; no error where it is."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None

    plugin: str


class RunPluginCommand(Request[Any], frozen=True):
    """Have a plugin do what one of its commands says; the reply is the plugin's."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    plugin: str
    command: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


REQUESTS = (ListPlugins, EnablePlugin, DisablePlugin, RunPluginCommand)
