"""The names that plugins import; see docs/plugins.md."""

from __future__ import annotations

from forged.auth.model import Role
from forged.errors import ConfigError, ForgedError, Problem, RequestRefused, Unavailable
from forged.kernel.messages import ANY_JOB, Call, Decision, Fact, Gap, Nothing, Record, Request, Signal
from forged.plugins.context import Feed, PluginContext
from forged.plugins.model import API_VERSION
from forged.plugins.rendering import to_json

__all__ = [
    "ANY_JOB",
    "API_VERSION",
    "Call",
    "ConfigError",
    "Decision",
    "Fact",
    "Feed",
    "ForgedError",
    "Gap",
    "Nothing",
    "PluginContext",
    "Problem",
    "Record",
    "Request",
    "RequestRefused",
    "Role",
    "Signal",
    "Unavailable",
    "to_json",
]
