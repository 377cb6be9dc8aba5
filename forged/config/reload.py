"""Decides which settings a reload changes.

Invariants:
- Settings in `LIVE` change at once; the others keep their value until a restart, and every reload until then reports
  them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from forged.config.model import Config

LIVE = frozenset(
    {
        "drain_timeout_s",
        "unix_other_role",
        "own_user_loopback_role",
        "anonymous_loopback_role",
        "certificate_roles",
        "journal_facts_max",
        "journal_bytes_max",
        "connections_max",
        "handshakes_max",
        "frame_bytes_max",
        "connection_bytes_max",
        "principal_bytes_max",
        "daemon_bytes_max",
        "job_shards_max",
        "daemon_shards_max",
        "checkpoint_roots",
        "checkpoint_keep",
        "checkpoint_max_age_s",
        "checkpoint_keep_best",
        "checkpoint_metric",
        "checkpoint_metric_ascending",
        "checkpoint_keep_every_steps",
        "checkpoint_keep_every_s",
        "checkpoint_chain_max",
        "catalog_bytes_max",
        "scrub_bytes_per_s",
        "registry_bytes_max",
        "slot_bytes_max",
        "principal_slot_bytes_max",
        "slots_max",
        "principal_slots_max",
        "memory_devices_max",
        "principal_memory_devices_max",
        "memory_blocks_max",
        "principal_memory_blocks_max",
        "memory_waiting_max",
        "principal_memory_waiting_max",
        "memory_eviction",
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
    """The settings after a reload, the changed keys, and the keys that need a restart."""

    config: Config
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def plan_reload(running: Config, wanted: Config) -> Reload:
    """Combine the running and the wanted settings; both are complete, as `Settings` returns them."""
    different = [key for key in _keys() if getattr(running, key) != getattr(wanted, key)]
    changed = tuple(key for key in different if key in LIVE)
    needs_restart = tuple(key for key in different if key not in LIVE)
    return Reload(replace(running, **{key: getattr(wanted, key) for key in changed}), changed, needs_restart)


def _keys() -> list[str]:
    return [setting.name for setting in fields(Config)]
