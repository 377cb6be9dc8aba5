"""Where things are when nobody says otherwise.

Law: the daemon and those who look for it agree, by calling the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping

ROOT_UID = 0
ROOT_DATA_DIR = "/var/lib/forged"
ROOT_SOCKET = "/run/forged/forged.sock"


def default_data_dir(environment: Mapping[str, str], uid: int) -> str:
    """Where the daemon of this user keeps its state."""
    if uid == ROOT_UID:
        return ROOT_DATA_DIR
    home = environment.get("HOME", "").rstrip("/")
    state = environment.get("XDG_STATE_HOME") or f"{home}/.local/state"
    return f"{state}/forged"


def default_socket(environment: Mapping[str, str], uid: int) -> str:
    """Where the daemon of this user listens."""
    if given := environment.get("FORGED_SOCKET"):
        return given
    if uid == ROOT_UID:
        return ROOT_SOCKET
    runtime = environment.get("XDG_RUNTIME_DIR")
    return f"{runtime}/forged.sock" if runtime else f"{default_data_dir(environment, uid)}/forged.sock"
