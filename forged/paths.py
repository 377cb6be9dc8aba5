"""The default data directory, socket path and endpoints.

The daemon and its clients use the same functions. systemd's directory variables are used by the daemon only: in a
client that runs as another service they name that service's directories.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

ROOT_UID = 0
ROOT_DATA_DIR = "/var/lib/forged"
ROOT_SOCKET = "/run/forged/forged.sock"


def default_data_dir(environment: Mapping[str, str], uid: int) -> str:
    """The data directory of this user's daemon."""
    return _first(environment.get("STATE_DIRECTORY")) or _own_data_dir(environment, uid)


def default_socket(environment: Mapping[str, str], uid: int) -> str:
    """The socket of this user's daemon."""
    if given := environment.get("FORGED_SOCKET"):
        return given
    if runtime := _first(environment.get("RUNTIME_DIRECTORY")):
        return f"{runtime}/forged.sock"
    return _own_socket(environment, uid, default_data_dir(environment, uid))


def client_socket(environment: Mapping[str, str], uid: int, exists: Callable[[str], bool] = os.path.exists) -> str:
    """The socket to connect to: the user's daemon, or the machine's if only that exists."""
    if given := environment.get("FORGED_SOCKET"):
        return given
    own = _own_socket(environment, uid, _own_data_dir(environment, uid))
    places = [own, ROOT_SOCKET]
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        # The directory of a systemd user service.
        places.insert(1, f"{runtime}/forged/forged.sock")
    return next(filter(exists, places), own)


def client_endpoints(environment: Mapping[str, str], uid: int) -> tuple[str, ...]:
    """The endpoints to connect to, the commas of `$FORGED_ENDPOINT` between them; else the socket."""
    given = tuple(filter(None, map(str.strip, environment.get("FORGED_ENDPOINT", "").split(","))))
    return given or (f"unix://{client_socket(environment, uid)}",)


def _own_data_dir(environment: Mapping[str, str], uid: int) -> str:
    if uid == ROOT_UID:
        return ROOT_DATA_DIR
    home = environment.get("HOME", "").rstrip("/")
    state = environment.get("XDG_STATE_HOME") or f"{home}/.local/state"
    return f"{state}/forged"


def _own_socket(environment: Mapping[str, str], uid: int, data_dir: str) -> str:
    if uid == ROOT_UID:
        return ROOT_SOCKET
    return f"{environment.get('XDG_RUNTIME_DIR') or data_dir}/forged.sock"


def _first(directories: str | None) -> str:
    """The first directory of systemd's list."""
    return (directories or "").split(":")[0].rstrip("/")
