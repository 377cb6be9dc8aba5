"""The daemon's settings and their validation.

Invariants:
- Settings are validated as a whole: all problems are reported at once, by key, with the allowed values. Unknown keys
  are problems.
- A `Config` is immutable, including its tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from forged.catalog.records import checked_location
from forged.config.redaction import DEPTH_MAX, HIDDEN, names_secret, redacted
from forged.errors import ConfigError, Problem, RequestRefused
from forged.net.transport.port import Address

DEFAULT_LISTEN = "127.0.0.1:7433"
PLUGIN_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
FRAME_OVERHEAD_BYTES = 64 << 10
"""What a connection holds besides a message of full size, at most."""
SIGNED_64_MIN = -(1 << 63)
UNSIGNED_64_MAX = (1 << 64) - 1


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({key: _frozen(inner) for key, inner in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, slots=True)
class Config:
    """All settings; the fields are named like the keys in the file."""

    data_dir: str = ""
    socket: str = ""
    socket_mode: int = 0o660
    listen: tuple[str, ...] = (f"tcp://{DEFAULT_LISTEN}",)
    http: str = ""
    drain_timeout_s: float = 10.0
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    unix_other_role: str = "none"
    own_user_loopback_role: str = "worker"
    anonymous_loopback_role: str = "none"
    certificate_roles: Mapping[str, str] = field(default_factory=dict)
    journal_facts_max: int = 50_000
    journal_bytes_max: int = 64 << 20
    connections_max: int = 4096
    handshakes_max: int = 256
    frame_bytes_max: int = 4 << 20
    connection_bytes_max: int = 16 << 20
    principal_bytes_max: int = 64 << 20
    daemon_bytes_max: int = 256 << 20
    job_shards_max: int = 1 << 22
    daemon_shards_max: int = 1 << 24
    checkpoint_roots: tuple[str, ...] = ()
    checkpoint_keep: int = 0
    checkpoint_max_age_s: float = 0.0
    checkpoint_keep_best: int = 0
    checkpoint_metric: str = "loss"
    checkpoint_metric_ascending: bool = True
    checkpoint_keep_every_steps: int = 0
    checkpoint_keep_every_s: float = 0.0
    checkpoint_chain_max: int = 0
    catalog_bytes_max: int = 512 << 20
    scrub_bytes_per_s: int = 0
    registry_bytes_max: int = 512 << 20
    slot_dir: str = ""
    slot_bytes_max: int = 64 << 30
    principal_slot_bytes_max: int = 48 << 30
    slots_max: int = 4096
    principal_slots_max: int = 3072
    memory_devices_max: int = 4096
    principal_memory_devices_max: int = 3072
    memory_blocks_max: int = 1 << 19
    principal_memory_blocks_max: int = 3 << 17
    memory_waiting_max: int = 512
    principal_memory_waiting_max: int = 384
    memory_eviction: str = "lru"
    in_flight_max: int = 1024
    backlog_max: int = 50_000
    hello_timeout_s: float = 5.0
    frame_timeout_s: float = 10.0
    silence_max_s: float = 15.0
    log_level: str = "info"
    log_format: str = "auto"
    log_facts_per_s_max: int = 100
    plugin_dir: str = ""
    plugin_load_timeout_s: float = 10.0
    plugin_failures_max: int = 5
    plugin_facts_per_s_max: float = 200.0
    plugin_block_max_s: float = 2.0
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for setting in fields(self):
            object.__setattr__(self, setting.name, _frozen(getattr(self, setting.name)))


RANGES: Mapping[str, tuple[float, float]] = {
    "socket_mode": (0, 0o777),
    "drain_timeout_s": (0, 3600),
    "journal_facts_max": (100, 10_000_000),
    "journal_bytes_max": (4 << 20, 1 << 40),
    "connections_max": (1, 1_000_000),
    "handshakes_max": (1, 1_000_000),
    "frame_bytes_max": (2 << 20, 1 << 30),
    "connection_bytes_max": (2 << 20, 1 << 40),
    "principal_bytes_max": (2 << 20, 1 << 40),
    "daemon_bytes_max": (4 << 20, 1 << 40),
    "job_shards_max": (1, 1 << 40),
    "daemon_shards_max": (1, 1 << 40),
    "checkpoint_keep": (0, 1 << 40),
    "checkpoint_max_age_s": (0, 1e10),
    "checkpoint_keep_best": (0, 1 << 40),
    "checkpoint_keep_every_steps": (0, 1 << 40),
    "checkpoint_keep_every_s": (0, 1e10),
    "checkpoint_chain_max": (0, 1 << 40),
    "catalog_bytes_max": (1 << 20, 1 << 40),
    "scrub_bytes_per_s": (0, 1 << 40),
    "registry_bytes_max": (1 << 20, 1 << 40),
    "slot_bytes_max": (0, 1 << 50),
    "principal_slot_bytes_max": (0, 1 << 50),
    "slots_max": (0, 1 << 20),
    "principal_slots_max": (0, 1 << 20),
    "memory_devices_max": (0, 1 << 20),
    "principal_memory_devices_max": (0, 1 << 20),
    "memory_blocks_max": (0, 1 << 30),
    "principal_memory_blocks_max": (0, 1 << 30),
    "memory_waiting_max": (0, 1 << 20),
    "principal_memory_waiting_max": (0, 1 << 20),
    "in_flight_max": (1, 1_000_000),
    "backlog_max": (100, 10_000_000),
    "hello_timeout_s": (0.1, 3600),
    "frame_timeout_s": (0.1, 3600),
    "silence_max_s": (1, 86_400),
    "log_facts_per_s_max": (0, 1_000_000),
    "plugin_load_timeout_s": (0.1, 300),
    "plugin_failures_max": (1, 1000),
    "plugin_facts_per_s_max": (0.1, 100_000),
    "plugin_block_max_s": (0.1, 3600),
}
ROLES = ("none", "viewer", "worker", "operator")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "unix_other_role": ROLES,
    "own_user_loopback_role": ROLES,
    "anonymous_loopback_role": ROLES,
    "memory_eviction": ("lru", "cost"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("auto", "json", "pretty"),
}
DEFAULTS = Config()


def find_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of settings that were read from a file or the command line."""
    for key, value in values.items():
        yield from _problems_of(key, value)
    yield from _tls_problems(values)
    yield from _byte_limit_problems(values)


