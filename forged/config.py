"""The daemon's settings.

Law: settings are read once, checked as a whole, and frozen. Every mistake is reported at once, by key, with what would
be right; a key that nobody knows is a mistake too.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from forged.errors import ConfigError, Problem
from forged.net.network import Address
from forged.paths import default_data_dir, default_socket

DEFAULT_LISTEN = "127.0.0.1:7433"


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, by the names of their keys in the file."""

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
    anonymous_loopback_role: str = "worker"
    certificate_roles: Mapping[str, str] = field(default_factory=dict)
    journal_facts_max: int = 50_000
    connections_max: int = 4096
    frame_bytes_max: int = 4 << 20
    in_flight_max: int = 1024
    backlog_max: int = 50_000
    hello_timeout_s: float = 5.0
    frame_timeout_s: float = 10.0
    silence_max_s: float = 15.0


_RANGES: Mapping[str, tuple[float, float]] = {
    "socket_mode": (0, 0o777),
    "drain_timeout_s": (0, 3600),
    "journal_facts_max": (100, 10_000_000),
    "connections_max": (1, 1_000_000),
    "frame_bytes_max": (2 << 20, 1 << 30),
    "in_flight_max": (1, 1_000_000),
    "backlog_max": (100, 10_000_000),
    "hello_timeout_s": (0.1, 3600),
    "frame_timeout_s": (0.1, 3600),
    "silence_max_s": (1, 86_400),
}
_ROLES = ("none", "viewer", "worker", "operator")


def load(path: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str], uid: int) -> Config:
    """The settings of a file, under those of the command line, over the defaults of this user."""
    values = {} if path is None else _read(path)
    values |= {key: value for key, value in overrides.items() if value is not None}
    problems = list(_problems(values))
    if problems:
        source = "the command line" if path is None else str(path)
        raise ConfigError("config_invalid", f"{source} is not a valid configuration", "mend these keys", problems)
    return _complete(Config(**_frozen(values)), environment, uid)


def _complete(config: Config, environment: Mapping[str, str], uid: int) -> Config:
    data_dir = config.data_dir or default_data_dir(environment, uid)
    # Absolute, so that what `status` tells holds in every directory.
    return replace(
        config,
        data_dir=os.path.abspath(data_dir),  # noqa: PTH100 - Path.resolve would follow links
        socket=os.path.abspath(config.socket or default_socket(environment, uid)),  # noqa: PTH100
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config_unreadable", f"{path}: {error.strerror}", "name a file that can be read") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config_not_toml", f"{path}: {error}", "write it as TOML") from error


def _frozen(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    defaults = {setting.name: _default(setting) for setting in fields(Config)}
    for key, value in values.items():
        if key not in defaults:
            yield Problem(key, value, f"one of the known keys: {', '.join(defaults)}")
        elif not _same_kind(value, defaults[key]):
            yield Problem(key, value, _mode_hint(value) if key == "socket_mode" else _kind(defaults[key]))
        elif key in _RANGES and not _RANGES[key][0] <= value <= _RANGES[key][1]:
            yield Problem(key, value, f"{_RANGES[key][0]} to {_RANGES[key][1]}")
        else:
            yield from _meaning(key, value)
    yield from _tls_problems(values)


def _tls_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """What is set but would do nothing, or nothing safe, without its other half."""
    certificate, key, client_ca = (values.get(name) for name in ("tls_certificate", "tls_key", "tls_client_ca"))
    if bool(certificate) != bool(key):
        yield Problem("tls_key", key or "", "set together with tls_certificate")
    if client_ca and not certificate:
        yield Problem("tls_client_ca", client_ca, "set together with tls_certificate and tls_key")
    if values.get("certificate_roles") and not client_ca:
        yield Problem("certificate_roles", values["certificate_roles"], "set together with tls_client_ca")
    listen = values.get("listen")
    for address in listen if isinstance(listen, (list, tuple)) else ():
        if str(address).startswith("tls://") and not certificate:
            yield Problem("listen", address, "tcp://host:port, unless tls_certificate and tls_key are set")
    if str(values.get("http")).startswith("tls://"):
        yield Problem("http", values["http"], "host:port or tcp://host:port: it is served as plain HTTP only")


def _default(setting: Any) -> Any:
    return setting.default_factory() if callable(setting.default_factory) else setting.default


def _kind(default: Any) -> str:
    kinds = ((tuple, "a list of texts"), (float, "a number"), (int, "a whole number"), (Mapping, "a table of texts"))
    return next((name for kind, name in kinds if isinstance(default, kind)), "a text")


def _mode_hint(value: Any) -> str:
    """How to write a file mode: the digits that people give as text, or `0o660`."""
    digits = str(value).lower().removeprefix("0o").lstrip("0")
    return f"0o{digits}, without quotes" if digits and set(digits) <= set("01234567") else "a mode such as 0o660"


def _same_kind(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, Mapping):
        return isinstance(value, Mapping) and all(isinstance(one, str) for one in value.values())
    return isinstance(value, str)


def _meaning(key: str, value: Any) -> Iterator[Problem]:
    if key == "certificate_roles":
        for name, role in value.items():
            if role not in _ROLES[1:]:
                yield Problem(f"certificate_roles.{name}", role, f"one of {', '.join(_ROLES[1:])}")
    elif key.endswith("_role") and value not in _ROLES:
        yield Problem(key, value, f"one of {', '.join(_ROLES)}")
    elif key in ("listen", "http"):
        wanted = "tcp://host:port or tls://host:port" if key == "listen" else "host:port or tcp://host:port"
        for address in value if key == "listen" else [value] if value else []:
            try:
                if Address.parse(address).scheme == "unix":
                    yield Problem(key, address, f"{wanted}; the Unix socket is `socket`")
            except ConfigError:
                yield Problem(key, address, wanted)
