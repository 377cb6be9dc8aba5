"""What becomes of new settings while the daemon runs.

Law: a setting either changes at once or stays as it is until a restart, and the operator is told which. What is merged
from both is what runs, so a setting that waits for a restart is told again at every reload until there was one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from forged.config.model import Config

LIVE = frozenset(
    {
        "drain_timeout_s",
        "unix_other_role",
        "anonymous_loopback_role",
        "certificate_roles",
        "journal_facts_max",
        "connections_max",
        "frame_bytes_max",
        "in_flight_max",
        "backlog_max",
        "hello_timeout_s",
        "frame_timeout_s",
        "silence_max_s",
        "log_level",
        "log_facts_per_s_max",
        "plugin_failures_max",
        "plugin_facts_per_s_max",
        "plugin_block_max_s",
    }
)
"""The settings that may change while the daemon runs."""


@dataclass(frozen=True, slots=True)
class Reload:
    """What runs from now on, what is new in it, and what was wanted and has to wait."""

    config: Config
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def plan_reload(running: Config, wanted: Config) -> Reload:
    """What of the wanted settings can be had now; both are complete, as `Settings` gives them."""
    different = [key for key in _keys() if getattr(running, key) != getattr(wanted, key)]
    changed = tuple(key for key in different if key in LIVE)
    needs_restart = tuple(key for key in different if key not in LIVE)
    return Reload(replace(running, **{key: getattr(wanted, key) for key in changed}), changed, needs_restart)


def _keys() -> list[str]:
    return [setting.name for setting in fields(Config)]