def _problems_of(key: str, value: Any) -> Iterator[Problem]:
    known = [setting.name for setting in fields(Config)]
    if key not in known:
        nearest = get_close_matches(key.replace("-", "_").lower(), known, 1)
        yield Problem.unknown(
            key, HIDDEN if names_secret(key) else redacted(value), known, nearest[0] if nearest else None
        )
        return
    default = getattr(DEFAULTS, key)
    if not _has_kind(value, default):
        yield Problem(key, redacted(value), _mode_hint(value) if key == "socket_mode" else _kind(key, default))
    elif key in RANGES:
        if not RANGES[key][0] <= value <= RANGES[key][1]:
            yield Problem(key, value, _range(key))
    elif key in CHOICES:
        if value not in CHOICES[key]:
            yield Problem(key, value, _one_of(CHOICES[key]))
    elif isinstance(value, str) and "\0" in value:
        yield Problem(key, value, "a text without zero bytes")
    else:
        yield from _value_problems(key, value)


def _has_kind(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, Mapping if isinstance(default, Mapping) else str)


def _kind(key: str, default: Any) -> str:
    if key in RANGES:
        return f"a {'number' if isinstance(default, float) else 'whole number'}, {_range(key)}"
    if key in CHOICES:
        return _one_of(CHOICES[key])
    kinds = ((bool, "true or false"), (tuple, "a list of texts"), (Mapping, "a table"))
    return next((name for kind, name in kinds if isinstance(default, kind)), "a text")


def _range(key: str) -> str:
    low, high = RANGES[key]
    return f"{oct(int(low))} to {oct(int(high))}" if key == "socket_mode" else f"{low} to {high}"


def _one_of(choices: tuple[str, ...]) -> str:
    return f"one of {', '.join(choices)}"


def _mode_hint(value: Any) -> str:
    """How to write a file mode, for a mode that was given as text."""
    digits = str(value).lower().removeprefix("0o").lstrip("0") if isinstance(value, str) else ""
    octal = bool(digits) and set(digits) <= set("01234567")
    return f"0o{digits}, without quotes" if octal else f"a mode such as 0o660, {_range('socket_mode')}"


def _value_problems(key: str, value: Any) -> Iterator[Problem]:
    if key == "certificate_roles":
        yield from _certificate_role_problems(value)
    elif key == "plugins":
        yield from _plugin_problems(value)
    elif key == "checkpoint_roots":
        yield from _root_problems(value)
    elif key in ("listen", "http"):
        wanted = "tcp://host:port or tls://host:port" if key == "listen" else "host:port or tcp://host:port"
        for address in value if key == "listen" else [value] if value else []:
            yield from _address_problems(key, address, wanted)


def _address_problems(key: str, address: str, wanted: str) -> Iterator[Problem]:
    try:
        scheme = Address.parse(address).scheme if address.isprintable() and " " not in address else None
    except ConfigError:
        scheme = None
    if scheme is None:
        yield Problem(key, address, wanted)
    elif scheme == "unix":
        yield Problem(key, address, f"{wanted}; the Unix socket is `socket`")


def _root_problems(roots: tuple[str, ...]) -> Iterator[Problem]:
    for root in roots:
        try:
            checked_location("checkpoint_roots", root)
        except RequestRefused:
            wanted = "absolute paths, or URLs such as s3://bucket/{job}, without `..` and trailing slashes"
            yield Problem("checkpoint_roots", root, wanted)


def _certificate_role_problems(roles: Mapping[str, Any]) -> Iterator[Problem]:
    for name, role in roles.items():
        if role not in ROLES[1:]:
            yield Problem(f"certificate_roles.{name}", redacted(role), _one_of(ROLES[1:]) + _table_hint(name))


def _plugin_problems(plugins: Mapping[str, Any]) -> Iterator[Problem]:
    for name, settings in plugins.items():
        path = f"plugins.{name}"
        if not isinstance(settings, Mapping):
            found = HIDDEN if names_secret(name) else redacted(settings)
            yield Problem(path, found, "a table with the settings of this plugin" + _table_hint(name))
            continue
        if not PLUGIN_NAME.fullmatch(name):
            wanted = "a plugin's name: a to z, 0 to 9, _ and -, beginning with a letter, 64 at most"
            yield Problem(path, redacted(settings), wanted)
        if not isinstance(settings.get("enabled", True), bool):
            yield Problem(f"{path}.enabled", redacted(settings["enabled"]), "true or false")
        for key, value in settings.items():
            yield from _nested_problems(f"{path}.{key}", value, DEPTH_MAX)


def _table_hint(key: str) -> str:
    """A hint for a daemon setting that was added below a table."""
    return " (settings of the daemon stand above the first [table])" if key in Config.__slots__ else ""


def _nested_problems(path: str, value: Any, depth: int) -> Iterator[Problem]:
    """Values in a plugin's settings that cannot be compared or encoded."""
    if isinstance(value, (Mapping, list, tuple)):
        if not depth:
            yield Problem(path, "...", f"nested at most {DEPTH_MAX} levels deep")
            return
        inner = value.items() if isinstance(value, Mapping) else (("", one) for one in value)
        for key, one in inner:
            yield from _nested_problems(f"{path}.{key}" if key else path, one, depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, HIDDEN if names_secret(path) else value, "a finite number")
    elif isinstance(value, int) and not SIGNED_64_MIN <= value <= UNSIGNED_64_MAX:
        yield Problem(path, HIDDEN if names_secret(path) else value, "a whole number of 64 bits")


def _byte_limit_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Limits into which a message of full size, or the shares of two principals, do not fit: it would wait forever."""
    keys = ("frame_bytes_max", "connection_bytes_max", "principal_bytes_max", "daemon_bytes_max")
    limits = {key: values.get(key, getattr(DEFAULTS, key)) for key in keys}
    if any(True for key in keys for _ in _problems_of(key, limits[key])):
        return
    frame, connection, principal, daemon = limits.values()
    least = frame + FRAME_OVERHEAD_BYTES
    if connection < least:
        wanted = f"at least {least}: frame_bytes_max and {FRAME_OVERHEAD_BYTES} more"
        yield Problem("connection_bytes_max", connection, wanted)
    least = max(least, connection)
    if principal < least:
        yield Problem("principal_bytes_max", principal, f"at least {least}: the bytes of one connection")
    least = 2 * max(least, principal)
    if daemon < least:
        yield Problem("daemon_bytes_max", daemon, f"at least {least}: the bytes of two principals")


def _tls_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Settings that have no effect, or an unsafe one, without another setting."""
    certificate, key, client_ca = (values.get(name) for name in ("tls_certificate", "tls_key", "tls_client_ca"))
    if certificate and not key:
        yield Problem("tls_certificate", certificate, "set together with tls_key")
    if key and not certificate:
        yield Problem("tls_key", key, "set together with tls_certificate")
    if client_ca and not certificate:
        yield Problem("tls_client_ca", client_ca, "set together with tls_certificate and tls_key")
    roles = values.get("certificate_roles")
    if isinstance(roles, Mapping) and roles and not client_ca:
        yield Problem("certificate_roles", redacted(roles), "set together with tls_client_ca")
    listen = values.get("listen")
    for address in listen if isinstance(listen, (list, tuple)) else ():
        if isinstance(address, str) and address.startswith("tls://") and not certificate:
            yield Problem("listen", address, "tcp://host:port, unless tls_certificate and tls_key are set")
    http = values.get("http")
    if isinstance(http, str) and http.startswith("tls://"):
        yield Problem("http", http, "host:port or tcp://host:port, because it is plain HTTP")
